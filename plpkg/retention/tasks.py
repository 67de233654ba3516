"""Tasks whose answer is somewhere in a long prompt, of any length, with nothing to download.

Two are made of token ids, for models trained from nothing. *Pairs in noise*: keys with their values lie in noise, and
the values are asked for; values and noise are of one alphabet, so that a unit's worth does not show in its token.
*Lookup*: nothing but pairs, and one is asked for, so that a unit's worth shows in the question alone.

The others are text, for language models: the pass key of ∞Bench (arXiv 2402.13718), and from RULER (arXiv 2404.06654)
needles in noise, needles among needles, variable tracking, common words and frequent words, scored as RULER does.
Unlike RULER's code, every sample draws its own words.
"""

import itertools
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from plpkg.validation import one_of, whole_number

_ADJECTIVES = """
able amber ample avid bland blunt bold brave brief brisk broad calm cheap clean clear clever close cold coral crisp
deep dense dry dusty early empty faint fair fast fierce fine firm flat fond frank free fresh full gentle glad gold
grand great green grim happy hollow honest huge humble idle jolly keen kind large late lean light loud lucid mellow
merry mild neat noble odd old pale plain proud quick quiet rapid rare ripe rough round royal sharp shy silent slim
slow small smooth sober solid stark steep stern stiff sweet swift tall tame tidy tiny vast warm wide wild wise young
"""
_NOUNS = """
acorn anchor apple arrow autumn badge barn basin basket beacon berry bottle branch bridge brook bucket button cabin
candle canvas canyon carpet castle cellar chapel cherry circle clock cloud cobalt copper corner cotton cradle crater
crystal dagger desert dragon eagle ember engine falcon feather fiddle flint forest fossil fountain garden glacier
goblet gravel hammer harbor helmet island jacket jungle kettle ladder lantern lemon lily magnet maple marble meadow
mirror needle nickel oyster paddle palace pebble pepper pillow planet pocket quarry rabbit raven ribbon river rocket
saddle sailor shadow shovel silver spider sponge stable statue summit temple thunder ticket timber tunnel turtle
valley velvet violin walnut whistle willow window winter zipper
"""
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

BOS, QUERY, BLANK, NUM_KEYS, VOCAB = 0, 1, 2, 32, 128
FIRST_KEY, FIRST_VALUE = 3, 3 + NUM_KEYS


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

    def accuracy(self, logits: torch.Tensor) -> float:
        """The share of values that ``(batch, answer, vocab)``, the logits after each token of the answer, get right."""
        return (logits[:, 1::2].argmax(-1) == self.answer[:, 2::2]).float().mean().item()


def pairs_in_noise(batch: int, length: int, *, pairs: int = 6, seed: int = 0) -> Pairs:
    """Draw a batch.

    Parameters
    ----------
    batch
        Sequences.
    length
        Tokens of noise and pairs.
    pairs
        In each sequence, of different keys.
    seed
        Of everything.

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
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], dim=-1).flatten(1)
    start, query = torch.full((batch, 1), BOS), torch.full((batch, 1), QUERY)
    return Pairs(torch.cat([start, context], dim=1), torch.cat([query, asked], dim=1))


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
        ``(batch,)``: what is to follow.
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
        return (logits[:, -1].argmax(-1) == self.values).float().mean().item()


QUESTION = {"last": 0, "first": 2, "both": 2}
"""Where a lookup's question stands, and how many tokens that puts before the pairs."""


