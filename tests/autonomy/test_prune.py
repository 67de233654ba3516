"""Pruned networks against masked ones, Torch-Pruning, and counts by hand; the search against its own rules."""

import copy
import itertools

import pytest
import torch
import torch_pruning
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from plpkg.autonomy.prune import Pruned, latency, macs, parameters, prune
from plpkg.backbones import random_backbone

from rounding import assert_close

IMAGE = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(12).reshape(2, 6)


class Words(nn.Module):
    def __init__(self, vocab=20, widths=(8, 12, 10), bias=True):
        super().__init__()
        self.embedding = nn.Embedding(vocab, widths[0])
        self.lstm1 = nn.LSTM(widths[0], widths[1], batch_first=True, bias=bias)
        self.lstm2 = nn.LSTM(widths[1], widths[2], batch_first=True, bias=bias)
        self.head = nn.Linear(widths[2], vocab)

    def forward(self, ids):
        hidden, _ = self.lstm1(self.embedding(ids))
        return self.head(self.lstm2(hidden)[0])


def separable(*widths, stride=2):
    """A MobileNet in small: a convolution, then depthwise and pointwise ones, BatchNorm after each."""
    layers = [nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for n, m in itertools.pairwise(widths):
        layers += [nn.Conv2d(n, n, 3, stride, 1, groups=n), nn.BatchNorm2d(n), nn.ReLU()]
        layers += [nn.Conv2d(n, m, 1), nn.BatchNorm2d(m, affine=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def flattened(channels=6, hidden=7):
    first = [nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    middle = [nn.BatchNorm1d(9 * channels), nn.Linear(9 * channels, hidden), nn.BatchNorm1d(hidden), nn.Tanh()]
    return nn.Sequential(*first, *middle, nn.Linear(hidden, 3))


def drawn(model, seed=0, dtype=torch.float64):
    """Random weights and statistics, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0, 0.5, generator=generator)
            if "running_var" in name:
                tensor.data.abs_().add_(0.5)
    return model.to(dtype).eval()


def kill(model, layer, units, after=()):
    """Set units and their normalisation to zero by hand; an LSTM's are four rows each."""
    module = model.get_submodule(layer)
    with torch.no_grad():
        for name, p in module.named_parameters():
            for unit in units:
                if isinstance(module, nn.LSTM):
                    p[unit :: module.hidden_size] = 0
                elif isinstance(module, nn.Embedding):
                    p[:, unit] = 0
                else:
                    p[unit] = 0
            assert p.numel(), name
        for follower, places in after:
            for tensor in (*model.get_submodule(follower).parameters(), model.get_submodule(follower).running_mean):
                for unit in units:
                    tensor[unit * places : (unit + 1) * places] = 0


def exact_output(model, example):
    with torch.no_grad():
        return model(example)


def check_dead(model, example, dead, followers):
    """Removing dead units leaves the output; and the state is that of a new module of the new size."""
    for layer, units in dead.items():
        kill(model, layer, units, followers.get(layer, ()))
    width = {layer: len(units) for layer, units in dead.items()}
    keep = {layer: size(model, layer) - width[layer] for layer in dead}
    small = prune(model, example, keep=keep)
    expected = exact_output(model, example)
    terms = 100 * sum(p.numel() for p in model.parameters())  # every weight may pass its rounding on to each output
    assert_close(exact_output(small, example), expected, terms, max(1.0, expected.abs().max().item()))
    assert {layer: size(small, layer) for layer in dead} == keep
    return small


def size(model, layer):
    module = model.get_submodule(layer)
    for name in ("out_channels", "out_features", "hidden_size", "embedding_dim"):
        if hasattr(module, name):
            return getattr(module, name)
    raise AssertionError(layer)


@st.composite
def some(draw, units):
    return draw(st.sets(st.integers(0, units - 1), max_size=units - 1))


@settings(max_examples=20)
@given(st.data(), st.lists(st.integers(2, 6), min_size=2, max_size=4), st.integers(1, 2))
def test_dead_filters_leave_a_separable_network_as_it_is(data, widths, stride):
    model = drawn(separable(*widths, stride=stride))
    names = [str(i) for i, m in enumerate(model) if isinstance(m, nn.Conv2d) and m.groups == 1]
    dead = {name: data.draw(some(units)) for name, units in zip(names, widths, strict=True)}
    after = {}
    for name in names:
        i = int(name) + 1
        after[name] = [(str(i), 1)]
        if not isinstance(model[i + 2], nn.AdaptiveAvgPool2d):
            after[name].append((str(i + 3), 1))
            kill(model, str(i + 2), dead[name])  # the depthwise filters, whose bias would be an output
    check_dead(model, IMAGE.double(), dead, after)


@settings(max_examples=20)
@given(st.data(), st.tuples(*[st.integers(2, 9)] * 3), st.booleans())
def test_dead_cells_leave_a_word_network_as_it_is(data, widths, bias):
    model = drawn(Words(widths=widths, bias=bias))
    dead = {n: data.draw(some(w)) for n, w in zip(("embedding", "lstm1", "lstm2"), widths, strict=True)}
    check_dead(model, IDS, dead, {})


@settings(max_examples=20)
@given(st.data(), st.integers(2, 6), st.integers(2, 8))
def test_dead_filters_take_all_their_pixels_with_them(data, channels, hidden):
    model = drawn(flattened(channels, hidden))
    dead = {"0": data.draw(some(channels)), "6": data.draw(some(hidden))}
    small = check_dead(model, IMAGE.double(), dead, {"0": [("1", 1), ("5", 9)], "6": [("7", 1)]})
    assert small[6].in_features == small[5].num_features == 9 * small[0].out_channels


def test_units_of_the_smallest_norm_go():
    """Both matrices' rows count: either alone would decide otherwise, and so would columns or biases."""
    model = Words(widths=(3, 4, 2))
    for p in model.parameters():
        nn.init.zeros_(p)
    with torch.no_grad():
        for unit, (read, recurrent) in enumerate([(4.0, 0.0), (1.0, 1.0), (0.0, 3.0), (1.5, 0.5)]):
            model.lstm1.weight_ih_l0[unit + 4 * unit, 0] = read  # another gate for each
            model.lstm1.weight_hh_l0[unit + 4 * unit, 1] = recurrent  # the column of a weak unit
        model.lstm1.bias_ih_l0[1::4] = 9.0
        model.embedding.weight.copy_(torch.tensor([1.0, 3.0, 2.0]).expand(20, 3))
    small = prune(model, IDS, keep={"lstm1": 2, "embedding": 2})
    rows = [0, 2, 4, 6, 8, 10, 12, 14]
    assert torch.equal(small.lstm1.weight_ih_l0, model.lstm1.weight_ih_l0[rows][:, 1:])
    assert torch.equal(small.lstm1.weight_hh_l0, model.lstm1.weight_hh_l0[rows][:, [0, 2]])
    assert torch.equal(small.embedding.weight, model.embedding.weight[:, 1:])


def test_the_same_as_torch_pruning():
    """Same criterion: the L2 norm of a group's first layer. The library's own graph finds what follows."""
    model = drawn(separable(16, 32, 64), dtype=torch.float32)
    with torch.no_grad():  # the library has no place for BatchNorm without weights
        for i, m in enumerate(model):
            if isinstance(m, nn.BatchNorm2d) and not m.affine:
                other = model[i] = nn.BatchNorm2d(m.num_features).eval()
                other.running_mean.copy_(m.running_mean)
    keep, theirs = {"0": 9, "6": 20, "12": 33}, copy.deepcopy(model)
    strength = torch_pruning.importance.MagnitudeImportance(p=2, group_reduction="first", normalizer=None)
    for name, count in keep.items():
        graph = torch_pruning.DependencyGraph().build_dependency(theirs, IMAGE)
        layer, cut = theirs.get_submodule(name), torch_pruning.prune_conv_out_channels
        # A layer before has lost units, and with them a part of each norm: ours are the norms in the whole model.
        group = torch_pruning.DependencyGraph().build_dependency(model, IMAGE)
        scores = strength(group.get_pruning_group(model.get_submodule(name), cut, list(range(layer.out_channels))))
        graph.get_pruning_group(layer, cut, scores.argsort()[: layer.out_channels - count].tolist()).prune()
    ours = prune(model, IMAGE, keep=keep)
    assert parameters(ours) == parameters(theirs) == torch_pruning.utils.count_ops_and_params(ours, IMAGE)[1]
    assert str(ours) == str(theirs)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    assert torch.equal(exact_output(ours, IMAGE), exact_output(theirs, IMAGE))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm:UserWarning")  # of any nn.LSTM, in any order
def test_a_copy_is_a_module_of_its_size():
    model = drawn(Words(), dtype=torch.float32).train()
    model.lstm1.requires_grad_(False)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model(IDS).sum().backward()
    small = prune(model, IDS, keep={"embedding": 4, "lstm1": 5, "lstm2": 3})
    fresh = Words(widths=(4, 5, 3))
    assert repr(small) == repr(fresh)
    fresh.load_state_dict(small.state_dict())
    assert torch.equal(exact_output(fresh, IDS), exact_output(small, IDS))
    assert [p.requires_grad for p in small.lstm1.parameters()] == [False] * 4
    assert all(p.requires_grad for p in small.lstm2.parameters())
    assert small.training
    small(IDS).sum().backward()  # gradients of the old shapes are gone
    exported = torch.export.export(small.eval(), (IDS,)).module()
    assert_close(exported(IDS).detach(), exact_output(small, IDS), terms=100)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(exact_output(prune(model, IDS, keep={}), IDS), exact_output(model, IDS))
    torch.set_rng_state(random)


def test_no_global_draw_and_any_dtype():
    model, state = drawn(Words(), dtype=torch.bfloat16), torch.get_rng_state()
    small = prune(model, (IDS,), keep={"lstm2": 4})
    assert torch.equal(state, torch.get_rng_state())
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}


class Answer(nn.Module):
    """Any of the forms an output can have."""

    def __init__(self, form):
        super().__init__()
        self.body, self.form = Words(), form

    def forward(self, ids):
        logits = self.body(ids)
        return (logits, None) if self.form == "tuple" else type("Output", (), {"logits": logits})()


@pytest.mark.parametrize("form", ["tuple", "logits"])
def test_outputs_have_several_forms(form):
    assert prune(Answer(form), IDS, keep={"body.lstm1": 5}).body.lstm1.hidden_size == 5


class Net(nn.Module):
    def __init__(self, forward, **layers):
        super().__init__()
        self.steps = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.steps(self, x)


def linear(n=6, m=6):
    return nn.Linear(n, m)


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def three(forward, **layers):
    return Net(forward, **dict(a=linear(), b=linear(), c=linear(6, 2)) | layers)


def whole(x):
    assert x.shape[1] == 6
    return x


def tied():
    model = Words(widths=(8, 12, 8))
    model.head.weight = model.embedding.weight
    return model


SHUFFLE = [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("model", "keep", "message"),
    [
        (three(lambda m, x: m.c((h := m.a(x)) + m.b(h))), {"a": 3}, "'a' cannot lose units"),
        (three(lambda m, x: m.c(m.b(torch.sigmoid(m.a(x))))), {"a": 3}, "'a' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.a(x)).flip(1))), {"b": 3}, "'b' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.a(x).softmax(1)))), {"a": 3}, "'a' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.a(x)).sum() * x)), {"b": 3}, "'b' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.a(x).repeat_interleave(2, 1)[:, SHUFFLE]))), {"a": 3}, "'a' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.b(m.a(x))))), {"a": 3}, "'b' is called twice"),
        (three(lambda m, x: m.c(m.n(m.b(m.a(x)))), n=nn.LayerNorm(6)), {"b": 3}, "'n' cannot be cut here"),
        (three(lambda m, x: m.c(m.n(m.b(m.a(x)))), n=nn.PReLU(6)), {"b": 3}, "'n' cannot be cut here"),
        (three(lambda m, x: m.c(m.a(x)), n=nn.PReLU(6)), {"b": 3}, "a layer of keep must be one of 'a', got 'b'"),
        (three(lambda m, x: m.c(m.b(whole(m.a(x))))), {"a": 3}, "'a' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.a(x)))), {"c": 1}, "must be one of 'a', 'b', got 'c'"),
        (three(lambda m, x: m.c(m.b(m.a(x)))), {"b": 7}, r"keep\['b'\] must be between 1 and 6, got 7"),
        (three(lambda m, x: m.c(m.b(m.a(x)))), {"b": 0}, r"keep\['b'\] must be between 1 and 6, got 0"),
        (
            three(lambda m, x: m.c(m.r(m.a(x))[0]), r=nn.LSTM(6, 6, 2)),
            {"a": 3},
            "'r' cannot .* one layer.*num_layers=2",
        ),
        (three(lambda m, x: m.c(m.r(m.a(x))[0]), r=nn.LSTM(6, 3, bidirectional=True)), {"a": 3}, "'r'.*bidirectional"),
        (three(lambda m, x: m.c(m.r(m.a(x))[0]), r=nn.LSTM(6, 8, proj_size=6)), {"a": 3}, "'r' cannot be cut here"),
        (three(lambda m, x: m.c(m.r(m.a(x))[0]), r=nn.GRU(6, 6)), {"a": 3}, "'r' cannot be cut here"),
    ],
)
# torch warns of the proj_size that is refused.
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_what_is_no_chain_is_refused(model, keep, message):
    with pytest.raises(ValueError, match=message):
        prune(model, X, keep=keep)


