"""Chunked prefill with eviction under a fixed budget: Algorithm 1 of Locret (arXiv 2410.01805, appendix C).

A chunk of tokens attends to what is kept and to itself; then every KV head keeps its ``budget`` best units. Before a
cut a head holds at most ``budget + chunk_size`` units, whatever the length of the text. The last ``stabilizers``
units before a cut are safe from that one cut, since nothing has had time to depend on them; the last chunk has none.
The last ``local_len`` tokens run at the end and are not cut.

The publication does not evict while decoding; here it is optional (:meth:`PrefillResult.evicting`).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from tqdm.auto import tqdm

from plpkg.results import Tabular
from plpkg.retention.cache import EvictingCache, Store, keep_indices
from plpkg.retention.scorers import Scorer
from plpkg.retention.watch import Units, Watch, evaluating, watching
from plpkg.validation import whole_number


@dataclass(frozen=True)
class Step:
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
    """The :class:`Step` of every forward pass, in order."""

    @property
    def peak(self) -> int:
        """The most units that a head held."""
        return max(step.before for step in self)

    def rows(self) -> list[dict]:
        return [{name: getattr(step, name) for name in ("start", "stop", "before", "after")} for step in self]

    def __repr__(self) -> str:
        return f"Log: {len(self)} forward passes, at most {self.peak} units a head, {self[-1].after} at the end"


@dataclass(frozen=True)
class PrefillResult:
    """A prompt that was read.

    Attributes
    ----------
    cache
        What is kept of it, ready for ``generate``: see :meth:`inputs`.
    logits
        ``(batch, vocab)`` after the last token.
    log
        Every forward pass with its cut.
    """

    cache: EvictingCache
    logits: torch.Tensor
    log: Log
    _eviction: "Eviction" = field(repr=False)

    def inputs(self, input_ids: torch.Tensor | None = None, *, repeats: int = 1) -> dict:
        """Keyword arguments for ``model.generate``, which goes on from here.

        Parameters
        ----------
        input_ids
            ``(batch, n)`` new tokens; by default the likeliest one. ``generate`` returns them before its own.
        repeats
            The ``num_beams`` or ``num_return_sequences`` of ``generate``: the cache is repeated that often, for good.

        Notes
        -----
        ``generate`` writes to the cache, and a second one goes on after the first. For several answers to one prompt,
        take a ``copy.deepcopy`` of the whole result for each.
        """
        ids = self.logits.argmax(-1, keepdim=True) if input_ids is None else input_ids
        whole_number("the number of new tokens", ids.shape[-1], 1)
        if whole_number("repeats", repeats, 1) > 1:
            self.cache.batch_repeat_interleave(repeats)
            self._eviction.repeat(repeats)
        length = self.cache.get_seq_length() + ids.shape[-1]
        mask = torch.ones(len(ids), length, dtype=torch.long, device=ids.device)
        return {"input_ids": ids, "attention_mask": mask, "past_key_values": self.cache}

    @contextmanager
    def evicting(self) -> Iterator[None]:
        """Cut after every forward pass of the model while the block runs, so that decoding stays within the budget.

        The last ``stabilizers`` units are safe from each cut. The first cut includes what ``local_len`` left whole.
        Every forward pass after the prefill has to run in such a block, or its units have no score.
        """
        with self._eviction.while_decoding():
            yield


class Eviction:
    """A scorer at work on a cache: it sees every forward pass and decides each cut."""

    def __init__(
        self,
        model: nn.Module,
        cache: EvictingCache,
        scorer: Scorer,
        budget: int,
        stabilizers: int,
        log_positions: bool,
    ) -> None:
        self.model, self.cache, self.scorer = model, cache, scorer
        self.budget, self.stabilizers, self.log_positions = budget, stabilizers, log_positions
        self.log = Log()
        self._last_logits: torch.Tensor | None = None  # (batch, 1, vocab): they predict the next chunk's first token
        self._watch = Watch(self._show)

    def _show(self, units: Units) -> None:
        if units.layer in self.cache.evicting and not self.scorer.needs_logits:
            self._store(units)

    def __deepcopy__(self, memo: dict) -> "Eviction":
        """The same model, and a cache and a log of its own."""
        other = copy.copy(self)
        other.scorer, other.cache = copy.copy(self.scorer), copy.deepcopy(self.cache, memo)
        other.log = copy.deepcopy(self.log, memo)
        other._watch = Watch(other._show)
        return other

    def repeat(self, repeats: int) -> None:
        """Follow a cache whose batch was repeated."""
        if self._last_logits is not None:
            self._last_logits = self._last_logits.repeat_interleave(repeats, dim=0)

    def _store(self, units: Units) -> None:
        layer = self.cache.evicting[units.layer]
        known = 0 if layer.scores is None else layer.scores.shape[-1]
        unknown = layer.positions.shape[-1] - len(units.positions) - known
        if unknown:
            raise ValueError(
                f"{unknown} units of the cache have no score: they came while nobody watched. Run every forward pass "
                "after the prefill within evicting(), or none"
            )
        layer.scores = self.scorer.update(units, layer.scores).expand(layer.positions.shape)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run tokens ``(batch, n)`` through the model; the logits after the last one."""
        start = self._prepare(ids)
        every = self.scorer.needs_logits
        logits = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=0 if every else 1
        ).logits
        self._after(ids, start, logits)
        return logits[:, -1]

    def _prepare(self, ids: torch.Tensor) -> int:
        start = next(iter(self.cache.evicting.values())).seen
        self._watch.ids = ids
        self._watch.positions = torch.arange(start, start + ids.shape[-1], device=ids.device)
        return start

    def _after(self, ids: torch.Tensor, start: int, logits: torch.Tensor) -> None:
        if not self.scorer.needs_logits:
            return
        before = logits[:, :1] if self._last_logits is None else self._last_logits
        log_p = torch.cat([before, logits[:, :-1]], dim=1).float().log_softmax(-1)  # (batch, n, vocab)
        tokens = ids % logits.shape[-1]  # the ids themselves; plpkg.retention.tiny packs more into them
        surprisal = -log_p.gather(-1, tokens[..., None]).squeeze(-1)
        if start == 0:
            surprisal[:, 0] = 0.0  # nothing predicts the first token
        self._last_logits = logits[:, -1:]
        for i in self.cache.evicting:
            self._store(Units(i, self._watch.positions, ids, surprisal=surprisal))

    def cut(self, start: int, stop: int, *, stabilizers: int = 0, budget: int | None = None) -> None:
        """Let every head keep its best units, and log it."""
        before = self.cache.kept
        for layer in self.cache.evicting.values():
            if budget is not None and before > budget:
                first, last = self.scorer.sink, self.scorer.recent
                indices = keep_indices(layer.scores, budget, first=first, last=last, stabilizers=stabilizers)
                layer.keep(indices)
        kept = None
        if self.log_positions:
            kept = torch.stack([layer.positions.cpu() for layer in self.cache.evicting.values()])
        self.log.append(Step(start, stop, before, self.cache.kept, kept))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Show the model's forward passes to the scorer."""
        with watching(self.model, self._watch):
            yield

    @contextmanager
    def while_decoding(self) -> Iterator[None]:
        """Follow forward passes that somebody else starts, ``generate`` say, and cut after each."""

        def before(_module, args, kwargs):
            if self.scorer.needs_logits:
                kwargs["logits_to_keep"] = 0
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._prepare(ids)
            return args, kwargs

        def after(_module, _args, output):
            start = int(self._watch.positions[0])
            self._after(self._watch.ids, start, output.logits)
            stop = start + self._watch.ids.shape[-1]
            self.cut(start, stop, stabilizers=self.stabilizers, budget=self.budget)

        # PEFT's generate calls the model inside its wrapper.
        inner = getattr(self.model, "get_base_model", lambda: self.model)()
        hooks = [inner.register_forward_pre_hook(before, with_kwargs=True), inner.register_forward_hook(after)]
        try:
            with self.watching():
                yield
        finally:
            for hook in hooks:
                hook.remove()


