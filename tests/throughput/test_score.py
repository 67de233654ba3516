import pytest
import torch

from plpkg.throughput import score


def test_single_numbers():
    assert score(10, 20, 60.0, 50.0) == 5.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 20, 60, 50), "tokens_per_s must be greater than 0, got 0"),
        ((10, -1, 60, 50), "gpu_tokens_per_s must be greater than 0, got -1"),
        ((10, 20, 160, 50), "accuracy must be at least 0 and at most 100, got 160"),
        ((10, 20, 60, 150), "untuned_accuracy must be at least 0 and at most 100, got 150"),
        ((10, 20, [], []), "accuracy must hold at least one benchmark"),
        (("10", 20, 60, 50), "tokens_per_s must be greater than 0, got '10'"),
        ((10, 20, b"60", 50), "accuracy must be at least 0 and at most 100, got b'60'"),
        ((10, 20, [60, 50], torch.tensor(50.0)), "same benchmarks, got 2 and 1"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        score(*arguments)
