"""Texts for a model that reads: something short that is hidden in long documentation, and questions about it.

* :func:`facts`: ten sentences about ten people, each of another kind. A question is answered by one sentence. The
  sentences are made of lists here; nothing has learnt from them.
* :func:`noted`: a person's notes, by one of the hands of :mod:`benchmarks.backbones.hands`: retaining heads learn from
  these.

The documentation is that of :func:`plpkg.corpora.public`: heads learn from its training split, tests are hidden in its
test split, or in the diary.
"""

import functools
import random
from dataclasses import dataclass
from functools import partial

from benchmarks.backbones.hands import Collection
from plpkg import corpora
from plpkg.questions import parts


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Bruno Clara Dario Elif Farid Greta Hugo Ines Jonas Kaya Leif Mara Nils Olga Pavel Quinn Rosa Sven Tilda Umar "
    "Vera Wanda Xenia Yusuf Zora Amara Boris Celia Dmitri Edith Felix Gwen Hanna Igor Julia Kemal Lotte Milan Nadia"
)
PLACES = _words("kitchen garden attic cellar garage library bakery harbour museum stable chapel tower bridge market")
SURNAMES = _words("Abel Brandt Castro Dunn Ericson Falk Grant Holm Ivers Jansen Keller Lind Moreau Novak Orloff Park")
MONTHS = _words("January February March April May June July August September October November December")
TOWNS = _words("Oslo Lisbon Krakow Ghent Turin Malmo Seville Leipzig Utrecht Cork Bergen Porto Graz Basel")
FOODS = _words("peanuts penicillin cats pollen shellfish wasps soy latex nickel strawberries")
INSTRUMENTS = _words("cello oboe trumpet harp piano flute tuba violin banjo organ")
COLOURS = _words("green orange purple silver yellow turquoise black crimson brown white")
SECRETS = _words("maple falcon tulip comet ember willow lantern pebble meadow copper")


@dataclass(frozen=True)
class Fact:
    """A sentence, a question that it answers, and the answer."""

    sentence: str
    question: str
    answer: str

    @property
    def beginning(self) -> str:
        """The sentence as far as the answer: a model that is given it as the beginning of its answer goes on."""
        return self.sentence[: self.sentence.rindex(self.answer)].rstrip()


@dataclass(frozen=True)
class Hidden:
    """A text, and what is hidden in it."""

    text: str
    facts: tuple[Fact, ...]


def _kinds(rng: random.Random) -> list[tuple[str, str, str]]:
    """Sentence, question and answer of each kind. A sentence has more words beside its answer than an answer may."""
    return [
        ("{n} keeps the spare key of the flat in the {a}, under a box.", "Where does {n} keep the spare key?",
         rng.choice(PLACES)),
        ("The last four digits of {n}'s bank card are {a}.", "What are the last four digits of {n}'s bank card?",
         str(rng.randrange(1000, 10_000))),
        ("The old dog that lives with {n} is called {a}.", "What is the dog of {n} called?", rng.choice(SURNAMES)),
        ("For many years the family doctor of {n} was Dr {a}.", "Who was the doctor of {n}?", rng.choice(SURNAMES)),
        ("This year {n} celebrates a birthday at home on {a}.", "When does {n} celebrate a birthday?",
         f"{rng.randrange(1, 29)} {rng.choice(MONTHS)}"),
        ("The train that {n} takes in the morning leaves at {a}.", "When does the train of {n} leave?",
         f"{rng.randrange(6, 22)}:{rng.randrange(10, 60)}"),
        ("Long before the war {n} was born in {a}, by the river.", "Where was {n} born?", rng.choice(TOWNS)),
        ("Nobody should forget that {n} is allergic to {a}.", "What is {n} allergic to?", rng.choice(FOODS)),
        ("The monthly rent of the flat of {n} is {a} euros.", "What is the rent of {n}?",
         str(rng.randrange(400, 1500))),
        ("On Sundays in the town orchestra {n} plays the {a}.", "Which instrument does {n} play?",
         rng.choice(INSTRUMENTS)),
        ("The bicycle on which {n} rides to work is {a}.", "What colour is the bicycle of {n}?", rng.choice(COLOURS)),
        ("The secret word for the computer of {n} is {a}.", "What is the secret word of {n}?", rng.choice(SECRETS)),
    ]  # fmt: skip


