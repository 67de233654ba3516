"""The two parts against the uncut model: logits, generation, gradients, on every architecture family."""

import copy

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from plpkg.backbones import FAMILIES
from plpkg.residual import PrivateLoraConfig, release, split
from plpkg.residual.adapter import PrivateLoraLayer
from plpkg.residual.cloud_part import cut_back
from plpkg.residual.cost import device_cost
from tests.residual.conftest import CUTS, IDS, SCHEMES_OF_FAMILIES, backbone, normal, precise, scheme

from direct import Direct
from rounding import assert_as_exact, assert_close


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

    def backward(self, group, grad_v, wanted):
        self.log.append(("gradient" if wanted else "last gradient", group, tuple(grad_v.shape)))
        grad_u = super().backward(group, grad_v, wanted)
        return grad_u if wanted else None


def connected(model, first_k=0, last_k=0, **options):
    device, cloud = split(model, first_k, last_k, **options)
    transport = Counted(device)
    cloud.connect(transport)
    return device, cloud, transport


@torch.no_grad()
def cut_logits(model, first_k=0, last_k=0, **options):
    device, cloud, _ = connected(model, first_k, last_k, **options)
    return device.logits(cloud(device.embed(IDS)))


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
            exact = [precise(model)(input_ids=ids[None, row]).logits[0] for ids, row in zip(IDS, seen, strict=True)]
            device, cloud, _ = connected(model, first_k, last_k)
            logits = device.logits(cloud(device.embed(IDS, **options), **options), **options)
        assert_as_exact(logits[seen], expected[seen], torch.cat(exact))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), [(0, 0), (1, 2)])
def test_token_by_token_with_caches_on_both_sides(adapted, family, first_k, last_k):
    model = adapted(family)
    expected = model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)
    device, cloud, _ = connected(model, first_k, last_k)
    on_device, on_cloud = device.new_cache(), cloud.new_cache()
    ids, step = IDS, IDS
    with torch.no_grad():
        for _ in range(6):
            hidden = cloud(device.embed(step, cache=on_device), cache=on_cloud)
            step = device.logits(hidden, cache=on_device)[:, -1:].argmax(-1)
            ids = torch.cat([ids, step], dim=1)
    assert torch.equal(ids, expected)
    assert on_device.seen == on_cloud.get_seq_length() == 17


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_those_of_one_process(adapted, same_gradients, family, first_k, last_k, dtype):
    model = adapted(family, m_scale=0.1).to(dtype)
    same_gradients(logits_and_gradients(model, first_k, last_k)[1], model, IDS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), CUTS)
def test_neither_part_holds_a_tensor_of_the_other(adapted, family, first_k, last_k):
    model = adapted(family)
    device, cloud = split(model, first_k, last_k)

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


def test_q_k_v_are_computed_while_the_message_is_under_way(adapted):
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


SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("config", "projections"),
    [
        (dict(target_modules=SEVEN, m_scale=0.1), [3, 1, 2, 1] * 4),  # together what has one input
        (dict(target_modules=["q_proj", "v_proj"], layers_to_transform=[1, 3]), [2, 2]),
    ],
)
def test_every_linear_layer_can_be_adapted_and_no_other_crosses(adapted, config, projections):
    model = adapted(**config)
    device, cloud, transport = connected(model)
    with torch.no_grad():
        logits = device.logits(cloud(device.embed(IDS)))
        assert_as_exact(logits, model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)
    sent = [entry for entry in transport.log if entry[0] == "up"]
    assert sent == [("up", group, (count, 2, 12, 5)) for group, count in enumerate(projections)]


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


def test_what_nobody_asked_for_is_refused(adapted):
    device, cloud = split(adapted())
    with pytest.raises(RuntimeError, match="exchange 0 has no device to ask"):
        cloud(device.embed(IDS))
    with pytest.raises(KeyError):
        device.residual_backward(0, torch.zeros(3, 1, 1, 3))


def lora(family, **changes):
    targets = {"phi3": ["qkv_proj"], "gpt2": ["c_attn"]}.get(family, ["q_proj", "k_proj", "v_proj"])
    return dict(r=4, lora_alpha=6, target_modules=targets, fan_in_fan_out=family == "gpt2") | changes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("first_k", "last_k"), [(0, 0), (1, 1)])
