"""Several questions in one sequence cost what they cost one at a time, and no question is learnt from that judges."""

import contextlib

import pytest
import torch

from benchmarks.backbones import asking, hands, smollm2_reader as reader
from plpkg import catalog, questions
from plpkg.backbones import UNKNOWN, load_backbone, random_backbone

from rounding import relative

HANDS = [*hands.training_hands(), *hands.CHOOSING, *hands.REPORTING]


def test_every_hand_learns_chooses_or_reports():
    assert len(HANDS) == len(set(HANDS)) == len(list(catalog.data_path("notes", "hands").glob("*.json"))) == 24


@pytest.mark.parametrize("hand", HANDS)
def test_an_answer_stands_in_its_note_and_is_short(hand):
    some = hands.collections(hand)
    assert len(some) == 10
    for collection in some:
        assert len(collection.notes) == 12
        assert len(collection.answerable) >= 10
        assert collection.absent
        for question in collection.answerable:
            note = collection.notes[question.note].casefold()
            assert all(answer.casefold() in note for answer in question.answers), question
            assert len(question.answers[0].split()) <= 6


@pytest.mark.parametrize("hand", [*hands.CHOOSING, *hands.REPORTING])
def test_what_judges_can_be_answered_right(hand):
    for collection in hands.collections(hand):
        for question in collection.answerable:
            assert questions.right(question.answers[0], question.answers), question
            assert any(questions.contains(collection.notes[question.note], each) for each in question.answers), question


def drawn(absent=0.0, number=0):
    some = list(hands.collections("hand13")[:3])
    nearest = {(c.who, q.question): list(range(12)) for c in some for q in c.questions}
    return some, reader.epoch(reader.Recipe(absent=absent), number, some, nearest)


def test_an_epoch_has_each_answerable_question_once_with_its_note():
    some, sequences = drawn()
    asked = sorted(each.question for sequence in sequences for each in sequence.questions)
    assert asked == sorted(each.question for collection in some for each in collection.answerable)
    by_question = {each.question: c.notes[each.note] for c in some for each in c.answerable}
    for sequence in sequences:
        assert len(set(sequence.notes)) == len(sequence.notes)
        assert all(by_question[each.question] in sequence.notes for each in sequence.questions)
    assert drawn()[1] == sequences != drawn(number=1)[1]


def test_open_questions_are_learnt_only_where_they_are_asked_for():
    tokenizer = load_backbone("plpkg-small")[1]
    sequence = next(s for s in drawn(absent=1.0)[1] if any(each.note is None for each in s.questions))
    ids = {late: reader.packed(sequence, tokenizer, late)["labels"] for late in (False, True)}
    answers = {late: tokenizer.decode(each[each != reader.IGNORED]) for late, each in ids.items()}
    assert UNKNOWN in answers[True]
    assert UNKNOWN not in answers[False]


def test_an_open_question_is_one_that_search_would_have_brought_to_the_text():
    some, sequences = drawn(absent=1.0)
    left_open = [(sequence, each) for sequence in sequences for each in sequence.questions if each.note is None]
    assert left_open
    by_question = {each.question: (c, each.note) for c in some for each in c.questions}
    for sequence, each in left_open:
        collection, note = by_question[each.question]
        first = next(i for i in range(12) if i != note)  # by `nearest`, which is the notes' own order here
        assert collection.notes[first] in sequence.notes
        assert note is None or collection.notes[note] not in sequence.notes


def test_a_packed_sequence_costs_what_its_questions_cost_alone(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_: contextlib.nullcontext())
    tokenizer = load_backbone("plpkg-small")[1]
    options = {"attn_implementation": "eager", "initializer_range": 0.2}  # what is attended to matters
    model = random_backbone("llama", vocab=8192, max_positions=2048, options=options)
    sequence = max(drawn()[1], key=lambda each: len(each.questions))
    assert len(sequence.questions) >= 3
    with torch.no_grad():
        together = reader.loss(model, reader.packed(sequence, tokenizer, False))
        alone, tokens = 0.0, 0
        for each in sequence.questions:
            asked = questions.prompt(sequence.text, each.question, tokenizer)
            head = tokenizer(asked)["input_ids"]
            said = [*tokenizer(each.answers[0])["input_ids"], tokenizer.eos_token_id]
            log_p = model(torch.tensor([head + said])).logits[0, len(head) - 1 : -1].log_softmax(-1)
            alone -= float(log_p[torch.arange(len(said)), torch.tensor(said)].sum())
            tokens += len(said)
    assert float(together) == pytest.approx(alone, rel=relative(8192))


def test_spans_end_where_words_end():
    tokenizer = load_backbone("plpkg-small")[1]
    text = "The ferry leaves at nine."
    prompt = [1, 2, 3]
    allowed = asking.Spans(text, tokenizer, len(prompt))
    written = tokenizer("ferry leaves")["input_ids"]
    for count in range(len(written)):
        assert written[count] in allowed(0, torch.tensor(prompt + written[:count]))
    assert tokenizer.eos_token_id in allowed(0, torch.tensor(prompt + written))
    assert tokenizer.eos_token_id not in allowed(0, torch.tensor(prompt))
    assert allowed(0, torch.tensor([*prompt, tokenizer.eos_token_id])) == [tokenizer.eos_token_id]
