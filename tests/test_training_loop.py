"""The loop alone; interrupted and resumed it is tested with each training that runs it."""

import math

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tqdm import tqdm

from plpkg.backbones import random_backbone
from plpkg.training_loop import TrainingRun, learn, logits_of, rising, rising_and_falling


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


@pytest.mark.parametrize(("stop", "saved"), [(0, [3, 6, 7]), (5, [6, 7]), (7, [])])
def test_a_checkpoint_comes_after_the_callers_turn_and_after_the_last_step(tmp_path, stop, saved):
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def run(until):
        """The steps made, and after which of them a checkpoint was there when the next began."""
        run, seen, kept = TrainingRun(7, tmp_path, {"name": "this"}, checkpoint_every=3), [], set()
        run.begin("", False, weight=torch.nn.ParameterList([weight]), optimizer=optimizer)

        def gradient(step):
            kept.add(run.saved)
            weight.grad = torch.ones(())
            return 0.0

        for done, _ in run.learn(gradient, [optimizer], lambda step: 1.0):
            seen.append(done)
            run.log.append(done)
            assert not run.settled
            if done == until:
                return run, kept
        return run, kept | {run.saved}

    if stop:
        stopped, _ = run(stop)
        assert stopped.done == stop - 1  # the caller's turn has not ended
        stopped.done, stopped.settled = stop, True
        stopped.save()
        with torch.no_grad():
            weight.fill_(9.0)  # what comes from the checkpoint replaces it
    whole, kept = run(None)
    assert sorted(kept - {stop}) == [done for done in saved if done > stop]
    assert (whole.log, weight.item(), whole.seconds > 0) == ([1, 2, 3, 4, 5, 6, 7], -7.0, True)
    with pytest.raises(ValueError, match="holds a run with name='this', now 'other'"):
        TrainingRun(7, tmp_path, {"name": "other"})


def test_one_process_of_several_writes_and_without_a_folder_nobody_does(tmp_path):
    for folder, writes in ((tmp_path, False), (None, True)):
        run = TrainingRun(2, folder, {}, writes=writes)
        run.begin("", True)
        assert [done for done, _ in run.learn(lambda step: 0.0, [], float)] == [1, 2]
        assert list(tmp_path.iterdir()) == []


def test_a_run_without_an_identity_goes_on(tmp_path):
    for done in ([1, 2], []):
        run = TrainingRun(2, tmp_path)
        run.begin("", False)
        assert [step for step, _ in run.learn(lambda step: 0.0, [], float)] == done


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_updates_nothing(loss):
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def gradient(step):
        weight.grad = torch.ones(())
        return loss if step == 2 else 1.0

    with pytest.raises(FloatingPointError, match=f"the loss of step 3 is {loss}: take a lower lr"):
        list(learn(steps(), gradient, [optimizer], lambda step: 1.0))
    assert weight.item() == -2.0


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
