"""Cases to try a private training on: a model, a batch, a criterion, and in which pieces and after what they come."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from plpkg.clipping.batches import batch_size, examples, named
from plpkg.validation import number, whole_number

Batch = tuple
"""``(inputs, target)``: a tuple of tensors for the model, and a tensor; of users also ``(batch,)`` of ids."""


@dataclass(frozen=True, eq=False)
class Case:
    """A training to be tried, small and without dropout: its updates are compared with each other.

    Attributes
    ----------
    name
        For reports.
    model
        ``model()`` gives a new model in training mode.
    batch
        ``(inputs, target)``: a tuple of tensors for the model, and a tensor. The first dimension of each is the batch.
    criterion
        A loss module; or a function of output and target that gives one loss an example.
    micro_batch
        The examples come in pieces of so many; ``None``: at once.
    before
        ``before(batch)`` gives another such batch, for a step of its own before that of ``batch``.
    users
        ``(batch,)``: whose each example is, if a user's examples are to be clipped together.
    max_grad_norm
        C; ``None``: the median norm, so that about half of the gradients are clipped.
    lesson
        A sentence about what goes wrong here.
    expects_actual
        Whether whoever trains takes the batch's size for the expected one.

    Raises
    ------
    ValueError
        Micro-batches of less than one example, C that is not positive, not one user an example.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Batch
    criterion: Callable
    micro_batch: int | None = None
    before: Callable[[Batch], Batch] | None = None
    users: torch.Tensor | None = None
    max_grad_norm: float | None = None
    lesson: str = ""
    expects_actual: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            whole_number("micro_batch", self.micro_batch, 1)
        if self.max_grad_norm is not None:
            number("max_grad_norm", self.max_grad_norm, open_low=True)
        if self.users is not None:
            named(self.users, self.size)

    def build(self) -> nn.Module:
        """The model, the same in each call."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would write down who called, for CUDA
            return self.model()

    def loss_module(self) -> Callable:
        """The criterion in the shape of a loss module."""
        return copy.copy(self.criterion) if hasattr(self.criterion, "reduction") else Losses(self.criterion)

    @cached_property
    def size(self) -> int:
        """How many examples there are."""
        return batch_size(self.batch)

    @property
    def sample(self) -> Batch:
        """The batch, with whose the examples are."""
        return self.batch if self.users is None else (*self.batch, self.users)

    def pieces(self, sample: Batch) -> list[Batch]:
        """The micro-batches of some of the examples; of none, one that is empty."""
        size = self.micro_batch or max(1, batch_size(sample))
        starts = range(0, max(1, batch_size(sample)), size)
        return [examples(sample, slice(start, start + size)) for start in starts]


@dataclass
class Losses:
    """A function that gives one loss an example, as a loss module: libraries set its ``reduction`` to ``none``."""

    losses: Callable
    reduction: str = "mean"

    def __call__(self, output, target) -> torch.Tensor:
        losses = self.losses(output, target)
        return losses if self.reduction == "none" else getattr(losses, self.reduction)()


def one_loss_each(criterion: Callable) -> Callable:
    """``losses(model, batch)`` of a loss module, for batches ``(inputs, target)``: of an example's losses the mean over
    its targets that count, or the sum.
    """
    each = copy.copy(criterion)
    each.reduction = "none"
    sums = criterion.reduction == "sum"

    def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, target = batch
        parts = each(model(*inputs), target)
        parts = parts.reshape(len(parts), -1)
        if sums:
            return parts.sum(1)
        seen = torch.ones_like(parts)
        ignored = getattr(criterion, "ignore_index", None)
        if ignored is not None and parts.numel() == target.numel():  # a class each, and not probabilities
            seen = target.reshape(parts.shape) != ignored
        return parts.sum(1) / seen.sum(1).clamp(min=1)

    return losses


def learning(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, the parameters that learn."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradient(case: Case, sample: Batch) -> dict[str, torch.Tensor]:
    """By parameter, the gradient of the criterion's loss of a batch, by autograd."""
    model = case.build()
    criterion = case.loss_module()
    parameters = learning(model)
    inputs, target, *_ = sample
    loss = criterion(model(*inputs), target)
    gradients = torch.autograd.grad(loss, tuple(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))
