"""The loop alone; interrupted and resumed it is tested with each training that runs it."""

import math

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tqdm import tqdm

from plpkg.backbones import random_backbone
from plpkg.learning import learn, logits_of, rising, rising_and_falling


def steps(first=0, total=7):
    return tqdm(range(first, total), total=total, disable=True)


def test_rates_rise_and_fall():
    assert [rising(step, 3) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [rising_and_falling(step, 1, 5) for step in range(5)] == [0.5, 1.0, 0.75, 0.5, 0.25]
    assert rising_and_falling(0, 0, 1) == 1.0


def test_every_update_has_its_rate_and_a_clean_gradient():
    weight = torch.nn.Parameter(torch.zeros(()))

    def gradient(step):
        (weight * 1.0).backward()
        return float(step)

    made = list(learn(steps(), gradient, [torch.optim.SGD([weight], lr=9.0)], lambda step: step + 1.0))
    assert made == [(step + 1, step) for step in range(7)]
    assert weight.item() == -sum(range(1, 8))


@pytest.mark.parametrize(("first", "saved"), [(0, [3, 6, 7]), (5, [6, 7]), (7, [])])
def test_checkpoints_come_after_the_callers_turn_and_after_the_last_step(first, saved):
    order = []
    for done, _ in learn(steps(first), lambda step: 0.0, [], float, save=order.append, checkpoint_every=3):
        order.append(f"turn {done}")
    assert [entry for entry in order if isinstance(entry, int)] == saved
    assert all(order[order.index(done) - 1] == f"turn {done}" for done in saved)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_updates_nothing(loss):
    weight, saved = torch.nn.Parameter(torch.zeros(())), []
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def gradient(step):
        weight.grad = torch.ones(())
        return loss if step == 2 else 1.0

    with pytest.raises(FloatingPointError, match=f"the loss of step 3 is {loss}: take a lower lr"):
        list(learn(steps(), gradient, [optimizer], lambda step: 1.0, save=saved.append))
    assert (weight.item(), saved) == (-2.0, [1, 2])


def around(model):
    """What accelerate puts around a model that it places: a forward of the instance's own."""
    return add_hook_to_module(model, ModelHook())


def compiled(model):
    model.compile(backend="eager")
    return model


def hooked(model):
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    return model


@pytest.mark.parametrize("wrap", [around, compiled, hooked])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_the_logits_of_states_are_the_heads_alone_whatever_is_around_the_model(family, wrap):
    options = {"final_logit_softcapping": 0.5} if family == "gemma2" else {}
    model, ids = random_backbone(family, options=options), torch.arange(6)[None]
    expected, hidden = model(ids).logits[0], model.base_model(ids).last_hidden_state[0]
    body, names = model.base_model, list(model._modules)
    assert torch.equal(logits_of(wrap(model), hidden), expected)
    assert model.base_model is body
    assert list(model._modules) == names
