"""No false alarm: trainings that are right, on models that they support."""

import pytest
import torch

from plpkg.clipping.checks.conformance import CHECKS, conformance
from plpkg.clipping.checks.ordinary import ordinary
from plpkg.clipping.execution import EXECUTIONS

from trainings import by_hand, opacus, ours, trainer

CASES = {case.name: case for case in ordinary()}


def adam(train):
    """With another optimizer than SGD."""

    def with_adam(model, optimizer, *others, **options):
        return train(model, torch.optim.Adam(optimizer.param_groups[0]["params"], lr=0.0), *others, **options)

    return with_adam


SETUPS = [
    ("Opacus, hooks", opacus("hooks"), "perceptron"),
    ("Opacus, hooks", opacus("hooks"), "convolution"),
    ("Opacus, hooks", opacus("hooks"), "micro-batches"),
    ("Opacus, hooks, Adam", adam(opacus("hooks")), "LoRA"),
    ("Opacus, ghost", opacus("ghost"), "perceptron"),
    ("Opacus, ghost", opacus("ghost"), "transformer"),
    ("Opacus, ghost", opacus("ghost"), "micro-batches"),
    ("Opacus, ghost, Adam", adam(opacus("ghost")), "PrivateLoRA"),
    ("Opacus, functorch", opacus("functorch"), "perceptron"),
    ("Opacus, functorch", opacus("functorch"), "LoRA"),
    ("Opacus, expanded weights", opacus("ew"), "transformer"),
    ("Opacus, expanded weights", opacus("ew"), "second step"),
    ("by hand", by_hand(), "perceptron"),
    ("by hand", by_hand(), "transformer"),
    ("by hand, Adam", adam(by_hand()), "convolution"),
    ("transformers.Trainer", trainer, "LoRA"),
    *(("plpkg", ours(execution=execution), case) for execution, case in zip(EXECUTIONS, CASES, strict=False)),
    ("plpkg, Adam", adam(ours()), "transformer"),
    ("plpkg", ours(), "LoRA"),
    ("plpkg", ours(), "PrivateLoRA"),
]


@pytest.mark.parametrize(("what", "train", "case"), SETUPS, ids=[f"{what}, {case}" for what, _, case in SETUPS])
def test_no_false_alarm(what, train, case):
    report = conformance(train, [CASES[case]])
    assert report.ok, report.rows()
    assert not report.outcomes[0].refusals


@pytest.mark.parametrize("clipping", ["automatic", "per_layer"])
def test_other_clippings(clipping):
    """Each by its own rule, and not by another's."""
    case = CASES["transformer"]
    assert conformance(ours(clipping=clipping), [case], clipping=clipping).ok
    assert conformance(ours(clipping=clipping), [case]).outcomes[0].breaches.keys() == {"sums"}


def test_opacus_clips_each_parameter_where_we_clip_each_layer():
    """Its sum is another; nothing else is to be said against it."""
    (found,) = conformance(opacus("hooks", "per_layer"), [CASES["perceptron"]], clipping="per_layer").outcomes
    assert found.breaches.keys() == {"sums"}
    assert conformance(opacus("hooks", "per_layer"), [CASES["perceptron"]], checks=CHECKS.keys() - {"sums"}).ok
