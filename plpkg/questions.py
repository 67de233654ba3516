"""Questions about a text: how a model is asked, what it answers, and how often that is right."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from plpkg.corpora.documents import Document
from plpkg.corpora.notes import Passage
from plpkg.corpora.tokens import Tokens, encode
from plpkg.results import Sentences
from plpkg.validation import whole_number

LONGEST = 32
"""Tokens of an answer."""


def prompt(text: str, question: str) -> str:
    """The prompt for a question. A model that has learnt this form continues with a space, its answer and a newline."""
    return f"{text}\n\nQuestion: {question}\nAnswer:"


def expected(passages: Iterable[Passage | tuple[str, str, str]], tokenizer, *, read: bool = False) -> list[Tokens]:
    """Prompts with the answers that are expected: what :func:`plpkg.scoring.score` scores are the answers alone.

    Parameters
    ----------
    passages
        Passages, or a text, a question and its answer each.
    tokenizer
        A fast one.
    read
        The prompt is without the text: it was read before, and the score is given the ``reading``.

    Examples
    --------
    Each gives a :class:`plpkg.scoring.Score`, of the same tokens::

        asked = questions.expected(passages, tokenizer)
        score(model, tokenizer, asked, seq=1024)  # as many tokens as the longest prompt has, or it is cut to windows
        score(model, tokenizer, questions.expected(passages, tokenizer, read=True), reading=reading)
        counts.score(asked, token_log_probs(model, tokenizer, asked, seq=1024), weight)
    """
    documents = []
    for each in passages:
        text, question, right = (each.text, each.question, each.answer) if isinstance(each, Passage) else each
        asked = prompt("" if read else text, question)
        documents.append(Document("", f"{asked} {right}\n", masked=((0, len(asked)),)))
    return encode(documents, tokenizer)


@torch.inference_mode()
def answers(model, tokenizer, asked: Sequence[Passage | tuple[str, str]], *, batch: int = 16) -> list[str]:
    """What a causal language model answers: its likeliest tokens up to the end of the line.

    Parameters
    ----------
    model, tokenizer
        The model and its tokenizer; the model's mode (training or evaluation) is left as it was.
    asked
        Passages, or pairs of a text and a question.
    batch
        Questions at a time.

    Raises
    ------
    ValueError
        ``batch`` out of range, or a prompt that leaves no room for an answer of :data:`LONGEST` tokens.
    """
    whole_number("batch", batch, 1)
    pairs = [(each.text, each.question) if isinstance(each, Passage) else each for each in asked]
    rows = [tokenizer(prompt(*pair))["input_ids"] for pair in pairs]
    if tokenizer.bos_token_id is not None:  # not every tokenizer puts it in front by itself
        rows = [ids if ids[:1] == [tokenizer.bos_token_id] else [tokenizer.bos_token_id, *ids] for ids in rows]
    room = getattr(model.config, "max_position_embeddings", math.inf) - LONGEST
    if rows and len(longest := max(rows, key=len)) > room:
        raise ValueError(f"a prompt has {len(longest)} tokens, of which the model takes {room} before an answer")
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # alike lengths together: little padding
    found = [""] * len(rows)
    was_training = model.training
    model.eval()
    try:
        for begin in range(0, len(order), batch):
            places = order[begin : begin + batch]
            seq = max(len(rows[i]) for i in places)
            ids = torch.zeros(len(places), seq, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for line, i in enumerate(places):  # padding on the left: all answers begin at the same place
                ids[line, seq - len(rows[i]) :] = torch.tensor(rows[i])
                mask[line, seq - len(rows[i]) :] = 1
            written = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=LONGEST,
                do_sample=False,
                num_beams=1,  # whatever the model's own settings say
                repetition_penalty=1.0,
                stop_strings="\n",
                tokenizer=tokenizer,
                pad_token_id=tokenizer.pad_token_id or 0,
            )
            for i, tokens in zip(places, written[:, seq:], strict=True):
                found[i] = tokenizer.decode(tokens, skip_special_tokens=True).lstrip(" ").partition("\n")[0].strip()
    finally:
        model.train(was_training)
    return found


def answer(model, tokenizer, text: str, question: str) -> str:
    """What the model answers to one question; see :func:`answers`."""
    return answers(model, tokenizer, [(text, question)])[0]


@dataclass(frozen=True)
class Answered(Sentences):
    """Questions with what a model answered: ``passages`` and ``given``, in the same order."""

    passages: tuple[Passage, ...]
    given: tuple[str, ...]

    @property
    def right(self) -> list[bool]:
        """For each question, whether the answer is the expected one, but for capitals and a full stop."""
        return [same(given, passage.answer) for passage, given in zip(self.passages, self.given, strict=True)]

    @property
    def share(self) -> float:
        """The share of right answers."""
        return sum(self.right) / len(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share, if the questions are independent."""
        n, z = len(self.right), 1.959964
        middle, half = self.share + z * z / (2 * n), z * math.sqrt(self.share * (1 - self.share) / n + (z / n) ** 2 / 4)
        return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))

    def rows(self) -> list[dict]:
        shown = zip(self.passages, self.given, self.right, strict=True)
        return [{"question": p.question, "expected": p.answer, "answer": g, "right": r} for p, g, r in shown]

    def __repr__(self) -> str:
        low, high = self.interval
        total = len(self.right)
        return f"Answered({sum(self.right)} of {total} right: {self.share:.0%}, 95 % interval {low:.0%} to {high:.0%})"


def same(given: str, expected: str) -> bool:
    """Whether two answers are the same but for capitals and a full stop."""
    return given.rstrip(".").casefold() == expected.rstrip(".").casefold()


def ask(model, tokenizer, passages: Sequence[Passage], *, batch: int = 16) -> Answered:
    """Ask a model about texts whose answers are known; see :func:`answers`.

    Raises
    ------
    ValueError
        No passages, or as in :func:`answers`.
    """
    passages = tuple(passages)
    if not passages:
        raise ValueError("there are no passages to ask about")
    return Answered(passages, tuple(answers(model, tokenizer, passages, batch=batch)))
