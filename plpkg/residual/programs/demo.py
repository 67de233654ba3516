"""``plpkg demo``: what is where, what crosses for a question, and what the cloud reads of it.

What is computed (:func:`places`, :func:`ask`, :func:`learn`) knows nothing of the terminal; what is drawn
(:func:`placed`, :func:`turned`) gets what was computed.
"""

import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from plpkg import corpora
from plpkg.corpora import Document, Writer
from plpkg.corpora.folder import text_files
from plpkg.files.untrusted import printable
from plpkg.residual.cut.device_part import DevicePart
from plpkg.residual.programs.chat import beginning, prompt
from plpkg.residual.programs.curious import CuriousCloud
from plpkg.residual.programs.training import train
from plpkg.residual.wire.device import DeviceClient
from plpkg.residual.wire.messages import Counter

TOKENS = 16
"""Of an answer, at most."""
WITH, WITHOUT = "with M", "without M"
DIARY_ADAPTERS = {"smollm2": "diary/smollm2", "plpkg-small": "diary/adapter"}
"""In ``data/``, for each model that has learnt the diary."""
ABILITY = (
    "From your notes it learns to continue their sentences: type how one begins. It does not learn to answer "
    "questions about them; plpkg ask does."
)
"""Of what ``--own`` learns."""
KEPT = ".plpkg-demo"
"""In the folder of notes: hidden, and so no note itself."""
LEAST_CHARACTERS = 200
"""Of notes that are learnt, white space between words counted as one character: fewer give no batch of windows."""
LEARNING: dict[str, Any] = dict(batch=4, lr=1e-2, warmup=5)
FEWEST_STEPS, MOST_STEPS, PASSES = 40, 120, 15
"""Notes are read 15 times, in at least 40 steps, however short, and at most 120: a step takes SmolLM2 some four seconds
of two cores."""


@dataclass(frozen=True)
class Place:
    """A part of the model, and the bytes of it on each side."""

    name: str
    device_bytes: int = 0
    cloud_bytes: int = 0


@dataclass
class Turn:
    """A question, as far as it is answered.

    Attributes
    ----------
    question, answers
        The question; and its answers, with M and without.
    is_beginning
        The question is the beginning of a text, and an answer what follows it; else it is a turn of a chat.
    traffic, seconds
        Of the latest answer.
    read
        The text that the cloud has read off what crossed for the latest answer, and for its question.
    right, crossed
        How many tokens it has right, and how many crossed.
    """

    question: str
    answers: dict[str, str] = field(default_factory=dict)
    is_beginning: bool = False
    traffic: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    read: str = ""
    right: int = 0
    crossed: int = 0


def places(part: DevicePart, cloud: dict) -> list[Place]:
    """Parts that the device holds, and that the cloud says it does; a tied LM head is no tensor of its own."""
    embedding = part.embedding.weight
    head = part.lm_head.weight
    if head.data_ptr() == embedding.data_ptr():
        ends = [Place("embedding, and LM head (the same weights)", device_bytes=embedding.nbytes)]
    else:
        ends = [Place("embedding", device_bytes=embedding.nbytes), Place("LM head", device_bytes=head.nbytes)]
    every_m = list(part.matrices.parameters())
    m_bytes = sum(m.nbytes for m in every_m)
    return [
        *ends,
        Place(f"M: {len(every_m)} small matrices, the personal part", device_bytes=m_bytes),
        Place("decoder layers", cloud_bytes=cloud["layers"]),
        Place("A and B: random, not secret", cloud_bytes=cloud["bases"]),
    ]


@contextlib.contextmanager
def without_m(part: DevicePart) -> Iterator[None]:
    """Within it every M is zero: the public model."""
    kept = [(m, m.detach().clone()) for m in part.matrices.parameters()]
    with torch.no_grad():
        for m, _ in kept:
            m.zero_()
        try:
            yield
        finally:
            for m, values in kept:
                m.copy_(values)


def ask(client: DeviceClient, tokenizer, cloud: CuriousCloud, turn: Turn, labels: Iterable[str]) -> None:
    """Answer a question as each of ``labels`` says, and ask the cloud what it has read; ``turn`` grows meanwhile."""
    if turn.is_beginning:
        ids = beginning(tokenizer, turn.question)
    else:
        ids = prompt(tokenizer, [{"role": "user", "content": turn.question}])
    for label in labels:
        cloud.read()  # and forget
        as_public = without_m(client.part) if label == WITHOUT else contextlib.nullcontext()
        with as_public:
            written = client.generate(ids, TOKENS, on_token=_adding(client, tokenizer, turn, label))
    crossed = written[0, :-1].tolist()  # nothing follows the last token: it stays on the device
    read = cloud.read()
    turn.right = sum(mine == theirs for mine, theirs in zip(crossed, read["tokens"], strict=False))
    turn.crossed = len(crossed)
    turn.read = read["text"]


