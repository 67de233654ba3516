"""Adapters beside a backbone: hooks that add them to its layers, and memory where those of a batch lie side by side.

Forward hooks leave the backbone as it is: outside :meth:`Hooks.batch` it answers as if no adapter were there.

A batched product needs factors that lie one after the other. Copied together in each step, every adapter would be read
twice. So an adapter is copied into a slot when its first request begins, and stays until the slot is needed; where a
gap has opened before a step, the last adapter in use moves into it.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from plpkg.adapters import Adapter
from plpkg.serving.segments import Segments, add_sgmv, sgmv


class Group(NamedTuple):
    """Adapters of one batch: whose tokens are whose, and by module the stacked downs, ups and scales of ``sgmv``."""

    segments: Segments
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Hooks:
    """Hooks on the named modules of a model, until :meth:`close`."""

    def __init__(self, model: PreTrainedModel, modules: Iterable[str]) -> None:
        self._groups: tuple[Group, ...] = ()
        self._device = model.device.type
        self._handles = [model.get_submodule(name).register_forward_hook(self._hook(name)) for name in modules]

    def _hook(self, name: str):
        def add(_, arguments, output):
            for segments, factors in self._groups:
                if name not in factors:
                    continue
                downs, ups, scales = factors[name]
                x = arguments[0].flatten(0, -2)  # (tokens, hidden)
                if torch.is_grad_enabled():
                    added = sgmv(x.to(downs.dtype), downs, ups, scales, segments)
                    output = output + added.view_as(output).to(output.dtype)
                else:
                    add_sgmv(output.flatten(0, -2), x, downs, ups, scales, segments)
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

    def __init__(self, model: PreTrainedModel) -> None:
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
                downs, ups, scales = self.factors[name]
                downs[slot] = each.down
                ups[slot] = each.up
                scales[slot] = each.scale
            self.digests[slot] = adapter.digest
        self.users[adapter.digest] = self.users.get(adapter.digest, 0) + 1

    def release(self, digest: str) -> None:
        """One request fewer."""
        self.users[digest] -= 1
        if not self.users[digest]:
            del self.users[digest]

    def clear(self, kept: set[str]) -> None:
        """Empty the slots of adapters that nobody uses, but for those to keep, by digest."""
        needed = {None} | kept | self.users.keys()
        for slot, digest in enumerate(self.digests):
            if digest not in needed:
                self._erase(slot)

    @torch.inference_mode()
    def _erase(self, slot: int) -> None:
        self.digests[slot] = None
        for stack in self._stacks():
            stack[slot].zero_()

    def _stacks(self) -> Iterator[torch.Tensor]:
        """All modules' downs, ups and scales."""
        return itertools.chain.from_iterable(self.factors.values())

    def close_gaps(self) -> None:
        """Move adapters so that those in use have the first slots."""
        used = [slot for slot, digest in enumerate(self.digests) if digest in self.users]
        for gap in sorted(set(range(len(used))) - set(used)):
            last = used.pop()
            self.digests[gap] = None  # until all of the other is there
            for stack in self._stacks():
                stack[gap].copy_(stack[last])
            self.digests[gap] = self.digests[last]
            self._erase(last)  # no copy outlives the adapter

    def _grow(self, adapter: Adapter) -> int:
        """Twice as many slots; returns the first new one."""
        taken = len(self.digests)
        slots = max(4, 2 * taken)
        for name, each in adapter.factors.items():
            module: Any = self._model.get_submodule(name)
            weight = module.weight
            dtype = weight.dtype if weight.is_floating_point() else self._model.dtype
            wide = torch.promote_types(dtype, torch.float32)  # of the scales: 1/3 has few digits in bfloat16
            stacks = (
                weight.new_empty(slots, *each.down.shape, dtype=dtype),
                weight.new_empty(slots, *each.up.shape, dtype=dtype),
                weight.new_empty(slots, dtype=wide),
            )
            if taken:
                for stack, old in zip(stacks, self.factors[name], strict=True):
                    stack[:taken] = old
            self.factors[name] = stacks
        self.digests += [None] * (slots - taken)
        return taken
