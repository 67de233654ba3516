"""The adapters that a batch uses, side by side in memory: slots without gaps between them.

A batched product needs factors that lie one after the other. Copied together in each step, every adapter would be read
twice. So an adapter is copied into a slot when its first request begins, and stays until the slot is needed; where a
gap has opened before a step, the last adapter in use moves into it.

Only adapters of one form, the same modules with the same ranks, can lie in one pool.
"""

import torch

from plpkg.serving.adapter import Adapter

Form = tuple[tuple[str, int], ...]


def form(adapter: Adapter) -> Form:
    """Its modules and their ranks."""
    return tuple(sorted((name, factors.down.shape[0]) for name, factors in adapter.factors.items()))


class Pool:
    """Slots for adapters of one form.

    Attributes
    ----------
    digests
        The adapter in each slot.
    users
        By digest, how many requests use it.
    factors
        By module: ``(slots, rank, in)``, ``(slots, out, rank)`` and ``(slots,)`` scales.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.digests: list[str | None] = []
        self.users: dict[str, int] = {}
        self.factors: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._like = like

    def lease(self, adapter: Adapter) -> None:
        """Hold an adapter in a slot, for one more request."""
        if adapter.digest not in self.digests:
            idle = [slot for slot, digest in enumerate(self.digests) if digest not in self.users]
            slot = idle[0] if idle else self._grow(adapter)
            self.digests[slot] = None  # until all of it is there
            for name, each in adapter.factors.items():
                for stack, value in zip(
                    self.factors[name], (each.down, each.up, torch.tensor(each.scale)), strict=True
                ):
                    stack[slot].copy_(value)
            self.digests[slot] = adapter.digest
        self.users[adapter.digest] = self.users.get(adapter.digest, 0) + 1

    def release(self, digest: str) -> None:
        """One request fewer."""
        self.users[digest] -= 1
        if not self.users[digest]:
            del self.users[digest]

    def close_gaps(self) -> None:
        """Move adapters so that those in use have the first slots."""
        used = [slot for slot, digest in enumerate(self.digests) if digest in self.users]
        for gap in sorted(set(range(len(used))) - set(used)):
            last = used.pop()
            for stacks in self.factors.values():
                for stack in stacks:
                    stack[gap].copy_(stack[last])
            self.digests[gap], self.digests[last] = self.digests[last], None

    def _grow(self, adapter: Adapter) -> int:
        """Twice as many slots; returns the first new one."""
        taken = len(self.digests)
        for name, each in adapter.factors.items():
            shapes = (each.down.shape, each.up.shape, ())
            stacks = tuple(self._like.new_empty(max(4, 2 * taken), *shape) for shape in shapes)
            stacks = (*stacks[:2], stacks[2].to(torch.promote_types(self._like.dtype, torch.float32)))
            for stack, old in zip(stacks, self.factors.get(name, stacks), strict=True):
                stack[:taken] = old[:taken]
            self.factors[name] = stacks
        self.digests += [None] * (max(4, 2 * taken) - taken)
        return taken
