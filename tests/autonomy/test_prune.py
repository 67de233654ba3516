"""Pruned networks against masked ones, Torch-Pruning, and counts by hand; the search against its own rules."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch_pruning
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from plpkg.autonomy.nets import WordLSTM
from plpkg.autonomy.prune import Pruned, latency, macs, prune
from plpkg.backbones import random_backbone
from tests.autonomy.conftest import Net

from rounding import assert_close

IMAGE = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(12).reshape(2, 6)
X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def words(widths=(8, 12, 10), bias=True):
    model = WordLSTM(20, widths[0], widths[1:])
    if not bias:
        model.lstm1, model.lstm2 = (nn.LSTM(n, m, batch_first=True, bias=False) for n, m in itertools.pairwise(widths))
    return model


def separable(*widths, stride=2, affine=False):
    """A MobileNet in small: a convolution, then depthwise and pointwise ones, BatchNorm after each."""
    layers = [nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for n, m in itertools.pairwise(widths):
        layers += [nn.Conv2d(n, n, 3, stride, 1, groups=n), nn.BatchNorm2d(n), nn.ReLU()]
        layers += [nn.Conv2d(n, m, 1), nn.BatchNorm2d(m, affine=affine), nn.ReLU()]
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


@torch.no_grad()
def output(model, example):
    return model(example)


def size(model, layer):
    module = model.get_submodule(layer)
    names = ("out_channels", "out_features", "hidden_size", "embedding_dim")
    return next(getattr(module, name) for name in names if hasattr(module, name))


@torch.no_grad()
def kill(model, layer, units, places=1):
    """Set units or what follows them to zero by hand: an LSTM's four rows each, or as many ``places`` as pixels."""
    module = model.get_submodule(layer)
    statistics = [module.running_mean] if hasattr(module, "running_mean") else []
    for tensor, unit in itertools.product([*module.parameters(), *statistics], units):
        if isinstance(module, nn.LSTM):
            tensor[unit :: module.hidden_size] = 0
        elif isinstance(module, nn.Embedding):
            tensor[:, unit] = 0
        else:
            tensor[unit * places : (unit + 1) * places] = 0


def check_dead(model, example, dead):
    """Removing dead units leaves the output, and every layer has the units that it should keep."""
    for layer, units in dead.items():
        kill(model, layer, units)
    keep = {layer: size(model, layer) - len(units) for layer, units in dead.items()}
    small, expected = prune(model, example, keep=keep), output(model, example)
    terms = 100 * sum(p.numel() for p in model.parameters())  # every weight may pass its rounding on to each output
    assert_close(output(small, example), expected, terms, max(1.0, expected.abs().max().item()))
    assert {layer: size(small, layer) for layer in dead} == keep
    return small


def some(units):
    return st.sets(st.integers(0, units - 1), max_size=units - 1)


@settings(max_examples=20)
@given(st.data(), st.lists(st.integers(2, 6), min_size=2, max_size=4), st.integers(1, 2))
def test_dead_filters_leave_a_separable_network_as_it_is(data, widths, stride):
    model, dead = drawn(separable(*widths, stride=stride)), {}
    for i, width in zip(range(0, 6 * len(widths), 6), widths, strict=True):  # each pointwise convolution
        units = dead[str(i)] = data.draw(some(width))
        kill(model, str(i + 1), units)
        if not isinstance(model[i + 3], nn.AdaptiveAvgPool2d):
            kill(model, str(i + 3), units)  # the depthwise filters, whose bias would be an output
            kill(model, str(i + 4), units)
    check_dead(model, IMAGE.double(), dead)


@settings(max_examples=20)
@given(st.data(), st.tuples(*[st.integers(2, 9)] * 3), st.booleans())
def test_dead_cells_leave_a_word_network_as_it_is(data, widths, bias):
    dead = {n: data.draw(some(w)) for n, w in zip(("embedding", "lstm1", "lstm2"), widths, strict=True)}
    check_dead(drawn(words(widths, bias)), IDS, dead)


@settings(max_examples=20)
@given(st.data(), st.integers(2, 6), st.integers(2, 8))
def test_dead_filters_take_all_their_pixels_with_them(data, channels, hidden):
    model = drawn(flattened(channels, hidden))
    dead = {"0": data.draw(some(channels)), "6": data.draw(some(hidden))}
    for layer, units, places in (("1", dead["0"], 1), ("5", dead["0"], 9), ("7", dead["6"], 1)):
        kill(model, layer, units, places)
    small = check_dead(model, IMAGE.double(), dead)
    assert small[6].in_features == small[5].num_features == 9 * small[0].out_channels


