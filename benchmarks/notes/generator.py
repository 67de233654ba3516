"""Notes of invented people, with questions whose answers stand in them: synthetic reading matter.

A text is made of facts (an entity, a relation, a value: "my sister is allergic to walnuts") and events (who did what,
where, when), told in one of several voices, with sentences between them that say nothing. A question asks for one
value. Near it stand facts that could be mistaken for it: another value of the same entity, the same relation of another
entity, if possible one with the same noun ("my brother's bike"). By construction exactly one answer is right.

The wordings stand in the CSV files beside this one. An eighth of the entities, of the relations and of the wordings,
told by a hash of their text, is never trained on. Left out: arithmetic, common sense, questions that need more than
two notes.
"""

import datetime
import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from benchmarks.notes.pages import Page, PageFullError, Unit, as_written
from benchmarks.notes.wordings import ME, YOU, capital, words
from plpkg.corpora import Asked, Document, Notes, Passage
from plpkg.validation import number, one_of, whole_number

SIDES = ("train", "entities", "relations", "wordings")
"""Training's side, or what a question must have that training never sees."""

KINDS = {"fact": 36, "pronoun": 12, "bridge": 10, "absent": 14, "event": 20, "text": 8}
"""The kinds of questions, and how often each is asked; ``text`` asks for a span of documentation."""

CHARACTERS_PER_TOKEN = 2.6
"""Of such notes, with plpkg-small's tokenizer."""


def reading(rng: random.Random, **options) -> Passage:
    """Draw one text with a question about it; the options are those of :func:`readings`.

    ``reading(rng, facts=5, kinds=("fact",), voice="prose", near=0, idle=0)`` asks for one of five plain facts.
    """
    return readings(rng, 1, **options)[0]