def _adding(client: DeviceClient, tokenizer, turn: Turn, label: str) -> Callable[[torch.Tensor], None]:
    """A function to call with each token of an answer."""
    written: list[int] = []
    before = client.traffic
    began = time.perf_counter()

    def on_token(token: torch.Tensor) -> None:
        written.append(int(token))
        turn.traffic = client.traffic - before
        turn.seconds = time.perf_counter() - began
        turn.answers[label] = tokenizer.decode(written, skip_special_tokens=True)

    return on_token


def notes(folder: Path) -> list[Document]:
    """The notes of a folder, which are enough to learn from.

    Raises
    ------
    ValueError, OSError
        No such folder, no text in it, or fewer than :data:`LEAST_CHARACTERS`.
    """
    documents = text_files(folder)
    words: list[str] = []
    for document in documents:
        words += document.text.split()
    size = len(" ".join(words))
    if size < LEAST_CHARACTERS:
        raise ValueError(f"the notes in {folder} have {size} characters; {LEAST_CHARACTERS} are needed to learn from")
    return documents


def kept_in(own: Path, model: str, documents: list[Document]) -> Path:
    """Where an M for these notes and this model is kept: other notes, another folder."""
    text = Writer("device", {"train": tuple(documents)}).fingerprint("train")
    return own / KEPT / hashlib.sha256(f"{model} {text}".encode()).hexdigest()[:12]


def learn(console: Console, client: DeviceClient, model, tokenizer, documents: list[Document], out: Path) -> None:
    """Train M on notes over the wire, windows as long as they allow."""
    tokens = sum(map(len, corpora.encode(documents, tokenizer)))
    seq = max(8, min(64, tokens // (LEARNING["batch"] + 1)))
    tokens_per_step = LEARNING["batch"] * seq
    steps = max(FEWEST_STEPS, min(MOST_STEPS, math.ceil(PASSES * tokens / tokens_per_step)))
    passes = steps * tokens_per_step / tokens
    console.print(f"The notes have {tokens:,} tokens. Each is learnt about {passes:.1f} times.")
    if passes < 10:
        console.print("That is too seldom to know them by heart: expect their manner, not their facts.")
    console.print(repr(train(client, model, tokenizer, documents, out, steps=steps, seq=seq, **LEARNING)))


def asked_of_diary() -> list[str]:
    """Questions when nobody types: three of the diary's first five."""
    return [question.question for question in corpora.diary().questions[4::-2]]


def beginnings(documents: list[Document]) -> list[str]:
    """How the first three paragraphs of notes begin."""
    begun: list[str] = []
    for document in documents:
        for paragraph in document.text.split("\n\n"):
            words = paragraph.split()
            if words:
                begun.append(" ".join(words[:6]))
    return begun[:3]


def placed(rows: Iterable[Place]) -> Table:
    """The table of what is where."""
    table = Table(title="What is where, MiB", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column()
    table.add_column("device", justify="right")
    table.add_column("cloud", justify="right")
    for row in rows:
        sizes = (f"{size / 2**20:.2f}" if size else "" for size in (row.device_bytes, row.cloud_bytes))
        table.add_row(row.name, *sizes)
    return table


def turned(turn: Turn) -> Table:
    """A question, its answers, what crossed for the last of them, and what the cloud read of it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=14)
    table.add_column(overflow="fold")
    table.add_row("beginning" if turn.is_beginning else "question", _line(turn.question, "bold"))
    for label, answer in list(turn.answers.items()):  # another thread adds to them
        table.add_row(label, _line(answer, "bold green" if label == WITH else "yellow"))
    if turn.answers:
        crossed = turn.traffic
        up = crossed.sent_message_bytes / 1000
        down = crossed.received_message_bytes / 1000
        table.add_row("crossed", f"{up:.1f} kB up, {down:.1f} kB down, {crossed.round_trips} round trips")
        table.add_row("", f"{crossed.tokens} tokens, {crossed.tokens / turn.seconds:.1f} tokens/s")
    if turn.read:
        table.add_row("the cloud read", _line(turn.read, "bold red"))
        table.add_row("", f"{turn.right} of {turn.crossed} tokens right")
    table.add_row()
    return table


def _line(text: str, style: str) -> Text:
    """Text of a model on one line, and without what a terminal would obey."""
    return Text(" ".join(printable(text).split()), style=style)


def run(
    console: Console, client: DeviceClient, tokenizer, cloud: CuriousCloud, turns: Iterable[Turn], *, personal: bool
) -> None:
    """Show what is where, then answer question after question, without M and, if it is ``personal``, with it."""
    console.print(placed(places(client.part, cloud.facts)))
    console.print("What the cloud reads is worked out in its process, from what came through the socket alone.\n")
    for turn in turns:
        with Live(get_renderable=functools.partial(turned, turn), console=console, refresh_per_second=8):
            ask(client, tokenizer, cloud, turn, (WITHOUT, WITH) if personal else (WITHOUT,))
        if not console.is_terminal:  # on one, Live ends the line itself
            console.print()
