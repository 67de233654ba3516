"""A KV cache that keeps some units of each layer and KV head and forgets the others, on transformers' ``Cache``.

After a cut, where do the kept units stand? There are two consistent answers, two classes, and no way to mix them:

* :class:`OriginalPositions`: where they stood. The cache says how many tokens it has seen, and new tokens are
  numbered from there. The gaps stay.
* :class:`ReassignedPositions`: side by side, from 0 on (Locret, StreamingLLM). The cache says how many units it
  holds, keeps keys as they are before rotary positions, and rotates them when they are read.

Every layer and KV head may keep other units, but as many of them: one mask serves all. Where a model changes its
frequencies with the length (LongRoPE, dynamic NTK), chunks differ from the whole with transformers' own cache, too.

In half precision ``ReassignedPositions`` keeps what was projected, where a prefill shows it, and rounds keys once at
each reading; elsewhere (a norm between projection and rotation, tokens that nobody watches) it undoes the rotation.

A bounded cache offers those who do not know how it is bounded: transformers' ``Cache`` (``update``, ``get_seq_length``,
the position of the next token, ``get_mask_sizes``, rows that are repeated), ``kept`` and ``seen``, and
:meth:`~EvictingCache.mark` and :meth:`~EvictingCache.rewind`, between which it is lent.

Left out: beams, guessed tokens, linear-attention layers.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from plpkg.retention.cache.rotary import Rotary, rotating
from plpkg.retention.cache.store import UnitStore, under
from plpkg.validation import one_of

EXACT = (torch.float32, torch.float64)
"""Precisions in which a rotation there and back loses nothing that counts."""

NOTHING = torch.empty(0, 0, 0, dtype=torch.int32)
"""The positions of a layer that has seen no token."""

NOTHING_BACK = "this cache takes no tokens back"
"""The beginning of every refusal to take tokens back."""


class EvictingLayer(CacheLayerMixin):
    """One layer of the cache. Subclasses say what positions the kept units have.

    Attributes
    ----------
    store
        Keys and values.
    seen
        Tokens that were ever added.
    positions
        ``(batch, num_kv_heads, kept)`` original positions of what is kept, int32.
    scores
        ``(batch, num_kv_heads, kept)``, float32, once something was scored.
    """

    is_sliding = False

    def __init__(self, make_store: Callable[[], UnitStore] = UnitStore) -> None:
        super().__init__()
        self._make_store = make_store
        self.store = make_store()
        self.seen = 0
        self.positions = NOTHING
        self.scores: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads = key_states.shape[:2]
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.positions = torch.empty(batch, heads, 0, dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Add new units (keys rotated) and return all, rotated: ``(batch, num_kv_heads, kept + n, head_dim)``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, heads, n, _ = key_states.shape
        if batch != len(self.positions):
            raise ValueError(
                f"this cache is for a batch of {len(self.positions)}, got {batch} sequences: there are no "
                "beams, and for several answers to one question ask it in several rows"
            )
        new = torch.arange(self.seen, self.seen + n, dtype=torch.int32, device=self.device)
        self.positions = torch.cat([self.positions, new.expand(batch, heads, n)], dim=-1)
        self.seen += n
        return self._update(key_states, value_states)

    def _update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, as attention takes them."""
        return self.store.read()

    def keep(self, indices: torch.Tensor) -> None:
        """Forget all units but some of each head.

        Parameters
        ----------
        indices
            ``(batch, num_kv_heads, kept)``, rising: the order of time stays.
        """
        if indices.shape[-1] == len(self.store):
            return
        self.store.keep(indices)
        self.positions = self.positions.gather(-1, indices)
        if self.scores is not None:
            self.scores = self.scores.gather(-1, indices)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.store = self._make_store()
        self.seen = 0
        self.positions = NOTHING
        self.scores = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(f"{NOTHING_BACK}: crop({tokens_to_remove}) is not possible")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def mark(self) -> tuple:
        """The state that :meth:`rewind` needs to forget the units that come after now, if none is evicted till then."""
        return self.seen, self.positions.shape, self.store.mark()

    def rewind(self, mark: tuple) -> None:
        """Forget what came after ``mark``, the copies as well if the batch was repeated since."""
        self.seen, (batch, _, kept), in_store = mark
        repeats = len(self.positions) // batch
        self.store.rewind(in_store, repeats)
        self.positions = self.positions[::repeats, :, :kept].clone()
        if self.scores is not None:
            self.scores = self.scores[::repeats, :, :kept].clone()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it holds, by name."""
        held = {"positions": self.positions}
        if self.scores is not None:
            held["scores"] = self.scores
        return held | {f"store.{name}": tensor for name, tensor in self.store.tensors().items()}

    def restore(self, tensors: dict[str, torch.Tensor], seen: int) -> None:
        """Hold what :meth:`tensors` gave, of ``seen`` tokens."""
        self.store.restore(under("store.", tensors))
        self.lazy_initialization(*self.store.read())
        self.positions = tensors["positions"]
        self.scores = tensors.get("scores")
        self.seen = seen

    def _change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.is_initialized:
            return
        self.store.change(function)
        self.positions = function(self.positions)
        if self.scores is not None:
            self.scores = function(self.scores)


class OriginalPositions(EvictingLayer):
    """Kept units stay where they stood in the sequence; ``store`` has their keys rotated."""

    def _update(self, keys, values):
        self.store.append(keys, values)
        return self.read()

    def get_seq_length(self) -> int:
        """Tokens seen: the position of the next one."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The causal mask's width, and how far its columns stand from 0."""
        kept = len(self.store)
        return kept + query_length, self.seen - kept


