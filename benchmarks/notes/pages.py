"""One page of notes in the making: facts and events that nobody can mistake for another, and questions about them."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.notes.wordings import (
    ME,
    PERSON,
    YOU,
    Bridge,
    Entity,
    Relation,
    Wording,
    addressed,
    capital,
    words,
)
from plpkg.corpora import ABSENT

TRIES = 80


@dataclass(eq=False)
class Unit:
    """What stands together: a sentence or two, the same as a row of a table (if it has one), and who says it."""

    text: str
    row: str = ""
    speaker: str = ME


@dataclass
class PosedQuestion:
    """A question, its answer, its kind, and the units that one has to read for it."""

    text: str
    answer: str
    kind: str
    units: list[Unit] = field(default_factory=list)


@dataclass
class Fact:
    """A relation of an entity with its value; ``old`` is another value, ``speaker`` who tells it."""

    relation: Relation
    entity: Entity
    value: str
    old: str

    @property
    def speaker(self) -> str:
        return self.entity.speaker


class PageFullError(RuntimeError):
    """Nothing more can be asked that nobody could mistake."""


class Page:
    """The facts and events of one text.

    Parameters
    ----------
    rng
        The only source of chance.
    side
        ``"train"``, or what the question must have that training never sees: ``"entities"``, ``"relations"``,
        ``"wordings"``. What stands around it is training's.
    speakers
        Who says "I": ``["I"]``, the people of a dialogue, or the one name of a text in the third person.
    view
        How a question calls the speaker: ``"I"``, ``"you"``, or ``""`` for the name.
    third
        Whether the text is about the speaker in the third person.
    near
        Up to how many facts of each sort that could be mistaken for the one asked for.
    relations
        Of training's relations the first so many; without it all.

    Attributes
    ----------
    plain
        Whether sentences have nothing but the words of their fact: no aside, no second fact in its sentence.
    value_last
        Whether a fact is told with its entity before its value, and with no other value.
    alike
        Whether all facts are of the relation that is asked for first.
    """

    def __init__(
        self,
        rng: random.Random,
        side: str,
        speakers: Sequence[str],
        view: str,
        third: bool = False,
        near: int = 2,
        relations: int | None = None,
    ) -> None:
        self.rng, self.side, self.speakers, self.view, self.third = rng, side, list(speakers), view, third
        self.near, self.plain, self.value_last, self.alike = near, False, False, False
        self.words = words()
        self.relations = self.words.sides[False][:relations]
        self.known = {relation.id for relation in self.relations}
        self.asked_relations = self.words.sides[True] if side == "relations" else self.relations
        self.units: list[Unit] = []
        self.entities: list[Entity] = []
        self.taken: set[tuple[str, ...]] = set()
        self.values: set[str] = set()

    # Entities and facts

    def entity(self, about: Sequence[str], held: bool = False, like: Entity | None = None) -> Entity | None:
        """A new entity of one of these classes, told apart from all others, or None after many tries."""
        for _ in range(TRIES):
            new = self._drawn(self.rng.choice(about), held, like)
            same = [old for old in self.entities if new.text == old.text == "I" and new.speaker == old.speaker]
            if same and like is None:
                return same[0]
            if ("bare", new.head) not in self.taken and all(_apart(new, old, like) for old in self.entities):
                self.entities.append(new)
                return new
        return None

    def _drawn(self, kind: str, held: bool, like: Entity | None = None) -> Entity:
        rng, lists, speaker = self.rng, self.words, self.rng.choice(self.speakers)
        gender = "she" if kind == "woman" or rng.random() < 0.5 else "he"
        if kind in ("person", "other", "woman"):
            options = ("self", "role", "role", "named") if kind == "person" else ("role", "named")
            kind = "role" if held else like.kind if like is not None else rng.choice(options)
        if kind == "self":
            return Entity("I", "self", "I", pronoun=gender, speaker=speaker)
        if kind == "named":
            title = like is None and rng.random() < 0.2
            first = ("Mrs" if gender == "she" else "Mr") if title else lists.draw(rng, rng.choice((gender, "inv")))
            if like is not None:
                name = f"{first} {like.text.split()[-1]}" if " " in like.text else first
            else:
                name = f"{first} {lists.draw(rng, 'surname')}" if title or rng.random() < 0.6 else first
            return Entity(name, kind, name, pronoun=gender, speaker=speaker)
        source = f"head.{kind}"
        if kind == "role":
            source = "head.person." + (gender if rng.random() < 0.7 else "any")
        if kind == "role" and like is not None and rng.random() < 0.5:
            like = None
        heads = lists.heads(source, held)
        head = like.head if like is not None and like.kind == kind else rng.choice(heads)
        noun = lists.value(rng, head)
        gendered = kind in ("role", "helper", "pet")
        pronoun = "they" if kind == "garments" else gender if gendered else "it"
        if like is not None and gendered and like.kind == kind:
            pronoun = like.pronoun
        np = rng.choice(lists.wordings[f"np.{'person' if kind == 'role' else kind}"])
        phrase = np.fill(rng, lists, {"h": "\0", "n": lists.draw(rng, pronoun if gendered else "first")})
        before, _, after = phrase.partition("\0")
        owner, _, rest = before.rpartition("'s ") if "'s " in before else before.partition(" ")
        modifier = f"{rest}{after}".strip() + (noun if "{" in head else "")
        return Entity(phrase.replace("\0", noun), kind, head, owner, modifier, pronoun, speaker)

    def fact(self, relation: Relation, entity: Entity | None) -> Fact | None:
        """A fact with a fresh value, or None where the entity has one that could be mistaken for it."""
        if entity is None or not self._statements(relation, entity):
            return None
        said = ("name",) if entity.kind == "role" else ("colour", "material")
        if entity.modifier and relation.group in said:  # "my sister Ola is called", "the red boat is blue"
            return None
        mine = entity.text == "I" or entity.text.startswith(("my ", "our "))
        key = (entity.speaker if mine else "", entity.text, relation.group)
        if key in self.taken or self._clash(relation, entity):
            return None
        self.taken.add(key)
        return Fact(relation, entity, self._fresh(relation), self._fresh(relation))

    def _clash(self, relation: Relation, entity: Entity) -> bool:
        """Whether "my dentist" is an entity here and somebody's dentist a value too."""
        if relation.id.endswith("0"):
            self.taken.add(("role", relation.id[:-1]))
            return any(other.head.endswith(relation.id[:-1]) for other in self.entities)
        return ("role", entity.head.rpartition(" ")[2]) in self.taken

    def _fresh(self, relation: Relation) -> str:
        for _ in range(TRIES):  # short lists run out
            value = self.words.value(self.rng, relation.value)
            if value.casefold() not in self.values:
                break
        self.values.add(value.casefold())
        return value

    # Wordings

    def _statements(self, relation: Relation, entity: Entity) -> list[Wording]:
        fitting = self._fit(relation.statements, entity, self.third or entity.text == "I")
        return [w for w in fitting if w.value_last] if self.value_last else fitting

    def _fit(self, wordings: Sequence[Wording], entity: Entity, no_narrator: bool) -> list[Wording]:
        """The wordings that suit an entity: neither "I paid me" nor "the age of me"."""
        is_self = entity.text == "I"
        return [w for w in wordings if not (no_narrator and w.narrator) and not (is_self and " of {o}" in w.text)]

    def _choose(self, wordings: Sequence[Wording], asked: bool = False) -> Wording | None:
        """One of training's wordings; for what is asked on the side of the wordings, one that is held out."""
        held = asked and self.side == "wordings"
        pool = [w for w in wordings if w.held_out == held]
        return self.rng.choice(pool) if pool else None

    def _slots(self, entity: Entity, view: str, pronoun: bool = False) -> dict[str, str]:
        pronouns = entity.pronouns(view)
        cases = pronouns if pronoun else entity.cases(view)
        he = dict(zip(("he", "his", "him"), pronouns, strict=True))
        return dict(zip(("e", "e's", "o"), cases, strict=True)) | he | {"narrator": entity.speaker}

    def told(self, fact: Fact, asked: bool = False, pronoun: bool = False) -> Unit | None:
        """The fact in words; with ``pronoun`` a sentence before it names the entity."""
        rng, relation, entity = self.rng, fact.relation, fact.entity
        view = entity.speaker if self.third else ME
        named = not relation.label.startswith(":")
        is_self = entity.text == "I"
        wordings = self._statements(relation, entity)
        if pronoun:
            wordings = [w for w in wordings if w.text.startswith(("{e} ", "{e's} "))]
        elif named and not self.value_last and rng.random() < 0.15:
            frames = self.words.wordings[rng.choice(("frame.plain", "frame.plain", "frame.changed"))]
            wordings = self._fit(frames, entity, is_self)
        wording = self._choose(wordings, asked)
        if wording is None:
            return None
        slots = self._slots(entity, view) | {"v": fact.value, "old": fact.old, "l": relation.label.lstrip(":")}
        keys = ("key.self" if is_self and not self.third else "key.label" if named else "key.") + "note" * (not named)
        row = capital(rng.choice(self.words.wordings[keys]).fill(rng, self.words, slots))
        if pronoun:
            name = entity.kind if entity.kind in ("helper", "pet") else "person" if entity.kind in PERSON else "thing"
            intros = [w for w in self.words.wordings[f"intro.{name}"] if not (self.third and w.narrator)]
            opening = sentence(rng.choice(intros).fill(rng, self.words, slots, entity.person(view)))
            text = wording.fill(rng, self.words, slots | self._slots(entity, view, True), entity.person(view))
            return Unit(f"{opening} {sentence(text)}", row, entity.speaker)
        if not self.plain and self._bare(entity) and rng.random() < 0.25:
            self.taken.add(("bare", entity.head))
            slots |= {"e": f"the {entity.head}", "e's": f"the {entity.head}'s", "o": f"the {entity.head}"}
        text = wording.fill(rng, self.words, slots, entity.person(view))
        if not self.plain and rng.random() < 0.2 and not any(mark in text for mark in (". ", "? ", ": ")):
            if rng.random() < 0.5:
                text = f"{self.words.draw(rng, 'before')} {text}"
            else:
                text += self.words.draw(rng, "after")
        return Unit(sentence(text), row, entity.speaker)

    def _bare(self, entity: Entity) -> bool:
        """Whether "the car" is enough for "my car"."""
        alone = sum(other.head == entity.head for other in self.entities) == 1
        mine = entity.owner in ("my", "our") and not entity.modifier and not self.third
        return alone and mine and entity.kind not in (*PERSON, "garments") and "{" not in entity.head

    def question(self, fact: Fact, described: str = "") -> tuple[str, bool] | None:
        """A question for the fact's value, and whether it asks for the entity instead; None if no wording fits."""
        rng, relation, entity = self.rng, fact.relation, fact.entity
        view = self.view or entity.speaker
        inverse = bool(relation.inverse and not described and entity.kind in ("named", "role") and rng.random() < 0.2)
        pool = relation.inverse if inverse else relation.questions
        if not inverse and not relation.label.startswith(":") and rng.random() < 0.12:
            pool = self.words.wordings["ask.label"]
        pool = [w for w in self._fit(pool, entity, self.third) if not (described and "{e's}" in w.text)]
        wording = self._choose(pool, asked=True)
        if wording is None:
            return None
        slots = self._slots(entity, view) | {"v": fact.value, "l": relation.label}
        slots |= {"e": described, "o": described} if described else {}
        text = self._addressed(wording, view).fill(rng, self.words, slots, entity.person(view))
        return None if text.casefold() in self.words.kept_back else (capital(text), inverse)

    @staticmethod
    def _addressed(wording: Wording, view: str) -> Wording:
        return addressed(wording.text, view if view in (ME, YOU) else "{narrator}")

    # What is asked

    def ask(self, kind: str) -> PosedQuestion:
        """Add what a question of this kind needs, and what could be mistaken for it."""
        for _ in range(TRIES):
            asked = getattr(self, f"_ask_{kind}")()
            if asked is not None:
                return asked
        raise PageFullError(f"no question of the kind {kind!r} fits on this page any more")

    def _subject(self) -> Fact | None:
        relation = self.rng.choice(self.asked_relations)
        held = self.side == "entities"
        about = [kind for kind in relation.about if not (held and kind in ("named", "self"))]
        return self.fact(relation, self.entity(about, held)) if about else None

    def _ask_fact(self, pronoun: bool = False) -> PosedQuestion | None:
        fact = self._subject()
        if fact is None or (pronoun and fact.entity.text == "I"):
            return None
        text, inverse = self.question(fact) or ("", False)
        answer = fact.entity.cases(fact.speaker if self.third else ME)[0] if inverse else fact.value
        if not text or _gives_away(text, answer):
            return None
        others = self._near(fact)
        joined = others and others[0].entity is fact.entity and not pronoun and self.rng.random() < 0.5
        unit = self._joined(fact, others.pop(0)) if joined else self.told(fact, True, pronoun)
        if unit is None:
            return None
        self.units += [unit, *self._all_told(others)]
        self._settle(fact.relation)
        return PosedQuestion(text, answer, "pronoun" if pronoun else "fact", [unit])

    def _ask_pronoun(self) -> PosedQuestion | None:
        return self._ask_fact(pronoun=True)

    def _ask_absent(self) -> PosedQuestion | None:
        if not self.alike and self.rng.random() < 0.2:
            return self._ask_event(absent=True)
        fact = self._subject()  # the key is taken now, so that nothing else on the page says it
        question = fact and self.question(fact)
        if not question or question[1]:
            return None
        around = [self._another(fact)] if self.alike else [self._other(fact.entity), self._another(fact)]
        if None in around:
            return None
        units = [self.told(each) for each in around]
        if None in units:
            return None
        self.units += units + self._all_told(self._near(fact) if self.near > 1 else [])
        self._settle(fact.relation)
        return PosedQuestion(question[0], ABSENT, "absent", units)

    def _settle(self, relation: Relation) -> None:
        """On a page whose facts are alike, they are all of the first relation."""
        if self.alike:
            self.relations = self.asked_relations = [relation]
            self.known = {relation.id}

    def _near(self, fact: Fact) -> list[Fact]:
        """Facts that could be mistaken for this one: the same entity, or the same relation."""
        facts = [self._other(fact.entity) for _ in range(self.rng.randint(0, self.near))]
        facts += [self._another(fact) for _ in range(self.rng.randint(0, self.near))]
        return [each for each in facts if each is not None]

    def _all_told(self, facts: Sequence[Fact]) -> list[Unit]:
        return [unit for unit in map(self.told, facts) if unit is not None]

    def _joined(self, fact: Fact, other: Fact) -> Unit | None:
        """Two facts of one entity in one sentence: "my sister, who lives in Orby, plays the lute"."""
        rng, entity = self.rng, fact.entity
        view = entity.speaker if self.third else ME
        halves = []
        for each in (fact, other):
            wordings = [w for w in self._statements(each.relation, entity) if w.text.startswith("{e} ")]
            wordings = [w for w in wordings if not any(mark in w.text for mark in ".,:?")]
            wording = self._choose(wordings, asked=each is fact)
            if wording is None:
                return self.told(fact, True)
            slots = self._slots(entity, view) | {"v": each.value, "old": each.old, "e": ""}
            halves.append(wording.fill(rng, self.words, slots, entity.person(view)))
        if rng.random() < 0.5:
            halves.reverse()
        subject = entity.cases(view)[0]
        form = rng.choice(("{e}{a} and{b}", "{e}{a}, and {he}{b}", "{e}{a} but{b}", "{e}, {who}{a},{b}"))
        if entity.text == "I":
            form = form.replace(", {who}{a},{b}", "{a}, and I{b}")
        who = "who" if entity.kind in (*PERSON, "helper") else "which"
        text = form.format(e=subject, a=halves[0], b=halves[1], he=entity.pronouns(view)[0], who=who)
        return Unit(sentence(text), self.told(fact).row, entity.speaker)

    def _other(self, entity: Entity) -> Fact | None:
        """Another fact of the same entity."""
        pool, known = self.words.relations_of(entity.kind, entity.pronoun == "she", False), self.known
        pool = [relation for relation in pool if relation.id in known]
        tries = (self.fact(self.rng.choice(pool), entity) for _ in range(8 if pool else 0))
        return next((fact for fact in tries if fact is not None), None)

    def _another(self, fact: Fact) -> Fact | None:
        """The same relation of another entity, if possible of one that is called the same."""
        entity = None
        if self.rng.random() < 0.65 and fact.entity.text != "I":
            entity = self.entity((fact.entity.kind,), like=fact.entity)
        return self.fact(fact.relation, entity or self.entity(fact.relation.about))

    def _ask_bridge(self) -> PosedQuestion | None:
        rng, bridge = self.rng, self.rng.choice(self.words.bridges)
        first = self.entity(("person",), self.side == "entities")
        if first is None or ("bridge", bridge.id) in self.taken:
            return None
        fact = self._middle(bridge, self.side == "entities" and bridge.about != "named")
        if fact is None:
            return None
        view = self.view or first.speaker
        described = self._addressed(bridge.description, view)
        described = described.fill(rng, self.words, self._slots(first, view), first.person(view))
        question, unit = self.question(fact, described), self.told(fact, asked=True)
        if question is None or unit is None or _gives_away(question[0], fact.value):
            return None
        self.taken.add(("bridge", bridge.id))
        units = [self._bridged(bridge, first, fact.entity), unit]
        self.units += units
        if self.near and rng.random() < 0.8:  # somebody else, another place, the same relation
            second, other = self.entity(("person",)), self._middle(bridge, False, fact.relation)
            told = self.told(other) if other is not None else None
            if told is not None and second not in (None, first):
                self.units += [self._bridged(bridge, second, other.entity), told]
        self.units += self._all_told(self._near(fact))
        return PosedQuestion(question[0], fact.value, "bridge", units)

    def _middle(self, bridge: Bridge, held: bool, relation: Relation | None = None) -> Fact | None:
        """A fact about what stands between the two notes."""
        for _ in range(TRIES):
            middle = self._drawn(bridge.about, held)
            if middle.owner not in ("the", "") or not all(_apart(middle, other) for other in self.entities):
                continue
            pool = self.words.relations_of(middle.kind, middle.pronoun == "she", self.side == "relations")
            chosen = relation or (self.rng.choice(pool) if pool else None)
            fact = chosen and chosen.group not in ("name", "owner", "from", "madeby") and self.fact(chosen, middle)
            if fact:
                self.entities.append(middle)
                return fact
        return None

    def _bridged(self, bridge: Bridge, first: Entity, middle: Entity) -> Unit:
        view = first.speaker if self.third else ME
        slots = self._slots(first, view) | {"m": middle.text}
        text = self._choose(bridge.statements).fill(self.rng, self.words, slots, first.person(view))
        return Unit(sentence(text), "", first.speaker)

    # Events

    def event(self, asked: bool = False, **given: object) -> dict[str, object] | None:
        """Who did what, where, when: slots of the frames ``event.*``; ``given`` fixes some of them."""
        rng, lists, held = self.rng, self.words, self.side if asked else ""
        shape = given.get("shape") or rng.choice(("where", "when", "both", "both", "cost", "whom", "why", "with"))
        verbs = {"cost": "verb.trade", "whom": "verb.give"}.get(shape, "verb")
        verb = given.get("verb") or rng.choice(lists.heads(verbs, held == "relations") or lists.heads("verb", True))
        noun = given.get("noun") or rng.choice(lists.heads("noun", held == "entities"))
        adjective = lists.draw(rng, "adj") if "noun" in given or rng.random() < 0.6 else ""
        who = given.get("who") or self._actor()
        base, past = verb.split("/")
        did, done = ("did", who.speaker if who.text == "I" else "", who.text, base), ("done", past, noun)
        others = [key[2] for key in self.taken if key[:2] == ("noun", noun)]
        alike = others and not (adjective and all(others) and adjective not in others)
        if alike or did in self.taken or (done in self.taken and "noun" not in given):
            return None
        frames = lists.wordings[f"event.{shape}"]
        frame = self._choose(frames, asked) or rng.choice(frames)
        self.taken |= {did, done, ("noun", noun, adjective)}
        view = who.speaker if self.third else ME
        slots = {"base": base, "past": past, "what": f"{adjective} {noun}".strip(), "who": who.cases(view)[0]}
        slots |= {name: lists.draw(rng, f"{name}x") for name in ("where", "when", "why")}
        slots |= {name: self._actor(other=who).cases(view)[2] for name in ("whom", "mate")}
        slots["cost"] = lists.draw(rng, "price")
        text = frame.fill(rng, lists, slots) + (lists.draw(rng, "aside") if rng.random() < 0.15 else "")
        told = [name for name in ("where", "when", "cost", "why", "whom", "mate") if f"{{{name}}}" in frame.text]
        rest = {"actor": who, "told": told, "noun": noun, "verb": verb, "shape": shape, "held": frame.held_out}
        return slots | rest | {"unit": Unit(sentence(text), "", who.speaker), "adjective": adjective}

    def _actor(self, other: Entity | None = None) -> Entity:
        """Somebody who does something; not the one given."""
        speaker = other.speaker if other is not None else self.rng.choice(self.speakers)
        text = "I" if other is None and self.rng.random() < 0.2 else ""
        while not text or (other is not None and text == other.text):
            text = self.words.draw(self.rng, "whox")
        return Entity(text, "self" if text == "I" else "actor", text, pronoun="he", speaker=speaker)

    def _ask_event(self, absent: bool = False) -> PosedQuestion | None:
        rng = self.rng
        event = self.event(True, **({"shape": "plain"} if absent else {}))
        if event is None:
            return None
        who = event["actor"]
        open_slots = ("where", "why", "mate")
        told = [*event["told"], *event["told"], "what"] + ["who"] * (who.text != "I")
        slot = rng.choice(open_slots if absent else told)
        wordings = self.words.wordings[f"ask.{slot}"]
        wording = self._choose(wordings, asked=True)
        if wording is None and (self.side != "wordings" or not event["held"]):
            return None
        slots = {name: value for name, value in event.items() if isinstance(value, str)}
        slots["who"] = who.cases(self.view or who.speaker)[0]
        text = capital((wording or rng.choice(wordings)).fill(rng, self.words, slots))
        answer = slots[slot] if slot != "who" else event["who"]
        if absent:
            shape = "with" if slot == "mate" else slot
            others = [self.event(who=who, shape=shape), self.event(shape=shape)]
            if None in others:
                return None
        elif _gives_away(text, answer):
            return None
        else:
            twins = [{"who": who}, {"verb": event["verb"], "shape": event["shape"]}]
            if event["adjective"]:
                twins = [twins[0], twins[1] | {"noun": event["noun"]}, {"noun": event["noun"]}]
            others = [self.event(**rng.choice(twins)) for _ in range(rng.randint(0, 2 * self.near))]
        units = [event["unit"], *(other["unit"] for other in others if other is not None)]
        self.units += units
        if absent:
            return PosedQuestion(text, ABSENT, "absent", units)
        if slot == "when":
            answer = re.sub("^(at|on|in) ", "", answer)
        return PosedQuestion(text, answer, "event", units[:1])

    # What else is there

    def add(self) -> None:
        """One more fact or event, which nobody asks for."""
        rng = self.rng
        if rng.random() < 0.3:
            event = self.event()
            self.units += [event["unit"]] if event else []
            return
        if self.entities and rng.random() < 0.35:
            entity = rng.choice(self.entities)
            fact = self._other(entity)
        else:
            relation = rng.choice(self.relations)
            fact = self.fact(relation, self.entity(relation.about))
        if fact is None:
            return
        other = self._other(fact.entity) if not self.plain and rng.random() < 0.2 else None
        pronoun = not self.plain and fact.entity.text != "I" and rng.random() < 0.12
        unit = self._joined(fact, other) if other is not None else self.told(fact, pronoun=pronoun)
        self.units += [unit] if unit else []


def _apart(new: Entity, old: Entity, like: Entity | None = None) -> bool:
    """Whether nobody can take one entity for the other."""
    if new.kind == old.kind == "named":
        common = set(new.text.split()) & set(old.text.split()) - {"Mr", "Mrs"}
        return not common or (old is like and new.text != old.text and " " in old.text)
    if new.kind != old.kind or new.head != old.head:
        return True
    narrators = ("my", "our", "")
    if new.speaker != old.speaker and new.owner in narrators and old.owner in narrators:
        return True
    if new.owner != old.owner:
        return "the" not in (new.owner, old.owner) and {new.owner, old.owner} != {"my", "our"}
    return bool(new.modifier and old.modifier) and new.modifier != old.modifier


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return capital(text) + ("" if text[-1] in ".!?" else ".")


def _gives_away(question: str, answer: str) -> bool:
    """Whether the question has the answer in it."""
    return re.search(rf"(?<!\w){re.escape(answer.casefold())}(?!\w)", question.casefold()) is not None


def as_written(answer: str, text: str) -> str:
    """The answer as it stands in the text: at its beginning it has a capital."""
    return answer if answer in text or answer == ABSENT else capital(answer)
