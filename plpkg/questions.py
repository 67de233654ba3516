"""Questions about a text: how a model is asked, what it answers, and how often that is right."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from plpkg.backbones import UNKNOWN
from plpkg.corpora.documents import Document
from plpkg.corpora.tokens import Tokens, encode
from plpkg.training_loop import evaluating
from plpkg.validation import whole_number

LONGEST = 32
"""Tokens of an answer."""

INSTRUCTION = "Extract the answer from the text. Reply with the shortest exact phrase."
"""The system line of a chat. Without one, some templates write their own: SmolLM2's does."""

MOST_OTHERS = 5
"""Words beside the expected ones that a right answer may have: an answer that repeats its text is not right."""


def prompt(text: str, question: str, tokenizer) -> str:
    """The prompt for a question about a text, in the form that the tokenizer's model knows.

    With a chat template it is a chat of one turn, after :data:`INSTRUCTION`. Without one the text is followed by
    ``Question:`` and ``Answer:``; a model that has learnt this form continues with a space, its answer and a newline.
    The text stands before the question: what was read of it serves all questions about it (see :func:`parts`).

    ``tokenizer(prompt)`` gives a token for the beginning of a text once, also where both the template and the
    tokenizer write it. So are control tokens that a text spells out (``<|im_end|>``): a chat is no fence around a
    text that somebody else has written.

    Raises
    ------
    ValueError
        The chat template does not repeat what is asked word for word.
    """
    return "".join(parts(text, question, tokenizer))


def parts(text: str, question: str, tokenizer) -> tuple[str, str]:
    """The two pieces of :func:`prompt`: up to the end of the text, and the question with what follows it."""
    if tokenizer.chat_template is None:
        return text, f"\n\nQuestion: {question}\nAnswer:"
    read = f"Text: {text}\n" if text else ""
    said = f"{read}Question: {question}\nShortest answer:"
    before, found, after = _chat(said, tokenizer).partition(said)
    if not found:
        raise ValueError(f"the chat template of {tokenizer.name_or_path!r} changes what is asked")
    return before + read, said[len(read) :] + after


def _chat(said: str, tokenizer) -> str:
    """One turn, rendered. A template without a place for a system line gets it at the head of the turn."""
    from jinja2 import TemplateError

    turns = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": said}]
    options = dict(tokenize=False, add_generation_prompt=True)
    try:
        rendered = tokenizer.apply_chat_template(turns, **options)
    except TemplateError:  # Gemma-2's refuses
        rendered = ""
    if INSTRUCTION not in rendered:  # others leave it out without a word
        turn = {"role": "user", "content": f"{INSTRUCTION}\n\n{said}"}
        rendered = tokenizer.apply_chat_template([turn], **options)
    if _writes_bos(tokenizer):  # it would stand there twice
        rendered = rendered.removeprefix(tokenizer.bos_token)
    return rendered


def _writes_bos(tokenizer) -> bool:
    """Whether the tokenizer itself puts a beginning of text in front."""
    start = tokenizer.bos_token_id
    return start is not None and tokenizer("a")["input_ids"][:1] == [start]


def token_ids(asked: str, tokenizer) -> list[int]:
    """The ids of what :func:`prompt` gave, with the one beginning of text that its form has."""
    ids = tokenizer(asked)["input_ids"]
    start = tokenizer.bos_token_id
    if tokenizer.chat_template is not None or start is None or ids[:1] == [start]:
        return ids
    return [start, *ids]  # a plain text, by a tokenizer that does not write it