def test_units_of_the_smallest_norm_go():
    """Both matrices' rows count: either alone would decide otherwise, and so would columns or biases."""
    model = words((3, 4, 2))
    for p in model.parameters():
        nn.init.zeros_(p)
    with torch.no_grad():
        for unit, (read, recurrent) in enumerate([(4.0, 0.0), (1.0, 1.0), (0.0, 3.0), (1.5, 0.5)]):
            model.lstm1.weight_ih_l0[unit + 4 * unit, 0] = read  # another gate for each
            model.lstm1.weight_hh_l0[unit + 4 * unit, 1] = recurrent  # the column of a weak unit
        model.lstm1.bias_ih_l0[1::4] = 9.0
        model.embedding.weight.copy_(torch.tensor([1.0, 3.0, 2.0]).expand(20, 3))
    small = prune(model, IDS, keep={"lstm1": 2, "embedding": 2})
    rows = range(0, 16, 2)
    assert torch.equal(small.lstm1.weight_ih_l0, model.lstm1.weight_ih_l0[rows][:, 1:])
    assert torch.equal(small.lstm1.weight_hh_l0, model.lstm1.weight_hh_l0[rows][:, [0, 2]])
    assert torch.equal(small.embedding.weight, model.embedding.weight[:, 1:])


def test_the_same_as_torch_pruning():
    """Same criterion: the L2 norm of a group's first layer. The library's own graph finds what follows."""
    model = drawn(separable(16, 32, 64, affine=True), dtype=torch.float32)  # it has no place for BatchNorm without
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
    assert torch.equal(output(ours, IMAGE), output(theirs, IMAGE))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm:UserWarning")  # of any nn.LSTM, in any order
def test_a_copy_is_a_module_of_its_size():
    model = drawn(words(), dtype=torch.float32).train()
    model.lstm1.requires_grad_(False)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model(IDS).sum().backward()
    small = prune(model, IDS, keep={"embedding": 4, "lstm1": 5, "lstm2": 3})
    assert torch.equal(torch.get_rng_state(), random)
    fresh = words((4, 5, 3))
    assert repr(small) == repr(fresh)
    fresh.load_state_dict(small.state_dict())
    assert torch.equal(output(fresh, IDS), output(small, IDS))
    assert [p.requires_grad for p in small.lstm1.parameters()] == [False] * 4
    assert all(p.requires_grad for p in small.lstm2.parameters())
    assert small.training
    small(IDS).sum().backward()  # gradients of the old shapes are gone
    exported = torch.export.export(small.eval(), (IDS,)).module()
    assert_close(exported(IDS).detach(), output(small, IDS), terms=100)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(output(prune(model, IDS, keep={}), IDS), output(model, IDS))
    small = prune(model.bfloat16(), IDS, keep={"lstm2": 4})
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("wrapped", [lambda out: (out, None), lambda out: SimpleNamespace(logits=out)])
def test_outputs_may_be_tuples_or_objects_with_logits(wrapped):
    model = Net(lambda m, ids: wrapped(m.body(ids)), body=words())
    assert prune(model, IDS, keep={"body.lstm1": 5}).body.lstm1.hidden_size == 5


def three(forward, **layers):
    return Net(forward, **dict(a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 2)) | layers)


def before_c(layer):
    return three(lambda m, x: m.c(m.n(m.b(m.a(x)))), n=layer)


def recurrent(layer):
    return three(lambda m, x: m.c(m.r(m.a(x))[0]), r=layer)


def whole(x):
    assert x.shape[1] == 6
    return x


def tied():
    model = words((8, 12, 8))
    model.head.weight = model.embedding.weight
    return model


def zero_head():
    """The outputs of any cut would be the same."""
    model = three(lambda m, x: m.c(m.b(m.a(x)).flip(1)))
    nn.init.zeros_(model.c.weight)
    return model


def with_nan():
    """A unit's norm is NaN, which topk takes for the largest."""
    model = three(lambda m, x: m.c(m.b(m.a(x))))
    model.a.weight.data[0, 0] = torch.nan
    return model


CHAIN = three(lambda m, x: m.c(m.b(m.a(x))))
SHUFFLE = [0, 3, 1, 4, 2, 5]
GROUPED = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3))
TRANSFORMER = random_backbone("llama", num_layers=1, vocab=64, hidden=32, intermediate=48)
# Pixels before channels: as many columns, other ones.
PIXELS_FIRST = Net(lambda m, x: m.b(m.a(x).permute(0, 2, 3, 1).flatten(1)), a=nn.Conv2d(1, 4, 3), b=nn.Linear(144, 3))


