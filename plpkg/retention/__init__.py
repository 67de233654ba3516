"""Locret: retaining heads that learn which KV-cache units to keep, and eviction under a fixed budget (arXiv 2410.01805)."""

from plpkg.retention import scorers
from plpkg.retention.cache import EvictingCache, keep_indices
from plpkg.retention.head import RetainingHeads
from plpkg.retention.labels import cis_labels
from plpkg.retention.prefill import PrefillResult, chunked_prefill

__all__ = [
    "EvictingCache",
    "PrefillResult",
    "RetainingHeads",
    "chunked_prefill",
    "cis_labels",
    "keep_indices",
    "scorers",
]
