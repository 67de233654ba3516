"""A ladder against a computation by hooks on the model without it, on every architecture family."""

import contextlib
import copy
import functools
import threading

import peft
import pytest
import torch
from packaging.version import Version
from peft import get_peft_model, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers.integrations.peft import MIN_PEFT_VERSION

from benchmarks.residual import families
from plpkg.residual import LadderConfig, PrivateLoraConfig, bases, load
from plpkg.residual.adapter import gaussian_projections
from plpkg.residual.ladder import LadderNorm, LadderTap, answer, taps
from tests.residual.conftest import IDS, adapted, assert_apart, at_once, backbone, logits, precise, reloaded

from rounding import assert_as_exact, assert_close
from waiting import PATIENCE_S

WIDTHS = [None, 16]
LINEAR, GATED = ({"ladder": dict(r=5, width=width)} for width in WIDTHS)


def m_of(model, adapter_name="default"):
    (norm,) = (module for module in model.modules() if isinstance(module, LadderNorm))
    return norm.ladder_M[adapter_name]


def by_hooks(base, added, ids=IDS):
    """Logits of a model whose final hidden state gets ``added`` of the inputs of each layer's last projection."""
    inputs, handles = {}, []

    def keep(name, _, arguments):
        inputs[name] = arguments[0]

    def change(_, arguments):
        return (arguments[0] + added(inputs),)

    for name, module in base.named_modules():
        if name.endswith(("mlp.down_proj", "mlp.c_proj")):
            handles.append(module.register_forward_pre_hook(functools.partial(keep, name)))
        if name.endswith((".norm", ".ln_f")):
            handles.append(module.register_forward_pre_hook(change))
    try:
        return base(input_ids=ids).logits
    finally:
        for handle in handles:
            handle.remove()


def written_out(weights, u):
    """M(u) from its tensors, by name."""
    if "weight" in weights:
        return u @ weights["weight"].T
    even = u / (u.square().mean(-1, keepdim=True).sqrt() + 1e-3)
    gate = even @ weights["gate.weight"].T + weights["gate.bias"]
    up = even @ weights["up.weight"].T + weights["up.bias"]
    return u @ weights["linear.weight"].T + (gate * gate.sigmoid() * up) @ weights["down.weight"].T


def by_hand(base, weights):
    def u(name, x):
        return x @ gaussian_projections(0, name, x.shape[-1], 1, 5, 1)[0].to(x).T

    return by_hooks(base, lambda inputs: written_out(weights, torch.cat([u(*item) for item in inputs.items()], -1)))


@pytest.mark.parametrize("width", WIDTHS)
def test_it_equals_the_formula_and_begins_as_nothing(family, width):
    base = backbone(family)
    assert torch.equal(logits(get_peft_model(backbone(family), LadderConfig(r=5, width=width))), logits(base))
    model = adapted(family, ladder=dict(r=5, width=width))
    with torch.no_grad():
        expected = by_hand(base, m_of(model).state_dict())
        exact = by_hand(precise(base), m_of(precise(model)).state_dict())
        assert_as_exact(logits(model), expected, exact)
        assert_apart(logits(base), expected, exact)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_m_learns_with_the_gradient_of_the_formula(family, width, checkpointing):
    still = dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0) if family == "gpt2" else None
    model = adapted(family, m_scale=0.1, options=still, ladder=dict(r=5, width=width))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if ".ladder_M.default." in name}

    def expected(model):
        weights = {name: p.detach().clone().requires_grad_() for name, p in m_of(model).named_parameters()}
        base = copy.deepcopy(model).unload()
        out = by_hand(base, weights)
        base.loss_function(logits=out, labels=IDS, vocab_size=64).backward()
        return [weights[name].grad for name, _ in m_of(model).named_parameters()]

    right, exact = expected(model), expected(precise(model))
    if checkpointing:
        model.get_base_model().activation_checkpointing_enable()
        model.enable_input_require_grads()
        model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all((p.grad is None) == (name not in trainable) for name, p in model.named_parameters())
    sizes = [gradient.norm() for gradient in exact]
    gradients = [p.grad for p in m_of(model).parameters()]
    assert_as_exact(*([g / n for g, n in zip(gs, sizes, strict=True)] for gs in (gradients, right, exact)))


