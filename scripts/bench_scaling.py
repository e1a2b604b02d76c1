"""What a search costs as an index grows: time against rows and against shards, and the memory of the process that serves it.

Every size is measured like `bench_retrieval` measures one: methods in processes of their own, in turns. `plot_retrieval` makes the
pictures and the tables of docs/scaling.md from the file.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from cluster.record import Record
from scripts.bench.interleaved import measure
from scripts.bench.retrieval_data import make_queries, make_rows, same_rows, true_rows
from scripts.bench_retrieval import Machine, MethodResult, machine_of, results
from scripts.terminal import console

METHODS = ("exact", "exact-bf16")
BATCHES = (1, 64)
ROWS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000)
SHARDS = (1, 4, 16, 64)
K = 10


class ShardsResult(Record):
    """The same rows in one shard or in many, served by one actor."""

    method: str
    shards: int
    rows: int
    dim: int
    queries: int
    median_ms: float
    """Wall time of the whole batch, at random cutoffs."""


class Scaling(Record):
    """The file that `--json` writes."""

    results: tuple[MethodResult, ...]
    shards: tuple[ShardsResult, ...]
    machine: Machine


def cost_by_rows(rows: int, dim: int, rounds: int, seed: int, data: Path | None) -> tuple[list[MethodResult], Machine]:
    """Each method with one query and with many, at random cutoffs, in turns over the same rows."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=data) as name:
        folder = Path(name)
        make_rows(folder, rows, dim, seed)
        made: list[MethodResult] = []
        for batch in BATCHES:
            beside = same_rows(folder, f"{batch} queries")
            highs = make_queries(beside, rows, dim, batch, "random", seed)
            measured = measure({m: (beside, m) for m in METHODS}, rounds, K)
            made += results(measured, true_rows(beside, highs, K), highs, (rows, dim), "random", K)
    return made, machine_of(measured)


def cost_by_shards(
    rows: int, dim: int, shards: Sequence[int], rounds: int, seed: int, data: Path | None
) -> list[ShardsResult]:
    """The same rows and queries, cut into ever more shards, in turns."""
    batch = BATCHES[-1]
    with tempfile.TemporaryDirectory(prefix="bench-", dir=data) as name:
        folder = Path(name)
        make_rows(folder, rows, dim, seed)
        make_queries(folder, rows, dim, batch, "random", seed)
        names = [f"{method}/{count}" for method in METHODS for count in shards]
        runs = measure({name: (folder, name) for name in names}, rounds, K).runs
    return [
        ShardsResult(
            method=method,
            shards=count,
            rows=rows,
            dim=dim,
            queries=batch,
            median_ms=float(np.median([run.ms for run in runs[f"{method}/{count}"]])),
        )
        for method in METHODS
        for count in shards
    ]


def main(
    rows: Annotated[list[int], typer.Option(help="Sizes of the index; may be repeated.", min=1_000)] = list(ROWS),  # noqa: B006
    shards: Annotated[list[int], typer.Option(help="Numbers of shards; may be repeated.", min=1)] = list(SHARDS),  # noqa: B006
    shard_rows: Annotated[int, typer.Option(help="Rows that are cut into shards.", min=1_000)] = 400_000,
    dim: Annotated[int, typer.Option(min=8)] = 384,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seed: int = 0,
    data: Annotated[
        Path | None, typer.Option(help="Where the vectors are made; by default a temporary folder.")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure cost against rows and shards. Example: python -m scripts.bench_scaling --json scaling.json."""
    made: list[MethodResult] = []
    for size in sorted(rows):
        at_size, machine = cost_by_rows(size, dim, rounds, seed, data)
        made += at_size
    scaling = Scaling(
        results=tuple(made),
        shards=tuple(cost_by_shards(shard_rows, dim, sorted(shards), rounds, seed, data)),
        machine=machine,
    )
    _show(scaling)
    if json_ is not None:
        json_.write_text(scaling.model_dump_json(indent=1) + "\n")


def _show(scaling: Scaling) -> None:
    table = Table(title=f"random cutoffs, k = {K}; {scaling.machine.threads} threads", title_justify="left")
    for column in ("method", "rows", "shards", "queries", "median ms", "own MiB", "mapped MiB"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in scaling.results:
        memory = (f"{r.own_mib:.0f}", f"{r.mapped_mib:.0f}")
        table.add_row(r.method, f"{r.rows:,}", "1", str(r.queries), f"{r.median_ms:.1f}", *memory)
    for s in scaling.shards:
        table.add_row(s.method, f"{s.rows:,}", str(s.shards), str(s.queries), f"{s.median_ms:.1f}", "", "")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
