"""Schemes are compared with what they are made of: one person's learning, a mean by hand, counts, batches counted."""

import sys

import pytest
import torch

from plpkg.autonomy import baselines
from plpkg.autonomy.evaluation import evaluate
from plpkg.autonomy.nets import logits
from plpkg.autonomy.transfer import transfer
from plpkg.corpora.examples import IGNORED, Examples, Person
from plpkg.ngrams import Counts
from tests.autonomy.conftest import VOCAB, images, learner, same, texts, values

from rounding import assert_close

STEPS = dict(steps=8, lr=0.05, batch=4, evaluate_every=2)
TERMS = torch.finfo(torch.float64).eps ** -0.5  # as in test_transfer.py
SCHEMES = {
    "public_only": lambda model, people, **settings: baselines.public_only(model, people),
    "personal": baselines.personal,
    "local_only": baselines.local_only,
    "cloud_train": baselines.cloud_train,
    "cloud_customize": baselines.cloud_customize,
    "fed_avg": lambda model, people, **settings: baselines.fed_avg(model, people, rounds=2, **settings),
    "fed_avg_tuned": lambda model, people, **settings: baselines.fed_avg_tuned(model, people, rounds=2, **settings),
}
LEARNT = [name for name in SCHEMES if name != "public_only"]


@pytest.fixture
def model():
    return learner("mobile")


@pytest.fixture
def people():
    """Three of them, of 8, 12 and 16 images, the first pixel of each saying whose it is."""
    made = {}
    for owner, name in enumerate("abc"):
        made[name] = Person(*(images(8 + 4 * owner, seed=10 * owner + k) for k in range(3)))
        for part in made[name]:
            part.x[:, 0, 0, 0] = owner
    return made


