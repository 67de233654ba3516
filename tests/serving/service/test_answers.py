"""How tokens become text: characters that span tokens, stop strings, and nothing of the prompt."""

import asyncio

import pytest
from hypothesis import example, given, settings, strategies as st

from plpkg.serving.requests import Request
from plpkg.serving.service.http.answers import _may_become, texts
from plpkg.serving.service.http.metrics import Metrics


def spoken(tokenizer, prompt, ids, stop=()):
    """What :func:`texts` makes of ids after a prompt's."""

    async def tokens():
        for n, token in enumerate(ids, 1):
            yield token, "length" if n == len(ids) else None

    async def pieces():
        return [each async for each in texts(tokens(), Request(prompt, stop=stop), tokenizer, METRICS)]

    return asyncio.run(pieces())


METRICS = Metrics()
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=150)
@example(text="naïve 🙂🙃 ümlaut 漢字", prompt="a")
@given(text=UNICODE, prompt=UNICODE)
def test_characters_come_whole_whatever_tokens_they_span(base, text, prompt):
    tokenizer = base[1]
    ids, before = tokenizer(text)["input_ids"], tokenizer(prompt)["input_ids"]
    pieces = [piece for piece, _ in spoken(tokenizer, before, ids)]
    assert "".join(pieces) == text.rstrip("\ufffd")  # which cannot be told from a character's beginning


@pytest.mark.parametrize("prompt", ["abc \ufffd", "abc \ufffd\ufffd", "é"])
def test_no_prompt_is_taken_for_a_part_of_the_answer(base, prompt):
    """Also one that ends in a replacement character, or in half of one."""
    tokenizer = base[1]
    before = tokenizer(prompt)["input_ids"]
    half = tokenizer("🙂")["input_ids"][:-1]
    for ids in (before, before + half):
        assert "".join(piece for piece, _ in spoken(tokenizer, ids, tokenizer(" foo bar")["input_ids"])) == " foo bar"


@settings(max_examples=150)
@given(data=st.data())
def test_any_tokens_make_text(base, data):
    """Also those that a random model writes: halves of characters, and ids that the tokenizer has not."""
    tokenizer = base[1]
    token = st.integers(0, 260) | st.integers(0, len(tokenizer) + 5)
    before, ids = data.draw(st.lists(token, min_size=1, max_size=5)), data.draw(st.lists(token, min_size=1, max_size=9))
    pieces = spoken(tokenizer, before, ids)
    assert [reason for _, reason in pieces] == [None] * (len(ids) - 1) + ["length"]
    text, alone = "".join(piece for piece, _ in pieces), tokenizer.decode(ids, skip_special_tokens=True)
    assert alone.startswith(text)
    assert alone == text or alone.endswith("\ufffd")  # a character that was never finished is left out


@settings(max_examples=200)
@given(
    text=st.text("abc", min_size=1, max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_a_text_ends_before_its_first_stop_string(base, text, stop):
    ids = base[1](text)["input_ids"]
    pieces = spoken(base[1], [9], ids, stop)
    # The first that is complete when a token has come; of those, the one that begins first
    written, kept, reason = "", text, "length"
    for token in ids:
        written += base[1].decode([token])
        if ends := [written.find(each) for each in stop if each in written]:
            kept, reason = written[: min(ends)], "stop"
            break
    assert ("".join(piece for piece, _ in pieces), pieces[-1][1]) == (kept, reason)


def test_a_long_stop_string_costs_no_more_than_the_text():
    class Counted(str):
        slices = 0

        def __getitem__(self, key):
            Counted.slices += 1
            return str(self)[key]

    assert _may_become("text ab", [Counted("abc" * 1000)]) == 2
    assert Counted.slices <= len("text ab")
