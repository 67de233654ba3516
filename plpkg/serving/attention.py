"""Packed attention: tokens of many requests in one row, each looking only at its own request's past.

A model reads ``(1, tokens)``: prompts and single new tokens one behind the other, as continuous batching has them.
Its linear layers see one matrix. Only attention has to know where a request begins, and transformers' public
interface for attention functions and masks is where it learns that: a mask arrives as the function of positions that
the model's own layers ask for (causal, sliding, chunked), and is evaluated on each request's positions.

Neighbours that bring as many tokens, as all do that write, are one call. It takes one tensor, so that the keys and
values of short texts are copied into it, padded to the longest; those of long texts are read where they are.

Left out: a kernel that takes all requests at once, and copies nothing.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "plpkg_packed"
LONG = 128
"""Requests of more positions are attended to one by one: to copy their keys and values beside others' costs more."""


class KeyValues:
    """A request's keys and values in every layer, ``(capacity, kv_heads, key_dim + value_dim)``: room for all at once.

    They are of the positions from ``first`` on, which is 0 for whatever is read here.
    """

    def __init__(self, capacity: int, first: int = 0) -> None:
        self.capacity = capacity
        self.first = first
        self._firsts: dict[int, int] = {}  # of layers that begin elsewhere
        self.layers: dict[int, torch.Tensor] = {}

    def first_of(self, layer: int) -> int:
        """The position of a layer's first key."""
        return self._firsts.get(layer, self.first)

    def write(self, layer: int, start: int, new: torch.Tensor) -> torch.Tensor:
        """Put ``(tokens, kv_heads, …)`` keys and values at position ``start``; return those from the first on."""
        if layer not in self.layers:
            self.layers[layer] = new.new_empty(self.capacity, *new.shape[1:])
        start -= self.first_of(layer)
        stored = self.layers[layer][: start + len(new)]
        stored[start:] = new
        return stored

    def begin(self, position: int, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin with keys and values ``(1, kv_heads, kept, head_dim)`` that others have chosen, before ``position``.

        Wherever they once stood, they count as the last positions before it: full attention sees all of them.
        """
        for layer, (keys, values) in enumerate(layers):
            first = position - keys.shape[2]
            self._firsts[layer] = first
            self.write(layer, first, torch.cat((keys, values), -1)[0].transpose(0, 1))

    @property
    def num_bytes(self) -> int:
        """The bytes of all layers."""
        return sum(stored.nbytes for stored in self.layers.values())

    def copy(self, other: "KeyValues", positions: int) -> None:
        """Take over the first positions of another request."""
        for layer, stored in other.layers.items():
            self.write(layer, 0, stored[:positions])


@dataclass
class Row:
    """A request's share of a step: tokens ``rows`` of the batch, at the positions from ``start`` on.

    Logits are wanted after the last token of its text, or, if ``each``, after all of its tokens.
    """

    rows: slice
    start: int
    past: KeyValues
    each: bool = False

    @property
    def positions(self) -> range:
        """The places in the request where the step's tokens stand."""
        return range(self.start, self.start + self.rows.stop - self.rows.start)

    def wanted(self, length: int) -> range:
        """The tokens of the batch after which logits are wanted, of a text of ``length``."""
        if self.each:
            return range(self.rows.start, self.rows.stop)
        is_whole = self.positions.stop == length
        return range(self.rows.stop - is_whole, self.rows.stop)


class Run:
    """Neighbours in a step that have as many tokens each: one call of a layer's attention answers all of them."""

    def __init__(self, rows: list[Row]) -> None:
        self.pasts = [(row.past, row.start) for row in rows]
        self.rows = slice(rows[0].rows.start, rows[-1].rows.stop)
        self.shape = (len(rows), len(rows[0].positions))  # (rows, tokens)
        self._positions = [row.positions for row in rows]
        self._masks: dict[tuple, torch.Tensor | None] = {}

    def mask(self, layer: int, visible, groups: int, device) -> torch.Tensor | None:
        """Which keys each query sees, ``(rows, 1, groups · tokens, keys)``; None if all. Made once for layers alike."""
        firsts = tuple(past.first_of(layer) for past, _ in self.pasts)
        kind = (visible, groups, firsts)
        if kind not in self._masks:
            queries = torch.tensor(self._positions, device=device)[:, :, None]  # (rows, tokens, 1)
            first = torch.tensor(firsts, device=device)[:, None, None]  # (rows, 1, 1)
            last = queries[:, -1:]
            num_keys = int((last - first).max()) + 1
            keys = first + torch.arange(num_keys, device=device)  # (rows, 1, keys)
            zero = 0 * first[:1]  # batch and head, of which transformers' masks take the numbers
            mask = visible(zero, zero, queries, keys) & (keys <= last)  # behind the last key is padding
            mask = mask.expand(-1, self.shape[1], -1)
            self._masks[kind] = None if mask.all() else mask.repeat(1, groups, 1)[:, None]
        return self._masks[kind]


_runs: ContextVar[list[Run]] = ContextVar("runs of the step")


@contextlib.contextmanager
def packed(model, rows: list[Row]) -> Iterator[None]:
    """Within it, ``model(input_ids)`` of shape ``(1, tokens)`` reads these requests."""
    runs = [Run([*run]) for _, run in itertools.groupby(rows, _alike)]
    config = model.config.get_text_config()  # of images and sounds, the rest stays as it is
    before = config._attn_implementation
    token = _runs.set(runs)
    config._attn_implementation = NAME  # set_attn_implementation would look through all modules, in every step
    try:
        yield
    finally:
        config._attn_implementation = before
        _runs.reset(token)


def _alike(row: Row) -> tuple[int, KeyValues | None]:
    """The key that neighbours of one run share: as many tokens; and a long request has a run of its own."""
    own = row.past if row.positions.stop > LONG else None
    return len(row.positions), own


def read(model, ids: list[int], rows: list[Row], ends: list[int]) -> torch.Tensor:
    """Read a step's ids, row after row: the logits ``(ends, vocab)`` after those at these places."""
    device = model.device
    last = torch.tensor(ends, dtype=torch.long, device=device)
    positions = [*itertools.chain.from_iterable(row.positions for row in rows)]
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": last} if keeps else {}
    with packed(model, rows):
        logits = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),  # or it would look for texts
            use_cache=False,
            **options,
        ).logits[0]
    return logits if keeps else logits[last]


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **others):
    """One layer's attention over ``(1, heads, tokens, head_dim)``, run by run."""
    for name in ("s_aux", "position_bias", "indices"):
        if others.get(name) is not None:
            raise TypeError(f"its attention takes {name}, which is not known here")
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])  # (tokens, heads, head_dim)
    kv_heads = key.shape[1]
    groups = query.shape[1] // kv_heads  # query heads that share a key head
    new = torch.cat((key, value), -1)[0].transpose(0, 1)  # (tokens, kv_heads, key_dim + value_dim)
    for run in _runs.get():
        parts = zip(run.pasts, new[run.rows].split(run.shape[1]), strict=True)
        pasts = [past.write(module.layer_idx, start, part) for (past, start), part in parts]
        # (rows, keys, kv_heads, …): one past alone is read where it is
        pasts = pad_sequence(pasts, batch_first=True) if len(pasts) > 1 else pasts[0][None]
        keys, values = pasts.transpose(1, 2).split((key.shape[-1], value.shape[-1]), -1)
        # The queries that share a key head stand one below the other: (rows, kv_heads, groups · tokens, head_dim)
        queries = query[0, :, run.rows].unflatten(1, run.shape).unflatten(0, (kv_heads, groups))
        queries = queries.permute(2, 0, 1, 3, 4).flatten(2, 3)
        mask = run.mask(module.layer_idx, attention_mask, groups, query.device)
        if softcap is None:
            heads = scaled_dot_product_attention(queries, keys, values, mask, scale=scaling)
        else:
            scores = softcap * torch.tanh(queries @ keys.mT * scaling / softcap)
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            heads = scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
        heads = heads.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4)  # (rows, tokens, kv_heads, groups, head_dim)
        output[run.rows] = heads.flatten(2, 3).flatten(0, 1)
    return output[None], None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *, mask_function, **_: mask_function)
