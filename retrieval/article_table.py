"""The articles of a month on disk: an Arrow table, memory-mapped, a row for each vector."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from cluster.failures import DataError
from retrieval.article import Article

SCHEMA = pa.schema(
    [
        ("id", pa.large_string()),
        ("day", pa.date32()),
        ("published", pa.timestamp("us", tz="UTC")),
        ("url", pa.large_string()),
        ("title", pa.large_string()),
        ("summary", pa.large_string()),
        ("text", pa.large_string()),
        ("date_source", pa.large_string()),
        ("source", pa.large_string()),
    ]
)


def write_articles(file: Path, articles: Sequence[Article]) -> None:
    """One row each, in the order given. Raises DataError that names an article whose text cannot be stored."""
    columns: dict[str, list[Any]] = {name: [getattr(a, name) for a in articles] for name in SCHEMA.names}
    try:
        table = pa.table(columns, schema=SCHEMA)
    except UnicodeEncodeError as error:
        bad = next(a.id for a in articles if not _is_utf8(a))
        raise DataError(
            f"article {bad!r} holds a lone surrogate, which is no text; repair it where it is read"
        ) from error
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_file(stream, SCHEMA) as writer:
        writer.write_table(table)


def mapped_articles(file: Path) -> pa.Table:
    """The rows of such a file, memory-mapped. Raises OSError and ValueError."""
    with pa.memory_map(str(file)) as stream:
        return pa.ipc.open_file(stream).read_all()


def article_of(fields: dict[str, Any]) -> Article:
    """The article of a stored row."""
    return Article(**{name: value for name, value in fields.items() if name != "day"})


def words_of(article: Article) -> str:
    """What of an article a lexical search finds: all of it."""
    return "\n".join((article.title, article.summary, article.text))


def _is_utf8(article: Article) -> bool:
    return not any(
        0xD800 <= ord(c) <= 0xDFFF for value in dict(article).values() if isinstance(value, str) for c in value
    )
