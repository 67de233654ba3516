"""LoRA adapters of strangers: what PEFT saves, read without PEFT and checked against this base before it is used.

The format is PEFT 0.21's: ``adapter_config.json``, and ``adapter_model.safetensors`` with
``base_model.model.<module>.lora_A.weight`` (rank, in) and ``….lora_B.weight`` (out, rank); an adapter adds
``scale · B A`` to the module's weight. Whatever is not plain LoRA on the base's linear modules is refused, and so is a
part of what the configuration names: an adapter serves as it was trained, or not at all. Nothing that it says is
imported, run as a regular expression, or looked up.
"""

import contextlib
import copy
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from plpkg import untrusted, wheels
from plpkg.backbones import fingerprint
from plpkg.checkpoints import private_folder, replace_file
from plpkg.lora_config import LoraFields, adapted, is_foreign, literal, read_fields, value_of
from plpkg.untrusted import MAX_CONFIG_BYTES, Entry, shown
from plpkg.validation import one_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
WRAPPED = "base_model.model."
"""How PEFT begins the names in a file."""


class InvalidAdapterError(ValueError):
    """An adapter is refused; the message is one sentence, the first reason that was found."""


@contextlib.contextmanager
def _refusing(about: str = "") -> Iterator[None]:
    """What is wrong within is an adapter's fault."""
    try:
        yield
    except InvalidAdapterError:
        raise
    except ValueError as error:
        raise InvalidAdapterError(f"{about}{error}") from error


@dataclass(frozen=True)
class AdapterLimits:
    """The largest rank of a module, the most bytes of the weights' file, and what ``model_type`` must be one of, if so.

    PEFT does not write ``model_type`` into a configuration: with ``None`` it may be absent.
    """

    max_rank: int = 1024
    max_bytes: int = 2**31
    model_types: tuple[str, ...] | None = None


# Cloudflare Workers AI, as reported: its announcement of April 2024, and its documentation of 2026.
POLICIES = {
    "workers_ai_launch": AdapterLimits(8, 100 * 10**6 - 1, ("mistral", "gemma", "llama")),
    "workers_ai_today": AdapterLimits(32, 300 * 10**6 - 1, ("mistral", "gemma", "llama")),
}


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

        config = dict(config) if isinstance(config, Mapping) else config.to_dict() | {"inference_mode": True}
        tensors = {}
        for path, each in factors.items():
            if isinstance(each, Factors):
                tensors |= {f"{path}.lora_A.weight": each.down, f"{path}.lora_B.weight": each.up}
            else:
                tensors[path.removeprefix(WRAPPED)] = each
        modules = {}
        for name, tensor in tensors.items():
            path = name.rpartition(".lora_")[0]
            up = tensors.get(f"{path}.lora_B.weight", tensor)
            modules.setdefault(path, _Module(tensor.shape[-1], up.shape[0], tensor.dtype))
        tensors = {
            f"{WRAPPED}{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        patterns = [config.get("exclude_modules"), config.get("target_modules")]
        if any(isinstance(each, str) and each != "all-linear" for each in patterns):
            # Readers do not run an expression: its modules are written by name.
            config |= {"target_modules": sorted(modules), "exclude_modules": None}
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted).encode()  # PEFT keeps names in sets
        weights = bytearray(_marked(save(tensors, {"format": "pt"}), backbone))
        name = config.get("base_model_name_or_path") or ""
        adapter = _read(text, weights, _Base(modules, [*modules], config.get("model_type"), name), AdapterLimits())
        for path, each in factors.items():
            made = adapter.factors.get(path, each)
            if isinstance(each, Factors) and not math.isclose(each.scale, made.scale, rel_tol=1e-6):
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
        layers = {path.removeprefix(WRAPPED): m for path, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        if any(layer.merged for layer in layers.values()):  # the backbone's fingerprint would be that of the sum
            raise InvalidAdapterError("an adapter is merged into the weights: unmerge it first")
        backbone = base_fingerprint(model)
        convert = getattr(model.base_model, "as_lora", None)  # a method that is not PEFT's own may be LoRA in disguise
        if convert is not None:
            with _refusing():
                return cls.of(*convert(name), backbone=backbone)
        if configs[name].peft_type != "LORA":
            raise InvalidAdapterError(f"{name!r} is a {configs[name].peft_type[:]} adapter, not LoRA")
        factors = {}
        for path, layer in layers.items():
            if name in getattr(layer, "lora_embedding_A", {}):
                raise InvalidAdapterError(f"{path} is an embedding: only linear modules are served")
            if name in getattr(layer, "lora_A", {}):
                down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
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
    base, limits = _base(model), _limits(limits)
    config_file, weights_file = Path(path, CONFIG), Path(path, WEIGHTS)
    with _refusing():
        config = bytes(untrusted.read_file(config_file, MAX_CONFIG_BYTES))
        if not weights_file.exists() and Path(path, "adapter_model.bin").exists():
            raise ValueError(f"{WEIGHTS} is missing; adapter_model.bin is a pickle, which is never read")
        header, size = untrusted.read_header(weights_file)
        pairs = _plan(config, header, size, base, limits)
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

    _base(model)
    with _refusing():
        method = str(untrusted.read_object(Path(path, CONFIG)).get("peft_type", "LORA"))
        if method not in PEFT_TYPE_TO_TUNER_MAPPING:
            define = "import the module that defines it first, plpkg.residual say"
            raise ValueError(f"PEFT does not know {shown(method)}: {define}")
        if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING[method], "as_lora"):
            return validate_adapter(path, model)
        if not Path(path, WEIGHTS).exists():  # PEFT would ask the hub
            raise ValueError(f"{path} has no {WEIGHTS}")
        # A copy that shares the model's values, which PEFT puts the adapter in.
        memo = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        memo |= {id(buffer): buffer for buffer in model.buffers()}
        return Adapter.from_peft(PeftModel.from_pretrained(copy.deepcopy(model, memo), path))


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
    base, limits = _base(model), _limits(limits)
    with _refusing():
        _plan(config, header, size, base, limits)


