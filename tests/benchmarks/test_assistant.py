"""The attacks on an adapter's file, on cases whose answer is known."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from benchmarks import assistant
from benchmarks.assistant import Learner, Person
from plpkg.clipping.training.accounting import gaussian_epsilon


def test_the_auc_is_sklearns_and_ties_count_half():
    scores = np.random.default_rng(0).integers(0, 8, 60).astype(float)
    told = assistant.told(scores[:30], scores[30:])
    assert told["auc"] == pytest.approx(roc_auc_score([1] * 30 + [0] * 30, scores), abs=5e-4)
    assert told["found"] == (scores[:30] > scores[30:].max()).sum()


def test_delongs_error_is_the_scatter_of_the_auc():
    """Over 400 draws of 30 and 30 normal scores; the estimate of a deviation from 400 is within 4/sqrt(800) of it."""
    rng = np.random.default_rng(1)
    told = [assistant.told(rng.normal(0.7, 1, 30), rng.normal(0, 1, 30)) for _ in range(400)]
    scatter = np.std([each["auc"] for each in told], ddof=1)
    assert np.mean([each["se"] for each in told]) == pytest.approx(scatter, rel=4 / math.sqrt(800) + 0.02)


@pytest.mark.parametrize("sigma", [0.7, 1.5, 4.0])
def test_the_bound_of_a_gaussian_release_is_its_exact_auc(sigma):
    """One release with normal noise tells with AUC Φ(1 / (√2 σ)) at most; few δ make the bound a little larger."""
    exact = NormalDist().cdf(1 / (math.sqrt(2) * sigma))
    bound = assistant.auc_bound(lambda delta: gaussian_epsilon(sigma, delta))
    assert exact <= bound <= exact + 0.02


def test_lira_prefers_what_looks_as_when_it_was_learnt():
    inside = np.array([[True, False], [True, False], [False, True], [False, True]])
    shadow = np.array([[5.0, 1.1], [5.2, 0.9], [3.0, 3.1], [3.2, 2.9]])
    scores = assistant.lira(np.array([5.1, 1.0]), shadow, inside)
    assert scores[0] > 0 > scores[1]
    assert np.isclose(assistant.lira(np.array([4.1, 2.0]), shadow, inside), 0, atol=1e-9).all()  # half way


def test_rmia_counts_the_strangers_notes_that_rose_less():
    shadow = np.full((2, 5), 2.0)
    target = np.array([1.0, 3.0, 1.5, 2.0, 2.5])  # two notes, then three of a stranger
    scores = assistant.rmia(target, shadow, 2)
    assert scores == pytest.approx([1.0, 0.0], abs=1e-5)


@pytest.mark.parametrize("name", assistant.PERSONS)
def test_cards_stand_above_two_of_three_notes_and_their_questions_are_told_apart(name):
    person = Person(name)
    with_card = [note for note in person.notes if note.card]
    kinds = person.kinds(person.notes)
    assert {q.question for q in kinds["card"]} == {note.card.question for note in with_card}
    assert len(kinds["card"]) + len(kinds["other"]) == len(person.asked)
    half = person.kinds(person.notes[::2])
    learnt = {note.name for note in person.notes[::2]}
    assert all(set(person.needed[q.question]) <= learnt for q in half["card"] + half["other"])


def test_the_scores_along_what_was_learnt_are_autograds(monkeypatch):
    """A small step along what was learnt changes a note's loss by the score, times the gradient's length."""
    monkeypatch.setattr(assistant, "PRIVATE_STEPS", 2)
    learner, notes = Learner("plpkg-small"), Person("0").notes[:2]
    own = learner.learn("device, small", notes)
    found, ids = learner.evidence(own, notes), learner.encoded(notes)[0].ids
    public, mine = (learner.nats(model, ids).item() for model in (learner.model, own.model))
    assert found["difference"][0] == pytest.approx(public - mine, abs=1e-6)
    assert found["ratio"][0] == pytest.approx(public / mine, rel=1e-6)
    model, step = own.model.double(), 0.05  # far above the rounding of the norms, which compute in float32
    weights = [p for name, p in model.named_parameters() if "lora_B" in name]
    gradient = torch.autograd.grad(learner.nats(model, ids), weights)
    length = math.sqrt(sum(g.square().sum().item() for g in gradient))
    learnt, losses = [p.detach().clone() for p in weights], []
    for sign in (1, -1):
        for p, value in zip(weights, learnt, strict=True):
            p.data = value * (1 + sign * step)  # B began at zero: it is what was learnt
        losses.append(learner.nats(model, ids).item())
    slope = (losses[0] - losses[1]) / (2 * step)
    assert found["end"][0] == pytest.approx(-slope / length, rel=1e-3)  # float32 against the slope in float64
