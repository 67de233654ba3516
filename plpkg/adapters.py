"""LoRA adapters of strangers: what PEFT saves, read without PEFT and checked against this base before it is used.

The format is PEFT 0.21's: ``adapter_config.json``, and ``adapter_model.safetensors`` with
``base_model.model.<module>.lora_A.weight`` (rank, in) and ``….lora_B.weight`` (out, rank); an adapter adds
``scale · B A`` to the module's weight. Whatever is not plain LoRA on the base's linear modules is refused: an adapter
serves as it was trained, or not at all. Nothing that it says is imported, evaluated as a pattern, or looked up.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from plpkg import untrusted
from plpkg.checkpoints import replace_file
from plpkg.untrusted import Entry, shown
from plpkg.validation import one_of

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG, WEIGHTS, MAX_CONFIG_BYTES = "adapter_config.json", "adapter_model.safetensors", 2**16
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The fields of peft 0.21.2's LoraConfig, in four parts. What a value must be one of, …
ALLOWED = dict(
    peft_type=("LORA",),
    task_type=("CAUSAL_LM", None),
    bias=("none",),
    use_rslora=(False, True),
    fan_in_fan_out=(False, True),
    megatron_core=("megatron.core", None),  # the name of a module that PEFT would import
    init_lora_weights=(True, False, "gaussian", "eva", "orthogonal", "mica"),  # the others change the base as well
)
# … what has a rule of its own, as has the model_type that PEFT leaves out; what does nothing in a trained adapter; …
CHECKED = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules")
CHECKED += ("layers_to_transform", "model_type")
HARMLESS = ("base_model_name_or_path", "revision", "peft_version", "inference_mode", "lora_dropout", "runtime_config")
HARMLESS += ("qalora_group_size", "eva_config", "auto_mapping")  # the last names classes that PEFT would import
# … and what is more than plain LoRA, or a regular expression, unless it is empty.
VARIANTS = ("alora_invocation_tokens", "arrow_config", "corda_config", "ensure_weight_tying")
VARIANTS += ("kasa_config", "layer_replication", "layers_pattern", "loftq_config", "lora_bias")
VARIANTS += ("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "target_parameters")
VARIANTS += ("trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "velora_config")


class InvalidAdapterError(ValueError):
    """An adapter is refused. ``reasons`` are sentences, at most 20 of them; the message is one line with all."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons[:20] + [f"and {len(reasons) - 20} more"] * (len(reasons) > 20)
        super().__init__("; ".join(self.reasons))


@dataclass(frozen=True)
class Limits:
    """The largest rank of a module, the most bytes of the weights' file, and what ``model_type`` must be one of, if so.

    PEFT does not write ``model_type`` into a configuration: with ``None`` it may be absent.
    """

    max_rank: int = 1024
    max_bytes: int = 2**31
    model_types: tuple[str, ...] | None = None


# Cloudflare Workers AI, as reported: its announcement of April 2024, and its documentation of 2026.
POLICIES = {
    "workers_ai_launch": Limits(8, 100 * 10**6 - 1, ("mistral", "gemma", "llama")),
    "workers_ai_today": Limits(32, 300 * 10**6 - 1, ("mistral", "gemma", "llama")),
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
    def of(cls, config: "Mapping | LoraConfig", factors: Mapping[str, Factors]) -> "Adapter":
        """Make an adapter, and the files that PEFT loads, of a configuration and what was trained.

        Raises
        ------
        InvalidAdapterError
            They are no adapter, or disagree in modules, ranks or scales.
        """
        from safetensors.torch import save

        config = dict(config) if isinstance(config, Mapping) else config.to_dict() | {"inference_mode": True}
        tensors, modules = {}, {}
        for path, each in factors.items():
            conv1d = config.get("fan_in_fan_out") is True
            modules[path] = _Module(each.down.shape[-1], each.up.shape[0], each.down.dtype, conv1d)
            for side, tensor in (("A", each.down), ("B", each.up)):
                copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                tensors[f"base_model.model.{path}.lora_{side}.weight"] = copy
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted).encode()  # PEFT keeps names in sets
        weights = bytearray(save(tensors, {"format": "pt"}))
        adapter = _read(text, weights, _Base(modules, config.get("model_type"), None), Limits())
        for path, each in adapter.factors.items():
            if not math.isclose(each.scale, factors[path].scale, rel_tol=1e-6):
                raise InvalidAdapterError([f"{path}: scale={factors[path].scale}, but config makes it {each.scale}"])
        return adapter

    def save(self, folder: str | Path) -> None:
        """Write both files, each whole or not at all: the configuration last, since with it the adapter is there."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in (WEIGHTS, CONFIG):
            replace_file(Path(folder, name), lambda partial, content=self.files[name]: partial.write_bytes(content))


def validate_adapter(path: str | Path, model: torch.nn.Module, limits: str | Limits | None = None) -> Adapter:
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
        With every reason that can be known: of the files, the configuration, names, shapes and values.
    """
    files, reasons, limits = {}, [], _limits(limits)
    for name, read in (
        (CONFIG, lambda file: untrusted.read_file(file, MAX_CONFIG_BYTES)),
        (WEIGHTS, untrusted.read_header),
    ):
        try:
            files[name] = read(Path(path, name))
        except ValueError as error:
            pickled = name == WEIGHTS and not Path(path, name).exists() and Path(path, "adapter_model.bin").exists()
            hint = "; adapter_model.bin is a pickle, which is never read: save it as safetensors" if pickled else ""
            reasons.append(f"{error}{hint}")
    header, size = files.get(WEIGHTS, (None, 0))
    plan = _plan(files.get(CONFIG), header, size, _base(model), limits, reasons)
    if not plan.readable:
        raise InvalidAdapterError(plan.reasons)
    try:
        weights = untrusted.read_file(Path(path, WEIGHTS), limits.max_bytes)
        if len(weights) != size or weights[: len(header)] != header:
            raise ValueError(f"{WEIGHTS} changed while it was read")
    except ValueError as error:
        raise InvalidAdapterError([*plan.reasons, str(error)]) from None
    return _adapter(plan, weights)


