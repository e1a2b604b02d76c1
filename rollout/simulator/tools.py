"""The retrieval service and the Python cell, simulated behind the interfaces that the real tools use.

Articles are computed from their number, so that any audit can tell what was visible on a day. The service answers late, never,
or not at all while it is down; at its worst it returns an article from the future. A marker stands in every error
text of the infrastructure: no model may ever be shown it.
"""

import asyncio
import datetime as dt

from cluster.failures import InfrastructureError
from retrieval.article import Article, Hit
from rollout.sandbox import CellResult, Sandbox
from rollout.simulator.faults import MARKER, Faults

FIRST_DAY = dt.date(2031, 1, 1)
ARTICLES = 40
"""One a day from FIRST_DAY on."""
SILENCE = 10.0**6
"""Seconds after which what never answers would answer."""


class SimulatedSearcher:
    """Implements `Searcher`, with the deadline that the real client has."""

    def __init__(self, faults: Faults, timeout_s: float) -> None:
        self._faults = faults
        self._timeout_s = timeout_s
        self._down_until = 0.0
        self._gone = False

    async def search(self, query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        """The newest visible articles. Raises InfrastructureError `retrieval-lost`."""
        await self._answer(query)
        last = (cutoff - FIRST_DAY).days
        if self._faults.strikes("search-leaks", query):
            last += 1
        numbers = range(min(last, ARTICLES - 1), -1, -1)[:top_k]
        return tuple(
            _hit(_article(n)) for n in numbers if first_day is None or FIRST_DAY + dt.timedelta(days=n) >= first_day
        )

    async def fetch(self, article_id: str) -> Article | None:
        """The article. Raises InfrastructureError `retrieval-lost`."""
        await self._answer(article_id)
        if self._faults.strikes("article-gone", article_id):
            return None
        return _article(int(article_id.removeprefix("a-")))

    async def _answer(self, what: str) -> None:
        chance = self._faults.stream("search")
        seconds = chance.uniform(0.01, 0.3)
        if self._faults.strikes("search-late", what):
            seconds *= chance.uniform(10, 500)
        if self._faults.strikes("search-silent", what):
            seconds = SILENCE
        if self._faults.strikes("search-down", what):
            self._down_until = self._faults.now + chance.uniform(1, 300)
        await asyncio.sleep(min(seconds, self._timeout_s))
        self._gone = self._gone or self._faults.strikes("search-gone", what)
        if self._gone:
            raise InfrastructureError("retrieval-gone", f"{MARKER}: its restarts are spent")
        if seconds > self._timeout_s or (self._faults.now < self._down_until and not self._faults.calm):
            raise InfrastructureError("retrieval-lost", f"{MARKER}: no answer to {what}")


class SimulatedCell(Sandbox):
    """The Python tool without processes."""

    def __init__(self, faults: Faults, timeout_s: float) -> None:
        # The real constructor probes the machine; nothing of it is needed here.
        self._faults = faults
        self._timeout_s = timeout_s

    def describe(self) -> str:
        """As it is."""
        return "simulated"

    async def run(self, code: str, today: dt.date) -> CellResult:
        """Prints the code and the day. Raises InfrastructureError `cell-lost`."""
        chance = self._faults.stream("cell")
        seconds = chance.uniform(0.05, 1.0)
        if self._faults.strikes("cell-late"):
            seconds *= chance.uniform(2, 50)
        timed_out = self._faults.strikes("cell-time-out") or seconds > self._timeout_s
        await asyncio.sleep(self._timeout_s if timed_out else seconds)
        if self._faults.strikes("cell-lost"):
            raise InfrastructureError("cell-lost", f"{MARKER}: no process could be started")
        if timed_out:
            return CellResult(stdout="", error="", exit_status=137, timed_out=True, seconds=self._timeout_s)
        return CellResult(stdout=f"{code} on {today}\n", error="", exit_status=0, seconds=seconds)


def day_of(article_id: str) -> dt.date:
    """The day on which a simulated article was published."""
    return FIRST_DAY + dt.timedelta(days=int(article_id.removeprefix("a-")))


def _article(number: int) -> Article:
    day = FIRST_DAY + dt.timedelta(days=number)
    return Article(
        id=f"a-{number}",
        url=f"https://news.example/{number}",
        title=f"Bridge {number}",
        summary="",
        text=f"Work goes on, day {number}. " * 4,
        published=dt.datetime(day.year, day.month, day.day, 9, tzinfo=dt.UTC),
        date_source="published",
        source="simulated",
    )


def _hit(article: Article) -> Hit:
    return Hit(
        article_id=article.id,
        title=article.title,
        url=article.url,
        day=article.day,
        score=0.5,
        snippet=article.text[:40],
    )
