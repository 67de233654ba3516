"""The two parts against the uncut model: logits, generation, gradients, on every architecture family."""

import copy

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from plpkg.backbones import FAMILIES, random_backbone
from plpkg.residual import PrivateLoraConfig, release, split
from plpkg.residual.adapter import PrivateLoraLayer

from direct import Direct
from rounding import assert_as_exact, assert_close

IDS = torch.arange(2, 26).reshape(2, 12) % 23 + 1  # never 0, which pads
CUTS = [(0, 0), (1, 0), (0, 1), (1, 2)]


class Counted(Direct):
    """Also keeps what crossed."""

    def __init__(self, device):
        super().__init__(device)
        self.log = []

    def send(self, group, u):
        assert not u.requires_grad
        self.log.append(("up", group, tuple(u.shape)))
        super().send(group, u)

    def receive(self, group):
        v = super().receive(group)
        self.log.append(("down", group, tuple(v.shape)))
        return v

    def backward(self, group, grad_v):
        self.log.append(("gradient", group, tuple(grad_v.shape)))
        return super().backward(group, grad_v)


def precise(model):
    return copy.deepcopy(model).double()


def connected(model, first_k=0, last_k=0):
    device, cloud = split(model, first_k, last_k)
    transport = Counted(device)
    cloud.connect(transport)
    return device, cloud, transport


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
def test_the_parts_together_give_the_models_logits(adapted, family, first_k, last_k):
    model = adapted(family)
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0  # padding on the left
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for attention_mask, position_ids in ((None, None), (mask, positions)):
        seen = (torch.ones_like(IDS) if attention_mask is None else attention_mask).bool()
        with torch.no_grad():
            options = dict(attention_mask=attention_mask, position_ids=position_ids)
            expected = model(input_ids=IDS, **options).logits
            exact = [precise(model)(input_ids=ids[None, there]).logits[0] for ids, there in zip(IDS, seen, strict=True)]
            device, cloud, _ = connected(model, first_k, last_k)
            found = device.logits(cloud(device.embed(IDS, **options), **options), **options)
        assert_as_exact(found[seen], expected[seen], torch.cat(exact))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), [(0, 0), (1, 2)])
