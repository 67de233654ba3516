"""The two parts against the uncut model: logits, generation, gradients, on every architecture family."""

import contextlib
import copy
import functools

import pytest
import torch
from accelerate import cpu_offload
from peft import IA3Config, KasaConfig, LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from plpkg.residual import PrivateLoraConfig, release, split
from plpkg.residual.cost import device_cost
from plpkg.residual.cut.cloud_part import cut_back
from tests.residual.conftest import IDS, SCHEMES_OF_FAMILIES, adapted, backbone, connected, normal, precise, scheme

from direct import Direct
from rounding import assert_as_exact, assert_close


@torch.no_grad()
def cut_logits(model, first_k=0, last_k=0, **options):
    device, cloud, _ = connected(model, first_k, last_k, **options)
    return device.logits(cloud(device.embed(IDS)))


@torch.no_grad()
def assert_same_logits(logits, model):
    """Those of the undivided model."""
    assert_as_exact(logits, model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)


def logits_and_gradients(model, first_k=0, last_k=0, **options):
    """A training step in two parts: the logits, the gradients by name, and what crossed."""
    device, cloud, transport = connected(model, first_k, last_k, **options)
    embedded = device.embed(IDS)
    sent = embedded.detach().requires_grad_(embedded.requires_grad)
    hidden = cloud(sent)
    returned = hidden.detach().requires_grad_()
    logits = device.logits(returned)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())
    loss.backward()
    if hidden.requires_grad:  # not behind a ladder
        hidden.backward(returned.grad)
    if embedded.requires_grad:
        embedded.backward(sent.grad)
    assert not device._asked
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, transport.log


def test_the_parts_together_give_the_models_logits(family, cut):
    model = adapted(family)
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0  # padding on the left
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for attention_mask, position_ids in ((None, None), (mask, positions)):
        seen = (torch.ones_like(IDS) if attention_mask is None else attention_mask).bool()
        with torch.no_grad():
            options = dict(attention_mask=attention_mask, position_ids=position_ids)
            expected = model(input_ids=IDS, **options).logits
            exact = [precise(model)(input_ids=ids[None, row]).logits[0] for ids, row in zip(IDS, seen, strict=True)]
            device, cloud, _ = connected(model, *cut)
            logits = device.logits(cloud(device.embed(IDS, **options), **options), **options)
        assert_as_exact(logits[seen], expected[seen], torch.cat(exact))


def test_gradients_equal_those_of_one_process_in_double_precision(same_gradients, family, cut):
    model = adapted(family, m_scale=0.1).double()
    same_gradients(logits_and_gradients(model, *cut)[1], model, IDS)


def test_neither_part_holds_a_tensor_of_the_other_and_the_model_stays_as_it_was(family, cut):
    model = adapted(family)
    before, modules = model(input_ids=IDS).logits, list(map(type, model.modules()))
    device, cloud = split(model, *cut)
    assert torch.equal(model(input_ids=IDS).logits, before)
    assert list(map(type, model.modules())) == modules

    def tensors(part):
        named = (*part.named_parameters(), *part.named_buffers())
        return {t.data_ptr() for name, t in named if "rotary" not in name}

    on_device, on_cloud = tensors(device), tensors(cloud)
    assert not on_device & on_cloud
    assert {p.data_ptr() for p in model.parameters()} <= on_device | on_cloud
    private = {p.data_ptr() for n, p in model.named_parameters() if "privatelora_M" in n}
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    assert private | {m.weight.data_ptr() for m in embeddings} <= on_device
    assert not any(p.requires_grad for p in cloud.parameters())


def test_q_k_v_are_computed_while_the_message_is_under_way():
    """One message each way for a layer's query, key and value; gradients cross in the opposite order."""
    device, cloud, transport = connected(adapted())
    for group, exchange in enumerate(cloud.exchanges):
        for layer in exchange.base_layers:
            layer.register_forward_hook(lambda *_, group=group: transport.log.append(("computed", group)))
    hidden = cloud(device.embed(IDS))
    expected = []
    for group in range(4):
        expected += [("up", group, (3, 2, 12, 5)), *3 * [("computed", group)], ("down", group, (3, 2, 12, 3))]
    assert transport.log == expected
    hidden.sum().backward()
    back = [("gradient", group, (3, 2, 12, 3)) for group in (3, 2, 1)]
    assert transport.log[len(expected) :] == [*back, ("last gradient", 0, (3, 2, 12, 3))]


