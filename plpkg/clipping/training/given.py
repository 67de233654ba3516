"""Gradients that come from elsewhere: of a model whose layers another process holds, say.

``per_example(batch)`` gives each example's gradient of its own loss, as ``torch.func.vmap(grad_and_value(…))`` does.
What follows is the same: clip, add up, noise. No layer is watched here, so some batches are given a second time, one
example beside copies of another one (:mod:`plpkg.clipping.guard.replay`): its gradient must stay what it was.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from plpkg.clipping.clip import Clip, check_finite, clip_dense, zeros_for
from plpkg.clipping.dropout import RandomState
from plpkg.clipping.gradients import refuse_autocast
from plpkg.clipping.guard.mixing import standing_still
from plpkg.clipping.guard.replay import HALF_TOLERANCE, TOLERANCE, Look, confirmed, copies
from plpkg.clipping.hooks.recorder import Recorder

Gradients = dict[str, torch.Tensor]
"""By the parameter's name, ``(batch, *shape)``."""


class GivenGradients:
    """Clips what ``per_example`` gives for a batch; in the place of :class:`~plpkg.clipping.gradients.Watched`."""

    def __init__(self, per_example: Callable, recorder: Recorder) -> None:
        self._per_example = per_example
        self.recorder = recorder
        self._tells = "look" in inspect.signature(per_example).parameters  # which passes are for looking

    def attached(self) -> AbstractContextManager:
        """No layer is watched; but the model stays what it was."""
        refuse_autocast(self.recorder)
        return standing_still(self.recorder.model, contents=self.recorder.guard.fresh)

    def sums(
        self,
        batch,
        count: int,
        clip: Clip,
        owners: torch.Tensor | None = None,
        divisors: torch.Tensor | None = None,
        look: Look | None = None,
    ) -> tuple[Gradients, torch.Tensor, torch.Tensor]:
        """The clipped sums, the norms before clipping, and the losses of a batch of so many examples.

        Raises
        ------
        ValueError
            The results of ``per_example`` are no gradients of this many examples, or it has mixed them.
        """
        if count == 0:
            zeros = {name: zeros_for(p) for name, p in self.recorder.parameters.items()}
            return zeros, torch.zeros(0), torch.zeros(0)
        if self.recorder.guard.replays(count) and look is None:
            look = copies(batch, count)
        before = RandomState() if look else None
        gradients, losses = self._gradients(batch, count)
        if look is not None and before is not None:
            self._look(batch, count, look, gradients, before)
        for name, g in gradients.items():
            if divisors is not None:
                g = torch.einsum("n...,n->n...", g, 1 / divisors.to(g))
            if owners is not None:
                users = int(owners.max()) + 1
                g = g.new_zeros(users, *g.shape[1:]).index_add_(0, owners.to(g.device), g)
            gradients[name] = g
        sums, norms = clip_dense(gradients, clip, self.recorder.layers)
        check_finite(norms, 0, len(norms))
        return sums, norms, losses

    def _gradients(self, batch, count: int, *, look: bool = False) -> tuple[Gradients, torch.Tensor]:
        given = self._per_example(batch, look=look) if self._tells else self._per_example(batch)
        if not isinstance(given, tuple):
            given = (given, torch.full((count,), torch.nan))  # it does not tell the losses
        gradients, losses = given
        parameters = self.recorder.parameters
        if not isinstance(gradients, Mapping) or gradients.keys() != parameters.keys():
            names = sorted(gradients) if isinstance(gradients, Mapping) else type(gradients).__name__
            raise ValueError(f"per_example must give a gradient of each of {sorted(parameters)}, got {names}")
        for name, gradient in gradients.items():
            expected = (count, *parameters[name].shape)
            if gradient.shape != expected:
                raise ValueError(f"per_example must give {name} a gradient of {expected}, got {tuple(gradient.shape)}")
        if not isinstance(losses, torch.Tensor) or losses.shape != (count,):
            shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(f"per_example must give losses of shape ({count},) beside its gradients, got {shape}")
        wide = {}
        for name in parameters:  # in their order
            gradient = gradients[name].detach()
            wide[name] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return wide, losses.detach()

    def _look(self, batch, count: int, look: Look, gradients: Gradients, before: RandomState) -> None:
        """Give one example again, with others around it."""
        state = RandomState()
        half = any(p.dtype.itemsize < 4 for p in self.recorder.parameters.values())
        tolerance = HALF_TOLERANCE if half else TOLERANCE

        def of_kept(all_gradients: Gradients) -> torch.Tensor:
            return torch.cat([g[look.kept].flatten() for g in all_gradients.values()])

        def misfit(batch) -> bool:
            before.restore()
            again, _ = self._gradients(batch, count, look=True)
            first = of_kept(gradients)
            return bool((first - of_kept(again)).norm() > tolerance * first.norm())

        try:
            mixed = confirmed(misfit, look.among, batch)
        finally:
            state.restore()
        if mixed:
            raise ValueError(
                "per_example, or a collate function, mixes examples: beside other examples the same one has another "
                "gradient, so that clipping bounds nobody's part"
            )
