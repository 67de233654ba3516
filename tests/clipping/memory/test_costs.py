"""Costs on fake tensors beside real ones and beside closed forms."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from plpkg.clipping import clipped_gradients, dataflow, published
from plpkg.clipping.guard import mixing
from plpkg.clipping.memory.costs import COMPARED, our_step, stack_costs, two_layer_table
from plpkg.memory import MemoryTimeline

B, T, WIDTHS = 4, 24, (40, 30, 20)


@functools.cache
def small_stack():
    return stack_costs(B, T, WIDTHS)


@pytest.mark.parametrize("execution", COMPARED)
def test_fake_and_real_agree(execution, monkeypatch):
    for looks in ("SELDOM", "REPLAYED"):  # the guard's own passes are not counted
        monkeypatch.setattr(mixing, looks, 10**9)
    cost = small_stack().by_execution[execution]
    model = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Linear(30, 20, bias=False))
    x = torch.randn(B, T, 40)

    def loss(model, x):
        return model(x).square().mean((1, 2))

    def run():
        if execution == "sgd":
            loss(model, x).sum().backward()
        else:
            clipped_gradients(model, loss, x, 1.0, execution)

    for _ in range(mixing.FIRST):
        run()
    model.zero_grad()
    with FlopCounterMode(display=False) as counter, MemoryTimeline(label_saved=False) as timeline:
        timeline.track(model, x)
        run()
    assert counter.get_total_flops() == cost.flops
    assert abs(timeline.peak_bytes - cost.peak_bytes) <= 2048


def test_operations_are_the_closed_forms():
    costs = small_stack().by_execution
    layers = [(40, 30), (30, 20)]
    product = sum(2 * B * T * p * d for d, p in layers)
    below = 2 * B * T * 20 * 30  # the first layer's input needs no gradient
    gram = sum(2 * B * T * T * (p + d) for d, p in layers)
    added = sum(2 * B * p * d for d, p in layers)
    assert costs["sgd"].flops == 2 * product + below
    assert costs["per_sample"].flops == 2 * product + below + added
    assert costs["fast"].flops == 3 * product + 2 * below
    assert costs["ghost"].flops == 2 * product + 2 * below + gram


def test_memory_in_the_order_of_the_names():
    costs = stack_costs(64, 4, (512, 256, 128)).by_execution
    assert costs["per_sample"].peak_bytes > 64 * 4 * (512 * 256 + 256 * 128)
    assert costs["per_sample"].peak_bytes > costs["fast"].peak_bytes > costs["ghost"].peak_bytes
    assert costs["book_keeping"].peak_bytes < 1.2 * costs["sgd"].peak_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, (3, 2)), "batch must be a whole number of at least 1, got 0"),
        ((4, 0, (3, 2)), "seq must be"),
        ((4, 4, (3,)), r"widths must have at least an input and an output, got \(3,\)"),
        ((4, 4, (3, 0)), "widths must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_sizes_get_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        stack_costs(*arguments)


def test_a_published_step_takes_less_here_than_in_opacus():
    task = published.two_layer_task(2**17)

    def iteration(step):
        return dataflow.measure(step).phases[-1].increase_bytes

    sgd, theirs = (iteration(published.opacus_step(task, execution)) for execution in ("sgd", "ghost"))
    kept, per_sample, ghost = (iteration(our_step(task, how)) for how in ("book_keeping", "per_sample", "ghost"))
    assert kept < per_sample / 1000
    assert ghost < theirs
    assert ghost < 1.05 * sgd


def test_the_two_layer_table_has_opacus_beside_ours():
    table = two_layer_table((4, 8))
    opacus = ["SGD", "Opacus, hooks", "Opacus, fast", "Opacus, ghost"]
    assert list(table.index) == [*opacus, "plpkg, per_sample", "plpkg, fast", "plpkg, ghost", "plpkg, book_keeping"]
    assert (table.loc["Opacus, hooks"] > table.loc["plpkg, per_sample"]).all()
    assert (table[8] >= table[4]).all()
