"""Gradients from elsewhere: the same training as with losses, and what is refused."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.utils.data import TensorDataset

from plpkg.clipping import make_private
from plpkg.clipping.clip import CLIPPINGS

from rounding import assert_close, relative

SETTINGS = dict(batch_size=10, noise_multiplier=1.0, max_grad_norm=0.5, seed=0)
USERS = [i % 7 for i in range(40)]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def data():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 8, generator=generator), torch.randint(0, 4, (40,), generator=generator)
    return TensorDataset(x, y)


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def elsewhere(model, transform=grad_and_value, change=lambda x: x):
    """What another process would compute: each example's gradient, and its loss."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters, x, y):
        return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    def per_example(batch):
        x, y = batch
        return vmap(transform(loss), in_dims=(None, 0, 0))({n: p.detach() for n, p in own.items()}, change(x), y)

    return per_example


def private(model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, data(), **SETTINGS | settings)


def run(given, **settings):
    """The parameters after an epoch, ε, and the losses."""
    model = net()
    how = dict(per_example=elsewhere(model)) if given else dict(losses=losses)
    training = private(model, **how, **settings)
    shown = [training.step(sample).losses for sample in training]
    return torch.cat([p.detach().flatten() for p in model.parameters()]), training.epsilon(1e-5), torch.cat(shown)


SETTINGS_BESIDE = [
    *(dict(clipping=kind) for kind in CLIPPINGS),
    dict(max_physical_batch_size=3),
    *(dict(users=USERS), dict(users=USERS, max_physical_batch_size=4)),
]


@pytest.mark.parametrize("settings", SETTINGS_BESIDE)
def test_the_same_training_as_with_losses(settings):
    ours, ours_epsilon, ours_shown = run(True, **settings)
    theirs, epsilon, shown = run(False, **settings)
    # Steps of 0.1 times a mean of gradients and noise below 10, whose sums over 40 examples round.
    assert (ours - theirs).abs().max() < 10 * relative(40 * 8 * 16)
    assert ours_epsilon == epsilon
    assert_close(ours_shown, shown, 40 * 8 * 16)


def first_step(training):
    return training.step(training.sample())


def test_gradients_alone_will_do():
    model = net().eval()  # whose mode says nothing about somebody else's model
    training = private(model, per_example=elsewhere(model, grad))
    shown, count = first_step(training)
    assert training.steps == 1
    assert len(shown) == count > 0
    assert shown.isnan().all()


@pytest.mark.parametrize("change", [lambda x: x - x.mean(0), lambda x: x.softmax(0), lambda x: x * x.std(0)])
def test_mixing_is_seen(change):
    model = net()
    with pytest.raises(ValueError, match="per_example, or a collate function, mixes examples"):
        first_step(private(model, per_example=elsewhere(model, change=change)))


def test_it_is_told_which_batches_are_for_looking():
    model, told = net(), []

    def per_example(batch, look=False):
        told.append((look, len(batch[0])))
        return elsewhere(model)(batch)

    training = private(model, per_example=per_example)
    first_step(training)
    first_step(training)
    assert [look for look, _ in told] == [False, True, False, True]
    assert told[0][1] == told[1][1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda given: {"0.weight": given["0.weight"]}, r"a gradient of each of \['0.bias'.*got \['0.weight'\]"),
        (lambda given: list(given), "got list"),
        (
            lambda given: {n: g.sum(0) for n, g in given.items()},
            r"0.weight a gradient of \(\d+, 16, 8\), got \(16, 8\)",
        ),
    ],
)
def test_what_are_no_gradients_is_refused(change, said):
    model = net()
    with pytest.raises(ValueError, match=said):
        first_step(private(model, per_example=lambda batch: change(elsewhere(model, grad)(batch))))


def test_a_gradient_that_is_no_number_is_named_and_nothing_released():
    model = net()
    before = [p.clone() for p in model.parameters()]

    def per_example(batch):
        return {name: g * torch.nan for name, g in elsewhere(model, grad)(batch).items()}

    training = private(model, per_example=per_example)
    with pytest.raises(FloatingPointError, match="gradient of example 0 of"):
        first_step(training)
    assert training.steps == 0
    assert all(map(torch.equal, before, model.parameters()))


def test_what_it_cannot_be_beside():
    model = net()
    for other in (dict(losses=losses), dict(execution="ghost")):
        with pytest.raises(ValueError, match="leave losses and execution out"):
            private(model, per_example=elsewhere(model), **other)
    with pytest.raises(TypeError, match="must be callable, got int"):
        private(model, per_example=3)
