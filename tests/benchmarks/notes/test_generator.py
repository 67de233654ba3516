import csv
import hashlib
import random
import re

import pytest

from benchmarks.notes import generator, pages
from benchmarks.notes.generator import KINDS, SIDES, VOICES
from benchmarks.notes.pages import Page
from benchmarks.notes.wordings import Wording, addressed, held_out, with_article, words
from plpkg import catalog, corpora
from plpkg.backbones import load_backbone
from plpkg.corpora import ABSENT, Document, Notes

from preloaded import Process

ASKED = [kind for kind in KINDS if kind != "text"]


def drawn(seed, count, **arguments):
    rng = random.Random(seed)
    for _ in range(count):
        yield generator.reading(rng, **arguments)


@pytest.fixture
def noted(monkeypatch):
    """A function that makes methods of a page note, in one list, what they were given and what they returned."""

    def note(*names):
        notes = []

        def noting(method):
            def called(self, *arguments, **keywords):
                returned = method(self, *arguments, **keywords)
                notes.append((arguments, returned))
                return returned

            return called

        for name in names:
            monkeypatch.setattr(pages.Page, name, noting(getattr(pages.Page, name)))
        return notes

    return note


def handwritten():
    with catalog.data_path("notes/handwritten.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def kept_back():
    """Sentences, questions and answers of the two sets that no generator made."""
    rows, diary = handwritten(), corpora.diary()
    sentences = [row["note"] for row in rows] + [row["question"] for row in rows]
    sentences += [question.question for question in diary.questions]
    for entry in diary.entries:
        sentences += re.split(r"(?<=[.!?])\s+", entry.text)
    answers = [row["answer"] for row in rows] + [question.answer for question in diary.questions]
    return {s.casefold().rstrip(".?! ") for s in sentences}, {answer.casefold() for answer in answers}


# Passages


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ASKED)
def test_the_answer_is_a_span_of_the_text(kind, side):
    passages = [p for voice in VOICES for p in drawn(1, 4, kinds=(kind,), side=side, tokens=90, voice=voice)]
    for passage in passages:
        assert passage.kind == kind
        assert (passage.answer == ABSENT) if kind == "absent" else (passage.answer in passage.text), passage
        assert not re.search(rf"\b{re.escape(passage.answer)}(?!\w)", passage.question), passage
        assert not re.search(r"[{}\[\]|]", passage.question + passage.answer.replace("[ ]", "")), passage
        assert "{" not in passage.text


def test_one_text_can_be_asked_several_things():
    for seed in range(20):
        passages = generator.readings(random.Random(seed), 6, tokens=400)
        assert len({passage.text for passage in passages}) == 1
        assert 1 < len({passage.question for passage in passages}) == len(passages) <= 6
        assert all(passage.answer == ABSENT or passage.answer in passage.text for passage in passages)
    assert len(generator.readings(random.Random(0), 6, tokens=20)) == 1  # there is no room for more


def test_texts_of_few_relations_have_no_others():
    rng, few = random.Random(3), words().sides[False][:5]
    for _ in range(40):
        page = Page(rng, "train", ["I"], "you", near=2, relations=5)
        page.ask("fact")
        while len(page.units) < 8:
            page.add()
        known = {key[2] for key in page.taken if len(key) == 3 and key[0] not in ("did", "done", "noun")}
        assert known <= {relation.group for relation in few}
    asked = generator.readings(rng, 4, facts=4, relations=5, kinds=("fact",), voice="prose", near=0, idle=0)
    assert len(asked) == 4  # each fact of its text


@pytest.mark.parametrize("value_last", [False, True])
def test_alike_facts_are_told_apart_by_their_entity_alone(value_last):
    rng = random.Random(4)
    for _ in range(60):
        page = Page(rng, "train", ["I"], "you", near=0)
        page.plain, page.alike, page.value_last = True, True, value_last
        asked = [page.ask("fact") for _ in range(4)]
        assert len({key[2] for key in page.taken if len(key) == 3}) == 1  # one group of relations
        assert len({question.text for question in asked}) == len(page.units) == 4
    options = dict(kinds=("fact",), voice="prose", near=0, idle=0, alike=True, value_last=value_last)
    assert all(len(generator.readings(rng, 4, facts=4, **options)) == 4 for _ in range(60))


