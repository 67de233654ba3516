"""Conformance: each fault is found by the check that is for it, ten of ten of the zoo, and what a report shows."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from plpkg import clipping
from plpkg.clipping.checks import conformance as module, zoo
from plpkg.clipping.checks.cases import Case, Losses, gradient
from plpkg.clipping.checks.conformance import CHECKS, USERS_OWN, ZOO_EXAMPLES, Report, cases, conformance
from plpkg.clipping.checks.ordinary import ordinary
from plpkg.clipping.checks.specimens import specimens
from plpkg.clipping.checks.trial import NOISE_MULTIPLIER, Trial

from trainings import by_hand, opacus

PERCEPTRON, MICRO, SECOND = ordinary()[:3]
LATER = CHECKS.keys() - {"learns"}


FAULTS = [
    ("replaced", PERCEPTRON, {"learns": "2.bias (and 1 more) learns, but is not among what the optimizer steps"}),
    ("forgotten", PERCEPTRON, {"learns": "2.bias learns, but is not among what the optimizer steps"}),
    ("crashes", PERCEPTRON, {"learns": "the training stops with KeyError: 'a slip', which is no refusal"}),
    ("never ready", PERCEPTRON, {"sums": "1 samples were given, and 0 steps of an optimizer change this model"}),
    ("restless", PERCEPTRON, {"sums": "is another when it is run again", "sensitivity": "", "noise": ""}),
    ("not a number", PERCEPTRON, dict.fromkeys(LATER, "step gave an update that is not finite")),
    ("unlearnt", PERCEPTRON, {"learns": "0.weight gets no gradient, and the examples' clipped ones add up to",
                              "sums": "farthest in 0.weight",
                              "noise": "the noise of 0.weight has the standard deviation 0 σC instead of σC"}),
    ("drops micro-batches", MICRO, {"sums": "; in one batch instead of micro-batches of 2 it is right",
                                    "sensitivity": "example 4 moves the update by"}),
    ("five times", PERCEPTRON, {"sums": ": it is 5 times that sum", "sensitivity": "the update by 5 C",
                                "audit": "shows ε ≥ "}),
    ("actual batch size", PERCEPTRON, {"sums": ": it is 0.4 times that sum", "sensitivity": "by 2 C alone",
                                       "noise": "of 0.weight has"}),
    ("same noise", PERCEPTRON, {"noise": "one step is correlated with that of the next", "audit": "shows ε ≥ "}),
    ("a fixed seed", PERCEPTRON, {"noise": "a second training draws the noise of the first (a fixed seed?)"}),
    ("little noise", PERCEPTRON, {"noise": "the noise of 0.weight has the standard deviation 0."}),
    ("quiet bias", PERCEPTRON, {"noise": "the noise of 0.bias has the standard deviation 0 σC instead of σC"}),
    ("uniform noise", PERCEPTRON, {"noise": "the noise is not normal"}),
    ("noise of two values", PERCEPTRON, {"noise": "the noise is not normal"}),
    ("noise of one length", PERCEPTRON, {"noise": "the noise of different steps differs in size more, or less"}),
    ("noise that comes and goes", PERCEPTRON, {"noise": "the noise is"}),
    ("one row of noise", PERCEPTRON, {"noise": ""}),
    ("one seed for all parameters", PERCEPTRON, {"noise": "two numbers of the noise are correlated in all steps, 1"}),
    ("noise of the step before last", PERCEPTRON, {"noise": "the noise of two steps is correlated, 1"}),
    ("none for nobody", PERCEPTRON, {"noise": "the noise of 0.weight of an empty sample has the standard dev"}),
    ("never forgets", SECOND, {"sums": "without the step before it is right", "sensitivity": "", "noise": ""}),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "case", "sentences"), FAULTS)
def test_each_fault_by_its_check(fault, case, sentences):
    (outcome,) = conformance(by_hand(fault), [case]).outcomes
    assert outcome.breaches.keys() == sentences.keys()
    for check, sentence in sentences.items():
        assert sentence in outcome.breaches[check]


@pytest.mark.parametrize("afterwards", ["", "a penalty after the noise", "an average of noisy gradients"])
def test_what_is_done_to_noisy_updates_is_no_breach(afterwards):
    report = conformance(by_hand(afterwards), [PERCEPTRON, MICRO])
    assert report.ok, report.outcomes


def test_ten_of_ten_of_the_zoo():
    """Under Opacus's ghost clipping, past its refusals; under plpkg what no library can know, and nothing else."""
    bugs = specimens(ZOO_EXAMPLES)
    assert conformance(zoo.opacus, bugs).breached == tuple(case.name for case in bugs)
    report = conformance(zoo.ours, bugs)
    assert report.breached == ("actual batch size",)
    mixed = {"loss over the batch's tokens", "BatchNorm", "BatchNorm, frozen", "mixing on the way back"}
    mixing = [case for case in bugs if case.name in mixed]
    # A look at the longest of 17 texts, among copies of another, sees nothing: the sum of all tokens is as it was
    reports = [report, *(conformance(zoo.ours, mixing) for _ in range(8))]
    outcomes = [outcome for each in reports for outcome in each.outcomes]
    assert {each.case.name for each in outcomes if each.verdict == "refuses"} == {"functional tie", *mixed}


