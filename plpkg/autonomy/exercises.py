"""The checkers of notebook 08's exercises."""

from operator import ge, gt
from random import Random

from plpkg.show.exercise import Verdict, check_function

BODY, HEAD, WORDS = 4 * (64 * 128 + 128 * 128 + 128 * 96 + 96 * 96), 96 * 10_000, 12
"""Multiply-adds of the word predictor: of its body a word, of its head, and how many words a sample has."""

Stream = tuple[list[int], list[int], list[int], int]

TELLING: Stream = (
    [0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0],
    [1, 1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1],
    [1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0],
    2,
)
"""Public and personal predictions, labels and an allowance for which each likely slip shows something else."""


def guarded(function: object) -> Verdict:
    """``guarded(public, personal, right, allowance)``: what the guard shows, each label being told at once."""
    random, streams = Random(0), [TELLING]
    for _ in range(60):
        length, allowance = random.randint(1, 12), random.randint(0, 2)
        public, personal, right = ([random.randint(0, 1) for _ in range(length)] for _ in range(3))
        streams.append((public, personal, right, allowance))
    cases = [(stream, _shown(*stream)) for stream in streams]
    explanation = "the personal head's is shown while it leads and while what it may lose is not spent."
    return check_function(function, cases, explanation, _of_guarded)


def _shown(public: list, personal: list, right: list, allowance: int, leads=gt, peeks=False, as_well=False) -> list:
    """The predictions that a guard shows; it may peek at the label, or spend the public model's errors as well."""
    shown, lead, spent = [], 0, 0
    for one, other, truth in zip(public, personal, right, strict=True):
        won = (other == truth) - (one == truth)
        shown.append(other if leads(lead + won * peeks, 0) and spent < allowance else one)
        lead += won
        spent += (as_well or one == truth) - (shown[-1] == truth)
    return shown


def _of_guarded(got, public: list, personal: list, right: list, allowance: int) -> str:
    if not isinstance(got, list) or len(got) != len(right):
        return f"a list of {len(right)} predictions is wanted"
    case = public, personal, right, allowance
    if got == _shown(*case, leads=ge):
        return "the personal head leads if it was right strictly more often: lead > 0"
    best = [other if other == truth else one for one, other, truth in zip(public, personal, right, strict=True)]
    if got in (best, _shown(*case, peeks=True)):
        return "the label is told after the prediction is shown: until then it cannot count"
    if got == _shown(public, personal, right, allowance + 1):
        return "at the allowance nothing is left to spend: spent < allowance"
    if got == personal:
        return "that is the personal head alone"
    if got == _shown(public, personal, right, len(right) + 1):
        return "nothing stops it: errors are spent as they are shown, and at the allowance the public model is shown"
    if got == _shown(*case, as_well=True):
        return "an error that the public model makes as well costs nothing"
    if got == public:
        return "the personal head is judged by every label, also while the public model is shown"
    excess = sum((p == r) - (g == r) for p, g, r in zip(public, got, right, strict=True))
    return f"{excess} errors more than the public model's, {allowance} allowed" if excess > allowance else ""
