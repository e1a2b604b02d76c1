"""The methods that `bench_retrieval` compares, each run in a process of its own: thread pools of one process fight.

`python -m scripts.bench_methods FOLDER METHOD K` opens the data of FOLDER, says that it is ready, and answers every line on its
standard input with one line of JSON: a `Run`, or a `Floor`.
"""

import datetime as dt
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import numpy as np

from retrieval.days import DayTable
from retrieval.finder import Finder, Known
from retrieval.kinds import certified_finder, exact_finder, rescorer
from retrieval.manifest import Approximation
from retrieval.mask import Vectors
from retrieval.shard import Shard
from scripts.bench.floor import Floor, floor_meter
from scripts.bench.interleaved import ROOFLINE, Found, Run
from scripts.bench.retrieval_data import HALF, HIGHS, QUERIES, VECTORS

Search = Callable[[], Found]

_RUN_SECONDS = 0.3
"""A run lasts at least so long."""


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
    shard = _shard(data, name, 0, len(data.vectors))
    return lambda: [list(answer.rows) for answer in shard.search(data.queries, data.ranges, data.k)]


def _shard(data: Data, name: str, start: int, stop: int) -> Shard:
    """These rows, with thirty days."""
    vectors = data.vectors[start:stop]
    starts = np.unique(np.linspace(0, len(vectors), 30, endpoint=False).astype(int)).tolist()
    dates = tuple(dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(len(starts)))
    days = DayTable(rows=len(vectors), days=dates, first_rows=tuple(starts))
    finder: Finder = exact_finder(vectors, days)
    if name == "exact-bf16":
        half = np.asarray(np.load(data.folder / HALF, mmap_mode="c"))[start:stop]
        finder = certified_finder(vectors, half, days)
    elif name == "approximate":
        from retrieval.approximate import Approximate, train_lists

        how = Approximation(code="sq", lists=min(1_024, max(1, len(vectors) // 400)), probes=32, rescored=4)
        finder = Approximate(rescorer(vectors, days), finder, train_lists(vectors, how), how)
    return Shard(vectors, days, finder)


def _sharded(data: Data, name: str, shards: int) -> Search:
    """The rows cut into equal shards, searched one after the other and merged, as one actor searches its months."""
    edges = np.linspace(0, len(data.vectors), shards + 1).astype(int).tolist()
    parts = [(start, _shard(data, name, start, stop)) for start, stop in pairwise(edges)]

    def search() -> Found:
        hits: list[list[tuple[float, int]]] = [[] for _ in data.highs]
        known = Known.nothing(len(hits))
        for start, shard in parts:
            asking = [i for i, high in enumerate(data.highs) if high > start]
            ranges = [(0, min(data.highs[i] - start, len(shard))) for i in asking]
            answers = shard.search(data.queries[asking], ranges, data.k, known.of(asking))
            for i, answer, (low, high) in zip(asking, answers, ranges, strict=True):
                new = [(-score, start + row) for row, score in zip(answer.rows, answer.scores, strict=True)]
                hits[i] = sorted(hits[i] + new)[: data.k]
                known.add(i, high - low, [-score for score, _ in hits[i]], data.k)
        return [[row for _, row in found] for found in hits]

    return search


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


def _method(name: str) -> Callable[[Data], Search]:
    """By its name; `exact/16` is `exact` over sixteen shards."""
    kind, _, shards = name.partition("/")
    return (lambda data: _sharded(data, kind, int(shards))) if shards else METHODS[name]


def _serve(folder: Path, name: str, k: int, answers: TextIO) -> None:
    """Writes "ready", then one line of JSON for every line that comes in."""
    data = Data(folder, k)
    run: Callable[[], Run | Floor] = floor_meter(data.vectors) if name == ROOFLINE else _timed(_method(name)(data))
    run()  # the first run loads pages and starts threads
    answers.write("ready\n")
    answers.flush()
    for _ in sys.stdin:
        answers.write(run().model_dump_json() + "\n")
        answers.flush()


def _timed(search: Search) -> Callable[[], Run]:
    """Repeats what is short, since threads that have just woken may share a core for as long as it takes: the median counts."""

    def run() -> Run:
        took: list[float] = []
        computed = time.process_time()
        while sum(took) < _RUN_SECONDS:
            began = time.perf_counter()
            found = search()
            took.append(time.perf_counter() - began)
        used = (time.process_time() - computed) / len(took)
        own, mapped = _memory_mib()
        return Run(ms=1e3 * median(took), cpu_ms=1e3 * used, found=found, own_mib=own, mapped_mib=mapped)

    return run


def _memory_mib() -> tuple[float, float]:
    """(anonymous, mapped from files), as the kernel counts this process's resident pages."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    sizes = {name: int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")}
    return sizes["RssAnon"], sizes["RssFile"]


if __name__ == "__main__":
    own_output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not stand among the answers
    _serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), own_output)
