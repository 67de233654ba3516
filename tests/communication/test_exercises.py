import pytest

from plpkg.communication import exercises


@pytest.mark.parametrize(
    ("checker", "right", "wrong", "hint"),
    [
        (exercises.kv_heads, 3145.728, 6291.456, "keys and values have only 8 heads"),
        (exercises.half_from_endpoints, 42.7, 128, "counts one projection"),
        (exercises.round_trips, 41, 40, "before the first layer"),
    ],
)
def test_checkers(checker, right, wrong, hint):
    assert checker(right)
    assert "No answer yet" in repr(checker(None))
    verdict = checker(wrong)
    assert not verdict
    assert hint in verdict.message
    assert not checker(right * 3)
