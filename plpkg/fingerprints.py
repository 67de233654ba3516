"""Whether a model has changed since somebody looked at it: a stamp for this process, a digest for files."""

import functools
import hashlib
import itertools
import re
import weakref
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor

ADAPTER_PREFIXES = ("privatelora_", "ladder_", "lora_", "modules_to_save.")
COMPILED = "_orig_mod."
"""A part of the names of what ``torch.compile`` has wrapped."""


def own_name(name: str) -> str:
    """A tensor's name in the backbone alone, whatever PEFT and torch.compile have put around it."""
    return re.sub(r"^base_model\.model\.|\.base_layer|\.original_module", "", name.replace(COMPILED, ""))


def belongs_to_adapter(name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter, and not to the backbone."""
    return any(prefix in name for prefix in ADAPTER_PREFIXES)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer by name, adapters' and those that are not saved included.

    Without frequencies that each forward pass writes anew, by the length of its text (LongRoPE, dynamic NTK).
    """
    for name, module in model.named_modules(remove_duplicate=False):  # once, which is twice as fast as torch's own
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        rewritten = not {"dynamic", "longrope"}.isdisjoint(kinds)
        for key, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if tensor is None or (rewritten and key.endswith("inv_freq")):
                continue
            path = f"{name}.{key}".replace(COMPILED, "").removeprefix(".")
            yield path, tensor


def _adapters(model: torch.nn.Module) -> list[tuple]:
    """Of every adapted layer, which adapters work in it, and how strongly: no tensor says so."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    rows = []
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        path = name.replace(COMPILED, "")
        scales = sorted(getattr(layer, "scaling", {}).items())
        rows.append((path, *layer.active_adapters, layer.disable_adapters, *layer.merged_adapters, *scales))
    return rows


@functools.lru_cache
def _places(shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """The index of sixteen values of a tensor, evenly spaced: one row of positions for each dimension."""
    places = torch.linspace(0, shape.numel() - 1, 16, dtype=torch.float64, device="cpu")  # not all devices have float64
    return torch.unravel_index(places.long(), shape)


def _has_no_values(tensor: torch.Tensor) -> bool:
    """Whether it is a shape alone, on the meta device or in torch's fake mode."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _samples(tensors: list[tuple[str, torch.Tensor]]) -> list[bytes]:
    """Sixteen values of each tensor, evenly spaced; those of a device are fetched at once."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for _, tensor in tensors:
        if _has_no_values(tensor) or not tensor.numel():
            continue
        tensor = tensor.detach()
        if tensor.ndim == 0:  # an index needs a dimension
            tensor = tensor[None]
        values = tensor[_places(tensor.shape)]  # (16,); a transposed tensor is not copied for it
        by_device.setdefault(tensor.device, []).append(values.view(torch.uint8))
    return [torch.cat(values).cpu().numpy().tobytes() for values in by_device.values()]


class Stamp:
    """A model as :func:`stamp` has seen it. A tensor is known by itself, not by its address, which is used again."""

    def __init__(self, model: torch.nn.Module, adapters: bool, values: bool) -> None:
        tensors = []
        for name, tensor in _tensors(model):
            if adapters or not belongs_to_adapter(name):
                tensors.append((own_name(name), tensor))
        self._refs = []
        seen = []
        for name, tensor in tensors:
            address = 0
            times_written = 0
            # A weight that accelerate has put elsewhere is another tensor after each use, without values.
            if not _has_no_values(tensor):
                self._refs.append(weakref.ref(tensor))
                address = tensor.data_ptr()
                if not tensor.is_inference():  # torch does not count the writes to those
                    times_written = tensor._version
            seen.append((name, address, tensor.dtype, tuple(tensor.shape), times_written))
        self._seen = (_adapters(model) if adapters else None, seen)
        # Fused optimizers, the default of transformers' Trainer, write without torch's counting it.
        self._values = _samples(tensors) if values else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stamp) or self._seen != other._seen:
            return False
        both_have_values = self._values is not None and other._values is not None
        if both_have_values and self._values != other._values:
            return False
        for mine, its in zip(self._refs, other._refs, strict=True):
            tensor = mine()
            if tensor is None or tensor is not its():
                return False
        return True


def stamp(model: torch.nn.Module, *, adapters: bool = True, values: bool = True) -> Stamp:
    """Whether anything changed that changes the logits: the stamps of then and now are equal, or something did.

    Cheap, whatever the model's size: it reads where each tensor is, how often it was written to, and sixteen of its
    values. It is for this process; :func:`digest` is for files. Writes that torch does not count, those of a fused
    optimizer, through ``tensor.data`` or within ``torch.inference_mode()``, are seen only if they change one of the
    sixteen; what hooks and the configuration say is not seen. Without ``adapters`` it is the backbone's alone. Without
    ``values`` it reads none, which is ten times as fast, and equals another stamp whatever the values.
    """
    return Stamp(model, adapters, values)


def digest(model: torch.nn.Module) -> str:
    """The SHA-256 of every tensor, adapters' included, and of which adapters work: what :func:`stamp` is for files.

    It reads the whole model. :func:`plpkg.backbones.fingerprint` is the backbone's alone.
    """
    result = hashlib.sha256(repr(_adapters(model)).encode())
    for name, tensor in sorted(_tensors(model), key=lambda item: item[0]):
        values = tensor.detach().cpu().contiguous().reshape(-1)
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        result.update(values.view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
