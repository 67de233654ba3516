"""An adapter's folder or bytes, read and checked against a base before anything of it is used."""

import copy
from pathlib import Path

import torch

from plpkg.adapters.adapter import Adapter, from_bytes, from_pairs
from plpkg.adapters.base import base_of, targets
from plpkg.adapters.file import CONFIG, POLICIES, WEIGHTS, AdapterLimits, InvalidAdapterError, check_files, refusing
from plpkg.files import untrusted
from plpkg.files.untrusted import MAX_CONFIG_BYTES, shown
from plpkg.validation import one_of


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
    base = base_of(model)
    limits = _limits(limits)
    config_file = Path(path, CONFIG)
    weights_file = Path(path, WEIGHTS)
    with refusing():
        config = bytes(untrusted.read_file(config_file, MAX_CONFIG_BYTES))
        if not weights_file.exists() and Path(path, "adapter_model.bin").exists():
            raise ValueError(f"{WEIGHTS} is missing; adapter_model.bin is a pickle, which is never read")
        header, size = untrusted.read_header(weights_file)
        pairs = check_files(config, header, size, base, limits)
        weights = untrusted.read_file(weights_file, limits.max_bytes)
        if len(weights) != size or weights[: len(header)] != header:
            raise ValueError(f"{WEIGHTS} changed while it was read")
        return from_pairs(pairs, config, weights, base)


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

    base_of(model)  # refuses what no adapter fits
    with refusing():
        method = str(untrusted.read_object(Path(path, CONFIG)).get("peft_type", "LORA"))
        if method not in PEFT_TYPE_TO_TUNER_MAPPING:
            define = "import the module that defines it first, plpkg.residual say"
            raise ValueError(f"PEFT does not know {shown(method)}: {define}")
        if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING[method], "as_lora"):  # pyright: ignore[reportArgumentType] (PEFT's keys are strings)
            return validate_adapter(path, model)
        if not Path(path, WEIGHTS).exists():  # PEFT would ask the hub
            raise ValueError(f"{path} has no {WEIGHTS}")
        # PEFT puts the adapter into the model that it is given: a copy, which shares the parameters' values.
        memo = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        memo |= {id(buffer): buffer for buffer in model.buffers()}
        adapted = PeftModel.from_pretrained(copy.deepcopy(model, memo), path)
        return Adapter.from_peft(adapted)


def read_adapter(
    config: bytes | bytearray,
    weights: bytes | bytearray,
    model: torch.nn.Module,
    limits: str | AdapterLimits | None = None,
) -> Adapter:
    """Check an adapter from the bytes of its two files, as :func:`validate_adapter` does.

    A ``bytearray`` becomes the adapter's own, anything else is copied.

    Raises
    ------
    InvalidAdapterError
        With the first reason against it.
    """
    return from_bytes(bytes(config), weights, base_of(model), _limits(limits))


def inspect(
    config: bytes | bytearray,
    header: bytes,
    size: int,
    model: torch.nn.Module,
    limits: str | AdapterLimits | None = None,
) -> None:
    """Check what can be known of an adapter before its values are there.

    ``header`` are the first 8 + N bytes of the weights' file, which has ``size`` bytes as a whole;
    :func:`plpkg.files.untrusted.header_length` gives N.

    Raises
    ------
    InvalidAdapterError
        With the first reason against it.
    """
    base = base_of(model)
    limits = _limits(limits)
    with refusing():
        check_files(bytes(config), header, size, base, limits)


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


def _limits(limits: str | AdapterLimits | None) -> AdapterLimits:
    """Limits by their name in :data:`POLICIES`, one's own as they are, the default ones for None."""
    if limits is None:
        return AdapterLimits()
    if isinstance(limits, AdapterLimits):
        return limits
    return POLICIES[one_of("limits", limits, tuple(POLICIES))]