def test_token_by_token_with_caches_on_both_sides(adapted, family, first_k, last_k):
    model = adapted(family)
    expected = model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    device, cloud, _ = connected(model, first_k, last_k)
    here, there = device.new_cache(), cloud.new_cache()
    ids, step = IDS, IDS
    with torch.no_grad():
        for _ in range(6):
            hidden = cloud(device.embed(step, cache=here), cache=there)
            step = device.logits(hidden, cache=here)[:, -1:].argmax(-1)
            ids = torch.cat([ids, step], dim=1)
    assert torch.equal(ids, expected)
    assert here.seen == there.get_seq_length() == 17


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_those_of_one_process(adapted, same_gradients, family, first_k, last_k, dtype):
    model = adapted(family, m_scale=0.1).to(dtype)
    device, cloud, _ = connected(model, first_k, last_k)
    embedded = device.embed(IDS)
    sent = embedded.detach().requires_grad_(embedded.requires_grad)
    hidden = cloud(sent)
    returned = hidden.detach().requires_grad_()
    logits = device.logits(returned)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())
    loss.backward()
    hidden.backward(returned.grad)
    if embedded.requires_grad:
        embedded.backward(sent.grad)
    same_gradients({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model, IDS)
    assert not device._asked


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
def test_neither_part_holds_a_tensor_of_the_other(adapted, family, first_k, last_k):
    model = adapted(family)
    device, cloud = split(model, first_k, last_k)

    def tensors(part):
        found = {name: t for name, t in (*part.named_parameters(), *part.named_buffers()) if "rotary" not in name}
        return {t.data_ptr(): name for name, t in found.items()}

    on_device, on_cloud = tensors(device), tensors(cloud)
    assert not on_device.keys() & on_cloud.keys()
    everything = {t.data_ptr() for n, t in model.named_parameters()}
    assert everything <= on_device.keys() | on_cloud.keys()
    private = {p.data_ptr() for n, p in model.named_parameters() if "privatelora_M" in n}
    assert private <= on_device.keys()
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    assert {m.weight.data_ptr() for m in embeddings} <= on_device.keys()
    assert not any(p.requires_grad for p in cloud.parameters())


def test_one_message_each_way_for_a_layers_query_key_and_value(adapted):
    device, cloud, transport = connected(adapted())
    with torch.no_grad():
        device.logits(cloud(device.embed(IDS)))
    expected = []
    for group in range(4):
        expected += [("up", group, (3, 2, 12, 5)), ("down", group, (3, 2, 12, 3))]
    assert transport.log == expected


def test_q_k_v_are_computed_while_the_message_is_under_way(adapted):
    device, cloud, transport = connected(adapted())
    for group, exchange in enumerate(cloud.exchanges):
        for layer in exchange.base_layers:
            layer.register_forward_hook(lambda *_, group=group: transport.log.append(("computed", group)))
    cloud(device.embed(IDS))
    steps = [entry[:2] for entry in transport.log]
    assert steps == [(step, group) for group in range(4) for step in ("up", *3 * ["computed"], "down")]


def test_gradients_cross_in_the_opposite_order(adapted):
    device, cloud, transport = connected(adapted())
    cloud(device.embed(IDS)).sum().backward()
    assert [entry for entry in transport.log if entry[0] == "gradient"] == [
        ("gradient", group, (3, 2, 12, 3)) for group in (3, 2, 1, 0)
    ]


def test_every_linear_layer_can_be_adapted_and_shares_what_has_one_input(adapted):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = adapted(target_modules=targets, m_scale=0.1)
    device, cloud, transport = connected(model)
    with torch.no_grad():
        found = device.logits(cloud(device.embed(IDS)))
        assert_as_exact(found, model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)
    assert [shape[0] for way, _, shape in transport.log if way == "up"] == [3, 1, 2, 1] * 4
    assert [group for way, group, _ in transport.log if way == "up"] == list(range(16))


def test_only_adapted_layers_cross(adapted):
    device, cloud, transport = connected(adapted(layers_to_transform=[1, 3], target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        cloud(device.embed(IDS))
    assert [shape for way, _, shape in transport.log if way == "up"] == [(2, 2, 12, 5)] * 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), [(0, 0), (1, 1)])
def test_a_released_model_is_left_with_its_part(adapted, family, first_k, last_k, tmp_path):
    with torch.no_grad():
        expected, exact = (each(input_ids=IDS).logits for each in (adapted(family), adapted(family).double()))
        ends = []
        for number in (0, 1):
            model = adapted(family)
            part = split(model, first_k, last_k)[number]
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


def test_the_model_itself_stays_usable(adapted):
    model = adapted()
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        split(model, 1, 1)
        assert torch.equal(model(input_ids=IDS).logits, before)
    assert len([m for m in model.modules() if isinstance(m, PrivateLoraLayer)]) == 12


def test_without_a_device_nothing_is_computed(adapted):
    device, cloud = split(adapted())
    with pytest.raises(RuntimeError, match="exchange 0 has no device to ask"):
        cloud(device.embed(IDS))


def test_a_gradient_that_nobody_waits_for_is_refused(adapted):
    device, _ = split(adapted())
    with pytest.raises(KeyError):
        device.residual_backward(0, torch.zeros(3, 1, 1, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(first_k=4), "first_k must be between 0 and num_hidden_layers - 1=3, got 4"),
        (dict(first_k=2, last_k=2), "last_k must be between 0 and num_hidden_layers - 1 - first_k=1, got 2"),
        (dict(first_k=-1), "first_k must be between 0 and"),
        (dict(adapter_name="other"), "PeftModel has no PrivateLoRA adapter 'other'"),
    ],
)
def test_impossible_cuts_are_named(adapted, arguments, message):
    with pytest.raises(ValueError, match=message):
        split(adapted(), **arguments)


def test_models_that_cannot_be_cut_are_named(adapted):
    plain = random_backbone("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no PrivateLoRA adapter 'default'"):
        split(plain)
    with pytest.raises(ValueError, match="has no PrivateLoRA adapter"):
        split(get_peft_model(plain, IA3Config(target_modules=["q_proj"], feedforward_modules=[])))
    merged = adapted()
    merged.merge_adapter()
    with pytest.raises(ValueError, match="an adapter is merged into the weights: unmerge it first"):
        split(merged)


def lora(family, **changes):
    targets = {"phi3": ["qkv_proj"], "gpt2": ["c_attn"]}.get(family, ["q_proj", "k_proj", "v_proj"])
    return dict(r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=family == "gpt2") | changes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), [(0, 0), (1, 1)])
def test_lora_at_full_width_for_comparison(adapted, same_gradients, family, first_k, last_k):
    model = adapted(family, m_scale=0.2, lora=lora(family))
    device, cloud, transport = connected(model, first_k, last_k)
    embedded = device.embed(IDS)
    sent = embedded.detach().requires_grad_(embedded.requires_grad)
    hidden = cloud(sent)
    returned = hidden.detach().requires_grad_()
    logits = device.logits(returned)
    assert_as_exact(logits, model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())
    loss.backward()
    hidden.backward(returned.grad)
    if embedded.requires_grad:
        embedded.backward(sent.grad)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found
    same_gradients(found, model, IDS)
    assert transport.log[0] == ("up", 0, (1, 2, 12, 32))
    down = 32 + 2 * 16 if family not in ("gpt2", "phi3") else {"gpt2": 96, "phi3": 64}[family]
    assert transport.log[1] == ("down", 0, (1, 2, 12, down))
    held = {t.data_ptr() for t in cloud.state_dict().values()}
    assert not held & {p.data_ptr() for p in device.parameters()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(use_dora=True), "use_dora=True: only plain LoRA"),
        (dict(lora_dropout=0.1), "lora_dropout=0.1: only plain LoRA"),
        (dict(bias="lora_only"), "bias='lora_only': only plain LoRA"),
        (dict(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM"), r"alora_invocation_tokens=\[1, 2\]: only plain"),
    ],
)
def test_lora_that_cannot_be_cut_is_refused(adapted, change, message):
    model = adapted(lora=lora("llama", **change))
    with pytest.raises(ValueError, match=message):
        split(model)


