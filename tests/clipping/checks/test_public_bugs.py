"""Bugs that users of libraries have met, as conformance finds them.

What Opacus 1.6 still does is run as it is; what it has repaired is put back in a few lines, as it was. Numbers are
those of issues and pull requests of meta-pytorch/opacus.

* #707, repaired: with ghost clipping, the first of several micro-batches was kept by reference, and overwritten.
* #792, repaired: ghost clipping's mean over tokens counted those of the ignored class.
* #664, repaired: the engine did not pass C on to ghost clipping, which took 1.
* #820: an optimizer of parameters that are no longer the model's learns nothing. The report needs a GPU. Where they are
  replaced, 1.6 refuses or breaks; where a moved copy is trained, it says nothing, and a loop by hand never does.
* #841, holds: position ids of one row for the whole batch. Clipped flat, 1.6 stops with a message of torch.stack; per
  layer it trains on, and takes the batch for one example.
* Functional ties, hold: the head is the embedding's weight, by way of a function. Hooks miss half of the gradient,
  ghost clipping misses it in the norm.
* #683, holds: several backward() before a step() of ghost clipping.
* Without a number, hold: the padding's row learns (hooks, expanded weights) or is in the norm (ghost); a frozen
  BatchNorm in training mode mixes examples in every mode.
* #692 (ghost clipping learns less than hooks, also without noise): only the symptom is reproduced, by #707, which was
  repaired after it. In 1.6 both conform on ordinary models (:mod:`test_setups`).
"""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping, DPTensorFastGradientClipping
from torch import nn
from torch.nn import functional

from plpkg.clipping.checks.cases import Case
from plpkg.clipping.checks.conformance import conformance
from plpkg.clipping.checks.ordinary import HIDDEN, SEQ, VOCABULARY, next_token_loss, ordinary
from plpkg.clipping.checks.specimens import specimens

from trainings import by_hand, opacus, ours, quiet

ORDINARY = {case.name: case for case in ordinary()}
IDS = torch.randint(VOCABULARY, (4, SEQ), generator=torch.Generator().manual_seed(1))


def ghost(
    optimizer_class=DPOptimizerFastGradientClipping, loss_class=DPLossFastGradientClipping, *, whole=False, norm=0
):
    """Opacus's ghost clipping from its parts, to put one back as it was."""

    def train(model, optimizer, criterion, steps, *, max_grad_norm, **options):
        private = GradSampleModuleFastGradientClipping(model, max_grad_norm=norm or max_grad_norm)
        optimizer = optimizer_class(optimizer, max_grad_norm=max_grad_norm, **options)
        criterion = loss_class(private, optimizer, criterion)
        with quiet():
            for step in steps:
                for place, (inputs, target) in enumerate(step, start=1):
                    output = private(*inputs)
                    shape = {"shape": output.shape} if output.ndim == 3 else {}
                    criterion(output, target, **shape).backward()
                    last = place == len(step)
                    if last or not whole:
                        optimizer.signal_skip_step(do_skip=not last)
                        optimizer.step()
                        optimizer.zero_grad()

    return train


class Referring(DPOptimizerFastGradientClipping):
    """As before #707."""

    def accumulate(self):
        for p in self.params:
            if p.summed_grad is not None:
                p.summed_grad += p.grad
            else:
                p.summed_grad = p.grad


class Counting(DPLossFastGradientClipping):
    """As before #792."""

    def __call__(self, output, target, shape):
        self.criterion.reduction = "none"
        losses = self.criterion(output, target).view(shape[:2]).mean(1)
        self.criterion.reduction = "mean"
        return DPTensorFastGradientClipping(self.module, self.optimizer, losses, "mean")


class TokenLoss(nn.CrossEntropyLoss):
    """Of logits (batch, seq, vocabulary), as users of Opacus flatten them."""

    def forward(self, logits, targets):
        return super().forward(logits.flatten(0, 1), targets.flatten())


class Broadcast(nn.Module):
    """Positions of one row for all examples, or of one for each."""

    def __init__(self, *, expand=False):
        super().__init__()
        self.expand = expand
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)  # as a layer's only parameter in Opacus's per_layer, too

    def forward(self, ids):
        places = torch.arange(ids.shape[1])[None].repeat(len(ids) if self.expand else 1, 1)
        return self.head(torch.tanh(self.tokens(ids) + self.places(places)))


