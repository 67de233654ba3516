"""The losses of a Hugging Face model, one an example."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plpkg.clipping.batches import CheckedLosses, examples
from plpkg.clipping.dropout import Without, untouched
from plpkg.clipping.guard.probe import without_gradients


class OwnLosses(CheckedLosses):
    """The loss that a Hugging Face model computes itself from ``labels``, an example at a time.

    The model's own is the mean over the labels of all examples, so that an example's weight depends on the others'
    lengths. Here each example's is the mean over its own labels; 0 where it has none.

    Raises
    ------
    ValueError
        The model has no such loss.
    """

    def __init__(self, model: nn.Module) -> None:
        if not callable(getattr(model, "loss_function", None)):
            raise ValueError(
                f"losses=None takes the own loss of a Hugging Face model, and {type(model).__name__} has none: give "
                "losses(model, batch), which gives one loss an example"
            )
        self._compared = False

    def __call__(self, model: nn.Module, batch: Mapping) -> torch.Tensor:
        """``(batch,)``.

        Raises
        ------
        ValueError
            There are no labels, or the model's loss is another one.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            raise ValueError("losses=None takes the model's own loss, of batches with labels: give losses")
        inputs = {name: value for name, value in batch.items() if name != "labels"}  # else it makes one loss of all
        logits = model(**inputs, return_dict=True).logits
        losses = []
        for example in range(len(labels)):
            alone = slice(example, example + 1)
            losses.append(_loss(model, logits[alone], labels[alone]))
        return torch.stack(losses)

    def check(self, model: nn.Module, batch: Mapping) -> None:
        """Compare with the model's own loss of one example, before the first step.

        Raises
        ------
        ValueError
            It is another one.
        """
        if self._compared or not isinstance(batch.get("labels"), torch.Tensor):
            return
        alone = examples(batch, slice(0, 1), of=len(batch["labels"]))
        with untouched(), without_gradients(), Without():
            output = model(**alone, return_dict=True)
            own = output.loss.nan_to_num()  # the mean of no labels is 0/0
            ours = _loss(model, output.logits, alone["labels"])
        self._compared = True
        rounding = 16 * max(torch.finfo(output.logits.dtype).eps, torch.finfo(torch.float32).eps)
        if not torch.allclose(own, ours.to(own), rtol=rounding, atol=1e-6):
            raise ValueError(
                f"the loss of {type(model).__name__} for one example is {own.item():.6g}, and not the "
                f"{ours.item():.6g} of its loss function for logits and labels (a router's term, say): give losses"
            )


@dataclass(frozen=True)
class Within(CheckedLosses):
    """A losses function that is called within a context: autocast, say."""

    losses: Callable
    context: Callable[..., AbstractContextManager]

    def __call__(self, model: nn.Module, batch) -> torch.Tensor:
        with self.context():
            return self.losses(model, batch)

    def check(self, model: nn.Module, batch) -> None:
        """As the losses function would."""
        if isinstance(self.losses, CheckedLosses):
            with self.context():
                self.losses.check(model, batch)


def _loss(model: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A model's loss function of one example; 0 where no label counts, whose mean is 0/0."""
    sizes = dict(config=model.config, vocab_size=getattr(model.config, "vocab_size", None))
    loss = model.loss_function(logits=logits, pooled_logits=logits, labels=labels, **sizes)
    return 0 * logits.sum() if loss.isnan() else loss  # 0 that depends on the model, as a loss must