class ReassignedPositions(EvictingLayer):
    """Kept units close ranks, from position 0 on; ``store`` has their keys before rotation.

    Between cuts no unit moves. :meth:`rotate` lets ``store`` have the keys rotated until the next one, so that a token
    does not rotate all of them.

    Attributes
    ----------
    rotary
        The model's rotation; ``None`` in a layer that has no positions.
    projected
        Gives the keys ``(batch, num_kv_heads, n, head_dim)`` that the layer projects now, while somebody watches.
    """

    def __init__(self, rotary: Rotary | None, make_store: Callable[[], UnitStore] = UnitStore) -> None:
        super().__init__(make_store)
        self.rotary = rotary
        self.projected: Callable[[], torch.Tensor] | None = None
        self._projects: bool | None = None
        self._rotated = False

    def _before_rotation(self, keys: torch.Tensor) -> torch.Tensor:
        """The projection's own output, if rotating it gives these very keys, or else the keys turned back."""
        if self.rotary is None:
            return keys
        start = len(self.store)
        loses_digits = keys.dtype not in EXACT and not isinstance(keys, FakeTensor)  # if the keys are turned back
        if loses_digits and self.projected is not None:
            raw = self.projected()
            if self._projects is None:  # it holds for all chunks or for none
                self._projects = raw.shape == keys.shape and torch.equal(self.rotary.apply(raw, start), keys)
            if self._projects:
                return raw.contiguous()  # a view would hold the whole projection
        return self.rotary.undo(keys, start)

    def _update(self, keys, values):
        if self._rotated and self.projected is None:
            self.store.append(keys, values)
            return self.store.read()
        self._turn_back()
        self.store.append(self._before_rotation(keys), values)
        return self.read()

    def rotate(self) -> None:
        """Rotate the keys once, until the next cut turns them back.

        Not in half precision, where turning them back would lose digits, and not if they are packed.
        """
        if self._rotated or self.rotary is None or not self.rotary.steady:
            return
        if type(self.store) is UnitStore and self.dtype in EXACT:
            self.store.keys = self.rotary.apply(self.store.keys)
            self._rotated = True

    def _turn_back(self) -> None:
        if self._rotated and self.rotary is not None:
            self.store.keys = self.rotary.undo(self.store.keys)
            self._rotated = False

    def read(self):
        keys, values = self.store.read()
        if self.rotary is None or self._rotated:
            return keys, values
        return self.rotary.apply(keys), values

    def keep(self, indices: torch.Tensor) -> None:
        self._turn_back()
        super().keep(indices)

    def tensors(self) -> dict[str, torch.Tensor]:
        held = super().tensors()
        if self._rotated:
            held["rotated"] = torch.tensor(True)
        return held

    def restore(self, tensors: dict[str, torch.Tensor], seen: int) -> None:
        super().restore(tensors, seen)
        self._rotated = "rotated" in tensors

    def reset(self) -> None:
        super().reset()
        self._rotated = False

    def get_seq_length(self) -> int:
        """Units held: the position of the next one."""
        return len(self.store)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The causal mask's width, and how far its columns stand from 0."""
        return len(self.store) + query_length, 0


def bounded(layer: object, config: PreTrainedConfig) -> TypeGuard[DynamicSlidingWindowLayer]:
    """Whether a layer of transformers' cache has a sliding window that a text can be longer than.

    Phi-3-mini-128k's is twice as long as the model can read: it bounds nothing.
    """
    longest_text = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return type(layer) is DynamicSlidingWindowLayer and layer.sliding_window < longest_text


def _tokens_seen(layer: Any) -> int:
    """The tokens that were ever added to a layer: an evicting one, or transformers' own with a sliding window."""
    return layer.seen if isinstance(layer, EvictingLayer) else layer.cumulative_length


