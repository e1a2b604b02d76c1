"""Masked exact search against what a user would take instead, on the same data, interleaved in one run.

Each method has a process of its own (`bench_methods`) and runs alone, one after the other, round after round; times are medians over the
rounds, and ratios are taken within a round, so that a machine that others use too disturbs them little. The roofline of a search is the
larger of bytes / bandwidth and operations / peak of a float32 scan of the rows that the cutoffs admit; both are the best of the run.
"""

import datetime as dt
import importlib.util
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from rich.table import Table

from cluster.record import Record
from retrieval.workers import granted_cores
from scripts.bench.floor import STEADY, best_of, cache_bytes, steadiness
from scripts.bench.interleaved import Measured, measure
from scripts.bench.retrieval_data import QUERIES, VECTORS, Cutoffs, make_queries, make_rows, same_rows, true_rows
from scripts.bench.retrieval_pool import PoolResult, pool_results, pool_table
from scripts.bench_methods import METHODS
from scripts.terminal import console

BASELINE = "faiss-selector"

SMALL_ROWS = 100_000
"""Methods that take minutes beyond this only run up to here: LanceDB, usearch, and training lists."""

_SMALL = ("lancedb", "usearch", "approximate")

_HALF_PRECISION = ("exact-bf16", "approximate")
"""May beat the roofline of a float32 scan: they read less."""


class MethodResult(Record):
    """One method on one set of queries."""

    method: str
    rows: int
    dim: int
    queries: int
    cutoffs: Cutoffs
    k: int
    median_ms: float
    """Wall time of the whole batch."""
    cpu_ms: float
    """Processor time of all threads: what remains comparable where others use the machine."""
    speedup_vs_faiss_selector: float | None
    roofline: float
    """Share of the float32 roofline of the same round, the median of the rounds; half-precision scans may exceed 1."""
    roofline_of_best: float
    """Share of the roofline of the best round: lower where the machine's speed changes."""
    recall: float
    """Share of the true best k that was found."""
    late: int
    """Rows that were returned although they lie after the cutoff."""
    own_mib: float = 0.0
    """Memory that only the method's process has."""
    mapped_mib: float = 0.0
    """Pages of the index that it touched; processes of one machine share them."""


class Machine(Record):
    """Where it ran, and whether it was left alone meanwhile."""

    processor: str
    threads: int
    load: float
    """Mean number of running processes of the last minute, when the run ended."""
    gigabytes_per_s: float
    """Memory read by all threads: the median of the rounds, as is the next."""
    gigaflops: float
    steadiness: float
    """The median round's bandwidth or arithmetic over the best round's, whichever is lower."""
    elsewhere: float
    """Share of the machine's processor time that other processes took."""
    measured: dt.datetime


class Benchmark(Record):
    """The file that `--json` writes."""

    results: tuple[MethodResult, ...]
    half_over_all: dict[str, float] = {}
    """Method → time of searching the older half of the rows over that of searching all, both with shared cutoffs."""
    machine: Machine
    pool: tuple[PoolResult, ...] = ()
    doubts: tuple[str, ...] = ()
    """Why a figure should be measured again; none on a quiet machine."""


def results(
    measured: Measured,
    truth: list[list[int]],
    highs: list[int],
    shape: tuple[int, int],
    cutoffs: Cutoffs,
    k: int,
) -> list[MethodResult]:
    """One per method."""
    rows, dim = shape
    least = np.array([floor.least_ms(highs, dim) for floor in measured.floors])
    undisturbed = best_of(measured.floors).least_ms(highs, dim)
    baseline = np.array([run.ms for run in measured.runs.get(BASELINE, [])])
    made = []
    for method, runs in measured.runs.items():
        times = np.array([run.ms for run in runs])
        pairs = list(zip(runs[-1].found, truth, highs, strict=True))
        made.append(
            MethodResult(
                method=method,
                rows=rows,
                dim=dim,
                queries=len(highs),
                cutoffs=cutoffs,
                k=k,
                median_ms=float(np.median(times)),
                cpu_ms=float(np.median([run.cpu_ms for run in runs])),
                speedup_vs_faiss_selector=float(np.median(baseline / times)) if len(baseline) else None,
                roofline=float(np.median(least / times)),
                roofline_of_best=float(np.median(undisturbed / times)),
                recall=sum(len(set(f) & set(t)) for f, t, _ in pairs) / sum(len(t) for t in truth),
                late=sum(row >= high for f, _, high in pairs for row in f),
                own_mib=runs[-1].own_mib,
                mapped_mib=runs[-1].mapped_mib,
            )
        )
    return made


def machine_of(measured: Measured) -> Machine:
    """This machine during a measurement."""
    floors = measured.floors
    return Machine(
        processor=platform.processor() or platform.machine(),
        threads=granted_cores(),
        load=os.getloadavg()[0],
        gigabytes_per_s=float(np.median([floor.bytes_per_s for floor in floors])) / 1e9,
        gigaflops=float(np.median([floor.flops_per_s for floor in floors])) / 1e9,
        steadiness=steadiness(floors),
        elsewhere=measured.elsewhere,
        measured=dt.datetime.now(dt.UTC),
    )


