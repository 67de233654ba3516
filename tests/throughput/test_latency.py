import pytest
from hypothesis import given, settings, strategies as st

from plpkg.catalog import Link
from plpkg.throughput import best_rank, break_even_rtt_s, decode, overlap_rank

MODELS = ("llama-2-7b", "llama-2-13b", "llama-30b")


@pytest.mark.parametrize(("phone_only", "expected_ms"), [(5.7, (4.2, 3.1, 1.6)), (8.1, (2.7, 1.9, 0.8))])
def test_break_even_of_the_published_speeds(phone_only, expected_ms):
    found = [1e3 * break_even_rtt_s(model, phone_only, accounting="figure") for model in MODELS]
    assert found == pytest.approx(expected_ms, abs=0.051)


@settings(max_examples=40, deadline=None)
@given(rank=st.integers(1, 512), phone_only=st.floats(0.5, 20), draft_tokens=st.integers(0, 4))
def test_break_even_is_where_the_speeds_meet(rank, phone_only, draft_tokens):
    run = dict(draft_tokens=draft_tokens, acceptance_rate=0.6)
    rtt_s = break_even_rtt_s("llama-2-7b", phone_only, rank, **run)
    if rtt_s >= 0:
        assert decode("llama-2-7b", rank, rtt_s=rtt_s, **run).tokens_per_s == pytest.approx(phone_only)
    else:
        assert decode("llama-2-7b", rank, rtt_s=0, **run).tokens_per_s < phone_only


@settings(max_examples=40, deadline=None)
@given(target=st.floats(1, 28.5), rtt_s=st.sampled_from([0.0, 0.0005, 0.001]))
def test_best_rank_is_the_last_that_is_fast_enough(target, rtt_s):
    if decode("llama-2-7b", 1, rtt_s=rtt_s).tokens_per_s < target:
        with pytest.raises(ValueError, match="no rank of llama-2-7b reaches"):
            best_rank("llama-2-7b", target, rtt_s=rtt_s)
        return
    rank = best_rank("llama-2-7b", target, rtt_s=rtt_s)
    assert decode("llama-2-7b", rank, rtt_s=rtt_s).tokens_per_s >= target
    if rank < 4096:
        assert decode("llama-2-7b", rank + 1, rtt_s=rtt_s).tokens_per_s < target


def test_best_rank_says_how_fast_rank_one_is():
    with pytest.raises(ValueError, match=r"no rank of llama-2-7b reaches 30 tokens/s: rank 1 gives 29\.\d\d"):
        best_rank("llama-2-7b", 30)


def test_overlap_of_the_publication():
    assert [overlap_rank(model) for model in MODELS] == [108, 169, 286]
    # The slower the GPU, the longer its projections take, and the more hides behind them.
    assert [overlap_rank(model, gpu="published") for model in MODELS] == [427, 458, 513]


@pytest.mark.parametrize("leg", ["downlink", "round_trip"])
def test_overlap_is_where_the_leg_takes_as_long_as_qkv(leg):
    rank = overlap_rank("llama-3.1-8b", leg=leg)
    qkv_s = 4096 * (4096 + 2 * 1024) * 2 / 1935e9

    def leg_s(r):
        return 3 * 16 * r / 100e6 + (3 * 16 * r / 60e6 if leg == "round_trip" else 0)

    assert leg_s(rank) <= qkv_s < leg_s(rank + 1)


def test_nothing_hides_behind_a_real_delay():
    assert overlap_rank("llama-30b", "lan") == 0
    assert overlap_rank("llama-30b", Link("fibre", 1e9, 1e9, 20e-6)) > 0


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="leg must be one of 'downlink', 'round_trip', got 'up'"):
        overlap_rank("gpt2", leg="up")
    with pytest.raises(ValueError, match="phone_only_tokens_per_s must be greater than 0, got 0"):
        break_even_rtt_s("gpt2", 0)