@pytest.mark.parametrize(
    ("model", "example", "keep", "message"),
    [
        (three(lambda m, x: m.c((h := m.a(x)) + m.b(h))), X, {"a": 3}, "'a' cannot lose units"),
        (three(lambda m, x: m.c(m.b(torch.sigmoid(m.a(x))))), X, {"a": 3}, "'a' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.a(x)).flip(1))), X, {"b": 3}, "'b' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.a(x).softmax(1)))), X, {"a": 3}, "'a' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.a(x)).sum() * x)), X, {"b": 3}, "'b' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.a(x).repeat_interleave(2, 1)[:, SHUFFLE]))), X, {"a": 3}, "'a' cannot lose unit"),
        (three(lambda m, x: m.c(m.b(whole(m.a(x))))), X, {"a": 3}, "'a' cannot lose units"),
        (zero_head(), X, {"b": 3}, "'b' cannot lose units"),
        (with_nan(), X, {"a": 3}, "'a' has weights that are not finite"),
        (PIXELS_FIRST, IMAGE, {"a": 2}, "'a' cannot lose units"),
        (three(lambda m, x: m.c(m.b(m.b(m.a(x))))), X, {"a": 3}, "'b' is called twice"),
        (tied(), IDS, {"lstm1": 3}, "'head' is called twice, or shares its weights"),
        (before_c(nn.LayerNorm(6)), X, {"b": 3}, "'n' cannot be cut here"),
        (before_c(nn.PReLU(6)), X, {"b": 3}, "'n' cannot be cut here"),
        (GROUPED, IMAGE, {"0": 2}, "'1' cannot be cut here"),
        (TRANSFORMER, IDS, {"lm_head": 3}, "cannot be cut here"),
        (three(lambda m, x: m.c(m.a(x)), n=nn.PReLU(6)), X, {"b": 3}, "a layer of keep must be one of 'a', got 'b'"),
        (CHAIN, X, {"c": 1}, "must be one of 'a', 'b', got 'c'"),
        (CHAIN, X, {"b": 7}, r"keep\['b'\] must be between 1 and 6, got 7"),
        (CHAIN, X, {"b": 0}, r"keep\['b'\] must be between 1 and 6, got 0"),
        (recurrent(nn.LSTM(6, 6, 2)), X, {"a": 3}, "'r' cannot .* one layer.*num_layers=2"),
        (recurrent(nn.LSTM(6, 3, bidirectional=True)), X, {"a": 3}, "'r'.*bidirectional"),
        (recurrent(nn.LSTM(6, 8, proj_size=6)), X, {"a": 3}, "'r' cannot be cut here"),
        (recurrent(nn.GRU(6, 6)), X, {"a": 3}, "'r' cannot be cut here"),
    ],
)
# torch warns of the proj_size that is refused.
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_what_is_no_chain_is_refused(model, example, keep, message):
    with pytest.raises(ValueError, match=message):
        prune(model, example, keep=keep)


def by_hand(model, example):
    """Half the floating-point operations that PyTorch counts; an LSTM as its products, a step at a time."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if isinstance(model, WordLSTM):
            x = model.embedding(example)
            for lstm in (model.lstm1, model.lstm2):
                state = torch.zeros(*x.shape[:2], lstm.hidden_size)
                for step in range(x.shape[1]):
                    x[:, step] @ lstm.weight_ih_l0.T + state[:, step] @ lstm.weight_hh_l0.T
                x = state
            model.head(x)
        else:
            model(example)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("model", "example"), [(separable(8, 12, 16), IMAGE), (flattened(), IMAGE), (words(), IDS), (nn.Linear(6, 6), X)]
)
def test_macs_are_half_the_operations(model, example):
    assert macs(model, example) == by_hand(model.eval(), example)


def test_resources_leave_the_model_as_it_is():
    model, threads = separable(4, 6).train(), torch.get_num_threads()
    before = copy.deepcopy(model.state_dict())
    assert latency(model, IMAGE, seconds=0.01) > 0
    assert macs(model, IMAGE) > 0
    assert model.training
    assert not model._forward_hooks
    assert torch.get_num_threads() == threads
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def mlp():
    return drawn(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2)))


def test_a_round_is_netadapts():
    """Brute force: every layer alone loses units one by one until the target; of these, the best by score."""
    model, x = mlp(), X.double()
    reference = output(model, x)
    tuned = []

    def score(m):
        assert not m.training
        return -float((output(m, x) - reference).square().sum())

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
    assert torch.equal(output(found.model, x), output(best, x))


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
    model = drawn(words(), dtype=torch.float32)
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
