"""``plpkg cloud``, ``plpkg device`` and ``plpkg demo``; what they need is loaded when they run."""

import contextlib
import functools
import itertools
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from plpkg import catalog
from plpkg.imports import uncollected
from plpkg.signals import ended_by_signals
from plpkg.validation import host_and_port

app = typer.Typer()

Model = Annotated[str, Option(help="plpkg-small, a hub name, or a folder.")]
Like = Annotated[
    Path | None,
    Option(
        metavar="FOLDER", help="A new adapter with targets, ranks and seed of the one saved there, whose M is not read."
    ),
]
Adapter = Annotated[Path | None, Option(help="A folder with a saved adapter; else a new one of --rank.")]
Ladder = Annotated[
    bool, Option("--ladder", help="The adapter is a ladder, a new one with a random A: one trip a token.")
]
Rank = Annotated[int | None, Option(help="Of a new adapter, both ways; 64 by default.")]
Target = Annotated[
    list[str] | None, Option(help="Linear layers of a new adapter, down_proj say; by default q, k and v.")
]
Seed = Annotated[int | None, Option(help="Of a new adapter's A and B; 0 by default.")]
FirstK = Annotated[int, Option(help="Layers that the device keeps at the beginning.")]
LastK = Annotated[int, Option(help="Layers that the device keeps at the end.")]
Fold = Annotated[bool, Option("--fold", help="The last layer's exchange goes with its final hidden state.")]
Precision = Annotated[str, Option(help="Of the values on the wire: fp16, bf16 or fp32.")]
Dtype = Annotated[str, Option(help="Of the weights: fp16, bf16, fp32, or auto: the checkpoint's own.")]
Link = Annotated[str | None, Option(help="Let every message take this link's time: 5g, say.")]
Token = Annotated[str | None, Option(envvar="PLPKG_TOKEN", help="The bearer token; better through PLPKG_TOKEN.")]


@app.command()
def cloud(
    model: Model = "plpkg-small",
    listen: Annotated[str, Option(metavar="HOST:PORT", help="Port 0 takes a free one.")] = "127.0.0.1:7070",
    like: Like = None,
    adapter: Adapter = None,
    rank: Rank = None,
    target: Target = None,
    seed: Seed = None,
    ladder: Ladder = False,
    first_k: FirstK = 0,
    last_k: LastK = 0,
    fold: Fold = False,
    precision: Precision = "fp16",
    dtype: Dtype = "fp32",
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    tls: Annotated[Path | None, Option(help="A folder with cert.pem and key.pem: see docs/tour.md.")] = None,
    token: Token = None,
    sessions: Annotated[int, Option(help="Devices at the same time.")] = 16,
    tokens: Annotated[int, Option(help="The longest sequence.")] = 4096,
) -> None:
    """Serve a model's decoder layers to devices that keep embedding, LM head and their M."""
    require_free(listen)  # before a model is loaded
    with uncollected():
        from plpkg.residual import CloudServer, Limits, release
        from plpkg.residual.programs.loading import adapted_model

    new: dict[str, Any] = dict(rank=rank, ladder=ladder, like=like, targets=target, seed=seed)
    limits = Limits(sessions=sessions, tokens=tokens)
    cut: dict[str, Any] = dict(first_k=first_k, last_k=last_k, fold=fold, precision=precision)
    with ended_by_signals():
        adapted, _ = adapted_model(model, adapter, dtype, device, **new)
        server = CloudServer(adapted, listen, tls=tls, token=token, limits=limits, **cut)
        release(adapted, server.part)
        with server:
            try:
                typer.echo(f"listening on {server.address}; end with Ctrl+C")
                server.wait()
            except KeyboardInterrupt:
                typer.echo(repr(server.traffic))


def require_free(address: str) -> None:
    """OSError if nothing can listen there."""
    host, port = host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        if os.name == "posix":  # a connection that has just ended is in nobody's way
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OSError(f"{address} cannot be bound: {error.strerror}") from error


device_app = typer.Typer(no_args_is_help=True, help="Use a model whose decoder layers a cloud has.")
app.add_typer(device_app, name="device")


