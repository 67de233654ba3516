import pytest
from hypothesis import given, settings, strategies as st

from plpkg.throughput import against_rtt, best_rank, break_even_rtt_s, decode, schemes_against_rtt

MODELS = ("llama-2-7b", "llama-2-13b", "llama-30b")


@pytest.mark.parametrize(("phone_only", "expected_ms"), [(5.7, (4.2, 3.1, 1.6)), (8.1, (2.7, 1.9, 0.8))])
def test_break_even_of_the_published_speeds(phone_only, expected_ms):
    computed_ms = [1e3 * break_even_rtt_s(model, phone_only, accounting="figure") for model in MODELS]
    assert computed_ms == pytest.approx(expected_ms, abs=0.051)


@settings(max_examples=40)
@given(rank=st.integers(1, 512), phone_only=st.floats(0.5, 20), draft_tokens=st.integers(0, 4))
def test_break_even_is_where_the_speeds_meet(rank, phone_only, draft_tokens):
    run = dict(draft_tokens=draft_tokens, tokens_per_pass=1 + 0.3 * draft_tokens)
    rtt_s = break_even_rtt_s("llama-2-7b", phone_only, rank, **run)
    if rtt_s >= 0:
        assert decode("llama-2-7b", rank, rtt_s=rtt_s, **run).tokens_per_s == pytest.approx(phone_only)
    else:
        assert decode("llama-2-7b", rank, rtt_s=0, **run).tokens_per_s < phone_only


@settings(max_examples=40)
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


def test_best_rank_stops_at_the_narrowest_projection():
    assert best_rank("qwen2.5-0.5b", 1, link="lan", rtt_s=0) == 128
    assert best_rank("qwen2.5-0.5b", 1, link="lan", rtt_s=0, projections=1) == 896


def test_a_table_of_speeds():
    table = against_rtt(["llama-2-7b", "llama-30b"], (0, 10), accounting="figure")
    assert table.loc["llama-2-7b", 0] == pytest.approx(27.78, abs=0.005)
    assert table.loc["llama-30b", 10] == pytest.approx(1.46, abs=0.005)


def test_a_table_of_schemes():
    """At 20 ms, where the round trips of 33, 9 and 2 exchanges weigh most, and of one."""
    schemes = {
        "all": {},
        "eight": dict(adapted_layers=8),
        "one": dict(adapted_layers=1),
        "ladder": dict(method="ladder"),
    }
    table = schemes_against_rtt(schemes, (0, 20), model="llama-2-7b", link="5g")
    assert (table.index.name, table.columns.name) == ("scheme", "rtt_ms")
    for name, scheme in schemes.items():
        slow = 1 / decode("llama-2-7b", link="5g", rtt_s=0, **scheme).tokens_per_s
        slow += 0.02 * {"all": 33, "eight": 9, "one": 2, "ladder": 1}[name]
        assert table.loc[name, 20] == pytest.approx(1 / slow)
    assert schemes_against_rtt({"mine": dict(rank=8)}, (0,), model="gpt2", rank=16).loc["mine", 0] == pytest.approx(
        decode("gpt2", 8, rtt_s=0).tokens_per_s
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_rank("llama-2-7b", 30), r"no rank of llama-2-7b reaches 30 tokens/s: rank 1 gives 29\.\d\d"),
        (lambda: best_rank("llama-2-7b", 20, r_c2d=64), "r_c2d is what is being varied here"),
        (lambda: best_rank("llama-2-7b", 20, adapted_layers=0), "adapted_layers must be at least 1 .*, got 0"),
        (lambda: break_even_rtt_s("llama-2-7b", 5, rtt_s=0.1), "rtt_s is what is being varied here"),
        (lambda: break_even_rtt_s("gpt2", 0), "phone_only_tokens_per_s must be greater than 0, got 0"),
        (lambda: against_rtt(["llama-2-7b", "qwen2.5-7b"]), "llama-2-7b published, qwen2.5-7b roofline; pass gpu="),
        (lambda: against_rtt(["gpt2"], [0, "5"]), "each of rtts_ms must be at least 0, got '5'"),
        (lambda: against_rtt(["gpt2", "gpt2"]), "models must have different names, got gpt2 more than once"),
        (lambda: schemes_against_rtt({}), "schemes must hold at least one scheme of running a model, got {}"),
        (lambda: schemes_against_rtt({"a": dict(rtt_s=0.1)}, model="gpt2"), "rtt_s is what is being varied here"),
        (
            lambda: schemes_against_rtt({"a": {}, "b": dict(cloud_bits=8)}, model="llama-2-7b"),
            "a published, b roofline;",
        ),
        (lambda: against_rtt("gpt2"), "models must be a list of models, got the string 'gpt2'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