def test_networks_that_only_look_like_chains_are_refused():
    with pytest.raises(ValueError, match="'head' is called twice, or shares its weights"):
        prune(tied(), IDS, keep={"lstm1": 3})
    with pytest.raises(ValueError, match="cannot be cut here"):
        prune(random_backbone("llama", num_layers=1, vocab=64, hidden=32, intermediate=48), IDS, keep={"lm_head": 3})
    grouped = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(ValueError, match="'1' cannot be cut here"):
        prune(grouped, IMAGE, keep={"0": 2})
    # A permutation of pixels and channels: as many columns, other ones.
    steps = lambda m, x: m.b(m.a(x).permute(0, 2, 3, 1).flatten(1))  # noqa: E731 (an argument)
    with pytest.raises(ValueError, match="'a' cannot lose units"):
        prune(Net(steps, a=nn.Conv2d(1, 4, 3), b=nn.Linear(144, 3)), IMAGE, keep={"a": 2})


def test_zeros_hide_nothing():
    """A head that begins at zero would make the outputs of any cut the same."""
    model = three(lambda m, x: m.c(m.b(m.a(x)).flip(1)))
    nn.init.zeros_(model.c.weight)
    with pytest.raises(ValueError, match="'b' cannot lose units"):
        prune(model, X, keep={"b": 3})


