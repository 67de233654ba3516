"""A bounded cache for forward passes that somebody else drives: a cloud's layers, which see no tokens.

After each pass every KV head keeps its ``budget`` best units, while the prompt is read and while the answer is written,
as :meth:`~plpkg.retention.reading.PrefillResult.evicting` does. Kept units stay where they stood: the decoder layers
alone cannot say what each of them does with positions.

Left out: stabilizers (a pass does not know whether it is a prompt's last), scores that need tokens or logits, quantized
stores.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from plpkg.retention import watch
from plpkg.retention.cache.evicting import EvictingCache
from plpkg.retention.eviction import Eviction
from plpkg.retention.layers import attention_layers
from plpkg.retention.scorers import Scorer
from plpkg.validation import whole_number


class BoundedCache(EvictingCache):
    """The cache of one batch; each forward pass runs within :meth:`reading`."""

    def __init__(self, decoder: nn.Module, scorer: Scorer, budget: int) -> None:
        super().__init__(decoder, "original")
        self._eviction = Eviction(decoder, self, scorer, budget, stabilizers=0, log_positions=False)

    @contextmanager
    def reading(self, batch: int, seq: int) -> Iterator[None]:
        """Within it, one pass over ``(batch, seq)`` runs; then every head keeps its best units.

        A pass that breaks off can be taken back by giving every layer the attributes that it had before.
        """
        eviction = self._eviction
        ids = torch.zeros(batch, seq, dtype=torch.long)  # nobody asks for more of them than their shape
        if not self.seen:
            eviction.scorer = eviction.scorer.started(ids, eviction.budget)
        for layer in self.evicting.values():
            layer.store = copy.copy(layer.store)
        with eviction.one_pass(ids):
            yield


def bounded(model: nn.Module, scorer: Scorer, budget: int) -> Callable[[nn.Module], BoundedCache]:
    """A maker of bounded caches for a model's decoder layers: ``CloudServer(model, cache=bounded(model, …))``.

    Parameters
    ----------
    model
        The whole model, with or without an adapter.
    scorer, budget
        As for :func:`plpkg.retention.chunked_prefill`. After a pass a head holds at most ``budget`` units, within it
        the pass's own as well.

    Returns
    -------
    Callable
        It takes the decoder with all of the model's layers, and gives an empty cache.

    Raises
    ------
    ValueError
        A scorer that needs more than the layers compute, that protects more than the budget, or that does not go with
        the model.
    """
    watch.check(model)
    scorer.check(model)
    whole_number("budget", budget, 1)
    name = type(scorer).__name__
    if scorer.needs_logits:
        raise ValueError(f"{name} needs the tokens and the logits, which no layer knows")
    recent = scorer.latest(budget)
    if scorer.sink + recent > budget:
        raise ValueError(f"{name} protects sink={scorer.sink} and recent={recent} units, more than budget={budget}")
    layers = len(attention_layers(model))

    def make(decoder: nn.Module) -> BoundedCache:
        given = len(attention_layers(decoder))
        if given != layers:
            raise ValueError(f"a bounded cache is for all {layers} layers of the model, and here are {given}")
        return BoundedCache(decoder, scorer, budget)

    return make
