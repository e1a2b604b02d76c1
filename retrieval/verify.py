"""Is an index what it says it is? Every file, every row, and what no single month can know: that ids are unique.

Loading a shard stops at the first fault; this goes on, so that a person sees all there is, by file and row.
"""

import datetime as dt
import filecmp
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from cluster.failures import PastcastError
from cluster.record import Record
from retrieval.article_table import article_of, mapped_articles, words_of
from retrieval.days import DayTable
from retrieval.half import to_half
from retrieval.lexical import ANALYSIS, LEXICAL_FILES
from retrieval.library import Library
from retrieval.manifest import ShardManifest
from retrieval.postings_writer import write_postings
from retrieval.shard_files import (
    ARTICLES,
    DAYS,
    HALF,
    LISTS,
    SHARD,
    VECTORS,
    file_hash,
    load_shard,
    not_unit,
    source_hash,
    stored_vectors,
)

SHOWN_PER_FILE = 20
"""Faulty rows of a file that are named; the others are counted."""

_ROWS = 4_096

Faults = Iterator["Fault"]


class Fault(Record):
    """One thing that is wrong."""

    file: Path
    row: int | None = None
    """None: the whole file."""
    what: str


class Verdict(Record):
    """What was looked at, and what is wrong with it."""

    articles: int
    shards: int
    files: int
    """Files whose bytes were compared with the manifest's hashes."""
    faults: tuple[Fault, ...]
    unnamed: int
    """Faulty rows beyond `SHOWN_PER_FILE` of a file."""


def verify_index(directory: Path, look: Callable[[str], None] | None = None) -> Verdict:
    """Reads the whole index. `look` is told each month before it is read. Raises DataError if there is no manifest to compare with."""
    library = Library.open(directory)
    faults: list[Fault] = []
    unnamed = files = 0
    ids: dict[str, Any] = {}
    for shard in library.manifest.shards:
        if look is not None:
            look(shard.month)
        files += len(shard.files)
        where = directory / shard.month
        before = len(faults)
        for check in (_bytes, _own_manifest, _articles, _vectors, _postings):
            found = check(where, shard)
            faults += islice(found, SHOWN_PER_FILE)
            unnamed += sum(1 for _ in found)
        if len(faults) == before:  # else loading would only repeat one of them
            faults += _servable(where, shard)
        ids[shard.month] = _ids(where)
    found = _twins(directory, ids)
    faults += islice(found, SHOWN_PER_FILE)
    unnamed += sum(1 for _ in found)
    faults += _manifest(library)
    return Verdict(
        articles=library.rows, shards=len(library.manifest.shards), files=files, faults=tuple(faults), unnamed=unnamed
    )


def _bytes(where: Path, shard: ShardManifest) -> Faults:
    for name in sorted(shard.files):
        try:
            found = file_hash(where / name)
        except OSError as error:
            yield Fault(file=where / name, what=f"cannot be read: {error.strerror}")
            continue
        if found != shard.files[name]:
            yield Fault(
                file=where / name, what=f"has the hash {found[:12]}, the manifest says {shard.files[name][:12]}"
            )


def _own_manifest(where: Path, shard: ShardManifest) -> Faults:
    try:
        stored = ShardManifest.model_validate_json((where / SHARD).read_bytes())
    except (OSError, ValidationError) as error:
        yield Fault(file=where / SHARD, what=f"cannot be read: {error}")
        return
    if stored != shard:
        yield Fault(file=where / SHARD, what="is not what the index's manifest says of this month")


def _articles(where: Path, shard: ShardManifest) -> Faults:
    """Rows against the day table, the month, their order, and the hash of the articles that they were made from."""
    file = where / ARTICLES
    try:
        texts = mapped_articles(where / ARTICLES)
    except (OSError, ValueError) as error:
        yield Fault(file=file, what=f"cannot be read: {error}")
        return
    if texts.num_rows != shard.rows:
        yield Fault(file=file, what=f"holds {texts.num_rows} rows, the manifest says {shard.rows}")
    try:
        days: DayTable | None = DayTable.model_validate_json((where / DAYS).read_bytes())
    except (OSError, ValidationError) as error:
        yield Fault(file=where / DAYS, what=f"is no day table: {error}")
        days = None
    if days is not None and days.rows != texts.num_rows:
        yield Fault(file=where / DAYS, what=f"speaks of {days.rows} rows, {ARTICLES} holds {texts.num_rows}")
    before: tuple[dt.date, str] | None = None
    articles = []
    for row, fields in enumerate(_stored_rows(texts)):
        try:
            article = article_of(fields)
        except ValidationError as error:
            yield Fault(file=file, row=row, what=f"is no article: {error.errors()[0]['msg']}")
            continue
        articles.append(article)
        if fields["day"] != article.day:
            yield Fault(
                file=file, row=row, what=f"is filed under {fields['day']}, but was published {article.published}"
            )
        if f"{article.day:%Y-%m}" != shard.month:
            yield Fault(file=file, row=row, what=f"was published {article.day}, in another month")
        if days is not None and row < days.rows and days.day_of(row) != article.day:
            yield Fault(
                file=where / DAYS, row=row, what=f"says {days.day_of(row)}, the article was published {article.day}"
            )
        place = (article.day, article.id)
        if before is not None and place <= before:
            yield Fault(
                file=file, row=row, what=f"{place} does not come after {before}: rows are not ordered by (day, id)"
            )
        before = place
    if source_hash(articles) != shard.source:
        yield Fault(file=file, what="does not hold the articles that the manifest says it was made from")


