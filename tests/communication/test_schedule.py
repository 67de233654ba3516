import pytest

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
