"""FAISS shards in and out: folders of `faiss.index`, `texts.parquet` and `metadata.json`, as other tools of this field keep them.

A folder holds a month or a day; its `day_offsets` (day → [low, high)) say which rows were published when. A folder without a day table
that covers every row once, in date order, and agrees with the dates of its texts is refused: it could only be searched whole.
"""

import datetime as dt
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from cluster.failures import DataError
from cluster.record import Record
from retrieval.article import Article, utc_day
from retrieval.index_folder import alone_in, publish, withdraw
from retrieval.library import Library
from retrieval.manifest import MANIFEST_FILE, EncoderIdentity, IndexKind, ShardManifest
from retrieval.mask import Vectors
from retrieval.shard_files import NORM_TOLERANCE, StoredShard, month_of, stored_vectors, write_shard

_log = logging.getLogger(__name__)

INDEX, TEXTS, METADATA = "faiss.index", "texts.parquet", "metadata.json"

_NEEDED = ("article_id", "title", "text", "url", "published_date")


class ImportSummary(Record):
    """What an import did."""

    articles: int
    folders: int
    shards: int
    naive_times: int
    """Times of day without an offset; they were taken as UTC."""
    fingerprint: str


def import_faiss(
    source: Path, directory: Path, encoder: EncoderIdentity, kind: IndexKind, lexical: bool = True
) -> ImportSummary:
    """Make `directory` an index of the FAISS folders in `source`, or of `source` itself if it is one.

    `encoder`: what made the vectors, for the caller to know; a folder that names another one is refused. Where a row has only a
    day, it becomes midnight UTC. `lexical`: with postings of the texts. Raises DataError that names the folder and the fault;
    there is then no index.
    """
    inside = sorted(source.iterdir()) if source.is_dir() else []
    folders = [source] if _is_shard(source) else [folder for folder in inside if _is_shard(folder)]
    if not folders:
        raise DataError(f"{source} holds no FAISS shard: a folder with {INDEX}, {TEXTS} and {METADATA}")
    tables = {folder: _day_table(folder, encoder) for folder in folders}
    months = sorted({month_of(day) for table in tables.values() for day in table})
    with alone_in(directory):
        if (directory / MANIFEST_FILE).exists():
            raise DataError(f"{directory} holds an index already; choose another index.directory")
        withdraw(directory)
        shards: list[ShardManifest] = []
        seen: dict[str, Path] = {}
        naive = 0
        for month in months:
            articles: list[Article] = []
            vectors: list[Vectors] = []
            for folder, table in tables.items():
                days = {day: rows for day, rows in table.items() if month_of(day) == month}
                if not days:
                    continue
                found, without_offset = _articles(folder, days, seen)
                articles.extend(found)
                vectors.append(_vectors(folder, table, days, encoder, found))
                naive += without_offset
            order = sorted(range(len(articles)), key=lambda i: (articles[i].day, articles[i].id))
            rows = [articles[i] for i in order]
            matrix = np.concatenate(vectors)[order]
            shards.append(write_shard(directory, month, rows, matrix, encoder, kind, lexical))
        manifest = publish(directory, encoder, kind, shards)
    _log.info("imported %d articles of %d folders into %s", len(seen), len(folders), directory)
    return ImportSummary(
        articles=len(seen),
        folders=len(folders),
        shards=len(shards),
        naive_times=naive,
        fingerprint=manifest.fingerprint,
    )


