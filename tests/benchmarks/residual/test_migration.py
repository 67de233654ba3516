"""An adapter carried over to a changed backbone."""

import copy

import pytest
import torch

from benchmarks.residual.migration import migrate
from plpkg.residual import PrivateLoraConfig
from plpkg.residual.adapter import layers, matrices
from plpkg.residual.attacks import exchanges
from plpkg.residual.migrate import solve
from tests.residual.conftest import adapted, backbone

from rounding import assert_close, relative


def anchors(seed, count=6):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 64, (4, 16), generator=generator) for _ in range(count)]


def updated(model, size=0.05, seed=1):
    """The same adapter on a backbone whose weights have moved."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "privatelora" not in name and parameter.ndim == 2:
                parameter.add_(size * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return other


def added_error(old, new, texts):
    """How far what the adapter adds is from what it added before, over all exchanges."""
    before, after = exchanges(old, texts), exchanges(new, texts)
    return sum((after[name][1] - before[name][1]).square().sum().item() for name in before)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_an_unchanged_backbone_gets_the_same_matrices(family):
    old, new = adapted(family), adapted(family, m_scale=0.0)
    errors = migrate(old, new, anchors(0), ridge=0)
    seen = exchanges(old, anchors(0))
    for (name, m), (_, expected) in zip(matrices(new).items(), matrices(old).items(), strict=True):
        u, _ = seen[name]
        most = torch.linalg.pinv(u).norm() * u.norm() * relative(u.shape[1])  # what a rounded v = M·u makes of M
        assert (m.weight - expected.weight).norm() <= most * expected.weight.norm(), name
        assert errors[name] <= most, name
    assert errors.keys() == matrices(old).keys()


def test_on_a_changed_backbone_it_adds_nearer_to_what_it_added_also_on_other_text():
    old, before, after = adapted(m_scale=0.5), 0, 0
    for seed in range(4):
        new = updated(old, seed=seed)
        before += added_error(old, new, anchors(7))
        migrate(old, new, anchors(0, count=12))
        after += added_error(old, new, anchors(7))
    assert after < before


def test_only_the_matrices_change_and_only_in_the_new_model():
    old, new = adapted(), updated(adapted(m_scale=0.0))
    before = [{name: t.clone() for name, t in model.state_dict().items()} for model in (old, new)]
    migrate(old, new, anchors(0))
    for model, saved, may_change in ((old, before[0], False), (new, before[1], True)):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved[name]) or (may_change and "privatelora_M" in name), name


def test_closed_form_is_the_minimum():
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(30, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    prior = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    ridge = 0.1
    strength = ridge * (u.T @ u).trace() / 5

    def cost(m):
        return (u @ m.T - v).square().sum() + strength * (m - prior).square().sum()

    m = solve(u, v, prior, ridge).requires_grad_()
    cost(m).backward()
    size = 2 * (u.norm() * (u.norm() * m.norm() + v.norm())).item()  # of what cancels
    assert_close(m.grad, torch.zeros_like(m), terms=sum(u.shape), size=size)
    size = (torch.linalg.pinv(u).norm() * (u.norm() * prior.norm() + v.norm())).item()
    assert_close(solve(u, v, prior, 0), torch.linalg.lstsq(u, v).solution.T, terms=sum(u.shape), size=size)
    assert torch.equal(solve(u * 0, v, prior, 0.1), prior)
    few = solve(u[:2], v[:2], prior, 0)
    assert_close(u[:2] @ few.T, v[:2], terms=u.numel())
    aside = torch.linalg.svd(u[:2])[2][2:]  # directions that the anchors do not have
    assert_close(aside @ few.T, aside @ prior.T, terms=u.numel())
    assert_close(solve(u[:1], v[:1] * 0 + u[:1] @ prior.T, prior, 1e-3), prior, terms=u.numel())  # nothing against it


def test_the_last_u_are_those_of_the_last_matrices():
    """More rounds do not make it worse: each starts from what the round before has changed upstream."""
    old = adapted(m_scale=0.5)
    texts, errors = anchors(0, count=12), {1: 0, 3: 0}
    for seed in range(4):
        for rounds in errors:
            new = updated(old, seed=seed)
            migrate(old, new, texts, rounds=rounds)
            errors[rounds] += added_error(old, new, texts)
    assert errors[3] < errors[1]


@pytest.mark.parametrize(
    ("config", "call", "message"),
    [
        (dict(r_c2d=6), {}, "r_c2d is 5 in the old adapter and 6 in the new one"),
        (dict(late=True), {}, "late is False in the old adapter and True in the new one"),
        (dict(projection_seed=1), {}, "projection_seed is 0 in the old adapter and 1 in the new one"),
        (dict(target_modules=["q_proj"]), {}, "the adapters are in different modules"),
        ({}, dict(rounds=0), "rounds must be"),
        ({}, dict(ridge=-1), "ridge must be at least 0, got -1"),
        ({}, dict(anchors=[]), "no anchors"),
        ({}, dict(adapter_name="other"), "both models need a PrivateLoRA adapter 'other'"),
    ],
)
def test_another_adapter_and_bad_input_are_refused(config, call, message):
    with pytest.raises(ValueError, match=message):
        migrate(adapted(), adapted(**config), **dict(anchors=anchors(0)) | call)


@pytest.mark.parametrize(("which", "where"), [("old", "privatelora_M"), ("old", "mlp.up_proj"), ("new", "mlp.up_proj")])
def test_numbers_that_are_none_are_refused_and_nothing_is_written(which, where):
    models = {"old": adapted(m_scale=0.5), "new": adapted(m_scale=0.5)}
    weight = next(p for name, p in models[which].named_parameters() if where in name)
    weight.data[0, 0] = torch.nan
    before = copy.deepcopy(models["new"].state_dict())
    with pytest.raises(ValueError, match=r"what goes through the M of .* is not finite"):
        migrate(models["old"], models["new"], anchors(0))
    for name, value in models["new"].state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name


@pytest.mark.parametrize("prepare", ["merge_adapter", "disable_adapter_layers"])
def test_an_adapter_that_does_not_compute_is_not_migrated(prepare):
    old = adapted(m_scale=0.5)
    getattr(old.base_model, prepare)()
    with pytest.raises(ValueError, match=r"nothing went through any M of 'default': .* merged or switched off"):
        migrate(old, adapted(), anchors(0))


def test_what_cannot_be_solved_is_named():
    two = torch.ones(2, 2)
    for v, ridge, message in ((two, -1, "ridge must be at least 0, got -1"), (torch.ones(3, 2), 0, "do not fit toget")):
        with pytest.raises(ValueError, match=message):
            solve(two, v, two, ridge)


def test_other_bases_are_refused():
    old = adapted(m_scale=0.1, init="given", r_c2d=4, r_d2c=4)
    new = updated(old)
    migrate(old, new, anchors(0))
    for layer in layers(new).values():
        layer.privatelora_A["default"].neg_()
    with pytest.raises(ValueError, match="A and B of 'default' differ: give the new model those of the old"):
        migrate(old, new, anchors(0))


def test_dropout_is_off_and_stays_as_it_was():
    model = adapted("gpt2", m_scale=0.1)
    expected = exchanges(model, anchors(0, 1))
    model.train()
    pairs = exchanges(model, anchors(0, 1))
    assert model.training
    assert all(torch.equal(a, b) for name in pairs for a, b in zip(pairs[name], expected[name], strict=True))


def test_an_adapter_that_is_not_active_is_named():
    model = adapted()
    model.add_adapter("other", PrivateLoraConfig(r_c2d=5, r_d2c=3))
    with pytest.raises(ValueError, match=r"the adapter 'other' is not active, but \['default'\]"):
        exchanges(model, anchors(0, 1), "other")
    for plain in (model.unload(), backbone()):
        with pytest.raises(ValueError, match="LlamaForCausalLM has no PrivateLoRA adapter 'default'"):
            exchanges(plain.train(), anchors(0, 1))
        assert plain.training
