import pytest

from plpkg import communication
from plpkg.backbones import load_backbone
from plpkg.catalog import ModelShape
from plpkg.residual import exercises


@pytest.mark.parametrize(
    ("checker", "right", "wrong", "hint"),
    [
        (exercises.tokens_until_m, 64, 4096, "how many entries"),
        (exercises.tokens_until_m, 64, 63, "one direction open"),
        (exercises.rank_for_a_quarter, 48, 16, "three projections"),
        (exercises.rank_for_a_quarter, 48, 112, "end points"),
    ],
)
def test_checkers(checker, right, wrong, hint):
    assert checker(right)
    assert "No answer yet" in repr(checker(None))
    verdict = checker(wrong)
    assert not verdict
    assert hint in verdict.message
    assert not checker(right * 3)


def test_the_quarter_is_that_of_the_shipped_model():
    shape = ModelShape.from_config(load_backbone("plpkg-small")[0].config, "plpkg-small")
    full = communication.full_activations(shape, 3, endpoints=True, baseline="actual")
    ends = communication.low_rank(shape, 1, adapted_layers=0)
    assert 4 * (ends.total_bits + 16 * shape.num_layers * 2 * 48) == full.total_bits
