"""The attackers against brute force, and against what was really there."""

from collections import Counter

import pytest
import torch

from benchmarks.residual.attackers import MlpInverter, frequency_attack, greedy_search, prediction_attack, symbols_of
from plpkg.backbones import FAMILIES
from plpkg.residual.attacks import LinearInverter, public_prefix, token_accuracy
from tests.residual.conftest import backbone, normal, precise

from rounding import assert_as_exact


def tokens(*shape, vocab, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def contextual(family="llama"):
    """A random model in which what came before matters: as they come, attention adds almost nothing."""
    model = backbone(family, num_layers=3)
    for layer in getattr(model.base_model, "layers", getattr(model.base_model, "h", None)):
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                parameter.data *= 15
    return model


def test_an_mlp_inverter_learns_what_a_linear_one_cannot():
    table = normal(60, 8)
    ids = tokens(4000, vocab=60, seed=1)
    hidden = table.square()[ids] + 0.05 * normal(4000, 8, seed=2)
    train, test = slice(0, 3000), slice(3000, 4000)
    given = hidden[train], ids[train], table
    linear = LinearInverter(*given).recover(hidden[test])
    options = dict(steps=200, lr=1e-2, negatives=60)
    learnt = MlpInverter(*given, **options).recover(hidden[test])
    assert token_accuracy(linear, ids[test]) < 0.5 < token_accuracy(learnt, ids[test])
    torch.manual_seed(9)
    state = torch.random.get_rng_state()
    assert torch.equal(MlpInverter(*given, **options).recover(hidden[test]), learnt)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(MlpInverter(*given, steps=0).recover(hidden[test]), linear)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first_k", [0, 1, 2])
def test_a_search_with_the_public_weights_recovers_everything(family, first_k):
    model = contextual(family)
    ids = tokens(1, 24, vocab=64, seed=first_k)
    prefix = public_prefix(model, first_k)
    with torch.no_grad():
        hidden, exact = (
            each(ids, output_hidden_states=True).hidden_states[first_k] for each in (model, precise(model))
        )
    assert_as_exact(prefix.embed(ids), hidden, exact)
    assert torch.equal(greedy_search(prefix, hidden[0].half(), batch=40), ids[0])


def test_the_search_keeps_to_its_candidates_and_stops_where_it_may():
    model = contextual()
    ids = tokens(1, 6, vocab=64)
    prefix = public_prefix(model, 1)
    observed = prefix.embed(ids)[0].detach()
    ranking = torch.stack([torch.cat([torch.arange(64)[torch.arange(64) != i], i[None]]) for i in ids[0]])  # true last
    assert torch.equal(greedy_search(prefix, observed, ranking, batch=10), ids[0])
    assert torch.equal(greedy_search(prefix, observed, ranking, batch=10, tolerance=1e-3), ids[0])
    early = greedy_search(prefix, observed, ranking, batch=1, tolerance=100)
    assert torch.equal(early, ranking[:, 0])
    assert not (greedy_search(prefix, observed, ranking[:, :-1]) == ids[0]).any()


def markov(n, seed, vocab=80):
    """Text in which each token has a few usual successors, the same ones in every text; not all tokens are common."""
    successors = tokens(vocab, 4, vocab=vocab, seed=1)
    generator = torch.Generator().manual_seed(seed)
    choice = torch.multinomial(torch.tensor([0.4, 0.15, 0.1, 0.05, 0.3]), n, replacement=True, generator=generator)
    anywhere = torch.multinomial(1 / torch.arange(1.0, vocab + 1), n, replacement=True, generator=generator)
    text = [0]
    for kind, jump in zip(choice.tolist(), anywhere.tolist(), strict=True):
        text.append(jump if kind == 4 else successors[text[-1], kind].item())
    return torch.tensor(text)


def test_a_substitution_is_deciphered_by_statistics():
    public, private = markov(40_000, seed=2), markov(20_000, seed=3)
    replaced = torch.randperm(80, generator=torch.Generator().manual_seed(4))
    deciphered = frequency_attack(replaced[private], public, symbols=80)
    ranks = frequency_attack(replaced[private], public, symbols=80, rounds=0)
    assert 1 - token_accuracy(deciphered, private) < (1 - token_accuracy(ranks, private)) / 2
    renamed = replaced[private] * 1000
    assert torch.equal(frequency_attack(renamed, public, symbols=80), deciphered)

    by_frequency = [[token for token, _ in Counter(text.tolist()).most_common(5)] for text in (private, public)]
    table = dict(zip(*by_frequency, strict=True))
    top = torch.isin(private, torch.tensor(by_frequency[0]))
    assert ranks[top].tolist() == [table[token] for token in private[top].tolist()]

    rare = frequency_attack(replaced[private], public, symbols=10)
    common = {token for token, _ in Counter(private.tolist()).most_common(10)}
    assert torch.equal(rare == -1, torch.tensor([token not in common for token in private.tolist()]))


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
