"""The command line: ``plpkg doctor``, ``plpkg pretrain``, ``plpkg cloud`` and ``plpkg device``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

import plpkg
from plpkg import doctor as doctors

app = typer.Typer(no_args_is_help=True, add_completion=False, help=plpkg.__doc__.splitlines()[0])
ERRORS = (ValueError, OSError, FloatingPointError, OverflowError)
"""What a command says in one line; anything else is a defect."""

COLOURS = {"OK": "green", "NOTE": "cyan", "SKIP": "yellow", "FAIL": "bold red"}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"plpkg {plpkg.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """The mechanisms behind private, personal language models."""


@app.command()
def doctor() -> None:
    """Check the installation: one line a requirement; exits with 1 if one fails."""
    report = doctors.examine()
    table = Table(box=None, pad_edge=False)
    for column in ("", "requirement", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        remedy = "" if check.status == "OK" else check.remedy
        table.add_row(f"[{COLOURS[check.status]}]{check.status}[/]", *map(escape, (check.name, check.found, remedy)))
    console = Console()
    console.print(table)
    console.print(repr(report))
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def pretrain(
    out: Annotated[Path, Argument(help="A folder for model, log and checkpoint. An unfinished run goes on.")],
    changes: Annotated[
        list[str] | None,
        Option("--set", metavar="FIELD=VALUE", help="Change the recipe: seed=1, lr=0.004. Repeatable."),
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda; by default what accelerate finds.")] = None,
    bf16: Annotated[bool, Option(help="Compute in bfloat16; weights and optimizers are float32.")] = True,
    micro_batch: Annotated[int, Option(help="Windows in memory at a time, in each process.")] = 16,
    checkpoint_every: Annotated[int, Option(help="Steps.")] = 50,
    evaluate_every: Annotated[int, Option(help="Steps.")] = 200,
) -> None:
    """Train a small language model on the public text; without --set, the one that plpkg ships.

    For several GPUs: accelerate launch -m plpkg pretrain OUT. On a CPU, torch.distributed.run starts several processes.
    """
    from plpkg.pretraining import Recipe, pretrain

    try:
        pretrain(
            Recipe.changed(changes or []),
            out,
            device=device,
            bf16=bf16,
            micro_batch=micro_batch,
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluate_every,
        )
    except ERRORS as error:
        raise typer.BadParameter(str(error)) from error


Model = Annotated[str, Option(help="plpkg-small, a hub name, or a folder.")]
Adapter = Annotated[Path | None, Option(help="A folder with a saved PrivateLoRA adapter; else a new one of --rank.")]
Rank = Annotated[int, Option(help="Of a new adapter, both ways.")]
Target = Annotated[
    list[str] | None, Option(help="Linear layers of a new adapter, down_proj say; by default q, k and v.")
]
Seed = Annotated[int, Option(help="Of a new adapter's A and B.")]
FirstK = Annotated[int, Option(help="Layers that the device keeps at the beginning.")]
LastK = Annotated[int, Option(help="Layers that the device keeps at the end.")]
Precision = Annotated[str, Option(help="Of the values on the wire: fp16, bf16 or fp32.")]
Dtype = Annotated[str, Option(help="Of the weights: fp16, bf16, fp32, or auto: the checkpoint's own.")]
BusyWait = Annotated[
    float, Option(metavar="SECONDS", help="How long to look for a message before sleeping: faster, takes a core.")
]
Token = Annotated[str | None, Option(envvar="PLPKG_TOKEN", help="The bearer token; better through PLPKG_TOKEN.")]


@app.command()
def cloud(
    model: Model = "plpkg-small",
    listen: Annotated[str, Option(metavar="HOST:PORT", help="Port 0 takes a free one.")] = "127.0.0.1:7070",
    adapter: Adapter = None,
    rank: Rank = 64,
    target: Target = None,
    seed: Seed = 0,
    first_k: FirstK = 0,
    last_k: LastK = 0,
    precision: Precision = "fp16",
    dtype: Dtype = "fp32",
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    tls: Annotated[Path | None, Option(help="A folder with cert.pem and key.pem.")] = None,
    token: Token = None,
    sessions: Annotated[int, Option(help="Devices at the same time.")] = 16,
    tokens: Annotated[int, Option(help="The longest sequence.")] = 4096,
    busy_wait: BusyWait = 0.0,
    init_tls: Annotated[Path | None, Option(metavar="DIR", help="Write a self-signed certificate, and end.")] = None,
    host: Annotated[list[str] | None, Option(help="With --init-tls: a name or address of the cloud.")] = None,
) -> None:
    """Serve a model's decoder layers to devices that keep embedding, LM head and their private M."""
    from plpkg.residual import CloudServer, Limits, certificates, commands, release

    try:
        if init_tls is not None:
            typer.echo(f"{certificates.write(init_tls, host or [])}: give this file to the devices (--ca)")
            return
        new = dict(r_c2d=rank, r_d2c=rank, target_modules=target or None, projection_seed=seed)
        adapted, _ = commands.adapted_model(model, adapter, dtype, device, **new)
        limits = Limits(sessions=sessions, tokens=tokens)
        common = dict(first_k=first_k, last_k=last_k, precision=precision, busy_wait_s=busy_wait)
        server = CloudServer(adapted, listen, tls=tls, token=token, limits=limits, **common)
        release(adapted, server.part)
        commands.serve(server, typer.echo)
    except ERRORS as error:
        raise typer.BadParameter(str(error)) from error


