"""The sum of clipped per-sample gradients of any model, in several executions that give the same numbers.

* ``loop``: one example at a time through autograd: the definition, and the oracle of all others.
* ``per_sample``: every example's gradient is built and kept, as DP-SGD says. Memory grows with batch × weights.
* ``fast``: fast gradient clipping (Lee & Kifer, arXiv 2009.03106): gradients are built layer by layer for their
  norms, and dropped; a second backward pass adds them up.
* ``ghost``: the same with norms from Gram matrices (Li et al., arXiv 2110.05679): nothing of a weight's size is built.
* ``book_keeping``: one pass (Bu et al., arXiv 2210.00038). Gradients are kept, or factors where those are much smaller.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType

import torch

from plpkg.clipping.batches import batch_size, check_losses, examples, numbered
from plpkg.clipping.clip import Clip, check_finite, clip_dense, zeros_for
from plpkg.clipping.dropout import RandomState
from plpkg.clipping.execution import EXECUTIONS, Execution
from plpkg.clipping.layers import LOOP_TAKES_IT
from plpkg.clipping.mixing import Guard
from plpkg.clipping.recorder import Recorder
from plpkg.validation import one_of

Gradients = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The sums of clipped gradients by parameter, and the norms before clipping, ``(batch,)`` or ``(users,)``."""


def clipped_gradients(
    model: torch.nn.Module,
    loss_per_example: Callable,
    batch,
    max_grad_norm: float,
    execution: str | Execution = "book_keeping",
    *,
    clipping: str = "flat",
    users: torch.Tensor | Sequence[Hashable] | None = None,
) -> Gradients:
    """Clip each example's gradient, or each user's, and add them up.

    Parameters
    ----------
    model
        Its parameters with ``requires_grad`` are those whose gradients are wanted. Their ``.grad`` stay as they are.
    loss_per_example
        ``loss_per_example(model, batch)`` calls the model and gives one loss an example, ``(batch,)``. It depends on
        that example alone, which is checked in the first steps, at new shapes, and now and then
        (:mod:`plpkg.clipping.mixing`).
    batch
        A tensor, or tensors in tuples, lists and mappings; the first dimension of each is the batch.
    max_grad_norm
        C, the L2 norm beyond which an example's gradient is scaled down; for ``per_layer`` also one for each layer.
    execution
        A name of the module's list.
    clipping
        ``flat``, ``automatic`` or ``per_layer``: see :mod:`plpkg.clipping.clip`.
    users
        Whose each example is. A user's gradient, which is clipped, is that of the sum of their examples' losses.

    Returns
    -------
    (gradients, norms)
        By parameter name the sum over examples of clipped gradients, in the parameter's shape and at least float32;
        the norms before clipping, ``(batch,)``, or ``(users,)`` in the order of each one's first example.

    Raises
    ------
    ValueError
        Bad arguments, a loss that is not one an example, a layer that mixes examples, a layer without the batch first.
    NotImplementedError
        A gradient that cannot be taken apart; the message names the parameter or the layer.
    FloatingPointError
        A gradient that is not finite.
    """
    clip = Clip(max_grad_norm, clipping)
    if not isinstance(execution, Execution):
        one_of("execution", execution, ("loop", *EXECUTIONS))
    owners = None if users is None else numbered(users, batch_size(batch))
    with _watching(model, loss_per_example, batch, clip, owners, alone=execution == "loop") as step:
        if execution == "loop":
            return step.loop()
        return step.recorded(EXECUTIONS[execution] if isinstance(execution, str) else execution)


_GUARDS: weakref.WeakKeyDictionary[torch.nn.Module, dict[Hashable, Guard]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Step:
    """One step's gradients: each method gives the sums by parameter, and the norms before clipping."""

    recorder: Recorder
    loss_per_example: Callable
    batch: object
    clip: Clip
    owners: torch.Tensor | None = None

    def loop(self) -> Gradients:
        """The definition: example by example, or user by user, through autograd."""
        parameters = self.recorder.parameters
        totals, norms = {name: zeros_for(p) for name, p in parameters.items()}, []
        owners = torch.arange(batch_size(self.batch)) if self.owners is None else self.owners
        count = len(owners.unique())
        model, guard = self.recorder.model, self.recorder.guard
        for place in range(count):
            with self.recorder.set_aside():
                theirs = (owners == place).nonzero().flatten()
                guard.stand(model)
                losses = self._losses(examples(self.batch, theirs), len(theirs))
                guard.still(model)
                losses.sum().backward()
                gradients = {n: zeros_for(p) if p.grad is None else p.grad for n, p in parameters.items()}
            dense = {name: gradient.to(totals[name].dtype)[None] for name, gradient in gradients.items()}
            sums, norm = clip_dense(dense, self.clip, self.recorder.layers)
            check_finite(norm, place, count)
            norms.append(norm)
            for name, part in sums.items():
                totals[name] += part
        return totals, torch.cat(norms) if norms else next(iter(totals.values())).new_zeros(0)

    def recorded(self, execution: Execution) -> Gradients:
        """The gradients by a recorded backward pass."""
        parameters, count = self.recorder.parameters, batch_size(self.batch)
        if count == 0:  # many models cannot run on no examples
            zeros = {name: zeros_for(p) for name, p in parameters.items()}
            return zeros, next(iter(zeros.values())).new_zeros(0)
        with self.recorder.watch(count):
            before = RandomState()
            losses = self._losses(self.batch, count)
            if not self.recorder.called:
                raise ValueError(
                    "loss_per_example must call the model, model(...): past that, as through model.forward or a layer "
                    f"of it, whether examples are mixed is not seen; {LOOP_TAKES_IT}"
                )
            replay = self.recorder.replay
            sums, norms = self.recorder.clipped_sums(losses, self.clip, execution, owners=self.owners)
        if replay:
            replay.check_losses(
                losses, lambda index: self.loss_per_example(self.recorder.model, examples(self.batch, index)), before
            )
        return {key: zeros_for(p) if sums[key] is None else sums[key] for key, p in parameters.items()}, norms

    def _losses(self, batch, count: int) -> torch.Tensor:
        losses = self.loss_per_example(self.recorder.model, batch)
        check_losses(losses, count)
        return losses


@contextmanager
def _watching(
    model: torch.nn.Module,
    loss_per_example: Callable,
    batch,
    clip: Clip,
    owners: torch.Tensor | None = None,
    *,
    alone: bool = False,
) -> Iterator[Step]:
    """A step whose recorder leaves the model when it is over."""
    recorder = Recorder(model, alone=alone)
    case = tuple(recorder.parameters), _identity(loss_per_example)
    guards = _GUARDS.setdefault(model, {})
    recorder.guard = guards.get(case, recorder.guard)
    try:
        yield Step(recorder, loss_per_example, batch, clip, owners)
        guards[case] = recorder.guard
    finally:
        recorder.remove()


def _identity(value: object, *, inside: bool = False) -> Hashable:
    """What is the same as long as a function computes the same kind of thing.

    A function written in its call is another object each time, and so may be a loss or a number that it refers to: what
    counts is its code, and of what that refers to the kind. Of a tensor the shape counts.
    """
    if isinstance(value, FunctionType):
        cells = () if inside else value.__closure__ or ()
        return value.__code__, *(_identity(cell.cell_contents, inside=True) for cell in cells)
    if isinstance(value, MethodType):
        return _identity(value.__func__), type(value.__self__)
    if isinstance(value, partial):
        return _identity(value.func), *map(type, value.args), *value.keywords
    return (value.shape[1:], value.dtype) if isinstance(value, torch.Tensor) else type(value)
