"""A saved adapter of this room, as a stranger may have written it: read within bounds, and exact or refused.

PEFT builds an adapter before it reads its weights, and loads whatever tensors it finds in them. So the configuration is
read strictly here, and the weights with it; before anything is built, their names and shapes have to be those that the
configuration gives on this model (:mod:`plpkg.residual.methods`). No pattern of a file is evaluated.

:func:`plpkg.residual.load` judges a folder before PEFT sees it. PEFT's own door, ``PeftModel.from_pretrained``, reads
``adapter_config.json`` without bounds to find the method, and then asks this module.

The configuration has two digests: of the backbone, and of the weights' file that was written with it, so that a pair of
which one file was replaced is refused.
"""

import dataclasses
import os
import re
import warnings
from pathlib import Path

from huggingface_hub import hf_hub_download
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn

from plpkg import wheels
from plpkg.backbones import fingerprint
from plpkg.untrusted import read_object, read_shapes, read_tensors, shown

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_NAMES = 4096


def _text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _names(value: object, most: int = MAX_NAMES) -> bool:
    names = [] if value is None else value
    plain = isinstance(names, list) and len(names) <= most and all(isinstance(name, str) for name in names)
    return plain and all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)


PLAIN = "plain module names; a pattern is not evaluated"
TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM")
"""Those for which PEFT puts no new head on the model."""
RULES = dict(
    task_type=(lambda value: value in TASKS, f"absent or one of {', '.join(TASKS[1:])}"),
    modules_to_save=(lambda value: value in (None, []), "empty: they would replace a part of the backbone"),
    target_modules=(_names, f"a list of {PLAIN}"),
    exclude_modules=(_names, f"a list of {PLAIN}"),
    layers_pattern=(lambda value: _names([value] if isinstance(value, str) else value, 8), PLAIN),  # PEFT compiles each
    inference_mode=(lambda value: isinstance(value, bool), "true or false"),
    auto_mapping=(
        lambda value: value is None or (isinstance(value, dict) and all(map(_text, value.values()))),
        "an object of text",
    ),
    **dict.fromkeys(
        ("base_model_name_or_path", "revision", "peft_version", "backbone", "weights_sha256"), (_text, "text")
    ),
)
"""What a field of a file has to be; the method's own are checked by the configuration itself."""


def local_folder(name: str | Path, subfolder: str | None, options: dict) -> Path:
    """Where the two files are; those on the hub are fetched."""
    folder = Path(name, subfolder or "")
    if folder.is_dir():
        return folder
    fetched = [hf_hub_download(str(name), file, subfolder=subfolder, **options) for file in (CONFIG, WEIGHTS)]
    return Path(fetched[0]).parent


def fields_of(folder: Path, kind: type) -> dict:
    """The fields of a configuration of a ``kind`` in a folder.

    Raises
    ------
    ValueError
        There is none, it is of another kind, or says what no file may say.
    """
    fields, known = read_object(folder / CONFIG), {field.name for field in dataclasses.fields(kind)}
    for name, (fits, rule) in RULES.items():
        if name in fields and not fits(fields[name]):
            raise ValueError(f"{CONFIG}: {name}={shown(fields[name])} must be {rule}")
    for name in sorted(fields.keys() - known):
        if fields[name] not in (None, False, "", [], {}):
            raise ValueError(f"{CONFIG}: {shown(name)}={shown(fields[name])} must be empty: it is unknown")
    return {name: value for name, value in fields.items() if name in known and name != "peft_type"}


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """The shapes in a folder's weights, by name; ``None`` where there are none: a cloud needs the configuration alone.

    Raises
    ------
    ValueError
        The file is not sound, or a pickle, which PEFT would take.
    """
    if not os.path.lexists(folder / WEIGHTS):
        if os.path.lexists(folder / PICKLE):
            raise ValueError(f"{PICKLE} is a pickle, which is never read: save it as safetensors")
        return None
    return read_shapes(folder / WEIGHTS)


def require_sound(folder: Path, weights_sha256: str | None) -> str:
    """The digest of a folder's weights; ValueError if they are not finite, or not those of its configuration."""
    _, actual = read_tensors(folder / WEIGHTS)
    if weights_sha256 not in (None, actual):
        raise ValueError(
            f"{WEIGHTS} has the SHA-256 {actual[:12]}…, but {CONFIG} was written with {shown(weights_sha256)[1:13]}…: "
            "one of them is of another adapter, or a run was killed while it wrote them"
        )
    return actual


def require_like(given, config, adapter_name: str, model: nn.Module) -> None:
    """Refuse a saved adapter whose weights would mean something else in the one that a model has under this name.

    Parameters
    ----------
    given, config
        The saved configuration, and that of the adapter in the model.
    adapter_name, model
        The adapter's name, and its backbone.

    Raises
    ------
    ValueError
        They differ in more than M, or the saved weights are not sound.
    """
    for name in ("late", "backbone", *([] if config.save_projection else ["projection_seed"])):
        ours, theirs = (getattr(each, name, None) for each in (config, given))
        if name == "backbone" and _of_the_original(given, model, warn=False):
            continue
        if None not in (ours, theirs) and ours != theirs:
            raise ValueError(
                f"{given.folder} holds an adapter with {name}={shown(theirs)}, but {adapter_name!r} has {shown(ours)}: "
                "load it under another name, with the configuration that it was saved with"
            )
    if given.target_modules and (other := adapted_modules(model, config).keys() ^ adapted_modules(model, given).keys()):
        raise ValueError(f"{given.folder} holds an adapter of other modules than {adapter_name!r}: {min(other)}")
    if given.shapes is not None:
        require_sound(given.folder, given.weights_sha256)


def require_backbone(config, model: nn.Module) -> None:
    """Give a new adapter the model's fingerprint; refuse a saved one of another backbone.

    Raises
    ------
    ValueError
        The saved adapter belongs to another backbone, or the model is compiled or offloaded.
    """
    if any("_orig_mod" in name.split(".") for name, _ in model.named_modules()):
        raise ValueError("the model is compiled, so its modules have other names: adapt it first, then compile it")
    if any(getattr(getattr(module, "_hf_hook", None), "offload", False) for module in model.modules()):  # accelerate's
        raise ValueError("the model's weights are offloaded, and an adapter's would be lost: adapt it first")
    if not hasattr(model, "config") or any(tensor.is_meta for tensor in model.state_dict().values()):
        return  # no language model, or nothing in it
    actual = fingerprint(model)
    if config.folder and config.backbone is None:
        warnings.warn("the adapter names no backbone: whether it belongs to this one cannot be known", stacklevel=2)
    elif config.folder and config.backbone != actual and not _of_the_original(config, model):
        raise ValueError(
            f"the adapter belongs to a backbone with fingerprint {shown(config.backbone)[1:13]}…, "
            f"but {type(model).__name__} has {actual[:12]}…"
        )
    config.backbone = actual


def _of_the_original(config, model: nn.Module, *, warn: bool = True) -> bool:
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return wheels.is_of_the_original(config.base_model_name_or_path, name, warn=warn)


def adapted_modules(model: nn.Module, config) -> dict[str, nn.Module]:
    """The modules of a model that PEFT adapts for a configuration, by name."""
    modules = dict(model.named_modules())
    inside = tuple(f"{name}." for name, module in modules.items() if isinstance(module, BaseTunerLayer))
    chosen = {}
    for name, module in modules.items():
        if name and not name.startswith(inside) and check_target_module_exists(config, name):
            chosen[name] = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return chosen
