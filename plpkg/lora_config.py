"""PEFT's LoRA configuration, as a stranger wrote it: which fields have to be what, and which modules they name.

It is read as JSON. PEFT is asked about names that were checked before, never about a pattern, which it would run, and
never about what it would import.
"""

import functools
import re
from types import SimpleNamespace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from plpkg.untrusted import strict_json
from plpkg.validation import shown

MAX_NAMES = 1024
"""A module is compared with each name of a list."""

HARMLESS = "auto_mapping eva_config fan_in_fan_out inference_mode lora_dropout peft_version revision runtime_config"
"""What does nothing in a trained adapter, whatever stands there. PEFT would import what auto_mapping names."""

STORED = "4bit 8bit awq bf16 bnb fp16 fp8 gptq hf int4 int8 meta unsloth"
"""Words in a model's name for how its weights are stored, which do not make it another."""

FOLDERS = "base checkpoint checkpoints data model models output outputs results weights"
"""Where people keep models: what begins so is a path, and no publisher's name."""


def _listed(value: object) -> object:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


Count = Annotated[int, Field(ge=1)]
Names = Annotated[list[str], Field(max_length=MAX_NAMES)]


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
    rank_pattern: Annotated[dict[str, Count], Field(max_length=MAX_NAMES)] | None = None
    alpha_pattern: Annotated[dict[str, float], Field(max_length=MAX_NAMES)] | None = None
    target_modules: Annotated[str | Names, Field(min_length=1)]
    exclude_modules: str | Names | None = None
    layers_to_transform: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_listed)] = []
    layers_pattern: Annotated[list[str], BeforeValidator(_listed), Field(max_length=32)] = []


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
        raise ValueError(f"{first['loc'][0]}: {first['msg'][:100]}, got {shown(first['input'])}") from None
    defaults = vars(LoraConfig())
    for name, value in fields.model_extra.items():
        if value and value != defaults.get(name) and name not in HARMLESS.split():
            what = "more than plain LoRA" if name in defaults else "no field of PEFT's"
            raise ValueError(f"{shown(name)[1:-1]}={shown(value)} must be empty, since it is {what}")
    if not all(map(literal, fields.alpha_pattern or {})):
        names = shown(fields.alpha_pattern)
        raise ValueError(f"alpha_pattern={names} must have names of modules, not regular expressions")
    if isinstance(fields.target_modules, str) and fields.layers_to_transform:
        raise ValueError("layers_to_transform must be empty where target_modules is one string, as in PEFT")
    return fields


def is_foreign(trained_on: str | None, base: str) -> bool:
    """Whether an adapter says that it was trained on another model than the base.

    Only a name on the hub, OWNER/NAME, tells a model; any other may be a folder. Who publishes it, and how it is
    stored, does not count; a base in a folder has the names of its path, the hub's cache among them.
    """
    hub = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)", trained_on or "")
    if hub is None or hub[1].lower() in FOLDERS.split():
        return False
    return _words(hub[2]) not in [_words(part) for part in re.split(r"[/\\]|--", base)]


def _words(name: str) -> list[str]:
    words = re.split(r"[-_.]", name.lower())
    return [word for word in words if word not in STORED.split()]


def literal(name: str) -> bool:
    """Whether a pattern is a name, with its dots escaped or not, between ^ and $ or not."""
    return re.fullmatch(r"\^?([A-Za-z0-9_.-]|\\[.-])+\$?", name) is not None


@functools.lru_cache(2 * MAX_NAMES)
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

    Regular expressions are not run. Where one decides, any module may be there, and each kind of those in ``given``
    must be there in each of their layers.

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
    from peft.tuners.tuners_utils import check_target_module_exists

    targets, excluded, layers = fields.target_modules, fields.exclude_modules or [], fields.layers_to_transform
    named = isinstance(excluded, list)
    if not named:
        excluded = []
    if not all(map(literal, fields.layers_pattern)):
        named = False
        layers = []
    if targets == "all-linear":
        targets = linear
    elif isinstance(targets, str):
        named = False
        targets = set(paths)
    rule = SimpleNamespace(target_modules=targets, exclude_modules=excluded, target_parameters=None)
    rule.layers_to_transform, rule.layers_pattern = layers, fields.layers_pattern
    allowed = {path for path in paths if check_target_module_exists(rule, path)}
    if named:
        return allowed, allowed
    layers = {_place(path)[0] for path in given}
    kinds = {_place(path)[1] for path in given}
    places = {path: _place(path) for path in allowed & linear}
    return allowed, {path for path, (layer, kind) in places.items() if layer in layers and kind in kinds}


def _place(path: str) -> tuple[str, str]:
    """A module's layer, and its kind: the path without the layer's number."""
    match = re.search(r"\.(\d+)\.", path)
    return (match[1], path.replace(match[0], "..", 1)) if match else ("", path)
