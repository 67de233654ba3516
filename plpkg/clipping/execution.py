"""What is done with each parameter when its gradient is known: the executions, which differ in cost alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plpkg.clipping.factors import Outer


@dataclass(frozen=True)
class Choice:
    """What is done with a parameter when its gradient is known.

    Attributes
    ----------
    norm
        ``gram`` or ``instantiate``.
    keep
        Until the clipping factors are known: its ``factors``, its per-sample ``gradient``, or ``nothing``: then a
        second backward pass computes the sum.
    """

    norm: str
    keep: str

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

    A gradient that is kept takes the place of the weight gradient, so that its norm is all it costs; factors need
    Gram matrices beside it.
    """
    if not uses:
        return Choice("instantiate", "gradient")
    weights = uses[0].shape.numel()
    rows = uses[0].num_rows * uses[0].cols.shape[1]  # a convolution's groups count as rows
    sides = sum(use.positions for use in uses) * (rows + weights // rows)
    if weights <= 2 * sides and not any(use.one_hot for use in uses):
        return Choice("instantiate", "gradient")
    return Choice("gram" if sides <= weights else "instantiate", "factors")


EXECUTIONS: Mapping[str, Execution] = {
    "per_sample": Execution(Choice("instantiate", "gradient")),
    "fast": Execution(Choice("instantiate", "nothing"), two_passes=True),
    "ghost": Execution(Choice("gram", "nothing"), two_passes=True),
    "book_keeping": Execution(smaller),
}
LOOP = Execution(Choice("instantiate", "gradient"))
"""One example at a time through autograd: nothing is watched, and nothing is chosen."""