@device_app.callback()
def device(
    context: typer.Context,
    connect: Annotated[str | None, Option(metavar="HOST:PORT", help="The cloud; needed.")] = None,
    model: Model = "plpkg-small",
    like: Like = None,
    adapter: Adapter = None,
    rank: Rank = None,
    target: Target = None,
    seed: Seed = None,
    ladder: Ladder = False,
    first_k: FirstK = 0,
    last_k: LastK = 0,
    fold: Fold = False,
    precision: Precision = "fp16",
    ca: Annotated[Path | None, Option(help="The certificate to trust: the cloud's cert.pem.")] = None,
    token: Token = None,
    link: Link = None,
    retry: Annotated[float, Option(metavar="SECONDS", help="How long to try to reach a cloud that was lost.")] = 30.0,
) -> None:
    """Use a model whose decoder layers a cloud has."""
    new = dict(rank=rank, ladder=ladder, like=like, targets=target, seed=seed)
    cut = dict(first_k=first_k, last_k=last_k, fold=fold, precision=precision)
    settings = cut | dict(ca=ca, token=token, link=link, retry_s=retry)
    context.obj = functools.partial(client_of, connect, model, adapter, new, settings)


@contextlib.contextmanager
def client_of(connect: str | None, name: str, adapter: Path | None, new: dict, settings: dict) -> Iterator[tuple]:
    """A device's client, the adapted model with nothing but the device's tensors, and its tokenizer.

    The checkpoint keeps its own type until the cloud's layers are gone: what is not used stays in the file.
    """
    if connect is None:
        raise ValueError("--connect HOST:PORT is needed: the cloud")
    with uncollected():
        from plpkg.residual import DeviceClient, RefusedError, release
        from plpkg.residual.programs.loading import adapted_model

    model, tokenizer = adapted_model(name, adapter, "auto", "cpu", **new)
    with DeviceClient(connect, model, **settings) as client:
        release(model, client.part, adapter_name=client.adapter_name)
        client.part.float()
        if client.link is not None and not client.terms.late:  # whose answers overlap
            trips = len(client.part.matrices) + 1
            least = trips * client.link.rtt_s
            typer.echo(f"{client.link.name}: {trips} round trips a token, at least {least:.2g} s", err=True)
        client.on_silence = lambda sentence: typer.echo(f"\n{sentence}", err=True)
        try:
            yield client, model, tokenizer
        except RefusedError as refused:
            error = ConnectionError(f"{connect} refuses --model {name}: {refused.details}")
            for note in getattr(refused, "__notes__", ()):
                error.add_note(note)
            raise error from refused
        except KeyboardInterrupt as stop:
            typer.echo("\n" + "\n".join(getattr(stop, "__notes__", ())), err=True)
            raise


@device_app.command()
def chat(
    context: typer.Context,
    max_new_tokens: Annotated[int, Option(help="At most.")] = 128,
    temperature: Annotated[float, Option(help="0 takes the most probable token.")] = 0.7,
    top_p: Annotated[float, Option(help="Sample among the most probable tokens with this share.")] = 0.95,
    stop: Annotated[
        list[str] | None, Option(metavar="TEXT", help="Ends an answer that comes to it. Repeatable.")
    ] = None,
    draft: Annotated[
        str,
        Option(
            help="Who guesses the next tokens, to save round trips: none, lookup or public. The cloud gets all guesses."
        ),
    ] = "none",
    draft_tokens: Annotated[int, Option(help="At most so many guesses at once.")] = 6,
) -> None:
    """Answer every line of standard input."""
    with uncollected():
        from plpkg.residual import drafts
        from plpkg.residual.programs.chat import answer_lines, lines_of
    from plpkg.validation import one_of

    one_of("draft", draft, ("none", *drafts.NAMES))
    sampling: dict[str, Any] = dict(do_sample=temperature != 0, temperature=temperature, top_p=top_p)
    guessing: dict[str, Any] = dict(draft=None if draft == "none" else draft, draft_tokens=draft_tokens)
    with context.obj() as (client, _, tokenizer):
        answer_lines(client, tokenizer, lines_of(), max_new_tokens, stop_strings=stop or None, **guessing, **sampling)
        typer.echo(repr(client.traffic), err=True)