def facts(tokenizer, num_tokens: int, *, count: int = 10, seed: object = 0, among: str = "documentation") -> Hidden:
    """A text of about ``num_tokens`` with ``count`` sentences at random places, each about another person.

    ``among`` says what it is hidden in: ``"documentation"``, or ``"diary"``, which is prose about people as well.
    """
    rng = random.Random(f"facts {seed}")
    kinds = rng.sample(_kinds(rng), count)
    names = rng.sample(NAMES, count)
    found = []
    for name, (sentence, question, answer) in zip(names, kinds, strict=True):
        found.append(Fact(sentence.format(n=name, a=answer), question.format(n=name), answer))
    sentences = [each.sentence for each in found]
    split = "diary" if among == "diary" else "test"
    return Hidden(_hidden(tokenizer, num_tokens, sentences, rng, split), tuple(found))


def noted(
    tokenizer, num_tokens: int, some: Collection, rng: random.Random, split: str = "train"
) -> tuple[str, list[tuple[str, str]]]:
    """A text of about ``num_tokens`` with some of a person's notes in it, and all questions that these answer."""
    asked = rng.sample(some.answerable, min(len(some.answerable), rng.randint(4, 10)))
    places = sorted({each.note for each in asked})
    text = _hidden(tokenizer, num_tokens, [some.notes[i] for i in places], rng, split)
    return text, [(each.question, each.answers[0]) for each in asked]


def notes_alone(
    tokenizer, num_tokens: int, people: list[Collection], rng: random.Random
) -> tuple[str, list[tuple[str, str]]]:
    """The notes of some people, as many as there is room for, and up to ten questions about them."""
    notes: list[str] = []
    asked: list[tuple[str, str]] = []
    room = num_tokens
    while room > 0:
        some = rng.choice(people)
        for i, note in enumerate(some.notes):
            room -= len(tokenizer(note, add_special_tokens=False)["input_ids"]) + 1
            if notes and room < 0:
                break
            notes.append(note)
            asked += [(each.question, each.answers[0]) for each in some.answerable if each.note == i]
    return "\n\n".join(notes), rng.sample(asked, min(len(asked), 10))


def _hidden(tokenizer, num_tokens: int, pieces: list[str], rng: random.Random, split: str) -> str:
    """Documentation with the pieces between its lines, in their order."""
    room = num_tokens - sum(len(tokenizer(piece, add_special_tokens=False)["input_ids"]) + 1 for piece in pieces)
    around = prose if split == "diary" else partial(documentation, split=split)
    lines = around(tokenizer, max(1, room), rng).split("\n")
    places = sorted(rng.choices(range(len(lines) + 1), k=len(pieces)))
    for place, piece in reversed(list(zip(places, pieces, strict=True))):
        lines.insert(place, piece)
    return "\n".join(lines)


def documentation(tokenizer, num_tokens: int, rng: random.Random, split: str) -> str:
    """The beginnings of modules' documentation, one after the other, until there are so many tokens."""
    ids: list[int] = []
    while len(ids) < num_tokens:
        text = rng.choice(_documents(split)) + "\n\n"
        ids += tokenizer(text[: 8 * num_tokens], add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids[:num_tokens])


def prose(tokenizer, num_tokens: int, rng: random.Random) -> str:
    """Entries of the diary, in any order, until there are so many tokens."""
    entries = [entry.text for entry in corpora.diary().entries]
    rng.shuffle(entries)
    ids = tokenizer("\n\n".join(entries), add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids[:num_tokens])


@functools.cache
def _documents(split: str) -> list[str]:
    return [document.text for document in corpora.public(split)]


def turns(tokenizer, asked: list[tuple[str, str]]) -> str:
    """Questions with their answers as one chat goes on behind a text that was read."""
    begin, written = parts("", "", tokenizer)[0], ""
    opening = begin[begin.rindex("<|im_start|>") :]  # of the turn in which the text stands
    for question, answer in asked:
        written += parts("", question, tokenizer)[1] + answer + f"{tokenizer.eos_token}\n{opening}"
    return written.removesuffix(opening)