def test_full_width_needs_the_same_projections_everywhere(adapted):
    model = adapted(lora=dict(r=2, target_modules=["layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj"]))
    with pytest.raises(ValueError, match=r"the same widths in every exchange, got \[\(32, 32\), \(32, 16\)\]"):
        split(model)


def test_a_sequence_keeps_the_matrices_that_it_began_with(adapted):
    device, _, _ = connected(adapted("llama"))
    u = torch.randn(len(device.matrices[1]), 2, 3, device.ranks[0], generator=torch.Generator().manual_seed(0))
    cache, before = device.new_cache(), device.residual(1, u)
    assert_close(device.residual(1, u, cache=cache), before, terms=device.ranks[0])
    with torch.no_grad():
        device.matrices[1][0].weight.add_(1.0)
    assert_close(device.residual(1, u, cache=cache), before, terms=device.ranks[0])
    assert (device.residual(1, u) != before).any()
    device.matrices[1][0] = torch.nn.Sequential(device.matrices[1][0], torch.nn.Tanh())  # not a matrix any more
    cache = device.new_cache()
    assert torch.equal(device.residual(1, u, cache=cache), device.residual(1, u))


@torch.no_grad()
def cut_logits(model, first_k=0, last_k=0, **options):
    device, cloud = split(model, first_k, last_k, **options)
    cloud.connect(Direct(device))
    return device.logits(cloud(device.embed(IDS)))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_the_same(adapted, family, dtype):
    model = adapted(family).to(dtype)
    with torch.no_grad():
        assert_as_exact(cut_logits(model), model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)


@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
def test_the_adapter_that_was_asked_for_counts_not_the_active_one(adapted, first_k, last_k):
    model = adapted(m_scale=0.1)
    model.add_adapter(
        "other", PrivateLoraConfig(r_c2d=4, r_d2c=4, target_modules=["o_proj"], layers_to_transform=[0, 2])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "privatelora_M.other" in name:
                parameter.normal_(std=0.3)
        expected = {}
        for name in ("other", "default"):
            model.set_adapter(name)
            expected[name] = [each(input_ids=IDS).logits for each in (model, precise(model))]
    with pytest.raises(AssertionError, match="apart"):
        assert_as_exact(expected["other"][0], *expected["default"])
    for name in expected:
        assert_as_exact(cut_logits(model, first_k, last_k, adapter_name=name), *expected[name])
    with model.disable_adapter():
        assert_as_exact(cut_logits(model, first_k, last_k), *expected["default"])
    assert model.active_adapters == ["default"]


@pytest.mark.parametrize(
    ("family", "target", "message"),
    [
        ("granite", "q_proj", "embedding_multiplier=12.0: a cut GraniteForCausalLM would leave it out"),
        ("cohere", "q_proj", "logit_scale=0.0625: a cut CohereForCausalLM would leave it out"),
        (
            "bloom",
            "query_key_value",
            "BloomModel has word_embeddings_layernorm.weight beside its layers",
        ),
    ],
)
def test_what_a_cut_would_leave_out_is_refused(family, target, message):
    scale = {"embedding_multiplier": 12.0} if family == "granite" else {}
    config = AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, **scale,
    )  # fmt: skip
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config), PrivateLoraConfig(r_c2d=4, r_d2c=4, target_modules=[target])
    )
    with pytest.raises(ValueError, match=message):
        split(model)


def test_a_model_without_a_head_is_refused():
    headless = random_backbone("llama").model
    with pytest.raises(ValueError, match="LlamaModel has no LM head"):
        split(get_peft_model(headless, PrivateLoraConfig(r_c2d=4, r_d2c=4)))


def test_what_is_trained_stays_on_the_device(adapted):
    model = adapted(modules_to_save=["lm_head"])
    device, _ = split(model)
    assert [n for n, p in device.named_parameters() if p.requires_grad and "matrices" not in n] == [
        "lm_head.modules_to_save.default.weight"
    ]
    trained = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=r"norm.* is trained, but would be in the cloud"):
        split(adapted(modules_to_save=["norm"]))
    assert [p.requires_grad for p in model.parameters()] == trained


def test_the_clouds_part_can_be_copied(adapted):
    model = adapted()
    device, cloud = split(model)
    copied = copy.deepcopy(cloud)
    copied.connect(Direct(device))
    with torch.no_grad():
        found = device.logits(copied(device.embed(IDS)))
        assert_as_exact(found, model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)
