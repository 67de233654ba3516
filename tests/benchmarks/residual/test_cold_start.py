import pytest
import torch
from torch.nn import functional

from benchmarks.residual.cold_start import private_embedding
from benchmarks.residual.defences import rms, sending
from plpkg.residual.attacks import LinearInverter, public_table, recover_tokens, token_accuracy
from tests.residual.conftest import backbone

from rounding import assert_close, sampling_error


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
    model = backbone(options=dict(tie_word_embeddings=True))
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
    model = backbone()
    public = public_table(model)
    perturbed = private_embedding(model, repeating(), steps=0, size=2.0)
    assert rms(perturbed - public) == pytest.approx(2 * rms(public), rel=sampling_error(1 / 2, public.numel()))
    rotated = private_embedding(model, repeating(), steps=0, start="rotated")
    assert_close(rotated @ rotated.T, public @ public.T, terms=4 * 32)  # the rotation, twice the turning, the product
    assert token_accuracy(recover_tokens(rotated, public), torch.arange(64)) < 10 / 64  # chance finds one
    # The knowing attacker: as many known pairs as dimensions, and every token falls.
    known = torch.arange(40)
    assert token_accuracy(LinearInverter(rotated[known], known, public).recover(rotated), torch.arange(64)) == 1
