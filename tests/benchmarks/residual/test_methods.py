import pytest
import torch

from benchmarks.residual.methods import Method, low, prepared, strongest_layers, svd_projections
from plpkg.residual import bases
from plpkg.residual.adapter import layers
from tests.residual.conftest import IDS, adapted, backbone, normal

from rounding import assert_close


def test_singular_vectors_are_the_best_approximation():
    weight = normal(20, 12)
    a, b = svd_projections(weight, 5)
    singular = torch.linalg.svdvals(weight)
    error, size = torch.linalg.matrix_norm(weight - b @ a), weight.norm().item()
    assert_close(error, singular[5:].norm(), terms=weight.numel(), size=size)
    assert_close(a @ a.T, torch.eye(5), terms=weight.numel())


def test_bases_of_the_weights_are_in_every_layer():
    model = prepared(Method(low(4, init="given"), basis="weights"), backbone())
    for layer in layers(model).values():
        a, b = svd_projections(layer.get_base_layer().weight, 4)
        assert torch.equal(layer.privatelora_A["default"], a)
        assert torch.equal(layer.privatelora_B["default"], b)


def test_the_strongest_layers_are_those_of_the_largest_norms():
    norms = {f"model.layers.{i}.mlp.down_proj": norm for i, norm in enumerate([1.0, 4.0, 2.0, 3.0])}
    assert strongest_layers(norms, 2) == [1, 3]
    assert strongest_layers(norms | {"model.layers.0.self_attn.q_proj": 9.0, "lm_head": 10.0}, 2) == [0, 1]
    with pytest.raises(ValueError, match="count must be between 1 and the adapted layers=4, got 5"):
        strongest_layers(norms, 5)
    model = adapted(m_scale=0.0, ladder=dict(r=4, init="given"))
    found = bases.from_gradients(model, [IDS])
    assert strongest_layers(found, 1) == [max(range(4), key=list(found.values()).__getitem__)]
