"""PEFT's LoRA configuration, as a stranger wrote it: which fields have to be what, and which modules they name.

It is read as JSON, and never handed to PEFT, which would run its patterns and import what it names.
"""

import functools
import re
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plpkg.untrusted import strict_json
from plpkg.validation import shown

MAX_PATTERNS = 1024
"""A module may be compared with each of them."""

HARMLESS = {"auto_mapping", "eva_config", "fan_in_fan_out", "inference_mode", "lora_dropout", "peft_version"}
HARMLESS |= {"revision", "runtime_config"}
"""What does nothing in a trained adapter, whatever stands there. PEFT would import what auto_mapping names."""

# Words for how a model's weights are stored, which do not make it another; and folders where people keep models.
STORED = {"4bit", "8bit", "awq", "bf16", "bnb", "fp16", "fp8", "gptq", "hf", "int4", "int8", "meta", "unsloth"}
FOLDERS = {"base", "checkpoint", "checkpoints", "data", "model", "models", "output", "outputs", "results", "weights"}

Count = Annotated[int, Field(ge=1)]
Layer = Annotated[int, Field(ge=0)]
Names = str | list[str]
Patterns = str | Annotated[list[str], Field(max_length=32)]


class LoraFields(BaseModel):
    """The fields of ``LoraConfig`` that say what an adapter computes; all others are in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    model_type: str | None = None
    base_model_name_or_path: str | None = None
    bias: Literal["none"] = "none"
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal", "mica"] = True  # others change the base as well
    r: Count
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: Annotated[dict[str, Count], Field(max_length=MAX_PATTERNS)] | None = None
    alpha_pattern: Annotated[dict[str, float], Field(max_length=MAX_PATTERNS)] | None = None
    target_modules: Annotated[Names, Field(min_length=1)]
    exclude_modules: Names | None = None
    layers_to_transform: Layer | list[Layer] | None = None
    layers_pattern: Patterns | None = None


def read_fields(config: bytes) -> LoraFields:
    """Read a configuration.

    Raises
    ------
    ValueError
        It is none of plain LoRA, or has something else that is neither empty, nor false, nor PEFT's default.
    """
    from peft import LoraConfig

    try:
        fields = LoraFields.model_validate(strict_json(config))
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        name = first["loc"][0]
        given = "" if first["type"] == "missing" else f"={shown(first['input'])}"
        raise ValueError(f"{name}{given}: {first['msg'][:100]}") from None
    defaults = vars(LoraConfig())
    for name, value in fields.model_extra.items():
        if value and value != defaults.get(name) and name not in HARMLESS:
            what = "more than plain LoRA" if name in defaults else "no field of PEFT's"
            raise ValueError(f"{shown(name)[1:-1]}={shown(value)} must be empty, since it is {what}")
    if not all(map(literal, fields.alpha_pattern or {})):
        names = shown(fields.alpha_pattern)
        raise ValueError(f"alpha_pattern={names} must have names of modules, not regular expressions")
    if isinstance(fields.target_modules, str) and fields.layers_to_transform not in (None, []):
        raise ValueError("layers_to_transform must be absent where target_modules is one string, as in PEFT")
    return fields


def require_base(fields: LoraFields, model_type: str | None, name: str, allowed: tuple[str, ...] | None) -> None:
    """Refuse an adapter of another base, or of a model type that is not allowed.

    Of names, only OWNER/NAME tells a model; any other may be a folder. Who publishes it, and how it is stored, does
    not count.

    Raises
    ------
    ValueError
        It is another's.
    """
    if allowed and fields.model_type not in allowed:
        raise ValueError(f"model_type={shown(fields.model_type)} must be one of {', '.join(allowed)}")
    if fields.model_type not in (None, model_type):
        raise ValueError(f"model_type={shown(fields.model_type)} must be the base's, {shown(model_type)}")
    trained_on = fields.base_model_name_or_path or ""
    owner = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[A-Za-z0-9][\w.-]*", trained_on)
    if owner and owner[1].lower() not in FOLDERS and _words(trained_on) != _words(name):
        raise ValueError(f"base_model_name_or_path={shown(trained_on)} is another model than the base, {shown(name)}")


def _words(name: str) -> list[str]:
    words = re.split(r"[-_.]", PurePath(name).name.lower())
    return [word for word in words if word not in STORED]


def literal(name: str) -> bool:
    """Whether a pattern is a name, with its dots escaped or not, between ^ and $ or not."""
    return re.fullmatch(r"\^?([A-Za-z0-9_.-]|\\[.-])+\$?", name) is not None


@functools.lru_cache(2 * MAX_PATTERNS)
def _end(name: str) -> re.Pattern:
    """As PEFT takes it, for which a dot in a name is any character. Only a :func:`literal` name comes here."""
    return re.compile(rf"(.*\.)?({name})$")


def value_of(pattern: dict[str, float] | None, path: str, default: float) -> float:
    """The value of the first name that a module's path ends with."""
    for name, value in (pattern or {}).items():
        if _end(name).match(path):
            return value
    return default


def adapted(fields: LoraFields, paths: list[str], linear: set[str], given: set[str]) -> tuple[set[str], set[str]]:
    """The modules that the configuration lets an adapter have, and those that it must have.

    Regular expressions are not run. Where one decides, any module may be there, and of the modules in ``given`` each
    kind must be there in each layer.

    Parameters
    ----------
    fields
        The configuration.
    paths
        Of all modules in the base.
    linear
        Those that PEFT means by "all-linear".
    given
        Those that the weights adapt.
    """
    targets, excluded = fields.target_modules, fields.exclude_modules or []
    layers = fields.layers_to_transform
    layers = set(layers) if isinstance(layers, list) else {layers} - {None}
    patterns = fields.layers_pattern or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    known = isinstance(targets, list) and isinstance(excluded, list) and all(map(literal, patterns))
    if not all(map(literal, patterns)):
        layers = set()
    every = isinstance(targets, str)
    names = set(targets)
    without = set(excluded) if isinstance(excluded, list) else set()
    allowed = set()
    for path in paths:
        parts = path.split(".")
        ends = {".".join(parts[i:]) for i in range(len(parts))}
        named = path in names or (ends & names and (not layers or _layer(path, patterns) in layers))
        if not ends & without and (every or named):
            allowed.add(path)
    if known:
        return allowed, allowed
    if targets == "all-linear" and isinstance(excluded, list):
        return allowed, allowed & linear
    places = {path: _place(path) for path in allowed & linear}
    numbers = {_place(path)[0] for path in given}
    kinds = {_place(path)[1] for path in given}
    return allowed, {path for path, (number, kind) in places.items() if number in numbers and kind in kinds}


def _layer(path: str, patterns: list[str]) -> int | None:
    """The number of a module's layer, as PEFT finds it after the name of its list, or after any name but the first."""
    for before in [rf"(?:^|.*?\.){pattern}" for pattern in patterns] or [r".*?\.[^.]*"]:
        if match := re.match(rf"{before}\.(\d+)\.", path):
            return int(match[1])
    return None


def _place(path: str) -> tuple[str, str]:
    """A module's layer, and its kind: the path without the layer's number."""
    match = re.search(r"\.(\d+)\.", path)
    return (match[1], path.replace(match[0], "..", 1)) if match else ("", path)
