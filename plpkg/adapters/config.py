"""PEFT's LoRA configuration, as a stranger wrote it: which fields have to be what, and which modules they name.

It is read as JSON. PEFT is asked about names that were checked before, never about a pattern, which it would run, and
never about what it would import.
"""

import functools
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from plpkg.files.untrusted import strict_json
from plpkg.validation import shown

MAX_NAMES = 1024
"""A module is compared with each name of a list."""

HARMLESS = "auto_mapping eva_config fan_in_fan_out inference_mode lora_dropout peft_version revision runtime_config"
"""Fields that do nothing in a trained adapter, whatever they say. PEFT would import what auto_mapping names."""

STORED = "4bit 8bit awq bf16 bnb fp16 fp8 gptq hf int4 int8 meta unsloth"
"""Words in a model's name for how its weights are stored, which do not make it another."""

FOLDERS = "base checkpoint checkpoints data model models output outputs results weights"
"""Where people keep models: what begins so is a path, and no publisher's name."""


def _listed(value: object) -> object:
    """A list of what may stand alone in a configuration, or be left out."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


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
        field = first["loc"][0]
        raise ValueError(f"{field}: {first['msg'][:100]}, got {shown(first['input'])}") from None
    defaults = vars(LoraConfig())
    for name, value in (fields.model_extra or {}).items():
        says_nothing = not value or value == defaults.get(name)
        if says_nothing or name in HARMLESS.split():
            continue
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
    on_the_hub = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)", trained_on or "")
    if on_the_hub is None:
        return False
    owner, name = on_the_hub.groups()
    if owner.lower() in FOLDERS.split():
        return False
    names_of_base = [_words(part) for part in re.split(r"[/\\]|--", base)]
    return _words(name) not in names_of_base


def _words(name: str) -> list[str]:
    """The words of a model's name, without those for how its weights are stored."""
    words = re.split(r"[-_.]", name.lower())
    return [word for word in words if word not in STORED.split()]


def literal(name: str) -> bool:
    """Whether a pattern is a name, with its dots escaped or not, between ^ and $ or not."""
    return re.fullmatch(r"\^?([A-Za-z0-9_.-]|\\[.-])+\$?", name) is not None


@functools.lru_cache(2 * MAX_NAMES)
def _end(name: str) -> re.Pattern:
    """The end of a path, as PEFT takes a name: a dot is any character. Only a :func:`literal` name comes here."""
    return re.compile(rf"(.*\.)?({name})$")


def value_of(pattern: Mapping[str, float] | None, path: str, default: float) -> float:
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

    excluded = fields.exclude_modules or []
    # PEFT's own rule, but where an expression decides, it allows everything.
    rule = SimpleNamespace(
        target_modules=fields.target_modules,
        exclude_modules=excluded,
        layers_to_transform=fields.layers_to_transform,
        layers_pattern=fields.layers_pattern,
        target_parameters=None,
    )
    by_name = True
    if isinstance(excluded, str):
        by_name = False
        rule.exclude_modules = []
    if not all(map(literal, fields.layers_pattern)):
        by_name = False
        rule.layers_to_transform = []
    if fields.target_modules == "all-linear":
        rule.target_modules = linear
    elif isinstance(fields.target_modules, str):
        by_name = False
        rule.target_modules = set(paths)
    allowed = {path for path in paths if check_target_module_exists(rule, path)}
    if by_name:
        return allowed, allowed
    places = [_place(path) for path in given]
    layers = {layer for layer, _ in places}
    kinds = {kind for _, kind in places}
    needed = set()
    for path in allowed & linear:
        layer, kind = _place(path)
        if layer in layers and kind in kinds:
            needed.add(path)
    return allowed, needed


def _place(path: str) -> tuple[str, str]:
    """A module's layer, and its kind: the path without the layer's number."""
    match = re.search(r"\.(\d+)\.", path)
    if match is None:
        return "", path
    return match[1], path.replace(match[0], "..", 1)
