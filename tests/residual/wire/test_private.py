"""Each example's gradient over the wire: against the whole model, example by example; and a private training."""

import pytest
import torch

from plpkg.clipping import make_private
from plpkg.residual import CloudServer, DeviceClient
from tests.residual.conftest import CUTS, SCHEMES, adapted, precise

from rounding import assert_as_exact

TEXTS = torch.arange(3, 63).reshape(5, 12)
LENGTHS = torch.tensor([12, 7, 1, 9, 12])  # the third has nothing to predict
MASK = (torch.arange(12) < LENGTHS[:, None]).long()
LABELS = TEXTS.masked_fill(MASK == 0, -100)
CASES = [("llama", name, (0, 0)) for name in SCHEMES] + [("llama", "qkv", cut) for cut in CUTS[1:]]
CASES += [(family, "qkv", (0, 0)) for family in ("gemma2", "gpt2", "mistral")]


def losses(model, batch):
    """Each text's own mean."""
    ids, labels = batch
    logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)
    each = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none", ignore_index=-100)
    return each.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)


def one_by_one(model):
    """Each example's gradient of the whole model by autograd, alone; by name ``(batch, *shape)``."""
    names, learning = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = []
    for ids, labels in zip(TEXTS, LABELS, strict=True):
        loss = losses(model, (ids[None], labels[None])).sum()
        found.append(torch.autograd.grad(loss, learning))
    return {name: torch.stack(gradients) for name, gradients in zip(names, zip(*found, strict=True), strict=True)}


@pytest.mark.parametrize(("family", "name", "cut"), CASES)
def test_each_examples_gradient_is_its_own_alone(pair, family, name, cut):
    _, client, model = pair(family, *cut, name=name, m_scale=0.2)
    gradients, own = client.per_example((TEXTS, LABELS))
    expected, exact = one_by_one(model), one_by_one(precise(model))
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        assert_as_exact(gradient, expected[parameter], exact[parameter])
        assert not gradient[2].any()
    assert_as_exact(own, losses(model, (TEXTS, LABELS)), losses(precise(model), (TEXTS, LABELS)))
    assert all(p.grad is None for p in client.trainable())


def test_it_crosses_what_a_step_without_privacy_does(pair):
    _, client, _ = pair()
    client.train_step(TEXTS, LABELS)  # the first one says hello
    with_privacy, plain = (crossed(client, step) for step in (client.per_example, client.train_step))
    assert with_privacy == plain


def crossed(client, step):
    before = client.traffic
    step((TEXTS, LABELS)) if step == client.per_example else step(TEXTS, LABELS)
    return client.traffic - before


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": TEXTS, "attention_mask": MASK},
        {"input_ids": TEXTS, "attention_mask": MASK, "labels": LABELS},
        [TEXTS, LABELS],
    ],
)
def test_batches_as_they_come(pair, batch):
    _, client, _ = pair()
    expected, _ = client.per_example((TEXTS, LABELS))
    gradients, _ = client.per_example(batch)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": TEXTS, "attention_mask": MASK.flip(1)}, "0 before 1: pad on the right"),
        ({"input_ids": TEXTS, "position_ids": TEXTS}, "has 'position_ids': input_ids, labels"),
        ((TEXTS, LABELS, MASK), "token ids, .ids, labels. or a mapping, got 3 things"),
        ((TEXTS, LABELS[:4]), "labels of shape"),
    ],
)
def test_batches_that_cannot_be(pair, batch, said):
    _, client, _ = pair()
    with pytest.raises(ValueError, match=said):
        client.per_example(batch)


def test_a_small_gradient_beside_a_large_one_is_as_exact(pair):
    """Each example has a scale of its own on the wire: with the batch's, small ones would vanish in half precision."""
    _, client, model = pair(precision="fp16")
    ids = torch.stack([TEXTS[0], torch.full((12,), 5)])
    with torch.no_grad():  # so sure of its words that nearly no gradient is left
        for part in (client.part.lm_head, model.get_output_embeddings()):
            part.weight[5] += 40 * part.weight[5] / part.weight[5].norm()
    alone, together = client.per_example(ids[1:])[0], client.per_example(ids)[0]
    for name, gradient in together.items():
        assert torch.equal(gradient[1], alone[name][0])


EXAMPLES = [{"input_ids": text, "labels": labels} for text, labels in zip(TEXTS, LABELS, strict=True)]
SETTINGS = dict(batch_size=3, epochs=3, noise_multiplier=0.7, max_grad_norm=0.05, seed=3)


def train(model, **how):
    """Three epochs; what has learnt, and ε. Without ``per_example`` the losses are the model's own."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    private = make_private(model, optimizer, EXAMPLES, **how, **SETTINGS)
    for sample in private:
        private.step(sample)
    return [p.detach() for p in model.parameters() if p.requires_grad], private.epsilon(0.01)


def test_a_private_training_is_what_it_is_locally():
    """With the same seed the same samples and noise: the same M, and the same ε."""
    with CloudServer(adapted(m_scale=0.0), precision="fp32") as cloud:
        model = adapted(m_scale=0.2)
        with DeviceClient(cloud.address, model, precision="fp32") as client:
            learnt, epsilon = train(model, per_example=client.per_example)
            steps, looks = client.traffic - client.looks, client.looks
    local = adapted(m_scale=0.2).train()
    expected, local_epsilon = train(local)
    exact, _ = train(precise(adapted(m_scale=0.2)).train())
    assert_as_exact(learnt, expected, exact)
    assert epsilon == local_epsilon
    assert 0 < looks.round_trips < steps.round_trips


def test_a_cloud_that_mixes_examples_is_found():
    def mix(module, args, output):
        return output + output.mean(0)

    with CloudServer(adapted(m_scale=0.0), precision="fp32") as cloud:
        next(m for m in cloud.part.modules() if "RMSNorm" in type(m).__name__).register_forward_hook(mix)
        model = adapted(m_scale=0.2)
        client = DeviceClient(cloud.address, model, precision="fp32")
        with client, pytest.raises(ValueError, match="per_example, or a collate function, mixes examples"):
            train(model, per_example=client.per_example)
