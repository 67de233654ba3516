"""Scores of what a unit is worth: the two protocols, and the methods that Locret is compared with.

A :class:`CausalScorer` judges a unit once, when it enters the cache, from what is known then; the score is stored.
Then keeping the best of each chunk is keeping the best of all, whatever the chunks (theorem N.4 of Locret's paper).
An :class:`AttentionScorer` judges all units anew by the attention that later queries pay them. That works for a
prompt that is read whole; under chunked prefill the queries that matter come after the cut.

Every scorer can protect the first units of the sequence (``sink``) and the last ones before each cut. How many last
ones is a part of each published method, its recency rule, and on text it decides more than the scores do: a number as
``recent`` sets one rule for all of them.
"""

import copy
import functools
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from plpkg.fingerprints import Stamp, stamp
from plpkg.retention.head import RetainingHeads
from plpkg.retention.watch import Units
from plpkg.validation import number, whole_number


@dataclass
class Scorer:
    """The base of both protocols: which units are protected, and how a scorer follows one sequence.

    Attributes
    ----------
    sink
        Units at the beginning of the sequence that always stay.
    recent
        Units at the end of what is cut that always stay; by default as many as the method's own rule says.
    needs_logits
        The scorer is called after the model's forward pass, with ``units.surprisal`` and without tensors of a layer.
    """

    sink: int = field(default=0, kw_only=True)
    recent: int | None = field(default=None, kw_only=True)
    needs_logits = False

    def __post_init__(self) -> None:
        whole_number("sink", self.sink, 0)
        if self.recent is not None:
            whole_number("recent", self.recent, 0)

    def check(self, model: nn.Module) -> None:
        """Raise a ``ValueError`` if this scorer does not go with the model."""

    def recency(self, budget: int) -> int:
        """The method's own rule: how many of the latest units it protects; 0 unless the method says otherwise."""
        return 0

    def latest(self, budget: int) -> int:
        """How many of the latest units it protects: ``recent``, or by its own rule."""
        return self.recency(budget) if self.recent is None else self.recent

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        """Called on a copy of the scorer before the first chunk of a sequence ``(batch, seq)``."""

    def started(self, ids: torch.Tensor, budget: int) -> "Scorer":
        """A copy for one sequence, with its recency rule applied: what it learns of this prompt is not the caller's."""
        scorer = copy.copy(self)
        scorer.begin(ids, budget)
        scorer.recent = scorer.latest(budget)
        return scorer

    def update(self, units: Units, stored: torch.Tensor | None) -> torch.Tensor:
        """All scores ``(batch, num_kv_heads, kept + n)`` from those stored ``(batch, num_kv_heads, kept)``."""
        raise NotImplementedError


class CausalScorer(Scorer):
    """Judges new units once. Subclasses define :meth:`score`."""

    def score(self, units: Units) -> torch.Tensor:
        """``(batch, num_kv_heads, n)``, or what expands to it; higher stays longer."""
        raise NotImplementedError

    def update(self, units: Units, stored: torch.Tensor | None) -> torch.Tensor:
        new = self.score(units).float()
        if stored is None:
            return new
        return torch.cat([stored, new.expand(*stored.shape[:2], -1)], dim=-1)


class AttentionScorer(Scorer):
    """Judges all units by the new queries' attention. Subclasses define :meth:`rescore`."""

    def rescore(self, units: Units, stored: torch.Tensor) -> torch.Tensor:
        """New scores ``(batch, num_kv_heads, kept + n)``; ``stored`` has zeros for the new units."""
        raise NotImplementedError

    def update(self, units: Units, stored: torch.Tensor | None) -> torch.Tensor:
        batch, num_kv_heads, width = units.keys.shape[:3]  # width = kept + n
        if stored is None:
            stored = units.keys.new_zeros(batch, num_kv_heads, 0, dtype=torch.float32)
        zeros_for_new = (0, width - stored.shape[-1])
        return self.rescore(units, functional.pad(stored, zeros_for_new))


_CHECKED: WeakKeyDictionary[nn.Module, tuple[str, Stamp]] = WeakKeyDictionary()
"""For each model, the fingerprint that it was found to have, and the stamp of its weights then.

A fingerprint reads every tensor: it is compared once, until the weights change."""


@dataclass
class Locret(CausalScorer):
    """Locret (arXiv 2410.01805): the causal importance score (CIS) that trained retaining heads predict.

    Recency: none of its own; the prefill's stabilizers and local tail are the publication's.
    """

    heads: RetainingHeads

    def check(self, model: Any) -> None:
        dtype = next(self.heads.parameters()).dtype
        if dtype != model.dtype:
            raise ValueError(
                f"these heads are in {dtype}, {type(model).__name__} in {model.dtype}: take heads.to(model.dtype)"
            )
        current = (self.heads.config.backbone, stamp(model, adapters=False))
        if _CHECKED.get(model) != current:
            self.heads.check(model)
            _CHECKED[model] = current

    def score(self, units: Units) -> torch.Tensor:
        return self.heads.score(units.layer, units.projected)


