"""``plpkg serve``; what it needs is loaded when it runs."""

import asyncio
import contextlib
import functools
import os
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from plpkg.imports import uncollected
from plpkg.signals import ended_by_signals

app = typer.Typer()

LOOPBACK = ("127.0.0.1", "localhost")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": "auto"}


@app.command()
def serve(
    model: Annotated[str, Option(help="plpkg-small, a hub name, or a folder.")] = "plpkg-small",
    store: Annotated[
        str | None,
        Option(metavar="DIR|URL", help="Where adapters are kept: a folder, s3://…; else they go with the service."),
    ] = None,
    listen: Annotated[str, Option(metavar="HOST:PORT", help="Port 0 takes a free one.")] = "127.0.0.1:8000",
    adapter: Annotated[
        list[Path] | None, Option(help="A PEFT folder to begin with; its name is the adapter's, in account local.")
    ] = None,
    replicas: Annotated[int, Option(min=1, help="Processes that have the model; more than one by Ray Serve.")] = 1,
    slots: Annotated[int, Option(help="Adapters in use at a time, in each.")] = 16,
    batch: Annotated[int, Option(help="Requests that run at a time, in each.")] = 32,
    positions: Annotated[
        int, Option(help="Tokens of the prompts and answers that run at a time, in each: they take memory.")
    ] = 2**16,
    max_queued: Annotated[
        int, Option(help="Requests that wait, in each; with keys at most a quarter of them are one account's.")
    ] = 1024,
    max_model_len: Annotated[
        int | None, Option(help="The most tokens of a text, prompt and answer; else as many as the model can.")
    ] = None,
    shared_mib: Annotated[
        int, Option(min=0, help="MiB of keys and values that are kept for prompts that begin alike, in each.")
    ] = 1024,
    limits: Annotated[
        str | None, Option(help="Of adapters: workers_ai_launch, workers_ai_today; else what is safe.")
    ] = None,
    disk: Annotated[
        str | None, Option(metavar="DIR", help="A folder for downloads; else they go with the service.")
    ] = None,
    dtype: Annotated[str, Option(help="Of the weights: fp16, bf16, fp32, or auto: the checkpoint's own.")] = "fp32",
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    grace: Annotated[
        float, Option(min=0, help="Seconds from SIGTERM to its end, in which answers go on; a second signal ends them.")
    ] = 20,
    cors: Annotated[
        list[str] | None,
        Option(metavar="ORIGIN", help="Pages that browsers let in, as https://chat.example.org; * with keys only."),
    ] = None,
) -> None:
    """Serve a model and many LoRA adapters of it, as OpenAI's clients ask for them.

    PLPKG_KEYS names a file of lines ACCOUNT KEY. Without it, all programs on this machine are the account local.
    """
    try:
        with uncollected():
            from plpkg.adapters import validate_adapter
            from plpkg.serving.service import Store
            from plpkg.serving.service.http import api
            from plpkg.serving.service.http.accounts import LOCAL, Keys
            from plpkg.serving.service.http.listener import Server
            from plpkg.serving.service.places import folder_of, require_apart, temporary_folder, temporary_folders

            if replicas > 1:
                from plpkg.serving.service.replicas import replicated
    except ModuleNotFoundError as error:
        extra = "serve,scale" if replicas > 1 else "serve"
        raise ValueError(f"plpkg serve needs {error.name}: pip install 'plpkg[{extra}]'") from None
    host, _, port = listen.rpartition(":")
    keys = None
    if os.environ.get("PLPKG_KEYS"):
        keys = Keys.read(os.environ["PLPKG_KEYS"])
    if keys is None and host not in LOOPBACK:
        raise ValueError(f"without PLPKG_KEYS only {' or '.join(LOOPBACK)} may be listened on, got {listen!r}")
    if not port.isdecimal():
        raise ValueError(f"listen must be HOST:PORT, got {listen!r}")
    folders = adapter or []
    if folders and keys and not keys.knows(LOCAL):
        typer.echo(f"nobody's key is of the account {LOCAL!r}, to which adapters given here belong", err=True)
    read = {"model": Path(model)} if Path(model).is_dir() else {}
    read |= {f"adapter {each.name}": each for each in folders}
    read["TMPDIR"] = Path(tempfile.gettempdir())
    downloads = folder_of(disk)
    if downloads is None and disk:
        raise ValueError(f"disk must be a folder, got {disk!r}")
    emptied = {f"temporary folder {each.name}": each for each in temporary_folders()}
    require_apart({"disk": downloads, "store": folder_of(store)} | emptied, read)
    if replicas > 1 and (store or "").startswith("memory:"):
        raise ValueError(f"store={store!r} is each process's own: several replicas need one that all reach")
    taken = [str(each) for each in folders if each.resolve().name == model]
    if taken:
        raise ValueError(f"an adapter must not have the model's name, got {', '.join(taken)}")
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((host, int(port))))
        stack.enter_context(ended_by_signals())
        scratch = stack.enter_context(temporary_folder())
        location = store or str(scratch / "store")
        downloads = downloads or scratch / "disk"
        base, tokenizer = loaded(model, dtype, device)
        kept = Store(location)
        options: dict[str, Any] = dict(
            limits=limits,
            slots=slots,
            batch=batch,
            positions=positions,
            max_queued=max_queued,
            shared_bytes=2**20 * shared_mib,
            max_model_len=max_model_len,
        )
        if replicas > 1:
            build = functools.partial(replica_of, model, dtype, device, location, downloads, **options)
            say = functools.partial(typer.echo, err=True)
            backend = stack.enter_context(replicated(build, replicas, ongoing=2 * batch, say=say))
            stack.enter_context(ended_by_signals())  # Ray has taken SIGTERM
            base = base.to("meta")  # its modules and configuration are read here, nothing else
        else:
            backend = replica(base, tokenizer, kept, downloads, **options)
        asyncio.run(swept(kept))
        for folder in folders:
            try:
                checked = validate_adapter(folder, base, limits)
            except ValueError as error:
                raise ValueError(f"--adapter {folder}: {error}") from None
            asyncio.run(kept.put(LOCAL, folder.resolve().name, checked))
        service = api.app(
            backend, kept, base, tokenizer,
            name=model, keys=keys, limits=limits, origins=cors or (), max_model_len=max_model_len,
        )  # fmt: skip
        _, port, *_ = listening.getsockname()  # 0 has become a free one
        ready = functools.partial(typer.echo, f"serving {model} on http://{host}:{port}")
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended well, and hands it on
            Server(service, grace, ready).run([listening])


