"""Article, the search hit, and the rule that gives an instant its UTC day.

An article's day is the UTC calendar day of its publication instant, and nothing else: every mask, every re-check and
every audit uses `Article.day`.
"""

import datetime as dt
from typing import Literal

from pydantic import AwareDatetime, computed_field, field_validator

from cluster.record import Record

DateSource = Literal["published", "modified", "crawled"]


def utc_day(instant: dt.datetime) -> dt.date:
    """The UTC calendar day of an instant. Raises ValueError for a naive one: without an offset there is no day."""
    if instant.tzinfo is None:
        raise ValueError(f"{instant!r} has no UTC offset, so it has no UTC day; state the offset where it is read")
    return instant.astimezone(dt.UTC).date()


class Article(Record):
    """One dated document of the corpus."""

    id: str
    url: str
    title: str
    summary: str
    text: str
    published: AwareDatetime
    """Instant of publication; stored in UTC."""
    date_source: DateSource
    source: str
    """The publisher, as the data names it."""

    @field_validator("published")
    @classmethod
    def _to_utc(cls, value: dt.datetime) -> dt.datetime:
        return value.astimezone(dt.UTC)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def day(self) -> dt.date:
        """UTC day of publication."""
        return utc_day(self.published)


class Hit(Record):
    """One search result as a step sees it."""

    article_id: str
    title: str
    url: str
    day: dt.date
    score: float
    """Higher is better: the inner product of unit vectors in dense search, BM25 in lexical, reciprocal ranks in hybrid."""
    snippet: str
    """The beginning of the summary or text, about 280 characters, cut at a word."""
