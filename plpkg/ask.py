"""``plpkg ask``: questions about a folder of notes, answered on this machine beside the passage that says so.

:class:`plpkg.search.Search` finds passages, a language model answers from each of the best, and the surest answer is
shown with its passage, read from the file at that moment. No note and no question leaves the machine.

What is weighed and doubted here was chosen on two hands of notes (``benchmarks/backbones/asking.py``, sections
``order`` and ``absent``).
"""

import contextlib
import io
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from plpkg import questions
from plpkg.backbones import load_backbone
from plpkg.files.untrusted import printable
from plpkg.passages import read_folder
from plpkg.questions import Reading
from plpkg.search import Found, Search

NUM_PASSAGES = 3
"""Passages that are found, read for an answer, each alone, and named beside it."""
SEARCH = 8.0
"""Nats of an answer's log-probability that weigh as much as 1 of search's score."""
DOUBT = -0.88
"""The log-probability of "unknown" from which on an answer is doubted: one of ten right answers is, and about half of
those to questions that no note answers. An answer with a word that its passage does not have is doubted as well, which
was measured to doubt no further right one.
"""
FOLLOWS = re.compile(r"(and|but|or|so|then|what about|how about)\b", re.IGNORECASE)
"""How a question begins that goes on from the one before it."""


class Reader:
    """A language model on this machine."""

    def __init__(self, name: str) -> None:
        self._model, self._tokenizer = load_backbone(name)

    def __call__(self, texts: list[str], question: str) -> list[Reading]:
        """Read texts, each alone, and answer from each."""
        pairs = [(text, question) for text in texts]
        return questions.readings(self._model, self._tokenizer, pairs)


class Split:
    """The model whose decoder layers another process has, which reads along: what a cloud would have seen."""

    def __init__(self, cloud, client, tokenizer) -> None:
        self._cloud = cloud
        self._client = client
        self._tokenizer = tokenizer

    @classmethod
    @contextlib.contextmanager
    def opened(cls, name: str) -> Iterator["Split"]:
        """Start the process, and end it."""
        from plpkg.residual.programs.commands import client_of
        from plpkg.residual.programs.curious import CuriousCloud

        with (
            CuriousCloud(name) as cloud,
            client_of(cloud.facts["address"], name, None, {}, dict(link=None)) as (client, _, tokenizer),
        ):
            yield cls(cloud, client, tokenizer)

    def __call__(self, texts: list[str], question: str) -> str:
        """Read texts, each alone; the traffic in words, and what the layers' process has read meanwhile."""
        self._cloud.read()  # what it knows of an earlier question is not counted
        before = self._client.traffic
        sent = 0  # tokens whose layers the process has computed
        read = 0  # those of them that it has told rightly
        its_texts = []
        for text in texts:
            asked = questions.token_ids(questions.prompt(text, question, self._tokenizer), self._tokenizer)
            whole = self._client.generate(torch.tensor([asked]), questions.LONGEST)[0].tolist()
            seen = self._cloud.read()
            through_layers = whole[:-1]  # the last token of an answer goes nowhere
            sent += len(through_layers)
            read += sum(mine == theirs for mine, theirs in zip(through_layers, seen["tokens"], strict=False))
            its_texts.append(seen["text"])
        crossed = self._client.traffic - before
        up = crossed.sent_message_bytes / 1000
        down = crossed.received_message_bytes / 1000
        traffic = f"{up:.0f} kB went up and {down:.0f} kB down in {crossed.round_trips} round trips"
        return f"{traffic}; of {sent} tokens the cloud read {read}:\n" + "\n\n".join(its_texts)


@dataclass(frozen=True)
class Answer:
    """An answer, the passage that it was read from, and the other passages that were read, the best first.

    ``doubtful`` says that the notes may not say it.
    """

    question: str
    answer: str
    found: Found
    others: tuple[Found, ...]
    doubtful: bool

    @property
    def texts(self) -> list[str]:
        """All that was read."""
        return [each.passage.read for each in (self.found, *self.others)]

    def fields(self) -> dict:
        """One object of ``--json``."""
        return {
            "question": self.question,
            "answer": self.answer,
            "passage": self.found.passage.text,
            **_place(self.found),
            "others": [_place(other) for other in self.others],
            "doubtful": self.doubtful,
        }


