"""What a unit is worth: the two protocols, and the methods that Locret is compared with.

A :class:`CausalScorer` judges a unit once, when it enters the cache, from what is known then; the score is stored.
Then keeping the best of each chunk is keeping the best of all, whatever the chunks (theorem N.4 of Locret's paper).
An :class:`AttentionScorer` judges all units anew by the attention that later queries pay them. That works for a
prompt that is read whole; under chunked prefill the queries that matter come after the cut.

Every scorer can protect the first units of the sequence (``sink``) and the last ones before each cut (``recent``).
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from plpkg.retention.head import RetainingHeads
from plpkg.retention.watch import Units
from plpkg.validation import number, whole_number


@dataclass
class Scorer:
    """What both protocols share.

    Attributes
    ----------
    sink, recent
        Units at the beginning of the sequence and at the end of what is cut that always stay.
    needs_logits
        The scorer is called after the model's forward pass, with ``units.surprisal`` and without tensors of a layer.
    """

    sink: int = field(default=0, kw_only=True)
    recent: int = field(default=0, kw_only=True)
    needs_logits = False

    def __post_init__(self) -> None:
        whole_number("sink", self.sink, 0)
        whole_number("recent", self.recent, 0)

    def check(self, model: nn.Module) -> None:
        """Raise a ``ValueError`` if this scorer does not go with the model."""

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        """Called on a copy of the scorer before the first chunk of a sequence ``(batch, seq)``."""

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
        batch, kv_heads, width = units.keys.shape[:3]
        old = units.keys.new_zeros(batch, kv_heads, 0, dtype=torch.float32) if stored is None else stored
        return self.rescore(units, functional.pad(old, (0, width - old.shape[-1])))


_CHECKED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The backbone's fingerprint by model: it reads every tensor, so it is compared once, not for every prompt."""


@dataclass
class Locret(CausalScorer):
    """What trained retaining heads predict: the causal importance score (CIS) of arXiv 2410.01805."""

    heads: RetainingHeads

    def check(self, model: nn.Module) -> None:
        if _CHECKED.get(model) != self.heads.config.backbone:
            self.heads.check(model)
            _CHECKED[model] = self.heads.config.backbone

    def score(self, units: Units) -> torch.Tensor:
        return self.heads.score(units.layer, units.projected)


@dataclass
class Static(CausalScorer):
    """Scores that are given: ``(layers, batch, num_kv_heads, seq)``. An oracle, if they are the labels."""

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
    """A random number for each unit and head."""

    seed: int = 0

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def score(self, units: Units) -> torch.Tensor:
        batch, kv_heads = units.keys.shape[:2]
        drawn = torch.rand(batch, kv_heads, len(units.positions), generator=self._generator, device="cpu")
        return drawn.to(units.keys.device)


@dataclass
class SinkRecent(CausalScorer):
    """The first four units and the latest: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453)."""

    sink: int = field(default=4, kw_only=True)

    def score(self, units: Units) -> torch.Tensor:
        return units.positions[None, None]


@dataclass
class KeyNorm(CausalScorer):
    """Short keys stay: attention likes them (Devoto et al. 2024, arXiv 2406.11430)."""

    def score(self, units: Units) -> torch.Tensor:
        return -units.keys[..., -len(units.positions) :, :].float().norm(dim=-1)


@dataclass
class SirLlm(CausalScorer):
    """Surprising tokens stay, the same in every layer and head: SirLLM (Yao et al. 2024, arXiv 2405.12528)."""

    sink: int = field(default=4, kw_only=True)
    needs_logits = True

    def score(self, units: Units) -> torch.Tensor:
        return units.surprisal[:, None]


@dataclass
class H2O(AttentionScorer):
    """The sum of all attention that a unit ever got: heavy hitters (Zhang et al. 2023, arXiv 2306.14048).

    Attributes
    ----------
    recent_share
        The share of the budget that is for the latest units.
    """

    recent_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        number("recent_share", self.recent_share, 0, 1)

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        self.recent = max(self.recent, int(self.recent_share * (budget - self.sink)))

    def rescore(self, units: Units, stored: torch.Tensor) -> torch.Tensor:
        return stored + sum(logits.softmax(-1).sum(dim=(2, 3)) for logits in units.logits())


@dataclass
class SnapKv(AttentionScorer):
    """The attention of the latest queries, pooled over neighbours: SnapKV (Li et al. 2024, arXiv 2404.14469).

    Attributes
    ----------
    window
        How many queries. Their own units stay, as far as they fill no more than half of the budget.
    kernel
        Units over which attention is averaged, an odd number.
    """

    window: int = 16
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("window", self.window, 1)
        if whole_number("kernel", self.kernel, 1) % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        self.recent = max(self.recent, min(self.window, (budget - self.sink) // 2))

    def rescore(self, units: Units, stored: torch.Tensor) -> torch.Tensor:
        first = max(0, len(units.positions) - self.window)
        paid = sum(logits.softmax(-1).sum(dim=3).mean(dim=2) for logits in units.logits(first))
        return functional.avg_pool1d(paid, self.kernel, stride=1, padding=self.kernel // 2)
