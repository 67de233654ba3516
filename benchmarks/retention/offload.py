"""Nothing is forgotten, most of it is elsewhere: blocks of units in other memory, the best of them fetched (InfLLM).

After arXiv 2402.04617: the first units and the latest stay at hand; the rest lies in blocks in the host's memory. For
each chunk of queries every KV head fetches the blocks whose representative suits the queries best. Here the
representative is the block's mean key, and units keep their original positions. InfLLM takes each block's most
attended keys, and one position for all that is far away.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from benchmarks.retention.rewriting import Rewriting
from plpkg.decoding import cache_argument
from plpkg.retention.cache.store import gather
from plpkg.retention.watch import Units, watching


class OffloadedLayer(DynamicLayer):
    """All units of a layer, in the host's memory; ``update`` returns the new ones alone.

    Attributes
    ----------
    keys, values
        ``(batch, num_kv_heads, seen, head_dim)`` on the CPU.
    retrieving
        Whether blocks are fetched now; without, a model would see the new units alone.
    """

    retrieving = False

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.retrieving:
            raise RuntimeError("this cache fetches its blocks within the `with` block of retrieving() only")
        super().update(key_states.cpu(), value_states.cpu())
        return key_states, value_states


class OffloadedCache(Cache):
    """One :class:`OffloadedLayer` for each layer.

    Attributes
    ----------
    peak_units
        The most units that a head had at hand, new ones included.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[OffloadedLayer() for _ in range(num_layers)])
        self.peak_units = 0


@contextmanager
def retrieving(
    model: nn.Module, *, block: int = 128, top: int = 16, first: int = 4, local: int = 512
) -> Iterator[OffloadedCache]:
    """Let a model fetch blocks while it runs: pass the cache by :func:`plpkg.decoding.cache_argument`.

    Parameters
    ----------
    model
        A Hugging Face causal language model without sliding windows.
    block, top
        Units of a block, and blocks that are fetched for each chunk and KV head.
    first, local
        Units at the beginning and before the chunk that are always at hand.

    Yields
    ------
    OffloadedCache

    Raises
    ------
    ValueError
        A size out of range, or layers of another kind.
    """
    layers = DynamicCache(config=model.config).layers
    if any(type(layer) is not DynamicLayer for layer in layers):
        raise ValueError(f"{type(model).__name__} has layers that are not full attention")
    cache = OffloadedCache(len(layers))

    def rewrite(units: Units) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stored, n = cache.layers[units.layer], units.query.shape[2]
        batch, kv_heads = units.keys.shape[:2]
        seen = stored.keys.shape[2] - n
        start = min(first, seen)
        count = max(0, seen - local - start) // block  # full blocks between the first and the local units
        at_hand = [*range(start), *range(start + count * block, seen)]
        chosen = torch.tensor(at_hand, dtype=torch.long).expand(batch, kv_heads, len(at_hand))
        if count:
            blocks = stored.keys[:, :, start : start + count * block].unflatten(2, (count, block))
            representative = blocks.mean(dim=3).to(units.query)  # (batch, kv_heads, count, head_dim)
            query = units.query.unflatten(1, (kv_heads, -1)).mean(dim=(2, 3))  # (batch, kv_heads, head_dim)
            suits = (representative @ query[..., None]).squeeze(-1).cpu()
            best = suits.topk(min(top, count)).indices[..., None]  # (batch, kv_heads, top, 1)
            inside = (start + best * block + torch.arange(block)).flatten(2)
            chosen = torch.cat([chosen, inside], dim=-1).sort(dim=-1).values
        past = chosen.shape[-1]
        cache.peak_units = max(cache.peak_units, past + n)
        device = units.keys.device
        keys, values = (gather(states, chosen).to(device) for states in (stored.keys, stored.values))
        keys, values = torch.cat([keys, units.keys], dim=2), torch.cat([values, units.values], dim=2)
        allowed = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        return keys, values, functional.pad(allowed, (past, 0), value=True).expand(batch, 1, n, past + n)

    with watching(model, Rewriting(rewrite)):
        for layer in cache.layers:
            layer.retrieving = True
        try:
            yield cache
        finally:
            for layer in cache.layers:
                layer.retrieving = False


@torch.no_grad()
def read(model: nn.Module, cache: OffloadedCache, input_ids: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Run a prompt ``(batch, seq)`` chunk by chunk; the logits after its last token ``(batch, vocab)``."""
    for ids in input_ids.split(chunk_size, dim=1):
        logits = model(input_ids=ids, **cache_argument(cache), use_cache=True, logits_to_keep=1).logits
    return logits[:, -1]
