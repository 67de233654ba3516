"""The executions: what is done with each parameter when its gradient is known. They differ in cost alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from plpkg.clipping.factors import Norm, Outer


class Keep(StrEnum):
    """The part of a parameter's gradients that is kept until the clipping factors are known."""

    FACTORS = "factors"
    GRADIENT = "gradient"
    """Each example's."""
    NOTHING = "nothing"
    """Then a second backward pass computes the sum."""


@dataclass(frozen=True)
class Choice:
    """How a parameter's norm is computed, and what is kept of its gradient.

    Attributes
    ----------
    norm
        ``gram`` or ``instantiate``.
    keep
        Until the clipping factors are known: its ``factors``, its per-sample ``gradient``, or ``nothing``: then a
        second backward pass computes the sum.

    Raises
    ------
    ValueError
        Another word.
    """

    norm: Norm | str
    keep: Keep | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", Norm(self.norm))
        object.__setattr__(self, "keep", Keep(self.keep))

    def __call__(self, uses: Sequence[Outer]) -> "Choice":
        """A choice is the rule that chooses itself for every parameter."""
        return self


@dataclass(frozen=True)
class Execution:
    """How a step is computed.

    Attributes
    ----------
    choose
        Gets a parameter's uses (factors); gives its :class:`Choice`.
    two_passes
        Whether the graph is kept for a second backward pass, which computes the sums that nothing was kept for.
    """

    choose: Callable[[Sequence[Outer]], Choice]
    two_passes: bool = False


def smaller(uses: Sequence[Outer]) -> Choice:
    """Book-keeping's rule: the gradient, unless it takes more than twice the factors' bytes.

    A gradient that is kept is built instead of the weight gradient, so that only its norm is extra work; factors need
    Gram matrices beside it.
    """
    if not uses:
        return Choice(Norm.INSTANTIATE, Keep.GRADIENT)
    first = uses[0]
    groups = first.cols.shape[1]
    weights = first.shape.numel()
    rows = first.num_rows * groups  # a convolution's groups count as rows
    columns = weights // rows
    positions = sum(use.positions for use in uses)
    factors = positions * (rows + columns)  # numbers of an example, beside the gradient's `weights`
    one_hot = any(use.one_hot for use in uses)
    if weights <= 2 * factors and not one_hot:
        return Choice(Norm.INSTANTIATE, Keep.GRADIENT)
    if factors <= weights:
        return Choice(Norm.GRAM, Keep.FACTORS)
    return Choice(Norm.INSTANTIATE, Keep.FACTORS)


EXECUTIONS: Mapping[str, Execution] = {
    "per_sample": Execution(Choice(Norm.INSTANTIATE, Keep.GRADIENT)),
    "fast": Execution(Choice(Norm.INSTANTIATE, Keep.NOTHING), two_passes=True),
    "ghost": Execution(Choice(Norm.GRAM, Keep.NOTHING), two_passes=True),
    "book_keeping": Execution(smaller),
}
LOOP = Execution(Choice(Norm.INSTANTIATE, Keep.GRADIENT))
"""One example at a time through autograd: nothing is watched, and nothing is chosen."""
