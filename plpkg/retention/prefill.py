"""Chunked prefill with eviction under a fixed budget: Algorithm 1 of Locret (arXiv 2410.01805, appendix C).

A chunk of tokens attends to what is kept and to itself; then every KV head keeps its ``budget`` best units. Before a
cut a head holds at most ``budget + chunk_size`` units, whatever the length of the text. The last ``stabilizers``
units before a cut are safe from that one cut, since nothing has had time to depend on them; the last chunk has none.
The last ``local_len`` tokens run at the end and are not cut. Spans of the prompt may be kept whole, whatever their
scores: an instruction that eviction would take apart (arXiv 2510.00231).

The publication does not evict while decoding; here it is optional (:meth:`PrefillResult.evicting`).
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from tqdm.auto import tqdm

from plpkg.decoding import rope_changes
from plpkg.inputs import Ids
from plpkg.retention import watch
from plpkg.retention.cache.evicting import EvictingCache
from plpkg.retention.cache.store import UnitStore
from plpkg.retention.eviction import Eviction
from plpkg.retention.layers import check_ids
from plpkg.retention.reading import PrefillResult
from plpkg.retention.scorers import Scorer
from plpkg.training_loop import evaluating
from plpkg.validation import whole_number


def chunked_prefill(
    model: nn.Module,
    input_ids: Ids,
    scorer: Scorer,
    budget: int,
    chunk_size: int,
    stabilizers: int = 0,
    local_len: int = 0,
    positions: str = "reassigned",
    *,
    keep: Sequence[tuple[int, int]] = (),
    attention_mask: torch.Tensor | None = None,
    store: Callable[[], UnitStore] = UnitStore,
    log_positions: bool = False,
    progress: bool = False,
) -> PrefillResult:
    """Read a prompt chunk by chunk, keeping at most ``budget`` units a head after each.

    Parameters
    ----------
    model
        A Hugging Face causal language model with eager or SDPA attention. It is not changed.
    input_ids
        ``(batch, seq)`` of equal lengths, one text's ``(tokens,)`` or list, or what a tokenizer gives.
    scorer
        One of :mod:`plpkg.retention.scorers`.
    budget, chunk_size
        Units, and tokens. A head never holds more than ``budget + max(chunk_size, local_len)`` units.
    stabilizers
        Units at the end that are safe from each cut but that of the last chunk; they count within the budget.
    local_len
        Tokens at the end that are not cut: the cache ends with ``budget + local_len`` units.
    positions
        ``"reassigned"`` or ``"original"``: see :mod:`plpkg.retention.cache.evicting`.
    keep
        Spans ``(start, stop)`` of the prompt whose units always stay, ``stop`` excluded: an instruction, say. They
        count within the budget.
    attention_mask
        Refused if it masks anything.
    store
        Makes each layer's store: :func:`plpkg.retention.cache.quantize.quantized`, say.
    log_positions
        Log what each head kept: ``layers · num_kv_heads · budget`` integers a chunk, as much as the whole cache after
        128K tokens.
    progress
        Show a bar.

    Warns
    -----
    UserWarning
        The model's frequencies change with the length (LongRoPE, dynamic NTK), and do so within this prompt.

    Raises
    ------
    ValueError
        Sizes that do not fit together, a padded batch, or a model that this cannot be done with.
    """
    watch.check(model)
    if attention_mask is not None:
        input_ids = {"input_ids": input_ids, "attention_mask": attention_mask}
    input_ids = check_ids(model, input_ids)
    seq = input_ids.shape[-1]
    whole_number("budget", budget, 1)
    whole_number("chunk_size", chunk_size, 1)
    whole_number("stabilizers", stabilizers, 0, budget - 1, "budget - 1")
    whole_number("local_len", local_len, 0)
    if local_len >= seq > budget:
        raise ValueError(
            f"local_len={local_len} covers all {seq} tokens of the prompt: nothing would be cut to budget={budget}"
        )
    scorer.check(model)
    scorer = scorer.started(input_ids, budget)
    keep = _checked_spans(keep, seq)
    _check_protection(scorer, budget, stabilizers, keep)
    cache = EvictingCache(model, positions, store)
    _warn_of_frequencies(model, seq, budget, chunk_size, local_len, positions)
    eviction = Eviction(model, cache, scorer, budget, stabilizers, log_positions, keep)
    with torch.no_grad(), evaluating(model):
        logits = read_chunks(eviction, input_ids, chunk_size, local_len, progress=progress)
        cache.settle()
    return PrefillResult(cache, logits, eviction.log, eviction)


def _check_protection(scorer: Scorer, budget: int, stabilizers: int, keep: Sequence[tuple[int, int]]) -> None:
    """ValueError if more units are safe from a cut than stay after it."""
    in_spans = set()
    for start, stop in keep:
        in_spans.update(range(max(start, scorer.sink), stop))  # without those that are the sink's already
    protected = scorer.sink + max(scorer.latest(budget), stabilizers) + len(in_spans)
    if protected > budget:
        spans = f"and {len(in_spans)} more in keep={list(keep)} " if keep else ""
        raise ValueError(
            f"the scorer protects sink={scorer.sink} and recent={scorer.recent} units, with stabilizers={stabilizers} "
            f"{spans}that is {protected}, more than budget={budget}"
        )


def _warn_of_frequencies(model, seq: int, budget: int, chunk_size: int, local_len: int, positions: str) -> None:
    """Warn if the chunks of one prompt are computed with different frequencies."""
    changes = rope_changes(model.config)
    before_local = max(0, seq - local_len)
    first_chunk = min(chunk_size, before_local) if before_local else seq  # all of a prompt that is local
    if not changes or first_chunk == seq:
        return
    kind, limit = min(changes, key=lambda change: change[1])
    if positions == "original":
        reach = seq
        # LongRoPE has two sets of frequencies: if the first chunk has the second one, all chunks have.
        alike = kind == "longrope" and first_chunk > limit
    else:
        reach = min(seq, budget + max(chunk_size, local_len))
        alike = False
    if reach > limit and not alike:
        warnings.warn(
            f"{type(model).__name__} changes its frequencies beyond {limit} positions ({kind}), and this prompt "
            f"reaches {reach}: chunks before and after are computed with different ones, which no whole prompt is. "
            f"Keep the reach (budget + chunk_size with positions='reassigned') within {limit}",
            stacklevel=3,
        )


def _checked_spans(keep: Sequence[tuple[int, int]], seq: int) -> tuple[tuple[int, int], ...]:
    """The spans as pairs; ValueError unless each lies within the ``seq`` tokens of the prompt."""
    for span in keep:
        pair = isinstance(span, Sequence) and len(span) == 2 and all(type(end) is int for end in span)
        if not pair or not 0 <= span[0] < span[1] <= seq:
            raise ValueError(f"keep must be spans (start, stop) within the {seq} tokens of the prompt, got {span}")
    return tuple((start, stop) for start, stop in keep)


def read_chunks(
    eviction: Eviction, input_ids: torch.Tensor, chunk_size: int, local_len: int, *, progress: bool = False
) -> torch.Tensor:
    """Algorithm 1; the logits after the last token ``(batch, vocab)``."""
    seq = input_ids.shape[-1]
    local_start = max(0, seq - local_len)
    with eviction.watching():
        for start in tqdm(range(0, local_start, chunk_size), "prefill", disable=not progress):
            stop = min(start + chunk_size, local_start)
            logits = eviction.forward(input_ids[:, start:stop])
            stabilizers = eviction.stabilizers if stop < local_start else 0  # the last chunk has none
            eviction.cut(start, stop, stabilizers=stabilizers, budget=eviction.budget)
        if local_start < seq:
            logits = eviction.forward(input_ids[:, local_start:])
            eviction.cut(local_start, seq)  # without a budget: the step is logged, and nothing goes
    return logits
