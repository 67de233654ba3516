"""Answers are compared with a loop that takes the likeliest token, one question at a time."""

import copy

import pytest
import torch

from plpkg import questions
from plpkg.backbones import load_backbone, random_backbone
from plpkg.corpora import ABSENT, Passage, Tokens
from plpkg.counts import Counts
from plpkg.retention import chunked_prefill
from plpkg.retention.scorers import SinkRecent
from plpkg.scoring import score, token_log_probs

from rounding import relative

TEXTS = ["The Skoda is on level 3.", "Our cat Biscuit weighs 4.2 kg and must eat less. " * 12, "Nothing."]
ASKED = [(text, question) for text in TEXTS for question in ("Where is the Skoda?", "What is the name of the cat?")]


@pytest.fixture(scope="module")
def small():
    return load_backbone("plpkg-small")


@pytest.fixture(scope="module")
def random(small):
    """It never ends a line; in float64, no two tokens are alike likely but for rounding."""
    options = dict(vocab=8192, max_positions=512, dtype=torch.float64)
    return random_backbone("llama", **options), small[1]


@torch.no_grad()
def by_hand(model, tokenizer, text, question):
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(questions.prompt(text, question))["input_ids"]]])
    written = ""
    for _ in range(questions.LONGEST):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        if ids[0, -1] == tokenizer.eos_token_id:
            break
        written += tokenizer.decode(ids[0, -1:])
        if "\n" in written:
            break
    return written.lstrip(" ").partition("\n")[0].strip()


def test_in_batches_as_one_at_a_time(random):
    expected = [by_hand(*random, *pair) for pair in ASKED]
    assert len(set(expected)) == len(ASKED)
    for batch in (1, 4, 16):
        assert questions.answers(*random, ASKED, batch=batch) == expected
    assert questions.answer(*random, *ASKED[2]) == expected[2]


@torch.no_grad()
def by_one_pass(model, tokenizer, before, question, answer):
    """The log-probability of each of the answer's tokens, after all that comes before it."""
    before = torch.cat([before, torch.tensor(tokenizer(questions.prompt("", question))["input_ids"])])
    answer = torch.tensor(tokenizer(f" {answer}\n")["input_ids"])
    log_p = model(torch.cat([before, answer])[None]).logits[0, len(before) - 1 : -1].double().log_softmax(-1)
    return log_p.gather(-1, answer[:, None])[:, 0]


@pytest.mark.parametrize("positions", ["original", "reassigned"])
def test_expected_answers_cost_the_same_whoever_has_the_text(random, positions):
    """In the prompt, read before, or with counts: one result, of the answers' tokens alone."""
    model, tokenizer = copy.deepcopy(random[0]), random[1]
    model.lm_head.weight.data *= 50  # so that what comes before a token matters by more than rounding
    text = "The Skoda is on level 3."
    pairs = [("Where?", "level 3"), ("What colour is it, é?", ABSENT)]
    passages = [Passage(text, *pairs[0], "fact"), (text, *pairs[1])]
    start = torch.tensor([tokenizer.bos_token_id, *tokenizer(text)["input_ids"]])
    read = chunked_prefill(model, start[None], SinkRecent(), 64, 4, positions=positions)
    expected = torch.cat([by_one_pass(model, tokenizer, start, *pair) for pair in pairs])
    asked, continued = questions.expected(passages, tokenizer), questions.expected(passages, tokenizer, read=True)
    bare = [Tokens(d.ids[1:], d.scored[1:], d.num_bytes[1:]) for d in continued]  # no beginning of text
    judged = {
        "in the prompt": score(model, tokenizer, asked),
        "read": score(model, tokenizer, continued, reading=read),
        "read, by a tokenizer without a beginning of text": score(model, tokenizer, bare, reading=read),
        "counts": Counts().score(asked, token_log_probs(model, tokenizer, asked), 1.0),
        "counts after it": Counts().score(continued, token_log_probs(model, tokenizer, continued, reading=read), 1.0),
    }
    for each in judged.values():
        assert (each.tokens, each.num_bytes) == (len(expected), len(f" level 3\n {ABSENT}\n".encode()))
        assert each.nats_per_token == pytest.approx(-expected.mean().item(), rel=relative(8192))
    known = Counts([d.ids for d in continued])
    base = token_log_probs(model, tokenizer, continued, reading=read)
    assert known.score(continued, base, 1.0).nats_per_token < judged["counts"].nats_per_token / 2


def test_what_cannot_go_on_from_a_reading_is_refused(random):
    model, tokenizer = random
    asked = questions.expected([("", "Where?", "here")], tokenizer, read=True)
    two = chunked_prefill(model, torch.tensor([[1, 2, 3], [4, 5, 6]]), SinkRecent(), 64, 4)
    with pytest.raises(ValueError, match="goes on from one prompt, and this is a reading of 2"):
        score(model, tokenizer, asked, reading=two)
    with pytest.raises(ValueError, match="stride=4 is of windows: after a reading a document is read in one piece"):
        score(model, tokenizer, asked, reading=two, stride=4)


def test_the_models_mode_stays(small):
    model, tokenizer = small
    model.train()
    try:
        assert isinstance(questions.answer(model, tokenizer, *ASKED[0]), str)
        assert model.training
    finally:
        model.eval()


def test_a_prompt_without_room_for_an_answer_and_no_passage_are_refused(small):
    model, tokenizer = small
    with pytest.raises(ValueError, match=r"a prompt has 12\d\d tokens, of which the model takes 992 before an answer"):
        questions.answers(model, tokenizer, [ASKED[0], ("word " * 1200, "Which?")])
    with pytest.raises(ValueError, match="batch must be a whole number of at least 1, got 0"):
        questions.answers(model, tokenizer, ASKED, batch=0)
    assert questions.answers(model, tokenizer, []) == []
    with pytest.raises(ValueError, match="there are no passages to ask about"):
        questions.ask(*small, [])


def answered(*pairs):
    passages = tuple(Passage("", "?", expected, "fact") for expected, _ in pairs)
    return questions.Answered(passages, tuple(given for _, given in pairs))


def test_right_is_the_same_but_for_capitals_and_a_full_stop():
    judged = answered(("level 3", "Level 3."), ("level 3", "level 33"), ("level 3", "on level 3"), (ABSENT, ABSENT))
    assert judged.right == [True, False, False, True]
    assert judged.share == 0.5
    assert repr(judged) == "Answered(2 of 4 right: 50%, 95 % interval 15% to 85%)"
    assert judged.to_frame().answer.tolist()[1] == "level 33"


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(0, 10, 0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval_is_wilsons(right, total, low, high):  # the last is example in Newcombe (1998), table I
    judged = answered(*[("a", "a")] * right, *[("a", "b")] * (total - right))
    assert judged.interval == pytest.approx((low, high), abs=5e-5)


def test_a_models_answers_are_judged(small):
    passages = [Passage(*pair, "level 3", "fact") for pair in ASKED]
    judged = questions.ask(*small, iter(passages))
    assert judged.given == tuple(questions.answers(*small, ASKED))
    assert len(judged.right) == len(ASKED)
