"""PEFT's LoRA configuration, as a stranger wrote it: which fields have to be what, and what they say of a module.

It is read as JSON and never handed to PEFT, which would evaluate its patterns and import what it names.
"""

import functools
import json
import re
from collections.abc import Iterator

from plpkg.validation import shown

# The fields of peft 0.21.2's LoraConfig, in four parts. What a value must be one of, …
ALLOWED = dict(
    peft_type=("LORA",),
    task_type=("CAUSAL_LM", None),
    bias=("none",),
    use_rslora=(False, True),
    fan_in_fan_out=(False, True),  # PEFT goes by the base's layer, whatever stands here
    megatron_core=("megatron.core", None),  # the name of a module that PEFT would import
    init_lora_weights=(True, False, "gaussian", "eva", "orthogonal", "mica"),  # the others change the base as well
)
# … what has a rule of its own, as has the model_type that PEFT leaves out; what does nothing in a trained adapter; …
CHECKED = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules")
CHECKED += ("layers_to_transform", "layers_pattern", "base_model_name_or_path", "model_type")
HARMLESS = ("revision", "peft_version", "inference_mode", "lora_dropout", "runtime_config")
HARMLESS += ("qalora_group_size", "eva_config", "auto_mapping")  # the last names classes that PEFT would import
# … and what is more than plain LoRA, unless it is empty. Other fields, of a later PEFT or another tool, are ignored as
# PEFT ignores them, unless they switch something on.
VARIANTS = ("alora_invocation_tokens", "arrow_config", "corda_config", "ensure_weight_tying")
VARIANTS += ("kasa_config", "layer_replication", "loftq_config", "lora_bias")
VARIANTS += ("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "target_parameters")
VARIANTS += ("trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "velora_config")


def _count(value: object, low: int = 1) -> bool:
    return type(value) is int and value >= low  # True is no rank


def _factor(value: object) -> bool:
    return type(value) in (int, float) and value != 0  # with 0 it would be the base under an adapter's name


def _names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def literal(name: str) -> bool:
    """Whether a pattern is a name, with its dots escaped or not, between ^ and $ or not."""
    return re.fullmatch(r"\^?([A-Za-z0-9_.-]|\\[.-])+\$?", name) is not None


# Words for how a model's weights are stored, which do not make it another; and folders where people keep models.
STORED = ("4bit", "8bit", "awq", "bf16", "bnb", "fp16", "fp8", "gptq", "hf", "int4", "int8", "meta", "unsloth")
FOLDERS = ("base", "checkpoint", "checkpoints", "data", "model", "models", "output", "outputs", "results", "weights")


def _hub_name(name: object) -> list[str] | None:
    """The words of a model's name on the hub, whoever publishes it; None for what may be a path."""
    hub = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)", name) if isinstance(name, str) else None
    if hub is None or hub[1].lower() in FOLDERS:
        return None
    return [word for word in re.split(r"[-_.]", hub[2].lower()) if word not in STORED]


def wrong_fields(
    config: dict, model_type: str | None, base: str | None, types: tuple[str, ...] | None
) -> dict[str, str]:
    """What is wrong, by field, for a base of a model type and a name; ``types`` are those that a platform takes."""
    get = config.get
    targets, trained_on, names = get("target_modules"), _hub_name(get("base_model_name_or_path")), "must be names"
    ranks, alphas = (get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    lists = {key: get(key) or [] for key in ("exclude_modules", "layers_pattern")}
    rules = [
        ("r", _count(get("r")), "must be a whole number of at least 1"),
        ("lora_alpha", _factor(get("lora_alpha")), "must be a finite number other than 0"),
        ("target_modules", bool(targets) and (isinstance(targets, str) or _names(targets)),
         "must name the adapted modules"),
        *((key, isinstance(value, str) or _names(value), names) for key, value in lists.items()),
        ("rank_pattern", isinstance(ranks, dict) and all(map(_count, ranks.values())), "must give names a rank each"),
        ("alpha_pattern", isinstance(alphas, dict) and all(map(literal, alphas)) and all(map(_factor, alphas.values())),
         "must give module names, not regular expressions, a number other than 0 each"),
        ("base_model_name_or_path", trained_on in (None, _hub_name(base)) or _hub_name(base) is None,
         f"must be the base's, {shown(base)}, or absent: the adapter was trained on another"),
        ("layers_to_transform", all(_count(each, 0) for each in _layers(config)), "must be a list of layers' numbers"),
        ("model_type", get("model_type") == model_type or (not types and "model_type" not in config),
         f"must be the base's, {shown(model_type)}"),
        ("model_type", not types or get("model_type") in types, f"must be one of {', '.join(types or ())}"),
    ]  # fmt: skip
    for key, allowed in ALLOWED.items():
        value = get(key, None if key == "peft_type" else allowed[0])
        fits = any(type(value) is type(each) and value == each for each in allowed)
        rules += [(key, fits, f"must be {' or '.join(map(json.dumps, allowed))}")]
    for key in sorted(config.keys() - {*ALLOWED, *CHECKED, *HARMLESS}):
        value = config[key]
        empty = value is None or value is False or value in ("", [], {})
        harmless = not isinstance(value, dict | list) and not (value is True and key.startswith("use_"))
        what = "more than plain LoRA" if key in VARIANTS else "it is unknown"
        rules += [(key, empty or (harmless and key not in VARIANTS), f"must be empty: {what}")]
    given = {key: f"={shown(config[key])}" if key in config else ", which is absent," for key, _, _ in rules}
    return {key: f"adapter_config.json: {shown(key)[1:-1]}{given[key]} {rule}" for key, fits, rule in rules if not fits}


def _layers(config: dict) -> list:
    layers = config.get("layers_to_transform")
    return layers if isinstance(layers, list) else [] if layers is None else [layers]


def _suffixes(path: str) -> list[str]:
    """The names that PEFT takes for this module: its path, and what follows any of its dots."""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


@functools.lru_cache(4096)  # a pattern meets every module
def _letters(name: str) -> tuple[list[str], bool]:
    """A literal pattern's letters, an escaped one being one; and whether only a whole path fits it."""
    return re.findall(r"\\?.", name.removeprefix("^").removesuffix("$")), name.startswith("^")


def fitting(pattern: dict | None, path: str, default: float) -> float:
    """The value of the first name that fits the end of a path. To PEFT a plain dot stands for any character."""
    for name, value in (pattern or {}).items():
        letters, anchored = _letters(name)
        start = len(path) - len(letters)
        whole = start == 0 or (start > 0 and path[start - 1] == "." and not anchored)
        if whole and all(n in (".", p, f"\\{p}") for n, p in zip(letters, path[start:], strict=True)):
            return value
    return default


def left_out(config: dict, paths: list[str]) -> Iterator[tuple[str, str]]:
    """The modules that a configuration does not have adapted, as PEFT reads it, each with the field that says so.

    A regular expression is not evaluated: the weights say what is adapted.
    """
    every, layers = isinstance(config["target_modules"], str), set(_layers(config))
    excluded, patterns = (config.get(key) or [] for key in ("exclude_modules", "layers_pattern"))
    names, excluded = set(config["target_modules"]), {*excluded} if isinstance(excluded, list) else set()
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if every or not all(map(literal, patterns)):  # a pattern is in any layer to PEFT
        layers = set()
    for path in paths:
        parts, suffixes = path.split("."), _suffixes(path)
        numbers = {".".join(parts[:i]): int(part) for i, part in enumerate(parts[:-1]) if part.isdecimal()}
        before = {each: n for each, n in numbers.items() if "." in each} if not patterns else {}
        named = [p for p in patterns if not p.endswith("$")]  # PEFT puts the number behind it
        before |= {each: n for p in named for each, n in numbers.items() if fitting({p: True}, each, False)}
        if not excluded.isdisjoint(suffixes):
            yield path, "exclude_modules"
        elif not every and names.isdisjoint(suffixes):
            yield path, "target_modules"
        elif layers and path not in names and next(iter(before.values()), None) not in layers:  # a path is in any
            yield path, "layers_to_transform"
