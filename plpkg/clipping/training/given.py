"""A criterion whose gradients come from elsewhere: of a model whose layers another process holds, say.

``per_example(batch)`` gives each example's gradient of its own loss, as ``torch.func.vmap(grad_and_value(…))`` does.
What follows is the same: clip, add up, noise. No layer is watched here, so some batches are given a second time, one
example beside copies of another one (:mod:`plpkg.clipping.replay`): its gradient must stay what it was.
"""

import inspect
from collections.abc import Callable, Mapping
from random import SystemRandom

import torch

from plpkg.clipping.batches import batch_size, examples
from plpkg.clipping.clip import Clip, check_finite, clip_dense
from plpkg.clipping.dropout import RandomState
from plpkg.clipping.replay import HALF_TOLERANCE, TOLERANCE, confirmed
from plpkg.clipping.training.criterion import PrivateLoss

_RANDOM = SystemRandom()

Gradients = dict[str, torch.Tensor]
"""By the parameter's name, ``(batch, *shape)``."""


class GivenGradients:
    """``criterion(batch).backward()`` clips what ``per_example`` gives for the batch."""

    averages = True

    def __init__(self, per_example: Callable, private) -> None:
        self._per_example, self._private = per_example, private
        self._tells = "look" in inspect.signature(per_example).parameters  # which passes are for looking

    def __call__(self, batch) -> PrivateLoss:
        """The losses of a batch, whose first dimension is the examples.

        Raises
        ------
        ValueError
            What ``per_example`` gave are no gradients of this many examples, or it has mixed them.
        """
        count, recorder = batch_size(batch), self._private.recorder
        self._private.expect()
        looks = recorder.guard.replays(count)
        before = RandomState() if looks else None
        gradients, losses = self._gradients(batch, count)
        if looks:
            self._look(batch, gradients, before)
        self._private.record(count)
        return PrivateLoss(losses, self._private, gradients=gradients)

    def _gradients(self, batch, count: int, *, look: bool = False) -> tuple[Gradients, torch.Tensor]:
        given = self._per_example(batch, look=look) if self._tells else self._per_example(batch)
        gradients, losses = given if isinstance(given, tuple) else (given, torch.full((count,), torch.nan))
        parameters = self._private.recorder.parameters
        if not isinstance(gradients, Mapping) or gradients.keys() != parameters.keys():
            names = sorted(gradients) if isinstance(gradients, Mapping) else type(gradients).__name__
            raise ValueError(f"per_example must give a gradient of each of {sorted(parameters)}, got {names}")
        for name, gradient in gradients.items():
            if gradient.shape != (expected := (count, *parameters[name].shape)):
                raise ValueError(f"per_example must give {name} a gradient of {expected}, got {tuple(gradient.shape)}")
        wide = {n: gradients[n].detach().to(torch.promote_types(gradients[n].dtype, torch.float32)) for n in parameters}
        return wide, losses.detach()

    def _look(self, batch, gradients: Gradients, before: RandomState) -> None:
        """Give one example again, among copies of another one."""
        count, state = batch_size(batch), RandomState()
        kept, other = _RANDOM.sample(range(count), 2)
        among = torch.full((count,), kept if count == 2 else other)
        among[kept] = kept
        half = any(p.dtype.itemsize < 4 for p in self._private.model.parameters())
        tolerance = HALF_TOLERANCE if half else TOLERANCE

        def misfit(index: torch.Tensor) -> bool:
            before.restore()
            again, _ = self._gradients(examples(batch, index), count, look=True)
            first, second = (torch.cat([g[kept].flatten() for g in each.values()]) for each in (gradients, again))
            return bool((first - second).norm() > tolerance * first.norm())

        try:
            mixed = confirmed(misfit, among)
        finally:
            state.restore()
        if mixed:
            raise ValueError(
                "per_example mixes examples: beside other examples the same one has another gradient, so that clipping "
                "bounds nobody's part"
            )


def clip_given(gradients: Gradients, clip: Clip, layers: Mapping[str, str], owners: torch.Tensor | None) -> Gradients:
    """The sums of clipped gradients: of examples, or of ``owners``, the user's number of each example."""
    if owners is not None:
        users = int(owners.max()) + 1
        gradients = {name: g.new_zeros(users, *g.shape[1:]).index_add_(0, owners, g) for name, g in gradients.items()}
    sums, norms = clip_dense(gradients, clip, layers)
    check_finite(norms, 0, len(norms))
    return sums
