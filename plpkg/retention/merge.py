"""What is evicted, merged into what stays: a trained convolution, after LoCoCo (arXiv 2406.05317).

Of the units that stay after a cut, the ``slots`` with the lowest scores that nothing protects become mixtures: a
one-dimensional convolution runs over keys and values of all that is evicted and of those slots' own units, in the order
of time; for each slot its outputs, through a softmax over the units, are weights, and the slot becomes
``(1 - gate) · own + gate · Σ weight · unit``. With gate 0 that is plain eviction.

Keys are mixed before rotary positions, so this goes with ``positions="reassigned"``. The convolution is one for each
layer, shared by its KV heads. As in Locret's combination of both (appendix H.2): a window of 21, 200 steps of training.
"""

import copy
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional
from tqdm.auto import tqdm

from plpkg.retention.cache import EvictingCache, EvictingLayer, ReassignedPositions, gather
from plpkg.retention.prefill import Eviction, run
from plpkg.retention.scorers import Scorer
from plpkg.retention.watch import attention_layers
from plpkg.validation import whole_number


class Merger(nn.Module):
    """The convolutions and gates of a model's layers.

    Parameters
    ----------
    model
        The backbone.
    slots
        Units of each head that become mixtures.
    window
        Of the convolution, odd.
    seed
        Of the weights.

    Raises
    ------
    ValueError
        A size out of range.
    """

    def __init__(self, model: nn.Module, slots: int, *, window: int = 21, seed: int = 0) -> None:
        super().__init__()
        self.slots = whole_number("slots", slots, 1)
        if whole_number("window", window, 1) % 2 == 0:
            raise ValueError(f"window must be odd, got {window}")
        found = attention_layers(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.convolutions = nn.ModuleList(
                nn.Conv1d(2 * layer.head_dim, slots, window, padding=window // 2) for layer in found
            )
        self.gates = nn.Parameter(torch.zeros(len(found), slots))
        self.to(model.device)

    def keep(self, number: int, layer: EvictingLayer, indices: torch.Tensor, first: int = 0, last: int = 0) -> None:
        """Cut a layer to ``(batch, num_kv_heads, kept)`` indices, merging what goes.

        The ``first`` and the ``last`` units of what stays are protected: no slots.

        Raises
        ------
        ValueError
            The layer's positions are original, its store is packed, or fewer units stay than there are slots.
        """
        kept = indices.shape[-1]
        if kept - first - last < self.slots:
            raise ValueError(f"slots={self.slots} are more than the {kept - first - last} units that stay unprotected")
        keys, values = layer.store.keys, layer.store.values
        if not isinstance(layer, ReassignedPositions) or not isinstance(keys, torch.Tensor):
            raise ValueError("merging needs positions='reassigned' and a store of plain tensors")
        worth = layer.scores.gather(-1, indices)
        worth[..., :first] = worth[..., kept - last :] = float("inf")
        slot = worth.argsort(dim=-1)[..., : self.slots].sort(dim=-1).values
        own = indices.gather(-1, slot)
        merging = torch.ones_like(layer.positions, dtype=torch.bool).scatter(-1, indices, False).scatter(-1, own, True)
        count = int(merging[0, 0].sum())
        units = merging.nonzero()[:, 2].view(*indices.shape[:2], count)  # in the order of time
        k, v = gather(keys, units), gather(values, units)  # (batch, heads, count, head_dim)
        states = torch.cat([k, v], dim=-1).flatten(0, 1).transpose(1, 2)  # (batch · heads, 2 · head_dim, count)
        weights = self.convolutions[number](states.float()).softmax(-1).unflatten(0, indices.shape[:2])
        weights = weights.to(k.dtype)  # (batch, heads, slots, count)
        gate = self.gates[number].to(k.dtype)[:, None]  # (slots, 1)
        layer.keep(indices)
        at = slot[..., None].expand(*slot.shape, k.shape[-1])
        for name, whole, mixed in (("keys", keys, weights @ k), ("values", values, weights @ v)):
            mixture = (1 - gate) * gather(whole, own) + gate * mixed
            setattr(layer.store, name, getattr(layer.store, name).scatter(2, at, mixture))


def train_merger(
    model: nn.Module,
    merger: Merger,
    data: Iterable[tuple[torch.Tensor, ...]],
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
        A backbone, and what is trained.
    data
        ``(prompt, answer)`` ids, ``(batch, seq)`` each; or with targets of the answer's shape, -100 where a token is
        not to be learnt.
    scorer, budget, chunk_size
        Of :func:`plpkg.retention.chunked_prefill`.
    steps, lr
        Of AdamW, with a linear fall of the rate.
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
    optimizer = torch.optim.AdamW(merger.parameters(), lr=lr)
    examples, found = iter(data), []
    frozen = [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        for step in tqdm(range(whole_number("steps", steps, 1)), "merging", disable=not progress):
            try:
                prompt, answer, *targets = next(examples)
            except StopIteration:
                raise ValueError(f"the data end after {step} of {steps} steps") from None
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - step / steps)
            own = copy.copy(scorer)
            own.begin(prompt, budget)
            eviction = Eviction(model, EvictingCache(model), own, budget, 0, False, merger=merger)
            run(eviction, prompt, chunk_size, 0)
            logits = model(answer, past_key_values=eviction.cache).logits[:, :-1]
            wanted = targets[0] if targets else answer % logits.shape[-1]
            loss = functional.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return found
