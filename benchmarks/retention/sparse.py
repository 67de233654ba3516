"""Sparse attention while the prompt is read, with a full cache: MInference's vertical-slash pattern (arXiv 2407.02490).

For each query head the attention of the last queries is looked at; the columns and the diagonals that got most of it
are computed, the rest is masked. This is the pattern's effect on what the model says. Its speed comes from kernels
that skip what is masked, which are left out, as are MInference's two other patterns and the search for each head's.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.retention.rewriting import Rewriting
from plpkg.retention.layers import attention_layers
from plpkg.retention.watch import Units, watching


@dataclass
class VerticalSlash:
    """A rewriting of attention, :meth:`on` a model.

    Attributes
    ----------
    vertical, slash
        Columns and diagonals for each query head; the main diagonal is always there.
    last
        Queries that are looked at.
    density
        The share of the causal pairs that the last call computed, the mean over batch and heads.
    """

    vertical: int
    slash: int
    last: int = 64
    density: float = 1.0

    def __call__(self, units: Units) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys, values, and which pairs ``(batch, num_heads, n, kept + n)`` may be attended to."""
        n, width = units.query.shape[2], units.keys.shape[2]
        if n == 1:
            return units.keys, units.values, None  # decoding is dense
        parts = units.logits(max(0, n - self.last))
        seen = torch.cat([logits.softmax(-1).flatten(1, 2) for logits in parts], dim=2)  # (batch, heads, last, width)
        rows = torch.arange(width - n, width, device=seen.device)  # where the queries stand
        back = rows[:, None] - torch.arange(width, device=seen.device)  # (n, width): how far each pair looks back
        causal = back >= 0
        looked = back[n - seen.shape[2] :].clamp(min=0).expand(*seen.shape[:2], -1, -1)
        diagonals = seen.new_zeros(*seen.shape[:2], width).scatter_add(2, looked.flatten(2), seen.flatten(2))
        columns = _best(seen.sum(dim=2), self.vertical)
        slashes = _best(diagonals, self.slash)
        slashes[..., 0] = True
        allowed = columns[..., None, :] | slashes[..., back.clamp(min=0)]
        allowed &= causal
        self.density = (allowed.sum() / (causal.sum() * allowed[:, :, 0, 0].numel())).item()
        return units.keys, units.values, allowed

    @contextmanager
    def on(self, model: nn.Module):
        """Rewrite a model's attention while the block runs."""
        for i, layer in enumerate(attention_layers(model)):
            if window := getattr(layer.module, "sliding_window", getattr(layer.module.config, "sliding_window", None)):
                raise ValueError(
                    f"layer {i} has a sliding window of {window} tokens: its attention cannot be rewritten"
                )
        with watching(model, Rewriting(self)):
            yield self


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Which of the last dimension are among the ``count`` highest."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter(-1, scores.topk(min(count, scores.shape[-1])).indices, True)