def test_alike_facts_may_leave_questions_open(noted):
    facts, rng = noted("fact"), random.Random(5)
    for kinds in (["fact", "absent", "absent", "fact"], ["absent", "fact", "absent", "fact"]) * 30:
        page = Page(rng, "train", ["I"], "you", near=0)
        page.plain, page.alike = True, True
        first = page.ask(kinds[0])
        facts.clear()
        asked = [first, *map(page.ask, kinds[1:])]
        assert len({fact.relation for _, fact in facts if fact is not None}) == 1
        told = "\n".join(unit.text for unit in page.units)
        assert [question.answer in told for question in asked] == [kind == "fact" for kind in kinds]


@pytest.mark.parametrize(
    ("wording", "value_last"),
    [
        ("{e} is called {v}", True), ("the code of {o} is {v}", True), ("{v} is {e's} name", False),
        ("it is {v}", False), ("{e} was {old} and is {v} now", False), ("from {v} on {e} stays", False),
    ],
)  # fmt: skip
def test_which_wordings_have_the_value_last(wording, value_last):
    assert Wording(wording).value_last == value_last


def test_the_same_seed_gives_the_same_passages_in_every_process():
    script = (
        "import hashlib, random; from benchmarks.notes import generator; rng = random.Random(5);"
        "texts = repr([generator.reading(rng) for _ in range(40)] + [generator.notes(3)]);"
        "print(hashlib.sha256(texts.encode()).hexdigest())"
    )
    here = hashlib.sha256(repr([*drawn(5, 40), generator.notes(3)]).encode()).hexdigest()
    with Process(script) as process:
        assert process.stdout.read().strip() == here
    assert list(drawn(6, 3)) != list(drawn(7, 3))


def test_no_two_facts_can_be_mistaken_for_each_other(noted):
    made = noted("fact")
    for passage in drawn(3, 60, tokens=400, kinds=("fact", "pronoun", "absent")):
        facts = [fact for _, fact in made if fact]
        keys = [(f.entity.speaker if f.entity.text[:3] in ("I", "my ", "our") else "", f.entity.text, f.relation.group)
                for f in facts]  # fmt: skip
        assert len(keys) == len(set(keys)), passage
        entities = list({id(fact.entity): fact.entity for fact in facts}.values())
        for i, one in enumerate(entities):
            assert all(one.text == "I" or one.text != two.text or one.speaker != two.speaker for two in entities[:i])
            bare = [two for two in entities[:i] if two.head == one.head and "the" in (one.owner, two.owner)]
            assert all(one.modifier and two.modifier for two in bare), (one, bare)
        made.clear()


def test_what_is_absent_has_its_two_neighbours(noted):
    told, tried, seen = noted("told"), noted("_subject", "_ask_event"), 0
    for passage in drawn(4, 40, kinds=("absent",), tokens=150):
        asked = tried[-1][1]
        if isinstance(asked, pages.Fact):  # else it asks for what an event leaves open
            seen += 1
            others = [fact for (fact, *_), _ in told if fact is not asked]
            assert any(fact.entity is asked.entity and fact.relation is not asked.relation for fact in others), passage
            assert any(fact.relation is asked.relation and fact.entity is not asked.entity for fact in others), passage
            assert all((f.entity, f.relation) != (asked.entity, asked.relation) for f in others)
        told.clear()
        tried.clear()
    assert seen > 20


def test_one_plain_fact_of_so_many():
    for facts in (1, 2, 5, 9, 14):
        for passage in drawn(facts, 20, facts=facts, kinds=("fact",), voice="lines", near=0, idle=0):
            assert passage.text.count("\n") == facts - 1, passage


def test_lengths_reach_from_a_note_to_nine_hundred_tokens():
    _, tokenizer = load_backbone("plpkg-small")

    def median(**arguments):
        passages = drawn(8, 31, **arguments)
        return sorted(len(tokenizer(p.text, add_special_tokens=False)["input_ids"]) for p in passages)

    assert 40 <= median(tokens=50)[15] <= 75
    assert 800 <= median(tokens=900)[15] <= 1000
    free = median()
    assert free[0] < 80
    assert free[-1] > 400


def test_near_facts_share_the_noun():
    passages = drawn(9, 200, kinds=("fact",), tokens=150, near=2, voice="lines")
    heads = [h for name, items in words().lists.items() if name.startswith("head.") for h in items if "{" not in h]
    shared = 0
    for passage in passages:
        head = next((h for h in heads if re.search(rf"\b{re.escape(h)}\b", passage.question)), None)
        shared += head is not None and len(re.findall(rf"\b{re.escape(head)}\b", passage.text)) > 1
    assert shared > 80


# Documentation


