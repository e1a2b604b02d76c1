"""Masked exact search against what a user would take instead, on the same data, interleaved in one run.

Each method has a process of its own (`bench_methods`) and runs alone, one after the other, round after round; figures are medians over the
rounds, and ratios are taken within a round, so that a machine that others use too disturbs them little. The roofline of a search is the
larger of bytes / bandwidth and operations / peak of a float32 scan of the rows that the cutoffs admit, both measured in every round.
"""

import datetime as dt
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from rich.table import Table

from cluster.record import Record
from retrieval.half import half_copy
from retrieval.mask import Vectors
from retrieval.workers import granted_cores
from scripts.bench.retrieval_pool import PoolResult, pool_results, pool_table
from scripts.bench_methods import HALF, HIGHS, METHODS, QUERIES, ROOFLINE, VECTORS, Floor, Run
from scripts.terminal import console

Cutoffs = Literal["random", "shared", "days8", "half"]

BASELINE = "faiss-selector"

SMALL_ROWS = 100_000
"""Methods that take minutes beyond this only run up to here: LanceDB, usearch, and training lists."""

_SMALL = ("lancedb", "usearch", "approximate")
_CHUNK = 50_000


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
    """Share of the float32 roofline; half-precision scans may exceed 1."""
    recall: float
    """Share of the true best k that was found."""
    late: int
    """Rows that were returned although they lie after the cutoff."""


class Machine(Record):
    """Where it ran."""

    processor: str
    threads: int
    load: float
    """Mean number of running processes of the last minute, when the run ended."""
    gigabytes_per_s: float
    gigaflops: float
    measured: dt.datetime


class Benchmark(Record):
    """The file that `--json` writes."""

    results: tuple[MethodResult, ...]
    half_over_all: dict[str, float] = {}
    """Method → time of searching the older half of the rows over that of searching all, both with shared cutoffs."""
    machine: Machine
    pool: tuple[PoolResult, ...] = ()


class Child:
    """A method in its own process."""

    def __init__(self, folder: Path, method: str, k: int) -> None:
        self.method = method
        command = [sys.executable, "-m", "scripts.bench_methods", str(folder), method, str(k)]
        quiet = {**os.environ, "LANCE_LOG": "error"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError(f"{method} has no pipes")
        self._input, self._output = self._process.stdin, self._process.stdout
        if self._output.readline() != "ready\n":
            raise RuntimeError(f"{method} did not start; what it said stands above")

    def run(self) -> str:
        """One more measurement, as JSON."""
        self._input.write("go\n")
        self._input.flush()
        return self._output.readline()

    def close(self) -> None:
        """Ends the process: it leaves when its input does."""
        self._input.close()
        self._process.wait()


def make_data(folder: Path, rows: int, dim: int, seed: int) -> None:
    """Random unit vectors and their half-precision copy."""
    random = np.random.default_rng(seed)
    vectors = np.empty((rows, dim), np.float32)
    for start in range(0, rows, _CHUNK):
        vectors[start : start + _CHUNK] = _unit(random, min(_CHUNK, rows - start), dim)
    np.save(folder / VECTORS, vectors)
    np.save(folder / HALF, half_copy(vectors))


def make_queries(folder: Path, rows: int, dim: int, queries: int, cutoffs: Cutoffs, seed: int) -> list[int]:
    """Random unit queries, and the row before which each cutoff ends: returned."""
    random = np.random.default_rng(seed + 1)
    np.save(folder / QUERIES, _unit(random, queries, dim))
    if cutoffs == "random":
        highs = random.integers(1, rows + 1, queries)
    elif cutoffs == "days8":
        highs = random.choice(random.integers(1, rows + 1, 8), queries)
    else:
        highs = np.full(queries, rows if cutoffs == "shared" else rows // 2)
    np.save(folder / HIGHS, highs)
    return [int(high) for high in highs]


def true_rows(folder: Path, highs: list[int], k: int) -> list[list[int]]:
    """The best rows of every query, every score in float64."""
    vectors, queries = np.load(folder / VECTORS, mmap_mode="r"), np.load(folder / QUERIES).astype(np.float64)
    best: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0), np.empty(0, np.int64)) for _ in highs]
    for start in range(0, max(highs), _CHUNK):
        scores = vectors[start : start + _CHUNK].astype(np.float64) @ queries.T
        for i, high in enumerate(highs):
            visible = scores[: max(0, high - start), i]
            rows = np.arange(start, start + len(visible))
            joined, places = np.concatenate([best[i][0], visible]), np.concatenate([best[i][1], rows])
            order = np.lexsort((places, -joined))[:k] if len(joined) <= 4 * k else _top(joined, k)
            best[i] = joined[order], places[order]
    return [rows.tolist() for _, rows in best]


def measure(folder: Path, methods: list[str], rounds: int, k: int) -> tuple[list[Floor], dict[str, list[Run]]]:
    """What the machine could do in every round, and method → its run in every round."""
    children = [Child(folder, method, k) for method in methods]
    roofline = Child(folder, ROOFLINE, k)
    floors: list[Floor] = []
    runs: dict[str, list[Run]] = {method: [] for method in methods}
    try:
        for _ in range(rounds):
            floors.append(Floor.model_validate_json(roofline.run()))
            for child in children:
                runs[child.method].append(Run.model_validate_json(child.run()))
    finally:
        for child in (roofline, *children):
            child.close()
    return floors, runs


