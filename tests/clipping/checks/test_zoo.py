"""The bug zoo: what Opacus does, what plpkg does, what notices; and that nothing notices where nothing is wrong."""

import math

import pytest
import torch
from torch import nn

from plpkg.clipping import clipped_gradients
from plpkg.clipping.checks import zoo as module
from plpkg.clipping.checks.audit import epsilon_lower_bound
from plpkg.clipping.checks.cases import Case, gradient
from plpkg.clipping.checks.conformance import DELTA
from plpkg.clipping.checks.sensitivity import check_sensitivity
from plpkg.clipping.checks.specimens import MAX_GRAD_NORM, MICRO_BATCH, specimens
from plpkg.clipping.checks.trial import Trial
from plpkg.clipping.checks.zoo import examine, opacus

from rounding import assert_close, relative, sampling_error

CHECKED, CANARIES = 2 * MICRO_BATCH + 1, 200
ADDED = 1e-6  # Opacus clips by C / (norm + this)

WORST = {  # how far one example moves Opacus's update, in C, by hand
    "functional tie": 2.0,  # both halves of the gradient are clipped as if there were one
    "dropped micro-batches": math.sqrt(1 + MICRO_BATCH),  # the last piece of one gives way to a full one
    "padding_idx": 1 / math.sqrt(1 + 3**2),  # three pads add up in a row that is not learnt
    "stale norms": 1 / math.sqrt(2),  # two layers' norms, one layer's gradient
    "Gram cancellation": 10.0,  # a gradient of length 1, untouched
    "actual batch size": CHECKED // 2,  # the expected size, divided by one
    "mixing on the way back": 10.0,  # the hook gives ±1 for one alone, whatever it was clipped to
    "replayed noise": 1.0,  # the sum is right
}
CAUGHT = {
    "functional tie": ("parity", "sensitivity", "Gaussian audit"),
    "dropped micro-batches": ("parity", "sensitivity"),
    "loss over the batch's tokens": ("parity", "sensitivity"),
    "BatchNorm": ("sensitivity",),
    "BatchNorm, frozen": ("sensitivity",),
    "padding_idx": ("parity",),
    "stale norms": ("parity",),
    "Gram cancellation": ("parity", "sensitivity", "Gaussian audit"),
    "mixing on the way back": ("parity", "sensitivity", "Gaussian audit"),
    "actual batch size": ("parity", "sensitivity"),
    "replayed noise": ("Gaussian audit",),
}
OURS = {
    "functional tie": "refuses: tokens.weight: used outside of the layer that owns it",
    "loss over the batch's tokens": "refuses: examples are mixed: beside other examples the same one has another loss",
    "BatchNorm": "refuses: norm (BatchNorm1d) normalises each example by the others",
    "BatchNorm, frozen": "refuses: norm (BatchNorm1d) normalises each example by the others",
    "mixing on the way back": "refuses: examples are mixed on the way back",
}


@pytest.fixture(scope="module")
def whole_zoo():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "CHECKED", CHECKED)
        patched.setattr(module, "CANARIES", CANARIES)
        return module.zoo()


def test_what_notices(whole_zoo):
    """At 200 canaries guesses notice nothing, not even ten times the sensitivity; the scores do, and twice of it."""
    assert {finding.case.name: finding.caught_by for finding in whole_zoo.findings} == CAUGHT
    assert repr(whole_zoo) == "Zoo(11 bugs; caught by parity 8, sensitivity 8, audit 0, Gaussian audit 4)"


def test_how_far_one_example_moves_opacus(whole_zoo):
    worst = {finding.case.name: finding.sensitivity.worst for finding in whole_zoo.findings}
    assert {bug: worst[bug] for bug in WORST} == pytest.approx(WORST, rel=ADDED / MAX_GRAD_NORM + relative(CHECKED))
    assert min(worst[bug] for bug in worst.keys() - WORST.keys()) > 1.5


def test_plpkg_is_exact_or_refuses(whole_zoo):
    for finding in whole_zoo.findings:
        assert finding.ours.startswith(OURS.get(finding.case.name, "exact"))


def test_the_definition_gets_the_tie_right():
    """What book-keeping refuses, the loop computes."""
    tie = specimens(5)[0]
    model = tie.build()

    def loss(model, batch):
        return tie.criterion(model(*batch[0]), batch[1])

    def step(part):
        return clipped_gradients(model, loss, part, MAX_GRAD_NORM, "loop")[0]

    rounding = relative(2 * model.tokens.weight.numel() + 5)  # two norms, a sum over the batch
    assert check_sensitivity(step, tie.batch, MAX_GRAD_NORM).worst == pytest.approx(1, rel=rounding)