def read_adapter(config: bytes, weights: bytes, model: torch.nn.Module, limits: str | Limits | None = None) -> Adapter:
    """Check an adapter from the bytes of its two files, as :func:`validate_adapter` does.

    A ``bytearray`` becomes the adapter's own, anything else is copied.
    """
    return _read(bytes(config), weights, _base(model), _limits(limits))


def inspect(
    config: bytes, header: bytes, size: int, model: torch.nn.Module, limits: str | Limits | None = None
) -> list[str]:
    """Every reason against an adapter that can be known before its values are there.

    ``header`` are the first 8 + N bytes of the weights' file (:func:`plpkg.untrusted.header_length` gives N), which
    has ``size`` bytes as a whole.
    """
    return InvalidAdapterError(_plan(config, header, size, _base(model), _limits(limits)).reasons).reasons


def targets(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """What can be adapted: ``(in, out)`` of the linear modules in the model's body, by path; not of its head."""
    return {path: (each.num_in, each.num_out) for path, each in _base(model).modules.items()}


def require_fit(adapter: Adapter, model: torch.nn.Module) -> None:
    """Refuse an adapter that was checked against another base: InvalidAdapterError."""
    shapes = targets(model)
    pairs = {path: (each.down.shape[1], each.up.shape[0]) for path, each in adapter.factors.items()}
    if wrong := [path for path, shape in pairs.items() if shapes.get(path) != shape]:
        sentences = [f"{path} is {shapes.get(path, 'absent')} here, {pairs[path]} in the adapter" for path in wrong]
        raise InvalidAdapterError(sentences)


class _Module(NamedTuple):
    num_in: int
    num_out: int
    dtype: torch.dtype
    conv1d: bool


class _Base(NamedTuple):
    modules: dict[str, _Module]
    model_type: str | None
    head: str | None


def _base(model: torch.nn.Module) -> _Base:
    from transformers.pytorch_utils import Conv1D

    modules, body, output = {}, set(model.base_model.modules()), model.get_output_embeddings()
    for path, module in model.named_modules():
        plain = type(module).forward in (torch.nn.Linear.forward, Conv1D.forward)  # some routers are Linear, and more
        if module in body and module is not output and plain:
            weight, conv1d = module.weight, isinstance(module, Conv1D)
            sizes = weight.shape if conv1d else (module.in_features, module.out_features)
            modules[path] = _Module(*sizes, weight.dtype if weight.is_floating_point() else model.dtype, conv1d)
    head = next((path for path, module in model.named_modules() if module is output), None)
    return _Base(modules, model.config.model_type, head)


def _limits(limits: str | Limits | None) -> Limits:
    if limits is None or isinstance(limits, Limits):
        return limits or Limits()
    return POLICIES[one_of("limits", limits, tuple(POLICIES))]


def _count(value: object, low: int = 1) -> bool:
    return type(value) is int and value >= low  # True is no rank


def _positive(value: object) -> bool:
    return type(value) in (int, float) and value > 0


def _name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", value) is not None


def _wrong_fields(config: dict, base: _Base, limits: Limits) -> dict[str, str]:
    """What is wrong with a configuration, by field."""
    get, types = config.get, limits.model_types
    targets, excluded = get("target_modules"), get("exclude_modules") or []
    layers, patterns = _layers(config), {key: get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
    names = "must be a list of plain module names; a regular expression is not evaluated"
    numbers = "must give plain module names, not regular expressions, a valid number each"
    rules = [
        ("r", _count(get("r")), "must be a whole number of at least 1"),
        ("lora_alpha", _positive(get("lora_alpha")), "must be a finite number greater than 0"),
        ("target_modules", targets == "all-linear" or (isinstance(targets, list) and all(map(_name, targets))), names),
        ("target_modules", targets not in ([], None), "must name the adapted modules"),
        ("exclude_modules", isinstance(excluded, list) and all(map(_name, excluded)), names),
        ("layers_to_transform", all(_count(layer, 0) for layer in layers), "must be a list of layers' numbers"),
        ("model_type", get("model_type") == base.model_type or (not types and "model_type" not in config),
         f"must be the base's, {shown(base.model_type)}"),
        ("model_type", not types or get("model_type") in types, f"must be one of {', '.join(types or ())}"),
    ]  # fmt: skip
    for key, valid in (("rank_pattern", _count), ("alpha_pattern", _positive)):
        pattern = patterns[key]
        rules += [(key, isinstance(pattern, dict) and all(_name(k) and valid(pattern[k]) for k in pattern), numbers)]
    for key, allowed in ALLOWED.items():
        value = get(key, None if key == "peft_type" else allowed[0])
        fits = any(type(value) is type(each) and value == each for each in allowed)
        rules += [(key, fits, f"must be {' or '.join(map(json.dumps, allowed))}")]
    for key in sorted(config.keys() - {*ALLOWED, *CHECKED, *HARMLESS}):
        empty = config[key] is None or config[key] is False or config[key] in ("", [], {})
        rules += [(key, empty, f"must be empty: {'more than plain LoRA' if key in VARIANTS else 'it is unknown'}")]
    given = {key: f"={shown(config[key])}" if key in config else ", which is absent," for key, _, _ in rules}
    return {key: f"{CONFIG}: {shown(key)[1:-1]}{given[key]} {rule}" for key, fits, rule in rules if not fits}


def _layers(config: dict) -> list:
    layers = config.get("layers_to_transform")
    return layers if isinstance(layers, list) else [] if layers is None else [layers]


def _suffixes(path: str) -> list[str]:
    """The names that PEFT takes for this module: its path, and what follows any of its dots."""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _fitting(pattern: dict | None, path: str, default: float) -> float:
    """The value of the first name that fits the end of a path. To PEFT a dot in a name stands for any character."""
    for name, value in (pattern or {}).items():
        end = path[-len(name) :]
        whole = path == end or path[: -len(name)].endswith(".")
        if whole and len(end) == len(name) and all(n in (".", p) for n, p in zip(name, end, strict=True)):
            return value
    return default


def _left_out(config: dict, paths: list[str]) -> Iterator[tuple[str, str]]:
    """The modules that a configuration does not have adapted, as PEFT reads it, each with the field that says so."""
    every, layers = config["target_modules"] == "all-linear", set(_layers(config))
    names, excluded = set(config["target_modules"]), set(config.get("exclude_modules") or ())
    for path in paths:
        parts, suffixes = path.split("."), _suffixes(path)
        layer = next((int(part) for part in parts[2:-1] if part.isdecimal()), None)
        if not excluded.isdisjoint(suffixes):
            yield path, "exclude_modules"
        elif not every and names.isdisjoint(suffixes):
            yield path, "target_modules"
        elif not every and path not in names and layers and layer not in layers:  # a whole path is in any layer
            yield path, "layers_to_transform"


class _Plan(NamedTuple):
    """What can be known without the values; ``reasons`` are those against the adapter so far."""

    config: bytes
    fields: dict
    modules: dict[str, _Module]
    pairs: dict[str, dict[str, Entry]]
    scales: dict[str, float]
    readable: bool
    reasons: list[str]


def _plan(config: bytes | None, header: bytes | None, size: int, base: _Base, limits: Limits, reasons=()) -> _Plan:
    reasons, fields, wrong, found, unsound = list(reasons), {}, dict.fromkeys((*ALLOWED, *CHECKED)), {}, ["absent"]
    if config is not None:
        try:
            if len(config) > MAX_CONFIG_BYTES:
                raise ValueError(f"it has {len(config):,} bytes, at most {MAX_CONFIG_BYTES:,} are allowed")
            fields = untrusted.strict_json(config)
            wrong = _wrong_fields(fields, base, limits)
            reasons += wrong.values()
        except ValueError as error:
            reasons.append(f"{CONFIG}: {error}")
    if header is not None:
        found, unsound = untrusted.entries(header, size)
        if size > limits.max_bytes:
            unsound.append(f"{WEIGHTS} has {size:,} bytes, at most {limits.max_bytes:,} are allowed")
        reasons += unsound
    faults, pairs, scales, right = {}, {}, {}, lambda *keys: wrong.keys().isdisjoint(keys)
    for name, entry in found.items():
        path, _, side = name.removeprefix("base_model.model.").rpartition(".lora_")
        if name == f"base_model.model.{path}.lora_{side}" and path in base.modules and side in ("A.weight", "B.weight"):
            pairs.setdefault(path, {})[side[0]] = entry
        elif path and path == base.head:
            faults.setdefault("an adapter of the output head is not served", []).append(name)
        else:
            faults.setdefault("no lora_A.weight or lora_B.weight of a linear module in this base", []).append(name)
    if not pairs and not unsound:
        faults["the weights adapt no module of this base"] = []
    for path in [path for path in base.modules if path in pairs]:
        module, shapes = base.modules[path], {side: list(entry.shape) for side, entry in pairs[path].items()}
        rank, problems = (shapes["A"][0] if "A" in shapes else shapes["B"][-1]), []
        if len(shapes) < 2:
            problems += [f"lora_{'AB'.replace(*shapes, '')} is missing"] * (not unsound)  # else it may be what is wrong
        elif shapes != {"A": [rank, module.num_in], "B": [module.num_out, rank]}:
            needed = f"[rank, {module.num_in}] and [{module.num_out}, rank]"
            problems += [f"lora_A and lora_B have the shapes {shapes['A']} and {shapes['B']}, this base needs {needed}"]
        if rank > limits.max_rank:
            problems += [f"the rank is {rank}, at most {limits.max_rank} is allowed"]
        if right("r", "rank_pattern") and rank != (said := _fitting(fields.get("rank_pattern"), path, fields["r"])):
            problems += [f"the rank is {rank}, but the configuration says {said}"]
        if right("lora_alpha", "alpha_pattern", "use_rslora"):
            alpha = _fitting(fields.get("alpha_pattern"), path, fields["lora_alpha"])
            scales[path] = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
            if not torch.finfo(torch.float32).tiny <= scales[path] <= torch.finfo(torch.float32).max:
                problems += [f"the scale {scales[path]:g} is none in float32"]
        if right("fan_in_fan_out") and fields.get("fan_in_fan_out", False) != module.conv1d:
            problems += [f"fan_in_fan_out must be {module.conv1d} here, as the base's weights lie"]
        for problem in problems:
            faults.setdefault(problem, []).append(path)
    if right("target_modules", "exclude_modules", "layers_to_transform"):
        for path, field in _left_out(fields, list(pairs)):
            faults.setdefault(f"{field}={shown(fields[field])} does not have it adapted", []).append(path)
    return _Plan(config, fields, base.modules, pairs, scales, not unsound, reasons + untrusted.sentences(faults))


def _read(config: bytes, weights: bytes, base: _Base, limits: Limits) -> Adapter:
    weights = weights if isinstance(weights, bytearray) else bytearray(weights)
    return _adapter(_plan(config, weights[: 8 + untrusted.MAX_HEADER_BYTES], len(weights), base, limits), weights)


def _adapter(plan: _Plan, weights: bytearray) -> Adapter:
    """The adapter of a plan, now that its values can be looked at."""
    faults, factors = {}, {}
    for path in [path for path in plan.modules if path in plan.pairs and plan.readable]:
        tensors, dtype = {s: _tensor(weights, each) for s, each in plan.pairs[path].items()}, plan.modules[path].dtype
        for side, tensor in tensors.items():
            low, high = (bound.item() for bound in tensor.aminmax())  # both are NaN if any value is
            scale = plan.scales.get(path, 1.0) if side == "B" else 1.0
            bounds = torch.tensor([low, high, low * scale, high * scale], dtype=torch.float64)
            if not bounds.to(dtype).isfinite().all():
                scaled = f" in {dtype}, scaled or not" if bounds[:2].isfinite().all() else ""
                faults.setdefault(f"has values that are not finite{scaled}", []).append(f"{path}.lora_{side}.weight")
        if len(tensors) == 2 and path in plan.scales:
            factors[path] = Factors(tensors["A"], tensors["B"], plan.scales[path])
    if reasons := plan.reasons + untrusted.sentences(faults):
        raise InvalidAdapterError(reasons)
    files, digest = {CONFIG: plan.config, WEIGHTS: weights}, hashlib.sha256()
    for content in files.values():
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return Adapter(plan.fields, factors, files, digest.hexdigest())


def _tensor(weights: bytearray, entry: Entry) -> torch.Tensor:
    dtype, begin = DTYPES[entry.dtype], 8 + untrusted.header_length(weights) + entry.begin
    if begin % dtype.itemsize:  # torch wants its numbers aligned, safetensors does not
        weights, begin = weights[begin : begin + entry.end - entry.begin], 0
    return torch.frombuffer(weights, dtype=dtype, count=math.prod(entry.shape), offset=begin).view(entry.shape)