def readings(
    rng: random.Random,
    questions: int,
    *,
    facts: int | None = None,
    tokens: int | None = None,
    kinds: Sequence[str] | None = None,
    voice: str | None = None,
    near: int | None = None,
    idle: float | None = None,
    relations: int | None = None,
    alike: bool = False,
    value_last: bool = False,
    side: str = "train",
    documents: Sequence[Document] = (),
) -> list[Passage]:
    """Draw one text with several questions about it, a passage each. Documentation gets one question.

    Parameters
    ----------
    rng
        The only source of chance: the same state gives the same passage in every process.
    questions
        The number of questions; fewer if the page has no room for what they need.
    facts
        Facts and events in the text; without it, as many as ``tokens`` have room for. A question that needs
        more than one brings them all the same.
    tokens
        About how long the text is, by :data:`CHARACTERS_PER_TOKEN`. Without it and without ``facts``: from 20 (one
        note) to 900, short and long ones alike often.
    kinds
        Some of :data:`KINDS`; without it all of them, ``text`` only if there are documents.
    voice
        One of :data:`VOICES`; without it any of them.
    near
        Up to how many facts of each sort that could be mistaken for the right one; 0 keeps all sentences plain.
        Without it 0 to 2, fewer in short texts.
    idle
        The share of sentences that say nothing, from 0 to 0.9; without it, 0 to 0.5.
    relations
        Take the first so many relations only. They are sorted: names, addresses, codes and prices come first.
    alike
        All facts of a text are of one relation, so that the entity alone tells them apart.
    value_last
        A fact names its entity, then its value, and no other value.
    side
        One of :data:`SIDES`.
    documents
        Documentation to ask about, such as ``corpora.public("train")``.

    Raises
    ------
    ValueError
        An argument that is not so.
    """
    one_of("side", side, SIDES)
    plain = near is not None and whole_number("near", near, 0) == 0
    facts = facts if facts is None else whole_number("facts", facts, 1)
    tokens = tokens if tokens is None else whole_number("tokens", tokens, 20)
    kinds = tuple(one_of("kind", kind, tuple(KINDS)) for kind in (kinds or KINDS))
    kinds = tuple(kind for kind in kinds if kind != "text" or (documents and side == "train"))
    if not kinds:
        raise ValueError("questions of the kind 'text' need documents, and the side 'train'")
    first, *more = rng.choices(kinds, [KINDS[kind] for kind in kinds], k=whole_number("questions", questions, 1))
    if voice is None:
        voice = rng.choices(list(VOICES), [weight for weight, _ in VOICES.values()])[0]
    layout = VOICES[one_of("voice", voice, tuple(VOICES))][1]
    if tokens is None and facts is None:
        tokens = round(20 * 45 ** rng.random())
    if first == "text":
        return [_span(rng, documents, tokens or 30 * facts)]
    idle = rng.random() / 2 if idle is None else number("idle", idle, 0, 0.9)
    near = rng.randint(0, 2) if near is None else near
    room = min(facts - 1 if facts else near, tokens // 60 if tokens else near)
    relations = relations if relations is None else whole_number("relations", relations, 1)
    page, signed = _page(rng, side, voice, near=min(near, room), relations=relations)
    page.plain, page.value_last, page.alike = plain, value_last, alike
    asked = [page.ask(first)]
    page.units[len(asked[0].units) :] = page.units[len(asked[0].units) : facts]
    reserve = 60 if plain else 200  # the characters that a question's facts and what is near them may need
    with suppress(PageFullError):
        for kind in more:
            full = len(page.units) >= facts if facts else _size(page) + reserve > (tokens or 0) * CHARACTERS_PER_TOKEN
            if kind != "text" and not full:
                asked.append(page.ask(kind))
    _fill(page, facts, None if tokens is None else tokens * CHARACTERS_PER_TOKEN, idle)
    rng.shuffle(page.units)
    text = layout(page, page.units, signed)
    return [Passage(text, each.text, as_written(each.answer, text), each.kind) for each in asked]


def _size(page: Page) -> int:
    return sum(len(unit.text) + 1 for unit in page.units)


def notes(seed: int, *, entries: int = 12, questions: int = 24, side: str = "train") -> Notes:
    """The notes of one invented person, with questions about them.

    Parameters
    ----------
    seed
        Which person.
    entries
        The number of notes.
    questions
        The number of questions.
    side
        One of :data:`SIDES`.

    Raises
    ------
    ValueError
        An argument that is not so.
    """
    rng = random.Random(f"notes {whole_number('seed', seed, 0)}")
    whole_number("entries", entries, 1)
    whole_number("questions", questions, 1)
    page = Page(rng, one_of("side", side, SIDES), [ME], YOU, near=1)
    kinds = [kind for kind in KINDS if kind != "text"]
    chosen = rng.choices(kinds, [KINDS[kind] for kind in kinds], k=questions)
    asked = [page.ask(kind) for kind in chosen]
    while len(page.units) < 2 * entries:
        page.add()
    units, written, where = rng.sample(page.units, len(page.units)), [], {}
    day = datetime.date(2024, 1, rng.randint(1, 28))
    for i in range(entries):
        part = units[i::entries]
        where |= {id(unit): str(day) for unit in part}
        part = part + [Unit(page.words.draw(rng, "filler")) for _ in range(rng.randint(0, 2))]
        layout = rng.choice((_prose, _prose, _lines, _bullets))
        written.append(Document(str(day), layout(page, rng.sample(part, len(part)))))
        day += datetime.timedelta(rng.randint(1, 20))
    text = "\n".join(document.text for document in written)
    answered = [
        Asked(q.text, as_written(q.answer, text), tuple(sorted({where[id(unit)] for unit in q.units})), q.kind)
        for q in asked
    ]
    return Notes(page.words.draw(rng, "name"), tuple(written), tuple(answered))


def _page(rng: random.Random, side: str, voice: str, **options) -> tuple[Page, str]:
    """An empty page, and who signs it."""
    draw = words().draw
    if voice == "dialogue":
        names: list[str] = []
        while len(names) < rng.choice((2, 2, 3)):
            name = draw(rng, "first")
            names += [] if name in names else [name]
        return Page(rng, side, names, "", **options), ""
    signed = draw(rng, "first")
    if voice == "letter":
        return Page(rng, side, [signed], rng.choice((YOU, ME, "")), **options), signed
    if voice != "todo" and rng.random() < 0.2:
        return Page(rng, side, [signed], "", third=True, **options), signed
    return Page(rng, side, [ME], rng.choice((YOU, YOU, ME)), **options), signed


def _fill(page: Page, facts: int | None, characters: float | None, idle: float) -> None:
    """Add facts and sentences that say nothing until there are so many facts, and so many characters."""
    rng, fillers = page.rng, page.words.wordings["filler"]
    while facts is not None and len(page.units) < facts:
        page.add()
    some = round(len(page.units) * idle / (1 - idle)) if characters is None else None
    order: list[int] = []
    while some if characters is None else _size(page) < characters - 30:
        if facts is None and rng.random() >= idle:
            page.add()
            continue
        order = order or rng.sample(range(len(fillers)), len(fillers))
        page.units.append(Unit(fillers[order.pop()].fill(rng, page.words, {}), speaker=rng.choice(page.speakers)))
        some = some and some - 1


# Voices: each makes a text of units


def _prose(page: Page, units: Sequence[Unit], signed: str = "") -> str:
    texts = [unit.text for unit in units]
    step = page.rng.choice((3, 5, 8, 100))
    return "\n\n".join(" ".join(texts[i : i + step]) for i in range(0, len(texts), step))


def _lines(page: Page, units: Sequence[Unit], signed: str = "", mark: str = "") -> str:
    bare = page.rng.random() < 0.3
    return "\n".join(mark + (unit.text.removesuffix(".") if bare else unit.text) for unit in units)


def _bullets(page: Page, units: Sequence[Unit], signed: str = "") -> str:
    head = page.words.draw(page.rng, "heading") + ":\n" if page.rng.random() < 0.5 else ""
    return head + _lines(page, units, mark=page.rng.choice(("- ", "- ", "* ", "+ ")))


def _diary(page: Page, units: Sequence[Unit], signed: str = "") -> str:
    rng, entries, start = page.rng, [], 0
    form = rng.choice(("{d} {m}\n", "{w}: ", "{d} {m}: ", "{w}, {d} {m}\n", "{m} {d}. "))
    days = page.words.lists["day"], page.words.lists["month"]
    day = rng.randrange(300)
    while start < len(units):
        end = start + rng.randint(1, 4)
        date = form.format(w=days[0][day % 7], m=days[1][day // 28 % 12], d=day % 28 + 1)
        entries.append(date + " ".join(unit.text for unit in units[start:end]))
        start, day = end, day + rng.randint(1, 9)
    return "\n\n".join(entries)


def _letter(page: Page, units: Sequence[Unit], signed: str = "") -> str:
    draw = page.words.draw
    greeting = f"{draw(page.rng, 'greeting')}\n\n{draw(page.rng, 'opening')} "
    return f"{greeting}{_prose(page, units)}\n\n{draw(page.rng, 'closing')}\n{signed}"


def _dialogue(page: Page, units: Sequence[Unit], signed: str = "") -> str:
    rng, lines = page.rng, []
    for unit in units:
        lines.append(f"{unit.speaker}: {unit.text}")
        if rng.random() < 0.15:
            other = rng.choice([name for name in page.speakers if name != unit.speaker])
            lines.append(f"{other}: {page.words.draw(rng, 'reply')}")
    return "\n".join(lines)


def _keys(
    page: Page, units: Sequence[Unit], signed: str = "", marks: Sequence[str] = (": ", ": ", " = ", " - ")
) -> str:
    """What has a row as a row, the rest as prose below or above."""
    mark = page.rng.choice(marks)
    rows = [unit.row.replace(": ", mark, 1) for unit in units if unit.row]
    rest = [unit for unit in units if not unit.row]
    parts = ["\n".join(rows)] * bool(rows) + [_prose(page, rest)] * bool(rest)
    page.rng.shuffle(parts)
    return "\n\n".join(parts)


def _table(page: Page, units: Sequence[Unit], signed: str = "") -> str:
    return page.rng.choice(("what | note\n", "thing | value\n", "")) + _keys(page, units, marks=(" | ",))


def _todo(page: Page, units: Sequence[Unit], signed: str = "") -> str:
    rng, lines = page.rng, []
    mark = rng.choice(("[ ] ", "- ", "* "))
    for unit in units:
        idle = unit.text in page.words.lists["filler"]
        text = page.words.draw(rng, "chore") if idle else unit.text
        head = f"{page.words.draw(rng, 'todo')}: " if rng.random() < 0.5 and not idle else ""
        lines.append(mark + capital(head + text))
    return "\n".join(lines)


def _mixed(page: Page, units: Sequence[Unit], signed: str = "") -> str:
    rng, parts = page.rng, []
    half = rng.randint(0, len(units))
    for part in (units[:half], units[half:]):
        voice = rng.choice((_prose, _lines, _bullets, _keys))
        parts += [f"{page.words.draw(rng, 'heading')}\n{voice(page, part)}"] * bool(part)
    return "\n\n".join(parts)


VOICES: dict[str, tuple[int, Callable[[Page, Sequence[Unit], str], str]]] = {
    "prose": (24, _prose), "lines": (14, _lines), "bullets": (10, _bullets), "diary": (12, _diary),
    "letter": (10, _letter), "dialogue": (12, _dialogue), "table": (6, _table), "keys": (6, _keys),
    "todo": (5, _todo), "mixed": (6, _mixed),
}  # fmt: skip
"""How a text is laid out: how often each is drawn, and the function that does it."""


# Documentation

_SPANS = {
    "default": r"^ *[-*]* *`*(?P<name>\w+)`* *[(:].*?\bdefaults? (?:to|is|=) `*(?P<answer>[^\s`,;()\[]*[^\s`,;().\[])",
    "type": r"^ *[-*]* *`*(?P<name>\w+)`* *\(`(?P<answer>[^`\n]{2,40})`",
    "means": r"^ *[-*]* *`*(?P<name>\w{3,})`* ?: (?P<answer>[A-Z][^.;:\n`]{8,70})[.\n]",
    "is": r"(?:^|(?<=[.] ))(?P<name>(?:The |An? )?(?!This|That|There|It)[\w.`]{3,}(?: \w+)?) is "
    r"(?P<answer>(?:a|an|the) [^.,;:()\n]{6,60})[.,;]",
    "does": r"(?:^|(?<=[.] ))(?P<name>(?:The|A|An|This) [a-z_ ]{3,40}?) "
    r"(?P<verb>returns|contains|has|requires|uses|raises) (?P<answer>[^.;:()\n]{6,60})[.;]",
}  # fmt: skip
"""What documentation says in set forms, each for the questions ``ask.<form>``."""

_PATTERNS = {form: re.compile(pattern, re.MULTILINE) for form, pattern in _SPANS.items()}


def _span(rng: random.Random, documents: Sequence[Document], tokens: int) -> Passage:
    """A passage of documentation, and a question for a span of it."""
    size = round(tokens * CHARACTERS_PER_TOKEN)
    while True:
        text = rng.choice(documents).text
        start = text.find("\n", rng.randrange(max(1, len(text) - size))) + 1
        text = text[start : start + size].rpartition("\n")[0].strip("\n")
        spans = [(form, m.groupdict()) for form, pattern in _PATTERNS.items() for m in pattern.finditer(text)]
        spans = [(form, slots) for form, slots in spans if text.count(slots["name"]) < 4]
        spans = spans if spans and rng.random() < 0.7 else _cues(text)
        if spans:
            form = rng.choice(sorted({form for form, _ in spans}))
            slots = rng.choice([slots for each, slots in spans if each == form])
            slots["name"] = slots.get("name", "").replace("The ", "the ").replace("This ", "this ")
            question = rng.choice(words().wordings[f"ask.{form}"]).fill(rng, words(), slots)
            return Passage(text, capital(question), slots["answer"].strip(), "text")


def _cues(text: str) -> list[tuple[str, dict[str, str]]]:
    """Three words that occur once, and the two to seven that follow them up to a mark or the end of the line."""
    spans = []
    for match in re.finditer(r"((?:[\w'-]+ ){3})((?:[\w'-]+ ){1,6}[\w'-]+)(?=[.,;:]?$|[.,;:] )", text, re.MULTILINE):
        cue, answer = match[1].strip(), match[2]
        if text.count(cue) == 1 and cue + " " + answer in text:
            spans.append(("next", {"cue": cue, "answer": answer}))
    return spans
