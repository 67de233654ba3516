"""What may change silently between two steps, and is looked at again in each: modes, rows, buffers, whose gradients.

Whether a layer's rows are the examples cannot be seen from shapes (:mod:`plpkg.clipping.rows`), and where a gradient is
zero it cannot be seen from gradients either: a gate may open later. So the losses of some of the examples go backward
alone, which must reach their own rows of every layer and no other. In the first steps, and after model.train() or
model.eval(), every two examples are told apart; at shapes of an example that are new, and else once in fifty steps, at
random, one half of the examples from the other.
"""

from collections.abc import Callable, Hashable, Iterable
from random import SystemRandom

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from plpkg.clipping.layers import refusal
from plpkg.clipping.rows import Probe

FIRST, SELDOM = 3, 50
MOVING = ("inv_freq", "num_batches_tracked")
"""Buffers that change with a batch's length or number, not with what it says."""

_RANDOM = SystemRandom()


class Guard:
    """What a model's layers did so far, for all its steps."""

    def __init__(self) -> None:
        self._probes: dict[Hashable, Probe] = {}
        self._modes: list[bool] | None = None
        self._shapes: set[Hashable] = set()
        self._whole, self._new = FIRST, False

    def flip(self) -> None:
        """The model has been evaluated: what follows is looked at as in the beginning."""
        self._whole = max(1, self._whole)

    def judge(self, model: nn.Module) -> None:
        """Look at the layers' modes.

        Raises
        ------
        ValueError
            A layer mixes examples now, or keeps something of them.
        """
        modes = [module.training for module in model.modules()]
        if modes != self._modes:
            for name, module in model.named_modules():
                if reason := refusal(module):
                    raise ValueError(f"{name or 'the model'} ({type(module).__name__}) {reason}")
            self._modes = modes
            self._probes.clear()
            self.flip()

    def probe(self, inputs: Iterable[torch.Tensor], batch: int, run: Callable[[Probe], object]) -> Probe:
        """The probe for inputs of these shapes; ``run`` has it look at the model first if there is none."""
        shapes = tuple(t.shape[1:] if t.ndim and len(t) == batch else t.shape for t in inputs)
        key = (shapes, batch == 1)
        if key not in self._probes:
            probe = Probe()
            run(probe)  # what it refuses is refused again
            self._probes[key] = probe
        return self._probes[key]

    def see(self, name: str, given: Iterable[torch.Tensor]) -> None:
        """A layer gave tensors; their shapes may be new."""
        for tensor in given:
            shape = name, tensor.shape[1:]
            if shape not in self._shapes:
                self._shapes.add(shape)
                self._new = True

    def halves(self, losses: torch.Tensor) -> list[torch.Tensor]:
        """Which examples' losses should go backward alone now: ``(batch,)`` of booleans, each true and false somewhere.

        Nothing can be seen of one example, nor of fake tensors.
        """
        count = len(losses)
        if count < 2 or is_fake(losses):
            return []
        order = torch.tensor(_RANDOM.sample(range(count), count))
        if self._whole:
            return [(order >> bit) % 2 == 1 for bit in range((count - 1).bit_length())]
        return [order < count // 2] if self._new or _RANDOM.randrange(SELDOM) == 0 else []

    def verified(self) -> None:
        """They have reached their own rows alone."""
        self._whole, self._new = max(0, self._whole - 1), False


def buffers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The identity and the version of each buffer that should stand still."""
    return {
        name: (id(buffer), buffer._version)
        for name, buffer in model.named_buffers()
        if not name.endswith(MOVING) and not buffer.is_inference()
    }
