"""A language model made personal without a gradient: counts of the n-grams of somebody's own text.

Each order n mixes what followed the last n - 1 tokens before with what the order below says, the lowest with the
model: with counts c and the shorter context h'::

    p_n(w | h) = (c(h, w) + a p(w | h')) / (c(h) + a)

``a`` is a weight for each different token that followed h (I. Witten and T. Bell, "The zero-frequency problem", 1991,
where it is 1): where many may come, the order below has more to say. A context never seen leaves that as it is, and
none reaches into another document. Counts tell the text: they are as private.

Left out: one weight for all contexts (Dirichlet smoothing), which lets frequent pairs drown the model; discounts
(Kneser-Ney, Pitman-Yor), a weight for each order, forgetting.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from plpkg.corpora.tokens import Tokens
from plpkg.inputs import Ids, one_text
from plpkg.scoring import Score
from plpkg.validation import number, whole_number


class Counts:
    """The tokens that followed each context of a person's text, and how often.

    Parameters
    ----------
    sequences
        Documents, ``(tokens,)`` int64 each; :meth:`add` goes on.
    orders
        The lengths n of the n-grams, rising. A context has n - 1 tokens.

    Raises
    ------
    ValueError
        Orders that do not rise from 1 or more, or a document of another form.
    """

    def __init__(self, sequences: Iterable[torch.Tensor] = (), orders: Sequence[int] = (2, 3, 4, 5)) -> None:
        self.orders = tuple(whole_number("order", n, 1) for n in orders)
        if not self.orders or list(self.orders) != sorted(set(self.orders)):
            raise ValueError(f"orders must rise, and be one at least, got {orders!r}")
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}  # by context, how often each token followed
        for ids in sequences:
            self.add(ids)

    def add(self, ids: torch.Tensor) -> None:
        """Count one more document, ``(tokens,)`` int64."""
        tokens = _tuple(ids)
        for n in self.orders:
            for i in range(max(1, n - 1), len(tokens)):  # nothing predicts a document's first token
                followers = self._followers.setdefault(tokens[i - n + 1 : i], {})
                followers[tokens[i]] = followers.get(tokens[i], 0) + 1

    def __len__(self) -> int:
        """How many different n-grams there are, of all orders together; each takes some 200 bytes."""
        return sum(map(len, self._followers.values()))

    def __repr__(self) -> str:
        return f"Counts({len(self):,} n-grams of orders {', '.join(map(str, self.orders))})"

    def log_probs(self, ids: torch.Tensor, base: torch.Tensor, weight: float) -> torch.Tensor:
        """The log-probability of each token but the first of a document ``ids`` ``(tokens,)``, given those before it.

        ``base`` ``(tokens - 1,)`` is the model's, natural, and ``weight`` positive, or ValueError says so. Returns
        ``(tokens - 1,)``, float64, on the CPU; NaN stays NaN.
        """
        tokens = _tuple(ids)
        mixed = base.to("cpu", torch.float64)  # the model's; each order mixes its counts in
        weight = number("weight", weight, open_low=True)
        if mixed.shape != (max(0, len(tokens) - 1),):
            raise ValueError(f"base must have one number less than the {len(tokens)} tokens, got {tuple(base.shape)}")
        for n in self.orders:
            rows = []  # of each token but the first c(h, w), c(h) and a, as the module's formula has them
            for i in range(1, len(tokens)):
                followers = self._seen(tokens, i, n)
                rows.append((followers.get(tokens[i], 0), *_sums(followers, weight)))
            hits, total, a = torch.tensor(rows, dtype=torch.float64).view(-1, 3).T  # (tokens - 1,) each
            # In logarithms: a probability may be too small for a float.
            mixed = torch.logaddexp(hits.log(), mixed + a.log()) - (total + a).log()
        return mixed

    def mix(self, context: torch.Tensor, base: torch.Tensor, weight: float) -> torch.Tensor:
        """The log-probability of every token after ``context`` ``(tokens,)``: ``(vocab,)``, as :meth:`log_probs`."""
        ids = _tuple(context)
        mixed = base.to("cpu", torch.float64)
        weight = number("weight", weight, open_low=True)
        if mixed.ndim != 1:
            raise ValueError(f"base must be (vocab,), got {tuple(base.shape)}")
        for n in self.orders:
            followers = self._seen(ids, len(ids), n)
            if not followers:  # a context never seen leaves it as it is
                continue
            tokens = list(followers)
            hits = torch.tensor(list(followers.values()), dtype=torch.float64)
            if max(tokens) >= len(mixed):
                raise ValueError(f"token {max(tokens)} was counted, and base has a vocabulary of {len(mixed)}")
            total, a = _sums(followers, weight)
            mixed = mixed + math.log(a) - math.log(total + a)
            mixed[tokens] = torch.logaddexp(hits.log() - math.log(total + a), mixed[tokens])
        return mixed

    def likeliest(self, context: Sequence[int]) -> tuple[int, int]:
        """The longest context that was counted of the last tokens, its length, and what followed it most often.

        ``(0, -1)`` where none was; of several equally frequent ones the one that was counted first.
        """
        ids = tuple(context)
        for n in reversed(self.orders):
            followers = self._seen(ids, len(ids), n)
            if followers:
                return n - 1, max(followers, key=followers.__getitem__)
        return 0, -1

    def score(self, documents: Sequence[Tokens], base: Sequence[torch.Tensor], weight: float) -> Score:
        """As :func:`plpkg.scoring.score`, with the counts; ``base``: its ``token_log_probs``, by document."""
        nats = 0.0
        for document, of_model in zip(documents, base, strict=True):
            mixed = self.log_probs(document.ids, of_model, weight)
            nats -= mixed[document.scored[1:]].sum().item()
        return Score.of(documents, nats / math.log(2))

    def best_weight(self, documents: Sequence[Tokens], base: Sequence[torch.Tensor], weights: Sequence[float]) -> float:
        """The weight of some with the best :meth:`score`, of text that was not counted."""
        return min(weights, key=lambda weight: self.score(documents, base, weight).bits)

    def _seen(self, ids: tuple[int, ...], i: int, n: int) -> dict[int, int]:
        """The tokens that followed the ``n - 1`` before position ``i``; none where there are not so many before it."""
        if i < n - 1:
            return {}
        return self._followers.get(ids[i - n + 1 : i], {})


def _sums(followers: dict[int, int], weight: float) -> tuple[int, float]:
    """How often a context was seen, and ``a``."""
    return sum(followers.values()), weight * max(1, len(followers))


def _tuple(ids: Ids) -> tuple[int, ...]:
    """A document's ids, of which contexts are made."""
    ids = tuple(one_text(ids, "a document", least=0))
    if min(ids, default=0) < 0:
        raise ValueError(f"the id of a token must be at least 0, got {min(ids)}")
    return ids
