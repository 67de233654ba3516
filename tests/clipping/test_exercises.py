"""The checkers know right answers and likely slips."""

import pytest

from plpkg.clipping import exercises


@pytest.mark.parametrize("answer", [29, 29.0, 28.99])
def test_gib_right(answer):
    assert exercises.per_sample_gib(answer)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (0.0283, "each of the 1,024 examples"), (14.5, "4 bytes"), (7.25, "each has 4 bytes"),
        (None, "No answer yet"), (500, "too large"),
    ],
)  # fmt: skip
def test_gib_wrong(answer, said):
    verdict = exercises.per_sample_gib(answer)
    assert not verdict
    assert said in verdict.message


def test_crossover():
    assert exercises.crossover_positions(384)
    for answer, said in ((543, "rule of bytes"), (768, "both Gram"), (192, "two operations"), (100, "too small")):
        verdict = exercises.crossover_positions(answer)
        assert not verdict
        assert said in verdict.message
