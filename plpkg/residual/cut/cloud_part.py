"""The cloud's part of a divided model: decoder layers, frozen, that ask the device at each exchange."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from plpkg.decoding import cache_argument
from plpkg.residual.adapter import PerThread
from plpkg.residual.cut.exchange import Exchange, Here, Transport


class OwnInEachThread(nn.Module):
    """A module that every thread has a copy of: rotary embeddings may change with the length of what they last saw."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._copy = PerThread()

    def forward(self, *args, **options):
        if not hasattr(self._copy, "module"):
            with torch.inference_mode(False):  # it may be trained through later
                self._copy.module = copy.deepcopy(self.module)
        return self._copy.module(*args, **options)

    def _apply(self, *args, **options) -> nn.Module:
        self._copy = PerThread()  # the copies would stay where they are
        return super()._apply(*args, **options)


class CloudPart(nn.Module):
    """The decoder layers that the device does not keep, frozen, with A and B.

    Attributes
    ----------
    decoder
        A Hugging Face decoder without embedding, which takes ``inputs_embeds``.
    make_cache
        Makes a bounded cache for ``decoder``: one that forgets after each pass, which runs within its
        ``reading(batch, seq)``. A pass that breaks off has to change nothing but the attributes of the cache's layers.
        ``None``: nothing is forgotten.
    exchanges
        By their number: layer by layer.
    riders
        The widths of what goes down with each final hidden state, which is then the one before the norm.
    """

    def __init__(self, decoder: nn.Module, exchanges: list[Exchange], riders: list[int], here: Here) -> None:
        super().__init__()
        self.decoder = decoder
        self.riders = riders
        self._here = here
        self.exchanges = nn.ModuleList(exchanges)
        self.make_cache: Callable[[nn.Module], Any] | None = None
        self.requires_grad_(False)

    def connect(self, transport: Transport | None) -> None:
        """Let what this thread computes from now on go through ``transport``: other threads have their own."""
        self._here.transport = transport
        for left in (self._here.outputs, self._here.sent, self._here.riding):  # by a pass that broke off
            left.clear()

    def new_cache(self) -> Cache:
        """An empty KV cache for these layers.

        Raises
        ------
        ValueError
            Layers whose cache is overwritten in place, such as linear attention's: a step could not be taken back.
        """
        if self.make_cache is not None:
            cache = self.make_cache(self.decoder)
            for layer in cache.layers:  # a cache that evicts refuses it as a whole
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
            return cache
        cache = new_cache(self.decoder)
        for layer in cache.layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(f"a {type(layer).__name__} cannot be taken back to where it was before a step")
        return cache

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
    ) -> torch.Tensor:
        """Run the layers: ``(batch, seq, hidden)`` to ``(batch, seq, hidden + riders)``."""
        self._here.shape = tuple(hidden.shape[:-1])
        reading = contextlib.nullcontext()
        if cache is not None and self.make_cache is not None:  # a bounded one
            reading = cache.reading(*hidden.shape[:2])
        with reading:
            final = run_layers(self.decoder, hidden, attention_mask, position_ids, cache)
        if not self.riders:
            return final
        riding = [self._here.riding.pop(seat).to(final.dtype) for seat in range(len(self.riders))]
        return torch.cat([final, *riding], dim=-1)


def new_cache(decoder: Any) -> DynamicCache:
    """An empty KV cache, whose windows remember what a step has pushed out until :func:`cut_back` is called."""
    cache = DynamicCache(config=decoder.config)
    cache.activate_past_recording()
    return cache


def cut_back(cache: Any, keep: int) -> None:
    """Forget all but the first ``keep`` positions: between two steps, also where nothing is to be forgotten.

    Raises
    ------
    ValueError
        There are not so many, or a window has dropped positions that would be needed.
    """
    seen = cache.get_seq_length()
    if not 1 <= keep <= seen:
        raise ValueError(f"keep must be between 1 and the {seen} positions in the cache, got {keep}")
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        if window and layer.keys.shape[-2] < seen - keep + min(keep, window - 1):
            raise ValueError(f"keep={keep} of {seen} positions: a window of {window} has dropped what it would need")
    for layer in cache.layers:
        layer.crop(keep - seen)


def run_layers(decoder: nn.Module, hidden, attention_mask, position_ids, cache) -> torch.Tensor:
    """The hidden states ``(batch, seq, hidden)`` behind a part's decoder layers."""
    return decoder(
        inputs_embeds=hidden,
        attention_mask=attention_mask,
        position_ids=position_ids,
        **cache_argument(cache),
        use_cache=cache is not None,
    ).last_hidden_state