@pytest.mark.parametrize(
    ("config", "projections"),
    [
        (dict(target_modules="all-linear", m_scale=0.1), [3, 1, 2, 1] * 4),  # together what has one input
        (dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[1, 3]), [2, 2]),
    ],
)
def test_every_linear_layer_can_be_adapted_and_no_other_crosses(config, projections):
    model = adapted(**config)
    device, cloud, transport = connected(model)
    assert_same_logits(device.logits(cloud(device.embed(IDS))), model)
    sent = [entry for entry in transport.log if entry[0] == "up"]
    assert sent == [("up", group, (count, 2, 12, 5)) for group, count in enumerate(projections)]


@pytest.mark.parametrize("cut", [(0, 0), (1, 1)])
def test_a_released_model_is_left_with_its_part(family, cut, tmp_path):
    with torch.no_grad():
        expected, exact = (each(input_ids=IDS).logits for each in (adapted(family), adapted(family).double()))
        ends = []
        for number in (0, 1):
            model = adapted(family)
            part = split(model, *cut)[number]
            release(model, part, adapter_name=None if number else "default")
            ends.append((model, part))
        (model, device), (emptied, cloud) = ends
        cloud.connect(Direct(device))
        assert_as_exact(device.logits(cloud(device.embed(IDS))), expected, exact)

    def held(*owners):
        tensors = (t for owner in owners for t in (*owner.parameters(), *owner.buffers()))
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    assert held(emptied, cloud) == held(cloud)
    assert held(model, device) == held(device)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(adapted(family).unload(), tmp_path)
    assert_as_exact(loaded(input_ids=IDS).logits, expected, exact)


def test_what_nobody_asked_for_is_refused():
    device, cloud = split(adapted())
    with pytest.raises(RuntimeError, match="exchange 0 has no device to ask"):
        cloud(device.embed(IDS))
    with pytest.raises(KeyError):
        device.residual_backward(0, torch.zeros(3, 1, 1, 3))


def lora(family, **changes):
    targets = {"phi3": ["qkv_proj"], "gpt2": ["c_attn"]}.get(family, ["q_proj", "k_proj", "v_proj"])
    return dict(r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=family == "gpt2") | changes


@pytest.mark.parametrize("cut", [(0, 0), (1, 1)])
def test_lora_at_full_width_for_comparison(same_gradients, family, cut):
    model = adapted(family, m_scale=0.2, lora=lora(family))
    logits, gradients, crossed = logits_and_gradients(model, *cut)
    assert_same_logits(logits, model)
    assert gradients
    same_gradients(gradients, model, IDS)
    down = 96 if family == "gpt2" else 32 + 2 * 16
    assert crossed[:2] == [("up", 0, (1, 2, 12, 32)), ("down", 0, (1, 2, 12, down))]
    device, cloud = split(model, *cut)
    held = {t.data_ptr() for t in cloud.state_dict().values()}
    assert not held & {p.data_ptr() for p in device.parameters()}


def test_a_sequence_keeps_the_matrices_that_it_began_with():
    device, _, _ = connected(adapted("llama"))
    u = normal(len(device.matrices[1]), 2, 3, device.ranks[0])
    cache, before = device.new_cache(), device.residual(1, u)
    assert_close(device.residual(1, u, cache=cache), before, terms=device.ranks[0])
    with torch.no_grad():
        device.matrices[1][0].weight.add_(1.0)
    assert_close(device.residual(1, u, cache=cache), before, terms=device.ranks[0])
    assert (device.residual(1, u) != before).any()
    device.matrices[1][0] = torch.nn.Sequential(device.matrices[1][0], torch.nn.Tanh())  # not a matrix any more
    cache = device.new_cache()
    assert torch.equal(device.residual(1, u, cache=cache), device.residual(1, u))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_the_same(family, dtype):
    model = adapted(family).to(dtype)
    assert_same_logits(cut_logits(model), model)


