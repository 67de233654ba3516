"""An adapter: what PEFT saves, as tensors, as the bytes of its two files, and under a digest."""

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from plpkg.adapters.base import base_fingerprint
from plpkg.adapters.file import (
    CONFIG,
    WEIGHTS,
    WRAPPED,
    AdapterLimits,
    Base,
    InvalidAdapterError,
    Module,
    Pair,
    check_files,
    refusing,
)
from plpkg.files import untrusted
from plpkg.files.checkpoints import private_folder, replace_file
from plpkg.files.untrusted import shown


@dataclass(frozen=True, eq=False)
class Factors:
    """A module's factors: ``down`` is A, (rank, in), ``up`` is B, (out, rank); ``scale`` is of their product."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """A checked adapter: :func:`~plpkg.adapters.reading.validate_adapter` reads one, :meth:`of` makes one.

    Attributes
    ----------
    config
        The fields of ``adapter_config.json``.
    factors
        By the module's path in the base, in the base's order. Their tensors are views of ``files``.
    files
        The very bytes of the two files, by name; not to be changed.
    digest
        SHA-256 of both files in hex, each with its length before it: the adapter's identity.
    """

    config: dict
    factors: dict[str, Factors]
    files: dict[str, bytes | bytearray]
    digest: str

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(each.down.shape[0] for each in self.factors.values())

    @property
    def num_bytes(self) -> int:
        """The bytes of both files."""
        return sum(map(len, self.files.values()))

    def __repr__(self) -> str:
        return f"Adapter({len(self.factors)} modules, rank {self.rank}, {self.num_bytes:,} bytes, {self.digest[:12]})"

    @classmethod
    def of(cls, config, factors: Mapping[str, Factors | torch.Tensor], *, backbone: str | None = None) -> "Adapter":
        """Make an adapter, and the files that PEFT loads, of what was trained.

        Parameters
        ----------
        config
            A ``LoraConfig``, or a mapping of its fields.
        factors
            By module; or the tensors by PEFT's names, with ``base_model.model.`` before them or not.
        backbone
            The :func:`~plpkg.adapters.base_fingerprint` of what it was trained on. The weights' metadata name it, and
            other bases refuse the adapter.

        Raises
        ------
        InvalidAdapterError
            They are no adapter, or disagree in modules, ranks or scales.
        """
        from safetensors.torch import save

        if not isinstance(config, Mapping):
            config = config.to_dict() | {"inference_mode": True}
        config = dict(config)
        tensors = _by_peft_names(factors)
        modules = _modules_of(tensors)
        patterns = [config.get("exclude_modules"), config.get("target_modules")]
        if any(isinstance(each, str) and each != "all-linear" for each in patterns):
            # Readers do not run an expression: its modules are written by name.
            config |= {"target_modules": sorted(modules), "exclude_modules": None}
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted).encode()  # PEFT keeps names in sets
        copies = {
            f"{WRAPPED}{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        weights = bytearray(_marked(save(copies, {"format": "pt"}), backbone))
        # The files are read again as a stranger's would be, against a base that has just these modules.
        base = Base(modules, [*modules], config.get("model_type"), config.get("base_model_name_or_path") or "")
        adapter = from_bytes(text, weights, base, AdapterLimits())
        for path, each in factors.items():
            if not isinstance(each, Factors):
                continue
            made = adapter.factors[path]
            if not math.isclose(each.scale, made.scale, rel_tol=1e-6):
                raise InvalidAdapterError(f"{path}: scale={each.scale}, but config makes it {made.scale}")
        return adapter

    @classmethod
    def from_peft(cls, model: torch.nn.Module, name: str = "default") -> "Adapter":
        """Make an adapter of one that a model has: a ``PeftModel``'s LoRA, or what its method says it is as LoRA.

        Raises
        ------
        InvalidAdapterError
            The model has none of this name, or it is more than plain LoRA, or cannot be LoRA.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        configs = getattr(model, "peft_config", {})
        if name not in configs:
            raise InvalidAdapterError(f"{type(model).__name__} has no adapter {name!r}, it has {[*configs]}")
        if any(p.is_meta for p in model.parameters()):
            raise InvalidAdapterError("the model's weights are not in memory: save the adapter, and load its folder")
        layers = {}
        for path, module in model.named_modules():
            if isinstance(module, BaseTunerLayer):
                layers[path.removeprefix(WRAPPED)] = module
        if any(layer.merged for layer in layers.values()):  # the backbone's fingerprint would be that of the sum
            raise InvalidAdapterError("an adapter is merged into the weights: unmerge it first")
        backbone = base_fingerprint(model)
        convert = getattr(model.base_model, "as_lora", None)  # a method that is not PEFT's own may be LoRA in disguise
        if convert is not None:
            with refusing():
                config, tensors = convert(name)
                return cls.of(config, tensors, backbone=backbone)
        if configs[name].peft_type != "LORA":
            raise InvalidAdapterError(f"{name!r} is a {configs[name].peft_type[:]} adapter, not LoRA")
        factors = {}
        for path, layer in layers.items():
            if name in getattr(layer, "lora_embedding_A", {}):
                raise InvalidAdapterError(f"{path} is an embedding: only linear modules are served")
            if name in getattr(layer, "lora_A", {}):
                down = layer.lora_A[name].weight
                up = layer.lora_B[name].weight
                factors[path] = Factors(down, up, layer.scaling[name])
        return cls.of(configs[name], factors, backbone=backbone)

    def save(self, folder: str | Path) -> None:
        """Write both files, their owner's alone, each whole or not at all. The configuration comes last."""
        private_folder(folder)
        for name in (WEIGHTS, CONFIG):
            write = functools.partial(Path.write_bytes, data=self.files[name])
            replace_file(Path(folder, name), write, private=True)


