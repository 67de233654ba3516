"""Figures carry the numbers they are drawn from, and say them."""

import re

import matplotlib.pyplot as plt
import pytest

from plpkg import theme
from plpkg.clipping import dataflow, plots, recorded, stack_costs
from plpkg.memory import MIB


def test_parts_add_up():
    memory = dataflow.emulate("ghost", 2**17)
    ax = plots.parts(memory, "first backward")
    bars = [patch.get_width() for patch in ax.patches]
    assert sum(bars) == pytest.approx(memory.increase_bytes("first backward") / MIB)
    assert "copy of dL/dh1 1,280" in theme.alt(ax.figure)


def test_costs_are_relative_to_sgd():
    found = stack_costs(8, 16, (64, 32, 16))
    ax = plots.costs(found, "ghost")
    heights = [patch.get_height() for patch in ax.patches]
    rows = found.rows()
    assert heights == pytest.approx([row["of SGD's peak"] for row in rows] + [row["of SGD's"] for row in rows])


def test_the_crossing_is_marked():
    ax = plots.gram_or_gradient(768, 768)
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    lengths = list(ax.lines[0].get_xdata())
    cheaper = [
        t for t, a, b in zip(lengths, lines["Gram matrices, MFLOP"], lines["gradient, MFLOP"], strict=True) if a > b
    ]
    assert min(cheaper) == 512
    assert "T = 384" in theme.alt(ax.figure)


@pytest.mark.parametrize("case", recorded.cases())
def test_measured_points_are_the_recorded_ones(case):
    table = recorded.costs(case)
    ax = plots.measured(case)
    assert [line.get_ydata()[0] for line in ax.lines[: len(table)]] == list(table["ratio"])
    plt.close(ax.figure)


def test_the_grid_is_complete():
    table = recorded.grid()
    ax = plots.grid()
    drawn = sorted(y for line in ax.lines[:-1] for y in line.get_ydata())
    assert drawn == sorted(table["ratio"])
    low = re.search(r"takes (\d\.\d\d)", theme.alt(ax.figure)).group(1)
    assert low == f"{table['ratio'].min():.2f}"


@pytest.mark.parametrize("what", ["accuracy", "bits_per_byte"])
def test_the_epsilon_curve_is_the_recorded_one(what):
    table = recorded.learning("accuracy")
    ax = plots.epsilon_curve(what)
    private = table[table["case"] == "private"]
    assert ax.get_legend_handles_labels()[1] == sorted(private["method"].unique())
    runs = [line for line in ax.lines if line.get_marker() == "."]
    assert sorted(y for line in runs for y in line.get_ydata()) == sorted(private[what])
    untuned = table[table["method"] == "none"][what].mean()
    assert f"not fine-tuned {untuned:.4g}" in theme.alt(ax.figure)
    with pytest.raises(ValueError, match="what must be one of 'accuracy', 'bits_per_byte', got 'loss'"):
        plots.epsilon_curve("loss")


def test_exposures_are_the_recorded_ones():
    table = recorded.learning("exposure")
    ax = plots.exposure()
    means = table.groupby(["method", "case", table["epsilon"].round(1)])["mean_exposure"].mean()
    assert sorted(patch.get_width() for patch in ax.patches) == pytest.approx(sorted(means))
    assert "LoRA r=16, not clipped 9.0" in theme.alt(ax.figure)
