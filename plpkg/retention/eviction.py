"""A scorer at work on a cache: the forward passes that it is shown, each cut, and the log of both."""

import copy
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from plpkg.decoding import cache_among, cache_argument
from plpkg.fingerprints import stamp
from plpkg.results import Tabular
from plpkg.retention.cache.evicting import EvictingCache, ReassignedPositions
from plpkg.retention.layers import attention_layers
from plpkg.retention.scorers import Scorer
from plpkg.retention.watch import Units, Watch, now, watching
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
        ``(batch, num_kv_heads, n)``, in the order of time. Of equal scores the earlier unit stays; NaN is the lowest.
    budget
        How many stay; all, if there are no more.
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
    n = scores.shape[-1]
    last = max(last, stabilizers)
    whole_number("budget", budget, 1)
    if first + last > budget:
        raise ValueError(f"{first} first and {last} last units are protected, more than budget={budget}")
    if n <= budget:
        return torch.arange(n, device=scores.device).expand(*scores.shape[:-1], n)
    limits = torch.finfo(scores.dtype)
    # Infinite scores become finite as well: nothing may be above what is protected.
    scores = scores.nan_to_num(limits.min)
    if first:
        scores[..., :first] = float("inf")
    if last:
        scores[..., n - last :] = float("inf")
    if also is not None:
        scores = scores.masked_fill(also, float("inf"))
    return _rising(_highest(scores, budget), budget)


