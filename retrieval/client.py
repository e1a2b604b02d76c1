"""RetrievalClient: the searcher that every process of a run holds over the actors of the pool.

A search is encoded once, asked of one replica of every group whose months it can see, and merged; by words it is asked twice,
as `scan` says. A missing part never looks like an empty result: where a group cannot answer within the deadline, the search is
an InfrastructureError. Can be sent to any process of the Ray session.
"""

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.config import SearchSettings
from cluster.failures import InfrastructureError, PastcastError, SettingsError
from cluster.record import Record
from retrieval.article import Article, Hit
from retrieval.days import require_day
from retrieval.encoder import Vectors, encodable
from retrieval.group_caller import GroupCaller
from retrieval.lexical import LexicalQuery, no_statistics
from retrieval.mask import check_k, check_queries
from retrieval.modes import ranked
from retrieval.scan import Asked, Query, Span, WordCount, WordQuery, merge

Result = TypeVar("Result")

_DENSE = SearchSettings()


@dataclass(frozen=True)
class ShardGroup:
    """The replicas that hold the same months, and the days these can answer for."""

    handles: tuple[Any, ...]
    """Ray actor handles of ShardServers."""
    span: Span


class CallRules(Record):
    """How a client calls actors (`RetrievalSettings`)."""

    timeout_s: float
    """Deadline of one search or fetch, everything included."""
    silence_s: float
    """See `GroupCaller`."""
    batch: int = 64
    """Most queries of one call."""
    encoder_batch: int = 64
    """Most texts of one call."""


class _Callers:
    """What one event loop has under way."""

    def __init__(self, encoder: Any, groups: tuple[ShardGroup, ...], rules: CallRules) -> None:
        self.loop = asyncio.get_running_loop()
        self.encoder = encoder and GroupCaller("the query encoder", (encoder,), rules.encoder_batch, rules.silence_s)
        self.groups = tuple(
            GroupCaller(f"articles of {g.span.first_day} to {g.span.last_day}", g.handles, rules.batch, rules.silence_s)
            for g in groups
        )

    def faults(self) -> list[str]:
        """The last failure of every group that has had one."""
        return [caller.fault for caller in (self.encoder, *self.groups) if caller and caller.fault]


class _Round:
    """Implements `Rankings` for one search: which groups it asks, and until when it waits."""

    def __init__(self, callers: _Callers, asked: list[int], until: float) -> None:
        self._encoder = callers.encoder
        self._groups = [callers.groups[i] for i in asked]
        self._until = until

    async def by_vector(self, query: str, first_day: dt.date | None, cutoff: dt.date, k: int) -> list[Hit]:
        """See `Rankings`."""
        if self._encoder is None:
            raise SettingsError(
                "this pool was started without an encoder, and ranks by vectors that it is given or by words"
            )
        vector = await self._encoder.ask("encode", encodable(query), self._until)
        return await self.hits(Query(vector, first_day, cutoff, k))

    async def by_words(self, words: LexicalQuery, first_day: dt.date | None, cutoff: dt.date, k: int) -> list[Hit]:
        """See `Rankings`."""
        counted = sum(await self._all(WordCount(words, first_day, cutoff)), start=no_statistics(words.terms))
        return await self.hits(WordQuery(words, counted, first_day, cutoff, k))

    async def hits(self, query: Query | WordQuery) -> list[Hit]:
        """The best of all groups."""
        lists: list[list[Hit]] = await self._all(query)
        return merge((hit for hits in lists for hit in hits), query.k)

    async def _all(self, asked: Asked) -> list[Any]:
        return await asyncio.gather(*(group.ask("search", asked, self._until) for group in self._groups))


class RetrievalClient:
    """Implements `Searcher` over the actors."""

    def __init__(
        self, encoder: Any, groups: tuple[ShardGroup, ...], rules: CallRules, search: SearchSettings = _DENSE
    ) -> None:
        """`encoder`: Ray actor handle of an EncoderServer; None for mode `lexical` and for a client that is only asked by vector."""
        self._encoder = encoder
        self._groups = groups
        self._rules = rules
        self._search = search
        self._here: _Callers | None = None

    def __reduce__(self) -> tuple[type["RetrievalClient"], tuple[Any, ...]]:
        return RetrievalClient, (self._encoder, self._groups, self._rules, self._search)

    async def search(self, query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        """See `Searcher`. Raises InfrastructureError `retrieval-lost`, or `retrieval-gone` where no repetition helps."""
        asked = self._asked(first_day, cutoff, top_k)
        if not asked:
            return ()

        async def answer(until: float) -> tuple[Hit, ...]:
            rankings = _Round(self._callers(), asked, until)
            return await ranked(self._search, rankings, query, first_day, cutoff, top_k)

        return await self._within_deadline(answer)

    async def nearest(self, vector: Vectors, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        """As a dense `search`, for a query that is encoded already: float32 [dimension]. Raises ValueError for another one."""
        check_queries(vector[None, :], len(vector))
        asked = self._asked(first_day, cutoff, top_k)
        if not asked:
            return ()
        query = Query(vector, first_day, cutoff, top_k)
        return tuple(await self._within_deadline(lambda until: _Round(self._callers(), asked, until).hits(query)))

    async def fetch(self, article_id: str) -> Article | None:
        """See `Searcher`. Raises InfrastructureError `retrieval-lost`, or `retrieval-gone` where no repetition helps."""
        if encodable(article_id) != article_id:
            return None  # no stored id is like that, and it cannot be sent

        async def answer(until: float) -> Article | None:
            found = await asyncio.gather(*(g.ask("fetch", article_id, until) for g in self._callers().groups))
            return next((article for article in found if article is not None), None)

        return await self._within_deadline(answer)

    def _asked(self, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> list[int]:
        """The groups in which anything can be visible."""
        check_k(top_k)
        require_day(cutoff, "a cutoff")
        return [i for i, group in enumerate(self._groups) if group.span.meets(first_day, cutoff)]

    def _callers(self) -> _Callers:
        """Those of the running loop: a loop that has ended took its calls with it."""
        if self._here is None or self._here.loop is not asyncio.get_running_loop():
            self._here = _Callers(self._encoder, self._groups, self._rules)
        return self._here

    async def _within_deadline(self, answer: Callable[[float], Awaitable[Result]]) -> Result:
        until = asyncio.get_running_loop().time() + self._rules.timeout_s
        try:
            async with asyncio.timeout_at(until):
                return await answer(until)
        except TimeoutError as error:
            said = "; ".join([f"no answer within {self._rules.timeout_s:g} s", *self._callers().faults()])
            raise InfrastructureError("retrieval-lost", said) from error
        except InfrastructureError:
            raise
        except PastcastError as error:
            # an index that does not hold what it says is a fault of the place, not of the query
            raise InfrastructureError("retrieval-gone", str(error)) from error
