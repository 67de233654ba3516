"""Each figure says what it shows, and draws the numbers that it was given."""

import pytest

from plpkg import catalog
from plpkg.show import theme
from plpkg.throughput import TERMS, decode, plots


def test_residuals_are_of_every_published_point():
    ax = plots.residuals()
    drawn = {line.get_label(): line for line in ax.lines[1:] if not line.get_label().startswith("_")}
    assert {name: len(line.get_ydata()) for name, line in drawn.items()} == {
        "llama-2-7b, decode": 12, "llama-2-13b, decode": 12, "llama-30b, decode": 12,
        "llama-2-7b, prefill of 1": 4, "llama-2-7b, prefill of 2048": 4,
    }  # fmt: skip
    assert max(abs(line.get_ydata()).max() for line in drawn.values()) < 0.2
    rank, reported = 512, 20.91  # one point of the curve of 7B
    literal = 100 * (decode("llama-2-7b", rank).tokens_per_s / reported - 1)
    assert min(ax.lines[2].get_ydata()) == pytest.approx(literal, abs=0.1)
    assert "llama-2-7b, decode, literal, -16.0 to" in theme.alt(ax.figure)


def test_the_roofline_has_a_panel_for_each_machine():
    measured = catalog.measured("throughput")
    thread, cloud = plots.roofline(measured)
    bound, turn, points = thread.lines
    assert turn.get_xdata()[0] == pytest.approx(91.5e9 / 2 / (40.11e9 / 4))
    assert bound.get_ydata()[0] == measured["roofline_ms"].min()
    assert bound.get_ydata()[-1] == pytest.approx(measured["roofline_ms"].iloc[-1] * 4096 / 256, rel=1e-3)
    assert list(points.get_ydata()) == list(measured["measured_ms"])
    assert cloud.lines[1].get_xdata()[0] == pytest.approx(312e12 / 1935e9)
    assert cloud.lines[6].get_ydata()[0] / cloud.lines[0].get_ydata()[0] == pytest.approx(146.4 / 37.1, rel=1e-3)
    assert "llama-2-7b 3.9" in theme.alt(thread.figure)


def test_breakdown_bars_are_the_terms():
    estimate = decode("llama-2-7b", link="5g", context=1000)
    ax = plots.breakdown({"split": estimate}, {"phone": 8.0})
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == pytest.approx([*(1e3 * s for s in estimate.breakdown().values()), 125.0])
    assert len(ax.get_legend().get_texts()) == len(TERMS)
    assert "largest part round trips" in theme.alt(ax.figure)


def test_against_rtt_starts_at_the_undelayed_speed():
    ax = plots.against_rtt(
        ["llama-2-7b"], {"phone alone": 8.1}, schemes={"ladder": dict(method="ladder")}, more_ms=[(0.4, 1), (2, 6)]
    )
    curve, ladder = (line.get_ydata() for line in ax.lines[:2])
    assert ladder[0] == pytest.approx(decode("llama-2-7b", rtt_s=0.0001, method="ladder").tokens_per_s)
    for drawn, band in zip(ax.collections, [(0.4, 1), (2, 6)], strict=True):
        edges = {decode("llama-2-7b", rtt_s=(0.1 + ms) / 1e3).tokens_per_s for ms in band}
        assert set(drawn.get_paths()[0].vertices[:, 1]) >= edges
    assert curve[0] == pytest.approx(decode("llama-2-7b", rtt_s=0.0001).tokens_per_s)
    assert list(curve) == sorted(curve, reverse=True)
    assert "27.0 at 0 ms" in theme.alt(ax.figure)


def test_phone_memory_bars():
    ax = plots.phone_memory_bars(["llama-2-7b", "gpt2"], 128, limit_mb=491.9)
    assert sum(bar.get_width() for bar in ax.patches[0::2]) == pytest.approx(527.43, abs=0.01)
    assert "llama-2-7b 527" in theme.alt(ax.figure)
    said = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label.endswith(", too thin to see") for label in said] == [False, False, False]
    assert "M, too thin to see" in [
        text.get_text() for text in plots.phone_memory_bars(["llama-3.1-8b"]).get_legend().get_texts()
    ]