def _vectors(where: Path, shard: ShardManifest) -> Faults:
    file = where / VECTORS
    try:
        vectors = stored_vectors(where.parent, shard.month)
    except (OSError, ValueError) as error:
        yield Fault(file=file, what=f"cannot be read: {error}")
        return
    if vectors.shape != (shard.rows, shard.encoder.dimension) or vectors.dtype != np.float32:
        yield Fault(
            file=file,
            what=f"holds {vectors.dtype} {vectors.shape}, not float32 ({shard.rows}, {shard.encoder.dimension})",
        )
        return
    for row in not_unit(vectors):
        yield Fault(file=file, row=row, what="is not of unit length, or not finite")
    if HALF in shard.files:
        try:
            half = np.load(where / HALF, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            yield Fault(file=where / HALF, what=f"cannot be read: {error}")
            return
        if half.shape != vectors.shape or half.dtype != np.uint16:
            yield Fault(file=where / HALF, what=f"holds {half.dtype} {half.shape}, {VECTORS} {vectors.shape}")
            return
        for start in range(0, len(vectors), _ROWS):
            part = slice(start, start + _ROWS)
            for row in np.flatnonzero((to_half(vectors[part]) != half[part]).any(axis=1)):
                yield Fault(file=where / HALF, row=start + int(row), what="is not the rounded vector")


def _postings(where: Path, shard: ShardManifest) -> Faults:
    """The words of the articles, counted again, give the same bytes."""
    if shard.lexical is None:
        return
    if shard.lexical != ANALYSIS:
        yield Fault(file=where / SHARD, what=f"has postings by {shard.lexical}; this version reads {ANALYSIS}")
        return
    try:
        texts = mapped_articles(where / ARTICLES)
        articles = (article_of(fields) for fields in _stored_rows(texts))
        with tempfile.TemporaryDirectory() as folder:
            again = Path(folder)
            write_postings(again, (words_of(article) for article in articles))
            for name in LEXICAL_FILES:
                if not filecmp.cmp(where / name, again / name, shallow=False):
                    yield Fault(file=where / name, what=f"is not what the words of {ARTICLES} give")
    except (OSError, ValueError):
        return  # said already, of the file that cannot be read


def _servable(where: Path, shard: ShardManifest) -> Faults:
    """What only loading it can tell: the lists of an approximate month, and whatever else a pool would refuse."""
    try:
        load_shard(where.parent, shard)
    except PastcastError as error:
        yield Fault(file=where / (LISTS if LISTS in str(error) else SHARD), what=str(error))


def _stored_rows(texts: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in texts.to_batches(max_chunksize=_ROWS):
        yield from batch.to_pylist()


def _ids(where: Path) -> Any:
    try:
        return mapped_articles(where / ARTICLES)["id"].combine_chunks()
    except (OSError, ValueError):
        return pa.array([], pa.large_string())  # said already


def _twins(directory: Path, ids: dict[str, Any]) -> Faults:
    """Ids that stand in more than one row."""
    months = list(ids)
    columns = [ids[month] for month in months]
    if not columns:
        return
    counts = pc.value_counts(pa.chunked_array(columns, pa.large_string()))
    twice = pc.filter(counts.field("values"), pc.greater(counts.field("counts"), 1))
    first: dict[str, str] = {}
    for month, column in ids.items():
        for row in pc.indices_nonzero(pc.is_in(column, value_set=twice)).to_pylist():
            article_id = column[row].as_py()
            if (other := first.setdefault(article_id, f"{month} row {row}")) != f"{month} row {row}":
                yield Fault(file=directory / month / ARTICLES, row=row, what=f"has the id {article_id!r} of {other}")


def _manifest(library: Library) -> Faults:
    file = library.directory / "manifest.json"
    manifest = library.manifest
    source = hashlib.sha256("".join(f"{s.month} {s.source}\n" for s in manifest.shards).encode()).hexdigest()
    if source != manifest.source:
        yield Fault(file=file, what="its source is not the hash of its shards' sources")
    months = [shard.month for shard in manifest.shards]
    if months != sorted(set(months)):
        yield Fault(file=file, what=f"its months are not each there once, in order: {', '.join(months)}")
    if file.read_bytes() != manifest.stored():
        yield Fault(file=file, what="is not written as this version writes it; runs may not be resumed with it")
    for shard in manifest.shards:
        if (shard.kind, shard.encoder) != (manifest.kind, manifest.encoder):
            yield Fault(file=file, what=f"month {shard.month} has another kind or encoder than the index")
    named = {shard.month: {*shard.files, SHARD} for shard in manifest.shards}
    for folder in sorted(p for p in library.directory.iterdir() if p.is_dir() and p.name[:1].isdigit()):
        for path in sorted(folder.iterdir()):
            if path.name not in named.get(folder.name, ()):
                yield Fault(file=path, what="is not named by the manifest")