def targets(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """What can be adapted: ``(in, out)`` of the linear modules in the model's body, by path; not of its head."""
    return {path: (each.num_in, each.num_out) for path, each in _base(model).modules.items()}


def _marked(weights: bytes, backbone: str | None) -> bytes:
    """A safetensors file whose metadata say a backbone, too; safetensors itself writes two fields in any order."""
    if backbone is None:
        return weights
    end = 8 + int.from_bytes(weights[:8], "little")
    header = weights[8:end].replace(b'"format":"pt"', b'"backbone":"%s","format":"pt"' % backbone.encode(), 1)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + weights[end:]


def base_fingerprint(model: torch.nn.Module) -> str | None:
    """A language model's fingerprint; None in float16 or quantised, where it would be another's."""
    if not hasattr(getattr(model, "config", None), "to_dict") or getattr(model, "is_quantized", False):
        return None
    return None if model.dtype == torch.float16 else fingerprint(model)


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
        if shapes.get(path) != shape:
            raise InvalidAdapterError(f"{path} is {shapes.get(path, 'absent')} here, {shape} in the adapter")


class _Module(NamedTuple):
    num_in: int
    num_out: int
    dtype: torch.dtype


class _Base(NamedTuple):
    """What an adapter must fit: the linear modules of the body, the paths of all modules, and whose they are."""

    modules: dict[str, _Module]
    paths: list[str]
    model_type: str | None
    name: str
    model: torch.nn.Module | None = None


def _base(model: torch.nn.Module) -> _Base:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"a Hugging Face causal language model is needed, got {shown(model)}")
    named = dict(model.named_modules())
    tuned = [f", in {path}" for path, module in named.items() if isinstance(module, BaseTunerLayer)]
    if isinstance(model, PeftModel) or tuned:
        where = "".join(tuned[:1])
        raise ValueError(f"this {type(model).__name__} has an adapter already{where}: take the base without it")
    body = set(model.base_model.modules()) - {model.get_output_embeddings()}
    modules = {}
    for path, module in named.items():
        if module in body and type(module).forward in (torch.nn.Linear.forward, Conv1D.forward):  # no routers
            weight = module.weight
            sizes = weight.shape if isinstance(module, Conv1D) else (module.in_features, module.out_features)
            modules[path] = _Module(*sizes, weight.dtype if weight.is_floating_point() else model.dtype)
    return _Base(modules, [*named], model.config.model_type, model.config._name_or_path, model)


def _limits(limits: str | AdapterLimits | None) -> AdapterLimits:
    if limits is None or isinstance(limits, AdapterLimits):
        return limits or AdapterLimits()
    return POLICIES[one_of("limits", limits, tuple(POLICIES))]


class _Pair(NamedTuple):
    """A module's two tensors in the file, by what the header says of them."""

    down: Entry
    up: Entry
    scale: float