def test_documentation_is_asked_about():
    document = Document(
        "x", "\n".join(f"    rate{i} (`float`, *optional*, defaults to 0.{i}7):\n        The share of words number {i} "
                       "that a long sentence of the documentation goes on to explain." for i in range(40))
    )  # fmt: skip
    passages = list(drawn(10, 60, kinds=("text",), documents=[document], tokens=120))
    assert all(passage.kind == "text" and passage.answer in passage.text for passage in passages)
    defaults = [p for p in passages if "default" in p.question and '"' not in p.question]
    assert defaults
    for passage in defaults:
        name = re.search(r"rate(\d+)", passage.question)
        assert passage.answer == f"0.{name[1]}7"


# Held out


def test_training_never_sees_what_is_held_out(noted):
    facts, entities, wordings = noted("fact"), noted("_drawn"), noted("_choose")

    def relations():
        return [held_out(relation.id) for (relation, *_), _ in facts]

    def heads():
        return [held_out(new.head) for _, new in entities if new.kind not in ("named", "self")]

    assert len(list(drawn(11, 400, tokens=200))) == 400
    assert len(heads()) > 1000
    assert not any(relations() + heads())
    assert not any(wording.held_out for _, wording in wordings if wording is not None)
    for side, held, notes in (("relations", relations, facts), ("entities", heads, entities)):
        for passage in drawn(12, 40, tokens=80, side=side, kinds=("fact", "pronoun", "absent")):
            assert passage.kind == "absent" or any(held()), passage
            notes.clear()
    for _ in drawn(13, 40, tokens=80, side="wordings", kinds=("fact",)):
        assert sum(wording.held_out for _, wording in wordings if wording is not None) >= 2
        wordings.clear()


def test_about_an_eighth_is_held_out():
    lists = words()
    heads = [h for name, items in lists.lists.items() if name.startswith("head.") for h in items]
    statements = [w.text for relation in lists.relations for w in relation.statements]
    questions = [w.text for relation in lists.relations for w in relation.questions]
    for texts in (heads, [relation.id for relation in lists.relations], statements, questions):
        assert 0.09 < sum(map(held_out, texts)) / len(texts) < 0.17
    for name in lists.lists:
        if name.startswith("head."):
            assert lists.heads(name, False)
            assert lists.heads(name, True)
            assert not set(lists.heads(name, False)) & set(lists.heads(name, True))


# The data


def test_there_are_enough_relations_and_wordings():
    lists = words()
    assert len(lists.relations) >= 240
    assert len({relation.id for relation in lists.relations}) == len(lists.relations)
    for relation in lists.relations:
        assert len(relation.statements) >= 4, relation.id
        assert len(relation.questions) >= 3, relation.id
        assert len({w.text for w in relation.statements + relation.questions}) >= 7
        assert sum(not w.held_out for w in relation.statements) >= 2, relation.id
        assert sum(not w.held_out for w in relation.questions) >= 2, relation.id
        assert all(re.search(r"\{(?:a )?v\}", w.text) for w in relation.statements), relation.id
        assert all(re.search(r"\{(?:e|e's|o)\}", w.text) for w in relation.statements + relation.questions), relation.id
        assert not any("{v}" in w.text or "{a v}" in w.text for w in relation.questions), relation.id
    assert len(lists.lists["verb"] + lists.lists["verb.trade"] + lists.lists["verb.give"]) >= 120
    assert len(lists.lists["noun"]) >= 200
    assert len(lists.lists["filler"]) >= 80
    assert len(lists.lists["she"]) + len(lists.lists["he"]) >= 150
    assert len(lists.lists["last"]) >= 150


def test_every_slot_has_a_list():
    lists = words()
    grammar = {"e", "e's", "o", "he", "his", "him", "v", "old", "l", "m", "h", "n", "narrator", "who", "what", "where"}
    grammar |= {"when", "cost", "why", "whom", "mate", "base", "past", "name", "verb", "cue"}
    wordings = [w for relation in lists.relations for w in (*relation.statements, *relation.questions)]
    wordings += [Wording(item) for items in lists.lists.values() for item in items]
    wordings += [Wording(relation.value) for relation in lists.relations]
    wordings += [w for bridge in lists.bridges for w in (*bridge.statements, bridge.description)]
    for wording in wordings:
        for slot in re.findall(r"\{([^}]+)\}", wording.text):
            slot = slot.removeprefix("a ")
            assert slot in grammar or slot in lists.lists or re.fullmatch(r"\d+-\d+", slot), wording.text


def test_nothing_of_the_test_sets_is_in_the_data():
    sentences, answers = kept_back()
    lists = words()
    for relation in lists.relations:
        for wording in (*relation.statements, *relation.questions, *relation.inverse):
            assert wording.text.casefold().rstrip(".?! ") not in sentences, wording.text
    for name, items in lists.lists.items():
        for item in items:
            assert item.casefold() not in answers, (name, item)
            assert item.casefold().rstrip(".?! ") not in sentences, (name, item)