def _highest(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """Which units ``(batch, num_kv_heads, n)`` have the ``budget`` highest scores; of equal ones the earlier."""
    # Two sorts would say the same in four times the time.
    lowest_kept = scores.topk(budget, sorted=False).values.amin(dim=-1, keepdim=True)
    above = scores > lowest_kept
    equal = scores == lowest_kept
    room = budget - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def _rising(stays: torch.Tensor, budget: int) -> torch.Tensor:
    """The indices ``(batch, num_kv_heads, budget)`` of the units that stay, ``budget`` of each head, in order."""
    slot = torch.where(stays, stays.cumsum(dim=-1) - 1, budget)  # one past the end for those that leave
    index = torch.arange(stays.shape[-1], device=stays.device).expand_as(stays)
    indices = torch.empty(*stays.shape[:-1], budget + 1, dtype=torch.long, device=stays.device)
    return indices.scatter_(-1, slot, index)[..., :budget]


def _surprisal(ids: torch.Tensor, logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """``-log p`` of tokens ``(batch, n)``.

    Parameters
    ----------
    ids
        ``(batch, n)`` tokens.
    logits, before
        ``(batch, n, vocab)`` after each of them, and ``(batch, 1, vocab)``, which predict the first.
    """
    log_p = torch.cat([before, logits[:, :-1]], dim=1).float().log_softmax(-1)  # (batch, n, vocab)
    tokens = ids % logits.shape[-1]  # the ids themselves; plpkg.retention.trials.tiny packs more into them
    return -log_p.gather(-1, tokens[..., None]).squeeze(-1)


class Eviction:
    """A scorer at work on a cache: it sees every forward pass and decides each cut."""

    def __init__(
        self,
        model: Any,
        cache: EvictingCache,
        scorer: Scorer | None,
        budget: int,
        stabilizers: int,
        log_positions: bool,
        keep: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.model = model
        self.cache = cache
        self.evicts = scorer is not None
        self.scorer = scorer or Scorer()
        self.budget = budget
        self.stabilizers = stabilizers
        self.log_positions = log_positions
        self.keep = keep
        self.decoding = False
        self.stamps = (stamp(model), stamp(model, adapters=False))  # of the weights that read
        self.log = Log()
        self._watch: Watch | None = None  # while watching: for longer, both would keep each other and the model alive
        self.lent = threading.RLock()  # held while an answer is in the cache

    def _show(self, units: Units) -> None:
        if units.layer in self.cache.evicting and not self.scorer.needs_logits:
            self._store(units)

    def __deepcopy__(self, memo: dict) -> "Eviction":
        """The same model, and a cache and a log of its own."""
        other = copy.copy(self)
        other.scorer = copy.copy(self.scorer)
        other.cache = copy.deepcopy(self.cache, memo)
        other.log = copy.deepcopy(self.log, memo)
        other._watch = None
        other.lent = threading.RLock()
        return other

    def _store(self, units: Units) -> None:
        """Have the scorer judge a layer's units, and write the scores beside what the cache holds of the layer."""
        layer = self.cache.evicting[units.layer]
        scored = 0 if layer.scores is None else layer.scores.shape[-1]
        unscored = layer.positions.shape[-1] - len(units.positions) - scored
        if unscored:
            raise ValueError(
                f"{unscored} units of the cache have no score: they came while nobody watched. Run every forward pass "
                "after the prefill within evicting(), or none"
            )
        batch, heads, width = layer.positions.shape
        scores = self.scorer.update(units, layer.scores)
        if scores.shape not in [*itertools.product({1, batch}, {1, heads}, [width])]:
            raise ValueError(
                f"{type(self.scorer).__name__} must score (batch, num_kv_heads, kept + n) = {batch, heads, width} "
                f"units, got {tuple(scores.shape)}"
            )
        layer.scores = scores.expand(batch, heads, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run tokens ``(batch, n)`` through the model; the logits after the last one."""
        start = self._prepare(ids)
        wanted = 0 if self.scorer.needs_logits else 1  # transformers takes 0 for all
        output = self.model(input_ids=ids, **cache_argument(self.cache), use_cache=True, logits_to_keep=wanted)
        self._after(ids, start, output.logits)
        self._require_scores()
        return output.logits[:, -1]

    def _require_scores(self) -> None:
        for i, layer in self.cache.evicting.items():
            if layer.scores is None:
                module = attention_layers(self.model)[i].module
                raise ValueError(
                    f"{type(module).__name__} computes its attention past transformers' interface: it cannot be watched"
                )

    def _prepare(self, ids: torch.Tensor) -> int:
        """Tell the watch which tokens ``(batch, n)`` run next; the position of the first."""
        assert self._watch is not None  # a forward pass outside watching() would not be scored
        start = self.cache.seen
        self._watch.ids = ids
        self._watch.positions = torch.arange(start, start + ids.shape[-1], device=ids.device)
        return start

    def _after(self, ids: torch.Tensor, start: int, logits: torch.Tensor) -> None:
        """Give a scorer that waits for logits ``(batch, n, vocab)`` those of the pass that has just run."""
        if not self.scorer.needs_logits:
            return
        before = self.cache.beside.get("logits", logits[:, :1])  # the last pass's, which predict this one's first token
        surprisal = _surprisal(ids, logits, before)
        if start == 0:
            surprisal[:, 0] = 0.0  # nothing predicts the first token
        self.cache.beside = self.cache.beside | {"logits": logits[:, -1:]}
        positions = torch.arange(start, start + ids.shape[-1], device=ids.device)
        for i in self.cache.evicting:
            self._store(Units(i, positions, ids, surprisal=surprisal))

    def cut(self, start: int, stop: int, *, stabilizers: int = 0, budget: int | None = None) -> None:
        """Let every head keep its best units, and log it."""
        before = self.cache.kept
        layers = self.cache.evicting.values()
        if budget is not None and before > budget:
            for layer in layers:
                assert layer.scores is not None  # _require_scores has seen to it
                indices = keep_indices(
                    layer.scores,
                    budget,
                    first=self.scorer.sink,
                    last=self.scorer.latest(budget),
                    stabilizers=stabilizers,
                    also=self._spans(layer.positions),
                )
                layer.keep(indices)
        kept = None
        if self.log_positions:
            kept = torch.stack([layer.positions.cpu() for layer in layers])
        self.log.append(ChunkStep(start, stop, before, self.cache.kept, kept))

    def _spans(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Which units ``(batch, num_kv_heads, n)`` lie in a span that is kept; ``None`` if there are no spans."""
        if not self.keep:
            return None
        inside = torch.zeros_like(positions, dtype=torch.bool)
        for start, stop in self.keep:
            inside |= (positions >= start) & (positions < stop)
        return inside

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Show the model's forward passes to the scorer, and its projections to a cache that rotates."""
        rotating = {i: layer for i, layer in self.cache.evicting.items() if isinstance(layer, ReassignedPositions)}
        watched = attention_layers(self.model)
        watch = Watch(self._show)
        self._watch = watch
        try:
            with watching(self.model, watch, self.cache):
                for i, layer in rotating.items():
                    layer.projected = partial(watch.keys_of, i, watched[i])
                yield
        finally:
            self._watch = None
            for layer in rotating.values():
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
        if not self.evicts:
            raise ValueError("what was loaded has no scorer: it answers, and evicts nothing more")

        # A thread that is about to call a hook while another removes it calls it without kwargs.
        def before(_module, args, kwargs: Any = MappingProxyType({})):
            if cache_among(kwargs) is self.cache:
                return self._begin_step(args, kwargs)
            return None  # somebody else's forward pass

        def after(_module, _args, output) -> None:
            watch = now()
            if watch is not None and watch is self._watch:
                self._end_step(watch, output.logits)

        # PEFT's generate calls the model inside its wrapper.
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        hooks = [inner.register_forward_pre_hook(before, with_kwargs=True), inner.register_forward_hook(after)]
        self.decoding = True
        try:
            with self.watching():
                yield
        finally:
            self.decoding = False
            for hook in hooks:
                hook.remove()

    def _begin_step(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with which somebody else's forward pass goes on, followed from here."""
        if self.scorer.needs_logits:
            kwargs["logits_to_keep"] = 0
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            raise ValueError("evicting() follows forward passes over input_ids, and this one has none")
        self._prepare(ids)
        return args, kwargs

    def _end_step(self, watch: Watch, logits: torch.Tensor) -> None:
        """Score and cut after a forward pass that :meth:`_begin_step` has begun."""
        ids = watch.ids
        start = int(watch.positions[0])
        self._after(ids, start, logits)
        self.cut(start, start + ids.shape[-1], stabilizers=self.stabilizers, budget=self.budget)
