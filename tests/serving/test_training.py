"""Many people's training: as each alone, as PEFT's loop, and as one backward pass for each."""

import copy

import peft
import pytest
import torch
from torch.nn.functional import cross_entropy

from plpkg.adapters import InvalidAdapterError, read_adapter, targets
from plpkg.backbones import FAMILIES
from plpkg.clipping.checks.sensitivity import check_sensitivity
from plpkg.clipping.clip import Clip, clip_dense
from plpkg.corpora import Tokens, batch
from plpkg.residual import PrivateLoraConfig
from plpkg.serving import training
from plpkg.serving.engine import Engine, Request
from plpkg.serving.slots import Hooks
from plpkg.serving.training import per_person_gradients, train_many

from rounding import assert_as_exact, assert_close

SAMPLES = {"ann": [(2, 7), (1, 12)], "bob": [(1, 5)], "cat": [(3, 9), (2, 2), (1, 11)]}
STEPS, LR, WIDTHS = 4, 0.02, 2000
# WIDTHS bounds the terms behind an element of a gradient here, all layers' together. AdamW divides by the gradient's
# size, and where that is near its eps=1e-8 an error is up to 1e8 times as large: half of float64's digits remain.
TERMS = torch.finfo(torch.float64).eps ** -0.5


def lora(family="llama", **options):
    names = dict(gpt2=["c_attn", "c_fc"], phi3=["qkv_proj", "down_proj"]).get(family, ["q_proj", "v_proj", "down_proj"])
    options = dict(r=3, lora_alpha=5, target_modules=names, fan_in_fan_out=family == "gpt2") | options
    return peft.LoraConfig(**options)


def batches(people=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    return {k: [torch.randint(48, shape, generator=generator) for shape in v] for k, v in people.items()}


def train(model, configs, people, **options):
    return train_many(model, configs, people, **dict(steps=STEPS, lr=LR, progress=False) | options)


def same(one, other):
    assert one.keys() == other.keys()
    for name, each in one.items():
        for module, factors in each.factors.items():
            for side in ("down", "up"):
                assert_close(getattr(factors, side), getattr(other[name].factors[module], side), TERMS)


def loss_of(model, batch):
    """The mean over the tokens, in the model's precision; transformers' own is in float32."""
    batch = batch if isinstance(batch, dict) else {"input_ids": batch, "labels": batch}
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return cross_entropy(
        model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )


def start(model, config, adapter):
    """A PEFT model that begins with this adapter's factors."""
    whole = peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(config)).eval()
    for module, factors in adapter.factors.items():
        layer = whole.base_model.model.get_submodule(module)
        layer.lora_A["default"].weight.data = factors.down.clone()
        layer.lora_B["default"].weight.data = factors.up.clone()
    return whole


def peft_loop(whole, batches, max_grad_norm=None):
    leaves = [p for p in whole.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=LR, weight_decay=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(whole, batches[step % len(batches)]).backward()
        if max_grad_norm:  # torch's clip_grad_norm_ divides by the norm + 1e-6
            norm = torch.cat([p.grad.flatten() for p in leaves]).norm()
            for p in leaves:
                p.grad *= min(1, max_grad_norm / norm)
        optimizer.step()


def assert_trained(adapter, whole):
    """The adapter is what PEFT's loop has trained."""
    layers = {name: layer for name, layer in whole.base_model.model.named_modules() if hasattr(layer, "lora_A")}
    assert layers.keys() == adapter.factors.keys()
    for module, factors in adapter.factors.items():
        assert factors.scale == layers[module].scaling["default"]
        assert_close(factors.down, layers[module].lora_A["default"].weight, TERMS)
        assert_close(factors.up, layers[module].lora_B["default"].weight, TERMS)
        assert (factors.up.abs().max() > LR).item()


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_person_s_training_is_peft_s_loop(family, max_grad_norm, tools):
    model, config, people = tools.backbone(family), lora(family, use_rslora=True), batches()
    trained = train(model, config, people, max_grad_norm=max_grad_norm)
    first = train(model, config, people, lr=1e-30, steps=1)  # the factors that each begins with
    for name in SAMPLES if family == "llama" else ["cat"]:
        whole = start(model, config, first[name])
        peft_loop(whole, people[name], max_grad_norm)
        assert_trained(trained[name], whole)


def collated(ids, **changes):
    """As a collator of Hugging Face's gives it: two texts, the second one padded, and of each a prompt unlearned."""
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels} | changes


