"""Throughput: tokens per second, phone memory, FLOPs and the score M_S (notebook 03).

The names a notebook imports; ``published``, ``plots``, ``widget`` and ``exercises``
load on first use.
"""

from typing import TYPE_CHECKING

from plpkg.imports import on_first_use
from plpkg.throughput.estimate import ACCOUNTINGS, TERMS, Estimate, decode, prefill
from plpkg.throughput.latency import against_rtt, best_rank, break_even_rtt_s, schemes_against_rtt
from plpkg.throughput.resources import (
    PhoneMemory,
    phone_flops,
    phone_memory,
    phone_only_tokens_per_s,
    whole_model_bytes,
    whole_model_flops,
)
from plpkg.throughput.score import score
from plpkg.throughput.split import METHODS, Split

if TYPE_CHECKING:
    from plpkg.throughput import exercises, plots, published, widget
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "ACCOUNTINGS",
    "METHODS",
    "TERMS",
    "Estimate",
    "PhoneMemory",
    "Split",
    "against_rtt",
    "best_rank",
    "break_even_rtt_s",
    "decode",
    "exercises",
    "phone_flops",
    "phone_memory",
    "phone_only_tokens_per_s",
    "plots",
    "prefill",
    "published",
    "schemes_against_rtt",
    "score",
    "whole_model_bytes",
    "whole_model_flops",
    "widget",
]
