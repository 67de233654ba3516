"""Attackers of ``benchmarks/residual/attacks.py`` that need more than a formula: a network, a search, two ciphers.

- Tokens from hidden states after the device's own layers: :class:`MlpInverter` learns them from public text,
  :func:`greedy_search` needs the public weights only (like SipIt, arXiv 2510.15511).
- A secret embedding is a substitution cipher: :func:`frequency_attack`, :func:`prediction_attack`.
"""

import copy
import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from plpkg.residual.attacks import LinearInverter
from plpkg.residual.cut.device_part import DevicePart


class MlpInverter(LinearInverter):
    """The linear inverter with a correction that one hidden layer learns, starting from none.

    Parameters
    ----------
    hidden, ids, table, ridge
        As for :class:`LinearInverter`.
    width, steps, batch, lr, seed
        Of the hidden layer, and of AdamW, whose rate falls to zero.
    negatives
        Random tokens that a batch's tokens are told from, besides each other.
    """

    def __init__(
        self, hidden, ids, table, *, ridge=0.1, width=512, steps=300, batch=256, lr=1e-3, negatives=1024, seed=0
    ) -> None:
        super().__init__(hidden, ids, table, ridge=ridge)
        x, ids = super().queries(hidden).flatten(0, -2).float(), ids.flatten()
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first = nn.Linear(x.shape[1], width)
            last = nn.Linear(width, x.shape[1], bias=False)
        nn.init.zeros_(last.weight)
        self.correction = nn.Sequential(nn.LayerNorm(x.shape[1]), first, nn.GELU(), last).to(x.device)

        def loss() -> torch.Tensor:
            at = torch.randint(len(ids), (batch,), generator=generator).to(ids.device)
            others = torch.randint(len(table), (negatives,), generator=generator).to(ids.device)
            shown, target = torch.cat([ids[at], others]).unique(return_inverse=True)
            keys = self.keys[shown]
            logits = (x[at] + self.correction(x[at])) @ keys.T - keys.square().sum(1) / 2  # (batch, shown)
            return nn.functional.cross_entropy(logits, target[:batch])

        fit(self.correction.parameters(), loss, steps, lr)

    @torch.no_grad()
    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        x = super().queries(hidden).float()
        return x + self.correction(x)


def fit(parameters: Iterable[nn.Parameter], loss: Callable[[], torch.Tensor], steps: int, lr: float) -> None:
    """AdamW on a loss that draws its own batches; the rate falls linearly to zero."""
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


@torch.no_grad()
def greedy_search(
    prefix: DevicePart, observed: torch.Tensor, candidates: torch.Tensor | None = None, *, tolerance=0.0, batch=512
) -> torch.Tensor:
    """The tokens ``(seq,)`` by trial with the known weights, position by position, as in SipIt (arXiv 2510.15511).

    Causal attention lets a position depend on nothing later: with the tokens before it recovered, each candidate is
    run through the first layers, and the one that comes nearest to what was observed is the token.

    Parameters
    ----------
    prefix
        Embedding and first layers: :func:`public_prefix`.
    observed
        ``(seq, hidden)``: what the device sent for one text from its beginning.
    candidates
        ``(seq, n)``: tokens to try at each position, the likeliest first; by default the whole vocabulary.
    tolerance
        No further candidates are tried after one that comes this near, relative to the observed vector's norm.
    batch
        Candidates at a time.
    """
    if candidates is None:
        candidates = torch.arange(prefix.embedding.num_embeddings, device=observed.device).expand(len(observed), -1)
    cache, recovered = prefix.new_cache(), []
    for target, choices in zip(observed, candidates, strict=True):
        best = (math.inf, None)
        for tried in choices.split(batch):
            trial = copy.deepcopy(cache)
            if trial.first is not None:
                trial.first.batch_repeat_interleave(len(tried))
            hidden = prefix.embed(tried[:, None], cache=trial)[:, 0]  # (tried, hidden)
            distance, at = (hidden.double() - target.double()).norm(dim=1).min(0)
            best = min(best, (distance.item(), tried[at]), key=lambda pair: pair[0])
            if best[0] <= tolerance * target.double().norm():
                break
        recovered.append(best[1])
        prefix.embed(best[1][None, None], cache=cache)
    return torch.stack(recovered)


def symbols_of(received: torch.Tensor) -> torch.Tensor:
    """Number the distinct vectors ``(…, hidden)``: equal ones are the same unknown token. ``(…)``, int64."""
    flat = received.detach().reshape(-1, received.shape[-1])
    return flat.unique(dim=0, return_inverse=True)[1].reshape(received.shape[:-1])


