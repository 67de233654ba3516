import pytest

from plpkg.residual import exercises


@pytest.mark.parametrize(("wrong", "hint"), [(4096, "how many entries"), (63, "one direction open"), (1, "a single u")])
def test_tokens_until_m(wrong, hint):
    assert exercises.tokens_until_m(64)
    assert "No answer yet" in repr(exercises.tokens_until_m(None))
    verdict = exercises.tokens_until_m(wrong)
    assert not verdict
    assert hint in verdict.message
    assert not exercises.tokens_until_m(192)