def results(
    floors: list[Floor],
    runs: dict[str, list[Run]],
    truth: list[list[int]],
    highs: list[int],
    shape: tuple[int, int],
    cutoffs: Cutoffs,
    k: int,
) -> list[MethodResult]:
    """One per method."""
    rows, dim = shape
    least = np.array([floor.least_ms(highs, dim) for floor in floors])
    baseline = np.array([run.ms for run in runs.get(BASELINE, [])])
    made = []
    for method, measured in runs.items():
        times = np.array([run.ms for run in measured])
        pairs = list(zip(measured[-1].found, truth, highs, strict=True))
        made.append(
            MethodResult(
                method=method,
                rows=rows,
                dim=dim,
                queries=len(highs),
                cutoffs=cutoffs,
                k=k,
                median_ms=float(np.median(times)),
                cpu_ms=float(np.median([run.cpu_ms for run in measured])),
                speedup_vs_faiss_selector=float(np.median(baseline / times)) if len(baseline) else None,
                roofline=float(np.median(least / times)),
                recall=sum(len(set(f) & set(t)) for f, t, _ in pairs) / sum(len(t) for t in truth),
                late=sum(row >= high for f, _, high in pairs for row in f),
            )
        )
    return made


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
    with tempfile.TemporaryDirectory(prefix="bench-", dir=data) as name:
        folder = Path(name)
        make_data(folder, rows, dim, seed)
        highs = make_queries(folder, rows, dim, queries, cutoffs, seed)
        floors, runs = measure(folder, chosen, rounds, k)
        made = results(floors, runs, true_rows(folder, highs, k), highs, (rows, dim), cutoffs, k)
        halves = _half_over_all(folder, [m for m in chosen if m.startswith("exact")], rounds, k, seed)
    machine = Machine(
        processor=platform.processor() or platform.machine(),
        threads=granted_cores(),
        load=os.getloadavg()[0],
        gigabytes_per_s=float(np.median([f.bytes_per_s for f in floors])) / 1e9,
        gigaflops=float(np.median([f.flops_per_s for f in floors])) / 1e9,
        measured=dt.datetime.now(dt.UTC),
    )
    concurrent = (
        pool_results(rows, dim, cutoffs=cutoffs, k=k, rounds=rounds, seconds=pool_seconds, seed=seed, data=data)
        if pool
        else []
    )
    benchmark = Benchmark(results=tuple(made), half_over_all=halves, machine=machine, pool=tuple(concurrent))
    _show(benchmark)
    if json_ is not None:
        json_.write_text(benchmark.model_dump_json(indent=1) + "\n")


def _half_over_all(folder: Path, methods: list[str], rounds: int, k: int, seed: int) -> dict[str, float]:
    """For each method, one child that sees half of the rows and one that sees all, interleaved."""
    rows, dim = np.load(folder / VECTORS, mmap_mode="r").shape
    count = len(np.load(folder / QUERIES))
    folders: dict[Cutoffs, Path] = {}
    for cutoffs in ("half", "shared"):
        folders[cutoffs] = folder / cutoffs
        folders[cutoffs].mkdir()
        for file in (VECTORS, HALF):
            (folders[cutoffs] / file).hardlink_to(folder / file)
        make_queries(folders[cutoffs], rows, dim, count, cutoffs, seed)
    ratios = {}
    for method in methods:
        half, whole = (Child(folders[cutoffs], method, k) for cutoffs in ("half", "shared"))
        try:
            pairs = [[Run.model_validate_json(child.run()).ms for child in (half, whole)] for _ in range(rounds)]
        finally:
            half.close()
            whole.close()
        ratios[method] = float(np.median([a / b for a, b in pairs]))
    return ratios


def _show(benchmark: Benchmark) -> None:
    first, machine = benchmark.results[0], benchmark.machine
    table = Table(
        title=f"{first.rows:,} × {first.dim}, {first.queries} queries, cutoffs {first.cutoffs}, k = {first.k}; "
        f"{machine.threads} threads, {machine.gigabytes_per_s:.0f} GB/s, {machine.gigaflops:.0f} GFLOP/s, load {machine.load:.1f}",
        title_justify="left",
    )
    for column in ("method", "median ms", "CPU ms", f"× {BASELINE}", "of roofline", "recall", "late"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in benchmark.results:
        speedup = "" if r.speedup_vs_faiss_selector is None else f"{r.speedup_vs_faiss_selector:.1f}"
        table.add_row(
            r.method,
            f"{r.median_ms:.1f}",
            f"{r.cpu_ms:.0f}",
            speedup,
            f"{r.roofline:.2f}",
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


def _is_installed(method: str) -> bool:
    """The last two come with the `bench` extra."""
    return method not in ("lancedb", "usearch") or importlib.util.find_spec(method) is not None


def _unit(random: np.random.Generator, rows: int, dim: int) -> Vectors:
    drawn = random.standard_normal((rows, dim), dtype=np.float32)
    unit: Vectors = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return unit


def _top(scores: np.ndarray, k: int) -> np.ndarray:
    top = np.argpartition(-scores, k)[:k]
    return top[np.argsort(-scores[top], kind="stable")]


if __name__ == "__main__":
    typer.run(main)
