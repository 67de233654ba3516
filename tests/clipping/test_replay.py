"""A step that is made again with others around one example: what mixes them without a trace in the graph is refused."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate
from transformers import AutoConfig, AutoModelForCausalLM

from plpkg.clipping import clipped_gradients, gradients, make_private
from plpkg.clipping.dropout import RandomState
from plpkg.clipping.factors import Outer
from plpkg.clipping.guard import mixing, probe
from plpkg.clipping.guard.replay import PROJECTIONS, Made, Projections
from plpkg.clipping.training import samples

WIDTH, CLASSES = 6, 3


class Net(nn.Module):
    """Two layers, and what is between them."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.between = between or nn.Identity()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def straight_through(x, scale):
    """Rounded to multiples of a scale, whose gradient nobody sees."""
    return x + ((x / scale).round() * scale - x).detach()


class Backward(torch.autograd.Function):
    """An identity whose gradient is what ``change`` makes of it."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def hooked(change):
    def between(x):
        if x.requires_grad:
            x.register_hook(change)
        return x.tanh()

    return between


def by_function(change):
    return lambda x: Backward.apply(x, change)


FORWARD = {
    "largest number": lambda x: straight_through(x, x.detach().abs().max() / 7),
    "mean": lambda x: x - x.detach().mean(0),
    "rank": lambda x: x * (1 + x.detach().sum(1).argsort().argsort() / len(x))[:, None],
    "sum in float64, by numpy": lambda x: x + torch.from_numpy(x.detach().numpy().astype(float).sum(0)).float(),
}
BACKWARD = {
    "hook, norm of the batch": hooked(lambda g: g / g.norm()),
    "hook, largest": hooked(lambda g: g.clamp(-g.abs().median(), g.abs().median())),
    "function, sum of squares": by_function(lambda g: g / (1e-6 + g.square().mean().sqrt())),
}


def class_weights(output, target):
    weights = 1 / functional.one_hot(target, CLASSES).sum(0).clamp(min=1)
    return functional.cross_entropy(output, target, reduction="none") * weights[target]


def advantages(output, target):
    rewards = (output.detach().argmax(1) == target).float() + target
    return functional.cross_entropy(output, target, reduction="none") * (rewards - rewards.mean())


CRITERIA = {"class weights": class_weights, "advantages": advantages}


def batches(count=64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


def losses_by(criterion):
    return lambda model, batch: criterion(model(batch[0]), batch[1])


each = functools.partial(functional.cross_entropy, reduction="none")


def train(net, criterion=each, steps=20, **options):
    """Steps with samples of about 16."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    how = dict(noise_multiplier=1.0, max_grad_norm=1.0, seed=0, batch_size=16) | options
    private = make_private(net, optimizer, batches(), losses_by(criterion), **how)
    while private.steps < steps:
        for sample in private:
            private.step(sample)
    return private


@pytest.fixture
def always(monkeypatch):
    """Every step is made again. Gives what was found each time, ``""`` for nothing."""
    found, misfit = [], Made.misfit

    def noted(self, again):
        found.append(misfit(self, again))
        return found[-1]

    monkeypatch.setattr(mixing, "REPLAYED", 1)
    monkeypatch.setattr(Made, "misfit", noted)
    return found


@pytest.mark.parametrize("execution", ["book_keeping", "per_sample", "fast", "ghost"])
@pytest.mark.parametrize("between", FORWARD.values(), ids=FORWARD)
def test_mixing_on_the_way_forward(between, execution, always, monkeypatch):
    monkeypatch.setattr(probe, "_mixed", lambda one, two: False)  # the probe may see it as well
    with pytest.raises(ValueError, match="beside other examples the same one has another loss"):
        train(Net(Apply(between)), execution=execution)


@pytest.mark.parametrize("options", [{}, {"execution": "ghost"}, {"users": [i % 30 for i in range(64)]}])
@pytest.mark.parametrize("between", BACKWARD.values(), ids=BACKWARD)
def test_mixing_on_the_way_back(between, options, always):
    with pytest.raises(ValueError, match="mixed on the way back: beside other examples the same one has another grad"):
        train(Net(Apply(between)), **options)


@pytest.mark.parametrize("criterion", CRITERIA.values(), ids=CRITERIA)
def test_mixing_in_the_criterion(criterion, always):
    with pytest.raises(ValueError, match="beside other examples the same one has another loss"):
        train(Net(), criterion)


def mixup(rows):
    x, y = default_collate(rows)
    return 0.7 * x + 0.3 * x.roll(1, 0), y


def longest(rows):
    """Of random length, sorted by it."""
    return default_collate(sorted(rows, key=lambda row: row[0].sum().item()))


def centred(rows):
    x, y = default_collate(rows)
    return x - x.mean(0), y