def expected(passages: Iterable[tuple[str, str, str]], tokenizer, *, read: bool = False) -> list[Tokens]:
    """Prompts with the answers that are expected: what :func:`plpkg.scoring.score` scores are the answers alone.

    Parameters
    ----------
    passages
        A text, a question and its answer each.
    tokenizer
        A fast one.
    read
        The prompt is without the text: it was read before (the first of its :func:`parts`), and the score is given the
        ``reading``.

    Examples
    --------
    Each gives a :class:`plpkg.scoring.Score`, of the same tokens::

        asked = questions.expected(passages, tokenizer)
        score(model, tokenizer, asked, seq=1024)  # as many tokens as the longest prompt has, or it is cut to windows
        score(model, tokenizer, questions.expected(passages, tokenizer, read=True), reading=reading)
        counts.score(asked, token_log_probs(model, tokenizer, asked, seq=1024), weight)
    """
    chat = tokenizer.chat_template is not None
    documents = []
    for text, question, right in passages:
        before, after = parts(text, question, tokenizer)
        asked = after if read else before + after
        said = right if chat else f" {right}\n"
        documents.append(Document("", asked + said, masked=((0, len(asked)),)))
    return encode(documents, tokenizer, control_tokens=chat)


def first_line(written: str) -> str:
    """An answer out of what a model has written: its first line that is not empty."""
    return written.strip().partition("\n")[0].rstrip()


def answers(model, tokenizer, asked: Sequence[tuple[str, str]], *, batch: int = 16) -> list[str]:
    """The answers of a causal language model: its likeliest tokens up to the end of the line.

    Parameters
    ----------
    model, tokenizer
        The model and its tokenizer; the model's mode (training or evaluation) is left as it was.
    asked
        Pairs of a text and a question.
    batch
        Questions at a time.

    Raises
    ------
    ValueError
        ``batch`` out of range, or a prompt that leaves no room for an answer of :data:`LONGEST` tokens.
    """
    return [each.answer for each in readings(model, tokenizer, asked, batch=batch)]


@dataclass(frozen=True)
class Reading:
    """An answer, and how sure a model is of it.

    Attributes
    ----------
    answer
        The answer.
    log_prob
        Of all its tokens and its end together, in nats.
    unknown
        The log-probability, in nats, of an answer that begins as :data:`~plpkg.backbones.UNKNOWN` does.
    """

    answer: str
    log_prob: float
    unknown: float


@torch.inference_mode()
def readings(model, tokenizer, asked: Sequence[tuple[str, str]], *, batch: int = 16) -> list[Reading]:
    """As :func:`answers`, with how sure the model is: so several texts can be read, and the surest answer taken."""
    whole_number("batch", batch, 1)
    prompts = [token_ids(prompt(text, question, tokenizer), tokenizer) for text, question in asked]
    room = getattr(model.config, "max_position_embeddings", math.inf) - LONGEST
    longest = max(map(len, prompts), default=0)
    if longest > room:
        raise ValueError(f"a prompt has {longest} tokens, of which the model takes {room} before an answer")
    unknown = tokenizer(UNKNOWN, add_special_tokens=False)["input_ids"][0]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # alike lengths together: little padding
    found = {}
    with evaluating(model):
        for begin in range(0, len(order), batch):
            places = order[begin : begin + batch]
            written, logits = _generated(model, tokenizer, [prompts[i] for i in places])
            log_probs = logits.log_softmax(-1)  # (prompts, tokens, vocabulary)
            chosen = log_probs.gather(-1, written[..., None])[..., 0]  # (prompts, tokens)
            for row, i in enumerate(places):
                end = _length(written[row], model, tokenizer)
                found[i] = Reading(
                    answer=first_line(_decoded(written[row, :end], tokenizer)),
                    log_prob=float(chosen[row, :end].sum()),
                    unknown=float(log_probs[row, 0, unknown]),
                )
    return [found[i] for i in range(len(prompts))]


def _decoded(tokens: torch.Tensor, tokenizer) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


def _line_ended(tokens: torch.Tensor, tokenizer) -> bool:
    """Whether a line was written; newlines before it are no lines."""
    return "\n" in _decoded(tokens, tokenizer).lstrip()


def _length(tokens: torch.Tensor, model, tokenizer) -> int:
    """How many tokens were written until the line's or the text's end, the last of them included."""
    ends = model.generation_config.eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    for count in range(1, len(tokens) + 1):
        if int(tokens[count - 1]) in ends or _line_ended(tokens[:count], tokenizer):
            return count
    return len(tokens)


