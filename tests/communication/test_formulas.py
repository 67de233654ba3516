"""The closed formulas: the article's figures to the bit, and every formula against its counting twin."""

import inspect

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from plpkg import communication, throughput
from plpkg.catalog import ModelShape
from plpkg.communication import full_activations, ladder, layer_cut, low_rank
from plpkg.communication.formulas import projection_dims
from plpkg.communication.run import Run
from plpkg.communication.schedule import _walk


def test_published_arithmetic_to_the_bit():
    assert full_activations("llama-7b", 1, False).total_bits == 4_194_304
    assert full_activations("llama-7b", 1, False, tokens=250).total_bits == 1_048_576_000
    assert low_rank("llama-7b", 32, projections=1, endpoints=False).total_bits == 32_768
    # What it leaves out: two projections of three, and the end points.
    assert low_rank("llama-7b", 32, endpoints=False).total_bits == 98_304
    token = low_rank("llama-7b", 32)
    assert (token.total_bits, token.round_trips) == (229_376, 33)


@pytest.mark.parametrize(
    ("rank", "one_projection", "actual", "three_projections"),
    [(32, 5.47, 2.69, 1.80), (64, 7.81, 3.85, 2.58), (128, 12.50, 6.15, 4.12)],
)
def test_reduction_per_baseline(rank, one_projection, actual, three_projections):
    token = low_rank("llama-7b", rank)
    shares = [
        100 * token.share_of(full_activations("llama-7b", 1, False)),
        100 * token.share_of(full_activations("llama-7b", 3, True, baseline="actual")),
        100 * token.share_of(full_activations("llama-7b", 3, True)),
    ]
    assert shares == pytest.approx([one_projection, actual, three_projections], abs=0.005)


def test_what_is_compared_counts_the_same_by_default():
    """Rank 64, q, k and v of every layer, end points, 16 bit: of this room's functions and of the speed's."""
    common = {"rank", "projections", "endpoints", "bits", "adapted_layers"}
    functions = (
        low_rank, full_activations, communication.low_rank_messages, throughput.decode, throughput.prefill,
    )  # fmt: skip
    defaults = {name: {} for name in common}
    for function in functions:
        for name, parameter in inspect.signature(function).parameters.items():
            if name in common:
                defaults[name][function.__name__] = parameter.default
    assert {name: set(found.values()) for name, found in defaults.items()} == {
        "rank": {64}, "projections": {3}, "endpoints": {True}, "bits": {16}, "adapted_layers": {None},
    }  # fmt: skip
    token, estimate = low_rank("llama-7b"), throughput.decode("llama-7b")
    assert token.total_bits / 8 == estimate.up_bytes_per_token + estimate.down_bytes_per_token
    assert 100 * token.share_of(full_activations("llama-7b")) == pytest.approx(2.58, abs=0.005)  # rank 64 above


@pytest.mark.parametrize(
    ("model", "rank", "up_kbit", "down_kbit"),
    [("llama-7b", 64, 325, 262), ("llama-7b", 128, 518, 459), ("llama-30b", 128, 944, 844)],
)
def test_training_traffic_of_the_derived_protocol(model, rank, up_kbit, down_kbit):
    token = low_rank(model, rank, phase="training")
    assert (token.uplink_bits / 1e3, token.downlink_bits / 1e3) == pytest.approx((up_kbit, down_kbit), abs=0.5)


def test_grouped_query_attention_narrows_what_comes_up():
    shape = full_activations("llama-3.1-8b", endpoints=False, baseline="actual")
    assert shape.downlink_bits == 4096 * 32 * 16
    assert shape.uplink_bits == (4096 + 1024 + 1024) * 32 * 16
    assert full_activations("llama-3.1-8b", endpoints=False).uplink_bits == 3 * 4096 * 32 * 16


