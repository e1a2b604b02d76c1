"""BM25 over the articles of one month, masked before it ranks, with the statistics of what is visible and of nothing else.

Document frequencies and mean lengths that are counted over a whole corpus tell what will be written about later. Here a
search takes them from the rows that its cutoff admits, added up over the months, so articles after the cutoff cannot
move a ranking before it. (A tantivy index counts both over everything it holds, so only its text analysis is used.) The
postings of a term are in row order, which is the order of days: what a cutoff admits is a slice of them.
"""

import importlib.metadata
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tantivy
from numpy.typing import NDArray

from cluster.record import Record
from retrieval.days import DayTable
from retrieval.encoder import encodable
from retrieval.mask import check_k

TERMS, POSTINGS, LENGTHS = "terms.arrow", "postings.npy", "lengths.npy"
LEXICAL_FILES = (TERMS, POSTINGS, LENGTHS)
"""The terms in order with the end of each one's postings; int32 [2, postings], rows and counts; int32 [rows], terms per row."""

K1 = 1.2
"""How soon repeating a term in an article stops to count."""
B = 0.75
"""How much an article's length counts against it."""

LONGEST_TERM = 40
"""Bytes; longer words are addresses and keys, which nobody searches for."""

ANALYSIS = f"english-1, tantivy {importlib.metadata.version('tantivy')}"
"""The rule that makes terms of a text: a query must be analysed as the articles were."""

_CHECKED = 1 << 22
"""Postings that are checked at once, so that opening a month takes little memory."""
_REMEMBERED = 1 << 14
"""Terms whose place is kept."""


class Statistics(Record):
    """What BM25 counts over the visible articles."""

    documents: int
    length: int
    """Terms in all of them together."""
    frequencies: tuple[int, ...]
    """One per query term: articles that hold it."""

    def __add__(self, other: "Statistics") -> "Statistics":
        """Of two disjoint sets of articles, for the same terms."""
        return Statistics(
            documents=self.documents + other.documents,
            length=self.length + other.length,
            frequencies=tuple(a + b for a, b in zip(self.frequencies, other.frequencies, strict=True)),
        )


def no_statistics(terms: Sequence[str]) -> Statistics:
    """Of no articles: where adding up begins."""
    return Statistics(documents=0, length=0, frequencies=(0,) * len(terms))


class LexicalQuery(Record):
    """A query's distinct terms in alphabetical order, and how often each stands in it."""

    terms: tuple[str, ...]
    weights: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> "LexicalQuery":
        """The query's terms, analysed like an article's; none for a text without words."""
        counted = sorted(Counter(analyse(encodable(text))).items())
        return cls(terms=tuple(t for t, _ in counted), weights=tuple(n for _, n in counted))


def analyse(text: str) -> list[str]:
    """The terms of a text: words in lower case, without accents, stemmed as English."""
    terms: list[str] = _analyser().analyze(text)
    return terms


@cache
def _analyser() -> Any:
    words = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(tantivy.Filter.remove_long(LONGEST_TERM + 1))
    folded = words.filter(tantivy.Filter.lowercase()).filter(tantivy.Filter.ascii_fold())
    return folded.filter(tantivy.Filter.stemmer("english")).build()


@dataclass(frozen=True)
class Matches:
    """The answer to one query, best first; only rows that hold a term of it."""

    rows: tuple[int, ...]
    scores: tuple[float, ...]


