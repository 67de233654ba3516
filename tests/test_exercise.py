import pytest

from plpkg.exercise import check_number


def check(answer):
    return check_number(answer, 10, "fingers", 0.01, "ten.", {20: "that is twice."}, "Count fingers.")


@pytest.mark.parametrize(
    ("answer", "right", "message"),
    [
        (10, True, "Right: ten."),
        ("10.05", True, "Right: ten."),
        (None, False, "No answer yet: replace None by your prediction and run the cell again."),
        (20, False, "Not yet: that is twice."),
        (11, False, "Not yet, 11 is too large. Count fingers."),
        (-10, False, "Not yet, -10 is too small. Count fingers."),
        ("10 ms", False, "A bare number of fingers is wanted here, got '10 ms'."),
        (10_000, False, "Not yet: the right digits in another unit; fingers is wanted (prefixes are decimal)."),
        (0.1, False, "Not yet: the right digits in another unit; fingers is wanted (prefixes are decimal)."),
        (1.25, False, "Not yet: the right digits in another unit; fingers is wanted (prefixes are decimal)."),
    ],
)
def test_verdicts(answer, right, message):
    verdict = check(answer)
    assert bool(verdict) is right
    assert repr(verdict) == message


def test_html_is_escaped():
    assert "&lt;b&gt;" in check("<b>")._repr_html_()
