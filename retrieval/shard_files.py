"""One month on disk: `vectors.npy`, `days.json`, `articles.arrow` and `shard.json`, in a folder named after the month.

The kind adds a file: `vectors.bf16.npy` (bfloat16 bits) for exact-bf16, `lists.faiss` for approximate. What lexical search
reads are `terms.arrow`, `postings.npy` and `lengths.npy`.

A folder appears under its name only when all of it is on the disk. It is served only if every file has the hash that
the index names, its rows are ordered by (day, id), each day is the UTC day of the row's instant, and the day table says
the same; anything else is a DataError, never a smaller or a wider shard.
"""

import datetime as dt
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.format import open_memmap
from pydantic import ValidationError

from cluster.config import Device
from cluster.failures import DataError, SettingsError
from retrieval.article import Article, Hit
from retrieval.article_table import SCHEMA, article_of, mapped_articles, words_of, write_articles
from retrieval.days import DayTable
from retrieval.encoder import Vectors
from retrieval.finder import Finder
from retrieval.half import half_copy
from retrieval.kinds import certified_finder, exact_finder, rescorer
from retrieval.lexical import ANALYSIS, LEXICAL_FILES, Postings
from retrieval.manifest import FEWEST_ROWS, Approximation, EncoderIdentity, IndexKind, ShardManifest
from retrieval.postings_writer import write_postings
from retrieval.shard import Shard, check_vectors
from retrieval.snippet import snippet

VECTORS, DAYS, ARTICLES, SHARD = "vectors.npy", "days.json", "articles.arrow", "shard.json"
HALF, LISTS = "vectors.bf16.npy", "lists.faiss"

_open_memmap: Callable[..., Any] = open_memmap

BUILD_POSTINGS = "set index.lexical: true and run `pastcast index build`, which encodes nothing again"

NORM_TOLERANCE = 1e-3
"""How far a stored vector's length may lie from 1."""
_CHECKED_ROWS = 4_096


class StoredShard:
    """A month that was checked and is open: memory-mapped vectors, and articles by row or id."""

    def __init__(self, shard: Shard, articles: pa.Table, postings: Postings | None, where: Path) -> None:
        self.shard = shard
        self._articles = articles
        self._columns = {name: articles[name] for name in articles.column_names}
        self._postings = postings
        self._where = where

    @property
    def days(self) -> DayTable:
        """The days of its rows."""
        return self.shard.days

    @property
    def postings(self) -> Postings:
        """What a lexical search reads. Raises DataError if the month was built without."""
        if self._postings is None:
            raise DataError(f"shard {self._where} has no postings; {BUILD_POSTINGS}")
        return self._postings

    def hit(self, row: int, score: float, snippet_characters: int) -> Hit:
        """The row as a search result."""
        article = self.article(row)
        return Hit(
            article_id=article.id,
            title=article.title,
            url=article.url,
            day=article.day,
            score=score,
            snippet=snippet(article.summary, article.text, snippet_characters),
        )

    def fetch(self, article_id: str) -> Article | None:
        """The article with exactly this id, or None."""
        row = self._row_of.get(article_id)
        return None if row is None else self.article(row)

    def article(self, row: int) -> Article:
        """The article of a row. Raises DataError if its day is not the one under which it was searched."""
        fields = {name: column[row].as_py() for name, column in self._columns.items()}
        article = article_of(fields)
        if article.day != fields["day"]:
            raise DataError(
                f"{self._where}: row {row} is filed under {fields['day']}, but was published {article.published}"
            )
        return article

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {article_id: row for row, article_id in enumerate(self._articles["id"].to_pylist())}


def row_order(articles: Sequence[Article]) -> list[Article]:
    """The articles by (day, id), the order of a shard's rows."""
    return sorted(articles, key=lambda a: (a.day, a.id))


def source_hash(articles: Sequence[Article]) -> str:
    """SHA-256 over the articles' fields, in the order given."""
    digest = hashlib.sha256()
    for a in articles:
        published = a.published.isoformat()
        fields = [a.id, a.url, a.title, a.summary, a.text, published, a.date_source, a.source]
        digest.update(json.dumps(fields).encode() + b"\n")
    return digest.hexdigest()


