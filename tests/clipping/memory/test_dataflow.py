"""The article's synthetic table, the tensors behind each figure, the switches, and the sums that must be right."""

import re

import pytest
import torch
from torch.func import grad, vmap

from plpkg.clipping.memory.dataflow import (
    EXECUTIONS,
    OPACUS_2024,
    PHASES,
    Choices,
    _Held,
    _step,
    emulate,
    measure,
)
from plpkg.clipping.memory.published import synthetic
from plpkg.memory import MIB, MemoryTimeline

from rounding import assert_close

OPACUS_1_6 = Choices(late_first_hook=False, deepcopy_grad=True)
NOTHING_SPARE = Choices(copy_backprops=False, double_buffer=False, noise_buffer=False, late_first_hook=False)
CELLS = synthetic().dropna(subset="reported_mib")


COLUMNS = ["batch", "method", "phase", "reported_mib", "tolerance_mib"]


@pytest.mark.parametrize(COLUMNS, list(CELLS[COLUMNS].itertuples(index=False, name=None)))
def test_published_figures(batch, method, phase, reported_mib, tolerance_mib):
    assert emulate(method, batch).increase_bytes(phase) / MIB == pytest.approx(reported_mib, abs=tolerance_mib)


def test_the_table_has_all_of_the_article():
    assert len(CELLS.query("phase != 'model'")) == 17
    assert CELLS.query("phase == 'model'")["reported_mib"].tolist() == [62.5] * 5


def test_what_was_out_of_memory():
    assert emulate("hooks", 2**17).increase_bytes("first backward") / 2**40 == pytest.approx(14.06, abs=0.005)


NORMS = dict.fromkeys(["norm 1", "norm 2", "|g|²", "|a|²", "|g|²|a|²"], 0.5)
BACKWARD = {"dL/dy": 640, "dL/dh1": 1280, "dL/dW2": 12.5}
PER_SAMPLE = {"per-sample 2": 400, "product 1": 1600, "per-sample 1": 1600, "gradient 2": 12.5, "dL/dW1": 50}
SMALL = {"dL/dh1": 0.3125, "copy of dL/dh1": 0.3125, "h1": -0.3125}
GHOST = {"dL/dh1": 1280, "copy of dL/dh1": 1280, "dL/dW1": 50, "gradient 2": 12.5}


@pytest.mark.parametrize(
    ("execution", "batch", "phase", "expected"),
    [
        ("sgd", 2**17, "forward", {"h1": 1280, "y": 640}),
        ("sgd", 2**17, "first backward", BACKWARD),
        ("ghost", 2**17, "second backward", BACKWARD),
        ("ghost", 2**17, "loss", {"loss per element": 640, "loss per sample": 0.5}),
        ("ghost", 2**17, "first backward", GHOST | NORMS),
        ("hooks", 32, "first backward", PER_SAMPLE | SMALL),
        ("hooks", 32, "step", {"sum 1": 50, "sum 2": 12.5, "zeros": 50, "noise 1": 50}),
        ("ghost", 32, "step", {"noised 1": 50, "noise 1": 50, "zeros": 12.5, "noise 2": 12.5}),
    ],
)
def test_the_tensors_behind_a_figure(execution, batch, phase, expected):
    sizes = {tensor: size / MIB for tensor, size in emulate(execution, batch).parts_bytes[phase].items()}
    assert {tensor: size for tensor, size in sizes.items() if abs(size) > 0.001} == expected


def test_a_step_says_its_increases():
    step = emulate("ghost", 64)
    assert [row["phase"] for row in step.rows()] == [phase for phase in PHASES if phase in step.parts_bytes]
    assert repr(step).startswith("ghost, batch 64, 5120 → 2560 → 1280: model +62.50, forward +0.94, loss +0.31")


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("choices", [OPACUS_2024, OPACUS_1_6, NOTHING_SPARE])
@pytest.mark.parametrize("widths", [(7, 5, 3), (4, 6, 2, 5), (3, 2)])
def test_fake_and_real_agree_to_the_byte(execution, choices, widths):
    steps = []
    measure(lambda timeline: steps.append(_step(timeline, execution, 6, widths, choices)), fake=False)
    assert emulate(execution, 6, widths, choices).parts_bytes == steps[0].parts_bytes


