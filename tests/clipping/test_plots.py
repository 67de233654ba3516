"""Figures carry the numbers they are drawn from, and say them."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch

from plpkg import recorded
from plpkg.clipping import costs, plots
from plpkg.memory import MIB
from plpkg.show import theme


def test_costs_are_relative_to_sgd():
    stack = costs.stack_costs(8, 16, (64, 32, 16))
    ax = plots.costs(stack, "ghost")
    heights = [patch.get_height() for patch in ax.patches]
    rows = stack.rows()
    assert heights == pytest.approx([row["of SGD's peak"] for row in rows] + [row["of SGD's"] for row in rows])


def test_the_layer_has_the_sizes_of_its_tensors():
    batch, seq, read, written = 2, 256, 512, 1024
    alt = theme.alt(plots.layer(batch, seq, read, written).figure)
    a, g = torch.zeros(batch, seq, read), torch.zeros(batch, seq, written)
    assert f"a ({a.nbytes / MIB:g} MiB) and gets g ({g.nbytes / MIB:g} MiB)" in alt
    assert f"all examples' gradients ({(g.mT @ a).nbytes / MIB:g} MiB)" in alt
    assert f"Gram matrices ({((a @ a.mT).nbytes + (g @ g.mT).nbytes) / MIB:g} MiB)" in alt


def finding(name, **what):
    case = SimpleNamespace(name=name, lesson=f"A lesson of {name}.")
    return SimpleNamespace(case=case, ours="refuses: it", sensitivity=SimpleNamespace(ok=False), **what)


def test_every_bug_stands_with_its_lesson():
    bugs = [finding("tie", caught_by=("parity", "audit"), parity=1.0), finding("mix", caught_by=(), parity=None)]
    ax = plots.caught(SimpleNamespace(findings=bugs))
    texts = [text.get_text().replace("\n", " ") for text in ax.texts]
    seen = [line.get_marker() for line in ax.lines if len(line.get_xdata())]
    assert (seen.count("s"), seen.count("$?$"), seen.count("o")) == (2, 1, 5)
    assert texts.count("A lesson of tie.") == 1
    assert "tie (A lesson of tie): parity and audit; refuses. mix (A lesson of mix): nothing" in theme.alt(ax.figure)


@pytest.mark.parametrize(("section", "cases"), [("cost", 1), ("lora", 1), ("long", 3)])
def test_measured_points_are_the_recorded_ones(section, cases):
    parts = list(recorded.section("clipping_costs", section).groupby("case"))
    assert len(parts) == cases
    for case, rows in parts:
        ax = plots.measured(rows)
        assert ax.get_title() == case
        assert [list(line.get_xdata()) for line in ax.lines[:2]] == [list(rows["ratio"]), list(rows["peak_ratio"])]
        assert [label.get_text() for label in ax.get_yticklabels()] == list(rows["what"])
        plt.close(ax.figure)


def test_noise_grows_with_the_scale_of_factors_and_not_of_m():
    rows = recorded.section("clipping_learning", "scale")
    for method, some in rows.groupby("method"):  # as the claim prism-lora says
        assert (some["noise"].nunique() == 1) == method.startswith("PrivateLoRA")


def test_the_epsilon_curve_is_the_recorded_one():
    rows = recorded.section("clipping_learning", "accuracy")
    ax = plots.epsilon_curve(rows)
    tuned = rows[(rows["method"] != "none") & (rows["case"] != "clipped")]
    assert ax.get_legend_handles_labels()[1] == sorted(tuned["method"].unique())
    runs = [line for line in ax.lines if line.get_markerfacecolor() == "none"]
    assert sorted(y for line in runs for y in line.get_ydata()) == sorted(tuned["bits_per_byte"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "4", "16", "∞"]
    untuned = rows[rows["method"] == "none"]["bits_per_byte"].mean()
    assert f"not fine-tuned {untuned:.4g}" in theme.alt(ax.figure)


def test_settings_are_the_recorded_ones():
    rows = recorded.section("clipping_learning", "settings")
    ax = plots.settings(rows)
    gains = [patch.get_width() for patch in ax.patches]
    learnt = rows[rows["method"] != "none"].sort_values("bits_per_byte")
    marked = [label.get_text() for label in ax.get_yticklabels() if label.get_text().startswith("baseline")]
    assert marked == ["baseline: rate 0.01, batch 32, 12 steps"]
    assert [rows["bits_per_byte"].iloc[0] - gain / 1000 for gain in gains] == pytest.approx(
        list(learnt["bits_per_byte"])
    )
    assert learnt["epsilon"].between(3.9, 4).all()


def test_exposures_are_the_recorded_ones():
    rows = recorded.section("clipping_learning", "exposure")
    ax = plots.exposure(rows)
    means = rows.groupby(["method", "case", rows["epsilon"].round(1)])["mean_exposure"].mean()
    assert sorted(patch.get_width() for patch in ax.patches) == pytest.approx(sorted(means))
    points = [x for line in ax.lines if line.get_marker() == "o" for x in line.get_xdata()]
    assert sorted(points) == sorted(rows["mean_exposure"])
    crosses = [x for line in ax.lines if line.get_marker() == "x" for x in line.get_xdata()]
    assert sorted(crosses) == sorted(rows["max_exposure"])
    assert "LoRA r=16, not clipped 9.0" in theme.alt(ax.figure)
    assert ax.get_yticklabels()[0].get_text() == "untuned"