class Postings:
    """Which rows of a month hold which term, and how often: all that a lexical search reads."""

    def __init__(
        self,
        terms: pa.Array,
        starts: NDArray[np.int64],
        rows: NDArray[np.int32],
        counts: NDArray[np.int32],
        lengths: NDArray[np.int32],
        days: DayTable,
    ) -> None:
        """`terms`: distinct, ascending; term i has the postings `starts[i]` to `starts[i + 1]`, by ascending row.

        `lengths`: terms per row; rows as in `days`. Raises ValueError if they do not fit together.
        """
        if len(lengths) != days.rows:
            raise ValueError(f"postings of {len(lengths)} rows, but the day table has {days.rows}")
        if len(starts) != len(terms) + 1 or starts[0] != 0 or starts[-1] != len(rows) or len(rows) != len(counts):
            raise ValueError(f"{len(terms)} terms, {len(starts)} starts, {len(rows)} rows and {len(counts)} counts")
        if not (np.diff(starts) > 0).all():
            raise ValueError("a term has no postings, or they end before they begin")
        if len(terms) > 1 and not pc.all(pc.less(terms[:-1], terms[1:])).as_py():
            raise ValueError("the terms are not in alphabetical order")
        _check_rows(rows, starts, len(lengths))
        self._terms, self._starts, self._rows, self._counts = terms, starts, rows, counts
        self._lengths = lengths
        self._first_rows = np.asarray(days.first_rows)
        self._length_before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        # scoring asks for the same terms that counting asked for
        self._place = lru_cache(_REMEMBERED)(self._find)

    @classmethod
    def load(cls, folder: Path, days: DayTable) -> "Postings":
        """Memory-mapped, of a folder with LEXICAL_FILES. Raises OSError or ValueError for files that are damaged."""
        with pa.memory_map(str(folder / TERMS)) as stream:
            table = pa.ipc.open_file(stream).read_all()
        terms, ends = (table[name].combine_chunks() for name in ("term", "end"))
        # read-only, as the vectors are
        postings = np.asarray(np.load(folder / POSTINGS, mmap_mode="r", allow_pickle=False))
        lengths = np.asarray(np.load(folder / LENGTHS, mmap_mode="r", allow_pickle=False))
        if postings.dtype != np.int32 or postings.ndim != 2 or len(postings) != 2 or lengths.dtype != np.int32:
            raise ValueError(f"postings of {postings.dtype} {postings.shape} and lengths of {lengths.dtype}")
        starts = np.concatenate([np.zeros(1, np.int64), ends.to_numpy(zero_copy_only=False)])
        return cls(terms, starts, postings[0], postings[1], lengths, days)

    def __len__(self) -> int:
        """Rows."""
        return len(self._lengths)

    def statistics(self, terms: Sequence[str], low: int, high: int) -> Statistics:
        """Of the rows [low, high). Raises ValueError unless they lie in [0, rows] in this order."""
        self._check_range(low, high)
        spans = [self._span(term, low, high) for term in terms]
        return Statistics(
            documents=high - low,
            length=int(self._length_before[high] - self._length_before[low]),
            frequencies=tuple(stop - start for start, stop in spans),
        )

    def search(self, query: LexicalQuery, low: int, high: int, statistics: Statistics, k: int) -> Matches:
        """The best k of the rows [low, high) that hold a term of the query; fewer if fewer do.

        `statistics`: of everything that the query may see, this month and others. Score (Robertson and Zaragoza, The
        Probabilistic Relevance Framework, 2009, eq. 3.15, with the idf of Lucene, which is never negative): the sum over the
        terms of weight · ln(1 + (N − n + ½)/(n + ½)) · f (k₁ + 1)/(f + k₁ (1 − b + b · length/mean length)). Ties go to the newer
        day, then to the lower row, which is the lower id. Raises ValueError for a range, a `k` or statistics out of bounds.
        """
        check_k(k)
        self._check_range(low, high)
        if high == low or not query.terms:
            return Matches((), ())
        if statistics.documents < high - low:
            raise ValueError(f"statistics of {statistics.documents} articles for a search of {high - low}")
        mean = max(statistics.length / statistics.documents, 1.0)
        scores = np.zeros(high - low)
        for term, weight, frequency in zip(query.terms, query.weights, statistics.frequencies, strict=True):
            start, stop = self._span(term, low, high)
            if start == stop:
                continue
            rows = self._rows[start:stop]
            counts = self._counts[start:stop].astype(np.float64)
            idf = np.log1p((statistics.documents - frequency + 0.5) / (frequency + 0.5))
            damping = K1 * (1 - B + B * self._lengths[rows] / mean)
            scores[rows - low] += weight * idf * counts * (K1 + 1) / (counts + damping)
        matching = np.flatnonzero(scores)
        if len(matching) > k:
            kth = np.partition(scores[matching], -k)[-k]
            matching = matching[scores[matching] >= kth]
        found = matching + low
        day = np.searchsorted(self._first_rows, found, side="right")
        best = np.lexsort((found, -day, -scores[matching]))[:k]
        return Matches(tuple(found[best].tolist()), tuple(scores[matching[best]].tolist()))

    def _span(self, term: str, low: int, high: int) -> tuple[int, int]:
        """The postings of a term among the rows [low, high)."""
        first, last = self._place(term)
        begin, end = np.searchsorted(self._rows[first:last], [low, high])
        return first + int(begin), first + int(end)

    def _find(self, term: str) -> tuple[int, int]:
        """All postings of a term."""
        at = bisect_left(self._terms, term, key=lambda scalar: scalar.as_py())
        if at == len(self._terms) or self._terms[at].as_py() != term:
            return 0, 0
        return int(self._starts[at]), int(self._starts[at + 1])

    def _check_range(self, low: int, high: int) -> None:
        if not 0 <= low <= high <= len(self):
            raise ValueError(f"row range [{low}, {high}) does not lie in [0, {len(self)}]")


def _check_rows(rows: NDArray[np.int32], starts: NDArray[np.int64], articles: int) -> None:
    """Raises ValueError unless all rows are some of the articles', and increase within each term."""
    for low in range(0, len(rows), _CHECKED):
        part = rows[low : low + _CHECKED + 1]
        if not 0 <= int(part.min()) <= int(part.max()) < articles:
            raise ValueError(f"a posting names a row outside [0, {articles})")
        increases = np.diff(part) > 0
        begins = starts[np.searchsorted(starts, low, "right") : np.searchsorted(starts, low + len(increases), "right")]
        increases[begins - low - 1] = True
        if not increases.all():
            raise ValueError("the postings of a term are not in row order, so a cutoff could not cut them")