def test_a_corpus_s_batch_is_taken_as_it_is(tools):
    encoded = [Tokens(ids, torch.arange(len(ids)) > 2, torch.ones(len(ids))) for ids in tools.texts(7, 4)]
    one, model = batch(encoded), tools.backbone()
    same(train(model, lora(), {"ann": one}), train(model, lora(), {"ann": [one, one]}))
    assert one["labels"][1].tolist() == [-100] * 3 + encoded[1].ids[3:].tolist() + [-100] * 3
    assert model(**one).loss.isfinite()
    with pytest.raises(ValueError, match="there are no documents"):
        batch([])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", dict(rank_pattern={"q_proj": 2, "1.mlp.down_proj": 7}, alpha_pattern={"v_proj": 3}, use_rslora=True)),
        (
            "llama",
            dict(rank_pattern={r"^model\.layers\.0\.self_attn\.q_proj$": 2}, alpha_pattern={"0.self_attn.q_proj$": 3}),
        ),
        (
            "llama",
            dict(rank_pattern={r".*\.[01]\..*(q|v)_proj": 2}, alpha_pattern={"^model.layers.1.mlp.down_proj": -3}),
        ),
        ("mistral", dict(layers_to_transform=[1])),
        ("gpt2", dict(layers_to_transform=0, layers_pattern="h", fan_in_fan_out=False)),
        ("qwen2", dict(layers_to_transform=[0], layers_pattern=["blocks", "layers"], fan_in_fan_out=True)),
        ("llama", dict(exclude_modules=["0.self_attn.v_proj", "down_proj"])),
        ("llama", dict(target_modules=r".*\.1\..*(q|up)_proj", exclude_modules=r".*up_proj")),
        ("gemma2", dict(target_modules="all-linear", exclude_modules=["mlp.up_proj"])),
        ("mistral", dict(target_modules=None)),
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")  # PEFT corrects it
def test_a_configuration_is_read_as_peft_reads_it(family, options, tools):
    model, config = tools.backbone(family), lora(family, **options)
    people = {"ann": [collated(torch.randint(48, (2, 9), generator=torch.Generator().manual_seed(3)))]}
    (trained,), (first,) = (train(model, config, people, **each).values() for each in ({}, dict(lr=1e-30, steps=1)))
    whole, engine, (ids,) = start(model, config, first), Engine(model), tools.texts(6)
    peft_loop(whole, people["ann"])
    assert_trained(trained, whole)
    engine.load("ann", trained)
    assert engine.generate([Request(ids, "ann", 6)]) == [tools.alone(start(model, config, trained), ids, 6)]


@pytest.mark.parametrize(
    "options", [dict(), dict(max_tokens=1), dict(max_tokens=30), dict(max_grad_norm=0.05)], ids=str
)
def test_together_is_each_alone(options, tools):
    model, people = tools.backbone(), batches()
    configs, alone = {"ann": lora(), "bob": lora(r=5), "cat": lora()}, {}
    for name, each in people.items():
        alone |= train(model, configs[name], {name: each}, max_grad_norm=options.get("max_grad_norm"))
    same(train(model, configs, people, **options), alone)


def test_the_first_factors_are_peft_s_distribution_of_each_name_and_seed(tools):
    model, people = tools.backbone(), batches()
    first, other = (train(model, lora(r=16), people, lr=1e-30, steps=1, seed=seed) for seed in (0, 1))
    downs = [f.down for each in (first, other) for a in each.values() for m, f in a.factors.items() if "q_proj" in m]
    assert not any(f.up.abs().max() > 1e-29 for a in first.values() for f in a.factors.values())
    assert len({tuple(down.flatten().tolist()) for down in downs}) == 2 * 3 * 2
    bound = 16**-0.5  # kaiming_uniform_ with a=√5
    assert 0.99 * bound < max(down.abs().max() for down in downs) <= bound


