"""The defences do what they say, cost what they say, and their attackers find what is there to find."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from plpkg.backbones import random_backbone
from plpkg.catalog import ModelShape
from plpkg.residual import PrivateLoraConfig, adapter, migrate, split
from plpkg.residual.cost import device_cost, kept_layers_cost
from plpkg.residual.privacy.attacks import LinearInverter, recover_tokens, relative_error, token_accuracy
from plpkg.residual.privacy.defences import (
    NoisySender,
    NonlinearM,
    make_nonlinear,
    prediction_attack,
    private_embedding,
    public_table,
    rms,
    sending,
    steal_function,
    symbols_of,
)

from direct import Direct
from rounding import assert_as_exact, assert_close, relative, sampling_error

IDS = torch.arange(2, 26).reshape(2, 12) % 23 + 1


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small(family="llama", **options):
    return random_backbone(family, num_layers=4, num_kv_heads=2, vocab=64, hidden=32, intermediate=48, options=options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize(("first_k", "last_k"), [(0, 0), (1, 0), (0, 1), (1, 2)])
def test_the_formula_of_the_cost_equals_the_count(family, tied, first_k, last_k):
    model = small(family, tie_word_embeddings=tied)
    shape = ModelShape.from_config(model.config)
    device, _ = split(get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3)), first_k, last_k)
    counted = device_cost(device, wire_bits=32)
    assert kept_layers_cost(shape, first_k, last_k, r_c2d=5, r_d2c=3, wire_bits=32) == counted
    embeddings = {p.data_ptr(): p for p in (device.embedding.weight, device.lm_head.weight)}
    assert len(embeddings) == 1 + (not tied)


@pytest.mark.parametrize(
    "targets", [["down_proj"], ["o_proj", "up_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]]
)
def test_the_formula_knows_every_projection(targets):
    model = small("qwen2", tie_word_embeddings=True)
    shape = ModelShape.from_config(model.config)
    device, _ = split(get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3, target_modules=targets)), 1, 1)
    assert kept_layers_cost(shape, 1, 1, r_c2d=5, r_d2c=3, targets=targets) == device_cost(device)


@pytest.mark.parametrize(("first_k", "last_k"), [(0, 0), (1, 2)])
def test_the_cost_is_what_is_computed_and_sent(adapted, first_k, last_k):
    device, cloud = split(adapted(), first_k, last_k)
    crossed = {"up": 0, "down": 0}

    class Counted(Direct):
        def send(self, group, u):
            crossed["down"] += u.numel() * 2
            super().send(group, u)

        def receive(self, group):
            v = super().receive(group)
            crossed["up"] += v.numel() * 2
            return v

    cloud.connect(Counted(device))
    with torch.no_grad():
        sent = device.embed(IDS[:1, :1])
        hidden = cloud(sent)
    crossed["up"] += sent.numel() * 2
    crossed["down"] += hidden.numel() * 2
    cost = device_cost(device)
    assert (cost.up_bytes_per_token, cost.down_bytes_per_token) == (crossed["up"], crossed["down"])

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        device.logits(hidden)
        device.embed(IDS[:1, :1])
        for group, matrices in enumerate(device.matrices):
            device.residual(group, torch.zeros(len(matrices), 1, 1, 5))
    norms = sum(p.numel() for p in device.parameters() if p.ndim == 1)  # multiplied with as well, but in no product
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == cost.flops_per_token - 2 * norms


def test_the_cost_of_ordinary_lora_is_its_full_width(adapted):
    model = adapted(lora=dict(target_modules=["q_proj", "v_proj"], r=2))
    cost = device_cost(split(model)[0])
    assert cost.up_bytes_per_token == 2 * (32 + 4 * (32 + 16))
    assert cost.down_bytes_per_token == 2 * (32 + 4 * 32)
    assert isinstance(model.peft_config["default"], LoraConfig)


def test_position_embeddings_are_held_and_not_multiplied():
    device, _ = split(get_peft_model(random_backbone("gpt2", max_positions=100), PrivateLoraConfig(r_c2d=5, r_d2c=3)))
    cost = device_cost(device)
    matrices, embedding = 2 * 5 * 3, 256 * 64
    assert cost.parameters == embedding + 100 * 64 + matrices
    assert cost.flops_per_token == 2 * (embedding + matrices)
    assert cost.to_frame().parameters.item() == cost.parameters
    assert repr(cost) == "DeviceCost(22,814 parameters, 32,828 FLOPs per token, 140 bytes up and 148 down)"


def test_seven_billion_parameters():
    """LM head, embedding and M as the publication counts them: 2·V·d + 3·L·r²."""
    cost = kept_layers_cost("llama-2-7b", r_c2d=128, r_d2c=128)
    assert cost.parameters == 2 * 32000 * 4096 + 3 * 32 * 128**2
    assert cost.flops_per_token == 2 * (32000 * 4096 + 3 * 32 * 128**2)


def test_noise_has_the_size_that_it_should_have():
    hidden = 3 * normal(200, 64)
    error = sampling_error(1 / 2, hidden.numel())
    assert rms(hidden) == pytest.approx(3, rel=error)
    sender = NoisySender(0.5, rms(hidden), seed=1)
    noise = sender(hidden) - hidden
    assert rms(noise) == pytest.approx(sender.std, rel=error)
    assert sender.std == pytest.approx(1.5, rel=error)
    assert not torch.allclose(sender(hidden) - hidden, noise)
    assert torch.equal(NoisySender(0.5, rms(hidden), seed=1)(hidden) - hidden, noise)
    assert torch.equal(NoisySender(0, 1.0)(hidden), hidden)
    assert sender(hidden.half()).dtype == torch.float16


def test_more_noise_leaves_fewer_tokens():
    table = normal(200, 24)
    ids = torch.arange(2000) % 200
    near, learnt = [], []
    for scale in (0.25, 2, 4, 16):
        noise = NoisySender(scale, rms(table), seed=1)
        near.append(token_accuracy(recover_tokens(noise(table[ids]), table), ids))
        inverter = LinearInverter(noise(table[ids]), ids, table)
        learnt.append(token_accuracy(inverter.recover(noise(table[ids])), ids))
    for found in (near, learnt):
        assert found[0] == 1
        assert found[0] > found[1] > found[2] > found[3]
        assert found[3] < 10 / len(table)  # ten times what chance finds


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("first_k", [0, 1])
def test_the_uncut_model_computes_with_what_a_defended_device_would_send(family, first_k):
    heads = dict(num_kv_heads=4) if family == "gpt2" else dict(num_kv_heads=2)
    model = random_backbone(family, num_layers=3, hidden=32, vocab=64, options=dict(tie_word_embeddings=True), **heads)
    model = get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3)).eval()
    with torch.no_grad():
        before = model(IDS).logits
        table, noise = public_table(model.get_base_model()) + normal(64, 32), NoisySender(0.5, 1.0, seed=3)

        def defended(model):
            device, cloud = split(model, first_k)
            cloud.connect(Direct(device))
            device.embedding = torch.nn.Embedding.from_pretrained(table.to(model.dtype))
            return device.logits(cloud(NoisySender(0.5, 1.0, seed=3)(device.embed(IDS))))

        expected, exact = defended(model), defended(copy.deepcopy(model).double())
        with sending(model, table=table, noise=noise, first_k=first_k):
            assert_as_exact(model(IDS).logits, expected, exact)
        with pytest.raises(AssertionError, match="apart"):
            assert_as_exact(before, expected, exact)
        with pytest.raises(RuntimeError, match="stop"), sending(model, table=table, noise=noise):
            raise RuntimeError("stop")
        assert torch.equal(model(IDS).logits, before)


def test_noise_on_the_answers_is_relative_to_each(adapted):
    model = adapted()
    true = adapter.matrices(model)
    with sending(model, answers=NoisySender(0.5, seed=1)):
        seen = migrate.exchanges(model, [IDS.repeat(40, 1)])
    for name, (u, v) in seen.items():
        clean = u @ true[name].weight.double().T
        assert rms(v - clean) == pytest.approx(0.5 * rms(clean), rel=sampling_error(1 / 2, v.numel()))
    for name, (u, v) in migrate.exchanges(model, [IDS]).items():  # no noise is left
        assert_close(v.float(), u @ true[name].weight.double().T, terms=u.shape[1])
    with sending(model, answers=NoisySender(0.0)):
        quiet = model(IDS).logits
    assert torch.equal(quiet, model(IDS).logits)


def test_what_is_sent_is_the_scaled_row():
    model = small("gemma2")
    assert_close(public_table(model), model.model.embed_tokens.weight * math.sqrt(32), terms=2)


def repeating(seed=0):
    """Batches in which each token has one successor."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (torch.randint(64, (4, 1), generator=generator) + 5 * torch.arange(16)) % 64