@pytest.mark.parametrize("collate", [mixup, longest, centred])
@pytest.mark.parametrize("workers", [0, 2])
def test_mixing_in_the_collate_function(collate, workers, monkeypatch):
    monkeypatch.setattr(samples, "SELDOM", 1)
    loader = DataLoader(batches(), batch_size=16, collate_fn=collate, num_workers=workers)
    net = Net()
    private = make_private(
        net,
        torch.optim.SGD(net.parameters()),
        loader,
        losses_by(each),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=9,
    )

    def run():
        for sample in private:
            private.step(sample)

    with pytest.raises(ValueError, match=r"another loss .*a collate function that mixes or sorts"):
        run()


def padded(rows):
    """Lengths differ, so that a batch is as long as its longest."""
    x, y = zip(*rows, strict=True)
    texts = [row.abs().repeat(1 + int(row.abs().sum()) % 5) for row in x]
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.stack(y)


def with_a_mask(rows):
    x, y = default_collate(rows)
    return x, y, torch.eye(16)


@pytest.mark.parametrize("collate", [padded, with_a_mask, default_collate])
def test_a_collate_function_that_mixes_nothing(collate, monkeypatch):
    monkeypatch.setattr(samples, "SELDOM", 1)
    net = nn.Sequential(nn.Dropout(0.3), nn.Linear(1, CLASSES))
    loader = DataLoader(batches(), batch_size=16, collate_fn=collate)

    def losses(model, batch):
        return each(model(batch[0][..., None]).sum(1), batch[1])

    private = make_private(
        net, torch.optim.SGD(net.parameters()), loader, losses, noise_multiplier=1.0, max_grad_norm=1.0, epochs=9
    )
    for sample in private:
        private.step(sample)
    assert private.steps == 36


@pytest.mark.parametrize("criterion", CRITERIA.values(), ids=CRITERIA)
def test_mixing_in_a_loss_per_example(criterion, always):
    net, batch = Net(), batches(8)[:]

    def several():
        for _ in range(20):
            clipped_gradients(net, losses_by(criterion), batch, 1.0)

    with pytest.raises(ValueError, match="beside other examples the same one has another loss"):
        several()


DRAWS = {
    "PyTorch": lambda x: torch.rand(int((x > 0).sum())),
    "NumPy": lambda x: np.random.rand(int((x > 0).sum())),
    "Python": lambda x: [random.random() for _ in range(int((x > 0).sum()))],
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_that_depend_on_the_examples(draw, always):
    def between(x):
        if torch.is_grad_enabled():  # not in the guard's probe
            draw(x)
        return x

    with pytest.raises(ValueError, match="how many random numbers the model draws depends on what its examples say"):
        train(Net(Apply(between)))


class DropPath(nn.Module):
    def forward(self, x):
        return x * (torch.rand(len(x), 1) > 0.3) / 0.7


class Twice(Net):
    """Two passes and one loss."""

    def forward(self, x):
        return super().forward(x), super().forward(x.flip(1))


HONEST = {
    "dropout": lambda: Net(nn.Dropout(0.5)),
    "drop path": lambda: Net(DropPath()),
    "noise": lambda: Net(Apply(lambda x: x + torch.randn_like(x))),
    "python's dice": lambda: Net(Apply(lambda x: x * random.random() + float(np.random.rand()))),
    "batch norm that stands still": lambda: Net(nn.BatchNorm1d(8).eval().requires_grad_(False)),
    "checkpoints": lambda: Net(Apply(lambda x: checkpoint(nn.functional.dropout, x, 0.3, use_reentrant=False))),
    "rounded by itself": lambda: Net(Apply(lambda x: straight_through(x, x.detach().abs().amax(1, True) / 7))),
    "own gradient clipped": lambda: Net(Apply(by_function(lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1)))),
    "half": lambda: Net(Apply(lambda x: x.bfloat16().float())),
}


@pytest.mark.parametrize("options", [{}, {"execution": "fast"}, {"max_physical_batch_size": 5}])
@pytest.mark.parametrize("net", HONEST.values(), ids=HONEST)
def test_what_mixes_nothing_is_taken_and_judged(net, options, always):
    net = net()
    if isinstance(net.between, nn.BatchNorm1d):
        net.train = lambda mode=True: net  # as those do who keep it so
        net.training = True
    train(net, **options)
    assert always
    assert set(always) == {""}


def projections(**parts):
    result = Projections(0, seed=7)
    for key, value in parts.items():
        result.add(key, torch.full((2, 3, 4), value))
    return result


@pytest.mark.parametrize(
    ("loss", "gradient", "said"),
    [
        (1.0, 1.0, ""),
        (1 + 1e-6, 1.0, ""),
        (1 + 1e-4, 1.0, ""),
        (1 + 1e-4, 2.0, "another loss"),  # alike by chance: on the way back alone it would be the same
        (1 + 1e-6, 2.0, "on the way back"),
        (1.1, 1.0, "another loss"),
    ],
)
def test_the_loss_is_named_if_it_is_another_and_else_the_gradient(loss, gradient, said):
    random = RandomState()
    first = Made(torch.tensor(1.0), projections(first=1.0), random)
    sentence = first.misfit(Made(torch.tensor(loss), projections(first=gradient), random))
    assert said in sentence
    assert bool(said) == bool(sentence)


