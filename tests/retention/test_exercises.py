import pytest

from plpkg.retention import exercises


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [(16_384, "left after a cut"), (16_484, "left at the end"), (131_072, "full cache"), (17_508, "has been cut")],
)
def test_peak_units(wrong, hint):
    assert exercises.peak_units(17_408)
    assert "No answer yet" in repr(exercises.peak_units(None))
    verdict = exercises.peak_units(wrong)
    assert not verdict
    assert hint in verdict.message
    assert "too small" in exercises.peak_units(12).message