def loss_of(model, table):
    ids = next(repeating(1))
    with torch.no_grad(), sending(model, table=table):
        return functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def test_a_secret_embedding_learns_the_language_and_keeps_away_from_the_public_one():
    model = small(tie_word_embeddings=True)
    model.lm_head.weight.data *= 20  # tied: both are
    model.model.norm.weight.requires_grad_(False)
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    public = public_table(model)
    options = dict(steps=60, lr=0.02, size=1.0, seed=5)
    start = private_embedding(model, repeating(), **options | dict(steps=0))
    secret = private_embedding(model, repeating(), **options, max_cosine=0.2)
    free = private_embedding(model, repeating(), **options, weight=0)
    assert loss_of(model, secret) < loss_of(model, start) - 0.5
    near = [(functional.cosine_similarity(table, public) - 0.2).relu().mean() for table in (start, secret, free)]
    assert near[0] > near[2] > 2 * near[1]
    assert torch.equal(secret, private_embedding(model, repeating(), **options, max_cosine=0.2))
    assert not torch.equal(start, private_embedding(model, repeating(), **options | dict(steps=0, seed=6)))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == {n: g for n, (_, g) in before.items()}
    assert all(torch.equal(p, before[name][0]) and p.grad is None for name, p in model.named_parameters())


