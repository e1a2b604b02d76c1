"""Articles from a file: our own records, or foreign rows through a field mapping.

Every row becomes one article or one quarantined row with a reason; the first of several rows with one id or url is kept.
"""

import re
from pathlib import Path

from cluster.config import ArticlesSettings
from retrieval.article import Article
from retrieval.corpus.rows import BadRow, Loaded, Values, identity, load_rows, mapped_values, text_value
from retrieval.corpus.times import TimeReader

_CUT_MARKER = re.compile(r"\s*\[\+\d+ chars\]\s*$")
"""How a news API says that it cut a body."""


def load_articles(settings: ArticlesSettings, quarantine_dir: Path | None = None) -> Loaded[Article]:
    """The articles of the configured file; bad rows go to `quarantine_dir/articles.jsonl`.

    Reasons: not-json, not-utf8, not-an-object, missing-field, unknown-field, invalid-field, no-date, unparsable-time,
    empty, duplicate-id, duplicate-url. Raises DataError if the file cannot be read.
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
        values.setdefault("date_source", "published")
        if not values["title"].strip() and not values["text"].strip():
            raise BadRow("empty", "neither title nor text")
        if values.get("published") in (None, ""):
            raise BadRow("no-date", "no publication time: an article without a day cannot be shown to anyone")
        try:
            values["published"] = times.read(values["published"])
        except ValueError as error:
            raise BadRow("unparsable-time", f"published: {error}") from error
        if (earlier := rows_by_id.get(values["id"])) is not None:
            raise BadRow("duplicate-id", f"id {values['id']} stands in row {earlier} already")
        if values["url"] and (earlier := rows_by_url.get(values["url"])) is not None:
            raise BadRow("duplicate-url", f"{values['url']} stands in row {earlier} already")
        article = Article.model_validate(values)
        rows_by_id[article.id] = number
        rows_by_url[article.url] = number
        return article

    records, counts = load_rows(settings.path, settings.format, build, quarantine_dir, "articles")
    return Loaded[Article](records=records, quarantined=counts, naive_times=times.naive_times)
