"""What an index holds: articles by month, where their dates come from, and how many had none."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.compute as pc

from cluster.failures import DataError
from cluster.record import Record
from retrieval.build import QUARANTINE
from retrieval.library import Library
from retrieval.shard_files import load_texts

DATELESS = ("no-date", "unparsable-time", "year-out-of-range")
"""Reasons for which a row had no day, and was left out."""


class MonthStats(Record):
    """One month."""

    month: str
    articles: int
    days: int
    """Days that have any."""
    date_sources: dict[str, int]
    """`published`, `modified` or `crawled` → articles whose day is that of such a date."""


class IndexStats(Record):
    """The whole index."""

    directory: Path
    fingerprint: str
    encoder: str
    dimension: int
    search: str
    """Kind, and recall where it is approximate."""
    articles: int
    months: tuple[MonthStats, ...]
    date_sources: dict[str, int]
    quarantined: dict[str, int]
    """Reason → rows that became no article when the index was built or added to."""
    without_date: int
    """Of those, rows without a date that could be read."""
    share_without_date: float
    """Of all articles and quarantined rows."""


def index_stats(directory: Path) -> IndexStats:
    """Reads dates and counts, not vectors. Raises DataError if there is no index, or its articles are damaged."""
    library = Library.open(directory)
    months = []
    for shard in library.manifest.shards:
        texts = load_texts(directory, shard)
        counted = pc.value_counts(texts["date_source"]).to_pylist()
        months.append(
            MonthStats(
                month=shard.month,
                articles=shard.rows,
                days=pc.count_distinct(texts["day"]).as_py(),
                date_sources={entry["values"]: entry["counts"] for entry in sorted(counted, key=lambda e: e["values"])},
            )
        )
    sources = sum((Counter(month.date_sources) for month in months), Counter[str]())
    quarantined = _quarantined(directory / QUARANTINE)
    without = sum(quarantined.get(reason, 0) for reason in DATELESS)
    return IndexStats(
        directory=directory,
        fingerprint=library.fingerprint,
        encoder=library.manifest.encoder.name,
        dimension=library.manifest.encoder.dimension,
        search=library.manifest.search,
        articles=library.rows,
        months=tuple(months),
        date_sources=dict(sorted(sources.items())),
        quarantined=quarantined,
        without_date=without,
        share_without_date=without / (library.rows + sum(quarantined.values())),
    )


def _quarantined(folder: Path) -> dict[str, int]:
    """Rows by reason, over the files of the build and of every add."""
    counts: Counter[str] = Counter()
    for file in sorted(folder.glob("*.jsonl")):
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    counts[json.loads(line)["reason"]] += 1
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(f"{file}:{number} is no quarantined row: {error}; build the index again") from error
    return dict(sorted(counts.items()))
