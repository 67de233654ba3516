"""A ladder against a computation by hooks on the model without it, on every architecture family."""

import contextlib
import copy
import functools
import threading

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from safetensors.torch import load_file
from transformers import OPTConfig, OPTForCausalLM

from plpkg.backbones import FAMILIES
from plpkg.residual import LadderConfig, PrivateLoraConfig, bases
from plpkg.residual.adapter import gaussian_projections
from plpkg.residual.config import LADDER
from plpkg.residual.ladder import LadderNorm, LadderTap, answer, taps
from tests.residual.conftest import IDS, adapted_backbone, at_once, backbone, precise

from rounding import assert_as_exact, assert_close
from waiting import PATIENCE_S

WIDTHS = [None, 16]
LINEAR, GATED = ({"ladder": dict(r=5, width=width)} for width in WIDTHS)


@torch.no_grad()
def logits(model, ids=IDS):
    return model(input_ids=ids).logits


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
    def added(inputs):
        us = []
        for name, x in inputs.items():
            a, _ = gaussian_projections(0, name, x.shape[-1], 1, 5, 1)
            us.append(x @ a.to(x).T)
        return written_out(weights, torch.cat(us, -1))

    return by_hooks(base, added)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_equals_the_formula_and_begins_as_nothing(family, width):
    base = backbone(family)
    new = get_peft_model(copy.deepcopy(base), LadderConfig(r=5, width=width))
    assert torch.equal(logits(new), logits(base))
    model = adapted_backbone(family, ladder=dict(r=5, width=width))
    with torch.no_grad():
        expected = by_hand(base, m_of(model).state_dict())
        exact = by_hand(precise(base), m_of(precise(model)).state_dict())
        assert_as_exact(logits(model), expected, exact)
        with pytest.raises(AssertionError, match="apart"):
            assert_as_exact(logits(base), expected, exact)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_m_learns_with_the_gradient_of_the_formula(family, width, checkpointing):
    still = dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0) if family == "gpt2" else None
    model = adapted_backbone(family, m_scale=0.1, options=still, ladder=dict(r=5, width=width))
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


@pytest.mark.parametrize("config", [LINEAR, GATED])
def test_saved_it_is_m_alone_and_loads_to_the_same_logits(config, tmp_path):
    model = adapted_backbone(**config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(t.numel() for t in saved.values()) == sum(p.numel() for p in m_of(model).parameters())
    for low_cpu_mem_usage in (False, True):
        loaded = PeftModel.from_pretrained(backbone(), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
        assert isinstance(loaded.peft_config["default"], LadderConfig)
        assert torch.equal(logits(loaded), logits(model))


def test_given_projections_are_saved_beside_m(tmp_path):
    model = adapted_backbone(m_scale=0.0, ladder=dict(r=4, init="given"))
    bases.from_gradients(model, [IDS])
    torch.nn.init.normal_(m_of(model).weight)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert sum("ladder_A" in name for name in names) == 4
    assert torch.equal(logits(PeftModel.from_pretrained(backbone(), tmp_path)), logits(model))


def test_several_ladders_of_several_ranks_and_none():
    model, base = adapted_backbone(**LINEAR), backbone()
    first = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base))
    model.add_adapter("other", LadderConfig(r=3, width=4, layers_to_transform=[0, 2]))
    assert torch.equal(logits(model), first)
    assert not any(p.requires_grad for p in m_of(model, "other").parameters())
    torch.nn.init.normal_(m_of(model, "other").down.weight)
    model.set_adapter("other")
    assert all(p.requires_grad for p in m_of(model, "other").parameters())
    second = logits(model)
    model.base_model.set_adapter(["default", "other"])
    both = logits(model)
    different = [logits(base), first, second, both]
    assert all(not torch.allclose(a, b) for i, a in enumerate(different) for b in different[:i])
    assert [len(taps(model, name)) for name in ("default", "other", "nobody")] == [4, 2, 0]
    model.set_adapter("default")
    model.delete_adapter("other")
    assert torch.equal(logits(model), first)
    plain = model.unload()
    assert torch.equal(logits(plain), logits(base))
    assert not any(isinstance(module, LadderTap | LadderNorm) for module in plain.modules())


def test_it_cannot_be_merged():
    model = adapted_backbone(**LINEAR)
    before = logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="a ladder cannot be merged: what it adds depends on every layer's input"):
            merge()
    model.unmerge_adapter()  # there is nothing to do
    assert torch.equal(logits(model), before)


def test_its_norm_is_the_end_of_a_pass():
    inner = adapted_backbone(**LINEAR).get_base_model().model
    with pytest.raises(RuntimeError, match=r"nothing has come from model.layers.0.mlp.down_proj: a ladder's norm is"):
        inner.norm(torch.zeros(1, 2, 32))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config", [LINEAR, GATED, {}, dict(late=True)])
def test_each_row_of_a_batch_has_its_own_adapter(family, config):
    model = adapted_backbone(family, **config)
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


def test_a_row_has_the_modules_that_its_adapter_has_trained():
    """The other adapter has trained none."""
    model = adapted_backbone()
    model.add_adapter("other", PrivateLoraConfig(r_c2d=2, r_d2c=2, modules_to_save=["lm_head"]))
    for name, parameter in model.named_parameters():
        if "lm_head.modules_to_save.other" in name:
            parameter.data = 2 * parameter.data

    def alone(model):
        rows = []
        for row, name in zip(IDS, ("other", "default"), strict=True):
            model.set_adapter(name)
            rows.append(logits(model, row[None]))
        return torch.cat(rows)

    with torch.no_grad():
        mixed = model(input_ids=IDS, adapter_names=["other", "default"]).logits
    assert_as_exact(mixed, alone(model), alone(precise(model)))


