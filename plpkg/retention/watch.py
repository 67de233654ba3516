"""A stock model's attention layers at work, shown to a scorer while the model runs.

Forward hooks on the query, key and value projections give the states before rotary positions; a wrapper around the
model's own attention function (registered with transformers under another name) gives those after, and what the
cache returned. The model's code, weights and results stay as they are.

Left out: attention that is not computed through transformers' interface (Falcon, BLOOM), and padded batches.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from plpkg.decoding import cache_among
from plpkg.retention.layers import Layer, attention_layers

KNOWN = ("s_aux", "attention_mask", "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k")
"""Tensor arguments of an attention function that are accounted for here; any other may change the attention."""

UNSET = torch.empty(0)
"""Stands for a tensor that nobody has set."""

LOGITS = 2**24
"""Attention logits in memory at a time: 64 MiB in float32."""


@dataclass
class Units:
    """The new cache units of one layer, and what the layer's attention made of them; what nobody has set is empty.

    Attributes
    ----------
    layer
        Its number.
    positions
        ``(n,)``, in the whole sequence.
    ids
        ``(batch, n)`` tokens.
    projected
        ``(batch, n, (num_heads + 2 · num_kv_heads) · head_dim)``: query, key and value before rotary positions.
    query
        ``(batch, num_heads, n, head_dim)``, rotated.
    keys, values
        ``(batch, num_kv_heads, kept + n, head_dim)``: what the new units attend to, themselves included, rotated.
    scaling, softcap, sinks
        Numbers that make the attention logits: ``softcap`` is Gemma-2's, ``sinks`` gpt-oss's, a logit ``(num_heads,)``
        of nobody that takes its part of the softmax; else ``None``.
    unknown
        Other tensors that the attention was given, by their names, or a mask that the layer has made.
    surprisal
        ``(batch, n)``, ``-log p`` of each token in nats, where a scorer asked for it.
    module
        The attention module.
    inputs
        Its arguments, by name: ``hidden_states`` ``(batch, n, hidden)``, ``position_embeddings`` and others.
    """

    layer: int
    positions: torch.Tensor = UNSET
    ids: torch.Tensor = UNSET
    projected: torch.Tensor = UNSET
    query: torch.Tensor = UNSET
    keys: torch.Tensor = UNSET
    values: torch.Tensor = UNSET
    scaling: float = 1.0
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    unknown: Sequence[str] = ()
    surprisal: torch.Tensor = UNSET
    module: nn.Module | None = None
    inputs: dict = field(default_factory=dict)

    def logits(self, first: int = 0) -> Iterator[torch.Tensor]:
        """Attention logits of the new units from ``first`` on, some rows at a time, never all at once.

        Yields
        ------
        torch.Tensor
            ``(batch, num_kv_heads, group, rows, kept + n)`` in float32: scaled, soft-capped where the model does, and
            minus infinity where causality forbids.
        """
        if self.unknown:
            raise ValueError(
                f"layer {self.layer} ({type(self.module).__name__}) gives its attention {', '.join(self.unknown)}, "
                "of which nobody here knows what they do to it: take a scorer that needs no attention"
            )
        batch, num_heads, n, _ = self.query.shape
        num_kv_heads, width = self.keys.shape[1:3]
        kept = width - n
        keys = self.keys.float()[:, :, None].transpose(-1, -2)  # (batch, num_kv_heads, 1, head_dim, kept + n)
        rows = max(1, LOGITS // (batch * num_heads * width))
        column = torch.arange(width, device=keys.device)
        for start in range(first, n, rows):
            query = self.query[:, :, start : start + rows].float()
            grouped = query.unflatten(1, (num_kv_heads, -1))  # (batch, num_kv_heads, group, rows, head_dim)
            logits = grouped @ keys * self.scaling
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            row = torch.arange(start, start + query.shape[2], device=keys.device)[:, None]
            later = column > kept + row  # the new unit of a row stands in column kept + row
            yield logits.masked_fill(later, float("-inf"))

    def probabilities(self, first: int = 0) -> Iterator[torch.Tensor]:
        """The softmax of :meth:`logits`, in the same shape, without a sink's part."""
        for logits in self.logits(first):
            if self.sinks is None:
                yield logits.softmax(-1)
            else:
                by_group = self.sinks.float().reshape(1, logits.shape[1], -1, 1, 1)  # (1, num_kv_heads, group, 1, 1)
                sinks = by_group.expand(*logits.shape[:-1], 1)
                yield torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]