def write_shard(
    directory: Path,
    month: str,
    articles: Sequence[Article],
    vectors: Vectors,
    encoder: EncoderIdentity,
    kind: IndexKind,
    lexical: bool = True,
) -> ShardManifest:
    """Write `directory/month`, replacing what is there, so that it is whole or absent after a crash at any moment.

    `articles` in row order with distinct ids, `vectors` float32 [n, dimension], unit rows, aligned with them; `lexical`:
    with postings.
    """
    _check_vectors(vectors, articles, encoder)
    days = DayTable.of_rows([a.day for a in articles])
    building = directory / f".building-{month}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    np.save(building / VECTORS, np.ascontiguousarray(vectors), allow_pickle=False)
    (building / DAYS).write_text(days.model_dump_json(indent=1) + "\n")
    write_articles(building / ARTICLES, articles)
    names = [VECTORS, DAYS, ARTICLES]
    recall = None
    if kind.name == "exact-bf16":
        names.append(HALF)
        half_copy(vectors, _open_memmap(building / HALF, mode="w+", dtype=np.uint16, shape=vectors.shape))
    elif kind.approximation is not None and len(vectors) >= FEWEST_ROWS:
        names.append(LISTS)
        recall = _write_lists(building / LISTS, vectors, days, kind.approximation)
    if lexical:
        names.extend(LEXICAL_FILES)
        write_postings(building, (words_of(a) for a in articles))
    manifest = ShardManifest(
        month=month,
        rows=len(articles),
        first_day=days.days[0],
        last_day=days.days[-1],
        source=source_hash(articles),
        encoder=encoder,
        kind=kind,
        lexical=ANALYSIS if lexical else None,
        recall=recall,
        files={name: file_hash(building / name) for name in names},
    )
    (building / SHARD).write_text(manifest.model_dump_json(indent=1) + "\n")
    for file in building.iterdir():
        sync(file)
    sync(building)
    shutil.rmtree(directory / month, ignore_errors=True)
    building.rename(directory / month)
    sync(directory)
    return manifest


def finished_shard(directory: Path, month: str, source: str, encoder: EncoderIdentity) -> ShardManifest | None:
    """What an earlier build left for this month, of any kind and for any instruction, if its vectors are those of the same articles by the
    same encoder, and it is intact."""
    try:
        manifest = ShardManifest.model_validate_json((directory / month / SHARD).read_bytes())
    except (OSError, ValidationError):
        return None
    if (manifest.month, manifest.source) != (month, source) or not manifest.encoder.encoded_alike(encoder):
        return None
    try:
        check_hashes(directory / month, manifest)
    except DataError:
        return None
    return manifest


def stored_vectors(directory: Path, month: str) -> Vectors:
    """The vectors of a finished month, memory-mapped."""
    vectors: Vectors = _mapped(directory / month / VECTORS)
    return vectors


def load_shard(directory: Path, manifest: ShardManifest, device: Device = "cpu") -> StoredShard:
    """Open a month for search. Raises DataError that names the file and the fault, SettingsError where there is no such device."""
    where = directory / manifest.month
    check_hashes(where, manifest)
    try:
        days = DayTable.model_validate_json((where / DAYS).read_bytes())
        vectors = _mapped(where / VECTORS)
        articles = mapped_articles(where / ARTICLES)
        _check_rows(articles, days, manifest)
        shard = Shard(vectors, days, _finder(where, manifest, vectors, days, device))
        if shard.dimension != manifest.encoder.dimension:
            raise ValueError(f"vectors have {shard.dimension} dimensions, the encoder {manifest.encoder.dimension}")
        postings = None if manifest.lexical is None else Postings.load(where, days)
    except (OSError, ValueError) as error:
        raise DataError(f"shard {where} is not servable: {error}; build the index again") from error
    return StoredShard(shard, articles, postings, where)


def load_days(directory: Path, manifest: ShardManifest) -> DayTable:
    """Only the day table of a month. Raises DataError if it is damaged."""
    where = directory / manifest.month
    check_hashes(where, manifest, (DAYS,))
    try:
        return DayTable.model_validate_json((where / DAYS).read_bytes())
    except ValidationError as error:
        raise DataError(f"{where / DAYS} is not a day table: {error}; build the index again") from error


def load_texts(directory: Path, manifest: ShardManifest) -> pa.Table:
    """Only the articles of a month, memory-mapped. Raises DataError if they are damaged."""
    where = directory / manifest.month
    check_hashes(where, manifest, (ARTICLES,))
    try:
        return mapped_articles(where / ARTICLES)
    except (OSError, ValueError) as error:
        raise DataError(f"{where / ARTICLES} cannot be read: {error}; build the index again") from error


def not_unit(vectors: Vectors) -> Iterator[int]:
    """Rows that are not of unit length, or not finite."""
    for start in range(0, len(vectors), _CHECKED_ROWS):
        lengths = np.linalg.norm(vectors[start : start + _CHECKED_ROWS], axis=1)
        yield from (start + np.flatnonzero(~(np.abs(lengths - 1) <= NORM_TOLERANCE))).tolist()


