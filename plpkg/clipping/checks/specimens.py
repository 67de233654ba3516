"""The bugs of the zoo: for each a model, a batch and the script of a user who knows nothing of clipping.

Each example has a token or a feature of its own, so that gradients are orthogonal: what an auditor would wish for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

MICRO_BATCH = 16
WIDTH, PADS = 4, 3  # of an embedding; how many tokens of a text are padding
TOKENS, LONG_TEXT, GRADIENT_PER_TOKEN = 10, 1_000, 10.0  # the first text is long
CONTRAST, OUTLIER = 0.5, 2.0**13  # an example's own activation, and one as language models have them in a few channels
FAR = 1_000.0  # a value that no other example has


def one_batch(model, optimizer, criterion, batch) -> None:
    """The step that everybody writes."""
    inputs, targets = batch
    criterion(model(inputs), targets).backward()
    optimizer.step()


def micro_batches(model, optimizer, criterion, batch) -> None:
    """Gradient accumulation, as it is done without privacy."""
    for inputs, targets in zip(*(part.split(MICRO_BATCH) for part in batch), strict=True):
        criterion(model(inputs), targets).backward()
    optimizer.step()


def two_steps(model, optimizer, criterion, batch) -> None:
    """A step with pictures, then one without."""
    inputs, targets = batch
    criterion(model(inputs, inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    one_batch(model, optimizer, criterion, batch)


@dataclass(frozen=True)
class Specimen:
    """A bug."""

    bug: str
    model: Callable[[int], nn.Module]  # for a number of examples
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # inputs and targets of so many
    criterion: Callable = lambda output, target: output[:, 0]  # one loss an example, whose gradient is here the input
    script: Callable = one_batch  # script(model, optimizer, criterion, batch): from the forward pass to the step
    expects_actual: bool = False  # whether the user takes the batch's size for the expected one, where he can

    def build(self, count: int) -> nn.Module:
        """The model for so many examples, the same in each call."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would write down who called, for CUDA
            return self.model(count)

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        """One loss an example, ``(batch,)``."""
        return self.criterion(model(batch[0]), batch[1])


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


class _TextAndPicture(nn.Module):
    """A second layer for what not every batch has."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.text, self.picture = nn.Linear(count, 1, bias=False), nn.Linear(count, 1, bias=False)

    def forward(self, text: torch.Tensor, picture: torch.Tensor | None = None) -> torch.Tensor:
        return self.text(text) if picture is None else self.text(text) + self.picture(picture)


def _one_hot(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.eye(count), torch.zeros(count)


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


def _contrasts(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two positions, in which an example's own feature has opposite signs; and an outlier in both."""
    contrast, outlier = CONTRAST * torch.eye(count), torch.full((count, 1), OUTLIER)
    return torch.stack([torch.cat([side, outlier], 1) for side in (contrast, -contrast)], 1), torch.zeros(count)


def specimens() -> tuple[Specimen, ...]:
    """The bugs of the zoo."""
    linear = partial(nn.Linear, out_features=1, bias=False)
    return (
        # A weight is used past its layer, which nobody watches: half of the gradient is not in the norm.
        Specimen(
            "functional tie",
            _Tied,
            lambda n: (torch.arange(n), torch.arange(n)),
            lambda y, ids: -y.gather(1, ids[:, None])[:, 0],
        ),
        # Of several backward() before step() only the last counts, and who is in it depends on the others.
        Specimen("dropped micro-batches", linear, _one_hot, script=micro_batches),
        # Each example's loss is divided by how many tokens all of them have.
        Specimen("loss over the batch's tokens", linear, _texts, lambda y, tokens: y[:, 0] / tokens.sum()),
        # Each example is normalised by the others.
        Specimen("BatchNorm", partial(_Normalised, frozen=False), _far_example, lambda y, sign: y[:, 0] * sign),
        # Its weights do not learn, so nobody looks; in training mode it still normalises by the others.
        Specimen("BatchNorm, frozen", partial(_Normalised, frozen=True), _far_example, lambda y, sign: y[:, 0] * sign),
        # The padding's row does not learn, but is in the norm: everybody is clipped too much.
        Specimen(
            "padding_idx",
            lambda n: nn.Embedding(1 + n, WIDTH, padding_idx=0),
            lambda n: (functional.pad(1 + torch.arange(n)[:, None], (0, PADS)), torch.zeros(n)),
            lambda y, _: y.sum((1, 2)),
        ),
        # A layer that this step does not use still has the norms of the step before.
        Specimen("stale norms", _TextAndPicture, _one_hot, script=two_steps),
        # Float32 subtracts nearly equal numbers: the norm becomes 0, and nothing is clipped.
        Specimen("Gram cancellation", lambda n: linear(n + 1), _contrasts, lambda y, _: y[:, 0, 0] - y[:, 1, 0]),
        # The sum is divided by the size that the batch happens to have, which one example changes for all.
        Specimen("actual batch size", linear, _one_hot, expects_actual=True),
    )
