"""Steps are compared with autograd's; the guard with an adversary who chooses head, labels and their times."""

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from plpkg.autonomy.online import FILE, OnlineLearner, head_gradient
from plpkg.autonomy.personal import load
from plpkg.backbones import FAMILIES, random_backbone
from tests.autonomy.conftest import SIZES, images, learner as small_model, same, texts, values

from rounding import assert_close

CLASSES = 5


def network(seed=0, dtype=torch.float64, bias=True):
    """Four numbers to five classes, over three features."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, CLASSES, bias=bias)).to(dtype)
    for p in model.parameters():
        p.data.normal_(generator=generator)
    return model.eval()


def inputs(count, seed=0, dtype=torch.float64):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)  # (batch, 4)


@given(
    st.integers(1, 20), st.integers(1, 9), st.integers(2, 7), st.booleans(),
    st.sampled_from([torch.float32, torch.float64]), st.integers(0, 2**31),
)  # fmt: skip
def test_the_gradient_is_autograd_s(batch, width, classes, bias, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(width, classes, bias=bias).to(dtype)
    for p in head.parameters():
        p.data.normal_(generator=generator)
    features = torch.randn(batch, width, generator=generator).to(dtype)  # (batch, features)
    y = torch.randint(classes, (batch,), generator=generator)
    expected = torch.autograd.grad(cross_entropy(head(features), y), list(head.parameters()))
    with torch.no_grad():
        gradients = head_gradient(head, features, y)
    # an error of the logits is as large a part of each probability; the mean over the batch makes no sum larger
    logit = (features.abs() @ head.weight.abs().T).max().item() + 3
    for actual, wanted in zip(gradients, expected, strict=False):
        assert_close(actual, wanted, 2 * (batch + width + classes + 4), logit * max(1, features.abs().max().item()))
    assert gradients[1].shape == (classes,)


def by_autograd(model, x, y, order, lr, batch):
    """The heads after each step of SGD, on the whole model, in the order in which the labels come."""
    body, head = model[:-1], copy.deepcopy(model[-1])
    heads = []
    for start in range(0, len(order) - batch + 1, batch):
        which = order[start : start + batch]
        loss = cross_entropy(head(body(x[which]).detach()), y[which])
        for p, gradient in zip(head.parameters(), torch.autograd.grad(loss, list(head.parameters())), strict=True):
            p.data -= lr * gradient
        heads.append(copy.deepcopy(head))
    return heads


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [1, 16])
def test_late_labels_in_any_order_make_the_steps_of_autograd(batch, bias):
    model, x = network(bias=bias), inputs(50)
    y = torch.randint(CLASSES, (50,), generator=torch.Generator().manual_seed(1))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    before, (learner, *others) = values(model), [OnlineLearner(model, lr=0.3, batch=batch) for _ in range(3)]
    for each in (learner, *others):
        assert [i for part in x.split(7) for i in each.predict(part).ids] == list(range(50))
    heads = [model[-1], *by_autograd(model, x, y, order, 0.3, batch)]
    for count, which in enumerate(order.tolist(), 1):
        learner.label([which], y[which, None])
        for p, wanted in zip(learner.head.parameters(), heads[count // batch].parameters(), strict=True):
            assert_close(p, wanted, 50 * (batch + 3 + CLASSES + 4), 10 * (1 + x.abs().max().item()))
    assert len(learner.rows()) == 50
    assert same(model.state_dict(), before)
    for other, size in zip(others, (5, 50), strict=True):  # together the labels make the same head
        for part in order.split(size):
            other.label(part.tolist(), y[part])
        assert torch.equal(other.head.weight, learner.head.weight)


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        ([0, 20], [1, 1], "no prediction 20 waits for a label"),
        ([-1], [1], "no prediction -1 waits for a label"),
        ([2, 3, 2], [1, 1, 1], "prediction 2 is given 2 labels"),
        ([0, 19], [1, 1], "no prediction 19 waits for a label"),
        ([0, 1], [1, CLASSES], f"y must be between 0 and classes - 1={CLASSES - 1}, got {CLASSES}"),
        ([0, 1], [1, -1], "y must be .*between .* got -1"),
        ([0, 1], [1, -100], "y must be .*between .* got -100"),
        ([0, 1], [1.0, 2.0], r"y must be .*between .* got 1\.0"),
        ([0, 1], [1], "label"),
        ([0], [1, 2], "label"),
        ([0], [[1]], r"y must be .*between .* got \[1\]"),
    ],
)
def test_a_refused_label_teaches_nothing(ids, labels, message):
    learner = OnlineLearner(network(), batch=2)
    assert (learner.accuracy, learner.rows()) == (0, [])
    assert repr(learner) == "OnlineLearner(accuracy 0.0000 of 0, 0 open)"
    assert "<table>" in learner._repr_html_()
    learner.predict(inputs(20))
    learner.label([19], torch.tensor([0]))
    head, rows = learner.head.weight.clone(), list(learner.rows())
    with pytest.raises(ValueError, match=message):
        learner.label(ids, torch.tensor(labels))
    assert torch.equal(learner.head.weight, head)
    assert learner.rows() == rows
    assert repr(learner).endswith("19 open)")
    learner.label(list(range(19)), torch.ones(19, dtype=torch.int64))
    assert len(learner.rows()) == 20


@st.composite
def streams(draw):
    """What an adversary does: predictions, labels, and heads that learning has not made."""
    event = st.one_of(
        st.tuples(st.just("predict"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["public", "personal", "against what is shown", "random"]), st.integers(1, 6)),
        st.tuples(st.just("scramble"), st.integers(0, 9)),
    )
    return draw(st.lists(event, max_size=60)), draw(st.integers(0, 4)), draw(st.integers(0, 99))


def play(events, allowance, seed):
    """Of each moment: errors shown more than the public model's, and open predictions that differ from its."""
    draw = torch.Generator().manual_seed(seed)
    model = network(seed)
    learner, waiting, more = OnlineLearner(model, lr=1.0, batch=3, allowance=allowance), {}, 0
    for what, count in events:
        if what == "scramble":
            with torch.no_grad():
                learner.head.weight.normal_(generator=draw)
        elif what == "predict":
            x = torch.randn(count, 4, dtype=torch.float64, generator=draw)
            public, personal = (each(x).argmax(-1).tolist() for each in (model, learner.model))
            ids, shown = learner.predict(x)
            assert all(s in (a, b) for s, a, b in zip(shown.tolist(), public, personal, strict=True))
            waiting |= {i: each for i, *each in zip(ids, shown.tolist(), public, personal, strict=True)}
        elif waiting:
            order = torch.randperm(len(waiting), generator=draw)[:count].tolist()
            ids, labels = [list(waiting)[k] for k in order], []
            for i in ids:
                shown, public, personal = waiting.pop(i)
                label = {"public": public, "personal": personal}
                label["random"] = int(torch.randint(CLASSES, (1,), generator=draw))
                label["against what is shown"] = public if public != shown else (shown + 1) % CLASSES
                labels.append(label[what])
                more += (shown != label[what]) - (public != label[what])
            learner.label(ids, torch.tensor(labels))
        yield more, sum(shown != public for shown, public, _ in waiting.values())


