import pytest

from benchmarks.residual.methods import strongest_layers
from plpkg.residual import bases
from tests.residual.conftest import IDS, adapted


def test_the_strongest_layers_are_those_of_the_largest_norms():
    norms = {f"model.layers.{i}.mlp.down_proj": norm for i, norm in enumerate([1.0, 4.0, 2.0, 3.0])}
    assert strongest_layers(norms, 2) == [1, 3]
    assert strongest_layers(norms | {"model.layers.0.self_attn.q_proj": 9.0, "lm_head": 10.0}, 2) == [0, 1]
    with pytest.raises(ValueError, match="count must be between 1 and the adapted layers=4, got 5"):
        strongest_layers(norms, 5)
    model = adapted(m_scale=0.0, ladder=dict(r=4, init="given"))
    found = bases.from_gradients(model, [IDS])
    assert strongest_layers(found, 1) == [max(range(4), key=list(found.values()).__getitem__)]