@pytest.mark.parametrize("saved", [[], ["lm_head", "embed_tokens"]])
def test_the_adapter_that_was_asked_for_counts_not_the_active_one(cut, saved):
    some = dict(target_modules=["o_proj"], layers_to_transform=[0, 2])
    if saved:  # which is LoRA's alone
        model = adapted(m_scale=0.1, lora=lora("llama", modules_to_save=saved[:1]))
        other = LoraConfig(r=4, modules_to_save=saved, **some)
    else:
        model = adapted(m_scale=0.1)
        other = PrivateLoraConfig(r_c2d=4, r_d2c=4, **some)
    model.add_adapter("other", other)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(kind in name for kind in ("privatelora_M.other", "lora_B.other", "modules_to_save.other")):
                parameter.normal_(std=0.3)
        expected = {}
        for name in ("other", "default"):
            model.set_adapter(name)
            expected[name] = [each(input_ids=IDS).logits for each in (model, precise(model))]
    with pytest.raises(AssertionError, match="apart"):
        assert_as_exact(expected["other"][0], *expected["default"])
    for name in expected:
        assert_as_exact(cut_logits(model, *cut, adapter_name=name), *expected[name])
    with model.disable_adapter():
        assert_as_exact(cut_logits(model, *cut), *expected["default"])
    assert model.active_adapters == ["default"]


def private(model, target=None):
    return get_peft_model(model, PrivateLoraConfig(r_c2d=4, r_d2c=4, target_modules=target))


def of_another_family(family, target="q_proj", **scale):
    config = AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, **scale,
    )  # fmt: skip
    return private(AutoModelForCausalLM.from_config(config), [target])


def merged():
    model = adapted()
    model.merge_adapter()
    return model


def beside_lora(**options):
    """PrivateLoRA in a model that has LoRA in other modules."""
    base = get_peft_model(backbone(), LoraConfig(target_modules=["o_proj"]), **options).get_base_model()
    del base.peft_config
    return private(base, ["q_proj"])


def embedding_twice():
    """As Falcon-H1, whose decoder multiplies what it embeds, and not what it is given."""
    model = of_another_family("llama")
    model.get_base_model().model.__class__ = type("LlamaModel", (LlamaModel,), {"forward": twice})
    return model


def twice(self, input_ids=None, inputs_embeds=None, **options):
    embeds = 2 * self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    return LlamaModel.forward(self, inputs_embeds=embeds, **options)