def lookup(batch: int, pairs: int = 16, *, question: str = "last", seed: int = 0) -> Lookup:
    """Draw a batch; pairs and what is asked are the same wherever the question stands.

    Parameters
    ----------
    batch, pairs, seed
        As for :func:`pairs_in_noise`.
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
    prompt = torch.cat([start, *before, torch.stack([keys, values], dim=-1).flatten(1)], dim=1)
    answer = torch.cat([query, blank if question == "first" else key], dim=1)
    return Lookup(prompt, answer, values.gather(1, asked)[:, 0])


@dataclass(frozen=True)
class Sample:
    """A prompt in words, and what a right answer has to contain.

    Attributes
    ----------
    task
        One of :data:`TASKS`.
    prompt
        It ends with the question.
    query
        The question alone: for methods that must know it first.
    answers
        Strings.
    """

    task: str
    prompt: str
    query: str
    answers: tuple[str, ...]

    def score(self, output: str) -> float:
        """The share of the answers that ``output`` contains, in any case of letters (RULER's ``string_match_all``)."""
        return sum(answer.lower() in output.lower() for answer in self.answers) / len(self.answers)


def _word(draw: random.Random) -> str:
    return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"


def _different(draw: random.Random, count: int, make: Callable[[random.Random], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        made = make(draw)
        found[f"{made}-{len(found)}" if made in found else made] = None  # there are 11,330 words
    return list(found)


def _number(draw: random.Random, digits: int = 7) -> str:
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def _scattered(draw: random.Random, filler: list[str], needles: list[str]) -> str:
    """Needles at random places of the filler, in their order."""
    places = sorted(draw.randrange(len(filler) + 1) for _ in needles)
    parts = list(filler)
    for place, needle in zip(reversed(places), reversed(needles), strict=True):
        parts.insert(place, needle)
    return " ".join(parts)


def _passkey(draw: random.Random, size: int) -> tuple[str, str, list[str]]:
    key = _number(draw, 5)
    text = _scattered(draw, [SENTENCES] * size, [f"The pass key is {key}. Remember it. {key} is the pass key."])
    return f"There is a pass key hidden in this text. {text}", "What is the pass key? The pass key is", [key]


NEEDLE = "One of the special magic numbers for {} is: {}."


def _needle(draw: random.Random, size: int) -> tuple[str, str, list[str]]:
    key, value = _word(draw), _number(draw)
    text = _scattered(draw, SENTENCES.split(". ") * size, [NEEDLE.format(key, value)])
    return text, f"The special magic number for {key} mentioned in the provided text is", [value]


def _multi_key(draw: random.Random, size: int) -> tuple[str, str, list[str]]:
    keys = _different(draw, size + 1, _word)
    values = _different(draw, size + 1, _number)
    asked = draw.randrange(size + 1)
    text = " ".join(NEEDLE.format(*pair) for pair in zip(keys, values, strict=True))
    return text, f"The special magic number for {keys[asked]} mentioned in the provided text is", [values[asked]]


def _variables(draw: random.Random, size: int) -> tuple[str, str, list[str]]:
    names = _different(draw, 5, lambda d: "".join(d.choices(string.ascii_uppercase, k=5)))
    value = _number(draw, 5)
    needles = [f"VAR {names[0]} = {value}."]
    needles += [f"VAR {after} = VAR {before}." for before, after in itertools.pairwise(names)]
    text = _scattered(draw, [SENTENCES] * size, needles)
    return text, f"All variables that are assigned the value {value}, directly or through others, are", names


def _common_words(draw: random.Random, size: int) -> tuple[str, str, list[str]]:
    words = _different(draw, 10 + size, _word)
    listed = words[:10] * 6 + words[10:]  # RULER's counts below 4,096 tokens; above, it has 30 and 3
    draw.shuffle(listed)
    text = " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))
    return text, "The 10 most common words in the list above are", words[:10]


def _frequent_words(draw: random.Random, size: int) -> tuple[str, str, list[str]]:
    size += 1  # with one word fewer, the third would be as rare as the fourth
    words = ["...", *_different(draw, max(4, size // 2), lambda d: "".join(d.choices(string.ascii_lowercase, k=6)))]
    total = 30 * size
    shares = [rank**-2.0 for rank in range(1, len(words) + 1)]
    counts = [max(1, round(total * share / sum(shares))) for share in shares]
    listed = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    draw.shuffle(listed)
    return " ".join(listed), "The three most frequent coded words in the text above, dots aside, are", words[1:4]


TASKS: dict[str, Callable[[random.Random, int], tuple[str, str, list[str]]]] = {
    "passkey": _passkey,
    "needle": _needle,
    "multi-key": _multi_key,
    "variable tracking": _variables,
    "common words": _common_words,
    "frequent words": _frequent_words,
}


def samples(
    task: str, count: int, length: int, tokenizer=None, *, seed: int = 0, template: str = "{text}\n{query}"
) -> Iterator[Sample]:
    """Draw samples of a text task whose prompts are as long as can be within ``length``.

    Parameters
    ----------
    task
        One of :data:`TASKS`.
    count
        How many.
    length
        The most tokens of a prompt, by ``tokenizer``; words, without one.
    tokenizer
        The model's.
    seed
        Of everything.
    template
        How text and question make the prompt; ``"{query}\\n{text}\\n{query}"`` asks first as well (Locret-Q).

    Raises
    ------
    ValueError
        No such task, or not even its smallest prompt fits.
    """
    make = TASKS[one_of("task", task, tuple(TASKS))]
    whole_number("length", length, 1)
    whole_number("count", count, 0)

    def sample(index: int, size: int) -> tuple[Sample, int]:
        text, query, answers = make(random.Random(f"{task} {seed} {index}"), size)
        prompt = template.format(text=text, query=query)
        tokens = len(prompt.split() if tokenizer is None else tokenizer(prompt)["input_ids"])
        return Sample(task, prompt, query, tuple(answers)), tokens

    def fitting(index: int) -> Sample:
        low, high = 1, 2
        found, tokens = sample(index, low)
        if tokens > length:
            raise ValueError(f"the shortest prompt of {task!r} has {tokens} tokens, more than length={length}")
        while (grown := sample(index, high))[1] <= length:
            found, low, high = grown[0], high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            tried, tokens = sample(index, middle)
            if tokens <= length:
                found, low = tried, middle
            else:
                high = middle
        return found

    return map(fitting, range(count))