@device_app.command()
def train(
    context: typer.Context,
    text: Annotated[str, Argument(help="A text file, a folder of them, or writer:numpy.")],
    out: Annotated[Path, Argument(help="A folder for adapter and checkpoint. An unfinished run goes on.")],
    steps: Annotated[int, Option(help="Updates.")] = 200,
    batch: Annotated[int, Option(help="Windows in a pass.")] = 4,
    seq: Annotated[int, Option(help="Tokens in a window.")] = 256,
    accumulate: Annotated[int, Option(help="Passes in an update.")] = 1,
    lr: Annotated[float, Option(help="Learning rate.")] = 5e-3,
) -> None:
    """Personalise M. Text, labels and M are not sent; embeddings, M's answers and gradients are.

    From these a cloud can read the text, and compute M.
    """
    with uncollected():
        from plpkg.residual import training

    documents = training.texts(text)
    held_out = training.texts(text, "validation")
    with context.obj() as (client, model, tokenizer):
        trained = training.train(
            client, model, tokenizer, documents, out,
            held_out=held_out, steps=steps, batch=batch, seq=seq, accumulate=accumulate, lr=lr,
        )  # fmt: skip
        typer.echo(repr(trained))
        typer.echo(repr(client.traffic), err=True)


@app.command()
def demo(
    model: Annotated[str, Option(help="smollm2, plpkg-small, a hub name, or a folder.")] = "smollm2",
    link: Link = None,
    own: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Learn your own .txt and .md files, some minutes long, and continue sentences of theirs. What was "
            "learnt is kept in the folder. Questions about notes are answered by plpkg ask.",
        ),
    ] = None,
    once: Annotated[bool, Option("--once", help="Ask a few questions and end, as where nobody can type.")] = False,
    svg: Annotated[Path | None, Option(hidden=True, help="Draw what is printed into this file.")] = None,
) -> None:
    """A model divided between two processes: what is where, what crosses, and what the cloud reads.

    Questions are typed, or come by standard input, one a line.
    """
    # Two processes take turns, and OpenMP's waiting threads would keep the other's cores: torch reads this once.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rich.console import Console

    console = Console(record=svg is not None, width=svg and 100, force_terminal=False if svg else None)
    with uncollected():
        from plpkg.residual.programs import demo
        from plpkg.residual.programs.curious import CuriousCloud

    documents = []
    if own is not None:
        documents = demo.notes(own)  # before a model is loaded
        console.print(demo.ABILITY)
    console.print("Starting two processes: the device is this one, the cloud another; a socket is between them.")
    diary = None  # an M that knows it, for models that have learnt it
    if model in demo.DIARY_ADAPTERS:
        diary = catalog.data_path(demo.DIARY_ADAPTERS[model])
    with CuriousCloud(model, diary) as cloud:  # it loads while this process does
        folder = None if own is None else demo.kept_in(own, model, documents)
        kept = folder or diary
        learnt = kept is not None and (kept / "adapter_config.json").exists()
        saved = kept if learnt else None
        new = {} if learnt else dict(like=diary)
        with client_of(cloud.facts["address"], model, saved, new, dict(link=link)) as opened:
            client, adapted, tokenizer = opened
            examples = demo.asked_of_diary()
            if folder is not None:
                examples = demo.beginnings(documents)
                if not learnt:
                    demo.learn(console, client, adapted, tokenizer, documents, folder)
                console.print(f"What was learnt is in {folder}", highlight=False, markup=False, soft_wrap=True)
            lines = examples if once else given(examples, console)
            turns = (demo.Turn(line, is_beginning=own is not None) for line in lines)
            demo.run(console, client, tokenizer, cloud, turns, personal=kept is not None)
    if svg is not None:
        drawn = console.export_svg(title="plpkg demo")
        without_font = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.S)  # which it would fetch
        svg.write_text(without_font, encoding="utf-8")


def given(examples: list[str], console) -> Iterator[str]:
    """The lines of standard input; the examples, if it has none. A person at a terminal ends with an empty line."""
    from plpkg.residual.programs.chat import lines_of

    if sys.stdin is None:
        yield from examples
    elif sys.stdin.isatty():
        console.print(f"Type a line, or an empty one to end. For example: {examples[0]}", markup=False)
        yield from itertools.takewhile(str.strip, lines_of())
    else:
        is_empty = True
        for line in filter(str.strip, lines_of()):
            is_empty = False
            yield line
        if is_empty:
            yield from examples
