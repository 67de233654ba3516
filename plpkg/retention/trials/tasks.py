"""Tasks whose answer is somewhere in a long prompt, of any length, with nothing to download.

Two are made of token ids, for models trained from nothing. *Pairs in noise*: keys with their values lie in noise, and
the values are asked for; values and noise are of one alphabet, so that a unit's worth does not show in its token.
*Lookup*: nothing but pairs, and one is asked for, so that a unit's worth shows in the question alone.
"""

from dataclasses import dataclass

import torch

from plpkg.validation import one_of, whole_number

# The alphabet of both tasks: three signs, then the keys, then the values, which noise is of as well.
BOS = 0
QUERY = 1
BLANK = 2
FIRST_KEY = 3
NUM_KEYS = 32
FIRST_VALUE = FIRST_KEY + NUM_KEYS
VOCAB = 128


@dataclass(frozen=True)
class Pairs:
    """A batch of pairs in noise.

    Attributes
    ----------
    prompt
        ``(batch, 1 + length)`` ids: a start, then noise with pairs of a key and a value in it.
    answer
        ``(batch, 1 + 2 · pairs)`` ids: ``QUERY``, then every pair, in another order. What follows each key is asked.
    """

    prompt: torch.Tensor
    answer: torch.Tensor

    @property
    def ids(self) -> torch.Tensor:
        """``(batch, seq)``: prompt and answer."""
        return torch.cat([self.prompt, self.answer], dim=1)

    @property
    def asked_twice(self) -> "Lookup":
        """The prompt ends with the question for the first of the pairs, which is then asked again."""
        question = self.answer[:, :2]
        return Lookup(torch.cat([self.prompt, question], dim=1), question, self.answer[:, 2])

    def right(self, logits: torch.Tensor) -> torch.Tensor:
        """``(batch,)``: the right values of ``(batch, answer, vocab)``, the logits after each token of the answer."""
        predicted = logits[:, 1::2].argmax(-1)  # after each key, (batch, pairs)
        return (predicted == self.answer[:, 2::2]).sum(1)

    def accuracy(self, logits: torch.Tensor) -> float:
        """The share of all values that these logits get right."""
        return self.right(logits).sum().item() / self.answer[:, 2::2].numel()


def pairs_in_noise(batch: int, length: int, *, pairs: int = 6, seed: int = 0) -> Pairs:
    """Draw a batch.

    Parameters
    ----------
    batch
        Sequences.
    length
        Tokens of noise and pairs.
    pairs
        The pairs in each sequence, of different keys.
    seed
        The seed of all that is drawn.

    Raises
    ------
    ValueError
        More pairs than keys or than room.
    """
    whole_number("batch", batch, 1)
    whole_number("pairs", pairs, 1, NUM_KEYS, "keys")
    whole_number("length", length, 2 * pairs)
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def chosen(count: int) -> torch.Tensor:
        """``pairs`` different numbers below ``count`` for each sequence."""
        return torch.rand(batch, count, generator=generator).argsort(dim=1)[:, :pairs]

    keys = FIRST_KEY + chosen(NUM_KEYS)
    values = draw(FIRST_VALUE, VOCAB, batch, pairs)
    context = draw(FIRST_VALUE, VOCAB, batch, length)
    # Without its partner, a pair is one of length - pairs places; each pair before it moves it on by one more.
    at = chosen(length - pairs).sort(dim=1).values + torch.arange(pairs)
    context.scatter_(1, at, keys).scatter_(1, at + 1, values)
    order = torch.rand(batch, pairs, generator=generator).argsort(dim=1)
    asked = _interleaved(keys.gather(1, order), values.gather(1, order))
    start = torch.full((batch, 1), BOS)
    query = torch.full((batch, 1), QUERY)
    return Pairs(torch.cat([start, context], dim=1), torch.cat([query, asked], dim=1))


def _interleaved(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Keys and values ``(batch, pairs)`` as ``(batch, 2 · pairs)``: each key, then its value."""
    return torch.stack([keys, values], dim=-1).flatten(1)


@dataclass(frozen=True)
class Lookup:
    """A batch of pairs of which one is asked for.

    Attributes
    ----------
    prompt
        ``(batch, 1 + question + 2 · pairs)`` ids: a start, ``QUERY`` and the key if it is asked first, every pair.
    answer
        ``(batch, 2)`` ids: ``QUERY`` and the key, or ``BLANK`` if it is asked first only.
    values
        ``(batch,)`` ids: the values that are to follow.
    """

    prompt: torch.Tensor
    answer: torch.Tensor
    values: torch.Tensor

    @property
    def ids(self) -> torch.Tensor:
        """``(batch, seq)``: prompt and answer."""
        return torch.cat([self.prompt, self.answer], dim=1)

    def accuracy(self, logits: torch.Tensor) -> float:
        """The share of values that ``(batch, answer, vocab)``, the logits after each token of the answer, get right."""
        predicted = logits[:, -1].argmax(-1)
        return (predicted == self.values).float().mean().item()


QUESTION = {"last": 0, "first": 2, "both": 2}
"""The places where a lookup's question can stand, and how many tokens each puts before the pairs."""


def lookup(batch: int, pairs: int = 16, *, question: str = "last", seed: int = 0) -> Lookup:
    """Draw a batch; pairs and what is asked are the same wherever the question stands.

    Parameters
    ----------
    batch, pairs, seed
        The arguments of :func:`pairs_in_noise`.
    question
        ``"last"``, ``"first"`` or ``"both"``: Locret-Q puts it before the text as well.

    Raises
    ------
    ValueError
        More pairs than keys, or another place.
    """
    whole_number("batch", batch, 1)
    whole_number("pairs", pairs, 1, NUM_KEYS, "keys")
    one_of("question", question, tuple(QUESTION))
    generator = torch.Generator().manual_seed(seed)
    keys = FIRST_KEY + torch.rand(batch, NUM_KEYS, generator=generator).argsort(dim=1)[:, :pairs]
    values = torch.randint(FIRST_VALUE, VOCAB, (batch, pairs), generator=generator)
    asked = torch.randint(pairs, (batch, 1), generator=generator)
    start, query, blank = (torch.full((batch, 1), token) for token in (BOS, QUERY, BLANK))
    key = keys.gather(1, asked)
    before = [] if question == "last" else [query, key]
    prompt = torch.cat([start, *before, _interleaved(keys, values)], dim=1)
    end = blank if question == "first" else key
    return Lookup(prompt, torch.cat([query, end], dim=1), values.gather(1, asked)[:, 0])
