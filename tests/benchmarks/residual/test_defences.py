"""The defences do what they say, cost what they say, and their attackers find what is there to find."""

import math

import pytest
import torch
from peft import get_peft_model

from benchmarks.residual.defences import NoisySender, rms, sending
from plpkg.residual import PrivateLoraConfig, adapter, attacks, split
from plpkg.residual.attacks import LinearInverter, public_table, recover_tokens, token_accuracy
from tests.residual.conftest import IDS, adapted_backbone, backbone, normal, precise

from direct import Direct
from rounding import assert_as_exact, assert_close, sampling_error


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
    for accuracy in (near, learnt):
        assert accuracy[0] == 1
        assert accuracy[0] > accuracy[1] > accuracy[2] > accuracy[3]
        assert accuracy[3] < 10 / len(table)  # ten times what chance finds


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("first_k", [0, 1])
def test_the_uncut_model_computes_with_what_a_defended_device_would_send(family, first_k):
    model = backbone(family, options=dict(tie_word_embeddings=True))
    model = get_peft_model(model, PrivateLoraConfig(r_c2d=5, r_d2c=3)).eval()
    with torch.no_grad():
        before = model(IDS).logits
        table, noise = public_table(model.get_base_model()) + normal(64, 32), NoisySender(0.5, 1.0, seed=3)

        def defended(model):
            device, cloud = split(model, first_k)
            cloud.connect(Direct(device))
            device.embedding = torch.nn.Embedding.from_pretrained(table.to(model.dtype))
            return device.logits(cloud(NoisySender(0.5, 1.0, seed=3)(device.embed(IDS))))

        expected, exact = defended(model), defended(precise(model))
        with sending(model, table=table, noise=noise, first_k=first_k):
            assert_as_exact(model(IDS).logits, expected, exact)
        with pytest.raises(AssertionError, match="apart"):
            assert_as_exact(before, expected, exact)
        with pytest.raises(RuntimeError, match="stop"), sending(model, table=table, noise=noise):
            raise RuntimeError("stop")
        assert torch.equal(model(IDS).logits, before)


def test_noise_on_the_answers_is_relative_to_each():
    model = adapted_backbone()
    true = adapter.matrices(model)
    with sending(model, answers=NoisySender(0.5, seed=1)):
        seen = attacks.exchanges(model, [IDS.repeat(40, 1)])
    for name, (u, v) in seen.items():
        clean = u @ true[name].weight.double().T
        assert rms(v - clean) == pytest.approx(0.5 * rms(clean), rel=sampling_error(1 / 2, v.numel()))
    for name, (u, v) in attacks.exchanges(model, [IDS]).items():  # no noise is left
        assert_close(v.float(), u @ true[name].weight.double().T, terms=u.shape[1])
    with sending(model, answers=NoisySender(0.0)):
        quiet = model(IDS).logits
    assert torch.equal(quiet, model(IDS).logits)


def test_what_is_sent_is_the_scaled_row():
    model = backbone("gemma2")
    assert_close(public_table(model), model.model.embed_tokens.weight * math.sqrt(32), terms=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NoisySender(-1, 1.0), "scale must be at least 0, got -1"),
        (lambda: NoisySender(1, 0), "rms must be greater than 0, got 0"),
        (lambda: sending(backbone(), first_k=4).__enter__(), "first_k must be between 0 and num_hidden_layers - 1=3"),
        (lambda: sending(backbone(), table=normal(3, 32)).__enter__(), r"table is \(3, 32\), the embedding \(64, 32\)"),
        (lambda: sending(backbone(), answers=NoisySender(1)).__enter__(), "has no PrivateLoRA adapter 'default'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
