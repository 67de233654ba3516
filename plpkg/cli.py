"""The command line: ``plpkg doctor``."""

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import plpkg
from plpkg import doctor as doctors

app = typer.Typer(no_args_is_help=True, add_completion=False, help=plpkg.__doc__.splitlines()[0])
COLOURS = {"OK": "green", "SKIP": "yellow", "FAIL": "bold red"}


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