def test_float32_is_as_near_float64_as_peft_s_loop(tools):
    exact, people = tools.backbone(), batches({"ann": [(2, 9)]})
    model, config, (ids,) = copy.deepcopy(exact).float(), lora(), people["ann"]
    whole = tools.adapted(model, 3, target_modules=config.target_modules)[0]
    twin = copy.deepcopy(whole).double()
    loss_of(whole, ids).backward()
    loss_of(twin, ids).backward()
    gradients = per_person_gradients(whole, {"ann": ids})
    trained = [(name, p) for name, p in whole.named_parameters() if p.requires_grad]
    each = [(gradients[name][0], p.grad, twin.get_parameter(name).grad) for name, p in trained]
    assert_as_exact(*zip(*each, strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_the_backbone_stays_as_it_is(training, tools):
    model = tools.backbone(options=dict(attention_dropout=0.5)).train(training)
    model.lm_head.requires_grad_(False)
    state, wanted = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    random = torch.random.get_rng_state()
    one, other = (train(model, lora(), batches()) for _ in range(2))
    same(one, other)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert (model.training, [p.requires_grad for p in model.parameters()]) == (training, wanted)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_what_was_trained_is_served_and_all_linear_is_every_target(tools):
    model, engine, (ids,) = tools.backbone(), Engine(tools.backbone()), tools.texts(6)
    configs = {"ann": lora(use_rslora=True), "bob": lora(r=6), "cat": lora(target_modules="all-linear")}
    trained = train(model, configs, batches(), lr=0.2)
    assert trained["cat"].factors.keys() == targets(model).keys()
    for name, adapter in trained.items():
        engine.load(name, adapter)
        assert engine.generate([Request(ids, name, 6)]) == [tools.alone(start(model, configs[name], adapter), ids, 6)]
    with pytest.raises(InvalidAdapterError, match="it was trained on a backbone with fingerprint"):
        read_adapter(*trained["ann"].files.values(), tools.backbone(seed=1))
    engine.close()


IDS, TWO = [torch.ones(1, 4, dtype=torch.long)], torch.ones(2, 8, dtype=torch.long)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # of what is refused here
@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (dict(lora_dropout=0.1), {}, "'ann' has lora_dropout=0.1"),
        (dict(use_dora=True), {}, "use_dora"),
        (dict(bias="all"), {}, "bias: .*got 'all'"),
        (dict(alpha_pattern={".*q_proj": 2}), {}, "alpha_pattern.*not regular expressions"),
        (dict(layers_to_transform=[7]), {}, "PEFT refuses the configuration of 'ann': "),
        (dict(target_modules=["x_proj"]), {}, "PEFT refuses the configuration of 'ann': Target modules .'x_proj'. not"),
        (dict(target_modules=["q_proj", "embed_tokens"]), {}, "'ann' adapts model.embed_tokens, which is no linear"),
        (dict(target_parameters=["up_proj.weight"]), {}, "target_parameters=.* must be empty"),
        (dict(modules_to_save=["lm_head"]), {}, "modules_to_save"),
        (dict(init_lora_weights="pissa"), {}, "init_lora_weights='pissa'"),
        (dict(target_modules=["q_proj", "lm_head"]), {}, "lm_head"),
        (dict(init_lora_weights="gaussian"), {}, "init_lora_weights='gaussian'"),
        (dict(init_lora_weights=False), {}, "init_lora_weights=False"),
        ({}, dict(steps=0), "steps must be .* got 0"),
        ({}, dict(lr=0), "lr must be .* got 0"),
        ({}, dict(configs={"bob": lora()}), r"configs are of \['bob'\], batches of \['ann'\]"),
        ({}, dict(batches={}, configs={}), "each person needs both"),
        ({}, dict(configs={"ann": dict(r=2)}), "configuration of 'ann' must be a LoraConfig, got {'r': 2}"),
        ({}, dict(batches={"bob": IDS, "ann": [TWO + 47]}), "'ann' has ids from 4[0-9] to .*, vocab=48"),
        ({}, dict(batches={"ann": [torch.tensor([[1, -1]])]}), "'ann' has ids from -1 to 1, vocab=48"),
        ({}, dict(batches={"ann": [(TWO, TWO + 48)]}), "'ann' has ids from .*, vocab=48"),
        ({}, dict(batches={"ann": iter(IDS)}), "batches of 'ann' have ended"),
        ({}, dict(batches={"ann": []}), "batches of 'ann' have ended"),
        ({}, dict(max_grad_norm=-1.0), "max_grad_norm must be .* got -1"),
        ({}, dict(max_grad_norm=float("nan")), "max_grad_norm must be .* got nan"),
        ({}, dict(batches={"ann": IDS}, max_tokens=0), "max_tokens must be .* got 0"),
        ({}, dict(batches={"bob": IDS, "ann": [IDS[0][0][0]]}), r"'ann' must be token ids.*got \(\)"),
        ({}, dict(batches={"ann": [{"labels": IDS[0]}]}), "input_ids of the batch of 'ann' must be .* got None"),
        ({}, dict(batches={"ann": [{"input_ids": [[1, 2], [3]]}]}), "'ann' must be token ids"),
        ({}, dict(batches={"ann": [collated(TWO, position_ids=TWO)]}), "'ann' has 'position_ids'"),
        (
            {},
            dict(batches={"ann": [collated(TWO, attention_mask=1 - collated(TWO)["attention_mask"])]}),
            "on the right",
        ),
        ({}, dict(batches={"ann": [collated(TWO, labels=TWO)]}), "'ann' has labels where its padding is"),
        ({}, dict(batches={"ann": [collated(TWO, labels=TWO * 0 - 100)]}), "'ann' leaves nothing to learn"),
        (
            {},
            dict(batches={"ann": [collated(TWO, labels=TWO[:1])]}),
            r"'ann' has labels of shape \(1, 8\) for ids of \(2, 8\)",
        ),
        ({}, dict(batches={"bob": IDS, "ann": [torch.ones(2, 1, dtype=torch.long)]}), r"'ann'.*\(2, 1\)"),
    ],
)
def test_what_could_not_be_served_or_learned_is_refused(config, options, message, tools):
    """Before anybody's batch is asked for, where it does not depend on that."""
    model = tools.backbone()
    arguments = dict(configs=lora(**config), batches={"ann": (1 / 0 for _ in range(1))}) | options
    with pytest.raises(ValueError, match=message):
        train(model, arguments.pop("configs"), arguments.pop("batches"), **arguments)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_loss_that_is_not_finite_names_the_person(tools):
    model, people = tools.backbone(), batches({"ann": [(1, 5)], "bob": [(1, 6)], "cat": [(1, 7)]})
    people["bob"] = [torch.full((1, 6), 47)]
    for name in ("ann", "cat"):
        people[name][0].clamp_(max=46)
    model.get_input_embeddings().weight.data[47] = float("nan")
    with pytest.raises(FloatingPointError, match="loss of 'bob' in step 1 is nan"):
        train(model, lora(), people)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def shared(tools, kind, dtype=torch.float64):
    """A model with a random adapter that is trained."""
    model = tools.backbone(dtype=dtype)
    config = PrivateLoraConfig(r_c2d=3, r_d2c=2) if kind == "PrivateLoRA" else lora()
    whole, generator = peft.get_peft_model(model, config).eval(), torch.Generator().manual_seed(2)
    for p in whole.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) / 4
    return whole