@settings(max_examples=150)
@given(streams())
def test_never_more_errors_than_the_public_model_s_and_the_allowance(stream):
    events, allowance, seed = stream
    for more, at_risk in play(events, allowance, seed):
        assert more + at_risk <= allowance


@pytest.mark.parametrize("allowance", [0, 1, 3])
def test_the_guard_lets_an_adversary_reach_the_bound_and_no_more(allowance):
    """Who wins trust with labels that please the personal head, then labels against what is shown."""
    events = [("scramble", 0), *[("predict", 6), ("personal", 6)] * 4, *[("predict", 6), ("scramble", 0)] * 6]
    events += [("against what is shown", 1)] * 36
    events += [("predict", 6), ("against what is shown", 6)] * 9
    worst = max(more + at_risk for more, at_risk in play(events, allowance, 0))
    # what pleased has made what is shown better than the public model, but for the first trust it was shown nothing
    assert worst == allowance


def shifted(count, seed=5):
    """A stream whose classes are the public model's, each one further: a head can learn that."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, CLASSES)).double().eval()
    generator = torch.Generator().manual_seed(seed)
    model[1].weight.data.normal_(generator=generator)
    x = torch.randn(count, 8, dtype=torch.float64, generator=generator)
    return model, x, (model(x).argmax(-1) + 1) % CLASSES


@pytest.mark.parametrize("allowance", [1, 10, None])
def test_where_there_is_something_to_learn_more_is_right(allowance):
    model, x, y = shifted(800)
    learner, shown = OnlineLearner(model, allowance=allowance), []
    for part, labels in zip(x.split(4), y.split(4), strict=True):
        personal, prediction = learner.model(part).argmax(-1), learner.predict(part)
        assert allowance is not None or torch.equal(prediction.classes, personal)
        shown += (prediction.classes == labels).tolist()
        learner.label(prediction.ids, labels)
    rows = learner.rows()
    assert [row["shown"] for row in rows] == shown
    assert allowance is not None or all(row["shown"] == row["personal"] for row in rows)
    assert learner.accuracy == sum(shown) / 800
    assert not any(row["public"] for row in rows)
    assert sum(shown[400:]) > 200
    assert repr(learner) == f"OnlineLearner(accuracy {learner.accuracy:.4f} of 800, 0 open)"
    assert learner.to_frame()["personal"].mean() >= learner.accuracy


@pytest.mark.parametrize("options", [dict(allowance=0), dict(allowance=10, lr=100.0, batch=1)], ids=["leave", "lead"])
def test_without_leave_or_lead_the_public_classes_are_shown(options):
    model, x, y = shifted(64)
    learner = OnlineLearner(model, **options)
    for part, others in zip(x.split(8), y.split(8), strict=True):
        prediction, public = learner.predict(part), model(part).argmax(-1)
        assert torch.equal(prediction.classes, public)
        learner.label(prediction.ids, others if learner.allowance == 0 else public)
    assert learner.accuracy == (options["allowance"] > 0)


def optimized(model):
    model(inputs(2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


MOVES = {
    "in place": lambda model: nn.init.zeros_(model[0].weight),
    "by an optimizer": optimized,
    "by a state": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
}


@pytest.mark.parametrize("public", [True, False])
@pytest.mark.parametrize("move", MOVES)
def test_a_body_that_moves_makes_kept_features_stale(move, public):
    model = network()
    learner = OnlineLearner(model)
    learner.predict(inputs(3))
    if move == "by an optimizer" and not public:
        learner.model[0].requires_grad_(True)
    MOVES[move](model if public else learner.model)
    for use in (lambda: learner.predict(inputs(3)), lambda: learner.label([0], torch.tensor([1]))):
        with pytest.raises(RuntimeError, match="a parameter of the body has changed"):
            use()
    assert learner.rows() == []


def test_statistics_that_move_make_kept_features_stale():
    model, noise = small_model("mobile"), images(3)
    learner = OnlineLearner(model)
    learner.predict(noise.x)
    model.train()(noise.x)  # the public model's statistics are not the copy's
    learner.label([0], noise.y[:1])
    learner.model.train()(noise.x)
    with pytest.raises(RuntimeError, match="a parameter of the body has changed"):
        learner.label([1], noise.y[1:2])


def test_dropout_that_does_not_rest_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, CLASSES))
    with pytest.raises(ValueError, match="'1' drops at random"):
        OnlineLearner(model.train())
    OnlineLearner(model.eval())
    model[1].p = 0.0
    OnlineLearner(model.train())


@pytest.mark.parametrize("name", ["lstm", *[family for family in FAMILIES if family != "gemma2"]])
def test_of_a_sequence_the_last_place_is_predicted(name):
    model, x = small_model(name), texts(5).x
    with torch.no_grad():
        out = model(x) if name == "lstm" else model(input_ids=x).logits
    learner = OnlineLearner(model, batch=5, lr=100.0)
    assert torch.equal(learner.predict(x).classes, out[:, -1].argmax(-1))
    before = values(model)
    learner.label([0, 1, 2, 3, 4], torch.tensor([3, 4, 5, 6, 7]))
    assert not torch.equal(learner.head.weight, before["head.weight" if name == "lstm" else "lm_head.weight"])
    assert same(model.state_dict(), before)
    assert torch.equal(learner.predict(x).classes, out[:, -1].argmax(-1))  # it does not lead


def test_logits_that_the_head_alone_does_not_make_are_refused():
    capped = random_backbone("gemma2", **SIZES, options=dict(final_logit_softcapping=0.1))
    twice = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    for model, x in ((capped, texts(3).x), (twice, inputs(3, dtype=torch.float32))):
        with pytest.raises(ValueError, match=r"more to its logits than its last layer|not what makes the logits"):
            OnlineLearner(model).predict(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lr=0.0), "lr must be greater than 0, got 0.0"),
        (dict(batch=0), "batch must be a whole number of at least 1, got 0"),
        (dict(allowance=-1), "allowance must be a whole number of at least 0, got -1"),
        (dict(allowance=1.5), r"allowance must be a whole number of at least 0, got 1\.5"),
    ],
)
def test_settings_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        OnlineLearner(network(), **options)


def test_a_head_that_was_saved_is_loaded_elsewhere(tmp_path):
    online, x = OnlineLearner(network(), allowance=None), inputs(32)
    online.label(online.predict(x).ids, torch.arange(32) % CLASSES)
    online.result().save(tmp_path)
    before = load(network(), tmp_path)
    assert before.step == 32
    assert torch.equal(before.model(x), online.model(x))
    assert torch.equal(before.model(x).argmax(-1), online.predict(x).classes)
    online.label(online.predict(x).ids, torch.arange(32) % CLASSES)  # what was saved stays
    assert not torch.equal(before.model(x), online.model(x))
    with pytest.raises(ValueError, match="learnt from a public model"):
        load(network(seed=1), tmp_path)


def saved(folder, **settings):
    """A learner with labels in all states: learnt from, waiting for a step, and open."""
    learner = OnlineLearner(network(), batch=4, allowance=3, **settings)
    learner.predict(inputs(20))
    learner.label(range(3, 13), torch.zeros(10, dtype=torch.int64))
    learner.save(folder)
    return learner


def test_a_learner_goes_on_from_its_last_save(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert not OnlineLearner(network()).resume(folder)
    first, second = saved(folder), OnlineLearner(network(), batch=4, allowance=3)
    assert second.resume(folder)
    assert second.open == first.open == [0, 1, 2, *range(13, 20)]
    assert second.rows() == first.rows()
    assert repr(second) == repr(first)
    with pytest.raises(ValueError, match="no prediction 3 waits for a label"):
        second.label([3], [0])
    for each in (first, second):
        each.label([0, 1], [0, 0])  # with the two that waited they make a step
        assert each.predict(inputs(9, seed=1)).ids == list(range(20, 29))
    assert torch.equal(first.head.weight, second.head.weight)
    assert first.rows() == second.rows()
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert (folder / FILE).stat().st_mode & 0o077 == 0


def test_another_learner_s_save_and_a_damaged_one_are_refused(tmp_path):
    saved(tmp_path)
    for model, changed, message in (
        (network(seed=1), {}, "holds a run with public="),
        (network(), {"lr": 0.1}, r"holds a run with lr=0\.5, now 0\.1"),
        (network(), {"allowance": None}, "holds a run with allowance=3, now None"),
    ):
        with pytest.raises(ValueError, match=message):
            OnlineLearner(model, **dict(batch=4, allowance=3) | changed).resume(tmp_path)
    path, learner = tmp_path / FILE, OnlineLearner(network(), batch=4, allowance=3)
    before = learner.head.weight.clone()
    path.write_bytes(path.read_bytes()[:-9] + bytes([7] * 9))
    with pytest.raises(ValueError, match="is damaged"):
        learner.resume(tmp_path)
    assert torch.equal(learner.head.weight, before)
    assert (learner.open, learner.rows()) == ([], [])


def test_what_was_shown_before_a_kill_is_not_forgotten(tmp_path):
    """Errors that may be shown stay bounded where the process dies after each prediction, and its label with it."""
    model, x = network(), inputs(1)
    public, shown = int(model(x).argmax()), []
    learner, other = OnlineLearner(model, batch=1, lr=3.0, allowance=3), (public + 1) % CLASSES
    for count in (30, 1):  # the public prediction is shown, since the personal head does not lead yet
        prediction = learner.predict(x.repeat(count, 1))
        assert prediction.classes.tolist() == [public] * count
        learner.label(prediction.ids, [other] * count)
    learner.save(tmp_path)
    for _ in range(12):
        learner = OnlineLearner(model, batch=1, lr=3.0, allowance=3)
        learner.resume(tmp_path)
        shown += learner.predict(x).classes.tolist()
        learner.save(tmp_path)
    assert shown == [other] * 3 + [public] * 9
