"""What a unit is worth: the two protocols, and the methods that Locret is compared with.

A :class:`CausalScorer` judges a unit once, when it enters the cache, from what is known then; the score is stored.
Then keeping the best of each chunk is keeping the best of all, whatever the chunks (theorem N.4 of Locret's paper).
An :class:`AttentionScorer` judges all units anew by the attention that later queries pay them. That works for a
prompt that is read whole; under chunked prefill the queries that matter come after the cut.

Every scorer can protect the first units of the sequence (``sink``) and the last ones before each cut. How many last
ones is a part of each published method, its recency rule, and on text it decides more than the scores do: a number as
``recent`` sets one rule for all of them.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from plpkg.retention.head import RetainingHeads
from plpkg.retention.watch import Units, Watch, evaluating, watching
from plpkg.validation import number, whole_number


@dataclass
class Scorer:
    """What both protocols share.

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

    def check_chunks(self, model: nn.Module, ids: torch.Tensor, budget: int, sizes: list[tuple[int, int]]) -> None:
        """Raise a ``ValueError`` if this scorer cannot judge every forward pass to come.

        Called on the copy that :meth:`started` gives, before the first chunk of ``ids`` ``(batch, seq)``. ``sizes``
        are the forward passes: how many tokens, and how many units a head holds with them.
        """

    def recency(self, budget: int) -> int:
        """The method's own rule: how many of the latest units it protects. None, if it does not say."""
        return 0

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        """Called on a copy of the scorer before the first chunk of a sequence ``(batch, seq)``."""

    def started(self, ids: torch.Tensor, budget: int) -> "Scorer":
        """A copy for one sequence, with its recency rule applied: what it learns of this prompt is not the caller's."""
        scorer = copy.copy(self)
        scorer.begin(ids, budget)
        if scorer.recent is None:
            scorer.recent = scorer.recency(budget)
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
        batch, kv_heads, width = units.keys.shape[:3]
        old = units.keys.new_zeros(batch, kv_heads, 0, dtype=torch.float32) if stored is None else stored
        return self.rescore(units, functional.pad(old, (0, width - old.shape[-1])))


_CHECKED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The backbone's fingerprint by model: it reads every tensor, so it is compared once, not for every prompt."""


@dataclass
class Locret(CausalScorer):
    """What trained retaining heads predict: the causal importance score (CIS) of arXiv 2410.01805.

    Recency: none of its own; the prefill's stabilizers and local tail are the publication's.
    """

    heads: RetainingHeads

    def check(self, model: nn.Module) -> None:
        dtype = self.heads.layers[0][0].weight.dtype
        if dtype != model.dtype:
            raise ValueError(
                f"these heads are in {dtype}, {type(model).__name__} in {model.dtype}: take heads.to(model.dtype)"
            )
        if _CHECKED.get(model) != self.heads.config.backbone:
            self.heads.check(model)
            _CHECKED[model] = self.heads.config.backbone

    def score(self, units: Units) -> torch.Tensor:
        return self.heads.score(units.layer, units.projected)


@dataclass
class Static(CausalScorer):
    """Scores that are given: ``(layers, batch, num_kv_heads, seq)``. An oracle, if they are the labels.

    Recency: none.
    """

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
    """A random number for each unit and head. Recency: none."""

    seed: int = 0

    def begin(self, ids: torch.Tensor, budget: int) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def score(self, units: Units) -> torch.Tensor:
        batch, kv_heads = units.keys.shape[:2]
        drawn = torch.rand(batch, kv_heads, len(units.positions), generator=self._generator, device="cpu")
        return drawn.to(units.keys.device)


@dataclass
class SinkRecent(CausalScorer):
    """The first four units and the latest: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).

    Recency: all that the sink leaves.
    """

    sink: int = field(default=4, kw_only=True)

    def recency(self, budget: int) -> int:
        return 0  # its scores are the rule, which leave room for stabilizers and spans

    def score(self, units: Units) -> torch.Tensor:
        return units.positions[None, None]


@dataclass
class KeyNorm(CausalScorer):
    """Short keys stay: attention likes them (Devoto et al. 2024, arXiv 2406.11430). Recency: none."""

    def score(self, units: Units) -> torch.Tensor:
        return -units.keys[..., -len(units.positions) :, :].float().norm(dim=-1)


@dataclass
class SirLlm(CausalScorer):
    """Surprising tokens stay, the same in every layer and head: SirLLM (Yao et al. 2024, arXiv 2405.12528).

    Recency: the last 1,000 units, as its code has it (``recent_size``), and no more than half of what the sink leaves.
    """

    sink: int = field(default=4, kw_only=True)
    needs_logits = True

    def recency(self, budget: int) -> int:
        return min(1000, max(0, budget - self.sink) // 2)

    def score(self, units: Units) -> torch.Tensor:
        return units.surprisal[:, None]


@dataclass
class H2O(AttentionScorer):
    """The sum of all attention that a unit ever got: heavy hitters (Zhang et al. 2023, arXiv 2306.14048).

    Recency: half of what the sink leaves, as published.

    Attributes
    ----------
    recent_share
        The share of the budget that is for the latest units, where ``recent`` does not say how many.
    """

    recent_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        number("recent_share", self.recent_share, 0, 1)

    def recency(self, budget: int) -> int:
        return int(self.recent_share * max(0, budget - self.sink))

    def rescore(self, units: Units, stored: torch.Tensor) -> torch.Tensor:
        return stored + sum(paid.sum(dim=(2, 3)) for paid in units.probabilities())


@dataclass
class SnapKv(AttentionScorer):
    """The attention of the latest queries, pooled over neighbours: SnapKV (Li et al. 2024, arXiv 2404.14469).

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
        first = max(0, len(units.positions) - self.window)
        paid = sum(part.sum(dim=3).mean(dim=2) for part in units.probabilities(first))
        prefix = paid.shape[-1] - (len(units.positions) - first)  # the window stands behind it
        if not prefix:
            return paid
        pooled = functional.avg_pool1d(paid[..., :prefix], self.kernel, stride=1, padding=self.kernel // 2)
        return torch.cat([pooled, paid[..., prefix:]], dim=-1)


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
        with watching(model, watch), suppress(_Enough):
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
    that change places in a batch must take their scores along. The shortest chunk is tried, which has least.

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
        rows = [logits.softmax(-1) for logits in units.logits()]
        return torch.cat(rows, dim=3).flatten(1, 2).to(units.query.dtype)

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
    ) -> torch.Tensor:
        """The scores of a copy of the press: it may keep what it saw, and draw from torch's generator."""
        held = {id(value): value for value in getattr(self.press, "__dict__", {}).values()}
        modules = {key: value for key, value in held.items() if isinstance(value, nn.Module)}  # large, and only read
        press = copy.deepcopy(self.press, modules)
        if ratio is not None:
            for each in (press, *getattr(press, "__dict__", {}).values()):  # what it wraps may have one of its own
                if hasattr(each, "compression_ratio"):
                    each.compression_ratio = ratio
        torch.manual_seed(0)
        attention = self._attention(units) if attention is None else attention
        return self._scores(press, units, attention, self._rotary if rotary is None else rotary)

    def _require_no_ratio(self, units: Units) -> None:
        scores = self._tried(units)
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
