"""A trial when an engine starts: whether a model answers the same when requests are packed.

A packed row tells a layer where a token stands through ``position_ids`` and the mask alone. Some layers count for
themselves, from the length of their input or of a cache (Llama-4's attention temperature), and show it only beyond
some position. So texts of six tokens are tried at the beginning, at the last positions that the model has, and from
each number in its configuration on, since one of them is where such a layer changes. Far from the beginning, a text
has nothing before it: so it costs no more there.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Cache, DynamicLayer, PreTrainedConfig, PreTrainedModel

from plpkg.decoding import cache_argument, longest_text
from plpkg.serving.attention import KeyValues, Row, packed, read

LENGTH = 6
"""Tokens of a text that is tried."""
TRIES = 3
"""Texts at a place, at most: rounded to half precision, a router can tip over for one, but not for each of them."""
FAR = 2**20
"""A position that stands for all beyond it, where a model has no last one."""


@torch.inference_mode()
def require_packable(model: PreTrainedModel, max_step_tokens: int = 0) -> None:
    """Refuse a model whose answers differ when requests are packed, be it for a reason that nobody foresaw.

    Parameters
    ----------
    model
        The model.
    max_step_tokens
        The most tokens of a row: one is tried, for layers that count the tokens of their input.

    Raises
    ------
    ValueError
        Its answers differ, or it cannot be tried.
    """
    kind = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{kind} has recurrent layers, whose state would run from one request into the next")
    vocab = vocabulary(model)
    starts = [0, 0, *_starts(model.config)]  # two at the beginning, so that one follows another
    suspects = range(len(starts))
    for attempt in range(TRIES):
        texts = (torch.arange(2 * LENGTH) + attempt * 2 * LENGTH).remainder(vocab).view(2, LENGTH).tolist()
        places = list(zip(starts, itertools.cycle(texts), strict=False))
        try:
            together = _together(model, places, max_step_tokens)
            alone = torch.stack([_alone(model, *place) for place in places])
        except Exception as reason:
            why = reason
            if not model._can_set_attn_implementation():
                why = "its attention does not go through transformers' interface"
            raise ValueError(f"{kind} cannot read packed requests: {why}") from reason
        errors = (together - alone).abs().amax(1) / alone.abs().amax(1)  # (places,)
        eps = torch.finfo(alone.dtype).eps
        single = torch.finfo(torch.float32).eps
        tolerance = max(eps, single) ** 0.5  # half of the digits of dtype, or of float32 if that has fewer
        # All places are packed again: it may be the neighbour that spoils one. NaN is wrong as well.
        suspects = [place for place in suspects if not errors[place] <= tolerance]
        if not suspects:
            return
        if eps <= single:
            break
    where = ""
    start = starts[suspects[0]]
    if start:
        where = f"at positions {start} to {start + LENGTH - 1} "
    apart = f"{where}its logits are {errors[suspects[0]]:.2g} apart"
    raise ValueError(f"{kind} answers otherwise when requests are packed: {apart}")


def vocabulary(model: PreTrainedModel) -> int:
    """How many ids a model reads."""
    embedding: Any = model.get_input_embeddings()
    return embedding.num_embeddings


def _starts(config: PreTrainedConfig) -> list[int]:
    """Where texts are tried besides the beginning: from each number of the configuration on, and at the end."""
    last = min(longest_text(config), FAR) - LENGTH
    starts = {each for each in _numbers(config.get_text_config().to_dict()) if each < last}
    return sorted(starts | {max(last, 0)})


def _numbers(value: object) -> Iterator[int]:
    """The whole numbers in a configuration that may be positions."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float) and value >= LENGTH and value % 1 == 0:
        yield int(value)


def _together(model: PreTrainedModel, places: list[tuple[int, list[int]]], tokens: int) -> torch.Tensor:
    """The logits ``(places, vocab)`` after texts that begin at a position each, packed; in two parts."""
    layers = model.config.get_text_config().num_hidden_layers
    pasts = [KeyValues(LENGTH, start) for start, _ in places]
    room = tokens - len(places) * LENGTH  # in a whole row
    for half in range(2):
        ids: list[int] = []
        rows: list[Row] = []
        while half and len(ids) < room:  # others stand before them, up to a whole row
            size = min(room - len(ids), longest_text(model.config))
            rows.append(Row(slice(len(ids), len(ids) + size), 0, KeyValues(size)))
            ids += [0] * size
        others = len(rows)
        for k, (past, (start, text)) in enumerate(zip(pasts, places, strict=True)):
            cut = 2 + 2 * (k % 2)  # neighbours are cut at different places
            begin, end = (cut, LENGTH) if half else (0, cut)
            rows.append(Row(slice(len(ids), len(ids) + end - begin), start + begin, past))
            ids += text[begin:end]
        logits = read(model, ids, rows, [row.rows.stop - 1 for row in rows[others:]])
        if len(pasts[0].layers) != layers:
            raise ValueError(f"attention of {len(pasts[0].layers)} layers asks for keys, {layers} there are")
    return logits


class _Before(DynamicLayer):
    """A layer of a cache that has seen ``seen`` tokens, none of which can be attended to any more."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen

    def get_seq_length(self) -> int:
        return self.seen

    def update(self, key_states, value_states, *_, **__):
        return key_states, value_states


def _alone(model: PreTrainedModel, start: int, text: list[int]) -> torch.Tensor:
    """The logits ``(vocab,)`` after a text that begins at a position, read as ``generate`` reads a text, or goes on."""
    ids = torch.tensor([text], device=model.device)
    if not start:
        return model(input_ids=ids, use_cache=False).logits[0, -1]
    layers = model.config.get_text_config().num_hidden_layers
    with packed(model, [Row(slice(0, LENGTH), start, KeyValues(LENGTH, start))]):
        return model(
            input_ids=ids,
            position_ids=torch.arange(start, start + LENGTH, device=model.device)[None],
            attention_mask=ids.new_ones(1, start + LENGTH),
            **cache_argument(Cache(layers=[_Before(start) for _ in range(layers)])),
            use_cache=True,
        ).logits[0, -1]
