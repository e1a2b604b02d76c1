"""Writes the postings of a month for `lexical.Postings`: one pass over the texts, one over what it found.

Memory holds the distinct terms and one chunk of articles; the postings themselves stay on the disk, in the order in
which they were found and then in that of their terms. The same texts give the same bytes.
"""

import itertools
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from retrieval.lexical import LENGTHS, POSTINGS, TERMS, analyse

_CHUNK = 4096
"""Articles at once."""

_open_memmap: Callable[..., NDArray[np.int32]] = open_memmap

_SCHEMA = pa.schema([("term", pa.large_string()), ("end", pa.int64())])


def write_postings(folder: Path, texts: Iterable[str]) -> None:
    """Write LEXICAL_FILES into an existing folder: the postings of these texts, one a row, in row order."""
    vocabulary: dict[str, int] = {}
    lengths, distinct = array("i"), array("i")
    with tempfile.TemporaryFile(dir=folder) as found:
        frequencies = _spool(texts, vocabulary, lengths, distinct, found)
        terms = sorted(vocabulary)
        place = np.empty(len(terms), np.int64)
        place[[vocabulary[term] for term in terms]] = np.arange(len(terms))
        ends = np.empty(len(terms), np.int64)
        ends[place] = frequencies
        np.cumsum(ends, out=ends)
        shape = (2, int(ends[-1]) if terms else 0)
        postings = _open_memmap(folder / POSTINGS, mode="w+", dtype=np.int32, shape=shape)
        found.seek(0)
        _scatter(found, np.asarray(distinct), place, ends, postings)
    np.save(folder / LENGTHS, np.asarray(lengths, np.int32), allow_pickle=False)
    table = pa.table({"term": terms, "end": ends}, schema=_SCHEMA)
    with pa.OSFile(str(folder / TERMS), "wb") as stream, pa.ipc.new_file(stream, _SCHEMA) as writer:
        writer.write_table(table)


def _spool(
    texts: Iterable[str], vocabulary: dict[str, int], lengths: "array[int]", distinct: "array[int]", found: IO[bytes]
) -> NDArray[np.int64]:
    """Writes (term, count) as int32 pairs, article by article, terms numbered as they come. Articles per term.

    Fills `vocabulary`, and for each article `lengths` (terms) and `distinct` (different ones, which is its pairs).
    """
    frequencies = np.zeros(0, np.int64)
    for chunk in _chunks(texts):
        numbers, counts = array("i"), array("i")
        for text in chunk:
            terms = analyse(text)
            counted = Counter(terms)
            lengths.append(len(terms))
            distinct.append(len(counted))
            numbers.extend(vocabulary.setdefault(term, len(vocabulary)) for term in counted)
            counts.extend(counted.values())
        found.write(np.stack([np.asarray(numbers), np.asarray(counts)], axis=1).tobytes())
        more = np.bincount(np.asarray(numbers), minlength=len(vocabulary))
        more[: len(frequencies)] += frequencies
        frequencies = more
    return frequencies


def _scatter(
    found: IO[bytes],
    distinct: NDArray[np.int32],
    place: NDArray[np.int64],
    ends: NDArray[np.int64],
    postings: NDArray[np.int32],
) -> None:
    """Puts what was spooled where its term's postings lie; within a term in the order found, which is that of rows."""
    free = np.concatenate([np.zeros(1, np.int64), ends])
    for first in range(0, len(distinct), _CHUNK):
        sizes = distinct[first : first + _CHUNK]
        rows = np.repeat(np.arange(first, first + len(sizes), dtype=np.int32), sizes)
        pairs = np.frombuffer(found.read(8 * len(rows)), np.int32).reshape(-1, 2)
        terms = place[pairs[:, 0]]
        order = np.argsort(terms, kind="stable")
        here, starts, sizes_here = np.unique(terms[order], return_index=True, return_counts=True)
        within = np.arange(len(order)) - np.repeat(starts, sizes_here)
        targets = free[terms[order]] + within
        postings[0, targets] = rows[order]
        postings[1, targets] = pairs[order, 1]
        free[here] += sizes_here


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        yield chunk