def test_asymmetric_ranks_swap_in_the_backward_pass():
    forward = low_rank("gpt2", r_c2d=8, r_d2c=2, endpoints=False)
    assert forward.downlink_bits == 4 * forward.uplink_bits
    both = low_rank("gpt2", r_c2d=8, r_d2c=2, endpoints=False, phase="training")
    assert both.downlink_bits == forward.total_bits
    assert both.uplink_bits == forward.total_bits - 3 * 8 * 16  # the lowest layer's return, which nothing needs


def test_prefill_sends_one_final_hidden_unless_layers_follow_on_the_device():
    hidden = 4096 * 16
    last = low_rank("llama-7b", 32, tokens=100, phase="prefill")
    every = low_rank("llama-7b", 32, tokens=100, phase="prefill", final_hidden="all")
    assert every.total_bits == last.total_bits + 99 * hidden
    with_tail = low_rank("llama-7b", 32, tokens=100, phase="prefill", last_k=1)
    one_layer = 100 * 2 * 3 * 32 * 16
    assert with_tail.total_bits == last.total_bits + 99 * hidden - one_layer
    assert last.round_trips == 33


@pytest.mark.parametrize(
    ("phase", "after_layer", "up", "down", "round_trips"),
    [
        ("decode", 0, 1, 1, 1),
        ("decode", 5, 1, 1, 1),
        ("decode", 31, 1, 1, 1),
        ("training", 0, 1, 1, 1),  # nothing on the device wants a gradient
        ("training", 4, 2, 2, 2),
    ],
)
def test_a_cut_costs_the_same_wherever_it_is(phase, after_layer, up, down, round_trips):
    token = layer_cut("llama-7b", after_layer, phase=phase)
    sent = (token.uplink_bits, token.downlink_bits, token.round_trips)
    assert sent == (up * 65_536, down * 65_536, round_trips)


@pytest.mark.parametrize(
    ("adapted", "plain", "late", "folded", "both"),
    [(1, 2, 2, 1, 1), (2, 3, 2, 2, 2), (5, 6, 4, 5, 3), (12, 13, 7, 12, 7)],
)
def test_round_trips_of_a_pass(adapted, plain, late, folded, both):
    """One for the end points; late, two layers share one; folded, the last layer has none."""
    run = dict(rank=8, projections=1, adapted_layers=adapted)
    ways = [dict(late=late, folded=folded) for folded in (False, True) for late in (False, True)]
    assert [low_rank("gpt2", **run, **way).round_trips for way in ways] == [plain, late, folded, both]
    back = [low_rank("gpt2", **run, **way, phase="training").round_trips for way in ways]
    once = [int(exchanges > 1) for exchanges in (adapted, adapted - 1)]  # the last two of late ones come together
    assert back == [plain + adapted, late + adapted - once[0], folded + adapted - 1, both + adapted - 1 - once[1]]


@pytest.mark.parametrize(("late", "answered"), [(False, 3), (True, 2)])
def test_nobody_answers_with_a_gradient_that_nobody_needs(late, answered):
    run = dict(r_c2d=8, r_d2c=2, adapted_layers=4, late=late, tokens=10, phase="training")
    forward = low_rank("gpt2", **run | dict(phase="prefill"))
    assert low_rank("gpt2", **run).uplink_bits - forward.uplink_bits == 10 * 16 * (768 + answered * 3 * 8)
    cut = run | dict(first_k=1)  # which learn: every gradient goes on to them
    forward = low_rank("gpt2", **cut | dict(phase="prefill"))
    assert low_rank("gpt2", **cut).uplink_bits - forward.uplink_bits == 10 * 16 * (768 + 4 * 3 * 8)


def test_a_folded_layer_sends_what_the_final_hidden_state_needs():
    run = dict(projections=1, r_c2d=8, r_d2c=2, tokens=100, phase="prefill")
    for final_hidden, positions in (("last", 1), ("all", 100)):
        plain, folded = (low_rank("gpt2", folded=f, final_hidden=final_hidden, **run) for f in (False, True))
        assert plain.uplink_bits - folded.uplink_bits == 100 * 2 * 16
        assert plain.downlink_bits - folded.downlink_bits == (100 - positions) * 8 * 16