def test_no_question_of_the_test_sets_is_ever_asked(monkeypatch):
    asked = {p.question.casefold() for p in drawn(15, 300, tokens=20)}
    with monkeypatch.context() as patch:
        patch.setattr(words(), "kept_back", frozenset(asked))
        assert not {p.question.casefold() for p in drawn(15, 300, tokens=20, kinds=("fact",))} & asked
    sentences, _ = kept_back()
    question = "What is your blood group?"
    assert question.casefold().rstrip("?") in sentences
    asked = {p.question for p in drawn(14, 1500, tokens=30)} | {q.question for q in generator.notes(1).questions}
    assert not {text.casefold().rstrip("?") for text in asked} & sentences


def test_the_handwritten_set():
    rows = handwritten()
    assert len(rows) == 30
    for row in rows:
        assert row["answer"] in row["note"]
        assert row["answer"] not in row["question"]


# Grammar


def test_wordings_are_addressed():
    wording = "when do I meet my vet, and who is waiting for me?"
    assert addressed(wording, "I").text == wording
    assert addressed(wording, "you").text == "when do you meet your vet, and who is waiting for you?"
    named = addressed(wording, "{narrator}").fill(random.Random(0), words(), {"narrator": "Ola"})
    assert named == "when does Ola meet Ola's vet, and who is waiting for Ola?"
    assert addressed("how late am I, and what have we got?", "you").text == "how late are you, and what have you got?"


@pytest.mark.parametrize(
    ("noun", "phrase"),
    [("lamp", "a lamp"), ("umbrella", "an umbrella"), ("uniform", "a uniform"), ("Icelandic", "an Icelandic"),
     ("hourglass", "an hourglass")],
)  # fmt: skip
def test_articles(noun, phrase):
    assert with_article(noun) == phrase


def test_a_question_must_not_have_its_answer_in_it():
    assert pages._gives_away("Who lives at 7 Mill Lane?", "7 mill lane")
    assert not pages._gives_away("Which mark did they give?", "A")
    assert pages._gives_away("Was it £5?", "£5")


# Somebody's notes


def test_notes_of_one_person():
    notes = generator.notes(1)
    assert isinstance(notes, Notes)
    assert repr(notes) == f"Notes({notes.person!r}, 12 entries, 24 questions)"
    texts = {entry.name: entry.text for entry in notes.entries}
    assert len(texts) == 12
    for question in notes.questions:
        assert set(question.notes) <= set(texts)
        if question.kind == "absent":
            assert question.answer == ABSENT
        else:
            assert any(question.answer in texts[name] for name in question.notes), question
            assert len(question.notes) <= (2 if question.kind == "bridge" else 1)
    assert list(notes.to_frame().columns) == ["question", "answer", "notes", "kind"]
    assert len(notes.to_frame()) == 24
    assert notes == generator.notes(1) != generator.notes(2)
    assert {question.kind for seed in range(4) for question in generator.notes(seed).questions} == set(ASKED)
    assert len(generator.notes(3, entries=5, questions=4).entries) == 5


# Errors


def reading(**arguments):
    return generator.readings(random.Random(0), **dict(questions=1) | arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reading(side="test"), "side must be one of 'train', 'entities', 'relations', 'wordings', got 'test'"),
        (lambda: reading(voice="song"), "voice must be one of .* got 'song'"),
        (lambda: reading(kinds=("riddle",)), "kind must be one of .* got 'riddle'"),
        (lambda: reading(facts=0), "facts must be a whole number of at least 1, got 0"),
        (lambda: reading(tokens=3), "tokens must be a whole number of at least 20, got 3"),
        (lambda: reading(near=-1), "near must be a whole number of at least 0, got -1"),
        (lambda: reading(idle=0.95), "idle must be at least 0 and at most 0.9, got 0.95"),
        (lambda: reading(kinds=("text",)), "questions of the kind 'text' need documents"),
        (lambda: reading(questions=0), "questions must be a whole number of at least 1, got 0"),
        (lambda: reading(relations=0), "relations must be a whole number of at least 1, got 0"),
        (lambda: generator.notes(-1), "seed must be a whole number of at least 0, got -1"),
        (lambda: generator.notes(1, entries=0), "entries must be a whole number of at least 1, got 0"),
        (lambda: generator.notes(1, side="x"), r"side must be one of .* got 'x'"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