def _generated(model, tokenizer, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Write behind each prompt until all have ended: ``(prompts, tokens)``, and ``(prompts, tokens, vocab)`` logits."""
    from transformers import StoppingCriteria

    class AfterLine(StoppingCriteria):
        def __call__(self, input_ids, scores, **_) -> torch.Tensor:
            ended = [_line_ended(row[seq:], tokenizer) for row in input_ids]
            return torch.tensor(ended, device=input_ids.device)

    seq = max(map(len, rows))
    ids = torch.zeros(len(rows), seq, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, row in enumerate(rows):  # padding on the left: all answers begin at the same place
        ids[line, seq - len(row) :] = torch.tensor(row)
        mask[line, seq - len(row) :] = 1
    made = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=LONGEST,
        do_sample=False,
        num_beams=1,  # whatever the model's own settings say
        repetition_penalty=1.0,
        stopping_criteria=[AfterLine()],
        pad_token_id=tokenizer.pad_token_id or 0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return made.sequences[:, seq:].cpu(), torch.stack(made.logits, 1).float().cpu()


def answer(model, tokenizer, text: str, question: str) -> str:
    """The model's answer to one question; see :func:`answers`."""
    (only,) = answers(model, tokenizer, [(text, question)])
    return only


def interval(right: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, if what is counted is independent."""
    z = 1.959964
    share = right / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + (z / total) ** 2 / 4)
    scale = 1 + z * z / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


SMALL = frozenset(["a", "an", "are", "at", "in", "is", "it", "of", "on", "the", "to", "was"])
"""Words that make no answer another one."""


def words(text: str) -> list[str]:
    """The words by which answers are compared: lower case, without punctuation and :data:`SMALL` words.

    ``6:40`` and ``6.40`` are one word, and so are ``1,200`` and ``1200``, or ``Ida's`` and ``Ida``; ``1.5`` is not
    ``15``, nor is ``-5`` ``5``. Where nothing but small words is left ("on"), these stay, and so do signs ("@").
    """
    found = _all_words(text)
    if not found:
        return text.split()
    telling = [word for word in found if word not in SMALL]
    return telling or found


def _all_words(text: str) -> list[str]:
    """The words in lower case, small ones included; a number with its sign and its decimals is a word."""
    text = text.casefold().replace("\u2019", "'").replace("\u2212", "-")
    text = re.sub(r"(?<=\w)'s\b", "", text)  # Ida's
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)  # 1,200
    text = re.sub(r"(?<=\d):(?=\d)", ".", text)  # 6:40
    return re.findall(r"(?<![\w.])-\d[\w.]*\w|(?<![\w.])-\d|\d+(?:\.\d+)+\w*|\w+(?:'\w+)*", text)


def contains(said: str, value: str) -> bool:
    """Whether the words of a value stand in what was said, one after the other."""
    given = words(said)
    wanted = words(value)
    if not wanted:
        return False
    return any(given[i : i + len(wanted)] == wanted for i in range(len(given)))


def right(said: str, accepted: str | Iterable[str], others: Iterable[str] = ()) -> bool:
    """Whether an answer is right: the expected words stand in it, beside at most five others, and no other value.

    Parameters
    ----------
    said
        The answer.
    accepted
        The accepted answers: one of them has to stand there, its words one after the other.
    others
        Values that would answer otherwise: with one of them besides ("Tuesday or Friday"), nothing is answered.
    """
    accepted = [accepted] if isinstance(accepted, str) else list(accepted)
    length = len(_all_words(said))  # small words count: else who repeats a short note would be right
    short = [value for value in accepted if length <= len(_all_words(value)) + MOST_OTHERS]
    if not any(contains(said, value) for value in short):
        return False
    against = [other for other in others if not _part_of(other, accepted)]
    return not any(contains(said, other) for other in against)


def _part_of(other: str, accepted: Iterable[str]) -> bool:
    """Whether a value that is listed as another one is part of an accepted one: it says nothing against it."""
    return any(contains(value, other) for value in accepted)