@pytest.mark.parametrize(("batch", "widths"), [(8, (640, 320, 160)), (48, (300, 200, 100)), (5, (64, 256, 512))])
def test_each_choice_costs_what_the_formula_says(batch, widths):
    read, hidden, out = widths
    first, second = 4 * read * hidden, 4 * hidden * out  # bytes of the two weights

    def saved(execution, phase, **choice):
        base = emulate(execution, batch, widths).increase_bytes(phase)
        return base - emulate(execution, batch, widths, Choices(**choice)).increase_bytes(phase)

    # The highest point is the first layer's hook or the second's, whichever is higher; the rest is common.
    def hooks(copy, buffer):
        two = 4 * batch * (out + hidden + copy * out) + second + (1 + buffer) * batch * second
        one = 4 * batch * copy * hidden + first + second + batch * second + (1 + buffer) * batch * first
        return max(one, two)

    def ghost(copy):
        two = 4 * batch * (out + hidden + copy * out) + second + 4 * 4 * batch
        one = 4 * batch * (hidden + copy * hidden) + first + second + 5 * 4 * batch
        return max(one, two)

    assert saved("hooks", "first backward", double_buffer=False) == hooks(1, 1) - hooks(1, 0) > 0
    assert saved("hooks", "first backward", copy_backprops=False) == hooks(1, 1) - hooks(0, 1) > 0
    assert saved("ghost", "first backward", copy_backprops=False) == ghost(1) - ghost(0) > 0

    # The old noise is alive until the next is drawn; a copy lets the new gradient replace the old one.
    def step(zeros, copied):
        drawn = max((1 + zeros) * first, (2 - copied) * first + (1 + zeros) * second)
        added = max(2 * first, (1 - copied) * first + 2 * second)
        return copied * (first + second) + max(drawn, added)

    assert saved("ghost", "step", noise_buffer=False) == step(1, 0) - step(0, 0)
    assert saved("ghost", "step", deepcopy_grad=True) == step(1, 0) - step(1, 1) < 0


def test_a_late_first_hook_costs_the_first_weight():
    late, early = (emulate("hooks", 32, choices=Choices(late_first_hook=late)) for late in (True, False))
    assert late.increase_bytes("first backward") - early.increase_bytes("first backward") == 4 * 5120 * 2560


def test_the_needed_part_of_what_was_out_of_memory():
    needed = emulate("hooks", 32, choices=NOTHING_SPARE).increase_bytes("first backward")
    assert needed / MIB == 400 + 1600 + 12.5 + 50 + 4 / MIB  # per-sample gradients, .grad, and one number
    assert needed / emulate("hooks", 32).increase_bytes("first backward") == pytest.approx(0.563, abs=5e-4)


@pytest.mark.parametrize("choices", [OPACUS_2024, OPACUS_1_6, NOTHING_SPARE])
@pytest.mark.parametrize("execution", ["hooks", "ghost"])
def test_what_is_emulated_is_clipping(execution, choices):
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(6, width, generator=generator) for width in (7, 3))
    first, second = (
        torch.empty(out, read).normal_(std=read**-0.5, generator=generator) for read, out in ((7, 5), (5, 3))
    )

    def loss(weights, x, target):
        return (x @ weights[0].T @ weights[1].T - target).square().mean()

    gradients = vmap(grad(loss), (None, 0, 0))((first, second), x, target)
    norms = sum(g.flatten(1).square().sum(1) for g in gradients).sqrt()
    clip = norms.median().item()  # half are clipped, half are left alone
    steps = []
    measure(lambda line: steps.append(_step(line, execution, 6, (7, 5, 3), choices, clip, 0.0)), fake=False)
    for name, weight, gradient in zip(("W1", "W2"), (first, second), gradients, strict=True):
        clipped = torch.einsum("b,boi->oi", (clip / norms).clamp(max=1), gradient)
        # Sums over the three widths, a norm of all weights, a sum over the batch.
        assert_close(steps[0][name], weight - 0.1 * clipped / 6, terms=(7 + 5 + 3) + (7 * 5 + 5 * 3) + 6)


def test_what_has_no_name_is_found():
    def step(timeline):
        held = _Held(timeline)
        with held.phase("forward"):
            held["x"] = torch.ones(3) + torch.ones(3)

    with pytest.raises(AssertionError, match="forward: the named tensors make 12 bytes, counted 36"):
        measure(step)


def test_a_name_is_given_once():
    held = _Held(MemoryTimeline())
    held["x"] = torch.ones(1)
    with pytest.raises(KeyError, match="'x' is held already"):
        held["x"] = torch.ones(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: emulate("vanilla", 32), "execution must be one of 'sgd', 'hooks', 'ghost', got 'vanilla'"),
        (lambda: emulate("sgd", 0), "batch must be a whole number of at least 1, got 0"),
        (lambda: emulate("sgd", 1, (4, 2.5)), "widths must be a whole number of at least 1, got 2.5"),
        (lambda: emulate("sgd", 1, (4,)), "widths must have at least an input and an output, got (4,)"),
        (lambda: Choices(double_buffer=1), "double_buffer must be True or False, got 1"),
        (lambda: emulate("sgd", 1).increase_bytes("second backward"), "got 'second backward'"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