def file_hash(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Put a file or a folder's list of names on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finder(where: Path, manifest: ShardManifest, vectors: Vectors, days: DayTable, device: Device) -> Finder:
    """What the month's kind searches with."""
    check_vectors(vectors)
    if HALF in manifest.files:
        return certified_finder(vectors, _mapped(where / HALF), days, device)
    exact = exact_finder(vectors, days, device)
    if manifest.kind.approximation is None or LISTS not in manifest.files:
        return exact
    from retrieval.approximate import Approximate, read_lists  # FAISS, which only this kind needs

    lists = read_lists(where / LISTS, *vectors.shape)
    return Approximate(rescorer(vectors, days), exact, lists, manifest.kind.approximation)


def _write_lists(file: Path, vectors: Vectors, days: DayTable, settings: Approximation) -> float:
    """Trains and writes the lists of a month. Their recall."""
    from retrieval.approximate import Approximate, measured_recall, train_lists, write_lists

    try:
        lists = train_lists(vectors, settings)
    except ValueError as error:
        raise SettingsError(f"index.approximate: {error}") from error
    write_lists(lists, file)
    exact = exact_finder(vectors, days)
    approximate = Approximate(rescorer(vectors, days), exact, lists, settings)
    return measured_recall(approximate, exact, vectors)


def _mapped(file: Path) -> Any:
    # read-only: the kernel promises memory for pages that could be written, and refuses files that are larger than it has
    return np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))


def check_hashes(where: Path, manifest: ShardManifest, names: Sequence[str] | None = None) -> None:
    """Raises DataError for the first of these files (None: all) that is not as the manifest says."""
    for name in names or [*_needed(manifest), *sorted(manifest.files.keys() - set(_needed(manifest)))]:
        if name not in manifest.files:
            raise DataError(
                f"shard {where}: its manifest names no {name}, so it cannot be trusted; build the index again"
            )
        try:
            found = file_hash(where / name)
        except OSError as error:
            raise DataError(f"{where / name}: {error.strerror}; build the index again") from error
        if found != manifest.files[name]:
            raise DataError(f"{where / name} has changed since the index was built; build the index again")


def _needed(manifest: ShardManifest) -> list[str]:
    half = [HALF] if manifest.kind.name == "exact-bf16" else []
    return [VECTORS, DAYS, ARTICLES, *half, *(LEXICAL_FILES if manifest.lexical is not None else ())]


def _check_rows(articles: pa.Table, days: DayTable, manifest: ShardManifest) -> None:
    """Raises ValueError unless rows, order, instants, month and day table agree."""
    if not articles.schema.equals(SCHEMA):
        raise ValueError(f"{ARTICLES} has other columns than this version writes")
    if not articles.num_rows == days.rows == manifest.rows:
        raise ValueError(f"{articles.num_rows} articles, {days.rows} rows in {DAYS}, {manifest.rows} in the manifest")
    if any(articles[name].null_count for name in articles.column_names):
        raise ValueError(f"{ARTICLES} has empty fields")
    day, ids = articles["day"].combine_chunks(), articles["id"].combine_chunks()
    if not pc.all(pc.equal(pc.cast(articles["published"], pa.date32()), day)).as_py():
        raise ValueError("a row's day is not the UTC day of its publication")
    before, after = slice(None, -1), slice(1, None)
    number = day.to_numpy(zero_copy_only=False)
    ids_increase = pc.less(ids[before], ids[after]).to_numpy(zero_copy_only=False)
    same_day, later_day = number[before] == number[after], number[before] < number[after]
    if not (later_day | (same_day & ids_increase)).all():
        raise ValueError("rows are not ordered by (day, id)")
    firsts = [0, *(np.flatnonzero(~same_day) + 1).tolist()]
    if list(days.first_rows) != firsts or list(days.days) != number[firsts].tolist():
        raise ValueError(f"{DAYS} disagrees with the days of the rows")
    months = {f"{d:%Y-%m}" for d in days.days}
    if months != {manifest.month} or (days.days[0], days.days[-1]) != (manifest.first_day, manifest.last_day):
        raise ValueError(f"its days run from {days.days[0]} to {days.days[-1]}, not as the manifest says")


def _check_vectors(vectors: Vectors, articles: Sequence[Article], encoder: EncoderIdentity) -> None:
    if vectors.shape != (len(articles), encoder.dimension) or vectors.dtype != np.float32:
        raise DataError(
            f"encoder {encoder.name} gave {vectors.dtype} {vectors.shape} for {len(articles)} texts, "
            f"not float32 ({len(articles)}, {encoder.dimension})"
        )
    if (row := next(not_unit(vectors), None)) is not None:
        raise DataError(
            f"encoder {encoder.name} gave article {articles[row].id!r} (row {row} of {month_of(articles[row].day)}) a vector that is "
            "not of unit length; the scores of others would not compare with its own"
        )


def month_of(day: dt.date) -> str:
    """The shard of a day, `YYYY-MM`."""
    return f"{day:%Y-%m}"
