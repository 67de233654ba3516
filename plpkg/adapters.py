"""LoRA adapters of strangers: what PEFT saves, read without PEFT and checked against this base before it is used.

Whatever is not plain LoRA on the base's linear modules is refused, and so is a part of what the configuration names: an
adapter serves as it was trained, or not at all. Nothing that it says is imported, run as a regular expression, or
looked up. :mod:`plpkg.lora_files` has the format and judges all but the values, which are looked at here.
"""

import copy
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from plpkg import untrusted
from plpkg.backbones import fingerprint
from plpkg.checkpoints import private_folder, replace_file
from plpkg.lora_files import (
    CONFIG,
    POLICIES,
    WEIGHTS,
    WRAPPED,
    AdapterLimits,
    Base,
    InvalidAdapterError,
    Module,
    Pair,
    judge,
    refusing,
)
from plpkg.untrusted import MAX_CONFIG_BYTES, shown
from plpkg.validation import one_of


@dataclass(frozen=True, eq=False)
class Factors:
    """A module's factors: ``down`` is A, (rank, in), ``up`` is B, (out, rank); ``scale`` is of their product."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """A checked adapter, from :func:`validate_adapter`, :func:`read_adapter` or :meth:`of`.

    Attributes
    ----------
    config
        What is in ``adapter_config.json``.
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
            The :func:`base_fingerprint` of what it was trained on, which the weights' metadata say: others refuse it.

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
        adapter = _read(text, weights, base, AdapterLimits())
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


def validate_adapter(path: str | Path, model: torch.nn.Module, limits: str | AdapterLimits | None = None) -> Adapter:
    """Read the adapter in a folder, and check it against this base.

    Parameters
    ----------
    path
        The folder. Its two files are read, never more of them than is allowed; no other file is opened.
    model
        The base, a Hugging Face causal language model.
    limits
        A name of :data:`POLICIES`, or one's own; ``None`` leaves those of safety.

    Raises
    ------
    InvalidAdapterError
        With the first reason against it: of the configuration, of names and shapes, or of the values.
    """
    base = _base(model)
    limits = _limits(limits)
    config_file = Path(path, CONFIG)
    weights_file = Path(path, WEIGHTS)
    with refusing():
        config = bytes(untrusted.read_file(config_file, MAX_CONFIG_BYTES))
        if not weights_file.exists() and Path(path, "adapter_model.bin").exists():
            raise ValueError(f"{WEIGHTS} is missing; adapter_model.bin is a pickle, which is never read")
        header, size = untrusted.read_header(weights_file)
        pairs = judge(config, header, size, base, limits)
        weights = untrusted.read_file(weights_file, limits.max_bytes)
        if len(weights) != size or weights[: len(header)] != header:
            raise ValueError(f"{WEIGHTS} changed while it was read")
        return _adapter(pairs, config, weights, base)


def load_adapter(path: str | Path, model: torch.nn.Module) -> Adapter:
    """One's own adapter in a folder: as :func:`validate_adapter`, or of another method of PEFT that is LoRA as well.

    PEFT loads the latter, by the rules of whoever defined its method; so this is not for the folders of strangers.

    Raises
    ------
    InvalidAdapterError
        As :func:`validate_adapter`; the method cannot be LoRA, is unknown to PEFT, or refuses the folder.
    """
    from peft import PeftModel
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    _base(model)  # refuses what no adapter fits
    with refusing():
        method = str(untrusted.read_object(Path(path, CONFIG)).get("peft_type", "LORA"))
        if method not in PEFT_TYPE_TO_TUNER_MAPPING:
            define = "import the module that defines it first, plpkg.residual say"
            raise ValueError(f"PEFT does not know {shown(method)}: {define}")
        if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING[method], "as_lora"):
            return validate_adapter(path, model)
        if not Path(path, WEIGHTS).exists():  # PEFT would ask the hub
            raise ValueError(f"{path} has no {WEIGHTS}")
        # PEFT puts the adapter into the model that it is given: a copy, which shares the parameters' values.
        memo = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        memo |= {id(buffer): buffer for buffer in model.buffers()}
        adapted = PeftModel.from_pretrained(copy.deepcopy(model, memo), path)
        return Adapter.from_peft(adapted)


