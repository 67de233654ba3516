"""Labels, which a retaining head learns to predict: how much the answer will look at each unit of the prompt.

The label of unit k in KV head j is the largest attention logit that an answer token pays it, over the answer's rows
and the query heads of the group: scaled, rotated, causal, before softmax (arXiv 2410.01805; its text
writes plain Q·Kᵀ, its code has the scaled and rotated logits).
"""

import functools
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from plpkg.decoding import cache_argument
from plpkg.inputs import Ids
from plpkg.retention.cache.evicting import bounded
from plpkg.retention.layers import check_ids
from plpkg.retention.watch import Units, Watch, watching
from plpkg.training_loop import evaluating
from plpkg.validation import one_of, whole_number


def cis_labels(
    model: nn.Module, input_ids: Ids, prompt_len: int, *, rows: str = "answer", chunk_size: int = 4096
) -> torch.Tensor:
    """Labels of every layer, KV head and unit of the prompt, in bounded memory: never a full seq × seq matrix.

    Parameters
    ----------
    model
        A Hugging Face causal language model. It is not changed.
    input_ids
        ``(batch, seq)``, or one text's: prompt and answer.
    prompt_len
        Tokens of the prompt.
    rows
        The tokens whose logits count. ``"answer"``: the answer's, as published. ``"predicting"``: those that predict
        the answer's, from the prompt's last one to the answer's last but one. A long answer hardly differs; of an
        answer of one token, the first kind never sees the question being answered.
    chunk_size
        Tokens of the prompt that run at a time.

    Returns
    -------
    torch.Tensor
        ``(layers, batch, num_kv_heads, prompt_len)``, float32.

    Raises
    ------
    ValueError
        No prompt or no answer, an unknown kind of rows, or a model with sliding windows.
    """
    return labels_and_states(model, input_ids, prompt_len, rows=rows, chunk_size=chunk_size)[0]


def labels_and_states(
    model: Any, input_ids: Ids, prompt_len: int, *, rows: str = "answer", chunk_size: int = 4096
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Labels as :func:`cis_labels`, and the heads' input for the prompt: ``(batch, prompt_len, width)`` a layer."""
    cache = DynamicCache(config=model.config)
    full = (DynamicLayer, DynamicSlidingWindowLayer)
    if any(type(layer) not in full or bounded(layer, model.config) for layer in cache.layers):
        raise ValueError(
            f"{type(model).__name__} has layers with a sliding window, which see part of the prompt only: there are "
            "no labels for the rest"
        )
    input_ids = check_ids(model, input_ids)
    seq = input_ids.shape[-1]
    whole_number("prompt_len", prompt_len, 1, seq - 1, "seq - 1")
    whole_number("chunk_size", chunk_size, 1)
    predicting = one_of("rows", rows, ("answer", "predicting")) == "predicting"
    shift = 1 if predicting else 0  # the token that predicts another stands one before it
    first_row = prompt_len - shift
    states: dict[int, list[torch.Tensor]] = {}
    labels: dict[int, torch.Tensor] = {}

    def collect(units: Units) -> None:
        states.setdefault(units.layer, []).append(units.projected)

    def label(units: Units) -> None:
        labels[units.layer] = _highest_paid(units, prompt_len)
        if predicting:  # the first row is the prompt's last token, which no chunk has had
            states.setdefault(units.layer, []).append(units.projected[:, :1])

    watch = Watch(collect)
    with torch.no_grad(), evaluating(model), watching(model, watch, cache):
        for start in range(0, first_row, chunk_size):
            chunk = input_ids[:, start : min(start + chunk_size, first_row)]
            model(input_ids=chunk, **cache_argument(cache), use_cache=True, logits_to_keep=1)
        watch.show = label
        row_ids = input_ids[:, first_row : seq - shift]
        model(input_ids=row_ids, **cache_argument(cache), use_cache=True, logits_to_keep=1)
    by_layer = [torch.cat(states[i], dim=1) for i in sorted(states)]
    return torch.stack([labels[i] for i in sorted(labels)]), by_layer


def _highest_paid(units: Units, prompt_len: int) -> torch.Tensor:
    """The largest logit that the new units of a layer pay each unit of the prompt, over rows and group.

    Returns
    -------
    torch.Tensor
        ``(batch, num_kv_heads, prompt_len)``.
    """
    # Of logits (batch, num_kv_heads, group, rows, kept + n), some rows at a time.
    paid = (logits.amax(dim=(2, 3))[..., :prompt_len] for logits in units.logits())
    return functools.reduce(torch.maximum, paid)