def _plan(config: bytes, header: bytes, size: int, base: _Base, limits: AdapterLimits) -> dict[str, _Pair]:
    """Check all that can be checked without the values; ValueError with the first reason."""
    if len(config) > MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG} has {len(config):,} bytes, at most {MAX_CONFIG_BYTES:,} are allowed")
    with _refusing(f"{CONFIG}: "):
        fields = read_fields(config)
        if limits.model_types and fields.model_type not in limits.model_types:
            raise ValueError(f"model_type={shown(fields.model_type)} must be one of {', '.join(limits.model_types)}")
        if fields.model_type not in (None, base.model_type):
            raise ValueError(f"model_type={shown(fields.model_type)} must be the base's, {shown(base.model_type)}")
        trained_on = fields.base_model_name_or_path
        original = wheels.is_of_the_original(trained_on, base.name)
        if not original and is_foreign(trained_on, base.name):
            raise ValueError(f"base_model_name_or_path={shown(trained_on)} is not this base, {shown(base.name)}")
    if size > limits.max_bytes:
        raise ValueError(f"{WEIGHTS} has {size:,} bytes, at most {limits.max_bytes:,} are allowed")
    found, unsound = untrusted.entries(header, size)
    if unsound:
        raise ValueError(unsound[0])
    given = {}
    for path in base.modules:
        names = [f"{WRAPPED}{path}.lora_{side}.weight" for side in "AB"]
        sides = [found.pop(name) for name in names if name in found]
        if sides:
            given[path] = sides
    if found:
        only = "only lora_A.weight and lora_B.weight of this base's linear modules are served"
        raise ValueError(f"{shown(next(iter(found)))}: {only}, not of its head, embeddings or experts")
    if not given:
        raise ValueError("the weights adapt no module of this base")
    pairs = {path: _pair(path, sides, base.modules[path], fields, limits) for path, sides in given.items()}
    allowed, needed = adapted(fields, base.paths, set(base.modules), set(pairs))
    for path in base.paths:
        if path in pairs and path not in allowed:
            raise ValueError(f"{shown(path)}: the configuration does not have it adapted")
        if path in needed and path not in pairs:
            raise ValueError(f"{shown(path)}: the weights lack it, and the configuration has it adapted")
    said = untrusted.strict_json(header[8 : 8 + untrusted.header_length(header)])
    backbone = said.get("__metadata__", {}).get("backbone")
    if backbone and base.model is not None and not original:  # else the fingerprint is the original's
        actual = base_fingerprint(base.model)
        if actual not in (None, backbone):
            mark = shown(backbone)[1:13]
            raise ValueError(f"it was trained on a backbone with fingerprint {mark}…, and this one has {actual[:12]}…")
    return pairs


def _pair(path: str, sides: list[Entry], module: _Module, fields: LoraFields, limits: AdapterLimits) -> _Pair:
    """A module's factors; ValueError if they do not fit it, or not what the configuration says."""
    shapes = [list(each.shape) for each in sides]
    rank = shapes[0][0]
    if shapes != [[rank, module.num_in], [module.num_out, rank]]:
        needed = f"[rank, {module.num_in}] and [{module.num_out}, rank]"
        raise ValueError(f"{shown(path)}: lora_A and lora_B have the shapes {shapes}, this base needs {needed}")
    if rank > limits.max_rank:
        raise ValueError(f"{shown(path)}: the rank is {rank}, at most {limits.max_rank} is allowed")
    if all(map(literal, fields.rank_pattern or {})):  # of regular expressions, the weights alone say what they mean
        said = value_of(fields.rank_pattern, path, fields.r)
        if rank != said:
            raise ValueError(f"{shown(path)}: the rank is {rank}, but the configuration says {said}")
    alpha = value_of(fields.alpha_pattern, path, fields.lora_alpha)
    scale = alpha / (math.sqrt(rank) if fields.use_rslora else rank)
    numbers = torch.finfo(torch.float32)
    if not numbers.tiny <= abs(scale) <= numbers.max:  # with 0 it would be the base under an adapter's name
        raise ValueError(f"{shown(path)}: the scale {scale:g} is none in float32")
    return _Pair(*sides, scale)


def _read(config: bytes, weights: bytes, base: _Base, limits: AdapterLimits) -> Adapter:
    weights = weights if isinstance(weights, bytearray) else bytearray(weights)
    with _refusing():
        header = weights[: 8 + untrusted.MAX_HEADER_BYTES]
        return _adapter(_plan(config, header, len(weights), base, limits), config, weights, base)


def _adapter(pairs: dict[str, _Pair], config: bytes, weights: bytearray, base: _Base) -> Adapter:
    """The adapter of what :func:`_plan` has checked, now that its values can be looked at."""
    factors = {}
    for path, pair in pairs.items():
        each = Factors(untrusted.tensor(weights, pair.down), untrusted.tensor(weights, pair.up), pair.scale)
        dtype = base.modules[path].dtype
        if not (untrusted.finite(each.down, dtype) and untrusted.finite(each.up, dtype, each.scale)):
            raise ValueError(f"{shown(path)}: has values that are not finite in {dtype}, scaled or not")
        factors[path] = each
    digest = hashlib.sha256()
    for content in (config, weights):
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    files = {CONFIG: config, WEIGHTS: weights}
    return Adapter(untrusted.strict_json(config), factors, files, digest.hexdigest())
