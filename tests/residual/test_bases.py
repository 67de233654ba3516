"""A and B from gradients: against the gradient itself, taken another way."""

import pytest
import torch

from plpkg.residual import bases, split
from plpkg.residual.adapter import layers as named_layers, matrices
from plpkg.residual.wire.terms import differences, terms as terms_of
from tests.residual.conftest import logits, precise, reloaded

from rounding import assert_as_exact, sampling_error


def texts(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 64, (2, 12), generator=generator) for _ in range(count)]


def layers(model):
    return list(named_layers(model).values())


def m_gradients(model, batches):
    for ids in batches:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = [m.weight.grad for m in matrices(model).values()]
    model.zero_grad()
    return gradients


def test_the_gradient_of_m_is_made_of_the_largest_singular_values(adapted, family):
    model = adapted(family, m_scale=0.0, init="given", r_c2d=5, r_d2c=3)
    bases.from_gradients(model, texts())
    gradients, exact = (m_gradients(each, texts()) for each in (model, precise(model)))
    for gradient in gradients:
        largest = gradient.diagonal()
        assert (largest[:-1] >= largest[1:]).all()
        assert largest[-1] > 0
    diagonal = [torch.zeros(3, 5).diagonal_scatter(gradient.diagonal()) for gradient in gradients]
    sizes = [gradient.norm() for gradient in exact]
    assert_as_exact(*([g / n for g, n in zip(gs, sizes, strict=True)] for gs in (diagonal, gradients, exact)))


def test_no_other_bases_give_a_larger_first_step(adapted):
    chosen = adapted(m_scale=0.0, init="given", r_c2d=4, r_d2c=4)
    bases.from_gradients(chosen, texts())
    b_size = [layer.privatelora_B["default"].norm() for layer in layers(chosen)]
    best = [g.norm() for g in m_gradients(chosen, texts())]
    for seed in range(3):
        other = adapted(m_scale=0.0, init="given", r_c2d=4, r_d2c=4)
        generator = torch.Generator().manual_seed(seed)
        for layer, size in zip(layers(other), b_size, strict=True):
            q = torch.linalg.qr(torch.randn(layer.in_features, 4, generator=generator))[0]
            layer.privatelora_A["default"] = q.T.contiguous()
            b = torch.linalg.qr(torch.randn(layer.out_features, 4, generator=generator))[0]
            layer.privatelora_B["default"] = b * size / b.norm()
        assert all(g.norm() < limit for g, limit in zip(m_gradients(other, texts()), best, strict=True))


def test_they_are_as_large_as_gaussian_ones(adapted):
    model = adapted(m_scale=0.0, init="given", r_c2d=4, r_d2c=4)
    before = [[p["default"].norm() for p in (m.privatelora_A, m.privatelora_B)] for m in layers(model)]
    bases.from_gradients(model, texts())
    for layer, (a, b) in zip(layers(model), before, strict=True):
        for basis, drawn in ((layer.privatelora_A["default"], a), (layer.privatelora_B["default"], b)):
            assert basis.norm().item() == pytest.approx(drawn.item(), rel=sampling_error(1 / 2, basis.numel()))


def test_the_model_is_left_as_it_was_but_for_the_bases(adapted):
    model = adapted(m_scale=0.0, init="given")
    first = next(p for p in model.parameters() if p.requires_grad)
    first.grad = torch.ones_like(first)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    values = {name: p.clone() for name, p in model.named_parameters()}
    bases.from_gradients(model, texts())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(p.grad is None for p in model.parameters() if p is not first)


def test_they_are_saved_and_loaded(adapted, tmp_path):
    model = adapted(m_scale=0.0, init="given")
    bases.from_gradients(model, texts())
    for m in matrices(model).values():
        torch.nn.init.normal_(m.weight)
    assert torch.equal(logits(reloaded(model, tmp_path)), logits(model))


def test_ends_with_other_bases_do_not_talk(adapted):
    ours, theirs = (adapted(m_scale=0.0, init="given", r_c2d=4, r_d2c=4) for _ in range(2))
    bases.from_gradients(ours, texts())

    def terms(model):
        return terms_of(model, split(model)[0], [], "default", (0, 0), "fp16")

    assert differences(terms(ours), terms(theirs)) == "other A and B here than on the cloud"
    bases.from_gradients(theirs, texts())
    assert not differences(terms(ours), terms(theirs))
    assert terms(ours.half()).bases == terms(theirs).bases
