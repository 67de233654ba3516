"""Locret: heads that learn which KV-cache units to keep, and eviction under a fixed budget (arXiv 2410.01805)."""

from plpkg.retention import merge, offload, quantize, scorers, sparse, tasks, text, tiny
from plpkg.retention.cache import EvictingCache, keep_indices
from plpkg.retention.head import RetainingHeads
from plpkg.retention.labels import cis_labels
from plpkg.retention.prefill import PrefillResult, chunked_prefill
from plpkg.retention.train import train_heads

__all__ = [
    "EvictingCache",
    "PrefillResult",
    "RetainingHeads",
    "chunked_prefill",
    "cis_labels",
    "exercises",
    "keep_indices",
    "merge",
    "offload",
    "plots",
    "quantize",
    "recorded",
    "scorers",
    "sparse",
    "tasks",
    "text",
    "tiny",
    "train_heads",
    "widget",
]


def __getattr__(name: str):
    if name in ("exercises", "plots", "recorded", "widget"):
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
