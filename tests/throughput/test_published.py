"""The columns added to the published tables, each against one number worked out by hand."""

import pytest

from plpkg.throughput import published


def test_headline_speeds():
    row = published.headline_speeds().loc["llama-2-13b"]
    assert row["reported"] == 21.1
    assert row["ratio"] == pytest.approx(21.052 / 21.1, abs=1e-4)
    assert (row["figure"], row["literal"]) == pytest.approx((21.05, 20.51), abs=0.005)


def test_resources():
    table = published.resources().set_index(["model", "method", "bits"])
    assert table.loc[("llama-30b", "whole model", 3), "computed_mb"] == pytest.approx(12118.48, abs=0.005)
    assert table.loc[("llama-30b", "PrivateLoRA", 16), "computed_mb"] == pytest.approx(431.88, abs=0.005)
    assert table.loc[("llama-30b", "PrivateLoRA", 16), "computed_gflops"] == pytest.approx(0.43188, abs=5e-6)


def test_curves():
    points = published.curves("prefill").set_index(["rank", "tokens"])
    assert points.loc[(32, 1), "computed"] == pytest.approx(108.4, abs=0.1)
    point = published.curves("decode").set_index(["model", "rank", "batch"]).loc[("llama-30b", 512, 2048)]
    assert point["difference_percent"] == pytest.approx(100 * abs(point["computed"] / 11.50 - 1))


def test_scores():
    table = published.scores()
    assert len(table) == 18
    assert (table["computed"] - table["m_s"]).abs().max() <= 0.05
