"""Retained units in 2 or 4 bits, packed: fewer bytes for each unit beside fewer units.

Numbers are rounded within groups to ``2^bits`` steps between the group's least and greatest (asymmetric). Two schemes:

* ``"token"``: groups lie within one unit's head. A cut moves whole units, so nothing is ever rounded twice.
* ``"kivi"``: values as above; keys channel by channel, in groups of consecutive units, since a few channels of keys are
  large everywhere (KIVI, arXiv 2402.02750). A cut tears groups apart: what is kept is unpacked, gathered and rounded
  again, as Locret's code does with transformers' quantised cache. Units that do not fill a group stay as they are.

Attention reads floats again, of one layer at a time. Left out: kernels that compute on packed numbers.
transformers' ``QuantizedCache`` (backend quanto) knows no eviction; a test and a benchmark compare the two without.
"""

from collections.abc import Callable

import torch

from plpkg.retention.cache.store import UnitStore, gather, under
from plpkg.validation import one_of, whole_number

PACKED = ("codes", "scale", "least")
"""The tensors of a :class:`Packed`."""


class Packed:
    """Numbers in ``bits`` each, in groups along the last dimension.

    Attributes
    ----------
    codes
        ``(…, groups, group · bits / 8)`` uint8.
    scale, least
        ``(…, groups, 1)``: a number is about ``least + scale · code``.
    """

    def __init__(self, numbers: torch.Tensor, bits: int, group: int) -> None:
        self.bits = bits
        self.dtype = numbers.dtype
        highest_code = 2**bits - 1
        grouped = numbers.float().unflatten(-1, (-1, group))  # (…, groups, group)
        least, greatest = grouped.aminmax(dim=-1, keepdim=True)
        self.scale = ((greatest - least) / highest_code).to(numbers.dtype)
        self.least = least.to(numbers.dtype)
        # Codes count from the rounded least in rounded steps, which are all that will be known; equal numbers have
        # a step of 0, by which nothing can be divided.
        step = self.scale.float().clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((grouped - self.least.float()) / step).round().clamp(0, highest_code).to(torch.uint8)
        by_byte = codes.unflatten(-1, (-1, 8 // bits))  # (…, groups, bytes, codes in a byte)
        self.codes = (by_byte << self._shifts(codes.device)).sum(-1, dtype=torch.uint8)

    def _shifts(self, device: torch.device) -> torch.Tensor:
        """The places of a byte's codes in it, lowest first: 0, ``bits``, 2 · ``bits``, …"""
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=device)

    def numbers(self) -> torch.Tensor:
        """The numbers that were packed, rounded: ``(…, groups · group)``."""
        shifted = self.codes[..., None] >> self._shifts(self.codes.device)
        codes = (shifted & (2**self.bits - 1)).flatten(-2)  # (…, groups, group)
        return (self.least.float() + self.scale.float() * codes).flatten(-2).to(self.dtype)

    @classmethod
    def restored(cls, tensors: dict[str, torch.Tensor], bits: int) -> "Packed":
        """The numbers of which :meth:`tensors` gave the tensors."""
        packed = cls.__new__(cls)
        packed.codes = tensors["codes"]
        packed.scale = tensors["scale"]
        packed.least = tensors["least"]
        packed.bits = bits
        packed.dtype = packed.scale.dtype
        return packed

    def tensors(self) -> dict[str, torch.Tensor]:
        """Codes, scales and offsets, by name."""
        return {name: getattr(self, name) for name in PACKED}

    @property
    def num_bytes(self) -> int:
        """The bytes of codes, scales and offsets."""
        return self.codes.nbytes + self.scale.nbytes + self.least.nbytes

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``function`` to every tensor."""
        self.codes = function(self.codes)
        self.scale = function(self.scale)
        self.least = function(self.least)


class ByToken:
    """Units ``(batch, heads, n, head_dim)``, each in groups of its own."""

    packed: Packed  # of (batch, heads, n, head_dim), once units have come

    def __init__(self, bits: int, group: int) -> None:
        self.bits = bits
        self.group = group

    def __len__(self) -> int:
        return self.packed.codes.shape[2] if hasattr(self, "packed") else 0

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes if len(self) else 0

    def append(self, states: torch.Tensor) -> None:
        head_dim = states.shape[-1]
        group = min(self.group, head_dim)
        if head_dim % group or group % 4:
            raise ValueError(f"heads of {head_dim} numbers do not divide into groups of {group}")
        new = Packed(states, self.bits, group)
        if not len(self):
            self.packed = new
            return
        self.packed.codes = torch.cat([self.packed.codes, new.codes], dim=2)
        self.packed.scale = torch.cat([self.packed.scale, new.scale], dim=2)
        self.packed.least = torch.cat([self.packed.least, new.least], dim=2)

    def read(self) -> torch.Tensor:
        return self.packed.numbers()

    def keep(self, indices: torch.Tensor) -> None:
        # A tensor is (batch, heads, n, groups, …): all that belongs to a unit becomes one row, moves, and unfolds.
        self.change(lambda tensor: gather(tensor.flatten(3), indices).unflatten(3, tensor.shape[3:]))

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if len(self):
            self.packed.change(function)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.packed.tensors()

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        self.packed = Packed.restored(tensors, self.bits)

    def mark(self) -> int:
        return len(self)

    def rewind(self, mark: int, repeats: int) -> None:
        self.change(lambda tensor: tensor[::repeats, :, :mark].clone())


class ByChannel:
    """Units ``(batch, heads, n, head_dim)`` in groups of consecutive units, channel by channel, and a rest."""

    rest: torch.Tensor  # (batch, heads, fewer than group, head_dim), once units have come

    def __init__(self, bits: int, group: int) -> None:
        self.bits = bits
        self.group = group
        self.packed: list[Packed] = []  # of (batch, heads, head_dim, a multiple of group) each

    def __len__(self) -> int:
        in_groups = sum(part.codes.shape[3] * self.group for part in self.packed)  # codes (…, groups, bytes)
        in_rest = self.rest.shape[2] if hasattr(self, "rest") else 0
        return in_groups + in_rest

    @property
    def num_bytes(self) -> int:
        in_groups = sum(part.num_bytes for part in self.packed)
        in_rest = self.rest.nbytes if len(self) else 0
        return in_groups + in_rest

    def append(self, states: torch.Tensor) -> None:
        self._pack(torch.cat([self.rest, states], dim=2) if len(self) else states)

    def _pack(self, waiting: torch.Tensor) -> None:
        """Pack as many units as fill groups, behind those that are packed; the others are the rest."""
        full = waiting.shape[2] // self.group * self.group
        if full:
            self.packed.append(Packed(waiting[:, :, :full].transpose(2, 3), self.bits, self.group))
        self.rest = waiting[:, :, full:].clone()

    def read(self) -> torch.Tensor:
        in_groups = [part.numbers().transpose(2, 3) for part in self.packed]
        return torch.cat([*in_groups, self.rest], dim=2)

    def keep(self, indices: torch.Tensor) -> None:
        kept = gather(self.read(), indices)
        self.packed = []
        self._pack(kept)

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for part in self.packed:
            part.change(function)
        if len(self):
            self.rest = function(self.rest)

    def tensors(self) -> dict[str, torch.Tensor]:
        held = {}
        for i, part in enumerate(self.packed):
            held |= {f"{i}.{name}": tensor for name, tensor in part.tensors().items()}
        return held | {"rest": self.rest}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        self.rest = tensors["rest"]
        count = (len(tensors) - 1) // len(PACKED)  # all but the rest are parts'
        self.packed = []
        for i in range(count):
            part = {name: tensors[f"{i}.{name}"] for name in PACKED}
            self.packed.append(Packed.restored(part, self.bits))

    def mark(self) -> tuple[int, torch.Tensor]:
        return len(self.packed), self.rest  # the rest may fill a group, and be rounded

    def rewind(self, mark: tuple[int, torch.Tensor], repeats: int) -> None:
        count, rest = mark
        del self.packed[count:]
        if repeats > 1:
            self.change(lambda tensor: tensor[::repeats].clone())
        self.rest = rest


class QuantizedStore(UnitStore):
    """A layer's keys and values, packed."""

    def __init__(self, bits: int, scheme: str, group: int) -> None:
        self._kind = {"bits": bits, "scheme": scheme, "group": group}
        self._keys = ByToken(bits, group) if scheme == "token" else ByChannel(bits, group)
        self._values = ByToken(bits, group)

    @property
    def kind(self) -> dict:
        return self._kind

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_bytes(self) -> int:
        return self._keys.num_bytes + self._values.num_bytes

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys.append(keys)
        self._values.append(values)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys.read(), self._values.read()

    def keep(self, indices: torch.Tensor) -> None:
        self._keys.keep(indices)
        self._values.keep(indices)

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._keys.change(function)
        self._values.change(function)

    def tensors(self) -> dict[str, torch.Tensor]:
        keys = {f"keys.{name}": tensor for name, tensor in self._keys.tensors().items()}
        values = {f"values.{name}": tensor for name, tensor in self._values.tensors().items()}
        return keys | values

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        self._keys.restore(under("keys.", tensors))
        self._values.restore(under("values.", tensors))

    def mark(self) -> tuple:
        return self._keys.mark(), self._values.mark()

    def rewind(self, mark: tuple, repeats: int = 1) -> None:
        self._keys.rewind(mark[0], repeats)
        self._values.rewind(mark[1], repeats)


def quantized(bits: int = 4, scheme: str = "token", group: int = 32) -> Callable[[], QuantizedStore]:
    """A maker of stores, for :func:`plpkg.retention.chunked_prefill`.

    Parameters
    ----------
    bits
        2 or 4.
    scheme
        ``"token"`` or ``"kivi"``.
    group
        How many numbers share a scale: a multiple of 4 that divides the head's width, or more than that, for all of
        it; up to 65,536.

    Raises
    ------
    ValueError
        Something else.
    """
    one_of("bits", bits, (2, 4))
    one_of("scheme", scheme, ("token", "kivi"))
    if whole_number("group", group, 4, 2**16) % 4:
        raise ValueError(f"group must be a multiple of 4, got {group}")
    return lambda: QuantizedStore(bits, scheme, group)