def test_secret_embeddings_start_as_described():
    model = small()
    public = public_table(model)
    perturbed = private_embedding(model, repeating(), steps=0, size=2.0)
    assert rms(perturbed - public) == pytest.approx(2 * rms(public), rel=sampling_error(1 / 2, public.numel()))
    rotated = private_embedding(model, repeating(), steps=0, start="rotated")
    assert_close(rotated @ rotated.T, public @ public.T, terms=4 * 32)  # the rotation, twice the turning, the product
    assert token_accuracy(recover_tokens(rotated, public), torch.arange(64)) < 10 / 64  # chance finds one
    # The knowing attacker: as many known pairs as dimensions, and every token falls.
    known = torch.arange(40)
    assert token_accuracy(LinearInverter(rotated[known], known, public).recover(rotated), torch.arange(64)) == 1


def test_equal_vectors_are_one_symbol():
    ids = torch.tensor([[5, 3, 5], [9, 9, 3]])
    symbols = symbols_of(normal(10, 4)[ids])
    assert sorted(symbols.unique().tolist()) == [0, 1, 2]
    assert torch.equal(symbols[0, :, None, None] == symbols, ids[0, :, None, None] == ids)


def test_predictions_decipher_as_a_loop_would():
    cipher = torch.tensor([[0, 1, 2, 1, 1], [3, 2, 2, 1, 2]])
    log_probs = normal(2, 5, 7).log_softmax(-1)
    sums = {symbol: torch.zeros(7) for symbol in (1, 2)}
    for row in range(2):
        for i in range(1, 5):
            sums[cipher[row, i].item()] += log_probs[row, i - 1]
    best = {symbol: total.argmax().item() for symbol, total in sums.items()} | {0: -1, 3: -1}  # never predicted
    assert prediction_attack(log_probs, cipher).tolist() == [[best[s] for s in row] for row in cipher.tolist()]


def test_a_nonlinear_m_starts_at_zero_and_learns_what_no_matrix_can():
    m, u = NonlinearM(6, 4, 32, seed=1), normal(3, 50, 6)
    assert m(u).shape == (3, 50, 4)
    assert not m(u).any()
    target = u[..., :4].abs()
    optimizer = torch.optim.Adam(m.parameters(), lr=0.03)
    for _ in range(200):
        optimizer.zero_grad()
        functional.mse_loss(m(u), target).backward()
        optimizer.step()
    matrix = torch.linalg.lstsq(u.flatten(0, 1), target.flatten(0, 1)).solution
    assert relative_error(u @ matrix, target) > 0.8  # six columns and 150 rows explain 4 % of any square by chance
    assert relative_error(m(u).detach(), target) < relative_error(u @ matrix, target) / 2
    assert torch.equal(NonlinearM(6, 4, 32, seed=1).inner.weight, NonlinearM(6, 4, 32, seed=1).inner.weight)
    assert not torch.equal(NonlinearM(6, 4, 32, seed=1).inner.weight, NonlinearM(6, 4, 32, seed=2).inner.weight)


