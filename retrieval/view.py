"""DatedView: the only retrieval object a forecast step ever holds.

Its cutoff is fixed when it is made; no method takes a date. What a searcher returns is checked against the cutoff
again, and only articles that this view's own searches returned can be read.
"""

import datetime as dt
from typing import Protocol

from cluster.failures import DataError, PastcastError
from retrieval.article import Article, Hit
from retrieval.days import require_day
from retrieval.mask import check_k


class BoundaryError(PastcastError):
    """An article from outside the view's days came out of the index: a bug, and never shown to a model."""


class NotReturned(PastcastError):
    """A step asked to read an id that its own searches did not return."""


class Searcher(Protocol):
    """An index that answers dated searches: local, or behind a pool.

    Raises InfrastructureError when it cannot answer; an empty result means that nothing matches.
    """

    async def search(self, query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        """The best articles published from `first_day` (None: the beginning) to `cutoff`, both inclusive, best first."""

    async def fetch(self, article_id: str) -> Article | None:
        """The article with exactly this id, of any day; None if the index has none."""


class DatedView:
    """What had been published by the cutoff, as one step may search and read it."""

    __slots__ = ("_cutoff", "_first_day", "_returned", "_searcher")

    def __init__(self, searcher: Searcher, cutoff: dt.date, first_day: dt.date | None = None) -> None:
        """`cutoff` and `first_day` are UTC days, both inclusive.

        Raises TypeError for anything but a plain date (no cutoff, no view), ValueError if no day lies between them.
        """
        self._cutoff = require_day(cutoff, "a view's cutoff")
        if first_day is not None and require_day(first_day, "a view's first day") > cutoff:
            raise ValueError(f"the first day {first_day} lies after the cutoff {cutoff}: nothing could be visible")
        self._first_day = first_day
        self._searcher = searcher
        self._returned: dict[str, dt.date] = {}

    @property
    def cutoff(self) -> dt.date:
        """The last visible UTC day."""
        return self._cutoff

    @property
    def first_day(self) -> dt.date | None:
        """The first visible UTC day; None: the beginning of the corpus."""
        return self._first_day

    async def search(self, query: str, top_k: int) -> tuple[Hit, ...]:
        """At most `top_k` hits, best first; their ids become readable.

        Raises ValueError for a `top_k` out of range, BoundaryError if the index returned what it must not, and the searcher's
        InfrastructureError.
        """
        check_k(top_k)
        hits = await self._searcher.search(query, self._first_day, self._cutoff, top_k)
        if len(hits) > top_k:
            raise BoundaryError(f"the index returned {len(hits)} hits where {top_k} were asked for")
        for hit in hits:
            self._require_visible(hit.article_id, hit.day)
        self._returned.update((hit.article_id, hit.day) for hit in hits)
        return hits

    async def read(self, article_id: str) -> Article:
        """The full article. The id must equal one that this view returned, character for character.

        Raises NotReturned for any other id, BoundaryError if the article's own day is not visible.
        """
        if article_id not in self._returned:
            raise NotReturned(
                f"{article_id!r} was not returned by a search of this step; search first, then use its id exactly"
            )
        article = await self._searcher.fetch(article_id)
        if article is None:
            raise DataError(f"article {article_id!r} was found but cannot be opened; build the index again")
        if article.id != article_id or article.day != self._returned[article_id]:
            raise BoundaryError(f"asked for {article_id!r}, the index opened {article.id!r} of another day or id")
        self._require_visible(article.id, article.day)
        return article

    def _require_visible(self, article_id: str, day: dt.date) -> None:
        too_early = self._first_day is not None and day < self._first_day
        if day > self._cutoff or too_early:
            raise BoundaryError(
                f"article {article_id!r} of {day} lies outside {self._first_day or 'the beginning'} to {self._cutoff}"
            )