def by_hand(model, example):
    """Half the floating-point operations that PyTorch counts; an LSTM as its four products, a step at a time."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if isinstance(model, Words):
            x = model.embedding(example)
            for lstm in (model.lstm1, model.lstm2):
                state = torch.zeros(len(x), lstm.hidden_size)
                for step in x.unbind(1):
                    assert len(step @ lstm.weight_ih_l0.T) == len(state @ lstm.weight_hh_l0.T)
                x = torch.zeros(*x.shape[:2], lstm.hidden_size)
            model.head(x)
        else:
            model(example)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("model", "example"), [(separable(8, 12, 16), IMAGE), (flattened(), IMAGE), (Words(), IDS), (linear(), X)]
)
def test_macs_are_half_the_operations(model, example):
    assert macs(model, example) == macs(model, (example,)) == by_hand(model.eval(), example)


def test_resources_leave_the_model_as_it_is():
    model, threads = separable(4, 6).train(), torch.get_num_threads()
    before = copy.deepcopy(model.state_dict())
    assert latency(model, IMAGE, seconds=0.01) > 0
    assert macs(model, IMAGE) > 0
    assert model.training
    assert not model._forward_hooks
    assert torch.get_num_threads() == threads
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert parameters(tied()) == parameters(Words(widths=(8, 12, 8))) - 20 * 8


def mlp():
    return drawn(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2)))


def test_a_round_is_netadapts():
    """Brute force: every layer alone loses units one by one until the target; of these, the best by score."""
    model, x = mlp(), X.double()
    reference = exact_output(model, x)
    tuned = []

    def score(m):
        assert not m.training
        return -float((exact_output(m, x) - reference).square().sum())

    (found,) = prune(model, x, budgets=[900], score=score, tune=lambda m: tuned.append(m.training), step=0.1)
    assert macs(model, x) == 900
    assert (found.keep, found.resource, found.score) == ({"0": 10, "2": 20}, 900, 0.0)
    assert tuned == []
    (found,) = prune(model, x, budgets=[810], score=score, tune=lambda m: tuned.append(m.training), step=0.1)
    trials = []
    for name, units in (("0", 10), ("2", 20)):
        fewer = (prune(model, x, keep={name: n}) for n in range(units, 0, -1))
        trials.append(next(small for small in fewer if macs(small, x) <= 810))
    best = max(trials, key=score)
    assert tuned == [True, True]
    assert found.score == score(best)
    assert str(found.model) == str(best)
    assert torch.equal(exact_output(found.model, x), exact_output(best, x))


def test_a_family_meets_its_budgets():
    model, wanted = drawn(separable(8, 12, 16), dtype=torch.float32).train(), [0.7, 0.4, 0.39, 0.1]
    whole = macs(model, IMAGE)
    scores = iter(range(10_000))
    family = prune(model, IMAGE, budgets=[share * whole for share in wanted], score=lambda m: next(scores), step=0.2)
    assert [type(member) for member in family] == [Pruned] * 4
    for member, share in zip(family, wanted, strict=True):
        assert member.resource == macs(member.model, IMAGE) <= share * whole
        assert member.keep == {n: size(member.model, n) for n in ("0", "6", "12")}
        assert not member.model.training
    assert str(prune(model, IMAGE, keep=family[-1].keep)) == str(family[-1].model.train())
    assert len({id(member.model) for member in family}) == 4
    assert model.training
    assert macs(model, IMAGE) == whole
    assert "Sequential" not in repr(family[0])


def test_tuning_counts_before_scoring():
    """The layer whose loss is made good wins, though it is not the better one before."""
    favoured = []

    def tune(m):
        m.good = len(m[0].weight) == 10  # only what left the first layer whole

    def score(m):
        favoured.append(getattr(m, "good", None))
        return float(getattr(m, "good", True))

    (found,) = prune(mlp(), X.double(), budgets=[450], score=score, tune=tune, step=0.25)
    assert found.keep["0"] == 10
    assert found.keep["2"] < 20
    assert favoured[0] is None


def test_small_layers_take_smaller_steps():
    """With half its units, no layer gives half of the resource: the round takes what the best one gives."""
    model, x, seen = drawn(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])), X.double(), []
    (found,) = prune(model, x, budgets=[200], score=lambda m: seen.append(macs(m, x)) or 0, step=0.5)
    assert macs(model, x) == 3 * 4 * 36
    assert seen[:4] == [432, 324, 324, 324]  # two of four layers have half
    assert found.resource <= 200


def test_several_resources_are_one():
    model = drawn(Words(), dtype=torch.float32)
    limits = {parameters: 700, lambda m: macs(m, IDS): 5000}

    def largest(m):
        return max(takes(m) / limit for takes, limit in limits.items())

    (found,) = prune(model, IDS, budgets=[1], resource=largest, score=lambda m: -parameters(m))
    assert all(takes(found.model) <= limit for takes, limit in limits.items())
    assert found.keep["embedding"] < 8  # its columns are parameters only


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either keep or budgets, got keep=None and budgets=None"),
        ({"keep": {}, "budgets": [1]}, r"got keep=\{\} and budgets=\[1\]"),
        ({"budgets": []}, r"budgets=\[\]"),
        ({"budgets": [300, 400]}, r"must decrease .*\[300.0, 400.0\]"),
        ({"budgets": [300, 300]}, "must decrease"),
        ({"budgets": [300, -1]}, "a budget must be at least 0, got -1"),
        ({"budgets": [300], "score": None}, "need a score, .*None"),
        ({"budgets": [300], "step": 0}, "step must be greater than 0 and at most 1, got 0"),
        ({"budgets": [300], "score": lambda m: float("nan")}, "score must be .*got nan"),
        ({"budgets": [300], "resource": lambda m: float("nan")}, "resource must be .*got nan"),
        ({"budgets": [300, 26]}, "a budget of 26 cannot be met: with one unit in each layer it is 27"),
    ],
)
def test_what_cannot_be_searched_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        prune(mlp(), X.double(), **{"score": lambda m: 0.0} | options)


def test_a_resource_that_falls_no_further_ends_the_search():
    measured = iter([1.0])  # the smallest network, measured once, seems small
    with pytest.raises(ValueError, match="no layer takes the resource from 9"):
        prune(mlp(), X.double(), budgets=[5], score=lambda m: 0.0, resource=lambda m: next(measured, 9.0))