def test_nothing_notices_where_nothing_is_wrong():
    def healthy(count):
        def model():
            return nn.Linear(count, 1, bias=False)

        batch = (torch.eye(count),), torch.zeros(count)
        return Case("healthy", model, batch, lambda y, _: y[:, 0], max_grad_norm=MAX_GRAD_NORM)

    finding = examine(healthy(CHECKED), healthy(1_000))
    assert finding.caught_by == ()
    rounding = ADDED + relative(CHECKED)  # of each gradient, all of length 1, at right angles
    assert finding.parity == pytest.approx(0, abs=rounding * math.sqrt(CHECKED))
    assert finding.sensitivity.worst == pytest.approx(1, rel=rounding)
    assert finding.claimed == pytest.approx(4.377, abs=5e-4)
    for audit, mean, deviation in ((finding.audit, 1.53, 0.24), (finding.gaussian, 3.82, 0.35)):
        # Means and deviations of a thousand audits of such a mechanism.
        assert mean - sampling_error(deviation**2, 1) < audit.epsilon < finding.claimed
    assert (finding.opacus, finding.ours) == (None, "exact")
    assert repr(finding) == "Finding(healthy: caught by nothing)"


def test_sparse_bugs_need_many_canaries_and_strong_ones():
    """The audit's bound grows with the number of canaries; ten times the sensitivity is at the edge with 1,000."""
    two, few, many = (next(case for case in specimens(n) if case.name == "Gram cancellation") for n in (2, 50, 1_000))
    few, many = (examine(two, canaries) for canaries in (few, many))
    claimed, few, many = few.claimed, few.audit, many.audit

    def all_right(guesses, audit):
        confidence = 1 - 0.05 / len(audit.attempts)
        return epsilon_lower_bound(guesses, guesses, audit.canaries, DELTA, confidence)

    assert few.epsilon <= all_right(50, few) < claimed < all_right(500, many) <= many.epsilon
    assert many.attempts[-2].correct == many.attempts[-2].guesses == 500


def test_the_table(whole_zoo):
    frame = whole_zoo.to_frame()
    assert list(frame.columns) == [
        "bug", "lesson", "Opacus", "plpkg", "parity (C)", "one example moves (C)", "audited ε (claimed 4.38)",
        "audited ε, normal scores", "caught by",
    ]  # fmt: skip
    assert len(frame) == len(specimens(2)) + 1 == 11
    said = frame.set_index("bug")["Opacus"]
    assert said["BatchNorm"] == "refuses: BatchNorm cannot support training with differential privacy"
    assert set(said.drop("BatchNorm")) == {"runs"}
    assert "no reference" in whole_zoo._repr_html_()
    shown = frame.drop(columns="caught by").round(1)
    assert "can" + "not be told apart; call the layer, or use execution=" in shown._repr_html_()
    for lesson in (finding.case.lesson for finding in whole_zoo.findings):
        assert lesson.endswith(".")
        assert lesson in repr(shown[["bug", "lesson"]])
        assert lesson in shown._repr_html_()


def test_examples_are_canaries():
    """Each pulls in its own direction: orthogonal, and further than C."""
    for case in specimens(6):
        if "BatchNorm" in case.name:
            continue  # the shared feature is what gives it away
        (inputs,), target = case.batch
        rows = [gradient(case, ((inputs[i : i + 1],), target[i : i + 1])) for i in range(6)]
        vectors = torch.stack([torch.cat([g.flatten() for g in row.values()]) for row in rows])
        gram = vectors @ vectors.T
        assert (gram.diagonal().sqrt() > MAX_GRAD_NORM).all()
        assert_close(gram, gram.diagonal().diag(), terms=vectors.shape[1])


def test_the_same_each_time_and_nobody_else_s_random_numbers():
    before = torch.get_rng_state()
    for case in specimens(4):
        once, again = (Trial(opacus, case).step(case.batch) for _ in range(2))
        for name, update in once.items():
            torch.testing.assert_close(update, again[name], rtol=0, atol=0)
    assert torch.equal(before, torch.get_rng_state())


def test_who_takes_a_model_that_mixes_examples_is_wrong(monkeypatch):
    monkeypatch.setattr(module, "_deviation", lambda case, update: None)  # the definition refuses it
    (case,) = [case for case in specimens(CHECKED) if case.name == "padding_idx"]
    assert module._verdict(case) == "wrong: it takes a model that mixes examples"
