"""A scorer at work on a cache: what it is shown of each forward pass, each cut, and the log of both."""

import copy
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from plpkg.fingerprints import stamp
from plpkg.results import Tabular
from plpkg.retention.cache import EvictingCache, ReassignedPositions
from plpkg.retention.scorers import Scorer
from plpkg.retention.watch import Units, Watch, attention_layers, now, watching
from plpkg.validation import whole_number


@dataclass(frozen=True)
class ChunkStep:
    """One forward pass and its cut.

    Attributes
    ----------
    start, stop
        The tokens that ran.
    before, after
        Units in each head before the cut and after it.
    kept
        ``(layers, batch, num_kv_heads, after)`` original positions of what stayed, int32; ``None`` if not logged.
    """

    start: int
    stop: int
    before: int
    after: int
    kept: torch.Tensor | None = field(repr=False)


class Log(list, Tabular):
    """The :class:`ChunkStep` of every forward pass, in order."""

    @property
    def peak(self) -> int:
        """The most units that a head held."""
        return max(step.before for step in self)

    def rows(self) -> list[dict]:
        return [{name: getattr(step, name) for name in ("start", "stop", "before", "after")} for step in self]

    def __repr__(self) -> str:
        return f"Log: {len(self)} forward passes, at most {self.peak} units a head, {self[-1].after} at the end"