def test_nonlinear_ms_stand_where_matrices_stood(adapted):
    model = adapted(m_scale=0.0)
    with torch.no_grad():
        public = model(IDS).logits
    make_nonlinear(model, 8)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, public)
    modules = [module for module in model.modules() if isinstance(module, NonlinearM)]
    assert len(modules) == 12
    assert len({module.inner.weight.sum().item() for module in modules}) == 12
    for module in modules:
        module.outer.weight.data = normal(3, 8, seed=7)
    device, cloud = split(model, 1)
    cloud.connect(Direct(device))
    with torch.no_grad():
        expected, exact = (each(IDS).logits for each in (model, copy.deepcopy(model).double()))
        assert_as_exact(device.logits(cloud(device.embed(IDS))), expected, exact)
        with pytest.raises(AssertionError, match="apart"):
            assert_as_exact(public, expected, exact)
    model(IDS).logits.sum().backward()
    assert all(module.inner.weight.grad is not None for module in modules)
    assert device_cost(device).up_bytes_per_token == 2 * (32 + 9 * 3)
    with pytest.raises(RuntimeError):
        model.merge_adapter()


def test_a_function_is_stolen_from_its_answers():
    u, function = normal(2000, 6), NonlinearM(6, 4, 32, seed=1)
    function.outer.weight.data = normal(4, 32)
    with torch.no_grad():
        v = function(2 * u).half()
    stolen = steal_function(u.half(), v, hidden=64, steps=500)
    assert (stolen.pairs, stolen.held_out) == (1600, 400)
    assert stolen.relative_error < stolen.linear_error / 3
    fresh = normal(5, 100, 6, seed=9)
    assert relative_error(stolen.function(fresh), function(2 * fresh).detach()) < stolen.linear_error / 3
    again = steal_function(u.half(), v, hidden=64, steps=500)
    assert again == stolen
    assert stolen.to_frame().columns.tolist() == ["pairs", "held_out", "relative_error", "linear_error"]
    assert "function" not in repr(stolen)


def test_a_theft_is_tested_on_what_came_later():
    u = normal(1000, 4)
    v = u @ normal(4, 4, seed=1)
    assert steal_function(u, v, steps=0).relative_error < torch.linalg.cond(u) * relative(4)
    v[800:] = normal(200, 4, seed=2)
    stolen = steal_function(u, v, steps=100)
    assert stolen.relative_error > 1  # worse than no answer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kept_layers_cost("llama-2-7b", 32), "first_k must be between 0 and num_layers - 1=31, got 32"),
        (lambda: kept_layers_cost("llama-2-7b", 2, 30), "last_k must be between 0 and num_layers - 1 - first_k=29"),
        (lambda: kept_layers_cost("llama-2-7b", r_d2c=0), "r_d2c must be a whole number of at least 1, got 0"),
        (lambda: kept_layers_cost("llama-2-7b", targets=["down"]), "a target must be one of 'q_proj', .*, got 'down'"),
        (lambda: kept_layers_cost(ModelShape.from_config(small("gemma2").config)), "family must be one of 'llama'"),
        (lambda: NoisySender(-1, 1.0), "scale must be at least 0, got -1"),
        (lambda: NoisySender(1, 0), "rms must be greater than 0, got 0"),
        (lambda: sending(small(), first_k=4).__enter__(), "first_k must be between 0 and num_hidden_layers - 1=3"),
        (lambda: sending(small(), table=normal(3, 32)).__enter__(), r"table is \(3, 32\), the embedding \(64, 32\)"),
        (
            lambda: sending(small(), answers=NoisySender(1)).__enter__(),
            "LlamaForCausalLM has no PrivateLoRA adapter 'default'",
        ),
        (
            lambda: private_embedding(small(), repeating(), start="secret"),
            "start must be one of 'perturbed', 'rotated'",
        ),
        (lambda: private_embedding(small(), repeating(), max_cosine=2), "max_cosine must be at least -1 and at most 1"),
        (lambda: prediction_attack(normal(3, 4), torch.zeros(2)), r"log_probs \(3, 4\) and cipher \(2,\) are not of"),
        (lambda: NonlinearM(4, 4, 0), "hidden must be a whole number of at least 1, got 0"),
        (lambda: make_nonlinear(small(), 8), "LlamaForCausalLM has no PrivateLoRA adapter 'default'"),
        (lambda: steal_function(normal(5, 2), normal(4, 2)), r"u \(5, 2\) and v \(4, 2\) are not pairs"),
        (lambda: steal_function(normal(5, 2), normal(5, 2), held_out=0), "5 pairs with held_out=0 leave nothing"),
        (lambda: steal_function(normal(5, 2), normal(5, 2), held_out=2), "held_out must be at least 0 and at most 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