def test_a_ladder_by_hand():
    token, text = ladder("gpt2", 96), ladder("gpt2", 96, phase="training", tokens=7, batch=2, adapted_layers=3)
    assert (token.uplink_bits, token.downlink_bits, token.round_trips) == (768 * 16, (768 + 12 * 96) * 16, 1)
    assert (text.uplink_bits, text.downlink_bits, text.round_trips) == (14 * 768 * 16, 14 * (768 + 3 * 96) * 16, 1)
    last = ladder("gpt2", 96, phase="prefill", tokens=7, batch=2)
    assert last.downlink_bits == 2 * token.downlink_bits


SMALL = ModelShape("small", "llama", 5, 48, 6, 2, 8, 96, 100, False, 200_000)
RANKS = dict(r_c2d=6, r_d2c=4)
CUT = dict(first_k=st.integers(0, 2), last_k=st.integers(0, 1), adapted_layers=st.none() | st.integers(0, 2))
CUT |= dict(projections=st.sampled_from([1, 3]), endpoints=st.booleans())
FOLDED = dict(late=st.booleans(), folded=st.booleans(), first_k=st.integers(0, 2), adapted_layers=st.integers(1, 3))
LADDER = dict(rank=st.integers(1, 8), adapted_layers=st.none() | st.integers(0, 5))


def full_activation_messages(model, projections=3, endpoints=True, baseline="published", **run):
    """The messages at full width."""

    def shapes(batch, seq):
        if baseline == "published":
            return ((projections, batch, seq, model.hidden),) * 2
        return (batch, seq, model.hidden), (batch, seq, sum(projection_dims(model, projections)))  # x; q, k, v abreast

    return _walk(Run(model, **run), endpoints, shapes, ("x", "residuals", "grad residuals", "grad x"))


def layer_cut_messages(model, after_layer, **run):
    """The messages of a plain split."""
    return _walk(Run(model, first_k=after_layer, adapted_layers=0, **run), True, None, ())


WAYS = {  # a formula, its counting twin, what both are given, and what is drawn for both
    "low rank": (low_rank, communication.low_rank_messages, RANKS, CUT | dict(late=st.booleans())),
    "folded": (low_rank, communication.low_rank_messages, RANKS | dict(projections=1), FOLDED),
    "full": (
        full_activations,
        full_activation_messages,
        {},
        CUT | dict(baseline=st.sampled_from(communication.BASELINES)),
    ),
    "layer cut": (layer_cut, layer_cut_messages, {}, dict(after_layer=st.integers(0, 4))),
    "ladder": (ladder, communication.ladder_messages, {}, LADDER),
}


