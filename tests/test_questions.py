"""Answers are compared with a loop that takes the likeliest token, one question at a time."""

import copy
import math

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from plpkg import questions
from plpkg.backbones import UNKNOWN, load_backbone, random_backbone
from plpkg.corpora import ABSENT, Tokens
from plpkg.ngrams import Counts
from plpkg.retention import chunked_prefill
from plpkg.retention.scorers import SinkRecent
from plpkg.scoring import score, token_log_probs

from rounding import relative

TEXTS = ["The Skoda is on level 3.", "Our cat Biscuit weighs 4.2 kg and must eat less. " * 12, "Nothing."]
ASKED = [(text, question) for text in TEXTS for question in ("Where is the Skoda?", "What is the name of the cat?")]


def nats(judged):
    """The mean of -ln p of a token."""
    return judged.bits * math.log(2) / judged.tokens


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
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(questions.prompt(text, question, tokenizer))["input_ids"]]])
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
    before = torch.cat([before, torch.tensor(tokenizer(questions.prompt("", question, tokenizer))["input_ids"])])
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
    passages = [(text, *pair) for pair in pairs]
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
        assert nats(each) == pytest.approx(-expected.mean().item(), rel=relative(8192))
    known = Counts([d.ids for d in continued])
    base = token_log_probs(model, tokenizer, continued, reading=read)
    assert nats(known.score(continued, base, 1.0)) < nats(judged["counts"]) / 2


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


def test_a_prompt_without_room_for_an_answer_and_an_empty_batch_are_refused(small):
    model, tokenizer = small
    with pytest.raises(ValueError, match=r"a prompt has 12\d\d tokens, of which the model takes 992 before an answer"):
        questions.answers(model, tokenizer, [ASKED[0], ("word " * 1200, "Which?")])
    with pytest.raises(ValueError, match="batch must be a whole number of at least 1, got 0"):
        questions.answers(model, tokenizer, ASKED, batch=0)
    assert questions.answers(model, tokenizer, []) == []


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(0, 10, 0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval_is_wilsons(right, total, low, high):  # the last is example in Newcombe (1998), table I
    assert questions.interval(right, total) == pytest.approx((low, high), abs=5e-5)


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}[assistant]"
OWN_SYSTEM = "{% if messages[0].role != 'system' %}[system]You are somebody else.[end]{% endif %}" + PLAIN
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system line') }}{% endif %}" + PLAIN
LEAVES_OUT = "{% for m in messages if m.role == 'user' %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}[assistant]"
WRITES_BOS = "{{ bos_token }}" + PLAIN
TRIMS = PLAIN.replace("m.content", "m.content | trim")


def with_template(tokenizer, template, adds_bos=False):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    if adds_bos:
        start = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, tokenizer.bos_token_id)]
        )
    return tokenizer


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [PLAIN, OWN_SYSTEM, REFUSES, LEAVES_OUT, WRITES_BOS, TRIMS])
def test_each_template_gets_one_instruction_one_turn_and_one_beginning(small, template, adds_bos):
    tokenizer = with_template(small[1], template, adds_bos)
    asked = questions.prompt(*ASKED[0], tokenizer)
    turn = f"Text: {ASKED[0][0]}\nQuestion: {ASKED[0][1]}\nShortest answer:"
    assert asked.count(turn) == asked.count(questions.INSTRUCTION) == 1
    assert asked.index(questions.INSTRUCTION) < asked.index(turn)
    assert asked.endswith("[end][assistant]")
    assert "somebody else" not in asked
    beginnings = questions.token_ids(asked, tokenizer).count(tokenizer.bos_token_id)
    assert beginnings == int(adds_bos or template == WRITES_BOS)


def test_a_template_that_changes_what_is_asked_is_refused(small):
    tokenizer = with_template(small[1], PLAIN.replace("m.content", "m.content | upper"))
    with pytest.raises(ValueError, match="changes what is asked"):
        questions.prompt(*ASKED[0], tokenizer)


@pytest.mark.parametrize("template", [None, WRITES_BOS])
def test_the_text_is_a_prefix_of_all_questions_about_it(small, template):
    tokenizer = with_template(small[1], template)
    (before, first), (again, second) = (questions.parts(TEXTS[0], asked, tokenizer) for asked in ("Where?", "Who?"))
    assert before == again
    assert "Where?" in first
    assert "Where?" not in before + second
    ids = questions.token_ids(before + first, tokenizer)
    read = questions.token_ids(before, tokenizer)
    assert ids[: len(read)] == read


def test_without_a_text_a_chat_is_only_asked(small):
    asked = questions.prompt("", "Where?", with_template(small[1], PLAIN))
    assert "[user]Question: Where?\n" in asked