IA3 = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
UNEVEN = dict(r=2, target_modules=["layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj"])
INVOKED = dict(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")
MIDDLE, FOLD = dict(first_k=2, last_k=2), dict(fold=True)
DOWN, UP = dict(target_modules=["down_proj"]), dict(target_modules=["up_proj"])
NO_PLACE = "needs an adapter whose projection the last layer adds to its output as it is"
NO_FOLD = "fold=True needs a PrivateLoRA adapter and last_k=0, got"


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")  # as is meant
@pytest.mark.parametrize(
    ("make", "cut", "message"),
    [
        (backbone, {}, "LlamaForCausalLM has no PrivateLoRA adapter 'default'"),
        (lambda: get_peft_model(backbone(), IA3), {}, "has no PrivateLoRA adapter"),
        (adapted, dict(adapter_name="other"), "PeftModel has no PrivateLoRA adapter 'other'"),
        (adapted, dict(first_k=4), "first_k must be between 0 and num_hidden_layers - 1=3, got 4"),
        (adapted, dict(first_k=-1), "first_k must be between 0 and"),
        (adapted, MIDDLE, "last_k must be between 0 and num_hidden_layers - 1 - first_k=1, got 2"),
        (merged, {}, "an adapter is merged into the weights: unmerge it first"),
        (lambda: cpu_offload(adapted(), torch.device("cpu")), {}, "not in memory: cut it before it is offloaded"),
        *(
            (
                functools.partial(beside_lora, adapter_name=name),
                {},
                "o_proj has an adapter of another method",
            )
            for name in ("default", "other")
        ),
        (lambda: private(backbone().model), {}, "LlamaModel has no LM head"),
        (
            lambda: adapted(lora=lora("llama", modules_to_save=["norm"])),
            {},
            r"norm.* is trained, but would be in the cloud",
        ),
        (lambda: adapted(lora=lora("llama", use_dora=True)), {}, "use_dora=True: only plain LoRA"),
        (lambda: adapted(lora=lora("llama", lora_dropout=0.1)), {}, "lora_dropout=0.1: only plain LoRA"),
        (lambda: adapted(lora=lora("llama", bias="lora_only")), {}, "bias='lora_only': only plain LoRA"),
        (lambda: adapted(lora=lora("llama", **INVOKED)), {}, r"alora_invocation_tokens=\[1, 2\]: only plain"),
        (
            lambda: adapted(lora=lora("llama", kasa_config=KasaConfig())),
            {},
            "LoRA's KasaLinearVariant: only plain",
        ),
        (lambda: adapted(lora=UNEVEN), {}, r"same widths in every exchange, got \[\(32, 32\), \(32, 16\)\]"),
        (
            lambda: of_another_family("hyperclovax", logits_scaling=8.0),  # which it multiplies with
            {},
            "HyperCLOVAXForCausalLM changes its logits by more than a known scale or cap",
        ),
        (embedding_twice, {}, "LlamaModel changes its tokens' embeddings before the first layer"),
        (
            lambda: of_another_family("bloom", "query_key_value"),
            {},
            "BloomModel has word_embeddings_layernorm.weight beside its layers",
        ),
        (lambda: adapted("gemma2", **DOWN), FOLD, NO_PLACE),
        (adapted, FOLD, NO_PLACE),
        (lambda: adapted(**UP), FOLD, NO_PLACE),
        (lambda: adapted(layers_to_transform=[1], **DOWN), FOLD, NO_PLACE),
        (lambda: adapted(**DOWN), FOLD | dict(last_k=1), NO_FOLD),
        (lambda: adapted(ladder=dict(r=4)), FOLD, f"{NO_FOLD} LADDER"),
        (lambda: adapted(**DOWN), dict(fold=1), "fold must be True or False, got 1"),
        (lambda: adapted(ladder=dict(r=4)), dict(first_k=1), "a ladder needs every layer in the cloud, got"),
        (lambda: adapted(ladder=dict(r=4)), dict(last_k=1), "a ladder needs every layer in the cloud, got"),
    ],
)
def test_what_cannot_be_cut_is_named_and_left_as_it_was(make, cut, message):
    model = make()
    trained = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        split(model, **cut)
    assert [p.requires_grad for p in model.parameters()] == trained


def test_what_is_trained_stays_on_the_device():
    device, _ = split(adapted(lora=lora("llama", modules_to_save=["lm_head"])))
    assert device_cost(device) == device_cost(
        split(adapted(lora=lora("llama")))[0]
    )  # and what it has replaced does not
    assert [n for n, p in device.named_parameters() if p.requires_grad and "matrices" not in n] == ["lm_head.weight"]


@pytest.mark.parametrize(("family", "name"), SCHEMES_OF_FAMILIES)
def test_every_way_of_crossing_is_the_same_function(same_gradients, family, name):
    config, cut = scheme(name, family)
    model = adapted(family, m_scale=0.1, **config)
    logits, gradients, crossed = logits_and_gradients(model, **cut)
    assert_same_logits(logits, model)
    same_gradients(gradients, model, IDS)
    if "ladder" in name:
        assert not crossed


def test_the_clouds_part_can_be_copied():
    for name in ("qkv", "late fold", "ladder"):
        config, cut = scheme(name)
        model = adapted(**config)
        device, cloud = split(model, **cut)
        copied = copy.deepcopy(cloud)
        copied.connect(Direct(device))
        assert_same_logits(device.logits(copied(device.embed(IDS))), model)


@pytest.mark.parametrize(
    ("name", "m", "others", "up", "down"),
    [
        ("late", 12 * 3 * 5, 0, 32 + 12 * 3, 32 + 12 * 5),
        ("fold", 4 * 3 * 5, 32 * 3 + 32, 32 + 3 * 3, 32 + 4 * 5),  # the last layer's B, and the norm
        ("fold of two", 2 * 3 * 5, 32 * 3 + 32, 32 + 3, 32 + 2 * 5),
        ("ladder", 32 * 20, 32, 32, 32 + 20),
        ("gated ladder", 32 * 20 + 2 * 16 * 21 + 32 * 16, 32, 32, 32 + 20),
    ],
)
def test_what_a_device_holds_and_sends_by_hand(name, m, others, up, down):
    config, cut = scheme(name)
    cost = device_cost(split(adapted(**config), **cut)[0])
    assert cost.parameters == 2 * 64 * 32 + m + others
    assert cost.flops_per_token == 2 * (64 * 32 + m + others)
    assert (cost.up_bytes_per_token, cost.down_bytes_per_token) == (2 * up, 2 * down)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_cache_that_is_cut_back_is_as_if_nothing_had_been_there(family):
    """Also beyond a sliding window of 6: as far back as the last step had gone."""
    options = {"sliding_window": 6} if family in ("mistral", "gemma2") else None
    model = adapted(family, ladder=dict(r=5), options=options)
    text = IDS.flatten()[None, :20]

    def run(ends, cache, start, stop):
        at = torch.arange(start, stop)[None]
        return ends[1](ends[0].embed(text[:, start:stop], position_ids=at), cache=cache)

    def one_by_one(ends):
        cache, finals = ends[1].new_cache(), []
        for i in range(20):
            finals.append(run(ends, cache, i, i + 1))
            cut_back(cache, i + 1)
        return torch.cat(finals, dim=1)

    with torch.no_grad():
        ends = split(model)
        expected, exact = one_by_one(ends), one_by_one(split(precise(model)))
        cache = ends[1].new_cache()
        run(ends, cache, 0, 9)
        for keep, stop in ((9, 12), (10, 14), (14, 20), (15, 19)):
            cut_back(cache, keep)
            assert_as_exact(run(ends, cache, keep, stop), expected[:, keep:stop], exact[:, keep:stop])
    for keep in (0, 20):
        with pytest.raises(ValueError, match=f"keep must be between 1 and the 19 positions in the cache, got {keep}"):
            cut_back(cache, keep)
    cut_back(cache, 19)
    dropped = pytest.raises(ValueError, match="keep=12 of 19 positions: a window of 6 has dropped what it would need")
    with dropped if options else contextlib.nullcontext():
        cut_back(cache, 12)


SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
GROUPED = SIZES | dict(num_key_value_heads=2)
GRANITE = GROUPED | dict(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.2)
EAGER = dict(experts_implementation="eager")  # the default's kernel has no float64
WITH_SCALES = {
    "granite": (GRANITE, ["q_proj", "v_proj"]),
    "granitemoe": (GRANITE | dict(num_local_experts=4, num_experts_per_tok=2) | EAGER, ["q_proj"]),
    "cohere": (GROUPED | dict(logit_scale=0.0625, eos_token_id=1), ["q_proj", "down_proj"]),
    "cohere2": (GROUPED | dict(logit_scale=0.25, eos_token_id=1), ["v_proj"]),
    "gpt_neox": (SIZES, ["query_key_value", "dense"]),
    "phi": (SIZES, ["q_proj", "fc1"]),
    "opt": (SIZES | dict(ffn_dim=48, word_embed_proj_dim=32), ["q_proj", "fc2"]),
}


@pytest.mark.parametrize("kept", [(0, 0), (1, 0), (1, 2)])
@pytest.mark.parametrize("family", WITH_SCALES)
def test_families_that_multiply_outside_of_their_layers(family, kept):
    """Each factor once, wherever the cut is; learnt positions too; and families that call parts otherwise."""
    sizes, targets = WITH_SCALES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    model = get_peft_model(model, PrivateLoraConfig(r_c2d=4, r_d2c=4, target_modules=targets)).eval()
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.5)
    device, cloud, _ = connected(model, *kept)
    with torch.no_grad():
        assert_same_logits(device.logits(cloud(device.embed(IDS))), model)
