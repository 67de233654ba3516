"""A criterion of a private training: it gives one loss an example, and their ``backward()`` clips."""

import copy
from collections.abc import Callable

import torch

from plpkg.validation import one_of


class PrivateCriterion:
    """A criterion whose losses clip when they go backward; ``private`` is the training that they belong to.

    Raises
    ------
    ValueError
        The criterion's mean mixes examples, or its reduction is unknown.
    """

    def __init__(self, criterion: Callable, private) -> None:
        self.averages = _averages(criterion)
        self._plain, self._private = criterion, private
        self._ignored = getattr(criterion, "ignore_index", None)
        if hasattr(criterion, "reduction"):
            criterion = copy.copy(criterion)
            criterion.reduction = "none"
        self._unreduced = criterion

    def __call__(self, output, target, **options) -> "PrivateLoss | torch.Tensor":
        """One loss an example, reduced for show; of an output without a gradient, what the criterion gave before.

        Raises
        ------
        ValueError
            The criterion has mixed the examples.
        """
        if isinstance(output, torch.Tensor) and not output.requires_grad:
            return self._plain(output, target, **options)
        losses = self._unreduced(output, target, **options)
        parts = self._by_example(losses, output, target)
        sums = parts.sum(1)
        if self.averages:
            counts = torch.full_like(sums, parts.shape[1])
            if self._ignored is not None and isinstance(target, torch.Tensor) and target.numel() == losses.numel():
                counts = (target.reshape(parts.shape) != self._ignored).sum(1).clamp(min=1).to(sums)
            sums = sums / counts
        return PrivateLoss(sums, self._private)

    def _by_example(self, losses, output, target) -> torch.Tensor:
        """The losses as ``(batch, targets of an example)``."""
        batch = self._private.recorder.batch
        if not isinstance(losses, torch.Tensor) or losses.ndim == 0:
            given = "one number" if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(f"the criterion gave {given} for {batch} examples: it must not reduce (reduction='none')")
        tensors = [x for x in (output, target) if isinstance(x, torch.Tensor)]
        if tensors and losses.numel() > max(x.numel() for x in tensors):
            shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
            raise ValueError(
                f"the criterion made losses of shape {tuple(losses.shape)} from {shapes}: it broadcast them"
            )
        if len(losses) != batch:
            raise ValueError(
                f"the criterion gave losses of shape {tuple(losses.shape)} for {batch} examples: whose they are "
                "cannot be seen; keep an example's together, criterion(logits.transpose(1, 2), targets) for "
                "logits of (batch, seq, classes)"
            )
        return losses.reshape(batch, -1) if batch else losses.reshape(0, 1)


class PrivateLoss:
    """The losses of a batch: ``backward()`` clips each example's gradient and adds them up for the next step."""

    def __init__(self, losses: torch.Tensor, private) -> None:
        self.losses, self._private = losses, private

    def backward(self) -> None:
        """Clip and add up. Once for each forward pass."""
        self._private.add(self.losses)

    def item(self) -> float:
        """The mean (or sum) over the batch; 0 for an empty one. Not private: do not publish it."""
        total = self.losses.detach().sum().item()
        return total / max(1, len(self.losses)) if self._private.criterion.averages else total

    def detach(self) -> torch.Tensor:
        """:meth:`item` as a tensor."""
        return torch.tensor(self.item())

    def __float__(self) -> float:
        return self.item()

    def _refuse(self, *_) -> None:
        raise TypeError(
            "a private loss goes backward as it is: scale losses or add to them inside of the criterion, example by "
            "example; micro-batches need no division, and float(loss) is a number to show"
        )

    def __truediv__(self, number: float) -> "PrivateLoss":
        """Divided by 1 it is what it was: accelerate divides by its gradient accumulation steps."""
        return self if number == 1 else self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pow__ = _refuse

    def __repr__(self) -> str:
        return f"PrivateLoss({self.item():.4f} over {len(self.losses)} examples)"


def _averages(criterion: Callable) -> bool:
    """Whether a loss module takes the mean; a function's losses are averaged over examples."""
    reduction = getattr(criterion, "reduction", "mean")
    if reduction == "mean" and isinstance(getattr(criterion, "weight", None), torch.Tensor):
        raise ValueError(
            f"the mean of {type(criterion).__name__} with weights divides by those of the whole batch, which mixes "
            "examples: take reduction='sum'"
        )
    return one_of("the criterion's reduction", reduction, ("mean", "sum", "none")) != "sum"
