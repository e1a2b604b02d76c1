"""The methods that `bench_retrieval` compares, each run in a process of its own: thread pools of one process fight.

`python -m scripts.bench_methods FOLDER METHOD K` opens the data of FOLDER, says that it is ready, and answers every line on its
standard input with one line of JSON: a `Run`, or a `Floor`.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from cluster.record import Record
from retrieval.mask import Vectors

VECTORS, HALF, QUERIES, HIGHS = "vectors.npy", "half.npy", "queries.npy", "highs.npy"

Found = list[list[int]]
"""Rows per query, best first."""

Search = Callable[[], Found]


class Run(Record):
    """One search of the whole batch."""

    ms: float
    """Wall time."""
    cpu_ms: float
    """Processor time of all threads."""
    found: Found


class Floor(Record):
    """What the machine could do at that moment."""

    bytes_per_s: float
    """The fastest of several ways to read the vectors."""
    flops_per_s: float
    """A large float32 matrix product."""

    def least_ms(self, highs: list[int], dim: int) -> float:
        """The roofline: no float32 scan of these prefixes can take less than reading the longest or multiplying them all."""
        bytes_read, operations = 4 * dim * max(highs), 2 * dim * sum(highs)
        return 1e3 * max(bytes_read / self.bytes_per_s, operations / self.flops_per_s)


class Data:
    """What every method searches: unit rows in date order, and for each query the row that its cutoff ends before."""

    def __init__(self, folder: Path, k: int) -> None:
        """Vectors are memory-mapped, as an index serves them."""
        self.folder = folder
        self.k = k
        self.vectors: Vectors = np.asarray(np.load(folder / VECTORS, mmap_mode="c"))
        self.queries: Vectors = np.load(folder / QUERIES)
        self.highs: list[int] = np.load(folder / HIGHS).tolist()

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """[low, high) per query."""
        return [(0, high) for high in self.highs]


def _ours(data: Data, name: str) -> Search:
    import datetime as dt

    from retrieval.days import DayTable
    from retrieval.finder import Finder
    from retrieval.kinds import certified_finder, exact_finder, rescorer
    from retrieval.manifest import Approximation
    from retrieval.shard import Shard

    rows = len(data.vectors)
    starts = np.unique(np.linspace(0, rows, 30, endpoint=False).astype(int)).tolist()
    first = dt.date(2024, 1, 1)
    days = DayTable(
        rows=rows, days=tuple(first + dt.timedelta(days=i) for i in range(len(starts))), first_rows=tuple(starts)
    )
    finder: Finder = exact_finder(data.vectors, days)
    if name == "exact-bf16":
        finder = certified_finder(data.vectors, np.asarray(np.load(data.folder / HALF, mmap_mode="c")), days)
    elif name == "approximate":
        from retrieval.approximate import Approximate, train_lists

        how = Approximation(code="sq", lists=min(1_024, max(1, rows // 400)), probes=32, rescored=4)
        lists = train_lists(data.vectors, how)
        finder = Approximate(rescorer(data.vectors, days), exact_finder(data.vectors, days), lists, how)
    shard = Shard(data.vectors, days, finder)
    return lambda: [list(answer.rows) for answer in shard.search(data.queries, data.ranges, data.k)]


def _faiss_selector(data: Data) -> Search:
    import faiss

    index: Any = faiss.IndexFlatIP(data.vectors.shape[1])
    for start in range(0, len(data.vectors), 65_536):
        index.add(data.vectors[start : start + 65_536])

    def search() -> Found:
        found = []
        for i, (low, high) in enumerate(data.ranges):
            parameters: Any = faiss.SearchParameters()
            selector = faiss.IDSelectorRange(low, high)
            parameters.sel = selector
            found.append(index.search(data.queries[i : i + 1], data.k, params=parameters)[1][0].tolist())
        return found

    return search


def _faiss_prefix(data: Data) -> Search:
    import faiss

    def search() -> Found:
        return [
            faiss.knn(
                data.queries[i : i + 1], data.vectors[:high], min(data.k, high), metric=faiss.METRIC_INNER_PRODUCT
            )[1][0].tolist()
            for i, high in enumerate(data.highs)
        ]

    return search


def _faiss_grouped(data: Data) -> Search:
    import faiss

    faiss.cvar.distance_compute_blas_threshold = 1
    groups = {high: [i for i, h in enumerate(data.highs) if h == high] for high in set(data.highs)}

    def search() -> Found:
        found: Found = [[] for _ in data.highs]
        for high, members in groups.items():
            rows = faiss.knn(
                data.queries[members], data.vectors[:high], min(data.k, high), metric=faiss.METRIC_INNER_PRODUCT
            )[1]
            for i, row in zip(members, rows.tolist(), strict=True):
                found[i] = row
        return found

    return search


def _lancedb(data: Data) -> Search:
    import lancedb
    import pyarrow as pa

    rows, dimension = data.vectors.shape
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(data.vectors.reshape(-1)), dimension)
    columns = pa.table({"row": pa.array(np.arange(rows)), "vector": vectors})
    table = lancedb.connect(str(data.folder / "lancedb")).create_table("articles", columns, mode="overwrite")

    def search() -> Found:
        found = []
        for query, high in zip(data.queries, data.highs, strict=True):
            asked = table.search(query).distance_type("dot").where(f"row < {high}", prefilter=True)
            found.append(asked.limit(data.k).select(["row", "_distance"]).to_arrow()["row"].to_pylist())
        return found

    return search


def _usearch(data: Data) -> Search:
    from usearch.index import MetricKind
    from usearch.index import search as exact

    def search() -> Found:
        return [
            exact(data.vectors[:high], query, min(data.k, high), MetricKind.IP, exact=True).keys.tolist()
            for query, high in zip(data.queries, data.highs, strict=True)
        ]

    return search


METHODS: dict[str, Callable[[Data], Search]] = {
    "exact": lambda data: _ours(data, "exact"),
    "exact-bf16": lambda data: _ours(data, "exact-bf16"),
    "approximate": lambda data: _ours(data, "approximate"),
    "faiss-selector": _faiss_selector,
    "faiss-prefix": _faiss_prefix,
    "faiss-grouped": _faiss_grouped,
    "lancedb": _lancedb,
    "usearch": _usearch,
}

ROOFLINE = "roofline"
"""Measures memory bandwidth and the arithmetic peak instead of searching."""


def _roofline(data: Data) -> Callable[[], Floor]:
    from threadpoolctl import threadpool_limits

    from retrieval.workers import granted_cores

    threads = granted_cores()
    flat = data.vectors.reshape(-1)[: 1 << 28]  # at most 1 GiB
    parts = np.array_split(flat, 8 * threads)
    square = np.ascontiguousarray(np.resize(flat, (2_048, 2_048)))
    axis = np.ones(min(384, len(flat)), np.float32)

    def streamed(part: Vectors) -> None:
        # the fastest of several ways to read memory is what a scan is measured against
        whole = part[: len(part) // len(axis) * len(axis)]
        np.einsum("nd,d->n", whole.reshape(-1, len(axis)), axis)

    readers: tuple[Callable[[Vectors], object], ...] = (streamed, np.sum, lambda part: np.dot(part, part))

    def measure() -> Floor:
        speeds = []
        with threadpool_limits(1, "blas"), ThreadPoolExecutor(threads) as pool:
            for reader in readers:
                began = time.perf_counter()
                list(pool.map(reader, parts))
                speeds.append(flat.nbytes / (time.perf_counter() - began))
        began = time.perf_counter()
        square @ square
        return Floor(bytes_per_s=max(speeds), flops_per_s=2 * 2_048**3 / (time.perf_counter() - began))

    return measure


def _serve(folder: Path, name: str, k: int, answers: TextIO) -> None:
    """Writes "ready", then one line of JSON for every line that comes in."""
    data = Data(folder, k)
    run: Callable[[], Run | Floor] = _roofline(data) if name == ROOFLINE else _timed(METHODS[name](data))
    run()  # the first run loads pages and starts threads
    answers.write("ready\n")
    answers.flush()
    for _ in sys.stdin:
        answers.write(run().model_dump_json() + "\n")
        answers.flush()


def _timed(search: Search) -> Callable[[], Run]:
    def run() -> Run:
        began, computed = time.perf_counter(), time.process_time()
        found = search()
        took, used = time.perf_counter() - began, time.process_time() - computed
        return Run(ms=1e3 * took, cpu_ms=1e3 * used, found=found)

    return run


if __name__ == "__main__":
    own_output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not stand among the answers
    _serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), own_output)
