"""The approximate kind: FAISS inverted lists over compressed vectors, for corpora beyond memory.

Lists are searched under the same row ranges. What FAISS returns is checked against the range again, scored canonically from the float32
rows and ordered like any answer; only rows that FAISS missed are missing. Where it finds fewer rows than it should, and where a range is
so short that lists save nothing, the exact scan answers. FAISS never sees an empty or crossed range: those end its process.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from retrieval.canonical import Rows
from retrieval.finder import Answers, Finder, Known, Ranges
from retrieval.manifest import FEWEST_ROWS, Approximation
from retrieval.mask import Vectors
from retrieval.rescorer import Rescorer
from retrieval.workers import granted_cores

_ROWS_PER_LIST = 39
"""FAISS asks for at least so many training rows per list."""

_TRAINING_ROWS_PER_LIST = 256

_MEASURED_QUERIES = 100
_MEASURED_K = 10


class Approximate:
    """Implements `Finder` with FAISS lists."""

    def __init__(self, rescorer: Rescorer, exact: Finder, lists: Any, settings: Approximation) -> None:
        """`lists`: a FAISS IVF index whose ids are the rows of the shard."""
        self._rescorer = rescorer
        self._exact = exact
        self._lists = lists
        self._settings = settings
        faiss.omp_set_num_threads(granted_cores())

    def search(self, queries: Vectors, ranges: Ranges, k: int, known: Known) -> Answers:
        """See `Finder`."""
        wanted = k * self._settings.rescored
        together: dict[tuple[int, int], list[int]] = defaultdict(list)
        exactly: list[int] = []
        listed: dict[int, Rows] = {}
        for query, (low, high) in enumerate(ranges.tolist()):
            if high - low <= max(FEWEST_ROWS // 4, wanted):
                exactly.append(query)
            else:
                together[low, high].append(query)
        for (low, high), members in together.items():
            for query, rows in zip(members, self._listed(queries[members], low, high, wanted), strict=True):
                if len(rows) < k:
                    exactly.append(query)  # the lists that were looked into hold too little of what is visible
                else:
                    listed[query] = rows
        asked = np.repeat(np.array(list(listed), np.int64), [len(rows) for rows in listed.values()])
        rows = np.concatenate([*listed.values(), np.empty(0, np.int64)])
        ranked = self._rescorer.best_of_each(queries, asked, rows, k)
        rescored = len(rows)
        if exactly:
            answers = self._exact.search(queries[exactly], ranges[exactly], k, known.of(exactly))
            for query, answer in zip(exactly, answers.ranked, strict=True):
                ranked[query] = answer
            rescored += answers.rescored
        visible = ranges[exactly, 0] < ranges[exactly, 1]
        return Answers(tuple(ranked), rescored, int(visible.sum()))

    def _listed(self, queries: Vectors, low: int, high: int, wanted: int) -> list[Rows]:
        selector = faiss.IDSelectorRange(low, high, True)  # rows were added in order, so every list is sorted
        parameters: Any = faiss.SearchParametersIVF()
        parameters.sel, parameters.nprobe = selector, min(self._settings.probes, self._lists.nlist)
        _, rows = self._lists.search(queries, wanted, params=parameters)
        # −1 fills what was not found, and taken as a row it would be the newest one
        return [np.unique(found[(found >= low) & (found < high)]) for found in rows.astype(np.int64)]


def train_lists(vectors: Vectors, settings: Approximation, seed: int = 0) -> Any:
    """A FAISS index of all rows, their numbers as ids. Raises ValueError where the compression does not fit the dimension."""
    rows, dimension = vectors.shape
    count = min(settings.lists or 4 * math.isqrt(rows), max(1, rows // _ROWS_PER_LIST))
    coarse = faiss.IndexFlatIP(dimension)
    lists: Any
    if settings.code == "pq":
        parts = dimension // 4
        if dimension % 4:
            raise ValueError(
                f"code pq cuts vectors into parts of 4 values, and {dimension} is no multiple of 4; use sq"
            )
        lists = faiss.IndexIVFPQ(coarse, dimension, count, parts, 8, faiss.METRIC_INNER_PRODUCT)
    else:
        eight_bits = faiss.ScalarQuantizer.QT_8bit
        lists = faiss.IndexIVFScalarQuantizer(coarse, dimension, count, eight_bits, faiss.METRIC_INNER_PRODUCT)
    lists.cp.seed = seed
    lists.cp.min_points_per_centroid = 1
    random = np.random.default_rng(seed)
    enough = min(rows, max(_TRAINING_ROWS_PER_LIST * count, FEWEST_ROWS))
    lists.train(vectors[np.sort(random.choice(rows, enough, replace=False))])
    for start in range(0, rows, 65_536):
        lists.add(vectors[start : start + 65_536])
    return lists


def write_lists(lists: Any, file: Path) -> None:
    """In FAISS's own format."""
    faiss.write_index(lists, str(file))


def read_lists(file: Path, rows: int, dimension: int) -> Any:
    """Memory-mapped. Raises ValueError unless it is an IVF index of so many rows and dimensions."""
    try:
        lists = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise ValueError(f"{file.name} is not a FAISS index: {error}") from error
    if not isinstance(lists, faiss.IndexIVF) or (lists.ntotal, lists.d) != (rows, dimension):
        raise ValueError(f"{file.name} holds {lists.ntotal} vectors of {lists.d}, not {rows} of {dimension} in lists")
    return lists


def measured_recall(approximate: Finder, exact: Finder, vectors: Vectors) -> float:
    """The share of the exact best 10 that is found, averaged over up to 100 queries.

    The queries are rows of the shard, evenly spaced over its second half, each asking for what lies before it: dated searches with vectors
    as the corpus has them.
    """
    rows = len(vectors)
    asked = np.unique(np.linspace(rows // 2, rows - 1, _MEASURED_QUERIES).astype(np.int64))
    ranges = np.stack([np.zeros_like(asked), asked], axis=1)
    queries = np.ascontiguousarray(vectors[asked])
    nothing = Known.nothing(len(asked))
    truth = exact.search(queries, ranges, _MEASURED_K, nothing).ranked
    found = approximate.search(queries, ranges, _MEASURED_K, nothing).ranked
    shares = [len(set(t.rows) & set(f.rows)) / len(t.rows) for t, f in zip(truth, found, strict=True) if t.rows]
    return sum(shares) / len(shares)