def keep_indices(
    scores: torch.Tensor,
    budget: int,
    *,
    first: int = 0,
    last: int = 0,
    stabilizers: int = 0,
    also: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which units stay: the ``budget`` highest scores of each head, in their order of time.

    Parameters
    ----------
    scores
        ``(batch, num_kv_heads, n)``, in the order of time. Of equal scores the earlier unit stays.
    budget
        How many stay; all, if there are no more. NaN is the lowest score.
    first, last, stabilizers
        The first units and the last ones that stay whatever their score; the larger of ``last`` and ``stabilizers``.
    also
        ``(batch, num_kv_heads, n)`` whether a unit stays whatever its score. The caller must ensure that these units
        fit in the budget: checking here would synchronise with the device at every cut.

    Returns
    -------
    torch.Tensor
        ``(batch, num_kv_heads, min(n, budget))`` indices, rising.

    Raises
    ------
    ValueError
        No budget, or more is protected than stays.
    """
    n, last = scores.shape[-1], max(last, stabilizers)
    whole_number("budget", budget, 1)
    if first + last > budget:
        raise ValueError(f"{first} first and {last} last units are protected, more than budget={budget}")
    if n <= budget:
        return torch.arange(n, device=scores.device).expand(*scores.shape[:-1], n)
    limits = torch.finfo(scores.dtype)
    # Nothing may be above what is protected, and a NaN would be equal to nothing.
    scores = scores.nan_to_num(limits.min).clamp(limits.min, limits.max)
    if first:
        scores[..., :first] = float("inf")
    if last:
        scores[..., n - last :] = float("inf")
    if also is not None:
        scores = scores.masked_fill(also, float("inf"))
    # Two sorts would say the same in four times the time.
    least = scores.topk(budget, sorted=False).values.amin(dim=-1, keepdim=True)  # the lowest score that stays
    above, equal = scores > least, scores == least
    room = budget - above.sum(dim=-1, keepdim=True)
    stays = above | (equal & (equal.cumsum(dim=-1) <= room))
    slot = torch.where(stays, stays.cumsum(dim=-1) - 1, budget)  # where each index goes; what leaves, past the end
    indices = torch.empty(*scores.shape[:-1], budget + 1, dtype=torch.long, device=scores.device)
    indices.scatter_(-1, slot, torch.arange(n, device=scores.device).expand_as(slot))
    return indices[..., :budget]


class Eviction:
    """A scorer at work on a cache: it sees every forward pass and decides each cut."""

    def __init__(
        self,
        model: nn.Module,
        cache: EvictingCache,
        scorer: Scorer | None,
        budget: int,
        stabilizers: int,
        log_positions: bool,
        keep: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.model, self.cache, self.scorer, self.keep = model, cache, scorer, keep
        self.budget, self.stabilizers, self.log_positions = budget, stabilizers, log_positions
        self.decoding = False
        self.stamps = stamp(model), stamp(model, adapters=False)  # of the weights that read
        self.log = Log()
        self._watch = None  # while watching: for longer, the two would keep each other and the model in memory
        self.lent = threading.RLock()  # held while an answer is in the cache

    def _show(self, units: Units) -> None:
        if units.layer in self.cache.evicting and not self.scorer.needs_logits:
            self._store(units)

    def __deepcopy__(self, memo: dict) -> "Eviction":
        """The same model, and a cache and a log of its own."""
        other = copy.copy(self)
        other.scorer, other.cache = copy.copy(self.scorer), copy.deepcopy(self.cache, memo)
        other.log = copy.deepcopy(self.log, memo)
        other._watch, other.lent = None, threading.RLock()
        return other

    def _store(self, units: Units) -> None:
        layer = self.cache.evicting[units.layer]
        known = 0 if layer.scores is None else layer.scores.shape[-1]
        unknown = layer.positions.shape[-1] - len(units.positions) - known
        if unknown:
            raise ValueError(
                f"{unknown} units of the cache have no score: they came while nobody watched. Run every forward pass "
                "after the prefill within evicting(), or none"
            )
        scores, (batch, heads, width) = self.scorer.update(units, layer.scores), layer.positions.shape
        if scores.shape not in itertools.product({1, batch}, {1, heads}, [width]):
            raise ValueError(
                f"{type(self.scorer).__name__} must score (batch, num_kv_heads, kept + n) = {batch, heads, width} "
                f"units, got {tuple(scores.shape)}"
            )
        layer.scores = scores.expand(batch, heads, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run tokens ``(batch, n)`` through the model; the logits after the last one."""
        start = self._prepare(ids)
        every = self.scorer.needs_logits
        logits = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=0 if every else 1
        ).logits
        self._after(ids, start, logits)
        self._require_scores()
        return logits[:, -1]

    def _require_scores(self) -> None:
        for i, layer in self.cache.evicting.items():
            if layer.scores is None:
                module = attention_layers(self.model)[i].module
                raise ValueError(
                    f"{type(module).__name__} computes its attention past transformers' interface: it cannot be watched"
                )

    def _prepare(self, ids: torch.Tensor) -> int:
        start = self.cache.seen
        self._watch.ids = ids
        self._watch.positions = torch.arange(start, start + ids.shape[-1], device=ids.device)
        return start

    def _after(self, ids: torch.Tensor, start: int, logits: torch.Tensor) -> None:
        if not self.scorer.needs_logits:
            return
        before = self.cache.beside.get("logits", logits[:, :1])  # they predict this chunk's first token
        log_p = torch.cat([before, logits[:, :-1]], dim=1).float().log_softmax(-1)  # (batch, n, vocab)
        tokens = ids % logits.shape[-1]  # the ids themselves; plpkg.retention.trials.tiny packs more into them
        surprisal = -log_p.gather(-1, tokens[..., None]).squeeze(-1)
        if start == 0:
            surprisal[:, 0] = 0.0  # nothing predicts the first token
        self.cache.beside = self.cache.beside | {"logits": logits[:, -1:]}
        for i in self.cache.evicting:
            self._store(Units(i, self._watch.positions, ids, surprisal=surprisal))

    def cut(self, start: int, stop: int, *, stabilizers: int = 0, budget: int | None = None) -> None:
        """Let every head keep its best units, and log it."""
        before = self.cache.kept
        for layer in self.cache.evicting.values():
            if budget is not None and before > budget:
                first, last, spans = self.scorer.sink, self.scorer.recent, self._spans(layer.positions)
                layer.keep(
                    keep_indices(layer.scores, budget, first=first, last=last, stabilizers=stabilizers, also=spans)
                )
        kept = None
        if self.log_positions:
            kept = torch.stack([layer.positions.cpu() for layer in self.cache.evicting.values()])
        self.log.append(ChunkStep(start, stop, before, self.cache.kept, kept))

    def _spans(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Which units ``(batch, num_kv_heads, n)`` lie in a span that is kept."""
        if not self.keep:
            return None
        return sum((positions >= start) & (positions < stop) for start, stop in self.keep).bool()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Show the model's forward passes to the scorer, and its projections to a cache that rotates."""
        turning = {i: layer for i, layer in self.cache.evicting.items() if isinstance(layer, ReassignedPositions)}
        watched = attention_layers(self.model)
        self._watch = Watch(self._show)
        try:
            with watching(self.model, self._watch, self.cache):
                for i, layer in turning.items():
                    layer.projected = partial(self._watch.keys_of, i, watched[i])
                yield
        finally:
            self._watch = None
            for layer in turning.values():
                layer.projected = None

    @contextmanager
    def one_pass(self, ids: torch.Tensor) -> Iterator[None]:
        """Follow one forward pass over ``(batch, n)`` that somebody else starts, and cut after it."""
        with self.watching():
            start = self._prepare(ids)
            yield
        self._require_scores()
        self.cut(start, start + ids.shape[-1], budget=self.budget)

    @contextmanager
    def while_decoding(self) -> Iterator[None]:
        """Follow forward passes that somebody else starts, ``generate`` say, and cut after each."""
        if self.scorer is None:
            raise ValueError("what was loaded has no scorer: it answers, and evicts nothing more")

        def before(_module, args, kwargs=MappingProxyType({})):
            if kwargs.get("past_key_values") is not self.cache:  # somebody else's
                return None
            if self.scorer.needs_logits:
                kwargs["logits_to_keep"] = 0
            ids = kwargs.get("input_ids", args[0] if args else None)
            if ids is None:
                raise ValueError("evicting() follows forward passes over input_ids, and this one has none")
            self._prepare(ids)
            return args, kwargs

        def after(_module, _args, output):
            if now() is None or now() is not self._watch:
                return
            start = int(self._watch.positions[0])
            self._after(self._watch.ids, start, output.logits)
            stop = start + self._watch.ids.shape[-1]
            self.cut(start, stop, stabilizers=self.stabilizers, budget=self.budget)

        # PEFT's generate calls the model inside its wrapper.
        inner = getattr(self.model, "get_base_model", lambda: self.model)()
        hooks = [inner.register_forward_pre_hook(before, with_kwargs=True), inner.register_forward_hook(after)]
        self.decoding = True
        try:
            with self.watching():
                yield
        finally:
            self.decoding = False
            for hook in hooks:
                hook.remove()