def assert_same(one, other):
    """Everybody has a model with the same bits."""
    assert one.keys() == other.keys()
    assert all(same(model.state_dict(), other[name].state_dict()) for name, model in one.items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_everybody_gets_a_model_that_the_seed_decides(scheme, model, people):
    before, chance = values(model), torch.get_rng_state()
    one, again, other = (SCHEMES[scheme](model, people, seed=seed, patience=None, **STEPS) for seed in (0, 0, 1))
    assert list(one) == list(people)
    assert torch.equal(torch.get_rng_state(), chance)
    assert_same(one, again)
    assert same(model.state_dict(), before)
    assert not any(module.training for each in one.values() for module in each.modules())
    if scheme == "public_only":
        assert all(each is model for each in (*one.values(), *other.values()))
    else:
        assert not all(torch.equal(one[name].head.weight, other[name].head.weight) for name in people)
    everybody_s = scheme in ("public_only", "cloud_train", "fed_avg")
    assert len({id(each) for each in one.values()}) == (1 if everybody_s else 3)
    without = {name: person._replace(validation=None) for name, person in people.items()}
    assert list(SCHEMES[scheme](model, without, **STEPS)) == list(people)


@pytest.mark.parametrize("scope", ["head", "all"])
def test_personal_is_each_alone(scope, model, people):
    alone = {name: transfer(model, p.train, p.validation, scope, **STEPS).model for name, p in people.items()}
    assert_same(baselines.personal(model, people, scope, **STEPS), alone)


def test_local_only_begins_with_the_same_new_weights(model, people, monkeypatch):
    begun = []
    monkeypatch.setattr(baselines, "transfer", lambda model, *rest, **settings: begun.append(model) or transfer(
        model, *rest, **settings))  # fmt: skip
    baselines.local_only(model, people, seed=3, **STEPS)
    assert len(begun) == 3
    assert all(same(values(each), values(begun[0])) for each in begun)
    for key, p in begun[0].named_parameters():
        assert p.unique().numel() <= 1 or not torch.equal(p, model.get_parameter(key))


def test_the_cloud_learns_everybody_s_data_and_customises_it(model, people):
    train, validation = (Examples.joined(getattr(p, part) for p in people.values()) for part in ("train", "validation"))
    pooled, half = (transfer(model, train, validation, "all", **STEPS | dict(batch=12, steps=n)).model for n in (8, 4))
    assert_same(baselines.cloud_train(model, people, **STEPS), dict.fromkeys(people, pooled))
    own = {n: transfer(half, p.train, p.validation, "all", **STEPS | dict(steps=4)).model for n, p in people.items()}
    assert_same(baselines.cloud_customize(model, people, **STEPS), own)


def test_one_person_and_one_round_are_that_person_s_learning(model, people):
    averaged = baselines.fed_avg(model, {"b": people["b"]}, rounds=1, patience=None, **STEPS)
    alone = transfer(model, people["b"].train, None, "all", patience=None, **STEPS).model
    assert_same(averaged, {"b": alone})


def test_the_mean_is_weighted_by_labels(model, people):
    del people["c"]
    state, options = None, STEPS | dict(scope="all", patience=None)
    for seed, steps in ((6, 3), (7, 4)):  # two rounds of seven steps, each of another order
        options |= dict(start=state, seed=seed, steps=steps)
        a, b = (transfer(model, p.train, None, **options).state for p in people.values())
        state = {key: (8 * a[key] + 12 * b[key]) / 20 for key in a}
    averaged = baselines.fed_avg(model, people, rounds=2, patience=None, seed=3, **STEPS | dict(steps=7))
    assert averaged["a"] is averaged["b"]
    found = averaged["a"].state_dict()
    for key, value in model.state_dict().items():
        if key in state:
            assert_close(found[key], state[key], TERMS)
        else:
            assert torch.equal(found[key], value)


def test_a_mean_of_words_counts_labels_not_samples():
    model, short, long = learner("lstm"), texts(6), texts(6, seed=1)
    short.y[:, 1:] = IGNORED
    long.y[:] = 3
    people = {"a": Person(short, short, short), "b": Person(long, long, long)}
    averaged = baselines.fed_avg(model, people, rounds=1, patience=None, **STEPS)["a"]
    a, b = (transfer(model, each, None, "all", **STEPS).state["head.weight"] for each in (short, long))
    assert_close(averaged.head.weight.detach(), (6 * a + 36 * b) / 42, TERMS)


def test_the_mean_that_was_best_counts(model, people):
    def loss(each):
        return sum(evaluate(each, p.validation).loss for p in people.values())

    settings = STEPS | dict(lr=0.5, steps=12)
    best, last = (baselines.fed_avg(model, people, rounds=4, patience=n, **settings)["a"] for n in (5, None))
    assert loss(best) <= min(loss(model), loss(last))
    wrong = {}  # to learn does harm
    for name, person in people.items():
        x, guess = person.train.x, logits(model, person.train.x).argmax(-1)
        wrong[name] = Person(Examples(x, (guess + 1) % 10), Examples(x, guess), person.test)
    assert_same(baselines.fed_avg(model, wrong, rounds=1, **settings), dict.fromkeys(people, model))


def learnt(monkeypatch, scheme, model, people, **settings):
    """How often each person's samples are in a batch that is learnt from, and how many batches there are."""
    batches, passed = [], logits

    def heard(module, x):
        if torch.is_grad_enabled():
            batches.append([int(owner) for owner in x[:, 0, 0, 0]])
        return passed(module, x)

    monkeypatch.setattr(sys.modules[transfer.__module__], "logits", heard)
    options = {"cache": False} if scheme == "personal" else {}
    SCHEMES[scheme](model, people, patience=None, **settings, **options)
    return batches


@pytest.mark.parametrize("steps", [8, 7])
@pytest.mark.parametrize("scheme", LEARNT)
def test_of_each_person_as_many_batches_are_learnt_from(scheme, steps, model, people, monkeypatch):
    people = {name: Person(*(part[:8] for part in person)) for name, person in people.items()}  # two batches each
    batches = learnt(monkeypatch, scheme, model, people, **STEPS | dict(steps=steps))
    counts = [sum(owners.count(owner) for owners in batches) / 4 for owner in range(3)]
    pooled = [owners for owners in batches if len(owners) == 12]
    alone = [owners for owners in batches if len(set(owners)) == 1]
    assert sum(counts) == 3 * steps
    assert len(pooled) == {"cloud_train": steps, "cloud_customize": steps - steps // 2}.get(scheme, 0)
    assert len(alone) == 3 * (steps - len(pooled))
    if steps == 8:  # whole epochs
        assert counts == [8, 8, 8]


@pytest.mark.parametrize("scheme", ["personal", "local_only", "cloud_train", "fed_avg"])
def test_no_round_reads_what_the_last_one_has_read(scheme, model, monkeypatch):
    """In as many steps as an epoch has batches, all samples are read; in two rounds more than those of the first."""
    one, two = images(32), images(32, seed=1)
    for owner, part in enumerate((one, two)):
        part.x[:, 0, 0, 0] = torch.arange(32.0) + 32 * owner
    people = {"a": Person(one, one, one), "b": Person(two, two, two)}
    batches = learnt(monkeypatch, scheme, model, people, **STEPS)
    read = len({sample for batch in batches for sample in batch})
    assert read > 32 if scheme == "fed_avg" else read == 64


def test_averaging_and_then_each_their_own(model, people):
    half = STEPS | dict(steps=4)
    averaged = baselines.fed_avg(model, people, rounds=2, **half)["a"]
    own = {name: transfer(averaged, p.train, p.validation, "all", **half).model for name, p in people.items()}
    assert_same(baselines.fed_avg_tuned(model, people, rounds=2, **STEPS), own)


@pytest.mark.parametrize("rounds", [0, 9, 1.5])
def test_rounds_without_a_step_are_refused(rounds, model, people):
    with pytest.raises(ValueError, match=f"rounds must be .*between 1 and steps=8, got {rounds}"):
        baselines.fed_avg(model, people, rounds=rounds, **STEPS)


@pytest.fixture
def writers():
    return {name: Person(*(texts(20, seed=3 * k + j) for j in range(3))) for k, name in enumerate("ab")}


@pytest.mark.parametrize("name", ["lstm", "llama"])
def test_counts_mix_what_the_model_says(name, writers):
    model = learner(name)
    mixed = baselines.counts(model, writers)
    assert list(mixed) == list(writers)
    for writer, person in writers.items():
        x, y = person.test.x, person.test.y
        said = mixed[writer](x)
        assert_close(said.exp().sum(-1), torch.ones(x.shape, dtype=said.dtype), 10 * VOCAB)
        rows = [(x_[y_ != IGNORED], y_[y_ != IGNORED]) for x_, y_ in zip(person.train.x, person.train.y, strict=True)]
        table = Counts(torch.cat([ids, labels[-1:]]) for ids, labels in rows)
        base = logits(model, x).detach().log_softmax(-1)
        for row in range(len(x)):
            length = int((y[row] != IGNORED).sum())
            ids = torch.cat([x[row, :length], y[row, length - 1 : length]])
            public = base[row, torch.arange(length), ids[1:]]
            expected = table.log_probs(ids, public, mixed[writer].weight)
            assert_close(said[row, torch.arange(length), ids[1:]].detach(), expected, 50, 10.0)
        assert evaluate(mixed[writer], person.train).loss < evaluate(model, person.train).loss


def test_the_weight_is_the_one_that_suits_the_validation_data(writers):
    model = learner("lstm")
    chosen = baselines.counts(model, writers)
    for writer, person in writers.items():
        each = [baselines.WithCounts(model, chosen[writer].counts, weight) for weight in baselines.WEIGHTS]
        assert chosen[writer].weight == min(each, key=lambda m: evaluate(m, person.validation).loss).weight


def test_places_without_a_label_are_counted_as_what_they_are():
    y = torch.tensor([[4, IGNORED, 5, IGNORED, IGNORED], [IGNORED] * 5])
    part = Examples(torch.tensor([[1, 4, 0, 5, 0], [1, 0, 0, 0, 0]]), y)
    mixed = baselines.counts(learner("lstm"), {"a": Person(part, part, part)})["a"]
    expected = Counts([torch.tensor([1, 4, 0, 5])])
    for context, token in (([1, 4], 0), ([4, 0], 5), ([1, 4, 0], 5), ([0, 5], 4)):
        base = torch.zeros(VOCAB).log_softmax(-1)
        one, other = (each.mix(torch.tensor(context), base, 1.0)[token] for each in (mixed.counts, expected))
        assert one == other
    assert len(mixed.counts) == len(expected)