def test_given_projections_are_saved_beside_m(tmp_path):
    model = adapted(m_scale=0.0, ladder=dict(r=4, init="given"))
    bases.from_gradients(model, [IDS])
    torch.nn.init.normal_(m_of(model).weight)
    assert torch.equal(logits(reloaded(model, tmp_path)), logits(model))
    assert sum("ladder_A" in name for name in load_file(tmp_path / "adapter_model.safetensors")) == 4


@pytest.mark.parametrize("family", ["OPT", "OLMo"])
def test_it_is_saved_where_the_norm_is_deeper_or_has_no_weights(tmp_path, family):
    model, other = (families.adapted(family, "gated ladder")[i] for i in (0, 1))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(other.unload(), tmp_path)), logits(model))


def test_an_adapters_rungs_are_its_own_and_are_unloaded():
    model = adapted(**LINEAR)
    model.add_adapter("other", LadderConfig(r=3, width=4, layers_to_transform=[0, 2]))
    assert [len(taps(model, name)) for name in ("default", "other", "nobody")] == [4, 2, 0]
    assert answer(m_of(model), torch.zeros(2, 20)).shape == (2, 32)
    assert not any(isinstance(module, LadderTap | LadderNorm) for module in model.unload().modules())


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")  # PEFT's, of the second
def test_a_second_ladder_in_other_layers_without_a_peft_model():
    """transformers and PEFT inject each by a tuner of its own; low_cpu_mem_usage leaves M empty."""
    first, second = LadderConfig(r=5, layers_to_transform=[0]), LadderConfig(r=5, layers_to_transform=[1, 3])
    model, alone = backbone(), get_peft_model(backbone(), second)
    torch.nn.init.normal_(m_of(alone).weight)
    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers adds adapters by PEFT {MIN_PEFT_VERSION} and later")
    model.add_adapter(first, "first")
    inject_adapter_in_model(
        second, model, "second", low_cpu_mem_usage=True, state_dict=get_peft_model_state_dict(alone.base_model.model)
    )
    assert m_of(model, "second").weight.is_meta
    weights = get_peft_model_state_dict(alone)
    set_peft_model_state_dict(model, weights, adapter_name="second", low_cpu_mem_usage=True)
    model.set_adapter("second")
    assert torch.equal(logits(model), logits(alone))


def test_it_cannot_be_merged():
    model = adapted(**LINEAR)
    before = logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="a ladder cannot be merged: what it adds depends on every layer's input"):
            merge()
    model.unmerge_adapter()  # there is nothing to do
    assert torch.equal(logits(model), before)


def test_its_norm_is_the_end_of_a_pass():
    inner = adapted(**LINEAR).get_base_model().model
    with pytest.raises(RuntimeError, match=r"nothing has come from model.layers.0.mlp.down_proj: a ladder's norm is"):
        inner.norm(torch.zeros(1, 2, 32))


@pytest.mark.parametrize("config", [LINEAR, GATED, {}, dict(late=True)])
def test_each_row_of_a_batch_has_its_own_adapter(family, config):
    model = adapted(family, **config)
    other = LadderConfig(r=3) if "ladder" in config else PrivateLoraConfig(r_c2d=2, r_d2c=2, **config)
    model.add_adapter("other", other)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".other." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    model.eval()
    ids, names = IDS[[0, 1, 0, 1]], ["other", "default", "__base__", "other"]

    def each_alone(model=model):
        for row, name in zip(ids, names, strict=True):
            model.set_adapter("default" if name == "__base__" else name)
            with model.disable_adapter() if name == "__base__" else contextlib.nullcontext():
                yield row[None]
        model.set_adapter("default")

    def alone(model):
        return torch.cat([logits(model, row) for row in each_alone(model)])

    before = logits(model)
    with torch.no_grad():
        mixed = model(input_ids=ids, adapter_names=names).logits
    assert_as_exact(mixed, alone(model), alone(precise(model)))
    for options in (dict(num_beams=2, do_sample=False), dict(num_return_sequences=2, do_sample=True, top_k=1)):
        written = functools.partial(model.generate, max_new_tokens=3, eos_token_id=None, **options)
        expected = torch.cat([written(input_ids=row) for row in each_alone()])
        assert torch.equal(written(input_ids=ids, adapter_names=names), expected)
    for given, message in (
        (["default"], r"adapter_names has 1 names for a batch of 4"),
        (["nobody"] * 4, r"adapter_names must be a list of __base__, default, other, got \['nobody',"),
        ("default", "adapter_names must be a list of __base__, default, other, got 'default'"),
    ):
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids, adapter_names=given)
    assert torch.equal(logits(model), before)  # no hook is left
    with pytest.raises(ValueError, match="adapter_names is for inference"):
        model.train()(input_ids=ids, adapter_names=names)


