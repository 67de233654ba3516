"""Another library's methods as scorers: the presses of kvpress, tried before the first chunk is read."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from plpkg.learning import evaluating
from plpkg.retention.scorers import Scorer
from plpkg.retention.watch import Units, Watch, watching


class _Enough(Exception):  # noqa: N818 - no error
    """Stops a forward pass at the layer that was to be seen."""


class _Asked:
    """A rotation that notes from which position on it was asked for."""

    def __init__(self, rotary: object) -> None:
        self.rotary, self.first = rotary, []

    def __call__(self, states: torch.Tensor, position_ids: torch.Tensor, *args, **kwargs):
        self.first.append(int(position_ids.min()))
        return self.rotary(states, position_ids, *args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self.rotary, name)


def _first_layer(model: nn.Module, ids: torch.Tensor, before: int) -> Units:
    """The units that tokens ``ids[:, before:]`` make, after the others, in the first layer that can evict."""
    cache = DynamicCache(config=model.config)
    wanted, seen = next(i for i, layer in enumerate(cache.layers) if type(layer) is DynamicLayer), []

    def show(units: Units) -> None:
        if units.layer == wanted:
            seen.append(units)
            raise _Enough

    watch = Watch(show)
    for start, stop in ((0, before), (before, ids.shape[-1])):
        if start == stop:
            continue
        watch.ids, watch.positions = ids[:, start:stop], torch.arange(start, stop, device=ids.device)
        with watching(model, watch, cache), suppress(_Enough):
            model(input_ids=watch.ids, past_key_values=cache, use_cache=True)
    return seen[-1]


@contextmanager
def _as_it_was(rotary: object) -> Iterator[None]:
    """Give a rotation that changes with the length its frequencies back, and torch its random state."""
    states = [] if rotary is None else [(held, dict(held)) for held in (rotary.__dict__, rotary._buffers)]
    try:
        with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        for held, state in states:
            held.update(state)
            for name in held.keys() - state:
                del held[name]


def _alike(scores: torch.Tensor, others: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether scores differ by no more than rounding in ``dtype`` does."""
    share = max(1e-4, 16 * torch.finfo(dtype).eps)
    scale = min(scores.abs().median(), others.abs().median())
    return torch.allclose(scores, others, rtol=share, atol=share * scale.item())


