from tests.retention.conftest import backbone, ids  # noqa: F401 (fixtures)
