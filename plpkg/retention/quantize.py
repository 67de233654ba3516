"""Retained units in 2 or 4 bits, packed: fewer bytes for each unit beside fewer units.

Numbers are rounded within groups to ``2^bits`` steps between the group's least and greatest (asymmetric). Two schemes:

* ``"token"``: groups lie within one unit's head. A cut moves whole units, so nothing is ever rounded twice.
* ``"kivi"``: values as above; keys channel by channel, in groups of consecutive units, since a few channels of keys are
  large everywhere (KIVI, arXiv 2402.02750). A cut tears groups apart: what is kept is unpacked, gathered and rounded
  again, as Locret's code does with transformers' quantised cache. Units that do not fill a group stay as they are.

What attention reads are floats again, of one layer at a time. Left out: kernels that compute on packed numbers.
transformers' ``QuantizedCache`` (backend quanto) knows no eviction; a test and a benchmark compare the two without.
"""

from collections.abc import Callable

import torch

from plpkg.retention.cache import UnitStore, gather
from plpkg.validation import one_of, whole_number

PACKED = ("codes", "scale", "least")


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
        self.bits, self.dtype = bits, numbers.dtype
        grouped = numbers.float().unflatten(-1, (-1, group))  # (…, groups, group)
        least, greatest = grouped.aminmax(dim=-1, keepdim=True)
        scale = ((greatest - least) / (2**bits - 1)).to(numbers.dtype)
        self.scale, self.least = scale, least.to(numbers.dtype)
        step = self.scale.float().clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((grouped - self.least.float()) / step).round().clamp(0, 2**bits - 1).to(torch.uint8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        self.codes = (codes.unflatten(-1, (-1, 8 // bits)) << shifts).sum(-1, dtype=torch.uint8)

    def numbers(self) -> torch.Tensor:
        """What was packed, rounded: ``(…, groups · group)``."""
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=self.codes.device)
        codes = ((self.codes[..., None] >> shifts) & (2**self.bits - 1)).flatten(-2)  # (…, groups, group)
        return (self.least.float() + self.scale.float() * codes).flatten(-2).to(self.dtype)

    @classmethod
    def restored(cls, tensors: dict[str, torch.Tensor], bits: int) -> "Packed":
        """What :meth:`tensors` gave."""
        packed = cls.__new__(cls)
        packed.codes, packed.scale, packed.least = (tensors[name] for name in PACKED)
        packed.bits, packed.dtype = bits, packed.scale.dtype
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
        self.codes, self.scale, self.least = function(self.codes), function(self.scale), function(self.least)


class ByToken:
    """Units ``(batch, heads, n, head_dim)``, each in groups of its own."""

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group
        self.packed: Packed | None = None

    def __len__(self) -> int:
        return 0 if self.packed is None else self.packed.codes.shape[2]

    @property
    def num_bytes(self) -> int:
        return 0 if self.packed is None else self.packed.num_bytes

    def append(self, states: torch.Tensor) -> None:
        group = min(self.group, states.shape[-1])
        if states.shape[-1] % group or group % 4:
            raise ValueError(f"heads of {states.shape[-1]} numbers do not divide into groups of {group}")
        new = Packed(states, self.bits, group)
        if self.packed is None:
            self.packed = new
        else:
            parts = [(getattr(self.packed, name), getattr(new, name)) for name in PACKED]
            self.packed.codes, self.packed.scale, self.packed.least = (torch.cat(pair, dim=2) for pair in parts)

    def read(self) -> torch.Tensor:
        return self.packed.numbers()

    def keep(self, indices: torch.Tensor) -> None:
        self.change(lambda t: gather(t.flatten(3), indices).unflatten(3, t.shape[3:]))

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.packed is not None:
            self.packed.change(function)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.packed.tensors()

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        self.packed = Packed.restored(tensors, self.bits)

    def mark(self) -> int:
        return len(self)

    def rewind(self, mark: int, repeats: int) -> None:
        self.change(lambda t: t[::repeats, :, :mark].clone())


class ByChannel:
    """Units ``(batch, heads, n, head_dim)`` in groups of consecutive units, channel by channel, and a rest."""

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group
        self.packed: list[Packed] = []  # of (batch, heads, head_dim, a multiple of group) each
        self.rest: torch.Tensor | None = None  # (batch, heads, fewer than group, head_dim)

    def __len__(self) -> int:
        full = sum(part.codes.shape[3] * self.group for part in self.packed)
        return full + (0 if self.rest is None else self.rest.shape[2])

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.packed) + (0 if self.rest is None else self.rest.nbytes)

    def append(self, states: torch.Tensor) -> None:
        waiting = states if self.rest is None else torch.cat([self.rest, states], dim=2)
        full = waiting.shape[2] // self.group * self.group
        if full:
            self.packed.append(Packed(waiting[:, :, :full].transpose(2, 3), self.bits, self.group))
        self.rest = waiting[:, :, full:].clone()

    def read(self) -> torch.Tensor:
        return torch.cat([*(part.numbers().transpose(2, 3) for part in self.packed), self.rest], dim=2)

    def keep(self, indices: torch.Tensor) -> None:
        kept = gather(self.read(), indices)
        self.packed, self.rest = [], None
        self.append(kept)

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for part in self.packed:
            part.change(function)
        self.rest = None if self.rest is None else function(self.rest)

    def tensors(self) -> dict[str, torch.Tensor]:
        parts = {f"{i}.{name}": t for i, part in enumerate(self.packed) for name, t in part.tensors().items()}
        return parts | {"rest": self.rest}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        self.rest, count = tensors["rest"], (len(tensors) - 1) // len(PACKED)
        parts = [{name: tensors[f"{i}.{name}"] for name in PACKED} for i in range(count)]
        self.packed = [Packed.restored(part, self.bits) for part in parts]

    def mark(self) -> tuple[int, torch.Tensor | None]:
        return len(self.packed), self.rest  # the rest may fill a group, and be rounded

    def rewind(self, mark: tuple[int, torch.Tensor | None], repeats: int) -> None:
        count, rest = mark
        del self.packed[count:]
        if repeats > 1:
            self.change(lambda t: t[::repeats].clone())
        self.rest = rest


class QuantizedStore(UnitStore):
    """A layer's keys and values, packed."""

    def __init__(self, bits: int, scheme: str, group: int) -> None:
        self._kind = {"bits": bits, "scheme": scheme, "group": group}
        self.keys = (ByToken if scheme == "token" else ByChannel)(bits, group)
        self.values = ByToken(bits, group)

    @property
    def kind(self) -> dict:
        return self._kind

    def __len__(self) -> int:
        return len(self.values)

    @property
    def num_bytes(self) -> int:
        return self.keys.num_bytes + self.values.num_bytes

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys.append(keys)
        self.values.append(values)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys.read(), self.values.read()

    def keep(self, indices: torch.Tensor) -> None:
        self.keys.keep(indices)
        self.values.keep(indices)

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.keys.change(function)
        self.values.change(function)

    def tensors(self) -> dict[str, torch.Tensor]:
        halves = (("keys", self.keys), ("values", self.values))
        return {f"{half}.{name}": t for half, side in halves for name, t in side.tensors().items()}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        for half, side in (("keys.", self.keys), ("values.", self.values)):
            side.restore({name.removeprefix(half): t for name, t in tensors.items() if name.startswith(half)})

    def mark(self) -> tuple:
        return self.keys.mark(), self.values.mark()

    def rewind(self, mark: tuple, repeats: int = 1) -> None:
        self.keys.rewind(mark[0], repeats)
        self.values.rewind(mark[1], repeats)


def quantized(bits: int = 4, scheme: str = "token", group: int = 32) -> Callable[[], QuantizedStore]:
    """A maker of stores, for :func:`plpkg.retention.chunked_prefill`.

    Parameters
    ----------
    bits
        2 or 4.
    scheme
        ``"token"`` or ``"kivi"``.
    group
        Numbers that share a scale: a multiple of 4 that divides the head's width, or more than that, for all of it; up
        to 65,536.

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