PEOPLE = {name: texts[0] for name, texts in batches().items()} | {"dan": collated(batches({"dan": [(2, 8)]})["dan"][0])}


@pytest.mark.parametrize("max_tokens", [1, 30, 512])
@pytest.mark.parametrize("kind", ["LoRA", "PrivateLoRA"])
def test_each_person_s_gradient_is_one_backward_pass(kind, max_tokens, tools):
    model = shared(tools, kind)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = per_person_gradients(model, PEOPLE, max_tokens=max_tokens)
    assert gradients.keys() == parameters.keys()
    assert all(p.grad is None for p in model.parameters())
    for k, ids in enumerate(PEOPLE.values()):
        alone = torch.autograd.grad(loss_of(model, ids), list(parameters.values()))
        for name, g in zip(parameters, alone, strict=True):
            assert_close(gradients[name][k], g, WIDTHS)
    whole = torch.autograd.grad(sum(loss_of(model, ids) for ids in PEOPLE.values()), list(parameters.values()))
    for name, g in zip(parameters, whole, strict=True):
        assert_close(gradients[name].sum(0), g, 2 * WIDTHS)


def test_checkpointing_changes_no_gradient(tools):
    model = shared(tools, "LoRA")
    expected = per_person_gradients(model, PEOPLE)
    model.enable_input_require_grads()
    model.activation_checkpointing_enable()
    for name, each in per_person_gradients(model.train(), PEOPLE).items():
        assert_close(each, expected[name], WIDTHS)