def doubts(made: Sequence[MethodResult], machine: Machine, cache: int) -> list[str]:
    """What speaks against the figures. `cache`: bytes of the processor's largest cache."""
    found = []
    if machine.steadiness < STEADY or machine.elsewhere > 1 - STEADY:
        found.append(
            f"the machine was disturbed: the usual round ran at {machine.steadiness:.2f} of the best, and other processes took "
            f"{machine.elsewhere:.2f} of its processor time; a share of the roofline may mix two speeds"
        )
    found += [
        f"{r.method} took {r.roofline:.2f} of the roofline, and no float32 scan can: the machine's speed was measured too low"
        for r in made
        if r.roofline > 1 and r.method not in _HALF_PRECISION
    ]
    if made and 4 * made[0].rows * made[0].dim < 8 * cache:
        found.append(
            f"{made[0].rows:,} rows may be served by the processor's cache of {cache >> 20} MiB; take more for a share of the roofline"
        )
    return found


def main(
    rows: Annotated[int, typer.Option(min=1_000)] = 100_000,
    dim: Annotated[int, typer.Option(min=8)] = 384,
    queries: Annotated[int, typer.Option(min=1)] = 64,
    cutoffs: Annotated[
        Literal["random", "shared", "days8"], typer.Option(help="shared: every query sees all rows.")
    ] = "random",
    k: Annotated[int, typer.Option(min=1, max=1_000)] = 10,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seed: int = 0,
    method: Annotated[list[str], typer.Option(help=f"Only these; may be repeated: {', '.join(METHODS)}.")] = [],  # noqa: B006
    data: Annotated[
        Path | None, typer.Option(help="Where the vectors are made; by default a temporary folder.")
    ] = None,
    pool: Annotated[bool, typer.Option(help="Also drive the Ray pool with 1, 8, 32 and 128 callers.")] = True,
    pool_seconds: Annotated[float, typer.Option(min=0.1, help="How long each of these turns lasts.")] = 3.0,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Compare masked search with FAISS and others. Example: python -m scripts.bench_retrieval --rows 100000 --dim 384 --queries 64."""
    unknown = sorted(set(method) - set(METHODS))
    if unknown:
        raise typer.BadParameter(f"no method {', '.join(unknown)}; known: {', '.join(METHODS)}", param_hint="--method")
    chosen = method or [m for m in METHODS if (rows <= SMALL_ROWS or m not in _SMALL) and _is_installed(m)]
    if data is not None:
        data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=data) as name:
        folder = Path(name)
        make_rows(folder, rows, dim, seed)
        highs = make_queries(folder, rows, dim, queries, cutoffs, seed)
        truth = true_rows(folder, highs, k)
        measured = measure({m: (folder, m) for m in chosen}, rounds, k)
        made = results(measured, truth, highs, (rows, dim), cutoffs, k)
        halves = half_over_all(folder, [m for m in chosen if m.startswith("exact")], rounds, k, seed)
    machine = machine_of(measured)
    concurrent = (
        pool_results(rows, dim, cutoffs=cutoffs, k=k, rounds=rounds, seconds=pool_seconds, seed=seed, data=data)
        if pool
        else []
    )
    benchmark = Benchmark(
        results=tuple(made),
        half_over_all=halves,
        machine=machine,
        pool=tuple(concurrent),
        doubts=tuple(doubts(made, machine, cache_bytes())),
    )
    _show(benchmark)
    if json_ is not None:
        json_.write_text(benchmark.model_dump_json(indent=1) + "\n")


def half_over_all(folder: Path, methods: list[str], rounds: int, k: int, seed: int) -> dict[str, float]:
    """For each method, one process that sees half of the rows and one that sees all, interleaved."""
    if not methods:
        return {}
    rows, dim = np.load(folder / VECTORS, mmap_mode="r").shape
    count = len(np.load(folder / QUERIES))
    ranges: tuple[Cutoffs, Cutoffs] = ("half", "shared")
    children: dict[str, tuple[Path, str]] = {}
    for cutoffs in ranges:
        beside = same_rows(folder, cutoffs)
        make_queries(beside, rows, dim, count, cutoffs, seed)
        children |= {f"{method} {cutoffs}": (beside, method) for method in methods}
    runs = measure(children, rounds, k).runs
    return {
        m: float(np.median([a.ms / b.ms for a, b in zip(runs[f"{m} half"], runs[f"{m} shared"], strict=True)]))
        for m in methods
    }


def _show(benchmark: Benchmark) -> None:
    first, machine = benchmark.results[0], benchmark.machine
    table = Table(
        title=f"{first.rows:,} × {first.dim}, {first.queries} queries, cutoffs {first.cutoffs}, k = {first.k}; "
        f"{machine.threads} threads, {machine.gigabytes_per_s:.0f} GB/s, {machine.gigaflops:.0f} GFLOP/s, load {machine.load:.1f}",
        title_justify="left",
    )
    for column in ("method", "median ms", "CPU ms", f"× {BASELINE}", "of roofline", "of the best", "recall", "late"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in benchmark.results:
        speedup = "" if r.speedup_vs_faiss_selector is None else f"{r.speedup_vs_faiss_selector:.1f}"
        table.add_row(
            r.method,
            f"{r.median_ms:.1f}",
            f"{r.cpu_ms:.0f}",
            speedup,
            f"{r.roofline:.2f}",
            f"{r.roofline_of_best:.2f}",
            f"{r.recall:.4f}",
            str(r.late),
        )
    console.print(table)
    for method, ratio in benchmark.half_over_all.items():
        console.print(
            f"{method}: searching the older half of the rows takes {ratio:.2f} of searching all", highlight=False
        )
    if benchmark.pool:
        console.print(pool_table(benchmark.pool))
    for doubt in benchmark.doubts:
        console.print(f"doubt: {doubt}", style="yellow", markup=False)


def _is_installed(method: str) -> bool:
    """The last two come with the `bench` extra."""
    return method not in ("lancedb", "usearch") or importlib.util.find_spec(method) is not None


if __name__ == "__main__":
    typer.run(main)