@pytest.mark.parametrize("config", [LINEAR, GATED, dict(late=True)])
def test_a_copy_computes_for_itself(config):
    model = adapted(**config)
    before, copied = logits(model), copy.deepcopy(model)
    assert torch.equal(logits(copied), before)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2)
    assert not torch.equal(logits(copied), before)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("config", [LINEAR, dict(late=True)])
def test_threads_that_compute_at_once_have_their_own_residuals(config):
    model = adapted(**config)
    texts = [IDS[:1], IDS.flip(1)[:1, :7]]
    expected = [logits(model, ids) for ids in texts]
    both = threading.Barrier(2, timeout=PATIENCE_S)
    for layer in model.get_base_model().model.layers:  # between any two layers each waits for the other
        layer.register_forward_hook(lambda *_: both.wait() > 1 or None)
    for right, computed in zip(expected, at_once(lambda ids: logits(model, ids), texts), strict=True):
        assert torch.equal(computed, right)


def test_bases_from_gradients_are_those_of_a_matrix_to_the_final_state(family):
    """Of full matrices, zero, from each layer's input to the final hidden state: the gradient by autograd."""
    model = adapted(family, m_scale=0.0, ladder=dict(r=4, init="given"))
    batches = [IDS, IDS.flip(1)]
    norms = bases.from_gradients(model, batches)

    def gradients(base):
        wide = dict(dtype=base.dtype, requires_grad=True)
        full = {tap.module: torch.zeros(32, tap.in_features, **wide) for tap in taps(model)}
        for ids in batches:
            out = by_hooks(base, lambda inputs: sum(x @ full[name].T for name, x in inputs.items()), ids)
            base.loss_function(logits=out, labels=ids, vocab_size=64).backward()
        return {name: matrix.grad for name, matrix in full.items()}

    right, exact = gradients(backbone(family)), gradients(precise(backbone(family)))
    for tap in taps(model):
        a = tap.ladder_A["default"]
        assert_close(a @ a.T, torch.eye(4), terms=a.shape[1])
        largest = torch.linalg.svdvals(exact[tap.module])[:4]
        same = torch.linalg.svdvals(right[tap.module])[:4]
        reached = (exact[tap.module] @ a.double().T).norm(dim=0)
        assert_as_exact(reached, same, largest)
        assert_as_exact(torch.tensor([norms[tap.module]]), same.norm()[None], largest.norm()[None])


def test_bases_from_gradients_where_a_layer_reads_all_tokens_in_one_dimension():
    _, base = families.adapted("OPT", "gated ladder")
    base, kept = base.unload(), []
    base.model.decoder.final_layer_norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    base.model.decoder.layers[0].fc2.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    loss = base.requires_grad_(True)(input_ids=IDS, labels=IDS).loss
    x, final = kept
    (delta,) = torch.autograd.grad(loss, final)
    assert x.dim() == 2
    largest = torch.linalg.svdvals(delta.flatten(0, 1).T @ x)[:4].norm()
    norms = bases.from_gradients(get_peft_model(base, LadderConfig(r=4, init="given", target_modules=["fc2"])), [IDS])
    assert_close(torch.tensor(norms["model.decoder.layers.0.fc2"]), largest.detach(), terms=IDS.numel())