def read_adapter(
    config: bytes, weights: bytes, model: torch.nn.Module, limits: str | AdapterLimits | None = None
) -> Adapter:
    """Check an adapter from the bytes of its two files, as :func:`validate_adapter` does.

    A ``bytearray`` becomes the adapter's own, anything else is copied.

    Raises
    ------
    InvalidAdapterError
        With the first reason against it.
    """
    return _read(bytes(config), weights, _base(model), _limits(limits))


def inspect(
    config: bytes, header: bytes, size: int, model: torch.nn.Module, limits: str | AdapterLimits | None = None
) -> None:
    """Check what can be known of an adapter before its values are there.

    ``header`` are the first 8 + N bytes of the weights' file (:func:`plpkg.untrusted.header_length` gives N), which
    has ``size`` bytes as a whole.

    Raises
    ------
    InvalidAdapterError
        With the first reason against it.
    """
    base = _base(model)
    limits = _limits(limits)
    with refusing():
        judge(config, header, size, base, limits)


def targets(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """The modules that can be adapted: ``(in, out)`` of the linear ones in the model's body, by path; not the head."""
    return {path: (each.num_in, each.num_out) for path, each in _base(model).modules.items()}


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


def base_fingerprint(model: torch.nn.Module) -> str | None:
    """A language model's fingerprint; None in float16 or quantised, where it would be another's."""
    is_language_model = hasattr(getattr(model, "config", None), "to_dict")
    if not is_language_model or getattr(model, "is_quantized", False) or model.dtype == torch.float16:
        return None
    return fingerprint(model)


def require_fit(adapter: Adapter, model: torch.nn.Module) -> None:
    """Refuse an adapter that was checked against another base.

    Raises
    ------
    InvalidAdapterError
        A module is absent here, or of another shape.
    """
    shapes = targets(model)
    for path, each in adapter.factors.items():
        shape = (each.down.shape[1], each.up.shape[0])
        here = shapes.get(path, "absent")
        if here != shape:
            raise InvalidAdapterError(f"{path} is {here} here, {shape} in the adapter")


def _base(model: torch.nn.Module) -> Base:
    """The base that a model is; ValueError if it is no language model, or has an adapter."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"a Hugging Face causal language model is needed, got {shown(model)}")
    named = dict(model.named_modules())
    tuned = [path for path, module in named.items() if isinstance(module, BaseTunerLayer)]
    if isinstance(model, PeftModel) or tuned:
        where = f", in {tuned[0]}" if tuned else ""
        raise ValueError(f"this {type(model).__name__} has an adapter already{where}: take the base without it")
    config = model.config
    calculate = functools.partial(base_fingerprint, model)
    return Base(_linear_modules(model), [*named], config.model_type, config._name_or_path, calculate)


def _linear_modules(model: torch.nn.Module) -> dict[str, Module]:
    """The linear modules of a model's body, by path: neither its head, nor the routers of its experts."""
    from transformers.pytorch_utils import Conv1D

    body = set(model.base_model.modules()) - {model.get_output_embeddings()}
    modules = {}
    for path, module in model.named_modules():
        forward = type(module).forward  # a router is a Linear with a forward of its own
        if module not in body or forward not in (torch.nn.Linear.forward, Conv1D.forward):
            continue
        weight = module.weight
        if isinstance(module, Conv1D):  # GPT-2's, whose weight is (in, out)
            num_in, num_out = weight.shape
        else:
            num_in, num_out = module.in_features, module.out_features
        dtype = weight.dtype if weight.is_floating_point() else model.dtype  # quantised: what it computes in
        modules[path] = Module(num_in, num_out, dtype)
    return modules


def _limits(limits: str | AdapterLimits | None) -> AdapterLimits:
    """Limits by their name in :data:`POLICIES`, one's own as they are, the default ones for None."""
    if limits is None:
        return AdapterLimits()
    if isinstance(limits, AdapterLimits):
        return limits
    return POLICIES[one_of("limits", limits, tuple(POLICIES))]


def _read(config: bytes, weights: bytes, base: Base, limits: AdapterLimits) -> Adapter:
    """The adapter of both files' bytes."""
    if not isinstance(weights, bytearray):
        weights = bytearray(weights)  # its tensors are views, which torch wants to be writable
    header = weights[: 8 + untrusted.MAX_HEADER_BYTES]
    with refusing():
        pairs = judge(config, header, len(weights), base, limits)
        return _adapter(pairs, config, weights, base)


def _adapter(pairs: dict[str, Pair], config: bytes, weights: bytearray, base: Base) -> Adapter:
    """The adapter of what :func:`~plpkg.lora_files.judge` has let pass, once its values are found finite."""
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