def prediction_attack(log_probs: torch.Tensor, cipher: torch.Tensor) -> torch.Tensor:
    """Decipher a secret embedding's symbols by what the language model itself expects in their places.

    A cloud that serves a secret embedding well predicts in clear, through the public LM head, what comes next: over
    all places of a symbol, the token that was expected most.

    Parameters
    ----------
    log_probs
        ``(…, seq, vocab)``: at each position, of the token after it.
    cipher
        ``(…, seq)``: symbols from 0, of :func:`symbols_of`.

    Returns
    -------
    torch.Tensor
        ``(…, seq)``, int64; -1 for a symbol that does nothing but begin texts.
    """
    later = cipher[..., 1:].flatten()
    total = torch.zeros(int(cipher.max()) + 1, log_probs.shape[-1], device=log_probs.device)
    total.index_add_(0, later, log_probs[..., :-1, :].flatten(0, -2).float())
    tokens = total.argmax(1)
    tokens[torch.bincount(later, minlength=len(tokens)) == 0] = -1
    return tokens[cipher]


def frequency_attack(
    cipher: torch.Tensor, public: torch.Tensor, *, symbols: int = 1000, rounds: int | None = None, seed: int = 0
) -> torch.Tensor:
    """Decipher a text in which every token has been replaced by a symbol of its own, from statistics alone.

    The first guess pairs symbols and tokens by frequency. Each round takes the pairs of the most frequent symbols as
    given, scores all others by the bigrams with them (before it, or on both sides) and pairs anew by linear assignment;
    it trusts a third more symbols. Gives the token at each position ``(n,)``, or -1 where the symbol was too rare.

    Parameters
    ----------
    cipher
        ``(n,)``: the observed text's symbols, in order: :func:`symbols_of`.
    public
        ``(m,)``: tokens of public text.
    symbols
        How many of the most frequent symbols are deciphered, with half as many again tokens to choose from.
    rounds
        By default until three rounds after all symbols are trusted; 0 leaves the ranks.
    seed
        Of the order among equally frequent ones.
    """
    from scipy.optimize import linear_sum_assignment

    cipher, public = cipher.cpu(), public.cpu()
    generator = torch.Generator().manual_seed(seed)
    common, tokens = _ranked(public, symbols * 3 // 2, generator)
    ranks, known = _ranked(cipher, min(symbols, len(tokens)), generator)
    n = len(known)
    seen, _ = _bigrams(ranks, n)
    counts, followed = _bigrams(common, len(tokens))
    share = torch.bincount(common, minlength=len(tokens) + 1)[: len(tokens)] / len(public)
    # As if each token had been followed by five more, drawn from all: no bigram is impossible.
    log_p = ((counts + 5 * share) / (followed[:, None] + 5)).log()  # (tokens, tokens after them)
    rare = torch.bincount(ranks, minlength=n + 1)[:n, None] * share.log()  # (symbols, tokens)
    pairing, best, trusted = torch.arange(n), torch.arange(n), 5.0

    def likelihood(pairing: torch.Tensor) -> float:
        return (seen * log_p[pairing][:, pairing]).sum().item()

    for _ in range(max(0, math.ceil(math.log(n / trusted, 1.3))) + 3 if rounds is None else rounds):
        a = min(n, int(trusted))
        before = seen[:a].T @ log_p[pairing[:a]] + rare  # by what they follow; (symbols, tokens)
        both = before + seen[:, :a] @ log_p[:, pairing[:a]].T  # and by what follows them
        pairings = [linear_sum_assignment(score.numpy(), maximize=True)[1] for score in (before, both)]
        pairing = max(map(torch.from_numpy, pairings), key=likelihood)
        best = max(best, pairing, key=likelihood)
        trusted *= 1.3
    return torch.cat([tokens[best], torch.tensor([-1])])[ranks]


def _ranked(ids: torch.Tensor, top: int, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """For each position the rank of its id by frequency, all from ``top`` on as one; and the ids by rank."""
    values, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
    order = (counts + 0.5 * torch.rand(len(values), generator=generator)).argsort(descending=True)
    ranks = order.argsort().clamp(max=min(top, len(values)))
    return ranks[inverse], values[order[:top]]


def _bigrams(ranks: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each of n ranks is followed by each, ``(n, n)``, and by anything, ``(n,)``; float32."""
    counts = torch.bincount(ranks[:-1] * (n + 1) + ranks[1:], minlength=(n + 1) ** 2).reshape(n + 1, n + 1).float()
    return counts[:n, :n], counts[:n].sum(1)
