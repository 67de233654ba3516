"""LoRA adapters of strangers: what PEFT saves, read without PEFT and checked against this base before it is used.

The format is PEFT 0.21's: ``adapter_config.json``, and ``adapter_model.safetensors`` with
``base_model.model.<module>.lora_A.weight`` (rank, in) and ``….lora_B.weight`` (out, rank); an adapter adds
``scale · B A`` to the module's weight. Whatever is not plain LoRA on the base's linear modules is refused: an adapter
serves as it was trained, or not at all. Nothing that it says is imported, evaluated as a pattern, or looked up.
"""

import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from plpkg import untrusted, wheels
from plpkg.backbones import ADAPTER_PREFIXES, fingerprint
from plpkg.checkpoints import private_folder, replace_file
from plpkg.lora_config import ALLOWED, CHECKED, fitting, left_out, literal, wrong_fields
from plpkg.untrusted import MAX_CONFIG_BYTES, Entry, shown
from plpkg.validation import one_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRAPPED = "base_model.model."
"""How PEFT begins the names in a file."""


class InvalidAdapterError(ValueError):
    """An adapter is refused. ``reasons`` are sentences, at most 20 of them; the message is the first of them."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons[:20] + [f"and {len(reasons) - 20} more"] * (len(reasons) > 20)
        super().__init__(reasons)

    def __str__(self) -> str:
        return untrusted.brief(self.reasons)


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
    def of(
        cls,
        config,
        factors: Mapping[str, Factors | torch.Tensor],
        scales: Mapping[str, float] = {},
        *,
        backbone: str | None = None,
    ) -> "Adapter":
        """Make an adapter, and the files that PEFT loads, of what was trained.

        Parameters
        ----------
        config
            A ``LoraConfig``, or a mapping of its fields.
        factors
            By module; or the tensors by PEFT's names, with ``base_model.model.`` before them or not.
        scales
            By module, what the configuration has to make of it; factors have theirs.
        backbone
            The :func:`base_fingerprint` of what it was trained on, which the weights' metadata say: others refuse it.

        Raises
        ------
        InvalidAdapterError
            They are no adapter, or disagree in modules, ranks or scales.
        """
        from safetensors.torch import save

        config = dict(config) if isinstance(config, Mapping) else config.to_dict() | {"inference_mode": True}
        tensors, scales = {}, dict(scales)
        for path, each in factors.items():
            if isinstance(each, Factors):
                scales[path] = each.scale
                tensors |= {f"{path}.lora_A.weight": each.down, f"{path}.lora_B.weight": each.up}
            else:
                tensors[path.removeprefix(WRAPPED)] = each
        sides, modules = {}, {}
        for key, tensor in tensors.items():
            path, _, side = key.rpartition(".lora_")
            sides.setdefault(path, {})[side] = tensor
        for path, each in sides.items():
            down, up = (each.get(f"{side}.weight", next(iter(each.values()))) for side in "AB")  # or it is refused
            modules[path] = _Module(down.shape[-1], up.shape[0], down.dtype)
        tensors = {
            f"{WRAPPED}{key}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for key, tensor in tensors.items()
        }
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted).encode()  # PEFT keeps names in sets
        weights = bytearray(_marked(save(tensors, {"format": "pt"}), backbone))
        adapter = _read(text, weights, _Base(modules, config.get("model_type")), AdapterLimits())
        for path, each in adapter.factors.items():
            if path in scales and not math.isclose(each.scale, scales[path], rel_tol=1e-6):
                raise InvalidAdapterError([f"{path}: scale={scales[path]}, but config makes it {each.scale}"])
        return adapter

    @classmethod
    def from_peft(cls, model: torch.nn.Module, name: str = "default") -> "Adapter":
        """Make an adapter of one that a model has: a ``PeftModel``'s LoRA, or what its method says it is as LoRA.

        Raises
        ------
        InvalidAdapterError
            The model has none of this name, or it is more than plain LoRA, or cannot be LoRA.
        """
        from peft import get_peft_model_state_dict
        from peft.tuners.tuners_utils import BaseTunerLayer

        configs = getattr(model, "peft_config", {})
        if name not in configs:
            raise InvalidAdapterError([f"{type(model).__name__} has no adapter {name!r}, it has {[*configs]}"])
        if any(p.is_meta for p in model.parameters()):
            raise InvalidAdapterError(["the model's weights are not in memory: save the adapter, and load its folder"])
        layers = {path.removeprefix(WRAPPED): m for path, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        if any(layer.merged for layer in layers.values()):  # the backbone's fingerprint would be that of the sum
            raise InvalidAdapterError(["an adapter is merged into the weights: unmerge it first"])
        convert = getattr(model.base_model, "as_lora", None)  # a method that is not PEFT's own may be LoRA in disguise
        if convert is not None:
            try:
                return cls.of(*convert(name), backbone=base_fingerprint(model))
            except ValueError as error:
                raise error if isinstance(error, InvalidAdapterError) else InvalidAdapterError([str(error)]) from error
        if configs[name].peft_type != "LORA":
            raise InvalidAdapterError([f"{name!r} is a {configs[name].peft_type[:]} adapter, not LoRA"])
        scalings = {path: getattr(layer, "scaling", {}) for path, layer in layers.items()}  # trained tokens have none
        scales = {path: scaling[name] for path, scaling in scalings.items() if name in scaling}
        state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        return cls.of(configs[name], state, scales, backbone=base_fingerprint(model))

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
        With every reason that can be known: of the files, the configuration, names and shapes; or else of the values.
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
    if plan.reasons:  # the values would cost memory and time, and change nothing
        raise InvalidAdapterError(plan.reasons)
    try:
        weights = untrusted.read_file(Path(path, WEIGHTS), limits.max_bytes)
        if len(weights) != size or weights[: len(header)] != header:
            raise ValueError(f"{WEIGHTS} changed while it was read")
    except ValueError as error:
        raise InvalidAdapterError([*plan.reasons, str(error)]) from None
    return _adapter(plan, weights)


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

    try:
        method = untrusted.strict_json(untrusted.read_file(Path(path, CONFIG), MAX_CONFIG_BYTES)).get("peft_type")
    except ValueError:
        method = None  # which is said below
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(method) if isinstance(method, str) else None
    if isinstance(method, str) and tuner is None:
        define = f"PEFT does not know {shown(method)}: import the module that defines it first, plpkg.residual say"
        raise InvalidAdapterError([define])
    if not hasattr(tuner, "as_lora"):
        return validate_adapter(path, model)
    _base(model)
    if not Path(path, WEIGHTS).exists():  # PEFT would ask the hub
        raise InvalidAdapterError([f"{path} has no {WEIGHTS}"])
    # A copy that shares the model's values, which PEFT puts the adapter in.
    memo = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    try:
        return Adapter.from_peft(PeftModel.from_pretrained(copy.deepcopy(model, memo), path))
    except InvalidAdapterError:
        raise
    except ValueError as error:
        raise InvalidAdapterError([str(error)]) from error


def read_adapter(
    config: bytes, weights: bytes, model: torch.nn.Module, limits: str | AdapterLimits | None = None
) -> Adapter:
    """Check an adapter from the bytes of its two files, as :func:`validate_adapter` does.

    A ``bytearray`` becomes the adapter's own, anything else is copied.
    """
    return _read(bytes(config), weights, _base(model), _limits(limits))


def inspect(
    config: bytes, header: bytes, size: int, model: torch.nn.Module, limits: str | AdapterLimits | None = None
) -> list[str]:
    """Every reason against an adapter that can be known before its values are there.

    ``header`` are the first 8 + N bytes of the weights' file (:func:`plpkg.untrusted.header_length` gives N), which
    has ``size`` bytes as a whole.
    """
    return InvalidAdapterError(_plan(config, header, size, _base(model), _limits(limits)).reasons).reasons


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


class _Base(NamedTuple):
    modules: dict[str, _Module]
    model_type: str | None
    name: str | None = None
    head: str | None = None
    experts: frozenset[str] = frozenset()
    backbone: Callable[[], str | None] = lambda: None


def _base(model: torch.nn.Module) -> _Base:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    if not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"a Hugging Face causal language model is needed, got {shown(model)}")
    tuned = [path for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    tuned += [name for name, _ in model.named_parameters() if any(prefix in name for prefix in ADAPTER_PREFIXES)]
    if isinstance(model, PeftModel) or tuned:
        where = f", in {tuned[0]}" if tuned else ""
        raise ValueError(f"this {type(model).__name__} has an adapter already{where}: take the base without it")
    modules, body, output = {}, set(model.base_model.modules()), model.get_output_embeddings()
    for path, module in model.named_modules():
        plain = type(module).forward in (torch.nn.Linear.forward, Conv1D.forward)  # some routers are Linear, and more
        if module in body and module is not output and plain:
            weight = module.weight
            sizes = weight.shape if isinstance(module, Conv1D) else (module.in_features, module.out_features)
            modules[path] = _Module(*sizes, weight.dtype if weight.is_floating_point() else model.dtype)
    head = next((path for path, module in model.named_modules() if module is output), None)
    experts = frozenset(name.rpartition(".")[0] for name, p in model.named_parameters() if p.dim() == 3)
    name = model.config._name_or_path
    name = None if Path(name).exists() else name
    return _Base(modules, model.config.model_type, name, head, experts, lambda: base_fingerprint(model))


def _limits(limits: str | AdapterLimits | None) -> AdapterLimits:
    if limits is None or isinstance(limits, AdapterLimits):
        return limits or AdapterLimits()
    return POLICIES[one_of("limits", limits, tuple(POLICIES))]


class _Plan(NamedTuple):
    """What can be known without the values; ``reasons`` are those against the adapter so far."""

    config: bytes
    fields: dict
    modules: dict[str, _Module]
    pairs: dict[str, dict[str, Entry]]
    scales: dict[str, float]
    readable: bool
    reasons: list[str]


def _plan(
    config: bytes | None, header: bytes | None, size: int, base: _Base, limits: AdapterLimits, reasons=()
) -> _Plan:
    reasons, fields, wrong, found, unsound = list(reasons), {}, dict.fromkeys((*ALLOWED, *CHECKED)), {}, ["absent"]
    if config is not None:
        try:
            if len(config) > MAX_CONFIG_BYTES:
                raise ValueError(f"it has {len(config):,} bytes, at most {MAX_CONFIG_BYTES:,} are allowed")
            fields = untrusted.strict_json(config)
            wrong = wrong_fields(fields, base.model_type, base.name, limits.model_types)
            reasons += wrong.values()
        except ValueError as error:
            reasons.append(f"{CONFIG}: {error}")
    if header is not None:
        found, unsound = untrusted.entries(header, size)
        if size > limits.max_bytes:
            unsound.append(f"{WEIGHTS} has {size:,} bytes, at most {limits.max_bytes:,} are allowed")
        said = {} if unsound else untrusted.strict_json(header[8 : 8 + untrusted.header_length(header)])
        trained_on = said.get("__metadata__", {}).get("backbone")
        if wheels.is_of_the_original(fields.get("base_model_name_or_path"), base.name):
            trained_on = None  # the fingerprint is the original's
        if trained_on and (actual := base.backbone()) not in (None, trained_on):
            mark, here = shown(trained_on)[1:13], actual[:12]
            reasons.append(f"it was trained on a backbone with fingerprint {mark}…, and this one has {here}…")
        reasons += unsound
    faults, experts, pairs, scales, right = {}, [], {}, {}, lambda *keys: wrong.keys().isdisjoint(keys)
    for name, entry in found.items():
        path, _, side = name.removeprefix(WRAPPED).rpartition(".lora_")
        if name == f"{WRAPPED}{path}.lora_{side}" and path in base.modules and side in ("A.weight", "B.weight"):
            pairs.setdefault(path, {})[side[0]] = entry
        elif path and path == base.head:
            faults.setdefault("an adapter of the output head is not served", []).append(name)
        elif "experts" in path.split(".") or path.removesuffix(".base_layer") in base.experts:
            experts.append(name)
        else:
            faults.setdefault("no lora_A.weight or lora_B.weight of a linear module in this base", []).append(name)
    if experts:  # first, since it is why the rest is as it is
        why = {"LoRA of a mixture's experts is not served, that of its attention is": experts}
        reasons = untrusted.sentences(why) + reasons
    elif not pairs and not unsound:
        faults["the weights adapt no module of this base"] = []
    # Of regular expressions, the weights alone say the rank that they mean.
    readable = right("r", "rank_pattern") and all(map(literal, fields.get("rank_pattern") or {}))
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
        if readable and rank != (said := fitting(fields.get("rank_pattern"), path, fields["r"])):
            problems += [f"the rank is {rank}, but the configuration says {said}"]
        if right("lora_alpha", "alpha_pattern", "use_rslora"):
            alpha = fitting(fields.get("alpha_pattern"), path, fields["lora_alpha"])
            scales[path] = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
            if not torch.finfo(torch.float32).tiny <= abs(scales[path]) <= torch.finfo(torch.float32).max:
                problems += [f"the scale {scales[path]:g} is none in float32"]
        for problem in problems:
            faults.setdefault(problem, []).append(path)
    if right("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"):
        for path, field in left_out(fields, list(pairs)):
            faults.setdefault(f"{field}={shown(fields[field])} does not have it adapted", []).append(path)
    return _Plan(config, fields, base.modules, pairs, scales, not unsound, reasons + untrusted.sentences(faults))


def _read(config: bytes, weights: bytes, base: _Base, limits: AdapterLimits) -> Adapter:
    weights = weights if isinstance(weights, bytearray) else bytearray(weights)
    return _adapter(_plan(config, weights[: 8 + untrusted.MAX_HEADER_BYTES], len(weights), base, limits), weights)


def _adapter(plan: _Plan, weights: bytearray) -> Adapter:
    """The adapter of a plan, now that its values can be looked at."""
    faults, factors = {}, {}
    for path in [path for path in plan.modules if path in plan.pairs and plan.readable]:
        tensors = {side: untrusted.tensor(weights, each) for side, each in plan.pairs[path].items()}
        dtype = plan.modules[path].dtype
        for side, tensor in tensors.items():
            if not untrusted.finite(tensor, dtype, plan.scales.get(path, 1.0) if side == "B" else 1.0):
                scaled = f" in {dtype}, scaled or not" if untrusted.finite(tensor, torch.float64) else ""
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
