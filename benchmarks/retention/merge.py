"""What is evicted, merged into what stays: a trained convolution, after LoCoCo (arXiv 2406.05317).

Of the units that stay after a cut, the ``slots`` with the lowest scores that nothing protects become mixtures: a
one-dimensional convolution runs over keys and values of all that is evicted and of those slots' own units, in the order
of time; for each slot its outputs, through a softmax over the units, are weights, and the slot becomes
``(1 - gate) · own + gate · Σ weight · unit``. With gate 0 that is plain eviction.

Keys are mixed before rotary positions, so positions are reassigned. The convolution is one for each layer, shared by
its KV heads. As in Locret's combination of both (appendix H.2): a window of 21, 200 steps of training.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional
from tqdm.auto import tqdm

from plpkg.decoding import cache_argument
from plpkg.retention.cache.evicting import EvictingCache, ReassignedPositions
from plpkg.retention.cache.rotary import Rotary
from plpkg.retention.cache.store import gather
from plpkg.retention.eviction import Eviction
from plpkg.retention.layers import attention_layers
from plpkg.retention.prefill import read_chunks
from plpkg.retention.reading import PrefillResult
from plpkg.retention.scorers import Scorer
from plpkg.training_loop import learn


class Merger(nn.Module):
    """The convolutions and gates of a model's layers.

    Parameters
    ----------
    model
        The backbone.
    slots
        Units of each head that become mixtures.
    window
        Units under the convolution, an odd number.
    seed
        The seed of the weights.

    Raises
    ------
    ValueError
        A size out of range.
    """

    def __init__(self, model: nn.Module, slots: int, *, window: int = 21, seed: int = 0) -> None:
        super().__init__()
        self.slots = slots
        if window % 2 == 0:
            raise ValueError(f"window must be odd, got {window}")
        layers = attention_layers(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.convolutions = nn.ModuleList(
                nn.Conv1d(2 * layer.head_dim, slots, window, padding=window // 2) for layer in layers
            )
        self.gates = nn.Parameter(torch.zeros(len(layers), slots))
        self.to(model.device)


class MergingLayer(ReassignedPositions):
    """A layer of the cache that merges what it evicts; its first and its last kept units are no slots."""

    def __init__(self, rotary: Rotary, merger: Merger, number: int, first: int, last: int) -> None:
        super().__init__(rotary)
        self.slots, self.convolution, self.gate = merger.slots, merger.convolutions[number], merger.gates[number]
        self.first, self.last = first, last

    def keep(self, indices: torch.Tensor) -> None:
        """Cut to ``(batch, num_kv_heads, kept)`` indices, merging what goes.

        Raises
        ------
        ValueError
            Fewer units stay than there are slots.
        """
        kept, keys, values = indices.shape[-1], self.store.keys, self.store.values
        free = kept - self.first - self.last
        if free < self.slots:
            raise ValueError(f"slots={self.slots} are more than the {free} units that stay unprotected")
        worth = self.scores.gather(-1, indices)
        worth[..., : self.first] = worth[..., kept - self.last :] = float("inf")
        slot = worth.argsort(dim=-1)[..., : self.slots].sort(dim=-1).values
        units_of_slots = indices.gather(-1, slot)
        merging = torch.ones_like(self.positions, dtype=torch.bool)
        merging = merging.scatter(-1, indices, False).scatter(-1, units_of_slots, True)
        units = merging.nonzero()[:, 2].view(*indices.shape[:2], -1)  # in the order of time
        k, v = gather(keys, units), gather(values, units)  # (batch, heads, count, head_dim)
        states = torch.cat([k, v], dim=-1).flatten(0, 1).transpose(1, 2)  # (batch · heads, 2 · head_dim, count)
        weights = self.convolution(states.float()).softmax(-1).unflatten(0, indices.shape[:2])
        weights = weights.to(k.dtype)  # (batch, heads, slots, count)
        gate = self.gate.to(k.dtype)[:, None]  # (slots, 1)
        super().keep(indices)
        at = slot[..., None].expand(*slot.shape, k.shape[-1])
        for name, whole, mixed in (("keys", keys, weights @ k), ("values", values, weights @ v)):
            mixture = (1 - gate) * gather(whole, units_of_slots) + gate * mixed
            setattr(self.store, name, getattr(self.store, name).scatter(2, at, mixture))


def merging_prefill(
    model: nn.Module, input_ids: torch.Tensor, scorer: Scorer, budget: int, chunk_size: int, merger: Merger
) -> PrefillResult:
    """Read a prompt ``(batch, seq)`` as :func:`plpkg.retention.chunked_prefill` does, merging what is evicted."""
    scorer = scorer.started(input_ids, budget)
    cache = EvictingCache(model)
    for i, layer in cache.evicting.items():
        cache.layers[i] = cache.evicting[i] = MergingLayer(layer.rotary, merger, i, scorer.sink, scorer.recent)
    eviction = Eviction(model, cache, scorer, budget, 0, False)
    return PrefillResult(cache, read_chunks(eviction, input_ids, chunk_size, 0), eviction.log, eviction)


def train_merger(
    model: nn.Module,
    merger: Merger,
    data: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    scorer: Scorer,
    budget: int,
    chunk_size: int,
    *,
    steps: int = 200,
    lr: float = 1e-2,
    progress: bool = True,
) -> list[float]:
    """Train convolutions and gates through the cuts, so that answers become likelier. The backbone stays as it is.

    Parameters
    ----------
    model, merger
        A backbone whose weights are frozen, and what is trained.
    data
        ``(prompt, answer, targets)`` ids, ``(batch, seq)`` each; targets are -100 where a token is not to be learnt.
    scorer, budget, chunk_size
        The arguments of :func:`plpkg.retention.chunked_prefill`.
    steps, lr
        The steps and the rate of AdamW, which falls linearly.
    progress
        Show a bar.

    Returns
    -------
    list of float
        Each step's cross-entropy of the answer after its first token, in nats per token.

    Raises
    ------
    ValueError
        The data end too soon.
    """
    examples = iter(data)

    def gradient(step: int) -> float:
        try:
            prompt, answer, targets = next(examples)
        except StopIteration:
            raise ValueError(f"the data end after {step} of {steps} steps") from None
        cache = merging_prefill(model, prompt, scorer, budget, chunk_size, merger).cache
        logits = model(answer, **cache_argument(cache)).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        return loss.item()

    bar = tqdm(range(steps), "merging", disable=not progress)
    optimizer = torch.optim.AdamW(merger.parameters(), lr=lr)
    return [loss for _, loss in learn(bar, gradient, [optimizer], lambda step: lr * (1 - step / steps))]
