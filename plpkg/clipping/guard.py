"""What may change silently between two steps, and is looked at again in each: modes, rows, buffers, whose gradients.

Whether a layer's rows are the examples cannot be seen from shapes (:mod:`plpkg.clipping.rows`), and where a gradient is
zero it cannot be seen from gradients either: a gate may open later. So the losses of some of the examples go backward
alone, which must reach their own rows of every layer and no other. In the first steps, and after model.train() or
model.eval(), every two examples are told apart; at shapes of an example that are new, and else once in fifty steps, at
random, one half of the examples from the other.

Left out: numbers that the model, after its first steps, keeps in another way than PyTorch counts (``.data``, numpy, an
attribute); what a loss takes from other examples without a gradient.
"""

from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from random import SystemRandom

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from plpkg.clipping.layers import refusal
from plpkg.clipping.rows import Probe

FIRST, SELDOM = 3, 50
MOVING = ("num_batches_tracked", "weight_u", "weight_v", "_u", "_v")
"""Buffers that change with a batch's number, or with the weights (spectral norm), not with what it says."""

_RANDOM = SystemRandom()


class Guard:
    """What a model's layers did so far, for all its steps."""

    def __init__(self) -> None:
        self._probes: dict[Hashable, Probe] = {}
        self._modules: list[tuple] | None = None
        self._shapes: set[Hashable] = set()
        self._whole, self._new = FIRST, False

    @property
    def fresh(self) -> bool:
        """Whether these are the first steps, or the first after an evaluation."""
        return self._whole > 0

    def flip(self) -> None:
        """The model has been evaluated: what follows is looked at as in the beginning."""
        self._whole = max(1, self._whole)

    def judge(self, model: nn.Module) -> None:
        """Look whether the layers, their modes and their hooks are those that were seen before.

        Raises
        ------
        ValueError
            A layer mixes examples now, or keeps something of them.
        """
        modules = [
            (id(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in modules_of(model)
        ]
        if modules != self._modules:
            check_layers(model)
            self._modules = modules
            self._probes.clear()
            self.flip()

    def probe(self, inputs: Iterable[torch.Tensor], batch: int, run: Callable[[Probe], object]) -> Probe:
        """The probe for inputs of these shapes; ``run`` has it look at the model first if there is none."""
        shapes = tuple(t.shape[1:] if t.ndim and len(t) == batch else t.shape for t in inputs)
        key = (shapes, batch == 1)
        if key not in self._probes:
            probe = Probe()
            run(probe)  # what it refuses is refused again
            self._probes[key], self._new = probe, True
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


def check_layers(model: nn.Module) -> None:
    """Refuse what mixes examples, or cannot tell them apart.

    Raises
    ------
    ValueError
        The message names the layer.
    """
    for name, module in model.named_modules():
        if reason := refusal(module):
            raise ValueError(f"{name or 'the model'} ({type(module).__name__}) {reason}")


def state(model: nn.Module, *, contents: bool = False) -> list[tuple]:
    """Of each parameter, and of each buffer that should stand still: module, name, identity, version, and with
    ``contents`` sums of what it holds.
    """
    return [
        (module, name, id(tensor), tensor._version, *(_sums(tensor.detach()) if contents else ()))
        for module in modules_of(model)
        for name, tensor in chain(module._parameters.items(), module._buffers.items())
        if not (tensor is None or name in MOVING or name.endswith("inv_freq") or tensor.is_inference())
    ]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model's modules, each as often as it is there: ``model.modules()``, in a twentieth of its time."""
    found = [model]
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


def _sums(tensor: torch.Tensor) -> tuple:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.hash_tensor(bits).item(), tensor.sum(dtype=wide).item()
