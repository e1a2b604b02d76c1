"""How a search ranks (`search.mode`): by vectors, by words, or by both. Decided here once, for every searcher alike.

What `lexical` and `hybrid` show depends on the visible articles alone, as what `dense` shows does: words are counted over
those, and fusing two rankings only reorders them.
"""

import asyncio
import datetime as dt
from typing import Protocol

from cluster.config import SearchSettings
from retrieval.article import Hit
from retrieval.days import require_day
from retrieval.fusion import fuse
from retrieval.lexical import LexicalQuery
from retrieval.manifest import Manifest
from retrieval.mask import check_k


class Rankings(Protocol):
    """The two ways to rank the articles from `first_day` (None: the beginning) to `cutoff`, both inclusive."""

    async def by_vector(self, query: str, first_day: dt.date | None, cutoff: dt.date, k: int) -> list[Hit]:
        """The best `k` by inner product with the query's vector, best first; the score is that product."""

    async def by_words(self, words: LexicalQuery, first_day: dt.date | None, cutoff: dt.date, k: int) -> list[Hit]:
        """The best `k` by BM25, best first; fewer if fewer hold a word of the query. The score is that of BM25."""


async def ranked(
    search: SearchSettings, rankings: Rankings, query: str, first_day: dt.date | None, cutoff: dt.date, k: int
) -> tuple[Hit, ...]:
    """The best `k` visible articles, best first, ties by newer day, then id. In hybrid a hit's score is the fused one.

    Raises TypeError for a day that is none, ValueError for a `k` out of bounds, and what `rankings` raises.
    """
    check_k(k)
    require_day(cutoff, "a cutoff")
    if first_day is not None:
        require_day(first_day, "a first day")
    if search.mode == "dense":
        return tuple(await rankings.by_vector(query, first_day, cutoff, k))
    words = LexicalQuery.of(query)
    if search.mode == "lexical":
        return tuple(await rankings.by_words(words, first_day, cutoff, k))
    depth = max(k, search.candidates)
    both = await asyncio.gather(
        rankings.by_vector(query, first_day, cutoff, depth), rankings.by_words(words, first_day, cutoff, depth)
    )
    return tuple(fuse(both, k))


def described(manifest: Manifest, search: SearchSettings) -> str:
    """What a report says about how a run searches this index."""
    if search.mode == "dense":
        return manifest.search
    words = "BM25 of what is visible"
    if search.mode == "lexical":
        return f"lexical: {words}"
    return f"hybrid: {manifest.search} and {words}, the best {search.candidates} of each fused by reciprocal rank"
