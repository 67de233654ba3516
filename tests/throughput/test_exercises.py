import pytest

from plpkg.throughput import exercises


@pytest.mark.parametrize(
    ("checker", "right", "wrong", "hint"),
    [
        (exercises.lm_head_share, 16.6, 23.24, "share of the decoder's time"),
        (exercises.rtt_for_half, 1.12, 37.0, "1 + 32"),
        (exercises.rtt_for_half, 1.12, 1.156, "one more round trip"),
        (exercises.lm_head_share, 16.6, 0.166, "another unit"),
    ],
)
def test_checkers(checker, right, wrong, hint):
    assert checker(right)
    assert "No answer yet" in repr(checker(None))
    verdict = checker(wrong)
    assert not verdict
    assert hint in verdict.message
    assert not checker(right * 3)