def test_nobody_has_a_gradient_of_each_shape(tools):
    model = shared(tools, "LoRA")
    shapes = {name: (0, *p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert {name: tuple(g.shape) for name, g in per_person_gradients(model, {}).items()} == shapes


def test_rounding_is_no_tied_weight(tools):
    per_person_gradients(shared(tools, "LoRA", torch.float32).to(torch.bfloat16), PEOPLE)


def _tied(model):
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = attention.q_proj.weight
    attention.q_proj.weight.requires_grad_()


def _outside(model):
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * weight.sum(), *args[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.model.norm.weight.requires_grad_(), "'model.norm.weight'"),
        (lambda model: model.lm_head.weight.requires_grad_(), "'lm_head.weight'"),
        (_tied, "do not add up"),
        (_outside, "do not add up"),
        (lambda model: None, "no weight of this LlamaForCausalLM is trained"),
        (lambda model: peft.get_peft_model(model, lora(target_modules=["lm_head"])), "'lm_head.lora_A"),
    ],
)
def test_what_has_no_gradient_for_each_person_is_refused(change, message, tools):
    model = tools.backbone().requires_grad_(False)
    change(model)
    with pytest.raises(ValueError, match=message):
        per_person_gradients(model, PEOPLE)
    assert not any("_keep" in repr(hook) for m in model.modules() for hook in m._forward_hooks.values())


@pytest.mark.parametrize("kind", ["LoRA", "PrivateLoRA"])
@pytest.mark.parametrize("broken", [False, True])
def test_clipped_by_person_nobody_moves_the_sum_by_more(broken, kind, tools):
    model, norm = shared(tools, kind), 0.05
    ids = torch.randint(48, (5, 9), generator=torch.Generator().manual_seed(4))

    def step(batch):
        people = {"all": batch} if broken else {str(k): row[None] for k, row in enumerate(batch)}
        gradients = per_person_gradients(model, people)
        if broken:  # the mean's gradient is clipped, not a person's
            gradients = {name: g * len(batch) for name, g in gradients.items()}
            return {name: g.sum(0) for name, g in gradients.items()}
        return clip_dense(gradients, Clip(norm))[0]

    result = check_sensitivity(step, ids, norm)
    assert result.ok is not broken
    assert result.worst > 0.99


def test_a_batch_of_people_reads_the_same_without_gradients(tools):
    model = tools.backbone()
    (stack,), _ = training._stacks(model, dict.fromkeys(("ann", "bob"), lora()), 0)
    with torch.no_grad():
        for up in stack.leaves[1::2]:  # zero as they begin
            up.normal_()
    ids = torch.stack(tools.texts(6, 6))
    texts = [training._Text(row[None], row[None]) for row in ids]
    hooks = Hooks(model, stack.scales)
    with hooks.batch(stack.group(slice(0, 2), texts)):
        with_gradients = model(ids).logits.detach()
        with torch.no_grad():
            without = model(ids).logits
    hooks.close()
    assert_close(without, with_gradients, TERMS)