def _by_peft_names(factors: Mapping[str, Factors | torch.Tensor]) -> dict[str, torch.Tensor]:
    """Factors by module, or tensors by PEFT's names: as tensors by PEFT's names, without ``base_model.model.``."""
    tensors = {}
    for path, each in factors.items():
        if isinstance(each, Factors):
            tensors[f"{path}.lora_A.weight"] = each.down
            tensors[f"{path}.lora_B.weight"] = each.up
        else:
            tensors[path.removeprefix(WRAPPED)] = each
    return tensors


def _modules_of(tensors: dict[str, torch.Tensor]) -> dict[str, Module]:
    """The linear modules that these tensors fit, read off A, (rank, in), and B, (out, rank).

    A tensor of another name becomes a module as well, so that the reader says what is wrong with it.
    """
    modules = {}
    for name, tensor in tensors.items():
        path = name.rpartition(".lora_")[0]
        if path not in modules:
            up = tensors.get(f"{path}.lora_B.weight", tensor)
            modules[path] = Module(tensor.shape[-1], up.shape[0], tensor.dtype)
    return modules


def _marked(weights: bytes, backbone: str | None) -> bytes:
    """A safetensors file whose metadata name a backbone, too.

    safetensors would write two fields of metadata in any order, and the same adapter have two digests.
    """
    if backbone is None:
        return weights
    end = 8 + int.from_bytes(weights[:8], "little")
    header = weights[8:end].replace(b'"format":"pt"', b'"backbone":"%s","format":"pt"' % backbone.encode(), 1)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + weights[end:]


def from_bytes(config: bytes, weights: bytes | bytearray, base: Base, limits: AdapterLimits) -> Adapter:
    """The adapter of both files' bytes."""
    if not isinstance(weights, bytearray):
        weights = bytearray(weights)  # its tensors are views, which torch wants to be writable
    header = weights[: 8 + untrusted.MAX_HEADER_BYTES]
    with refusing():
        pairs = check_files(config, header, len(weights), base, limits)
        return from_pairs(pairs, config, weights, base)


def from_pairs(pairs: dict[str, Pair], config: bytes, weights: bytearray, base: Base) -> Adapter:
    """The adapter of what :func:`~plpkg.adapters.file.check_files` has let pass, once its values are found finite."""
    factors = {}
    for path, pair in pairs.items():
        down = untrusted.tensor(weights, pair.down)
        up = untrusted.tensor(weights, pair.up)
        dtype = base.modules[path].dtype
        if not (untrusted.finite(down, dtype) and untrusted.finite(up, dtype, pair.scale)):
            raise ValueError(f"{shown(path)}: has values that are not finite in {dtype}, scaled or not")
        factors[path] = Factors(down, up, pair.scale)
    digest = hashlib.sha256()
    for content in (config, weights):
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    files = {CONFIG: config, WEIGHTS: weights}
    return Adapter(untrusted.strict_json(config), factors, files, digest.hexdigest())