device_app = typer.Typer(no_args_is_help=True, help="Use a model whose decoder layers a cloud has.")
app.add_typer(device_app, name="device")


@device_app.callback()
def device(
    context: typer.Context,
    connect: Annotated[str, Option(metavar="HOST:PORT", help="The cloud.")],
    model: Model = "plpkg-small",
    adapter: Adapter = None,
    rank: Rank = 64,
    target: Target = None,
    seed: Seed = 0,
    first_k: FirstK = 0,
    last_k: LastK = 0,
    precision: Precision = "fp16",
    ca: Annotated[Path | None, Option(help="The certificate to trust: the cloud's cert.pem.")] = None,
    token: Token = None,
    link: Annotated[str | None, Option(help="Go through a relay with this link's rates and delay: 5g, say.")] = None,
    busy_wait: BusyWait = 0.0,
) -> None:
    """Use a model whose decoder layers a cloud has."""
    context.obj = locals()


def _client(options: dict):
    """The device's client, the adapted model with nothing but the device's tensors, and its tokenizer.

    The checkpoint keeps its own type until the cloud's layers are gone: what is not used stays in the file.
    """
    from plpkg.residual import DeviceClient, commands, release

    rank, target, seed = options["rank"], options["target"], options["seed"]
    new = dict(r_c2d=rank, r_d2c=rank, target_modules=target or None, projection_seed=seed)
    model, tokenizer = commands.adapted_model(options["model"], options["adapter"], "auto", "cpu", **new)
    names = ("first_k", "last_k", "precision", "ca", "token", "link")
    settings = {name: options[name] for name in names} | {"busy_wait_s": options["busy_wait"]}
    client = DeviceClient(options["connect"], model, **settings)
    release(model, client.part, adapter_name=client.adapter_name)
    client.part.float()
    return client, model, tokenizer


@device_app.command()
def chat(
    context: typer.Context,
    max_new_tokens: Annotated[int, Option(help="At most.")] = 128,
    temperature: Annotated[float, Option(help="0 takes the most probable token.")] = 0.7,
    top_p: Annotated[float, Option(help="Sample among the most probable tokens with this share.")] = 0.95,
) -> None:
    """Answer every line of standard input."""
    from plpkg.residual import RefusedError, commands

    sampling = dict(do_sample=temperature != 0, temperature=temperature, top_p=top_p)
    try:
        client, _, tokenizer = _client(context.obj)
        with client:
            commands.chat(client, tokenizer, commands.prompts(), max_new_tokens, **sampling)
            typer.echo(repr(client.traffic), err=True)
    except (*ERRORS, RefusedError) as error:
        raise typer.BadParameter(str(error)) from error


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
    """Personalise: the text, the labels and M stay here."""
    from plpkg.residual import RefusedError, commands, training

    try:
        documents = commands.texts(text)
        client, model, tokenizer = _client(context.obj)
        with client:
            options = dict(steps=steps, batch=batch, seq=seq, accumulate=accumulate, lr=lr)
            typer.echo(repr(training.train(client, model, tokenizer, documents, out, **options)))
            typer.echo(repr(client.traffic), err=True)
    except (*ERRORS, RefusedError) as error:
        raise typer.BadParameter(str(error)) from error
