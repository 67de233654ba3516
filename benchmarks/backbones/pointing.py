"""A loss on where a model looks: the attention of some of its heads should be on the token that it is to write.

Copying from a text is learnt late: until some head looks at the right place nothing is gained by copying, and until
something copies nothing is gained by looking. A loss on the looking alone ends that.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "pointing"


class Pointing:
    """Looks at a model's attention in some layers, from some tokens to one other each.

    Parameters
    ----------
    model
        A causal language model of Hugging Face's. Its attention is the same as before, by SDPA.
    layers
        The layers' numbers.
    """

    def __init__(self, model, layers: tuple[int, ...]) -> None:
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
        self._layers, self._asked, self._found = layers, None, []

    @contextlib.contextmanager
    def ask(self, rows: torch.Tensor, tokens: torch.Tensor, sources: torch.Tensor) -> Iterator[None]:
        """Within it, forward passes note how much ``tokens`` of ``rows`` attend to ``sources``, three of ``(n,)``."""
        self._asked, self._found = (rows, tokens, sources), []
        try:
            yield
        finally:
            self._asked = None

    def nats(self) -> torch.Tensor:
        """Of the last pass, ``(n,)``: minus the logarithm of the attention, averaged over all heads of all layers."""
        found = torch.cat(self._found, 1)
        return math.log(found.shape[1]) - found.logsumexp(1)

    def _attend(self, module, query, key, value, mask, *, scaling: float, **options):
        if self._asked and module.layer_idx in self._layers:
            rows, tokens, sources = self._asked
            asking = query[rows, :, tokens].unflatten(1, (key.shape[1], -1)).float()  # (n, kv_heads, group, head_dim)
            scores = torch.einsum("nkgd,nksd->nkgs", asking, key[rows].float()) * scaling
            later = torch.arange(key.shape[2]) > tokens[:, None]  # (n, seq)
            shares = scores.masked_fill(later[:, None, None], -torch.inf).log_softmax(-1)
            to = sources[:, None, None, None].expand(*shares.shape[:-1], 1)
            self._found.append(shares.gather(-1, to).flatten(1))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=scaling, **options)
