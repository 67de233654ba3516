"""PEFT's LoRA configuration, as a stranger wrote it: which fields have to be what, and what they say of a module.

It is read as JSON and never handed to PEFT, which would evaluate its patterns and import what it names.
"""

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


def _count(value: object, low: int = 1) -> bool:
    return type(value) is int and value >= low  # True is no rank


def _positive(value: object) -> bool:
    return type(value) in (int, float) and value > 0


def _name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", value) is not None


def wrong_fields(config: dict, model_type: str | None, types: tuple[str, ...] | None) -> dict[str, str]:
    """What is wrong, by field, for a base of a model type; ``types`` are those that a platform takes, if it asks."""
    get = config.get
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
        ("model_type", get("model_type") == model_type or (not types and "model_type" not in config),
         f"must be the base's, {shown(model_type)}"),
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
    return {key: f"adapter_config.json: {shown(key)[1:-1]}{given[key]} {rule}" for key, fits, rule in rules if not fits}


def _layers(config: dict) -> list:
    layers = config.get("layers_to_transform")
    return layers if isinstance(layers, list) else [] if layers is None else [layers]


def _suffixes(path: str) -> list[str]:
    """The names that PEFT takes for this module: its path, and what follows any of its dots."""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def fitting(pattern: dict | None, path: str, default: float) -> float:
    """The value of the first name that fits the end of a path. To PEFT a dot in a name stands for any character."""
    for name, value in (pattern or {}).items():
        end = path[-len(name) :]
        whole = path == end or path[: -len(name)].endswith(".")
        if whole and len(end) == len(name) and all(n in (".", p) for n, p in zip(name, end, strict=True)):
            return value
    return default


def left_out(config: dict, paths: list[str]) -> Iterator[tuple[str, str]]:
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