def _place(found: Found) -> dict:
    """Where a passage stands, and its score."""
    return {"file": str(found.passage.file), "line": found.passage.line, "score": round(found.score, 4)}


def answered(question: str, search: Search, read: Callable[[list[str], str], list[Reading]]) -> Answer:
    """Search, read each passage, and take the surest answer; anew if a file was changed meanwhile."""
    while True:
        found = search.find(question, NUM_PASSAGES)
        if not found:
            raise ValueError(f"{search.folder} has nothing to read any more")
        readings = read([each.passage.read for each in found], question)
        if all(search.still_says(each.passage) for each in found):
            break
    best = surest([each.score for each in found], readings)
    others = tuple(each for i, each in enumerate(found) if i != best)
    doubtful = doubted(readings[best], found[best].passage.read)
    return Answer(question, readings[best].answer, found[best], others, doubtful)


def doubted(reading: Reading, text: str) -> bool:
    """Whether the text may not say this: its reader nearly answered "unknown", or a word is not the text's."""
    invented = {*questions.words(reading.answer)} - {*questions.words(text)}
    return reading.unknown > DOUBT or bool(invented)


def surest(scores: list[float], readings: list[Reading], weight: float = SEARCH) -> int:
    """The number of the passage to believe, by search's score and by the likelihood of what was read from it."""
    together = [weight * score + reading.log_prob for score, reading in zip(scores, readings, strict=True)]
    return together.index(max(together))


def with_the_one_before(question: str, before: str | None) -> str:
    """A follow-up question ("and until when?") together with the question that it goes on from."""
    if before is None or not FOLLOWS.match(question):
        return question
    return f"{before} {question}"


def lines(terminal: bool) -> Iterator[str]:
    """The questions of standard input, asked for on a terminal; empty ones are passed over."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no character ends nothing
    while True:
        if terminal:
            print("\nquestion: ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def show(answer: Answer) -> None:
    """Print an answer for a person."""
    passage = answer.found.passage
    typer.echo(typer.style(printable(answer.answer) or "(no answer)", bold=True))
    if answer.doubtful:
        typer.echo("(the notes may not say)")
    typer.echo(f"\n{printable(str(passage.file))}, line {passage.line}:")
    for line in printable(passage.text).split("\n"):
        typer.echo(f"  {line}")
    places = [f"{printable(str(each.passage.file))}, line {each.passage.line}" for each in answer.others]
    if places:
        typer.echo(f"next: {'; '.join(places)}")


def unread(skipped: dict[Path, str], most: int = 5) -> str:
    """The files that are not read and why, in one line a reason."""
    by_reason = defaultdict(list)
    for file, reason in skipped.items():
        by_reason[reason].append(printable(str(file)))
    said = []
    for reason, files in by_reason.items():
        more = f" and {len(files) - most} more" if len(files) > most else ""
        said.append(f"not read ({reason}): {', '.join(files[:most])}{more}")
    return "\n".join(said)


def run(folder: Path, question: str | None, *, as_json: bool, split: bool, model: str) -> None:
    """Answer one question, or those of standard input; what is wrong is refused before a model is loaded."""
    if question is not None and not question.strip():
        raise ValueError("the question is empty")
    passages, skipped = read_folder(folder)
    if skipped:
        typer.echo(unread(skipped), err=True)
    if not passages:
        raise ValueError(f"{folder} has no .txt or .md file with something to read")
    with contextlib.ExitStack() as stack:
        read = Reader(model)
        as_a_cloud = stack.enter_context(Split.opened(model)) if split else None
        search = Search(folder)
        terminal = sys.stdin is not None and sys.stdin.isatty()
        asked = lines(terminal) if question is None else [question.strip()]
        before = None  # the last question that stood on its own
        for line in asked:
            whole = with_the_one_before(line, before)
            if whole == line:
                before = line
            answer = answered(whole, search, read)
            cloud = as_a_cloud(answer.texts, whole) if as_a_cloud else None
            if as_json:
                fields = answer.fields() | {"question": line}
                if cloud:
                    fields["cloud"] = cloud
                typer.echo(json.dumps(fields, ensure_ascii=False))
            else:
                show(answer)
                if cloud:
                    typer.echo(f"\nas a cloud: {printable(cloud)}")
