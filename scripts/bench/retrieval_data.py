"""What the search benchmarks search: unit rows in date order, queries with cutoffs, and the true answers.

A folder holds the arrays, so that every method can have a process of its own over the same memory-mapped rows.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from retrieval.half import half_copy
from retrieval.mask import Vectors

VECTORS, HALF, QUERIES, HIGHS = "vectors.npy", "half.npy", "queries.npy", "highs.npy"

Cutoffs = Literal["random", "shared", "days8", "half"]
"""`random`: one per query; `days8`: of eight days; `shared`: all see all rows; `half`: all see the older half."""

_CHUNK = 50_000


def make_rows(folder: Path, rows: int, dim: int, seed: int) -> None:
    """Random unit vectors and their half-precision copy."""
    random = np.random.default_rng(seed)
    vectors = np.empty((rows, dim), np.float32)
    for start in range(0, rows, _CHUNK):
        vectors[start : start + _CHUNK] = unit(random, min(_CHUNK, rows - start), dim)
    np.save(folder / VECTORS, vectors)
    np.save(folder / HALF, half_copy(vectors))


def make_queries(folder: Path, rows: int, dim: int, queries: int, cutoffs: Cutoffs, seed: int) -> list[int]:
    """Random unit queries, and the row before which each cutoff ends: returned."""
    random = np.random.default_rng(seed + 1)
    np.save(folder / QUERIES, unit(random, queries, dim))
    if cutoffs == "random":
        highs = random.integers(1, rows + 1, queries)
    elif cutoffs == "days8":
        highs = random.choice(random.integers(1, rows + 1, 8), queries)
    else:
        highs = np.full(queries, rows if cutoffs == "shared" else rows // 2)
    np.save(folder / HIGHS, highs)
    return [int(high) for high in highs]


def same_rows(folder: Path, name: str) -> Path:
    """A folder inside this one with the same rows, for other queries."""
    beside = folder / name
    beside.mkdir()
    for file in (VECTORS, HALF):
        (beside / file).hardlink_to(folder / file)
    return beside


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


def unit(random: np.random.Generator, rows: int, dim: int) -> Vectors:
    """float32 [rows, dim], each of length 1."""
    drawn = random.standard_normal((rows, dim), dtype=np.float32)
    made: Vectors = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return made


def _top(scores: np.ndarray, k: int) -> np.ndarray:
    top = np.argpartition(-scores, k)[:k]
    return top[np.argsort(-scores[top], kind="stable")]