class EvictingCache(Cache):
    """A cache for one model whose layers evict. Layers with a sliding window keep transformers' own bounded cache.

    Parameters
    ----------
    model
        The causal language model that it serves.
    positions
        ``"reassigned"``, as Locret and StreamingLLM have it, or ``"original"``: all layers are of the class of that
        name.
    store
        Makes each layer's store.

    Attributes
    ----------
    evicting
        The layers that evict, by number.
    beside
        Other tensors that belong to the batch's rows, first dimension the batch: they are repeated with them.

    Raises
    ------
    ValueError
        The model's kinds of layers or of positions do not go with this.
    """

    layers: list[Any]  # evicting ones, and transformers' own, which it declares to have keys perhaps

    def __init__(self, model: Any, positions: str = "reassigned", store: Callable[[], UnitStore] = UnitStore) -> None:
        one_of("positions", positions, ("reassigned", "original"))
        self.contract = positions
        name = type(model).__name__
        plain = DynamicCache(config=model.config).layers
        windows = {i: layer for i, layer in enumerate(plain) if bounded(layer, model.config)}
        for i, layer in enumerate(plain):
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(f"layer {i} of {name} has a {type(layer).__name__}, which cannot evict")
        if len(windows) == len(plain):
            raise ValueError(f"every layer of {name} has a sliding window: its cache is bounded already")
        layers: list[Any]
        if positions == "original":
            layers = [layer if i in windows else OriginalPositions(store) for i, layer in enumerate(plain)]
        else:
            rotary = Rotary(model)
            if windows:
                i, layer = next(iter(windows.items()))
                raise ValueError(
                    f"layer {i} of {name} has a sliding window of {layer.sliding_window} tokens, which needs the "
                    "original distances: take positions='original', and the other layers will evict"
                )
            layers = [ReassignedPositions(rotary if turns else None, store) for turns in rotating(model, rotary)]
        super().__init__(layers=layers)
        self.evicting = {i: layer for i, layer in enumerate(layers) if isinstance(layer, EvictingLayer)}
        self.beside: dict[str, torch.Tensor] = {}
        self._expected: int | None = None  # the length that `generate` may go on from

    @property
    def num_bytes(self) -> int:
        """The bytes of the evicting layers' keys and values."""
        return sum(layer.store.num_bytes for layer in self.evicting.values())

    @property
    def kept(self) -> int:
        """Units that each head of each evicting layer holds."""
        return len(next(iter(self.evicting.values())).store)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.beside = {name: tensor.repeat_interleave(repeats, dim=0) for name, tensor in self.beside.items()}

    def activate_past_recording(self) -> None:
        """Refuse: ``generate`` calls this before it guesses tokens, which it takes back where they are wrong."""
        raise ValueError(
            f"{NOTHING_BACK}: generate without prompt_lookup_num_tokens, an assistant_model or other guesses"
        )

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.evicting.values():
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise ValueError("this cache has no beams: its rows stay as they are")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def reset(self) -> None:
        super().reset()
        self.beside = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it holds: ``layer.name`` → tensor."""
        held = {}
        for i, layer in enumerate(self.layers):
            evicts = isinstance(layer, EvictingLayer)
            own = layer.tensors() if evicts else {"keys": layer.keys, "values": layer.values}
            held |= {f"{i}.{name}": tensor for name, tensor in own.items()}
        return held

    def restore(self, tensors: dict[str, torch.Tensor], seen: int) -> None:
        """Hold what :meth:`tensors` gave, of ``seen`` tokens."""
        for i, layer in enumerate(self.layers):
            own = under(f"{i}.", tensors)
            if isinstance(layer, EvictingLayer):
                layer.restore(own, seen)
            else:
                layer.lazy_initialization(own["keys"], own["values"])
                layer.keys = own["keys"]
                layer.values = own["values"]
                layer.cumulative_length = seen

    def settle(self) -> None:
        """Rotate what waits unrotated, once: tokens will come, and no cut for a while."""
        for layer in self.layers:
            if isinstance(layer, ReassignedPositions):
                layer.rotate()

    @property
    def seen(self) -> int:
        """Tokens that were read; ValueError if a forward pass broke off between two layers, of which one has more."""
        counts = {_tokens_seen(layer) for layer in self.layers}
        if len(counts) > 1:
            raise ValueError(
                f"a forward pass broke off: some layers of this cache have {min(counts)} tokens and others "
                f"{max(counts)}. Read the prompt again"
            )
        return counts.pop()

    def mark(self) -> tuple[list[tuple], dict[str, torch.Tensor]]:
        """The state that :meth:`rewind` needs to forget the units that come after now, if none is evicted till then."""
        layers = []
        for layer in self.layers:
            if isinstance(layer, EvictingLayer):
                layers.append(layer.mark())
            else:  # a sliding window has new tensors after each token: these stay as they are
                layers.append((layer.keys, layer.values, layer.cumulative_length))
        return layers, self.beside

    def rewind(self, mark: tuple[list[tuple], dict[str, torch.Tensor]]) -> None:
        """Forget what came after ``mark``, also if the batch was repeated since."""
        layers, self.beside = mark
        for layer, state in zip(self.layers, layers, strict=True):
            if isinstance(layer, EvictingLayer):
                layer.rewind(state)
            else:
                layer.keys, layer.values, layer.cumulative_length = state
        self._expected = None

    def expect_generate(self) -> None:
        """Let ``generate`` go on from here, once: what it is given was made for this length."""
        seen = self.seen  # which checks that all layers agree
        self._expected = self.get_seq_length() if seen else 0

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        """transformers sets this where ``generate`` begins: unchecked, it would skip as many ids as are kept."""
        expected = self._expected
        self._expected = None
        length = self.get_seq_length()
        if length and expected != length:
            raise ValueError(
                f"this cache holds {self.kept} units of the tokens that were read, and generate cannot know which: it "
                "would read some twice, or none. Take model.generate(**read.inputs(new_ids)), anew for each call, or "
                "read.ask(model, new_ids)"
            )
