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
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from plpkg.clipping.batches import CheckedLosses, batch_size, check_losses, examples, leaves, numbered
from plpkg.clipping.clip import Clip, check_finite, clip_dense, zeros_for
from plpkg.clipping.dropout import RandomState
from plpkg.clipping.execution import EXECUTIONS, LOOP, Execution
from plpkg.clipping.guard.mixing import Guard, standing_still
from plpkg.clipping.guard.replay import Look, Made, Projections, check, copies
from plpkg.clipping.hooks.recorder import Recorder
from plpkg.clipping.sites import LOOP_TAKES_IT
from plpkg.validation import one_of

Gradients = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The sums of clipped gradients by parameter, and the norms before clipping, ``(batch,)`` or ``(users,)``."""


def clipped_gradients(
    model: torch.nn.Module,
    loss_per_example: Callable[..., torch.Tensor],
    batch: Any,
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
        (:mod:`plpkg.clipping.guard.mixing`).
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
        execution = EXECUTIONS.get(execution, LOOP)
    count = batch_size(batch)
    owners = None if users is None else numbered(users, count)
    recorder = Recorder(model, alone=execution is LOOP)
    # The same model, parameters and losses function are one training, in which the guard remembers the steps before.
    case = (tuple(recorder.parameters), _identity(loss_per_example))
    guards = _GUARDS.setdefault(model, {})
    recorder.guard = guards.get(case, recorder.guard)
    watched = Watched(recorder, loss_per_example, execution)
    with watched.attached():
        sums, norms, _ = watched.sums(batch, count, clip, owners)
    guards[case] = recorder.guard
    return sums, norms


_GUARDS: weakref.WeakKeyDictionary[torch.nn.Module, dict[Hashable, Guard]] = weakref.WeakKeyDictionary()


def refuse_autocast(recorder: Recorder) -> None:
    """RuntimeError under autocast: norms, sums and noise are not for it to round."""
    device = next(iter(recorder.parameters.values())).device.type
    if any(torch.is_autocast_enabled(kind) for kind in {"cpu", device} - {"meta"}):
        raise RuntimeError("autocast is the losses function's own business: put it inside of that, not around a step")


@dataclass(frozen=True)
class Watched:
    """The gradients of a losses function, whose model a recorder watches where it is :meth:`attached`.

    ``shared`` are the places of a batch's tensors that all examples have in common, as far as that is known.
    """

    recorder: Recorder
    losses: Callable
    execution: Execution
    shared: set[int] = field(default_factory=set)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """:meth:`sums` are computed inside, and the model stays what it was."""
        recorder = self.recorder
        refuse_autocast(recorder)
        with recorder.attached(), standing_still(recorder.model, contents=recorder.guard.fresh):
            yield

    def sums(
        self,
        batch,
        count: int,
        clip: Clip,
        owners: torch.Tensor | None = None,
        divisors: torch.Tensor | None = None,
        look: Look | None = None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """The clipped sums, the norms before clipping, and the losses of a batch.

        Parameters
        ----------
        batch, count
            So many examples.
        owners
            ``(count,)``: the number of the user whose each is, if users are clipped.
        divisors
            ``(count,)``: what the losses are divided by.
        look
            The batch to compare a loss with; without it the batch is cut where it is time to look.
        """
        if count == 0:  # many models cannot run on no examples
            zeros = {name: zeros_for(p) for name, p in self.recorder.parameters.items()}
            nothing = next(iter(zeros.values())).new_zeros(0)
            return zeros, nothing, nothing
        if isinstance(self.losses, CheckedLosses):
            self.losses.check(self.recorder.model, batch)
        if self.execution is LOOP:
            return self._loop(batch, count, clip, owners, divisors)
        return self._recorded(batch, count, clip, owners, divisors, look)

    def _loop(self, batch, count, clip, owners, divisors):
        """The definition: example by example, or user by user, through autograd."""
        recorder = self.recorder
        guard = recorder.guard
        totals = {name: zeros_for(p) for name, p in recorder.parameters.items()}
        all_norms = []
        all_losses = []
        if owners is None:
            owners = torch.arange(count)
        users = len(owners.unique())
        for user in range(users):
            theirs = (owners == user).nonzero().flatten()
            part = batch if users == 1 else examples(batch, theirs)
            guard.stand(recorder.model)
            losses = self._losses(part, len(theirs))
            guard.still(recorder.model)
            total_loss = _divided(losses, None if divisors is None else divisors[theirs]).sum()
            gradients = recorder.gradients(total_loss)
            dense = {name: g.to(totals[name].dtype)[None] for name, g in gradients.items()}  # a batch of one
            sums, norm = clip_dense(dense, clip, recorder.layers)
            check_finite(norm, user, users)
            all_norms.append(norm)
            all_losses.append(losses.detach())
            for name, clipped in sums.items():
                totals[name] += clipped
        return totals, torch.cat(all_norms), torch.cat(all_losses)

    def _recorded(self, batch, count, clip, owners, divisors, look):
        """All examples together, by a recorded backward pass."""
        recorder = self.recorder
        before = RandomState()
        with recorder.watch(count):
            losses = self._losses(batch, count)
            after = RandomState()
            if not recorder.called:
                raise ValueError(
                    "the losses function must call the model, model(...): past that, as through model.forward or a "
                    f"layer of it, whether examples are mixed is not seen; {LOOP_TAKES_IT}"
                )
            if recorder.guard.is_new(losses):
                recorder.guard.look_again()
            self._learn_what_is_shared(batch, count)
            if not is_fake(losses) and recorder.guard.replays(count) and look is None:
                look = copies(batch, count, tuple(leaves(batch)[place] for place in self.shared))
            beside = Projections(look.kept, look.seed) if look else None
            divided = _divided(losses, divisors)
            made, norms = recorder.clipped_sums(divided, clip, self.execution, owners=owners, beside=beside)
        if look is not None and beside is not None:
            first = Made(losses[look.kept].detach(), beside, after)
            make = partial(self._made_again, count=count, divisors=divisors, look=look, before=before)
            check(first, make, look, batch)
        sums = {name: made[name] if name in made else zeros_for(p) for name, p in recorder.parameters.items()}
        return sums, norms, losses.detach()

    def _made_again(self, batch, *, count: int, divisors, look: Look, before: RandomState) -> Made:
        """The step of another batch, with the same random numbers."""
        before.restore()
        projections = Projections(look.kept, look.seed)
        with self.recorder.watch(count):
            losses = self._losses(batch, count)
            after = RandomState()
            self.recorder.projected(_divided(losses, divisors), projections)
        return Made(losses[look.kept].detach(), projections, after)

    def _learn_what_is_shared(self, batch, count: int) -> None:
        """Tensors of a batch that once were not as long as it are everybody's, a mask say."""
        for place, tensor in enumerate(leaves(batch)):
            if not tensor.ndim or len(tensor) != count:
                self.shared.add(place)

    def _losses(self, batch, count: int) -> torch.Tensor:
        losses = self.losses(self.recorder.model, batch)
        check_losses(losses, count)
        return losses


def _divided(losses: torch.Tensor, divisors: torch.Tensor | None) -> torch.Tensor:
    return losses if divisors is None else losses / divisors.to(losses)


def _identity(value: object, *, inside: bool = False) -> Hashable:
    """A mark that is the same as long as a function computes the same kind of thing.

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
    if isinstance(value, torch.Tensor):
        return value.shape[1:], value.dtype
    return type(value)