def export_faiss(library: Library, out: Path) -> list[Path]:
    """Write every month of the index as a FAISS folder, with a flat inner-product index. The folders.

    Raises DataError for a damaged shard, or a folder that exists.
    """
    written = []
    for shard in library.manifest.shards:
        target = out / shard.month
        if target.exists():
            raise DataError(f"{target} exists; choose another folder")
        stored = library.load([shard.month])[shard.month]
        building = out / f".exporting-{shard.month}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        index = faiss.IndexFlatIP(shard.encoder.dimension)
        vectors = stored_vectors(library.directory, shard.month)
        for start in range(0, len(vectors), 65_536):
            index.add(np.ascontiguousarray(vectors[start : start + 65_536]))
        faiss.write_index(index, str(building / INDEX))
        pq.write_table(_texts(stored, shard.rows), building / TEXTS)
        ends = [*stored.days.first_rows[1:], stored.days.rows]
        offsets = zip(stored.days.days, stored.days.first_rows, ends, strict=True)
        metadata = {
            "month": shard.month,
            "rows": shard.rows,
            "encoder": shard.encoder.model_dump(),
            "day_offsets": {day.isoformat(): [low, high] for day, low, high in offsets},
        }
        (building / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")
        building.rename(target)
        written.append(target)
    return written


def _is_shard(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (INDEX, TEXTS, METADATA))


DayRows = Mapping[dt.date, tuple[int, int]]
"""Day → its rows [low, high), in order of day."""


def _day_table(folder: Path, encoder: EncoderIdentity) -> DayRows:
    """The folder's days. Raises DataError unless they cover its rows once, in order."""
    file = folder / METADATA
    try:
        metadata = json.loads(file.read_text())
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; {folder} could only be searched whole, and is refused") from error
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    offsets = metadata.get("day_offsets") if isinstance(metadata, dict) else None
    if not isinstance(offsets, dict) or not offsets:
        raise DataError(f"{file} has no day_offsets: {folder} could only be searched whole, and is refused")
    stated = metadata.get("encoder")
    if isinstance(stated, dict) and stated.get("fingerprint", encoder.fingerprint) != encoder.fingerprint:
        raise DataError(
            f"{file} names the encoder {stated.get('name')!r}, but index.encoder is {encoder.name}; change the setting"
        )
    table: dict[dt.date, tuple[int, int]] = {}
    try:
        for day, (low, high) in offsets.items():
            if type(low) is not int or type(high) is not int:
                raise ValueError(f"the rows of {day} are not whole numbers")
            table[dt.date.fromisoformat(day)] = (low, high)
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: day_offsets are not days with two row numbers: {error}") from error
    if len(table) != len(offsets):
        raise DataError(f"{file}: day_offsets name a day twice")
    expected = 0
    for day, (low, high) in sorted(table.items()):
        if low != expected or high < low:
            raise DataError(f"{file}: {day} has the rows [{low}, {high}), but the day before ends at {expected}")
        expected = high
    return {day: rows for day, rows in sorted(table.items()) if rows[0] < rows[1]}


def _articles(folder: Path, days: DayRows, seen: dict[str, Path]) -> tuple[list[Article], int]:
    """The articles of these days in row order, and how many of their times had no offset; their ids enter `seen`."""
    table = _read_texts(folder)
    naive = 0
    articles = []
    for day, (low, high) in days.items():
        for row, fields in enumerate(table.slice(low, high - low).to_pylist(), start=low):
            where = f"{folder / TEXTS} row {row}"
            published, without_offset = _published(fields, where)
            naive += without_offset
            if utc_day(published) != day:
                raise DataError(f"{where} was published {published}, but {METADATA} files it under {day}")
            article = _article(fields, published, where)
            if article.id in seen:
                raise DataError(f"{where}: the id {article.id!r} is also in {seen[article.id]}; ids must be unique")
            seen[article.id] = folder
            articles.append(article)
    return articles, naive


def _read_texts(folder: Path) -> pa.Table:
    file = folder / TEXTS
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    missing = [name for name in _NEEDED if name not in table.column_names]
    if missing:
        raise DataError(f"{file} has no column {', '.join(missing)}")
    return table


def _published(fields: Mapping[str, Any], where: str) -> tuple[dt.datetime, bool]:
    """The instant of a row, and whether it is a time of day that came without an offset."""
    value = fields.get("published") or fields["published_date"]
    if isinstance(value, str):
        try:
            value = dt.date.fromisoformat(value) if len(value) == 10 else dt.datetime.fromisoformat(value)
        except ValueError as error:
            raise DataError(f"{where}: published_date {value!r} is no ISO date") from error
    if isinstance(value, dt.datetime):
        naive = value.tzinfo is None
        return (value.replace(tzinfo=dt.UTC) if naive else value), naive
    if isinstance(value, dt.date):
        return dt.datetime(value.year, value.month, value.day, tzinfo=dt.UTC), False
    raise DataError(f"{where} has no publication date: {value!r}")


def _article(fields: Mapping[str, Any], published: dt.datetime, where: str) -> Article:
    url = fields["url"] or ""
    try:
        return Article(
            id=fields["article_id"],
            url=url,
            title=fields["title"] or "",
            summary=fields.get("summary") or "",
            text=fields["text"] or "",
            published=published,
            date_source=fields.get("date_source") or "published",
            source=fields.get("source") or urlsplit(url).hostname or "",
        )
    except (ValidationError, ValueError) as error:
        raise DataError(f"{where} is no article: {error}") from error


def _vectors(
    folder: Path, table: DayRows, days: DayRows, encoder: EncoderIdentity, articles: Sequence[Article]
) -> Vectors:
    """The vectors of these days, in row order."""
    file = folder / INDEX
    try:
        index: Any = faiss.read_index(str(file))
    except RuntimeError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    if not isinstance(index, faiss.IndexFlat):
        raise DataError(f"{file} is a {type(index).__name__}; only a flat index holds the vectors as they were")
    rows, texts = max(high for _, high in table.values()), pq.read_metadata(folder / TEXTS).num_rows
    if not index.ntotal == texts == rows:
        raise DataError(f"{folder}: {index.ntotal} vectors, {texts} texts and a day table of {rows} rows")
    if index.d != encoder.dimension:
        raise DataError(
            f"{file} has {index.d} dimensions, the encoder {encoder.name} has {encoder.dimension}; check index.encoder"
        )
    low, high = min(low for low, _ in days.values()), max(high for _, high in days.values())
    vectors: Vectors = index.reconstruct_n(low, high - low)
    off = ~(np.abs(np.linalg.norm(vectors.astype(np.float64), axis=1) - 1) <= NORM_TOLERANCE)
    if off.any():
        row = int(off.argmax())
        raise DataError(
            f"{file}: the vector of row {low + row} (article {articles[row].id!r}) is not of unit length; "
            "normalize vectors before they are added"
        )
    return vectors


def _texts(stored: StoredShard, rows: int) -> pa.Table:
    """The columns that other tools read, and behind them what they would lose."""
    articles = [stored.article(row) for row in range(rows)]
    columns: dict[str, Any] = {
        "title": [a.title for a in articles],
        "text": [a.text for a in articles],
        "article_id": [a.id for a in articles],
        "url": [a.url for a in articles],
        "published_date": [a.day.isoformat() for a in articles],
        "summary": [a.summary for a in articles],
        "text_truncated": [False] * rows,
        "published": pa.array([a.published for a in articles], pa.timestamp("us", tz="UTC")),
        "date_source": [a.date_source for a in articles],
        "source": [a.source for a in articles],
    }
    return pa.table(columns)