def test_users():
    """Two of three examples each, and one of one: clipped together, or each example by itself."""
    rows, users = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 0, 1, 2])
    batch = (rows,), torch.ones(7)
    case = Case("users", lambda: nn.Linear(4, 1), batch, lambda y, t: (y[:, 0] - t) ** 2, users=users)
    assert conformance(by_hand(), [case]).ok
    (outcome,) = conformance(by_hand("clips examples"), [case]).outcomes
    assert outcome.breaches.keys() >= {"sums", "sensitivity"}
    assert outcome.breaches["sensitivity"].startswith("user 0 moves the update by ")


class Squeezed(nn.Sequential):
    def forward(self, x):
        return super().forward(x).squeeze()


def test_an_example_alone():
    """A squeeze() too much."""
    batch = (torch.ones(2, 4),), torch.tensor([0, 1])
    case = Case("squeezed", lambda: Squeezed(nn.Linear(4, 3)), batch, nn.CrossEntropyLoss())
    (outcome,) = conformance(opacus("hooks"), [case]).outcomes
    assert outcome.breaches["learns"].startswith("one example alone, as a Poisson sample may be, stops the model: ")
    assert conformance(by_hand("refuses"), [case]).outcomes[0].verdict == "refuses"


def test_refusals_and_what_they_say():
    (outcome,) = (report := conformance(by_hand("refuses"), [PERCEPTRON])).outcomes
    assert (outcome.verdict, outcome.refusals) == ("refuses", {"learns": "this is not for you"})
    assert not report.ok  # nothing was seen to be right
    assert repr(report) == "Report(1 cases: 0 conform, 1 refused, 0 fail)"
    assert conformance(by_hand(), [PERCEPTRON, MICRO], checks=["learns"]).ok


def test_a_report():
    lesson = "It is halved, for this and that reason, in a sentence that no table of fifty letters could show."
    case = replace(PERCEPTRON, name="mine", lesson=lesson)
    report = conformance(by_hand("quiet bias"), [PERCEPTRON, case], checks=["noise"])
    assert repr(report) == "Report(2 cases: 0 conform, 0 refused, 2 fail (perceptron; mine))"
    what = "noise: the noise of 0.bias has the standard deviation 0 σC instead of σC"
    row = {"case": "mine", "verdict": "breach", "found by": "noise", "what": what, "lesson": lesson}
    assert report.rows()[1] == row
    assert lesson in repr(report.to_frame()[["lesson"]])


def test_the_usual_cases():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) == 15
    assert not {*USERS_OWN} & {*names}


def test_the_definition():
    """Examples alone, about half of them clipped; a sum stays a sum."""
    trial, together = Trial(by_hand(), PERCEPTRON), gradient(PERCEPTRON, PERCEPTRON.batch)
    norms = torch.stack([rows.flatten(1).norm(dim=1) for rows in trial.gradients.values()]).norm(dim=0)
    assert trial.max_grad_norm == norms.median().item()
    factors = (trial.max_grad_norm / norms).clamp(max=1)
    for name, rows in trial.gradients.items():
        torch.testing.assert_close(trial.wanted[name], torch.tensordot(factors, rows, 1))
        torch.testing.assert_close(rows.mean(0).float(), together[name])


def test_a_criterion_in_the_shape_of_a_loss_module():
    losses = Losses(lambda output, target: output - target)
    assert losses.reduction == "mean"
    for reduction, expected in (("mean", 3), ("sum", 6), ("none", [2, 4])):
        losses.reduction = reduction
        assert losses(torch.tensor([3.0, 5.0]), torch.ones(2)).tolist() == expected


def test_a_sum_is_not_divided():
    def train(model, optimizer, criterion, steps, *, expected_batch_size, **options):
        by_hand()(model, optimizer, criterion, steps, expected_batch_size=1.0, **options)

    case = replace(PERCEPTRON, criterion=nn.CrossEntropyLoss(reduction="sum"))
    assert conformance(train, [case]).ok


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as schedulers and the like have them: two steps in one."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_around_the_optimizer():
    def train(model, optimizer, *given, **options):
        by_hand()(model, Around(optimizer), *given, **options)

    assert conformance(train, [PERCEPTRON], checks=["sums"]).ok


def test_noise_is_the_optimizer_s():
    """Seen as it is released, times the expected batch size."""
    trial = Trial(by_hand(), PERCEPTRON)
    noisy = trial.run([PERCEPTRON.batch], NOISE_MULTIPLIER)[0]
    assert all((noisy[name] != update).all() for name, update in trial.update.items())


def test_hooks_are_taken_away():
    before = len(_global_optimizer_post_hooks)
    conformance(by_hand("crashes"), [PERCEPTRON])
    assert len(_global_optimizer_post_hooks) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(checks=["parity"]), "checks must be of learns, sums, sensitivity, noise, audit, got 'parity'"),
        (
            dict(cases=[replace(PERCEPTRON, batch=((torch.full((2, 6), math.nan),), torch.ones(2).long()))]),
            "the case 'perceptron' cannot be tried: its gradients are not finite",
        ),
        (dict(clipping="global"), "clipping must be one of 'flat', 'automatic', 'per_layer', got 'global'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        conformance(by_hand(), **options)


@pytest.mark.parametrize("wrong", [dict(micro_batch=-1), dict(max_grad_norm=-1.0), dict(users=[math.nan] * 5)])
def test_a_case_that_nothing_can_be_tried_on(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*(-1|nan)"):
        replace(PERCEPTRON, **wrong)


def test_the_front_door():
    assert clipping.conformance is module
    assert isinstance(clipping.conformance.conformance(by_hand(), [PERCEPTRON], checks=["learns"]), Report)
