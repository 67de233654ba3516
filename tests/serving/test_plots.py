"""Each figure draws what its rows say, and says so in words."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from plpkg.serving import plots, widget

PEOPLE = pd.DataFrame({"tokens": [8, 32], "ratio": [4.2, 1.5], "backbone": [5.0, 1.2]})
DRIFT = pd.DataFrame({"case": ["bfloat16"] * 2 + ["float32"] * 2, "swaps": [1, 10] * 2})
DRIFT = DRIFT.assign(drift=[1e-3, 2e-3, 1e-8, 1e-7])
SPEED = pd.DataFrame({"case": ["distinct"] * 2 + ["identical"] * 2, "what": ["one batch", "merging"] * 2})
SPEED = SPEED.assign(adapters=[16, 16, 1, 1], tokens_per_s=[200.0, 30.0, 240.0, 150.0])


@pytest.mark.parametrize(
    ("plot", "rows", "said"),
    [
        (plots.people, PEOPLE, "4.2 at 8, 1.5 at 32 tokens"),
        (plots.drift, DRIFT, "after 10: bfloat16 0.002; float32 1e-07"),
        (plots.popularity, SPEED, "one batch: distinct 200, identical 240"),
    ],
)
def test_recorded_figures(plot, rows, said):
    ax = plt.subplots()[1]
    assert plot(rows, ax) is ax
    assert said in ax.alt_text


def test_values_are_drawn():
    assert [line.get_ydata().tolist() for line in plots.people(PEOPLE).lines[:2]] == [[4.2, 1.5], [5.0, 1.2]]
    assert sorted(bar.get_height() for bar in plots.popularity(SPEED).patches) == [30, 150, 200, 240]


def test_a_batch_has_a_block_for_each_token_twice_two_for_each_adapter_and_one_weight():
    ax = plots.batch([(0, 3, 0), (3, 4, 1), (4, 6, None)], ["ann", "bob"])
    assert len(ax.patches) == 2 * 6 + 2 * 2 + 1
    assert "tokens 0 to 2: ann; tokens 3 to 3: bob; tokens 4 to 5: none" in ax.alt_text


def test_the_widget_s_figure_says_what_the_widget_says():
    result = widget.compute("Llama-2-7B, A100", "skewed", 64, 32)
    ax = plots.decoding(result)
    assert [round(bar.get_width()) for bar in ax.patches] == [round(v) for v in result.tokens_per_s.values()]
    assert f"{result.tokens_per_s['one batch']:,.0f} tokens/s in one batch" in widget.read_out(result)
    assert f"{result.resident} such adapters fit" in widget.read_out(result)
    assert 0 < result.resident < 1000


def test_the_widget_has_a_setting_that_costs_half_of_the_speed():
    speeds = widget.compute("Llama-3.1-8B, H100", "distinct", 64, 64).tokens_per_s
    assert speeds["one batch"] < 0.55 * speeds["no adapters"]
