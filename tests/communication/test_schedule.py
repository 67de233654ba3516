from collections import deque

import pytest
from hypothesis import given, strategies as st

from plpkg import communication
from plpkg.communication import Message
from plpkg.communication.schedule import serialise


def test_order_of_a_decoded_token():
    steps = [(m.content, m.direction, m.layer) for m in communication.low_rank_messages("gpt2", 8, adapted_layers=2)]
    assert steps == [
        ("embedding", "up", None),
        ("A x", "down", 0),
        ("M A x", "up", 0),
        ("A x", "down", 1),
        ("M A x", "up", 1),
        ("hidden", "down", None),
    ]


def test_training_walks_back_through_the_layers():
    messages = list(communication.low_rank_messages("gpt2", 8, phase="training", first_k=10))
    assert [m.layer for m in messages] == [None, 10, 10, 11, 11, None, None, 11, 11, 10, 10, None]
    assert messages[-1].content == "grad at the cut"
    whole = list(communication.low_rank_messages("gpt2", 8, phase="training"))
    assert [(m.content, m.layer) for m in whole[-3:]] == [("Bᵀ g", 1), ("Mᵀ Bᵀ g", 1), ("Bᵀ g", 0)]


def test_late_residuals_are_under_way_two_at_a_time():
    run = dict(rank=8, projections=1, adapted_layers=4, late=True)
    assert [(m.content, m.layer) for m in communication.low_rank_messages("gpt2", **run)] == [
        ("embedding", None),
        *[("A x", 0), ("A x", 1), ("M A x", 0), ("M A x", 1)],
        *[("A x", 2), ("A x", 3), ("M A x", 2), ("M A x", 3)],
        ("hidden", None),
    ]
    folded = list(communication.low_rank_messages("gpt2", **run, folded=True, phase="training"))
    assert [(m.content, m.direction, m.layer) for m in folded[5:12]] == [
        ("A x", "down", 2),
        ("M A x", "up", 2),
        ("A x", "down", 3),
        ("hidden", "down", None),
        ("grad hidden", "up", None),
        ("Mᵀ Bᵀ g", "up", 3),
        ("Bᵀ g", "down", 2),
    ]


@given(layers=st.integers(1, 40), late=st.booleans())
def test_a_schedule_takes_as_long_as_a_cloud_that_waits(layers, late):
    """Which has as many answers outstanding as it may, and a clock of half round trips."""
    clock, under_way = 0, deque()
    for _ in range(layers):
        under_way.append(clock + 2)  # down, and up again
        while len(under_way) > late:
            clock = max(clock, under_way.popleft())
    clock = max(clock, *under_way, 0)
    messages = list(communication.low_rank_messages("llama-13b", 8, 1, False, adapted_layers=layers, late=late))
    assert 2 * communication.count(messages).round_trips == clock
    at = {(m.content, m.layer): place for place, m in enumerate(messages)}
    for layer in range(layers):
        assert at["A x", layer] < at["M A x", layer]
        assert layer <= late or at["M A x", layer - 1 - late] < at["A x", layer]


def test_a_ladder_sends_all_layers_at_the_end():
    shapes = [(m.content, m.direction, m.shape) for m in communication.ladder_messages("gpt2", 96, adapted_layers=3)]
    assert shapes == [
        ("embedding", "up", (1, 1, 768)),
        ("A x", "down", (3, 1, 1, 96)),
        ("hidden", "down", (1, 1, 768)),
    ]


def test_formula_and_messages_have_the_same_defaults():
    for formula, messages in (
        (communication.low_rank, communication.low_rank_messages),
        (communication.ladder, communication.ladder_messages),
    ):
        assert formula("llama-13b") == communication.count(messages("llama-13b"))


def test_shapes_name_projections_batch_sequence_and_width():
    messages = list(communication.low_rank_messages("gpt2", 8, phase="prefill", tokens=5, batch=2))
    assert messages[0].shape == (2, 5, 768)
    assert messages[1].shape == (3, 2, 5, 8)
    assert messages[-1].shape == (2, 1, 768)


@pytest.mark.parametrize(("bits", "size"), [(8, 6), (16, 12), (32, 24), (64, 48)])
def test_serialise_is_raw_bytes(bits, size):
    assert len(serialise(Message("x", "up", (2, 3)), bits)) == size


def test_unserialisable_precision_is_named():
    with pytest.raises(ValueError, match="bits must be one of 8, 16, 32, 64 to be serialised, got 4"):
        communication.count(communication.low_rank_messages("gpt2", 8), bits=4)
