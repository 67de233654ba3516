"""Each figure says what it shows, and draws the numbers that it was given."""

import pytest

from plpkg import communication
from plpkg.communication import plots
from plpkg.show import theme


def test_the_split_names_what_each_side_holds_and_what_crosses():
    ax = plots.split()
    said = [text.get_text() for text in ax.texts]
    for name in ("phone", "network", "cloud", "embedding", "LM head", "A", "B", "attention and KV cache"):
        assert name in said
    assert [text[0] for text in said if text[1:3] == "  "] == ["1", "2", "3", "4"]
    assert "A x comes down" in theme.alt(ax.figure)


def test_sequence_chart_draws_every_message():
    messages = list(communication.low_rank_messages("gpt2", 8, adapted_layers=2))
    ax = plots.sequence_chart(messages)
    said = [text.get_text() for text in ax.texts if text.get_text()]
    assert len(said) == len(messages) == 6
    assert len(ax.lines) == communication.count(messages).round_trips == 3  # a bracket each
    assert said[1] == "layer 0: A x  (3 × 1 × 1 × 8)"
    assert "6 messages between device and cloud, 3 up and 3 down" in theme.alt(ax.figure)


def test_by_rank_draws_the_formula():
    ax = plots.by_rank("gpt2", (8, 16, 32))
    curve = ax.lines[0]
    assert curve.get_ydata() == pytest.approx([communication.low_rank("gpt2", r).total_bits / 1e3 for r in (8, 16, 32)])
    low, high = ax.get_ylim()
    assert all(low < y < high for line in ax.lines for y in line.get_ydata())
    assert "gpt2" in theme.alt(ax.figure)
    assert max(plots.by_rank("qwen2.5-0.5b").lines[0].get_xdata()) == 512


def test_by_model_stacks_residuals_and_end_points_on_given_axes():
    ax = plots.by_model(["llama-7b", "llama-30b"], rank=32)
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == pytest.approx([98.304, 184.32, 131.072, 212.992])
    assert "llama-7b 98 + 131; llama-30b 184 + 213" in theme.alt(ax.figure)
    ax = theme.axes()
    assert plots.by_model(["gpt2"], ax=ax) is ax


def test_link_time_stacks_the_seconds_of_the_link():
    traffic = communication.full_activations("llama-3.1-8b", endpoints=False, baseline="actual")
    ax = plots.link_time({"split": traffic}, "5g")
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([1e3 * s for s in traffic.seconds("5g").values()])
    assert ax.get_xlabel() == "milliseconds per token on 5g"
    assert "split 1129.4 ms" in theme.alt(ax.figure)
    without = plots.link_time({"split": traffic}, "5g-published")
    assert [text.get_text() for text in without.get_legend().get_texts()] == ["uplink", "downlink"]