@pytest.mark.parametrize(("formula", "twin", "given_", "drawn"), WAYS.values(), ids=WAYS)
@settings(max_examples=250)
@given(data=st.data(), tokens=st.integers(1, 7), batch=st.integers(1, 3), bits=st.sampled_from([8, 16, 32, 64]))
def test_formulas_equal_serialised_tensors(formula, twin, given_, drawn, data, tokens, batch, bits):
    """The twin finds the round trips with a clock."""
    run = given_ | dict(phase=data.draw(st.sampled_from(communication.PHASES)), tokens=tokens, batch=batch)
    run |= dict(final_hidden=data.draw(st.sampled_from(["last", "all"]))) | data.draw(st.fixed_dictionaries(drawn))
    assert formula(SMALL, bits=bits, **run) == communication.count(twin(SMALL, **run), bits, tokens * batch)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: low_rank("gpt2", 0), "rank must be between 1 and hidden=768, got 0"),
        (lambda: low_rank("gpt2", 800, r_d2c=8), "rank must be between 1 and hidden=768, got 800"),
        (lambda: low_rank("gpt2", r_d2c=800), "r_d2c must be between 1 and hidden=768, got 800"),
        (lambda: low_rank("gpt2", 8, projections=2), "projections must be one of 1, 3, got 2"),
        (lambda: low_rank("gpt2", 8, bits=0), "bits must be between 1 and 64, got 0"),
        (lambda: low_rank("gpt2", 8, phase="train"), "phase must be one of .*'training', got 'train'"),
        (lambda: low_rank("gpt2", 8, tokens=0), "tokens must be a whole number of at least 1, got 0"),
        (lambda: low_rank("gpt2", 8, first_k=13), "first_k must be between 0 and num_layers=12, got 13"),
        (lambda: low_rank("gpt2", 8, first_k=6, last_k=7), "last_k must be between 0 and num_layers-first_k=6, got 7"),
        (lambda: low_rank("gpt2", 8, adapted_layers=13), "adapted_layers must be between 0 and .*=12, got 13"),
        (lambda: layer_cut("gpt2", 13), "after_layer must be between 0 and num_layers-1=11, got 13"),
        (lambda: full_activations("gpt2", baseline="real"), "baseline must be one of .*'actual', got 'real'"),
        (lambda: full_activations("gtp2"), "unknown model 'gtp2'; near: gpt2"),
        (lambda: low_rank("gpt2", 8, final_hidden="none"), "final_hidden must be one of 'last', 'all', got 'none'"),
        (lambda: communication.low_rank_messages("gpt2", 8, phase="train"), "phase must be one of"),
        (lambda: communication.low_rank_messages("gpt2", 8, projections=5), "projections must be one of 1, 3, got 5"),
        (lambda: communication.low_rank_messages("gpt2", 8, tokens=-3), "tokens must be a whole number of at least 1"),
        (lambda: low_rank("gpt2", 8, endpoints="no"), "endpoints must be True or False, got 'no'"),
        (lambda: low_rank("gpt2", 8, projections=3.0), "projections must be one of 1, 3, got 3.0"),
        (lambda: low_rank("gpt2", 8, late=1), "late must be True or False, got 1"),
        (lambda: low_rank("gpt2", 8, folded="yes"), "folded must be True or False, got 'yes'"),
        (lambda: low_rank("gpt2", 8, folded=True), "projections of a folded split must be one of 1, got 3"),
        (lambda: low_rank("gpt2", 8, 1, False, folded=True), "endpoints of a folded .* one of True, got False"),
        (lambda: low_rank("gpt2", 8, 1, folded=True, last_k=2), "last_k of a folded split must be one of 0, got 2"),
        (lambda: low_rank("gpt2", 8, 1, folded=True, adapted_layers=0), "adapted_layers of a folded .* least 1, got 0"),
        (lambda: ladder("gpt2", 0), "rank must be between 1 and hidden=768, got 0"),
        (lambda: ladder("gpt2", first_k=2), "first_k of a ladder must be one of 0, got 2"),
        (lambda: communication.low_rank_messages("gpt2", 8, folded=True), "projections of a folded split must be"),
        (lambda: communication.low_rank_messages("gpt2", 8, late=None), "late must be True or False, got None"),
        (lambda: communication.ladder_messages("gpt2", last_k=1), "last_k of a ladder must be one of 0, got 1"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    """To the formula and to the twin that counts."""
    with pytest.raises(ValueError, match=message):
        call()


def test_narrow_integers_do_not_overflow_and_an_unknown_option_is_named():
    assert low_rank("gpt2", np.int8(100), bits=np.int8(16), tokens=np.int8(100)) == low_rank("gpt2", 100, tokens=100)
    with pytest.raises(TypeError, match=r"^low_rank\(\) got an unexpected .* 'tokns': did you mean 'tokens'\?$"):
        low_rank("gpt2", 8, tokns=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'folded'"):
        ladder("gpt2", folded=True)
