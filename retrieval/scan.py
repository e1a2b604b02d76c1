"""A search over several months: which shards a query needs, and how their answers become one list.

Used alike by a shard actor and by the local searcher, so that both give the same answer. A search by words takes two
rounds, the second with what the first counted in all months that the query may see.
"""

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cluster.record import Record
from retrieval.article import Hit
from retrieval.days import require_day
from retrieval.encoder import Vectors
from retrieval.finder import Known
from retrieval.lexical import LexicalQuery, Statistics, no_statistics
from retrieval.manifest import ShardManifest
from retrieval.mask import check_k, check_queries
from retrieval.shard_files import StoredShard


@dataclass(frozen=True)
class Query:
    """One dated search by its vector."""

    vector: Vectors
    """float32 [dimension]."""
    first_day: dt.date | None
    cutoff: dt.date
    """Inclusive, as is `first_day`."""
    k: int


@dataclass(frozen=True)
class WordQuery:
    """One dated search by its words."""

    words: LexicalQuery
    statistics: Statistics
    """Of all articles from `first_day` to `cutoff`, in whatever shards, and of no other."""
    first_day: dt.date | None
    cutoff: dt.date
    """Inclusive, as is `first_day`."""
    k: int


@dataclass(frozen=True)
class WordCount:
    """The first round of a search by words: what BM25 counts."""

    words: LexicalQuery
    first_day: dt.date | None
    cutoff: dt.date
    """Inclusive, as is `first_day`."""


Asked = Query | WordQuery | WordCount
"""What a holder of shards can be asked."""
Told = list[Hit] | Statistics
"""Its answer: hits for a search, counts for a WordCount."""


class Span(Record):
    """The days between which somebody holds articles."""

    first_day: dt.date
    last_day: dt.date

    @classmethod
    def of(cls, shards: Iterable[ShardManifest]) -> "Span":
        """From the earliest to the latest day of the shards, at least one."""
        spans = [(s.first_day, s.last_day) for s in shards]
        return cls(first_day=min(first for first, _ in spans), last_day=max(last for _, last in spans))

    def meets(self, first_day: dt.date | None, cutoff: dt.date) -> bool:
        """Whether any of its days can be visible."""
        return self.first_day <= cutoff and (first_day is None or first_day <= self.last_day)


def check_asked(asked: Asked, dimension: int) -> None:
    """Raises ValueError for a query vector or a `k` that cannot be searched, TypeError for a day that is none."""
    require_day(asked.cutoff, "a cutoff")
    if isinstance(asked, Query):
        check_queries(asked.vector[None, :], dimension)
    if not isinstance(asked, WordCount):
        check_k(asked.k)


def answers(shards: Mapping[str, StoredShard], asked: Sequence[Asked], snippet_characters: int) -> list[Told]:
    """The answer to each, from these shards. Searches by vector are made together."""
    by_vector = iter(search_shards(shards, [a for a in asked if isinstance(a, Query)], snippet_characters))
    return [next(by_vector) if isinstance(a, Query) else _by_words(shards, a, snippet_characters) for a in asked]


def _by_words(shards: Mapping[str, StoredShard], asked: WordQuery | WordCount, snippet_characters: int) -> Told:
    if isinstance(asked, WordCount):
        return count_words(shards, asked)
    return search_words(shards, asked, snippet_characters)


def search_shards(
    shards: Mapping[str, StoredShard], queries: Sequence[Query], snippet_characters: int
) -> list[list[Hit]]:
    """The best `k` hits of each query over all shards, best first. One matrix product per block for all queries.

    Only the articles of these hits are opened.
    """
    found: list[list[_Place]] = [[] for _ in queries]
    known = Known.nothing(len(queries))
    for month, stored in shards.items():
        ranges = [stored.days.visible(q.first_day, q.cutoff) for q in queries]
        asking = [i for i, (low, high) in enumerate(ranges) if low < high]
        if not asking:
            continue
        answers = stored.shard.search(
            np.stack([queries[i].vector for i in asking]),
            [ranges[i] for i in asking],
            max(queries[i].k for i in asking),
            known.of(asking),
        )
        for i, answer in zip(asking, answers, strict=True):
            k, (low, high) = queries[i].k, ranges[i]
            pairs = zip(answer.rows[:k], answer.scores, strict=False)
            found[i] = sorted([*found[i], *(_Place.of(stored, month, row, score) for row, score in pairs)])[:k]
            known.add(i, high - low, [-place.minus_score for place in found[i]], k)
    return [_opened(shards, places, snippet_characters) for places in found]


def count_words(shards: Mapping[str, StoredShard], count: WordCount) -> Statistics:
    """What BM25 counts over the articles of these shards from `first_day` to `cutoff`, and over no other."""
    counted = no_statistics(count.words.terms)
    for stored in shards.values():
        low, high = stored.days.visible(count.first_day, count.cutoff)
        if low < high:
            counted += stored.postings.statistics(count.words.terms, low, high)
    return counted


def search_words(shards: Mapping[str, StoredShard], query: WordQuery, snippet_characters: int) -> list[Hit]:
    """The best `k` hits over all shards, best first; fewer if fewer visible articles hold a word of the query."""
    found: list[_Place] = []
    for month, stored in shards.items():
        low, high = stored.days.visible(query.first_day, query.cutoff)
        if low < high:
            matches = stored.postings.search(query.words, low, high, query.statistics, query.k)
            pairs = zip(matches.rows, matches.scores, strict=True)
            found.extend(_Place.of(stored, month, row, score) for row, score in pairs)
    return _opened(shards, sorted(found)[: query.k], snippet_characters)


class _Place(NamedTuple):
    """A row of a month. Sorts as its hit does in `merge`: a day lies in one month, where lower rows have lower ids."""

    minus_score: float
    minus_day: int
    row: int
    month: str

    @classmethod
    def of(cls, stored: StoredShard, month: str, row: int, score: float) -> "_Place":
        return cls(-score, -stored.days.day_of(row).toordinal(), row, month)


def _opened(shards: Mapping[str, StoredShard], places: list[_Place], snippet_characters: int) -> list[Hit]:
    return [shards[p.month].hit(p.row, -p.minus_score, snippet_characters) for p in places]


def merge(hits: Iterable[Hit], k: int) -> list[Hit]:
    """The best `k`: by score, then newer day, then id."""
    return sorted(hits, key=lambda h: (-h.score, -h.day.toordinal(), h.article_id))[:k]