@pytest.mark.parametrize("config", [LadderConfig(r=4), PrivateLoraConfig()])
def test_mixed_is_refused_in_a_sentence(config):
    with pytest.raises(ValueError, match=f"The provided `peft_type` '{config.peft_type}' is not compatible with"):
        get_peft_model(backbone(), config, mixed=True)


@pytest.mark.parametrize("config", [LINEAR, GATED, dict(late=True)])
def test_a_copy_computes_for_itself(config):
    model = adapted_backbone(**config)
    before, copied = logits(model), copy.deepcopy(model)
    assert torch.equal(logits(copied), before)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2)
    assert not torch.equal(logits(copied), before)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("config", [LINEAR, dict(late=True)])
def test_threads_that_compute_at_once_have_their_own_residuals(config):
    model = adapted_backbone(**config)
    texts = [IDS[:1], IDS.flip(1)[:1, :7]]
    expected = [logits(model, ids) for ids in texts]
    both = threading.Barrier(2, timeout=PATIENCE_S)
    for layer in model.get_base_model().model.layers:  # between any two layers each waits for the other
        layer.register_forward_hook(lambda *_: both.wait() > 1 or None)
    for right, computed in zip(expected, at_once(lambda ids: logits(model, ids), texts), strict=True):
        assert torch.equal(computed, right)


def test_a_pass_that_breaks_off_leaves_the_next_as_it_is():
    model = adapted_backbone(**LINEAR)
    before = logits(model)
    with pytest.raises(IndexError):
        logits(model.get_base_model().model, torch.tensor([[999]]))
    handle = model.get_base_model().model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, IDS[:1, :3])
    handle.remove()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_bases_from_gradients_are_those_of_a_matrix_to_the_final_state(family):
    """Of full matrices, zero, from each layer's input to the final hidden state: the gradient by autograd."""
    model = adapted_backbone(family, m_scale=0.0, ladder=dict(r=4, init="given"))
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


def test_the_strongest_layers_are_those_of_the_largest_norms():
    norms = {f"model.layers.{i}.mlp.down_proj": norm for i, norm in enumerate([1.0, 4.0, 2.0, 3.0])}
    assert bases.strongest_layers(norms, 2) == [1, 3]
    assert bases.strongest_layers(norms | {"model.layers.0.self_attn.q_proj": 9.0}, 2) == [0, 1]
    with pytest.raises(ValueError, match="count must be between 1 and the adapted layers=4, got 5"):
        bases.strongest_layers(norms, 5)
    model = adapted_backbone(m_scale=0.0, ladder=dict(r=4, init="given"))
    found = bases.from_gradients(model, [IDS])
    assert bases.strongest_layers(found, 1) == [max(range(4), key=list(found.values()).__getitem__)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(r=0), "r must be a whole number of at least 1, got 0"),
        (dict(width=0), "width must be a whole number of at least 1, got 0"),
        (dict(width=2.5), "width must be a whole number of at least 1, got 2.5"),
        (dict(init="svd"), "init must be one of 'gaussian', 'given', got 'svd'"),
        (dict(init="given", save_projection=False), "init='given' needs save_projection=True"),
    ],
)
def test_impossible_configurations_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        LadderConfig(**config)


def test_bases_that_cannot_be_are_named():
    for config, batches, message in (
        (dict(r=4), [IDS], "init='given'"),
        (dict(r=4, init="given"), [], "no batches"),
    ):
        with pytest.raises(ValueError, match=message):
            bases.from_gradients(adapted_backbone(m_scale=0.0, ladder=config), batches)
    for width in WIDTHS:
        model = adapted_backbone(ladder=dict(r=4, init="given", width=width))
        with pytest.raises(ValueError, match="the M of the ladder is not zero"):
            bases.from_gradients(model, [IDS])


def test_what_cannot_be_adapted_is_named():
    config = OPTConfig(hidden_size=16, ffn_dim=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    named = r"no default target_modules for OPTForCausalLM, which has none of down_proj; mlp.c_proj: name its linear"
    with pytest.raises(ValueError, match=named):
        get_peft_model(OPTForCausalLM(config), LadderConfig())
    with pytest.raises(ValueError, match="OPTModel has none of norm, ln_f: not a decoder that can be cut here"):
        get_peft_model(OPTForCausalLM(config), LadderConfig(target_modules=["fc2"]))
    with pytest.raises(ValueError, match="r must be between 1 and hidden_size=32, got 33"):
        adapted_backbone(ladder=dict(r=33))
    with pytest.raises(ValueError, match=r"embed_tokens is a Embedding: only nn.Linear and Conv1D can be adapted"):
        adapted_backbone(ladder=dict(r=4, target_modules=["embed_tokens"]))


def test_what_is_relied_on_in_peft_is_there():
    model = adapted_backbone(**LINEAR)
    assert isinstance(model.base_model, PEFT_TYPE_TO_TUNER_MAPPING[LADDER])
    assert answer(m_of(model), torch.zeros(2, 20)).shape == (2, 32)
