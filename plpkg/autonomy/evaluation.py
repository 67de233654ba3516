"""How well a model predicts labels."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plpkg.autonomy.nets import logits
from plpkg.corpora.examples import IGNORED, Examples
from plpkg.results import Tabular
from plpkg.training_loop import evaluating


@dataclass(frozen=True)
class Evaluation(Tabular):
    """How well a model predicts labels.

    Attributes
    ----------
    loss
        The mean of ``-ln p`` of the labels, in nats.
    accuracy
        The share of labels that are the model's first choice.
    labels
        How many there are.
    """

    loss: float
    accuracy: float
    labels: int

    def rows(self) -> list[dict]:
        return [vars(self)]

    def __repr__(self) -> str:
        return f"Evaluation(loss {self.loss:.4f} nats, accuracy {self.accuracy:.4f}, {self.labels:,} labels)"


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples) -> Evaluation:
    """The loss and accuracy of a model on examples; each of its modules is left in the mode in which it was.

    Raises
    ------
    ValueError
        No label to evaluate.
    FloatingPointError
        A loss that is not finite.
    """
    with evaluating(model):
        return evaluate_logits(lambda batch: logits(model, batch.x)[batch.y != IGNORED], examples)


def evaluate_logits(logits_of_labels: Callable[[Examples], torch.Tensor], examples: Examples) -> Evaluation:
    """As :func:`evaluate`, of a function that gives the logits ``(labels, classes)`` of a batch."""
    count = examples.labels
    if not count:
        raise ValueError(f"no label to evaluate in {examples}")
    loss = 0.0
    right = 0
    for batch in examples.chunks():
        predicted = logits_of_labels(batch).float()
        labels = batch.y[batch.y != IGNORED]
        loss += cross_entropy(predicted, labels, reduction="sum").item()
        right += int((predicted.argmax(-1) == labels).sum())
    if not math.isfinite(loss):  # the first choice among NaNs would be class 0, which may be right
        raise FloatingPointError(f"the loss on {examples} is {loss}: there is a number that is not finite")
    return Evaluation(loss / count, right / count, count)
