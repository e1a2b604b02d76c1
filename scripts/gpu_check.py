"""Does search on this machine's GPU give the answers of the CPU, and how much of the GPU's memory bandwidth does it use?

Takes under five minutes. Ends with status 1 if any answer differs. `--device cpu` takes the same path through torch on the CPU, on less
data: it shows that the script works, not how fast a GPU is.
"""

import datetime as dt
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from rich.table import Table

from cluster.failures import SettingsError
from cluster.record import Record
from retrieval.bounds import Norms
from retrieval.days import DayTable
from retrieval.exact import Certified, Exact
from retrieval.finder import Finder
from retrieval.half import copy_norms, half_copy
from retrieval.kernel_device import DeviceKernel, require_device
from retrieval.kernel_float import FloatKernel
from retrieval.kinds import exact_finder, rescorer
from retrieval.mask import Vectors
from retrieval.shard import Shard
from scripts.terminal import console

K = 10
_CHUNK = 50_000
_ROUNDS = 9


class Check(Record):
    """One kind and batch on the device."""

    kind: str
    rows: int
    dim: int
    queries: int
    ms: float
    """Median wall time of a batch, rescoring on the host included."""
    bandwidth: float
    """Bytes of vectors read, per second and over the device's measured speed."""
    equal: bool
    """Whether every answer, score and order is that of the float32 scan on the CPU."""


def main(
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cpu only tries the script.")] = "cuda",
    rows: Annotated[int | None, typer.Option(min=1_000, help="By default 2,000,000 on a GPU, 20,000 on a CPU.")] = None,
    dim: Annotated[int, typer.Option(min=8)] = 1_024,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Check search on a GPU: answers and bandwidth. Example: python -m scripts.gpu_check."""
    try:
        require_device(device)
    except SettingsError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(2)
    vectors = _unit(rows or (2_000_000 if device == "cuda" else 20_000), dim, 0)
    vectors[1::1_000] = vectors[0]  # exact ties, which must fall to the newer day
    days = _days(len(vectors))
    half = half_copy(vectors)
    norms = copy_norms(vectors, half)
    kinds = _kinds(vectors, half, norms, days, device)
    bytes_per_s = _bandwidth(device)
    reference = Shard(vectors, days, exact_finder(vectors, days))
    checks = []
    for count in (1, 8, 64):
        random = np.random.default_rng(count)
        queries = np.concatenate([_unit(count, dim, count)[: count - 1], vectors[:1]])
        ranges = [(0, int(high)) for high in random.integers(1, len(vectors) + 1, count)]
        expected = reference.search(queries, ranges, K)
        for kind, shard in kinds.items():
            equal = shard.search(queries, ranges, K) == expected
            seconds = _median(partial(shard.search, queries, ranges, K))
            read = max(high for _, high in ranges) * dim * (2 if kind == "exact-bf16" else 4)
            checks.append(
                Check(
                    kind=kind,
                    rows=len(vectors),
                    dim=dim,
                    queries=count,
                    ms=1e3 * seconds,
                    bandwidth=read / seconds / bytes_per_s,
                    equal=equal,
                )
            )
    _show(checks, device, bytes_per_s)
    if json_ is not None:
        json_.write_text("[\n" + ",\n".join(check.model_dump_json() for check in checks) + "\n]\n")
    if not all(check.equal for check in checks):
        console.print("answers differ from those of the CPU: do not search on this device, and report it", style="red")
        sys.exit(1)


def _kinds(
    vectors: Vectors, half: np.ndarray, norms: Norms, days: DayTable, device: Literal["cpu", "cuda"]
) -> dict[str, Shard]:
    """The path of a device, also for `cpu`, where an index would be served by other kernels."""
    scorer = rescorer(vectors, days)
    exact: Finder = Exact(scorer, DeviceKernel(vectors, norms, device))
    again = Exact(scorer, FloatKernel(vectors, norms))
    certified: Finder = Certified(scorer, DeviceKernel(half, norms, device), again)
    return {"exact": Shard(vectors, days, exact), "exact-bf16": Shard(vectors, days, certified)}


def _bandwidth(device: str) -> float:
    """Bytes per second that the device reads and writes when it copies memory: the faster of two rounds of copies."""
    import torch

    size = (1 << 30) if device == "cuda" else (1 << 27)
    source, target = torch.ones(size // 4, device=device), torch.empty(size // 4, device=device)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    copy()
    return 2 * size / _median(copy)


def _median(work: Callable[[], object]) -> float:
    """Seconds."""
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def _show(checks: list[Check], device: str, bytes_per_s: float) -> None:
    first = checks[0]
    title = f"{first.rows:,} × {first.dim} on {device}, k = {K}, random cutoffs; copies run at {bytes_per_s / 1e9:,.0f} GB/s"
    table = Table(title=title, title_justify="left")
    for column in ("kind", "queries", "ms", "of bandwidth", "answers"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for c in checks:
        answers = "equal" if c.equal else "DIFFER"
        table.add_row(c.kind, str(c.queries), f"{c.ms:.2f}", f"{c.bandwidth:.2f}", answers)
    console.print(table)


def _unit(rows: int, dim: int, seed: int) -> Vectors:
    random = np.random.default_rng(seed)
    unit = np.empty((rows, dim), np.float32)
    for start in range(0, rows, _CHUNK):
        drawn = random.standard_normal((min(_CHUNK, rows - start), dim), dtype=np.float32)
        unit[start : start + len(drawn)] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return unit


def _days(rows: int) -> DayTable:
    starts = np.unique(np.linspace(0, rows, 300, endpoint=False).astype(int)).tolist()
    days = tuple(dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(len(starts)))
    return DayTable(rows=rows, days=days, first_rows=tuple(starts))


if __name__ == "__main__":
    typer.run(main)
