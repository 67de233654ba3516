"""Locret: heads that learn which KV-cache units to keep, and eviction under a fixed budget (arXiv 2410.01805)."""

from typing import TYPE_CHECKING

from plpkg.imports import on_first_use
from plpkg.retention import scorers
from plpkg.retention.bounded import bounded
from plpkg.retention.cache import quantize
from plpkg.retention.head import RetainingHeads
from plpkg.retention.labels import cis_labels
from plpkg.retention.prefill import chunked_prefill
from plpkg.retention.presses import from_press
from plpkg.retention.reading import load
from plpkg.retention.train import train_heads
from plpkg.retention.trials import tasks, text, tiny

if TYPE_CHECKING:
    from plpkg.retention import exercises, plots, widget
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "RetainingHeads",
    "bounded",
    "chunked_prefill",
    "cis_labels",
    "exercises",
    "from_press",
    "load",
    "plots",
    "quantize",
    "scorers",
    "tasks",
    "text",
    "tiny",
    "train_heads",
    "widget",
]
