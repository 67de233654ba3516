"""LoRA adapters of strangers: what PEFT saves, read without PEFT and checked against this base before it is used.

Whatever is not plain LoRA on the base's linear modules is refused, and so is a part of what the configuration names: an
adapter serves as it was trained, or not at all. Nothing that it says is imported, run as a regular expression, or
looked up. ``config`` reads its configuration, ``file`` judges both files without their values, ``reading`` adds these.
"""

from plpkg.adapters.adapter import Adapter, Factors
from plpkg.adapters.base import base_fingerprint, targets
from plpkg.adapters.file import CONFIG, POLICIES, WEIGHTS, WRAPPED, AdapterLimits, InvalidAdapterError
from plpkg.adapters.reading import inspect, load_adapter, read_adapter, require_fit, validate_adapter

__all__ = [
    "CONFIG",
    "POLICIES",
    "WEIGHTS",
    "WRAPPED",
    "Adapter",
    "AdapterLimits",
    "Factors",
    "InvalidAdapterError",
    "base_fingerprint",
    "inspect",
    "load_adapter",
    "read_adapter",
    "require_fit",
    "targets",
    "validate_adapter",
]
