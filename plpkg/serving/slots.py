"""Adapters beside a backbone: hooks that add them to its layers, and memory where those of a batch lie side by side.

Forward hooks leave the backbone as it is: outside :meth:`Hooks.batch` it answers as if no adapter were there.

A batched product needs factors that lie one after the other. Copied together in each step, every adapter would be read
twice. So an adapter is copied into a slot when its first request begins, and stays until the slot is needed; where a
gap has opened before a step, the last adapter in use moves into it.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from plpkg.adapters import Adapter
from plpkg.serving.segments import Segments, add_sgmv, sgmv


class Group(NamedTuple):
    """Adapters of one batch: whose tokens are whose, and by module the stacked downs, ups and scales of ``sgmv``."""

    segments: Segments
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor, Sequence[float] | torch.Tensor]]


class Hooks:
    """Hooks on the named modules of a model, until :meth:`close`."""

    def __init__(self, model: torch.nn.Module, modules: Iterable[str]) -> None:
        self._groups, self._device = (), model.device.type
        self._handles = [model.get_submodule(name).register_forward_hook(self._hook(name)) for name in modules]

    def _hook(self, name: str):
        def add(_, arguments, output):
            for segments, factors in self._groups:
                if name in factors:
                    x = arguments[0].flatten(0, -2)  # (tokens, hidden)
                    if torch.is_grad_enabled():
                        added = sgmv(x.to(factors[name][0].dtype), *factors[name], segments)
                        output = output + added.view_as(output).to(output.dtype)
                    else:
                        add_sgmv(output.flatten(0, -2), x, *factors[name], segments)
            return output

        return add

    @contextlib.contextmanager
    def batch(self, *groups: Group) -> Iterator[None]:
        """Within it, a forward pass goes through the groups' adapters; its tokens are counted row by row.

        It computes in the precision of the weights: autocast would give products another one than adapters have.
        """
        self._groups = groups
        try:
            with torch.autocast(self._device, enabled=False):
                yield
        finally:
            self._groups = ()

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def form(adapter: Adapter) -> tuple[tuple[str, int], ...]:
    """An adapter's modules and their ranks: those of one form can lie side by side."""
    return tuple(sorted((name, len(factors.down)) for name, factors in adapter.factors.items()))


class Pool:
    """Slots for adapters of one form, each module's in the type and on the device of its weight in the model.

    Attributes
    ----------
    digests
        The adapter in each slot.
    users
        By digest, how many requests use it.
    factors
        By module: ``(slots, rank, in)``, ``(slots, out, rank)`` and ``(slots,)`` scales.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.digests: list[str | None] = []
        self.users: dict[str, int] = {}
        self.factors: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._model = model

    def lease(self, adapter: Adapter) -> None:
        """Hold an adapter in a slot, for one more request."""
        if adapter.digest not in self.digests:
            idle = [slot for slot, digest in enumerate(self.digests) if digest not in self.users]
            slot = idle[0] if idle else self._grow(adapter)
            self.digests[slot] = None  # until all of it is there
            for name, each in adapter.factors.items():
                for stack, value in zip(self.factors[name], (each.down, each.up, each.scale), strict=True):
                    stack[slot] = value
            self.digests[slot] = adapter.digest
        self.users[adapter.digest] = self.users.get(adapter.digest, 0) + 1

    def release(self, digest: str) -> None:
        """One request fewer."""
        self.users[digest] -= 1
        if not self.users[digest]:
            del self.users[digest]

    def clear(self, kept: set[str]) -> None:
        """Empty the slots of adapters that nobody uses, but for those to keep, by digest."""
        for slot, digest in enumerate(self.digests):
            if digest is not None and digest not in kept and digest not in self.users:
                self._erase(slot)

    @torch.inference_mode()
    def _erase(self, slot: int) -> None:
        self.digests[slot] = None
        for stack in (stack for stacks in self.factors.values() for stack in stacks):
            stack[slot].zero_()

    def close_gaps(self) -> None:
        """Move adapters so that those in use have the first slots."""
        used = [slot for slot, digest in enumerate(self.digests) if digest in self.users]
        for gap in sorted(set(range(len(used))) - set(used)):
            last = used.pop()
            self.digests[gap] = None  # until all of the other is there
            for stack in (stack for stacks in self.factors.values() for stack in stacks):
                stack[gap].copy_(stack[last])
            self.digests[gap] = self.digests[last]
            self._erase(last)  # no copy outlives the adapter

    def _grow(self, adapter: Adapter) -> int:
        """Twice as many slots; returns the first new one."""
        taken, slots = len(self.digests), max(4, 2 * len(self.digests))
        for name, each in adapter.factors.items():
            weight = self._model.get_submodule(name).weight
            dtype = weight.dtype if weight.is_floating_point() else self._model.dtype
            wide = torch.promote_types(dtype, torch.float32)  # for the scales
            made = ((dtype, each.down.shape), (dtype, each.up.shape), (wide, ()))
            stacks = tuple(weight.new_empty(slots, *shape, dtype=dtype) for dtype, shape in made)
            for stack, old in zip(stacks, self.factors.get(name, stacks), strict=True):
                stack[:taken] = old[:taken]
            self.factors[name] = stacks
        self.digests += [None] * (slots - taken)
        return taken
