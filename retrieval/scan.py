"""A search over several months: which shards a query needs, and how their answers become one list.

Used alike by a shard actor and by the local searcher, so that both give the same answer.
"""

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.record import Record
from retrieval.article import Hit
from retrieval.encoder import Vectors
from retrieval.manifest import ShardManifest
from retrieval.shard_files import StoredShard


@dataclass(frozen=True)
class Query:
    """One dated search."""

    vector: Vectors
    """float32 [dimension]."""
    first_day: dt.date | None
    cutoff: dt.date
    """Inclusive, as is `first_day`."""
    k: int


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


def search_shards(
    shards: Mapping[str, StoredShard], queries: Sequence[Query], snippet_characters: int
) -> list[list[Hit]]:
    """The best `k` hits of each query over all shards, best first. One matrix product per block for all queries.

    Only the articles of these hits are opened.
    """
    found: list[list[_Place]] = [[] for _ in queries]
    for month, stored in shards.items():
        ranges = [stored.days.visible(q.first_day, q.cutoff) for q in queries]
        asking = [i for i, (low, high) in enumerate(ranges) if low < high]
        if not asking:
            continue
        answers = stored.shard.search(
            np.stack([queries[i].vector for i in asking]),
            [ranges[i] for i in asking],
            max(queries[i].k for i in asking),
        )
        for i, answer in zip(asking, answers, strict=True):
            pairs = zip(answer.rows[: queries[i].k], answer.scores, strict=False)
            found[i].extend(_Place(-score, -stored.days.day_of(row).toordinal(), row, month) for row, score in pairs)
    return [
        [shards[p.month].hit(p.row, -p.minus_score, snippet_characters) for p in sorted(places)[: q.k]]
        for places, q in zip(found, queries, strict=True)
    ]


@dataclass(frozen=True, order=True)
class _Place:
    """A row of a month. Sorts as its hit does in `merge`: a day lies in one month, where lower rows have lower ids."""

    minus_score: float
    minus_day: int
    row: int
    month: str


def merge(hits: Iterable[Hit], k: int) -> list[Hit]:
    """The best `k`: by score, then newer day, then id."""
    return sorted(hits, key=lambda h: (-h.score, -h.day.toordinal(), h.article_id))[:k]
