"""The attacks against brute force, against what was really there, and against a model that has learnt."""

import functools
import statistics
import textwrap
from pathlib import Path

import pytest
import torch
from peft import get_peft_model

from plpkg.backbones import load_backbone
from plpkg.residual import CloudServer, DeviceClient, PrivateLoraConfig, attacks, matrices, split
from plpkg.residual.attacks import LinearInverter, recover_tokens, token_accuracy
from plpkg.residual.methods import LadderConfig
from tests.residual.conftest import backbone, normal

from direct import Direct
from rounding import assert_close, relative, sampling_error


def tokens(*shape, vocab, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def test_a_cloud_hears_what_its_devices_say():
    """Over a real connection: what it has kept are the embeddings, A·x, and M times it; two devices in turn."""
    model = get_peft_model(backbone("llama"), PrivateLoraConfig(r_c2d=4, r_d2c=4))
    ids = tokens(1, 9, vocab=model.config.vocab_size)
    cloud = CloudServer(model, precision="fp32")
    heard = attacks.listen(cloud.part)
    with cloud:
        for seed in (0, 1):
            for i, m in enumerate(matrices(model).values()):
                torch.nn.init.normal_(m.weight, generator=torch.Generator().manual_seed(10 * seed + i))
            with DeviceClient(cloud.address, model, precision="fp32") as device:
                device.logits(ids)
            assert torch.equal(recover_tokens(heard.hidden[seed], attacks.public_table(model)), ids)
            for group, ms in enumerate(device.part.matrices):
                for u, v, m in zip(heard.u[group][seed], heard.v[group][seed], ms, strict=True):
                    assert_close(v, u @ m.weight.detach().T, terms=4)
    assert len(heard.hidden) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embeddings_tell_their_tokens_in_every_precision(dtype):
    table = normal(attacks.CHUNK + 500, 16)
    ids = tokens(2, attacks.CHUNK // 2 + 300, vocab=len(table), seed=1)  # more positions, and more rows, than one chunk
    assert torch.equal(recover_tokens(table[ids].to(dtype), table), ids)


def test_the_nearest_row_is_the_nearest_also_of_rows_that_differ_little():
    table, received = normal(attacks.CHUNK + 50, 3).double(), normal(40, 3, seed=1).double()
    brute = torch.stack([(table - x).norm(dim=1).argmin() for x in received])
    assert torch.equal(recover_tokens(received, table), brute)
    table = 1000 + 1e-2 * normal(50, 8).double()
    assert torch.equal(recover_tokens(table, table), torch.arange(50))


def test_m_is_solved_for():
    m, u = normal(7, 12).double(), normal(3, 40, 12, seed=1).double()
    v = u @ m.T
    for some in (u.flatten(0, 1), u[0, :12]):
        condition = torch.linalg.pinv(some).norm() * some.norm()  # how much an error of v grows
        assert attacks.relative_error(attacks.recover_m(some, some @ m.T), m) <= condition * relative(12, torch.float64)
    assert attacks.recover_m(u.float(), v.float()).dtype == torch.float64
    few = attacks.recover_m(u[0, :3], v[0, :3])
    assert_close(few, (torch.linalg.pinv(u[0, :3]) @ v[0, :3]).T, terms=u[0].numel())
    spread = 0.25 * 0.75 / (m.numel() / 2)  # of a share that is Beta-distributed, m being normal
    assert attacks.relative_error(few, m) ** 2 == pytest.approx(9 / 12, abs=sampling_error(spread, 1))


def test_m_is_solved_for_from_what_crosses_in_half_precision():
    model = get_peft_model(backbone(num_layers=2), PrivateLoraConfig(r_c2d=6, r_d2c=4)).eval()
    for name, parameter in model.named_parameters():
        if "privatelora_M" in name:
            parameter.data = normal(*parameter.shape, seed=len(name))
    device, cloud = split(model)

    class Half(Direct):
        def send(self, group, u):
            super().send(group, u.half())

        def receive(self, group):
            return super().receive(group).half()

    heard = attacks.listen(cloud)
    cloud.connect(Half(device))
    with torch.no_grad():
        cloud(device.embed(tokens(2, 40, vocab=64)))
    for group in range(2):
        for u, v, m in zip(heard.u[group][0].half(), heard.v[group][0], device.matrices[group], strict=True):
            m, rounded = m.weight.detach(), relative(1, torch.float16) * v.float().norm()
            most = torch.linalg.matrix_norm(torch.linalg.pinv(u.flatten(0, 1).double()), 2) * rounded / m.norm()
            assert attacks.relative_error(attacks.recover_m(u, v), m) <= most
            # Two thirds of m stay open, on average; of normal entries less than 0.3² once in a million.
            assert attacks.relative_error(attacks.recover_m(u[:1, :2], v[:1, :2]), m) > 0.3


NUMBERS = 8


@functools.cache
def ladder_owner(width=None):
    """A device's part with a random M, and what a cloud might send: ``(n, hidden + numbers)`` seen, and unseen."""
    device = imitator(width)
    generator = torch.Generator().manual_seed(0)
    for parameter in device.tail.m.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
    return device, normal(16_000, device.width), normal(2000, device.width, seed=1)


def imitator(width=None):
    """A device's part whose M adds nothing yet, and whose LM head tells tokens apart more than a random one does."""
    model = backbone()
    model.lm_head.weight.data = 0.4 * normal(64, 32, seed=2)
    return split(get_peft_model(model, LadderConfig(r=NUMBERS // 4, width=width)).eval())[0]


@torch.no_grad()
def divergence(owner, part, finals):
    """KL(owner || part), nats a token."""
    mine, theirs = (each.logits(finals).double().log_softmax(-1) for each in (owner, part))
    return (mine.exp() * (mine - theirs)).sum(-1).mean().item()


@torch.no_grad()
def sampled(owner, finals):
    """Tokens that an owner samples."""
    return owner.logits(finals).softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(5))[:, 0]


@pytest.mark.parametrize("width", [None, 6])
def test_a_ladder_is_imitated_from_the_tokens_that_its_owner_samples(width):
    owner, seen, unseen = ladder_owner(width)
    part = imitator(width).requires_grad_()  # nothing but M is to learn all the same
    before = {name: p.clone() for name, p in part.named_parameters()}
    none = divergence(owner, part, unseen)
    attacks.imitate_ladder(part, seen.half(), sampled(owner, seen), lr=2e-2, steps=300)
    # With p parameters and n tokens maximum likelihood is p / 2n away, far less than the backbone without M.
    parameters = sum(p.numel() for p in owner.tail.m.parameters())
    assert parameters / 2 / len(seen) < none / 25
    assert divergence(owner, part, unseen) < none / 5
    learnt = {name for name, p in part.named_parameters() if not torch.equal(p, before[name])}
    assert learnt == {f"tail.m.{name}" for name, _ in part.tail.m.named_parameters()}
    assert {name for name, p in part.named_parameters() if p.grad is not None} <= learnt


def test_greedy_tokens_tell_which_token_is_likeliest():
    owner, seen, unseen = ladder_owner()
    part = imitator()
    with torch.no_grad():
        greedy, true = (owner.logits(finals).argmax(-1) for finals in (seen, unseen))
        before = token_accuracy(part.logits(unseen).argmax(-1), true)
        attacks.imitate_ladder(part, seen, greedy, temperature=0.1, lr=2e-2, steps=300)
        after = token_accuracy(part.logits(unseen).argmax(-1), true)
    assert 1 - after < (1 - before) / 2


def test_what_is_kept_is_what_was_best_for_tokens_held_out():
    owner, seen, _ = ladder_owner()
    chosen, part = sampled(owner, seen), imitator()
    few = dict(finals=seen[:60], tokens=chosen[:60])
    still = dict(lr=1e-12, steps=1)
    start = attacks.imitate_ladder(part, **few, **still)
    kept = attacks.imitate_ladder(part, **few, lr=1e-1, steps=200)  # it learns them by heart
    assert kept <= start
    assert attacks.imitate_ladder(part, **few, **still) == pytest.approx(kept, rel=relative(60 * 64))
    noise = tokens(60, vocab=64, seed=9)
    again = attacks.imitate_ladder(part, seen[:60], noise, lr=1e-1, steps=200)
    assert again == attacks.imitate_ladder(part, seen[:60], noise, **still)


def test_a_linear_inverter_reads_embeddings_of_tokens_that_it_never_saw():
    table = normal(300, 16)
    seen, ids = tokens(400, vocab=200), torch.arange(300)
    inverter = LinearInverter(table[seen], seen, table)
    assert torch.equal(inverter.recover(table[ids].half()), ids)
    assert torch.equal(inverter.candidates(table[ids], 3)[:, 0], ids)


def test_a_linear_inverter_finds_the_map_and_weighs_the_noise():
    table, turn = normal(200, 8) + 2, torch.linalg.qr(normal(8, 8, seed=1))[0]
    ids = tokens(4000, vocab=200, seed=2)
    noise = 0.05 * normal(4000, 8, seed=3) + 8 * normal(4000, 1, seed=4) * turn[0]  # large along one direction
    hidden = table[ids] @ turn + noise + 7
    train, test = slice(0, 3000), slice(3000, 4000)
    inverted = LinearInverter(hidden[train], ids[train], table).recover(hidden[test])
    best = recover_tokens(((hidden[test] - 7) @ turn.T)[:, 1:], table[:, 1:])  # knows the map, and what is noise
    assert token_accuracy(inverted, ids[test]) > token_accuracy(best, ids[test]) - sampling_error(1 / 4, 1000)
    plain = recover_tokens((hidden[test] - hidden[train].mean(0)) @ turn.T + table[ids[train]].mean(0), table)
    assert token_accuracy(plain, ids[test]) < token_accuracy(inverted, ids[test]) / 2


def test_little_text_does_not_look_exact():
    """Fewer pairs than dimensions: in most directions the residuals are zero, and the noise is not."""
    table = normal(500, 32)
    hidden = table + normal(500, 32, seed=1)
    known = torch.arange(20)
    inverted = LinearInverter(hidden[known], known, table).recover(hidden[20:])
    best = recover_tokens(hidden[20:], table)  # knows the map, and that the noise is white
    assert token_accuracy(inverted, torch.arange(20, 500)) > token_accuracy(best, torch.arange(20, 500)) / 2


def test_the_attackers_copy_leaves_the_model_alone():
    model = backbone()
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    attacks.public_prefix(model, 1).embed(torch.ones(1, 2, dtype=torch.long))
    after = {name: (p, p.requires_grad) for name, p in model.named_parameters()}
    assert before.keys() == after.keys()
    assert all(torch.equal(p, after[name][0]) and grad == after[name][1] for name, (p, grad) in before.items())


def test_relative_error_is_of_the_frobenius_norm():
    assert attacks.relative_error(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 4.0]])) == 0.75


def test_layers_that_have_learnt_hide_little_from_public_text():
    model, tokenizer = load_backbone("plpkg-small")
    public, private = (
        torch.tensor(tokenizer(Path(module.__file__).read_text(encoding="utf-8"))["input_ids"][:4096]).view(-1, 256)
        for module in (statistics, textwrap)
    )
    with torch.no_grad():
        sent, target = (model.model(ids, output_hidden_states=True).hidden_states[1] for ids in (public, private))
    table = model.get_input_embeddings().weight
    inverted = LinearInverter(sent, public, table).recover(target.half())
    assert token_accuracy(inverted, private) > 0.9
    assert token_accuracy(recover_tokens(target, table), private) < 0.5


ROW, U, IDS = torch.ones(1, 4), torch.ones(5, 3), torch.zeros(5, dtype=torch.int64)
FINALS = torch.ones(5, 32 + NUMBERS)


def imitate(finals=FINALS, chosen=IDS, **settings):
    return attacks.imitate_ladder(imitator(), finals, chosen, **settings)


def imitate_without_m():
    part = imitator()
    part.tail.m = None
    return attacks.imitate_ladder(part, FINALS, IDS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: recover_tokens(ROW, torch.ones(2, 3)), "vectors of 4 entries cannot be compared with rows of 3"),
        (lambda: recover_tokens(ROW / 0, ROW), "are not finite"),
        (lambda: recover_tokens(ROW, ROW / 0), "are not finite"),
        (lambda: recover_tokens(ROW, ROW[:0]), "the 0 rows"),
        (lambda: attacks.recover_m(U, torch.ones(4, 3)), r"u \(5, 3\) and v \(4, 3\) are not pairs"),
        (lambda: attacks.recover_m(U[:0], U[:0]), r"u \(0, 3\) and v \(0, 3\) are not pairs"),
        (lambda: attacks.recover_m(U, U / 0 * 0), "u and v must be finite"),
        (lambda: attacks.recover_m(U[0], U[0]), r"u \(3,\) and v \(3,\) are not pairs"),
        (lambda: attacks.relative_error(U, U[:2]), r"an estimate \(5, 3\) of a truth \(2, 3\)"),
        (lambda: attacks.relative_error(U, 0 * U), "the truth is zero"),
        (lambda: token_accuracy(IDS, IDS[:2]), r"recovered \(5,\) and true \(2,\) are not the same tokens"),
        (lambda: token_accuracy(IDS[:0], IDS[:0]), "or none"),
        (lambda: LinearInverter(U, IDS[:4], U), r"hidden \(5, 3\) and ids \(4,\) are not pairs"),
        (lambda: LinearInverter(U, IDS, U), "or all alike"),
        (lambda: LinearInverter(U, torch.arange(5), ROW), "or not of the table's width, 4"),
        (lambda: LinearInverter(U, torch.arange(5) - 1, U), r"between 0 and vocab - 1 = 4, got \[-1, 0, 1, 2, "),
        (lambda: LinearInverter(U / 0, torch.arange(5), U), "hidden and table must be finite"),
        (lambda: LinearInverter(U, torch.arange(5), U, ridge=0), "ridge must be greater than 0, got 0"),
        (lambda: imitate(FINALS[:4]), r"finals \(4, 40\) and 5 tokens are not two pairs at least"),
        (lambda: imitate(FINALS[:, :9]), r"finals \(5, 9\) and 5 tokens"),
        (lambda: imitate(FINALS[:1], IDS[:1]), r"finals \(1, 40\) and 1 tokens are not two"),
        (lambda: imitate(FINALS / 0), "or not finite"),
        (lambda: imitate(chosen=IDS - 100), r"the tokens must be between 0 and vocab - 1 = 63, got \[-100\]"),
        (lambda: imitate(temperature=1e-300), "the loss at temperature=1e-300 is never finite"),
        (lambda: attacks.imitate_ladder(attacks.public_prefix(backbone(), 0), FINALS[:, :32], IDS), "has no ladder"),
        (imitate_without_m, "no M stands before its norm"),
        (lambda: imitate(temperature=0), "temperature must be greater than 0, got 0"),
        (lambda: imitate(steps=0), "steps must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
