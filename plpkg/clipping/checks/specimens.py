"""The bugs of the zoo: for each a model, a batch, and the sentence that it teaches.

Each example has a token or a feature of its own, so that gradients are orthogonal: what an auditor would wish for.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from plpkg.clipping.checks.cases import Case

MICRO_BATCH = 16
MAX_GRAD_NORM = 0.1  # C, below all norms
WIDTH = 4  # of an embedding
PADS = 3  # tokens of a text that are padding
TOKENS = 10  # of a text,
LONG_TEXT = 1_000  # and of the first
GRADIENT_PER_TOKEN = 10.0
CONTRAST = 0.5  # an example's own activation
OUTLIER = 2.0**13  # one as language models have them in a few channels
FAR = 1_000.0  # a value that no other example has


class _Tied(nn.Module):
    """A language model's head with its embedding's weights, by way of a function."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(count, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.tokens(ids), self.tokens.weight)  # (batch, count)


class _Normalised(nn.Module):
    """BatchNorm over two positions (it takes no single number), then a linear layer on the first."""

    def __init__(self, count: int, *, frozen: bool) -> None:
        super().__init__()
        # With running statistics, a BatchNorm that learns stops Opacus even past its refusal.
        self.norm = nn.BatchNorm1d(count + 1, track_running_stats=frozen).requires_grad_(not frozen)
        self.head = nn.Linear(count + 1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x)[:, :, 0])


class _Balanced(nn.Module):
    """A hook divides the gradients by their mean size, so that no batch learns faster than another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer = nn.Linear(count, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / gradient.abs().mean())
        return y


class _TextAndPicture(nn.Module):
    """A second layer for what not every batch has."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.text = nn.Linear(count, 1, bias=False)
        self.picture = nn.Linear(count, 1, bias=False)

    def forward(self, text: torch.Tensor, picture: torch.Tensor | None = None) -> torch.Tensor:
        if picture is None:
            return self.text(text)
        return self.text(text) + self.picture(picture)


def _first_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is the input."""
    return output[:, 0]


def _texts(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.full((count,), float(TOKENS))
    tokens[0] = LONG_TEXT
    return torch.eye(count) * tokens[:, None] * GRADIENT_PER_TOKEN, tokens


def _far_example(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One-hot features, and a shared one of ±1 but for the first example; the loss has its sign."""
    sign = 1.0 - 2 * (torch.arange(count) % 2)
    shared = torch.cat([torch.tensor([FAR]), sign[1:]])
    first = torch.cat([torch.eye(count), shared[:, None]], 1)
    return torch.stack([first, torch.zeros_like(first)], 2), sign


def _contrasts(count: int) -> torch.Tensor:
    """Two positions, in which an example's own feature has opposite signs; and an outlier in both."""
    contrast = CONTRAST * torch.eye(count)
    outlier = torch.full((count, 1), OUTLIER)
    first = torch.cat([contrast, outlier], 1)
    second = torch.cat([-contrast, outlier], 1)
    return torch.stack([first, second], 1)  # (count, 2, count + 1)


def specimens(count: int) -> tuple[Case, ...]:
    """The bugs of the zoo, with so many examples."""
    linear = partial(nn.Linear, out_features=1, bias=False)
    ids = torch.arange(count)
    zeros = torch.zeros(count)
    one_hot = (torch.eye(count),), zeros
    texts, tokens = _texts(count)
    far, sign = _far_example(count)
    bugs = (
        Case(
            "functional tie",
            lambda: _Tied(count),
            ((ids,), ids),
            lambda y, ids: -y.gather(1, ids[:, None])[:, 0],
            lesson="A weight is used past its layer, which nobody watches: half of the gradient is not in the norm.",
        ),
        Case(
            "dropped micro-batches",
            lambda: linear(count),
            one_hot,
            _first_output,
            micro_batch=MICRO_BATCH,
            lesson="Of several backward() before step() only the last counts, and who is in it depends on the others.",
        ),
        Case(
            "loss over the batch's tokens",
            lambda: linear(count),
            ((texts,), tokens),
            lambda y, tokens: y[:, 0] / tokens.sum(),
            lesson="Each example's loss is divided by how many tokens all of them have.",
        ),
        Case(
            "BatchNorm",
            lambda: _Normalised(count, frozen=False),
            ((far,), sign),
            lambda y, sign: y[:, 0] * sign,
            lesson="Each example is normalised by the others.",
        ),
        Case(
            "BatchNorm, frozen",
            lambda: _Normalised(count, frozen=True),
            ((far,), sign),
            lambda y, sign: y[:, 0] * sign,
            lesson="Its weights do not learn, so nobody looks; in training mode it still normalises by the others.",
        ),
        Case(
            "padding_idx",
            lambda: nn.Embedding(1 + count, WIDTH, padding_idx=0),
            ((functional.pad(1 + ids[:, None], (0, PADS)),), zeros),
            lambda y, _: y.sum((1, 2)),
            lesson="The padding's row does not learn, but is in the norm: everybody is clipped too much.",
        ),
        Case(
            "stale norms",
            lambda: _TextAndPicture(count),
            one_hot,
            _first_output,
            before=lambda batch: (batch[0] * 2, batch[1]),
            lesson="A layer that this step does not use still has the norms of the step before.",
        ),
        Case(
            "Gram cancellation",
            lambda: linear(count + 1),
            ((_contrasts(count),), zeros),
            lambda y, _: y[:, 0, 0] - y[:, 1, 0],
            lesson="Float32 subtracts nearly equal numbers: the norm becomes 0, and nothing is clipped.",
        ),
        Case(
            "mixing on the way back",
            lambda: _Balanced(count),
            ((torch.eye(count),), torch.where(ids == 0, FAR, sign * (1 + ids))),
            lambda y, weight: y[:, 0] * weight,
            lesson="A hook divides each gradient by the batch's mean size; on the way forward nothing is mixed.",
        ),
        Case(
            "actual batch size",
            lambda: linear(count),
            one_hot,
            _first_output,
            expects_actual=True,
            lesson="The sum is divided by the size that the batch happens to have, which one example changes for all.",
        ),
    )
    return tuple(replace(bug, max_grad_norm=MAX_GRAD_NORM) for bug in bugs)
