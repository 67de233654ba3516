"""Each figure draws what it is given, and says so in words; the energy model is its formula."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch

from plpkg.autonomy import OnlineLearner, Transfer, nets, plots

LOG = [{"step": step, "loss": loss} for step, loss in ((0, 5.0), (20, 4.5), (40, 4.75))]
SCHEMES = pd.DataFrame({"case": ["FedAvg", "last layer"], "points": [1.5, 2.5], "half_width": [0.5, 0.25]})
FAMILY = pd.DataFrame(
    {"case": ["unpruned", "half"] * 2, "macs_share": [1.0, 0.5] * 2, "accuracy": [0.2, 0.1, 0.4, 0.3]}
)


def test_devices_have_a_box_each_and_the_arrow_back_is_crossed_out():
    ax = plots.devices(["ann", "bob"])
    assert len(ax.patches) == 3
    arrows = [text for text in ax.texts if getattr(text, "arrow_patch", None)]
    right, down = ([arrow.xy[k] - arrow.xyann[k] for arrow in arrows] for k in (0, 1))
    assert [each > 0 for each in right] == [True, True, False, False]  # the cloud is on the left
    assert right[2] == 0 < down[2]  # suggestions leave a device
    back = arrows[-1]
    assert ax.lines[0].get_xydata()[0] == pytest.approx(
        [sum(ends) / 2 for ends in zip(back.xy, back.xyann, strict=True)]
    )
    assert "the devices of ann, bob" in ax.alt_text


def test_pictures_are_drawn_in_their_own_range():
    image = torch.arange(64.0).view(8, 8) - 30
    ax = plots.pictures({"first": image, "second": 2 * image})
    drawn = [each.get_array() for each in ax.images]
    assert len(drawn) == 2
    assert all(each.min() == 0 and each.max() == 1 for each in drawn)
    assert "first, second" in ax.alt_text


def test_learning_rings_the_best_step():
    ax = plots.learning({"slow": Transfer(None, {}, LOG, 40)})
    assert ax.lines[0].get_ydata().tolist() == [5.0, 4.5, 4.75]
    assert ax.lines[1].get_xdata().tolist() == [20]
    assert "slow from 5.00 to 4.50 at step 20, 4.75 at last" in ax.alt_text


def test_few_examples_have_a_line_for_each_way_of_the_writers_means():
    rows = [(w, case, n, gain * n) for w, gain in (("ann", 0.001), ("bob", 0.003)) for case in "ab" for n in (100, 300)]
    ax = plots.few(pd.DataFrame(rows, columns=["writer", "case", "examples", "gain"]), "nats")
    assert [line.get_xdata().tolist() for line in ax.lines[:2]] == [[100, 300]] * 2
    assert [line.get_ydata().tolist() for line in ax.lines[:2]] == [pytest.approx([0.2, 0.6])] * 2
    assert "a: 0.20 from 100, 0.60 from 300; b:" in ax.alt_text


def test_schemes_have_their_intervals():
    ax = plots.schemes(SCHEMES, "points", "points gained")
    bars = ax.containers[0]
    assert bars.lines[0].get_xdata().tolist() == [1.5, 2.5]
    assert [segment[:, 0].tolist() for segment in bars.lines[2][0].get_segments()] == [[1.0, 2.0], [2.25, 2.75]]
    assert "FedAvg 1.50 ± 0.50; last layer 2.50 ± 0.25" in ax.alt_text


def test_a_scheme_below_the_axis_is_written_at_its_edge():
    ax = plots.schemes(SCHEMES, "points", "points gained", low=2.0)
    assert ax.get_xlim()[0] == 2
    assert [(text.get_text(), text.get_position()) for text in ax.texts] == [(" ← 1.50", (2, 0))]


def test_a_stream_counts_errors_against_the_public_model():
    learner = OnlineLearner(nets.MobileNet().eval())
    learner.outcomes += [{"shown": s, "public": p, "personal": s} for s, p in ((1, 0), (0, 1), (0, 1), (1, 1))]
    learner.allowance = 1
    ax = plots.stream({"learner": learner})
    assert ax.collections[0].get_offsets().tolist() == [[3, -1]]  # where the allowance is spent
    assert ax.lines[0].get_ydata().tolist() == [0, 1, 0, -1, -1]
    assert "learner: -1 at the end, -1 at the worst" in ax.alt_text


def test_pareto_draws_every_seed():
    ax = plots.pareto(FAMILY)
    assert [line.get_ydata() for line in ax.lines] == [pytest.approx([20, 40]), pytest.approx([10, 30])]
    assert [list(line.get_xdata()) for line in ax.lines] == [[100, 100], [50, 50]]
    assert "unpruned 100 % of the work, 30.00 %; half 50 % of the work, 20.00 %" in ax.alt_text


def test_joules_is_power_times_time():
    assert plots.joules(3e9, 1.5, 0.5, 0.2) == pytest.approx((0.5 + 0.2 * 1.5**3) * 2)
    with pytest.raises(ValueError, match="ghz must be greater than 0, got 0"):
        plots.joules(1e9, 0, 0.5)


def test_plans_have_a_bar_each():
    ways = ("all", 2.0, 1.5, 5e3), ("head", 0.5, 1.0, 1e3)
    rows = [dict(zip(("learning", "minutes", "days", "joules"), way, strict=True)) for way in ways]
    ax = plots.plans(rows, plt.subplots()[1])
    assert [bar.get_width() for bar in ax.patches] == [2.0, 0.5]
    assert [text.get_text() for text in ax.texts] == [" 2 minutes in 1.5 days, 5 kJ", " 0.5 minutes in 1 days, 1 kJ"]
    assert "all: 2 minutes, 5 kJ; head: 0.5 minutes, 1 kJ" in ax.alt_text
