"""Figures carry the numbers they are drawn from, and say them."""

import matplotlib.pyplot as plt
import pytest

from plpkg import recorded, theme
from plpkg.clipping import costs, dataflow, plots
from plpkg.memory import MIB


def test_parts_add_up():
    memory = dataflow.emulate("ghost", 2**17)
    ax = plots.parts(memory, "first backward")
    bars = [patch.get_width() for patch in ax.patches]
    assert sum(bars) == pytest.approx(memory.increase_bytes("first backward") / MIB)
    assert "copy of dL/dh1 1,280" in theme.alt(ax.figure)


def test_costs_are_relative_to_sgd():
    stack = costs.stack_costs(8, 16, (64, 32, 16))
    ax = plots.costs(stack, "ghost")
    heights = [patch.get_height() for patch in ax.patches]
    rows = stack.rows()
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


@pytest.mark.parametrize(("section", "cases"), [("cost", 1), ("lora", 1), ("long", 3)])
def test_measured_points_are_the_recorded_ones(section, cases):
    parts = list(recorded.section("clipping_costs", section).groupby("case"))
    assert len(parts) == cases
    for case, rows in parts:
        ax = plots.measured(rows)
        assert ax.get_title() == case
        assert [line.get_ydata()[0] for line in ax.lines[: len(rows)]] == list(rows["ratio"])
        plt.close(ax.figure)


def test_a_plan_is_faster_than_ghost_clipping_in_its_memory():
    rows = recorded.section("clipping_costs", "grid")
    assert len(rows) == 17
    assert rows["ratio"].between(0.4, 0.8).all()  # as notebook 05 says
    assert (rows["peak_ratio"] <= 1.01).all()


@pytest.mark.parametrize("what", ["noise", "bits_per_byte"])
def test_noise_by_scale_is_the_recorded_one(what):
    rows = recorded.section("clipping_learning", "scale")
    ax = plots.noise_by_scale(rows, what)
    assert [list(line.get_ydata()) for line in ax.lines] == [list(some[what]) for _, some in rows.groupby("method")]
    assert "LoRA r=8: " in theme.alt(ax.figure)
    for method, some in rows.groupby("method"):  # as notebook 05 says: M's does not grow
        assert (some["noise"].nunique() == 1) == method.startswith("PrivateLoRA")
    with pytest.raises(ValueError, match="what must be one of 'noise', 'bits_per_byte', got 'loss'"):
        plots.noise_by_scale(rows, "loss")


@pytest.mark.parametrize("what", ["accuracy", "bits_per_byte"])
def test_the_epsilon_curve_is_the_recorded_one(what):
    rows = recorded.section("clipping_learning", "accuracy")
    ax = plots.epsilon_curve(rows, what)
    private = rows[rows["case"] == "private"]
    assert ax.get_legend_handles_labels()[1] == sorted(private["method"].unique())
    runs = [line for line in ax.lines if line.get_marker() == "."]
    assert sorted(y for line in runs for y in line.get_ydata()) == sorted(private[what])
    untuned = rows[rows["method"] == "none"][what].mean()
    assert f"not fine-tuned {untuned:.4g}" in theme.alt(ax.figure)
    with pytest.raises(ValueError, match="what must be one of 'accuracy', 'bits_per_byte', got 'loss'"):
        plots.epsilon_curve(rows, "loss")


def test_exposures_are_the_recorded_ones():
    rows = recorded.section("clipping_learning", "exposure")
    ax = plots.exposure(rows)
    means = rows.groupby(["method", "case", rows["epsilon"].round(1)])["mean_exposure"].mean()
    assert sorted(patch.get_width() for patch in ax.patches) == pytest.approx(sorted(means))
    assert "LoRA r=16, not clipped 9.0" in theme.alt(ax.figure)
    assert ax.get_yticklabels()[0].get_text() == "untuned"
