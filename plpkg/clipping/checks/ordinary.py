"""Ordinary models that a private training should get right, or refuse."""

import math

import torch
from torch import nn
from torch.nn import functional

from plpkg.clipping.checks.cases import Case

COUNT = 5
MICRO_BATCH = 2
VOCABULARY = 11
SEQ = 4
HIDDEN = 6
RANK = 2
CLASSES = 3


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        channels = torch.relu(self.norm(self.conv(x)))  # (batch, 4, height, width)
        return self.head(channels.mean((2, 3)))


class _Transformer(nn.Module):
    """One block with causal attention, to the logits of the next token, ``(batch, seq, vocabulary)``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(SEQ, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, seq = ids.shape
        places = torch.arange(seq, device=ids.device).repeat(batch, 1)  # one row an example
        x = self.tokens(ids) + self.places(places)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.mT / math.sqrt(HIDDEN)
        past = torch.ones(seq, seq, dtype=torch.bool, device=ids.device).tril()
        attention = scores.masked_fill(~past, -math.inf).softmax(-1)  # (batch, queries, keys)
        return self.head(x + attention @ v)


class _Adapted(nn.Module):
    """A frozen layer and a low-rank path beside it: LoRA's two factors, or PrivateLoRA's M between frozen ones."""

    def __init__(self, *, middle: bool) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, CLASSES).requires_grad_(False)
        self.down = nn.Linear(HIDDEN, RANK, bias=False)
        self.up = nn.Linear(RANK, CLASSES, bias=False)
        self.middle = nn.Linear(RANK, RANK, bias=False) if middle else nn.Identity()
        if middle:
            self.down.requires_grad_(False)
            self.up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.middle(self.down(x)))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """By text, the mean cross-entropy of its next tokens, ``(batch,)``."""
    losses = functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")  # (batch, seq - 1)
    return losses.mean(1)


def ordinary() -> tuple[Case, ...]:
    """A perceptron, a convolution, a transformer, LoRA and PrivateLoRA; micro-batches, and a second step."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(COUNT, HIDDEN, generator=generator)
    images = torch.randn(COUNT, 1, 6, 6, generator=generator)
    ids = torch.randint(VOCABULARY, (COUNT, SEQ), generator=generator)
    classes = torch.randint(CLASSES, (COUNT,), generator=generator)
    loss = nn.CrossEntropyLoss()

    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Linear(HIDDEN, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    return (
        Case("perceptron", perceptron, ((rows,), classes), loss),
        Case("micro-batches", perceptron, ((rows,), classes), loss, micro_batch=MICRO_BATCH),
        Case("second step", perceptron, ((rows,), classes), loss, before=lambda _: ((rows[:2],), classes[:2])),
        Case("convolution", _Convolution, ((images,), classes), loss),
        Case("transformer", _Transformer, ((ids,), ids), next_token_loss),
        Case("LoRA", lambda: _Adapted(middle=False), ((rows,), classes), loss),
        Case("PrivateLoRA", lambda: _Adapted(middle=True), ((rows,), classes), loss),
    )
