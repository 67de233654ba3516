"""Every published figure beside what is computed, and of each added column one number worked out by hand."""

from itertools import product

import pytest

from plpkg.throughput import decode, published


def test_resources():
    table = published.resources()
    for row in table.itertuples():
        if row.method == "PrivateLoRA":
            assert round(row.computed_mb, 1) == row.reported_mb
        else:
            # 999.0 stands where 1000.0 belongs, by every other cell of that row.
            assert row.computed_mb == pytest.approx(row.reported_mb, rel=0.0011 if row.reported_mb == 999.0 else 0.0001)
        assert row.computed_gflops == pytest.approx(row.reported_gflops, abs=0.05 if row.computed_gflops > 1 else 0.005)
    by_row = table.set_index(["model", "method", "bits"])
    assert by_row.loc[("llama-30b", "whole model", 3), "computed_mb"] == pytest.approx(12118.48, abs=0.005)
    assert by_row.loc[("llama-30b", "PrivateLoRA", 16), "computed_gflops"] == pytest.approx(0.43188, abs=5e-6)


@pytest.mark.parametrize("stage", ["decode", "prefill"])
def test_digitised_curves(stage):
    points = published.curves(stage)
    errors = (points["computed"] / points["tokens_per_s"] - 1).abs()
    assert errors.max() <= 0.002
    assert errors.quantile(0.5, interpolation="higher") <= 0.001
    assert points["difference_percent"].tolist() == pytest.approx((100 * errors).tolist())
    if stage == "prefill":
        assert points.set_index(["rank", "tokens"]).loc[(32, 1), "computed"] == pytest.approx(108.4, abs=0.1)


def test_no_other_sum_of_terms_meets_the_curves():
    """Of the 128 sums that leave out any of six terms, or the decoder's share, one is within 1.2 % at batch 1."""
    points = published.curves("decode").query("batch == 1")
    sums = [decode(p.model, p.rank) for p in points.itertuples()]
    terms = ["lm_head", "m", "a_and_b", "endpoints", "uplink", "downlink", "share"]
    parts = [e.breakdown() | {"share": e.breakdown()["decoder"] - 1 / e.gpu_tokens_per_s} for e in sums]
    near = []
    for kept in product((True, False), repeat=len(terms)):
        named = [term for term, keep in zip(terms, kept, strict=True) if keep]
        seconds = [1 / e.gpu_tokens_per_s + sum(part[t] for t in named) for e, part in zip(sums, parts, strict=True)]
        off = [abs(1 / s / p - 1) for s, p in zip(seconds, points["tokens_per_s"], strict=True)]
        near += [set(terms) - set(named)] if max(off) < 0.012 else []
    assert near == [{"m", "downlink"}]


def test_scores():
    table = published.scores()
    assert len(table) == 18
    assert table["computed"].tolist() == pytest.approx(table["m_s"].tolist(), abs=0.05)
    assert table[published.BENCHMARKS].mean(axis=1).tolist() == pytest.approx(table["average"].tolist(), abs=0.0501)
    private_lora = table.query("method == 'PL'").set_index("model")["computed"].to_dict()
    assert private_lora == pytest.approx({"llama-2-7b": 4.62, "llama-2-13b": 3.81, "llama-30b": 3.12}, abs=0.005)
