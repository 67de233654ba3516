"""The cloud's part of a divided model: decoder layers, frozen, that ask the device at each exchange."""

import copy

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from plpkg.residual.exchange import Exchange, Here, PerThread, Transport


class OwnInEachThread(nn.Module):
    """A module that every thread has a copy of: rotary embeddings may change with the length of what they last saw."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._copy = module, PerThread()

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
    exchanges
        By their number: layer by layer.
    """

    def __init__(self, decoder: nn.Module, exchanges: list[Exchange], here: Here) -> None:
        super().__init__()
        self.decoder, self._here = decoder, here
        self.exchanges = nn.ModuleList(exchanges)
        self.requires_grad_(False)

    def connect(self, transport: Transport | None) -> None:
        """Let what this thread computes from now on go through ``transport``: other threads have their own."""
        self._here.transport = transport
        self._here.outputs.clear()

    def new_cache(self) -> DynamicCache:
        """An empty KV cache for these layers.

        Raises
        ------
        ValueError
            Layers whose cache is overwritten in place, such as linear attention's: a step could not be taken back.
        """
        cache = DynamicCache(config=self.decoder.config)
        for layer in cache.layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(f"a {type(layer).__name__} cannot be taken back to where it was before a step")
        return cache

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DynamicCache | None = None,
    ) -> torch.Tensor:
        """Run the layers: ``(batch, seq, hidden)`` in and out."""
        return run_layers(self.decoder, hidden, attention_mask, position_ids, cache)


def run_layers(decoder: nn.Module, hidden, attention_mask, position_ids, cache) -> torch.Tensor:
    """The hidden states ``(batch, seq, hidden)`` behind a part's decoder layers."""
    return decoder(
        inputs_embeds=hidden,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