@dataclass
class Watch:
    """The forward pass that runs while :func:`watching`, and whom its units are shown to.

    Attributes
    ----------
    show
        Called with each layer's :class:`Units`, before its attention is computed.
    positions, ids
        The tokens that run now, ``(n,)`` and ``(batch, n)``: the driver sets them before each forward pass.
    projected, inputs
        By layer, until its attention is computed: the outputs of its projections, and what the module was called with.
    """

    show: Callable[[Units], None]
    positions: torch.Tensor = UNSET
    ids: torch.Tensor = UNSET
    projected: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    inputs: dict[int, dict] = field(default_factory=dict)

    def keys_of(self, number: int, layer: Layer) -> torch.Tensor:
        """The keys that a layer has just projected: ``(batch, num_kv_heads, n, head_dim)``."""
        outputs = self.projected[number]
        if len(outputs) == 3:
            keys = outputs[1]
        else:  # of a fused projection, the columns behind the queries'
            first = layer.num_heads * layer.head_dim
            width = layer.num_kv_heads * layer.head_dim
            keys = outputs[0][..., first : first + width]
        return keys.unflatten(-1, (layer.num_kv_heads, layer.head_dim)).transpose(1, 2)

    def units(
        self,
        module: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict,
    ) -> Units:
        """The units of a module whose attention function has just been called with these arguments.

        Raises
        ------
        ValueError
            The module has called its attention function before in this forward pass.
        """
        layer = module.layer_idx
        if layer not in self.projected:
            raise ValueError(f"{type(module).__name__} calls its attention more than once: it cannot be watched")
        inputs = self.inputs.pop(layer)
        tensors = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
        unknown = [name for name in tensors if name not in KNOWN]
        if mask is not inputs.get("attention_mask", mask):
            unknown.append("a mask of its own")
        return Units(
            layer=layer,
            positions=self.positions,
            ids=self.ids,
            projected=torch.cat(self.projected.pop(layer), dim=-1),
            query=query,
            keys=keys,
            values=values,
            scaling=options.get("scaling") or query.shape[-1] ** -0.5,
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
            unknown=unknown,
            module=module,
            inputs=inputs,
        )

    def attended(self, units: Units, mask: torch.Tensor | None) -> tuple:
        """Show a layer's units; the keys, values and mask that its attention uses: here the model's own."""
        self.show(units)
        return units.keys, units.values, mask


_NOW = threading.local()


def now() -> Watch | None:
    """The watch of the forward pass that this thread is in."""
    return getattr(_NOW, "watch", None)


_LOCK = threading.Lock()
_WATCHED = WeakKeyDictionary()
"""The number of those who watch each model, whose attention is wrapped until the last of them has gone."""

PREFIX = "plpkg_watched_"
"""The wrapper of an attention function has that function's name, behind this prefix."""


def check(model: Any) -> None:
    """ValueError if the model is no language model whose layers can be watched."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ValueError(f"{type(model).__name__} has no head for a language: give the causal language model itself")
    attention_layers(model)
    _wrapper_of(model.config._attn_implementation.removeprefix(PREFIX))


@contextmanager
def watching(model: Any, watch: Watch, cache: Cache | None = None) -> Iterator[Watch]:
    """Show every attention layer's units to ``watch``, in each forward pass with this cache while the block runs.

    Forward passes with other caches, in this thread or another, are not shown; without a cache all are.

    Raises
    ------
    ValueError
        The model's layers cannot be watched, or its attention is not one that makes a mask (eager, sdpa).
    """
    layers = attention_layers(model)

    def end(*_) -> None:
        if now() is watch:
            _NOW.watch = None

    # A thread that is about to call a hook while another removes it calls it without kwargs.
    def begin(_module, _args, kwargs=MappingProxyType({})) -> None:
        end()  # of a pass that broke off before its hooks
        if cache is None or cache_among(kwargs) is cache:
            _NOW.watch = watch

    def projected(number: int, _module, _args, output: torch.Tensor) -> None:
        if now() is watch:
            outputs = watch.projected.setdefault(number, [])
            outputs.append(layers[number].side_by_side(output))

    def called(number: int, _module, args: tuple, kwargs=MappingProxyType({})) -> None:
        if now() is watch:
            watch.inputs[number] = _named(args) | {**kwargs}

    # PEFT's generate calls the model inside its wrapper.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hooks = [
        inner.register_forward_pre_hook(begin, with_kwargs=True),
        inner.register_forward_hook(end, always_call=True),
    ]
    for number, layer in enumerate(layers):
        hooks += [projection.register_forward_hook(partial(projected, number)) for projection in layer.projections]
        hooks.append(layer.module.register_forward_pre_hook(partial(called, number), with_kwargs=True))
    configs = [model.config] + [layer.module.config for layer in layers]
    once_each = {id(config): config for config in configs}  # most layers share one
    try:
        with _wrapped(inner, once_each.values()):  # the wrapper calls watch.attended with each layer's units
            yield watch
    finally:
        for hook in hooks:
            hook.remove()
        watch.projected.clear()
        watch.inputs.clear()


@contextmanager
def _wrapped(model: Any, configs: Iterable) -> Iterator[None]:
    """The model's attention is a wrapper of its own while the block runs, or another thread's."""
    with _LOCK:
        base = model.config._attn_implementation.removeprefix(PREFIX)
        name = _wrapper_of(base)
        _WATCHED[model] = _WATCHED.get(model, 0) + 1
        for config in configs:
            config._attn_implementation = name
    try:
        yield
    finally:
        with _LOCK:
            _WATCHED[model] -= 1
            if not _WATCHED[model]:
                for config in configs:
                    config._attn_implementation = base


def _wrapper_of(base: str) -> str:
    """The name under which transformers finds the model's own attention, wrapped."""
    if base not in ("eager", "sdpa"):
        raise ValueError(f"attention must be 'eager' or 'sdpa' to be watched, got {base!r}")
    name = PREFIX + base
    if name in ALL_ATTENTION_FUNCTIONS:
        return name

    def attention(module, query, key, value, attention_mask, dropout=0.0, **options):
        attend = _attention_function(base, module)
        watch = now()
        if watch is not None:
            units = watch.units(module, query, key, value, attention_mask, options)
            key, value, attention_mask = watch.attended(units, attention_mask)
            watch.projected.pop(module.layer_idx, None)  # a scorer may have asked the module's projections again
        return attend(module, query, key, value, attention_mask, dropout=dropout, **options)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _named(args: tuple) -> dict:
    """The hidden states, which some models give an attention module without a name."""
    return {"hidden_states": args[0]} if args else {}


def _attention_function(base: str, module: nn.Module) -> Callable:
    """The model's own attention: transformers has one for all models, but each file defines its eager one itself."""
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]
