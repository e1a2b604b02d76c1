"""`pastcast index …`: the dated index, built, added to, checked, described, and exchanged with other tools."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.config import load_settings
from scripts.terminal import ProgressBar, console
from scripts.verbs import Config, Set, print_counts, print_naive_times, verb

index_app = typer.Typer(no_args_is_help=True)


@verb(index_app, "build", "pastcast index build --config configs/summer2024.yaml")
def build(config: Config = [], set_: Set = []) -> None:  # noqa: B006
    """Build or finish the index of the configured articles."""
    from retrieval.build import build_from_settings

    settings = load_settings(config, set_)
    with ProgressBar("index") as bar:
        summary = build_from_settings(settings, lambda p: bar.update(p.done, p.total, p.month))
    print_counts("rows of the articles file not used", summary.quarantined)
    print_naive_times(summary.naive_times, settings.articles.time_zone)
    console.print(
        f"{summary.articles} articles in {summary.shards} monthly shards ({summary.kept} kept), {summary.directory}",
        highlight=False,
    )


@verb(index_app, "add", "pastcast index add news.jsonl --config world/settings.yaml")
def add(
    file: Annotated[Path, typer.Argument(help="New articles, in the format that `articles` says.")],
    config: Config = [],  # noqa: B006
    set_: Set = [],  # noqa: B006
) -> None:
    """Add articles to the index; other months stay as they are, and no article is replaced."""
    from retrieval.add import add_from_settings

    settings = load_settings(config, set_)
    with ProgressBar("index") as bar:
        summary = add_from_settings(settings, file, lambda p: bar.update(p.done, p.total, p.month))
    print_counts("rows of the file not used", summary.quarantined)
    print_naive_times(summary.naive_times, settings.articles.time_zone)
    console.print(
        f"{summary.added} articles added in {len(summary.rewritten)} months, {summary.already} were there already; "
        f"{summary.articles} articles in {summary.shards} monthly shards, {summary.directory}",
        highlight=False,
    )


@verb(index_app, "verify", "pastcast index verify --config world/settings.yaml")
def verify(config: Config = [], set_: Set = []) -> None:  # noqa: B006
    """Compare every file and row of the index with what it says of itself; exit status 1 if anything is wrong."""
    from retrieval.verify import verify_index

    verdict = verify_index(load_settings(config, set_).index.directory)
    for fault in verdict.faults:
        where = str(fault.file) if fault.row is None else f"{fault.file} row {fault.row}"
        console.print(f"{where}: {fault.what}", highlight=False, soft_wrap=True)
    if verdict.unnamed:
        console.print(f"and {verdict.unnamed} rows more", highlight=False)
    wrong = len(verdict.faults) + verdict.unnamed
    console.print(
        f"{verdict.articles} articles, {verdict.shards} monthly shards, {verdict.files} files: "
        + (f"{wrong} faults" if wrong else "nothing is wrong"),
        highlight=False,
    )
    raise typer.Exit(1 if wrong else 0)


@verb(index_app, "stats", "pastcast index stats --config world/settings.yaml")
def stats(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    config: Config = [],  # noqa: B006
    set_: Set = [],  # noqa: B006
) -> None:
    """Say what the index holds: articles by month, where their dates come from, rows without one."""
    from retrieval.stats import index_stats as read_stats
    from scripts.index_page import index_page

    stats = read_stats(load_settings(config, set_).index.directory)
    if json_:
        sys.stdout.write(stats.model_dump_json(indent=1) + "\n")
    else:
        console.print(index_page(stats))


@verb(index_app, "import", "pastcast index import shards --format faiss --set index.encoder=hashing")
def import_(
    source: Annotated[Path, typer.Argument(help="A folder of monthly or daily shards.")],
    _format: Annotated[Literal["faiss"], typer.Option("--format", help="What the folder holds.")] = "faiss",
    config: Config = [],  # noqa: B006
    set_: Set = [],  # noqa: B006
) -> None:
    """Make an index of shards that other tools wrote; index.encoder must be what made their vectors."""
    from retrieval.build import encoder_identity, index_kind
    from retrieval.encoder import facts_of
    from retrieval.faiss_folders import import_faiss

    settings = load_settings(config, set_)
    index = settings.index
    encoder = encoder_identity(facts_of(index.encoder, settings.encoder), index.text_characters)
    summary = import_faiss(source, index.directory, encoder, index_kind(index), index.lexical)
    console.print(
        f"{summary.articles} articles of {summary.folders} folders in {summary.shards} monthly shards, {index.directory}; "
        f"{summary.naive_times} times without an offset were taken as UTC",
        highlight=False,
    )


@verb(index_app, "export", "pastcast index export --out shards --format faiss --config world/settings.yaml")
def export(
    out: Annotated[Path, typer.Option(help="Folder for the monthly shards.")],
    _format: Annotated[Literal["faiss"], typer.Option("--format", help="What to write.")] = "faiss",
    config: Config = [],  # noqa: B006
    set_: Set = [],  # noqa: B006
) -> None:
    """Write the index as shards that other tools read."""
    from retrieval.faiss_folders import export_faiss
    from retrieval.library import Library

    folders = export_faiss(Library.open(load_settings(config, set_).index.directory), out)
    console.print(f"wrote {len(folders)} monthly shards to {out}", highlight=False)
