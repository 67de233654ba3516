"""Breaches that begin in the tenth step: each is refused before that step is released, or whenever it is looked at."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, default_collate

from plpkg.clipping import make_private
from plpkg.clipping.guard import mixing
from plpkg.clipping.training import samples

WIDTH, CLASSES, LATE = 6, 3, 9


class Net(nn.Module):
    """Two layers, and what ``between(net, x)`` does between them; ``late`` says whether it has begun."""

    def __init__(self, between, extra=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.extra, self.last = nn.Linear(WIDTH, 8), extra or nn.Identity(), nn.Linear(8, CLASSES)
        self.between, self.late, self.mixes, self.calls = [between], [False], False, 0
        self.register_buffer("kept", torch.zeros(8))

    def forward(self, x):
        return self.last(self.extra(self.between[0](self, self.first(x))))


class Backward(torch.autograd.Function):
    """An identity; the gradient is divided by its norm if it is ``on``."""

    @staticmethod
    def forward(ctx, x, on):
        ctx.on = on
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient / gradient.norm() if ctx.on else gradient), None


def same(net, x):
    return x


def begins(mixed):
    """A branch that is taken later."""
    return lambda net, x: mixed(x) if net.late[0] else x


def opens(mixed):
    """A factor that is not zero later."""
    return lambda net, x: x - float(net.late[0]) * mixed(x)


def counts(net, x):
    net.calls += 1
    return x - x.mean(0) if net.calls > 60 else x


def keeps(net, x):
    if net.late[0]:
        net.kept.copy_(x.detach()[0])
    return x + net.kept


def hooked(net, x):
    if net.late[0] and x.requires_grad:
        x.register_hook(lambda gradient: gradient / gradient.norm())
    return x


def rounded(net, x):
    scale = x.detach().abs().max() if net.late[0] else 1.0
    return x + 0.1 * ((x / scale).round() - x).detach()


def each(output, y, late):
    return functional.cross_entropy(output, y, reduction="none")


def weighted(output, y, late):
    weights = 1 / functional.one_hot(y, CLASSES).sum(0).clamp(min=1)
    return each(output, y, late) * weights[y] if late else each(output, y, late)


def exchanged(net):
    net.extra = nn.BatchNorm1d(8, affine=False)


def centred_hook(net):
    net.extra.register_forward_hook(lambda module, args, output: output - output.mean(0))


def other_forward(net):
    net.extra.forward = lambda x: x - x.mean(0)


def frozen():
    return nn.BatchNorm1d(8).requires_grad_(False).eval()


def stays(net):
    pass


AT_ONCE = {
    "branch": (begins(lambda x: x - x.mean(0)), stays, each),
    "branch without a gradient": (begins(lambda x: x - x.detach().mean(0)), stays, each),
    "what an example says": (lambda net, x: x - x.mean(0) if net.late[0] and (x > 0).any() else x, stays, each),
    "new autograd function": (begins(lambda x: Backward.apply(x, True)), stays, each),
    "attribute": (lambda net, x: x - x.mean(0) if net.mixes else x, lambda net: setattr(net, "mixes", True), each),
    "attribute as a factor": (lambda net, x: x - net.mixes * x.mean(0), lambda net: setattr(net, "mixes", 1.0), each),
    "counter": (counts, stays, each),
    "BatchNorm wakes": (same, lambda net: net.extra.train(), each),
    "layer exchanged": (same, exchanged, each),
    "forward hook": (same, centred_hook, each),
    "forward replaced": (same, other_forward, each),
    "buffer": (keeps, stays, each),
    "losses with a gradient": (
        same, stays, lambda output, y, late: each(output, y, late) + output.mean() if late else each(output, y, late)),
}  # fmt: skip
BY_CHANCE = {
    "factor": (opens(lambda x: x.mean(0)), stays, each),
    "small factor": (opens(lambda x: 0.01 * x.mean(0)), stays, each),
    "factor without a gradient": (opens(lambda x: x.detach().mean(0)), stays, each),
    "tensor": (lambda net, x: x - torch.tensor(float(net.late[0])) * x.mean(0), stays, each),
    "hook on the way back": (hooked, stays, each),
    "autograd function": (lambda net, x: Backward.apply(x, net.late[0]), stays, each),
    "rounded": (rounded, stays, each),
    "losses": (same, stays, weighted),
}


def steps_taken(between, change, losses, most, collate=default_collate):
    net = Net(between, frozen() if change is AT_ONCE["BatchNorm wakes"][1] else None)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(640, WIDTH, generator=generator), torch.randint(0, CLASSES, (640,), generator=generator)
    )
    private = make_private(
        net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01),
        DataLoader(data, batch_size=16, collate_fn=collate),
        lambda net, batch: losses(net(batch[0]), batch[1], net.late[0]),
        noise_multiplier=1.0, max_grad_norm=1.0, seed=0,
    )  # fmt: skip
    while private.steps < most:
        if private.steps == LATE:
            net.late[0] = True
            change(net)
        try:
            private.step(private.sample())
        except ValueError as error:
            return private.steps, str(error)
    return private.steps, ""


@pytest.mark.parametrize(("between", "change", "losses"), AT_ONCE.values(), ids=AT_ONCE)
def test_it_is_refused_before_the_step_in_which_it_begins(between, change, losses, monkeypatch):
    monkeypatch.setattr(mixing._RANDOM, "randrange", lambda count: 1)  # no look by chance
    taken, said = steps_taken(between, change, losses, 100)
    assert "mixed" in said or "by the others" in said or "keeps something of them" in said
    assert taken == LATE if between is not counts else LATE < taken < 60


@pytest.mark.parametrize(("between", "change", "losses"), BY_CHANCE.values(), ids=BY_CHANCE)
def test_the_rest_is_refused_in_a_step_that_is_looked_at(between, change, losses, monkeypatch):
    for module, name in ((mixing, "SELDOM"), (mixing, "REPLAYED"), (samples, "SELDOM")):
        monkeypatch.setattr(module, name, 1)
    taken, said = steps_taken(between, change, losses, LATE + 10)
    assert "mixed" in said
    assert LATE <= taken < LATE + 10


def test_what_changes_all_the_time_is_not_looked_at_all_the_time(monkeypatch):
    """A counter in the model, which mixes nothing, and graphs that differ from step to step."""
    monkeypatch.setattr(mixing._RANDOM, "randrange", lambda count: 1)
    looks, again = [], mixing.Guard.look_again
    monkeypatch.setattr(mixing.Guard, "look_again", lambda self: (looks.append(1), again(self))[1])

    def restless(net, x):
        net.calls += 1
        for _ in range(net.calls % 50):
            x = x + 1
        return x

    assert steps_taken(restless, stays, each, 60) == (60, "")
    assert len(looks) <= mixing.GRAPHS + mixing.RESTLESS + 1