@dataclass
class Press(Scorer):
    """Scores of another library's method, which judges all units anew at each chunk: see :func:`from_press`.

    Before the first chunk, copies of the press are tried on what the model's first evicting layer makes of the prompt's
    first tokens. Their scores must be finite and of the right shape for each size of chunk, and other values of
    ``compression_ratio`` must not change them. If there are several chunks, the press must also be the same method in
    each, which is this contract: **the units that a cut sees get the scores that they would get as a prompt read
    whole.** Keys and values are the same in both cases; of the hidden states, the attention and the positions a chunk
    has only its own tokens' share. So a press is taken if it judges by keys and values, or by the queries of the last
    tokens alone, and places them where they stand. What needs more than a chunk has is refused: the votes of all
    queries, positions counted by the chunk's length. So are scores that belong to no unit, as random ones: two texts
    that change places in a batch must take their scores along. So are scores that go by what the press saw before. The
    shortest chunk is tried, which has least.

    A prompt that is read in one chunk needs the first part only. A decoding step is a chunk of one token: what is not
    the same in it decodes outside ``evicting()``, and is refused within.

    The contract is about one cut. That earlier cuts have taken units which the press would like now is true of every
    method here that judges by attention.

    Recency: what its scores say.

    Attributes
    ----------
    press
        The method.
    attentions
        Whether it is given the new units' attention ``(batch, num_heads, n, kept + n)``.
    """

    press: object
    attentions: bool = False
    _rotary = _no_decoding = None
    _prompt = 0

    @property
    def _name(self) -> str:
        return type(self.press).__name__

    def check(self, model: nn.Module) -> None:
        try:
            if hasattr(self.press, "post_init_from_model"):
                self.press.post_init_from_model(model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # it may want anything: a file for this very model, say
            raise ValueError(f"{self._name} cannot be made ready for {type(model).__name__}: {_said(error)}") from error
        self._rotary = getattr(model.get_decoder(), "rotary_emb", None)

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        self.press = self._copy()  # what it keeps of one prompt is not for another

    def check_chunks(self, model: nn.Module, ids: torch.Tensor, budget: int, sizes: list[tuple[int, int]]) -> None:
        rows = torch.stack([ids[0], ids[0].flip(0)])  # two texts: scores that belong to no unit stay when they swap
        chosen = {}
        for n, width in sizes:  # of each size of chunk, the one that sees the fewest units and the one with the most
            chosen[n] = min(width, *chosen.get(n, (width,))), max(width, *chosen.get(n, (width,)))
        with _as_it_was(self._rotary), evaluating(model):
            for n, widths in chosen.items():
                for width in dict.fromkeys(widths):
                    self._tried(_first_layer(model, ids[:, :width], width - n))
            n, width = max(sizes, key=lambda size: size[1])
            self._require_no_ratio(_first_layer(model, ids[:, :width], width - n))
            if len(sizes) > 1:
                self._require_same(model, rows, *min(sizes[1:]))
            self._prompt, self._no_decoding = ids.shape[-1], None
            try:
                width = min(ids.shape[-1], budget)
                self._tried(_first_layer(model, ids[:, :width], width - 1))
                self._require_same(model, rows, 1, width)
            except ValueError as error:
                self._no_decoding = str(error)

    def update(self, units: Units, stored: torch.Tensor | None) -> torch.Tensor:
        if self._no_decoding and int(units.positions[0]) >= self._prompt:
            raise ValueError(f"decoding within evicting() is not possible with this press: {self._no_decoding}")
        return self._scores(self.press, units, self._attention(units), self._rotary)

    def _attention(self, units: Units) -> torch.Tensor | None:
        """What eager attention returns: ``(batch, num_heads, n, kept + n)``."""
        if not self.attentions:
            return None
        return torch.cat(list(units.probabilities()), dim=3).flatten(1, 2).to(units.query.dtype)

    def _scores(
        self, press: object, units: Units, attention: torch.Tensor | None, rotary: object | None
    ) -> torch.Tensor:
        """What the press says ``(batch, num_kv_heads, kept + n)``, or a ValueError that says why not."""
        module, shape = units.module, units.keys.shape[:3]
        lent = rotary is not None and not hasattr(module, "rotary_emb")
        if lent:
            module.__dict__["rotary_emb"] = rotary  # presses look for it there; it is no part of the module
        where = f"a chunk of {len(units.positions)} tokens that sees {shape[2]} units"
        try:
            hidden = units.inputs["hidden_states"]
            scores = press.score(module, hidden, units.keys, units.values, attention, units.inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of another library: whatever it raises, this read cannot go on with it
            raise ValueError(f"{self._name} does not score {where}: {_said(error)}") from error
        finally:
            if lent:
                del module.__dict__["rotary_emb"]
        if getattr(scores, "shape", None) != shape:
            raise ValueError(
                f"{self._name} must score (batch, num_kv_heads, kept + n) = {tuple(shape)} units, got "
                f"{tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__}"
            )
        if bad := int((~scores.isfinite()).sum()):
            raise ValueError(f"{self._name} gives {bad} of {scores.numel()} scores that are not finite for {where}")
        return scores.float()

    def _tried(
        self,
        units: Units,
        attention: torch.Tensor | None = None,
        rotary: object | None = None,
        ratio: float | None = None,
        times: int = 1,
    ) -> torch.Tensor:
        """The scores of a copy of the press that is asked so often: it may keep what it saw, and draw from torch's."""
        press = self._copy()
        if ratio is not None:
            for each in (press, *getattr(press, "__dict__", {}).values()):  # what it wraps may have one of its own
                if hasattr(each, "compression_ratio"):
                    each.compression_ratio = ratio
        attention = self._attention(units) if attention is None else attention
        for _ in range(times):
            torch.manual_seed(0)
            scores = self._scores(press, units, attention, self._rotary if rotary is None else rotary)
        return scores

    def _copy(self) -> object:
        held = {id(value): value for value in getattr(self.press, "__dict__", {}).values()}
        modules = {key: value for key, value in held.items() if isinstance(value, nn.Module)}  # large, and only read
        return copy.deepcopy(self.press, modules)

    def _require_no_ratio(self, units: Units) -> None:
        scores = self._tried(units)
        if not torch.equal(scores, self._tried(units)):
            raise ValueError(
                f"{self._name} gives other scores when it is asked the same again: it changes keys or values, or draws "
                "numbers that are not torch's"
            )
        if not all(torch.equal(scores, self._tried(units, ratio=ratio)) for ratio in (0.0, 0.9)):
            raise ValueError(
                f"{self._name} reads compression_ratio for its scores, which would decide in place of the budget"
            )

    def _require_same(self, model: nn.Module, rows: torch.Tensor, n: int, width: int) -> None:
        """ValueError unless the press scores a chunk of ``n`` tokens as a prompt that is read whole."""
        before = min(width - n, max(n, 64))  # units that it sees beside the chunk: as few as show the difference
        width = before + n
        whole, chunk = (_first_layer(model, rows[:, :width], first) for first in (0, before))
        hidden = whole.inputs["hidden_states"]
        paid = self._attention(whole)

        def scores(
            units: Units, hidden: torch.Tensor, attention: torch.Tensor | None, order: slice | list = slice(None)
        ):
            asked = None if self._rotary is None else _Asked(self._rotary)
            units = replace(
                units,
                keys=whole.keys[order],
                values=whole.values[order],
                inputs=units.inputs | {"hidden_states": hidden[order]},
            )
            attention = None if attention is None else attention[order]
            return self._tried(units, attention, asked), asked and asked.first

        expected, placed = scores(whole, hidden, paid)
        swapped, _ = scores(whole, hidden, paid, [1, 0])
        if not _alike(swapped, expected.flip(0), hidden.dtype):
            raise ValueError(
                f"{self._name} gives scores that do not follow their units, as random ones: at each cut what has "
                "stayed would be judged by others. Read the prompt in one chunk"
            )
        if not _alike(self._tried(whole, paid, times=2), expected, hidden.dtype):
            raise ValueError(
                f"{self._name} gives other scores once it has given some: it keeps what it saw, of other layers and "
                "chunks. Read the prompt in one chunk"
            )
        got, chunk_placed = scores(chunk, hidden[:, before:], None if paid is None else paid[:, :, before:])
        if _alike(got, expected, hidden.dtype):
            return
        if placed and chunk_placed and placed != chunk_placed:
            why = (
                f"it places queries by the chunk's length, from position {chunk_placed[0]} on for {n} tokens that "
                f"follow {before} others, and from {placed[0]} on for all of them read whole"
            )
        else:
            lighter = torch.ones_like(hidden[:1, :, :1])
            lighter[:, :before] = 0.5  # what the tokens before the chunk ask counts less
            less, _ = scores(whole, hidden * lighter, None if paid is None else paid * lighter[:, None])
            why = f"{n} tokens that follow {before} others give other scores than all of them read whole, " + (
                "though by the same queries: it goes by the chunk's length"
                if _alike(less, expected, hidden.dtype)
                else "where the queries before the chunk count as well"
            )
        raise ValueError(f"{self._name} is another method chunk by chunk: {why}. Read the prompt in one chunk")


def _said(error: Exception) -> str:
    """An error's first line, with its kind where the line says little."""
    line, kind = (str(error).splitlines() or [""])[0].strip(), type(error).__name__
    if isinstance(error, AssertionError | ValueError) and line:
        return line
    return f"{kind}: {line}" if line else kind


def _owner(kind: type, name: str) -> int:
    """How far up its bases a class finds a method."""
    return next((i for i, base in enumerate(kind.__mro__) if name in vars(base)), len(kind.__mro__))


def from_press(press: object, *, attentions: bool = False, **protection: int) -> Press:
    """A press of kvpress (https://github.com/NVIDIA/kvpress) as a scorer: its scores, under this room's budget.

    kvpress reads a prompt whole and cuts once; here its method runs chunk by chunk, beside what is kept. Nothing of it
    is imported: any object with its ``score`` will do. :class:`Press` says which methods are the same in chunks, and
    ``chunked_prefill`` refuses the others before it reads the first one. ``data/measured/retention_presses.csv`` has
    what became of each press of kvpress.

    Parameters
    ----------
    press
        Has ``score(module, hidden_states, keys, values, attentions, kwargs)``, which returns
        ``(batch, num_kv_heads, kept + n)``; ``hidden_states`` ``(batch, n, hidden)`` are the chunk's, keys and values
        those of all units that it sees, rotated.
    attentions
        Whether the press needs attention weights, as kvpress gives them with eager attention.
    **protection
        ``sink`` and ``recent``, as for every scorer.

    Raises
    ------
    ValueError
        No such method, as for a press that wraps another or evicts without scores; or a ``compress`` of its own beside
        the scores of a base class.
    """
    name = type(press).__name__
    if not callable(getattr(press, "score", None)):
        inner = [type(each).__name__ for each in getattr(press, "__dict__", {}).values() if hasattr(each, "score")]
        raise ValueError(
            f"a press must have score(module, hidden_states, keys, values, attentions, kwargs), which {name} has not: "
            + (f"it wraps {inner[0]} and evicts by rules of its own" if inner else "it cannot choose under a budget")
        )
    if _owner(type(press), "compress") < _owner(type(press), "score"):
        raise ValueError(
            f"{name} has its scores from a base class and evicts by a compress of its own: the scores alone are not "
            "its method"
        )
    return Press(press, attentions, **protection)