class Tied(nn.Module):
    """A head with the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.tokens, self.layer = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids):
        return functional.linear(torch.tanh(self.layer(self.tokens(ids))), self.tokens.weight)


def padded():
    """Texts of which the second half of the targets, in one text all but one, is ignored."""
    targets = IDS.clone()
    targets[:, SEQ // 2 :] = -100
    targets[0, 1:] = -100
    return Case("padded targets", ORDINARY["transformer"].model, ((IDS,), targets), TokenLoss())


BROADCAST = Case("broadcast positions", Broadcast, ((IDS,), IDS), next_token_loss)
TIED = Case("functional tie", Tied, ((IDS,), IDS), next_token_loss)


def of(train, case, **options):
    """What comes out of one case."""
    (outcome,) = conformance(train, [case], **options).outcomes
    return outcome


@pytest.mark.parametrize("train", [ghost(Referring), ghost(whole=True)], ids=["#707", "#683"])
def test_micro_batches(train):
    """Kept by reference; or several backward() before a step."""
    found = of(train, ORDINARY["micro-batches"])
    assert "in one batch instead of micro-batches of 2 it is right" in found.breaches["sums"]
    assert of(ghost(), ORDINARY["micro-batches"]).verdict == "conforms"


def test_ignored_targets_in_the_mean():
    """#792; and with hooks, an example's loss is divided by the targets of all."""
    found = of(ghost(loss_class=Counting), padded())
    assert "from the sum of the clipped gradients" in found.breaches["sums"]
    assert of(ghost(), padded()).verdict == "conforms"
    assert {"sums", "sensitivity"} <= of(opacus("hooks"), padded()).breaches.keys()


def test_another_norm():
    """#664."""
    assert {"sums", "sensitivity"} <= of(ghost(norm=10.0), ORDINARY["perceptron"]).breaches.keys()


def move(model):
    """What a conversion does that makes new parameters (torch.__future__.set_overwrite_module_params_on_conversion)."""
    for layer in (model.down, model.up):
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    return model


def moved_before(model, *others, mode, **options):
    """Before the engine sees the model."""
    opacus(mode)(move(model), *others, **options)


def moved_between(model, *others, mode, **options):
    """Afterwards, as a device is found at the first batch."""
    hook = model.register_forward_pre_hook(lambda model, args: (hook.remove(), move(model), None)[-1])
    opacus(mode)(model, *others, **options)


def moved_copy(model, _, *others, mode, **options):
    """A copy is trained, and the model returned as it was."""
    model = copy.deepcopy(model)
    learning = [p for p in model.parameters() if p.requires_grad]
    opacus(mode)(model, torch.optim.SGD(learning, lr=0.0), *others, **options)


REPLACED = {
    moved_before: "Module parameters are different than optimizer Parameters",
    moved_between: "stops with AttributeError: 'Parameter' object has no attribute '_forward_counter'",
    moved_copy: "1 samples were given, and 0 steps of an optimizer change this model by a gradient",
}


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("moved", REPLACED)
def test_parameters_replaced_after_the_optimizer_was_made(moved, mode):
    """#820: Opacus refuses, breaks, and says nothing."""
    found = of(partial(moved, mode=mode), ORDINARY["LoRA"])
    assert REPLACED[moved] in found.sentences[0]
    assert found.verdict == ("refuses" if moved is moved_before else "breach")


def test_parameters_replaced_where_nobody_looks():
    """#820 as it was reported, without a word; in a loop by hand."""

    def train(model, optimizer, criterion, steps, **options):
        by_hand()(move(model), optimizer, criterion, steps, **options)

    found = of(train, ORDINARY["LoRA"])
    assert list(found.breaches) == ["learns"]
    assert found.breaches["learns"].startswith("down.weight (and 1 more) learns, but is not among what the optimizer")


@pytest.mark.parametrize("mode", ["hooks", "ghost", "functorch", "ew"])
def test_positions_of_one_row(mode):
    """#841, where it stops."""
    found = of(opacus(mode), BROADCAST)
    assert found.verdict == "refuses"
    assert ("batch size" if mode == "ew" else "stack expects each tensor to be equal size") in found.refusals["learns"]
    assert of(ours(), BROADCAST, checks=["sums"]).verdict == "conforms"


def test_positions_of_one_row_clipped_per_layer():
    """#841, where it goes on."""
    found = of(opacus("hooks", "per_layer"), BROADCAST, clipping="per_layer")
    assert "farthest in places.weight" in found.breaches["sums"]
    expanded = replace(BROADCAST, model=lambda: Broadcast(expand=True))
    assert of(opacus("hooks", "per_layer"), expanded, clipping="per_layer").verdict == "conforms"


@pytest.mark.parametrize(
    ("mode", "checks"),
    [("hooks", {"sums"}), ("functorch", {"sums"}), ("ghost", {"sums", "sensitivity"}), ("ew", set())],
)
def test_a_functional_tie(mode, checks):
    """Expanded weights get it right: each use of the weight is an operation of its own."""
    assert of(opacus(mode), TIED).breaches.keys() == checks
    assert "used outside of the layer" in of(ours(), TIED).refusals["learns"]


@pytest.mark.parametrize(
    ("mode", "padding"), [("hooks", "breach"), ("ghost", "breach"), ("ew", "breach"), ("functorch", "conforms")]
)
def test_padding_and_frozen_batch_norm(mode, padding):
    zoo = {case.name: case for case in specimens(5)}
    assert of(opacus(mode), zoo["padding_idx"], checks=["sums"]).verdict == padding
    assert {"sums", "sensitivity"} <= of(opacus(mode), zoo["BatchNorm, frozen"]).breaches.keys()