def test_lora_at_full_width_for_comparison(adapted, same_gradients, family, first_k, last_k):
    model = adapted(family, m_scale=0.2, lora=lora(family))
    logits, gradients, crossed = logits_and_gradients(model, first_k, last_k)
    assert_as_exact(logits, model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)
    assert gradients
    same_gradients(gradients, model, IDS)
    down = 96 if family == "gpt2" else 32 + 2 * 16
    assert crossed[:2] == [("up", 0, (1, 2, 12, 32)), ("down", 0, (1, 2, 12, down))]
    device, cloud = split(model, first_k, last_k)
    held = {t.data_ptr() for t in cloud.state_dict().values()}
    assert not held & {p.data_ptr() for p in device.parameters()}


def test_a_sequence_keeps_the_matrices_that_it_began_with(adapted):
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
        ("bloom", "query_key_value", "BloomModel has word_embeddings_layernorm.weight beside its layers"),
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


def private(model):
    return get_peft_model(model, PrivateLoraConfig(r_c2d=4, r_d2c=4))


def merged(model):
    model.merge_adapter()
    return model


IA3 = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
UNEVEN = dict(r=2, target_modules=["layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj"])
INVOKED = dict(alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("make", "cut", "message"),
    [
        (lambda _: backbone(), {}, "LlamaForCausalLM has no PrivateLoRA adapter 'default'"),
        (lambda _: get_peft_model(backbone(), IA3), {}, "has no PrivateLoRA adapter"),
        (lambda adapted: adapted(), dict(adapter_name="other"), "PeftModel has no PrivateLoRA adapter 'other'"),
        (lambda adapted: adapted(), dict(first_k=4), "first_k must be between 0 and num_hidden_layers - 1=3, got 4"),
        (lambda adapted: adapted(), dict(first_k=-1), "first_k must be between 0 and"),
        (
            lambda adapted: adapted(),
            dict(first_k=2, last_k=2),
            "last_k must be between 0 and num_hidden_layers - 1 - first_k=1, got 2",
        ),
        (lambda adapted: merged(adapted()), {}, "an adapter is merged into the weights: unmerge it first"),
        (lambda _: private(backbone().model), {}, "LlamaModel has no LM head"),
        (lambda adapted: adapted(modules_to_save=["norm"]), {}, r"norm.* is trained, but would be in the cloud"),
        (lambda adapted: adapted(lora=lora("llama", use_dora=True)), {}, "use_dora=True: only plain LoRA"),
        (lambda adapted: adapted(lora=lora("llama", lora_dropout=0.1)), {}, "lora_dropout=0.1: only plain LoRA"),
        (lambda adapted: adapted(lora=lora("llama", bias="lora_only")), {}, "bias='lora_only': only plain LoRA"),
        (lambda adapted: adapted(lora=lora("llama", **INVOKED)), {}, r"alora_invocation_tokens=\[1, 2\]: only plain"),
        (lambda adapted: adapted(lora=UNEVEN), {}, r"same widths in every exchange, got \[\(32, 32\), \(32, 16\)\]"),
    ],
)
def test_what_cannot_be_cut_is_named_and_left_as_it_was(adapted, make, cut, message):
    model = make(adapted)
    trained = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        split(model, **cut)
    assert [p.requires_grad for p in model.parameters()] == trained


def test_what_is_trained_stays_on_the_device(adapted):
    device, _ = split(adapted(modules_to_save=["lm_head"]))
    assert [n for n, p in device.named_parameters() if p.requires_grad and "matrices" not in n] == [
        "lm_head.modules_to_save.default.weight"
    ]


def test_the_clouds_part_can_be_copied(adapted):
    model = adapted()
    device, cloud = split(model)
    copied = copy.deepcopy(cloud)
    copied.connect(Direct(device))
    with torch.no_grad():
        logits = device.logits(copied(device.embed(IDS)))
        assert_as_exact(logits, model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)