@dataclass
class Static(CausalScorer):
    """Given scores ``(layers, batch, num_kv_heads, seq)``: an oracle, if they are the labels. Recency: none."""

    scores: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scores.ndim != 4 or self.scores.isnan().any():
            raise ValueError(
                "scores must be (layers, batch, num_kv_heads, seq) without NaN, got "
                f"{tuple(self.scores.shape)} with {int(self.scores.isnan().sum())} NaN"
            )

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        if self.scores.shape[1] != len(ids):
            raise ValueError(f"scores are for a batch of {self.scores.shape[1]}, got {len(ids)} sequences")

    def score(self, units: Units) -> torch.Tensor:
        layers, _, _, seq = self.scores.shape
        if units.layer >= layers or units.positions[-1] >= seq:
            raise ValueError(
                f"scores are given for {layers} layers and {seq} positions, "
                f"got layer {units.layer} and position {int(units.positions[-1])}"
            )
        return self.scores[units.layer][..., units.positions]


@dataclass
class Random(CausalScorer):
    """Random: a number drawn for each unit and head. Recency: none."""

    seed: int = 0

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def score(self, units: Units) -> torch.Tensor:
        batch, num_kv_heads = units.keys.shape[:2]
        drawn = torch.rand(batch, num_kv_heads, len(units.positions), generator=self._generator, device="cpu")
        return drawn.to(units.keys.device)


@dataclass
class SinkRecent(CausalScorer):
    """StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): the first four units and the latest.

    Recency: none is protected; the scores themselves prefer the latest units.
    """

    sink: int = field(default=4, kw_only=True)

    def recency(self, budget: int) -> int:
        return 0  # its scores are the rule, which leave room for stabilizers and spans

    def score(self, units: Units) -> torch.Tensor:
        return units.positions[None, None]  # (1, 1, n): later is better, in every head


@dataclass
class KeyNorm(CausalScorer):
    """Key norm (Devoto et al. 2024, arXiv 2406.11430): short keys stay, as attention likes them. Recency: none."""

    def score(self, units: Units) -> torch.Tensor:
        new_keys = units.keys[..., -len(units.positions) :, :]
        return -new_keys.float().norm(dim=-1)


@dataclass
class SirLlm(CausalScorer):
    """SirLLM (Yao et al. 2024, arXiv 2405.12528): surprising tokens stay, the same in every layer and head.

    Recency: the last 1,000 units, as its code has it (``recent_size``), and no more than half of what the sink leaves.
    """

    sink: int = field(default=4, kw_only=True)
    needs_logits = True

    def recency(self, budget: int) -> int:
        return min(1000, max(0, budget - self.sink) // 2)

    def score(self, units: Units) -> torch.Tensor:
        return units.surprisal[:, None]  # (batch, 1, n): one score for all heads


@dataclass
class H2O(AttentionScorer):
    """H2O, heavy hitters (Zhang et al. 2023, arXiv 2306.14048): the sum of all attention that a unit ever got.

    Recency: half of what the sink leaves, as published.

    Attributes
    ----------
    recent_share
        The share of the budget that is for the latest units, where ``recent`` does not say how many; by default the
        publication's half.
    """

    recent_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        number("recent_share", self.recent_share, 0, 1)

    def recency(self, budget: int) -> int:
        return int(self.recent_share * max(0, budget - self.sink))

    def rescore(self, units: Units, stored: torch.Tensor) -> torch.Tensor:
        # Of (batch, num_kv_heads, group, rows, kept + n): the sum over the group's query heads and the new queries.
        return stored + sum(paid.sum(dim=(2, 3)) for paid in units.probabilities())


@dataclass
class SnapKv(AttentionScorer):
    """SnapKV (Li et al. 2024, arXiv 2404.14469): the latest queries' attention, pooled over neighbours.

    Recency: the window's own units, and no more than half of what the sink leaves.

    Attributes
    ----------
    window
        How many queries.
    kernel
        Units over which attention is averaged, an odd number: of those before the window, whose own attention would
        otherwise leak to their neighbours.
    """

    window: int = 16
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("window", self.window, 1)
        if whole_number("kernel", self.kernel, 1) % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    def recency(self, budget: int) -> int:
        return min(self.window, max(0, budget - self.sink) // 2)

    def rescore(self, units: Units, stored: torch.Tensor) -> torch.Tensor:
        n = len(units.positions)
        window = min(self.window, n)
        # The sum over the window's queries, the mean over the group's query heads: (batch, num_kv_heads, kept + n).
        parts = (part.sum(dim=3).mean(dim=2) for part in units.probabilities(n - window))
        paid = functools.reduce(torch.add, parts)
        before_window = paid.shape[-1] - window
        if not before_window:
            return paid
        pooled = functional.avg_pool1d(paid[..., :before_window], self.kernel, stride=1, padding=self.kernel // 2)
        return torch.cat([pooled, paid[..., before_window:]], dim=-1)
