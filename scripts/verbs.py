"""What the verbs of the `pastcast` command share: options, their registration, and tables of counts."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from scripts.terminal import console

Config = Annotated[list[Path], typer.Option("--config", "-c", help="YAML settings; may be repeated, later files win.")]
Set = Annotated[list[str], typer.Option("--set", "-s", help="dotted.key=value; may be repeated.")]


def verb(parent: typer.Typer, name: str, example: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a verb whose one-line help ends with an example."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        summary = (function.__doc__ or "").split("\n\n")[0].replace("\n", " ").strip()
        text = f"{summary} Example: {example}"
        return parent.command(name, help=text, short_help=text)(function)

    return register


def print_naive_times(count: int, time_zone: str) -> None:
    """How many times rest on a guess, where there are any."""
    if count:
        console.print(f"{count} times without an offset were taken as {time_zone}", highlight=False)


def print_counts(title: str, counts: dict[str, int]) -> None:
    """A small table; nothing where there is nothing to count."""
    if not counts:
        return
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for reason, count in sorted(counts.items()):
        table.add_row(str(count), reason)
    console.print(table)