def test_experts_that_one_batch_does_not_ask():
    """A parameter that only one of the two batches used counts with nothing in the other."""
    assert not projections(first=1.0).misfit(projections(first=1.0, second=0.0), 1e-4)
    assert projections(first=1.0).misfit(projections(first=1.0, second=1.0), 1e-4)
    assert projections(first=1.0, second=1.0).misfit(projections(second=1.0), 1e-4)


def test_two_passes_and_one_loss(always):
    def apart(outputs, target):
        return functional.cross_entropy(sum(outputs), target, reduction="none")

    train(Twice(), apart)
    assert set(always) == {""}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch.func goes expert by expert
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_language_models_are_judged(family, always, lm_loss):
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = AutoConfig.for_model(family, **sizes, num_key_value_heads=1)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(0, 40, (5, 7), generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        clipped_gradients(model, lm_loss, {"input_ids": ids}, 1.0)
    assert always == [""] * 4


def test_outputs_on_the_way_to_others_count_once(always):
    """A model that gives its hidden states, one of which it reads itself, and one twice."""
    net = Net()

    def forward(x):
        hidden = net.first(x)
        output = net.last(hidden)
        return {"hidden": hidden, "output": output, "last": output}

    net.forward = forward
    for _ in range(3):
        clipped_gradients(net, lambda model, x: model(x)["output"].square().sum(1), torch.randn(5, WIDTH), 1.0)
    assert always == [""] * 3


@pytest.mark.parametrize("length", [4, 5])
def test_an_output_may_have_the_examples_second(length, always):
    """Also where there are as many positions as examples."""
    net, x = Net(), torch.randn(5, length, WIDTH, generator=torch.Generator().manual_seed(0))
    forward = net.forward
    net.forward = lambda x: forward(x).transpose(0, 1)
    for _ in range(10):
        clipped_gradients(net, lambda model, x: model(x).square().sum((0, 2)), x, 1.0)
    assert always == [""] * 10


def test_mixed_precision_is_judged(always):
    net, x = Net(nn.LayerNorm(8)), torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(0))

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).square().sum(1)

    for _ in range(10):
        clipped_gradients(net, loss, x, 1.0)
    assert set(always) == {""}


def test_a_model_that_does_not_repeat_itself_is_let_be(always):
    generator = torch.Generator().manual_seed(0)
    train(Net(Apply(lambda x: x * torch.rand(len(x), 1, generator=generator))))
    assert any(always)


def test_an_argument_of_a_criterion_may_be_as_long_as_a_batch(always):
    net, weights = Net(), torch.tensor([1.0, 2.0, 4.0])
    private = make_private(
        net, torch.optim.SGD(net.parameters(), lr=0.01), None, losses_by(functools.partial(each, weight=weights)),
        sample_rate=0.5, batch_size=4, noise_multiplier=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    for count in [CLASSES, CLASSES, 5, *[CLASSES] * 10]:
        private.step([batches(count)[:]])


def test_how_often_a_step_is_made_again(monkeypatch):
    checked = []
    monkeypatch.setattr(gradients, "check", lambda *args: checked.append(args))
    monkeypatch.setattr(samples._RANDOM, "randrange", lambda count: 1)
    monkeypatch.setattr(mixing._RANDOM, "randrange", lambda count: 0 if count == 100 and len(checked) == 3 else 1)
    train(Net(), steps=5)
    assert len(checked) == mixing.FIRST + 1


def test_the_training_goes_on_as_if_nobody_had_looked(monkeypatch):
    results = []
    for replayed in (1, 10**9):
        monkeypatch.setattr(mixing, "REPLAYED", replayed)
        torch.manual_seed(0)
        net = train(Net(nn.Dropout(0.5))).model
        results.append([*net.parameters(), torch.rand(1)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("groups", [1, 2])
def test_projections_are_those_of_the_gradient(groups):
    """Of factors, of one-hot rows, and of a gradient that was built: the same numbers."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = torch.randn(3, groups, 5, 4, generator=generator), torch.randn(3, groups, 5, 2, generator=generator)
    ids = torch.randint(0, 4, (3, 5), generator=generator)
    uses = [Outer(rows.double(), cols.double(), torch.Size((4 * groups, 2)))]
    if groups == 1:
        uses.append(Outer(ids, cols.double(), torch.Size((4, 2))))
    for use in uses:
        found = []
        for part in (use, use.instantiate()):
            projections = Projections(1, seed=7)
            projections.add("weight", part)
            projections.add("weight", part)
            found.append(projections.found["weight"])
        assert found[0].shape == (PROJECTIONS,)
        torch.testing.assert_close(*found)  # float64: the order of sums alone


def test_random_states_are_told_apart():
    for draw in (torch.rand, np.random.rand, lambda count: random.random()):
        before, same = RandomState(), RandomState()
        assert before == same
        draw(1)
        assert before != RandomState()
        before.restore()
        assert before == RandomState()