def chunked_prefill(
    model: nn.Module,
    input_ids: torch.Tensor,
    scorer: Scorer,
    budget: int,
    chunk_size: int,
    stabilizers: int = 0,
    local_len: int = 0,
    positions: str = "reassigned",
    *,
    attention_mask: torch.Tensor | None = None,
    store: Callable[[], Store] = Store,
    log_positions: bool = True,
    progress: bool = False,
) -> PrefillResult:
    """Read a prompt chunk by chunk, keeping at most ``budget`` units a head after each.

    Parameters
    ----------
    model
        A Hugging Face causal language model with eager or SDPA attention. It is not changed.
    input_ids
        ``(batch, seq)`` of equal lengths.
    scorer
        One of :mod:`plpkg.retention.scorers`.
    budget, chunk_size
        Units, and tokens. A head never holds more than ``budget + max(chunk_size, local_len)`` units.
    stabilizers
        Units at the end that are safe from each cut but that of the last chunk; they count within the budget.
    local_len
        Tokens at the end that are not cut: the cache ends with ``budget + local_len`` units.
    positions
        ``"reassigned"`` or ``"original"``: see :mod:`plpkg.retention.cache`.
    attention_mask
        Refused if it masks anything.
    store
        Makes each layer's store: :func:`plpkg.retention.quantize.quantized`, say.
    log_positions
        Log what each head kept. It is ``layers · num_kv_heads · budget`` integers a chunk: leave it out for long texts.
    progress
        Show a bar.

    Raises
    ------
    ValueError
        Sizes that do not fit together, a padded batch, or a model that this cannot be done with.
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be (batch, seq) with at least one token, got {tuple(input_ids.shape)}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
    if attention_mask is not None and not attention_mask.bool().all():
        raise ValueError(
            f"{int((attention_mask == 0).sum())} tokens of the batch are padding: heads would keep units of padding, "
            "and rows would end at other positions. Give sequences of one length, or one by one"
        )
    whole_number("budget", budget, 1)
    whole_number("chunk_size", chunk_size, 1)
    whole_number("stabilizers", stabilizers, 0, budget - 1, "budget - 1")
    whole_number("local_len", local_len, 0)
    scorer.check(model)
    scorer = copy.copy(scorer)  # what it learns of this prompt is not the caller's
    scorer.begin(input_ids, budget)
    protected = scorer.sink + max(scorer.recent, stabilizers)
    if protected > budget:
        raise ValueError(
            f"the scorer protects sink={scorer.sink} and recent={scorer.recent} units, with stabilizers={stabilizers} "
            f"that is {protected}, more than budget={budget}"
        )
    cache = EvictingCache(model, positions, store)
    longest = getattr(model.config, "n_positions", None)  # learnt positions, GPT-2's: there are no more
    if longest and input_ids.shape[-1] > longest:
        raise ValueError(f"{type(model).__name__} has n_positions={longest}, got {input_ids.shape[-1]} tokens")
    eviction = Eviction(model, cache, scorer, budget, stabilizers, log_positions)
    with torch.no_grad(), evaluating(model):
        logits = read_chunks(eviction, input_ids, chunk_size, local_len, progress=progress)
    return PrefillResult(cache, logits, eviction.log, eviction)


def read_chunks(
    eviction: Eviction, input_ids: torch.Tensor, chunk_size: int, local_len: int, *, progress: bool = False
) -> torch.Tensor:
    """Algorithm 1; the logits after the last token ``(batch, vocab)``."""
    seq = input_ids.shape[-1]
    end = max(0, seq - local_len)
    with eviction.watching():
        for start in tqdm(range(0, end, chunk_size), "prefill", disable=not progress):
            stop = min(start + chunk_size, end)
            logits = eviction.forward(input_ids[:, start:stop])
            last = stop == end
            eviction.cut(start, stop, stabilizers=0 if last else eviction.stabilizers, budget=eviction.budget)
        if end < seq:
            logits = eviction.forward(input_ids[:, end:])
            eviction.cut(end, seq)
    return logits