@pytest.mark.parametrize(("family", "name"), SCHEMES_OF_FAMILIES)
def test_every_way_of_crossing_is_the_same_function(adapted, same_gradients, family, name):
    config, cut = scheme(name, family)
    model = adapted(family, m_scale=0.1, **config)
    logits, gradients, crossed = logits_and_gradients(model, **cut)
    with torch.no_grad():
        assert_as_exact(logits, model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)
    same_gradients(gradients, model, IDS)
    if "ladder" in name:
        assert not crossed


def test_two_exchanges_of_a_late_adapter_are_under_way_at_once(adapted):
    device, cloud, transport = connected(adapted(late=True))
    with torch.no_grad():
        cloud(device.embed(IDS))
    steps = [(kind, group) for kind, group, _ in transport.log]
    up, down = ([(kind, group) for group in range(4)] for kind in ("up", "down"))
    assert steps == [up[0], up[1], down[0], up[2], down[1], up[3], down[2], down[3]]


def test_the_cloud_alone_is_the_backbone(adapted):
    for name in ("qkv", "late fold", "ladder"):
        config, cut = scheme(name)
        model = adapted(**config)
        _, cloud = split(model, **cut)
        with torch.no_grad(), cloud.alone(), model.disable_adapter():
            logits = cloud.public.logits(cloud(cloud.public.embed(IDS)))
            assert_as_exact(logits, model(input_ids=IDS).logits, precise(model)(input_ids=IDS).logits)
        assert not cloud.public.matrices
        assert getattr(cloud.public.tail, "m", None) is None
    assert split(adapted(), 1)[1].public is None


@pytest.mark.parametrize(
    ("family", "config", "cut", "message"),
    [
        ("gemma2", dict(target_modules=["down_proj"]), {}, "needs an adapter on the last layer's mlp.down_proj or"),
        ("llama", {}, {}, "needs an adapter on the last layer's mlp.down_proj or mlp.c_proj, and nothing behind it"),
        ("llama", dict(target_modules=["up_proj"]), {}, "needs an adapter on the last layer's"),
        (
            "llama",
            dict(target_modules=["down_proj"], layers_to_transform=[1]),
            {},
            "needs an adapter on the last layer",
        ),
        ("llama", dict(target_modules=["down_proj"]), dict(last_k=1), "needs a PrivateLoRA adapter and last_k=0, got"),
        ("llama", dict(ladder=dict(r=4)), {}, "fold=True needs a PrivateLoRA adapter and last_k=0, got LADDER"),
        ("llama", dict(target_modules=["down_proj"]), dict(fold=1), "fold must be True or False, got 1"),
        ("llama", dict(ladder=dict(r=4)), dict(fold=False, first_k=1), "a ladder needs every layer in the cloud, got"),
        ("llama", dict(ladder=dict(r=4)), dict(fold=False, last_k=1), "a ladder needs every layer in the cloud, got"),
    ],
)
def test_what_cannot_be_folded_is_named(adapted, family, config, cut, message):
    model = adapted(family, **config)
    with pytest.raises(ValueError, match=message):
        split(model, **dict(fold=True) | cut)


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
def test_what_a_device_holds_and_sends_by_hand(adapted, name, m, others, up, down):
    config, cut = scheme(name)
    cost = device_cost(split(adapted(**config), **cut)[0], wire_bits=32)
    assert cost.parameters == 2 * 64 * 32 + m + others
    assert cost.flops_per_token == 2 * (64 * 32 + m + others)
    assert (cost.up_bytes_per_token, cost.down_bytes_per_token) == (4 * up, 4 * down)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_cache_that_is_cut_back_is_as_if_nothing_had_been_there(adapted, family):
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
            found = run(ends, cache, keep, stop)
            assert_as_exact(found, expected[:, keep:stop], exact[:, keep:stop])
        for keep in (0, 20):
            with pytest.raises(
                ValueError, match=f"keep must be between 1 and the 19 positions in the cache, got {keep}"
            ):
                cut_back(cache, keep)
        cut_back(cache, 19)
        if options:
            with pytest.raises(
                ValueError, match="keep=12 of 19 positions: a window of 6 has dropped what it would need"
            ):
                cut_back(cache, 12)
        else:
            cut_back(cache, 12)
