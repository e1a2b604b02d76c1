"""Articles from a file: our own records, or foreign rows through a field mapping.

Every row becomes one article or one quarantined row with a reason; the first of several rows with one id or url is kept.
A row may say when it was crawled: nothing can have been published after that, and where a usable publication time is
missing, it is the article's own time.
"""

import datetime as dt
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.config import ArticlesSettings
from retrieval.article import Article
from retrieval.corpus.rows import BadRow, Loaded, Values, identity, load_rows, mapped_values, text_value
from retrieval.corpus.times import TimeReader

_CUT_MARKER = re.compile(r"\s*\[\+\d+ chars\]\s*$")
"""How a news API says that it cut a body."""


def load_articles(
    settings: ArticlesSettings,
    quarantine_dir: Path | None = None,
    name: str = "articles",
    judge: Callable[[Article], None] | None = None,
) -> Loaded[Article]:
    """The articles of the configured file; bad rows go to `quarantine_dir/<name>.jsonl`.

    Reasons: not-json, not-utf8, not-an-object, missing-field, unknown-field, invalid-field, no-date, unparsable-time,
    year-out-of-range, dated-after-crawl, empty, duplicate-id, duplicate-url, and those of the BadRow that `judge` raises of an
    article. Raises DataError if the file cannot be read.
    """
    times = TimeReader(settings.time_zone)
    rows_by_id: dict[str, int] = {}
    rows_by_url: dict[str, int] = {}

    def build(row: Values, number: int) -> Article:
        foreign = settings.format != "pastcast"
        values = mapped_values(row, settings) if foreign else dict(row)
        values["id"] = identity(values)
        for field in ("url", "title", "summary", "text", "source"):
            values[field] = text_value(values, field)
        if foreign:
            values["text"] = _CUT_MARKER.sub("", values["text"])
        if not values["title"].strip() and not values["text"].strip():
            raise BadRow("empty", "neither title nor text")
        values |= _dated(values.get("published"), values.pop("crawled", None), times, settings)
        values.setdefault("date_source", "published")
        if (earlier := rows_by_id.get(values["id"])) is not None:
            raise BadRow("duplicate-id", f"id {values['id']} stands in row {earlier} already")
        if values["url"] and (earlier := rows_by_url.get(values["url"])) is not None:
            raise BadRow("duplicate-url", f"{values['url']} stands in row {earlier} already")
        article = Article.model_validate(values)
        if judge is not None:
            judge(article)
        rows_by_id[article.id] = number
        rows_by_url[article.url] = number
        return article

    records, counts = load_rows(settings.path, settings.format, build, quarantine_dir, name)
    return Loaded[Article](records=records, quarantined=counts, naive_times=times.naive_times)


def _dated(published: Any, crawled: Any, times: TimeReader, settings: ArticlesSettings) -> Values:
    """The article's time, and its source where that is the crawl. Raises BadRow.

    A publication time of an impossible year is discarded, and the crawl's time is taken for one that is missing
    (Forecast-Dojo A.1).
    """
    fetched = None if crawled in (None, "") else _read(times.read_latest, "crawled", crawled)
    if published in (None, ""):
        fault = BadRow("no-date", "no publication time: an article without a day cannot be shown to anyone")
    else:
        instant = _read(times.read, "published", published)
        if settings.first_year <= instant.year <= settings.last_year:
            if fetched is not None and instant > fetched:
                raise BadRow("dated-after-crawl", f"published {instant}, but crawled {fetched}")
            return {"published": instant}
        years = f"{settings.first_year} to {settings.last_year}"
        fault = BadRow("year-out-of-range", f"published {instant}, outside the years {years}")
    if fetched is None:
        raise fault
    if not settings.first_year <= fetched.year <= settings.last_year:
        raise BadRow("year-out-of-range", f"{fault.detail}; crawled {fetched}")
    return {"published": fetched, "date_source": "crawled"}


def _read(read: Callable[[Any], dt.datetime], field: str, value: Any) -> dt.datetime:
    try:
        return read(value)
    except ValueError as error:
        raise BadRow("unparsable-time", f"{field}: {error}") from error