async def swept(store) -> None:
    """Remove what killed uploads have left in a store, if it answers soon: each upload does so too, in its account."""
    with contextlib.suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(10):
            await store.sweep()


def loaded(model: str, dtype: str, device: str) -> tuple[Any, Any]:
    """A model by the names of the command line, and its tokenizer."""
    import torch

    from plpkg.backbones import load_backbone
    from plpkg.validation import one_of

    name = DTYPES[one_of("dtype", dtype, tuple(DTYPES))]
    chosen = name if name == "auto" else getattr(torch, name)
    return load_backbone(model, dtype=chosen, device=device)


def replica(base, tokenizer, store, disk, *, limits, slots: int, batch: int, positions: int, max_queued: int, **engine):
    """A replica of a model."""
    from plpkg.serving import Engine
    from plpkg.serving.service import Replica, Scheduler, Tiers
    from plpkg.serving.service.tiers import Disk

    served = Engine(base, tokenizer, max_batch=batch, max_step_tokens=max(512, batch), **engine)
    shared = bool(os.environ.get("PLPKG_KEYS"))  # by several accounts
    each = max(1, max_queued // 4) if shared else None
    scheduler = Scheduler(slots, batch, positions, max_queued, each)
    tiers = Tiers(store, base, limits=limits, shared=shared, disk=Disk(disk))
    return Replica(served, tiers, scheduler)


def replica_of(model: str, dtype: str, device: str, location: str, disk, **options):
    """A replica, in a process of its own."""
    from plpkg.serving.service import Store

    return replica(*loaded(model, dtype, device), Store(location), disk, **options)