def test_expected_answers_of_a_chat_are_scored_to_their_last_token(random):
    model, tokenizer = random[0], with_template(random[1], WRITES_BOS)
    (asked,) = questions.expected([(TEXTS[0], "Where?", "level 3")], tokenizer)
    assert tokenizer.decode(asked.ids[asked.scored]) == "level 3"
    assert asked.num_bytes[asked.scored].sum() == len("level 3")
    prompted = questions.token_ids(questions.prompt(TEXTS[0], "Where?", tokenizer), tokenizer)
    assert asked.ids.tolist()[: len(prompted)] == prompted

    text, _ = questions.parts(TEXTS[0], "Where?", tokenizer)
    read = chunked_prefill(model, torch.tensor([questions.token_ids(text, tokenizer)]), SinkRecent(), 128, 4)
    (continued,) = questions.expected([(TEXTS[0], "Where?", "level 3")], tokenizer, read=True)
    after = score(model, tokenizer, [continued], reading=read)
    whole = score(model, tokenizer, [asked])
    assert nats(after) == pytest.approx(nats(whole), rel=relative(8192))
    assert after.tokens == whole.tokens == int(asked.scored.sum())


class Says:
    """Stands in for a model that has only one thing to say: it gives each next token of that all likelihood."""

    def __init__(self, backbone, tokenizer, said):
        ids = torch.tensor([*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
        begins = []

        def forward(_, given, output):
            begins.append(given[0].shape[1] if given else 0)
            logits = torch.full_like(output.logits[:, -1:], -100.0)
            logits[..., ids[min(len(begins) - 1, len(ids) - 1)]] = 100.0
            output.logits = logits
            return output

        self.model = copy.deepcopy(backbone)
        self.model.register_forward_hook(forward)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("level 3", "level 3"),
        ("\n\n level 3\nand more", "level 3"),
        (" \n", ""),
        ("level 3 \n\n\nlevel 4", "level 3"),
    ],
)
def test_an_answer_is_the_first_line_that_says_something(small, said, answer):
    assert questions.answer(Says(small[0], small[1], said).model, small[1], *ASKED[0]) == answer
    (reading,) = questions.readings(Says(small[0], small[1], said).model, small[1], [ASKED[0]])
    assert reading.answer == answer
    assert reading.log_prob == pytest.approx(0, abs=1e-5)  # one token has all the probability


def test_the_likelihood_is_that_of_all_that_was_written(random):
    model, tokenizer = random
    together, alone = (questions.readings(model, tokenizer, some)[0] for some in (ASKED[:3], ASKED[:1]))
    ids = torch.tensor([questions.token_ids(questions.prompt(*ASKED[0], tokenizer), tokenizer)])
    (first, *_) = tokenizer(UNKNOWN, add_special_tokens=False)["input_ids"]
    unknown = float(model(ids).logits[0, -1].log_softmax(-1)[first].detach())
    total = 0.0
    for _ in range(questions.LONGEST):
        log_p = model(ids).logits[0, -1].log_softmax(-1)
        total += float(log_p.max().detach())
        ids = torch.cat([ids, log_p.argmax()[None, None]], 1)
    for reading in (together, alone):
        assert reading.answer == alone.answer
        assert reading.log_prob == pytest.approx(total, rel=relative(8192))
        assert reading.unknown == pytest.approx(unknown, rel=relative(8192))


@pytest.mark.parametrize(
    ("said", "accepted", "others", "right"),
    [
        ("Tuesday", "Tuesday", (), True),
        ("It is on Tuesday.", ["tuesday"], (), True),
        ("Tuesday or Friday", "Tuesday", ["Friday"], False),
        ("Tuesday or Friday", "Tuesday", (), True),
        ("Friday", "Tuesday", (), False),
        ("the tuesdays", "Tuesday", (), False),
        ("one two three four five Tuesday", "Tuesday", (), True),
        ("one two three four five six Tuesday", "Tuesday", (), False),
        ("at 6.40 sharp", "6:40", (), True),
        ("it is on the table in the hall", "hall", (), False),
        ("£1,200", "1200", (), True),
        ("15 kg", "1.5 kg", (), False),
        ("-5 °C", "5", (), False),
        ("10-15 minutes", "15", (), True),
        ("Milly\u2019s", "Milly", (), True),
        ("it's Milly's", "milly\u2019s", (), True),
        ("the boss", "the bos", (), False),
        ("in the blue, old pot", "old blue pot", (), False),
        ("on", "on", (), True),
        ("off", "on", (), False),
        ("@", "@", (), True),
        ("", "Tuesday", (), False),
        ("the blue pot", ["a red pot", "the blue pot"], ["a red pot", "blue"], True),
    ],
)
def test_the_rule_by_which_answers_are_right(said, accepted, others, right):
    assert questions.right(said, accepted, others) is right


def test_repeating_the_text_is_not_right():
    assert not questions.right(TEXTS[1], "4.2 kg")
    assert questions.contains(TEXTS[1], "4.2 kg")
