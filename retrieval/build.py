"""Articles → an index on disk, month by month.

A month that an earlier build finished from the same articles with the same encoder is kept; the manifest, without
which nothing opens, is written last. The same input gives the same bytes.
"""

import contextlib
import fcntl
import hashlib
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from cluster.config import Settings
from cluster.failures import DataError
from cluster.record import Record
from retrieval.article import Article
from retrieval.corpus.load import load_articles
from retrieval.encoder import Encoder, Vectors, open_encoder
from retrieval.manifest import MANIFEST_FILE, EncoderIdentity, Manifest, ShardManifest
from retrieval.shard_files import finished_shard, month_of, row_order, source_hash, sync, write_shard

_log = logging.getLogger(__name__)

_CHUNK = 256
"""Articles encoded between two reports of progress."""

_MONTH_FOLDER = re.compile(r"\d{4,}-\d{2}")


class BuildProgress(Record):
    """How far a build is."""

    done: int
    """Articles of kept and finished months and of the current one."""
    total: int
    month: str


class BuildSummary(Record):
    """What a build did."""

    articles: int
    shards: int
    kept: int
    """Shards that an earlier build had finished."""
    quarantined: dict[str, int] = {}
    """Reason → rows of the input that became no article."""
    fingerprint: str
    directory: Path


Progress = Callable[[BuildProgress], None]


def build_from_settings(settings: Settings, progress: Progress | None = None) -> BuildSummary:
    """Build the index that the settings name.

    Bad rows are quarantined in `index.directory/quarantine`. Raises DataError and SettingsError.
    """
    index = settings.index
    loaded = load_articles(settings.articles, index.directory / "quarantine")
    encoder = open_encoder(index.encoder, index.batch_size)
    summary = build_index(loaded.records, encoder, index.directory, progress, text_characters=index.text_characters)
    return summary.model_copy(update={"quarantined": dict(loaded.quarantined)})


def build_index(
    articles: Iterable[Article],
    encoder: Encoder,
    directory: Path,
    progress: Progress | None = None,
    *,
    text_characters: int = 1000,
) -> BuildSummary:
    """Make `directory` an index of exactly these articles.

    Raises DataError if there are none, if two share an id, or if another build works in the same directory.
    """
    identity = EncoderIdentity(
        name=encoder.name,
        fingerprint=encoder.fingerprint,
        dimension=encoder.dimension,
        text_characters=text_characters,
    )
    months = _by_month(articles)
    total = sum(len(rows) for rows in months.values())
    directory.mkdir(parents=True, exist_ok=True)
    with _alone_in(directory):
        sources = {month: source_hash(rows) for month, rows in months.items()}
        kept = {month: finished_shard(directory, month, sources[month], identity) for month in months}
        manifest_file = directory / MANIFEST_FILE
        if None in kept.values() or _strangers(directory, months):
            # until the new one is whole there is no index: an old manifest must not vouch for new shards
            manifest_file.unlink(missing_ok=True)
            sync(directory)
        for stranger in _strangers(directory, months):
            shutil.rmtree(stranger)
        done = 0
        shards: list[ShardManifest] = []
        for month, rows in months.items():
            shard = kept[month]
            if shard is None:
                report = _reporter(progress, done, total, month)
                shard = write_shard(directory, month, rows, _encode(rows, encoder, text_characters, report), identity)
            shards.append(shard)
            done += len(rows)
            _reporter(progress, done, total, month)(0)
        source = hashlib.sha256("".join(f"{s.month} {s.source}\n" for s in shards).encode()).hexdigest()
        manifest = Manifest(encoder=identity, source=source, shards=tuple(shards))
        _write_whole(manifest_file, manifest.stored())
    reused = sum(shard is not None for shard in kept.values())
    _log.info("index %s: %d articles in %d shards, %d of them kept", directory, total, len(shards), reused)
    return BuildSummary(
        articles=total, shards=len(shards), kept=reused, fingerprint=manifest.fingerprint, directory=directory
    )


def encoded_text(article: Article, characters: int) -> str:
    """What of an article is encoded: title, summary and text, cut."""
    parts = (article.title, article.summary, article.text)
    return "\n".join(part for part in parts if part.strip())[:characters]


def _by_month(articles: Iterable[Article]) -> dict[str, list[Article]]:
    """Month → its articles in row order, months ascending."""
    months: dict[str, list[Article]] = defaultdict(list)
    seen: dict[str, Article] = {}
    for article in articles:
        other = seen.setdefault(article.id, article)
        if other is not article:
            raise DataError(
                f"two articles share the id {article.id!r}: {other.url} and {article.url}; ids must be unique"
            )
        months[month_of(article.day)].append(article)
    if not months:
        raise DataError("there are no articles to index; check articles.path and the quarantine file beside the index")
    return {month: row_order(months[month]) for month in sorted(months)}


def _encode(rows: Sequence[Article], encoder: Encoder, characters: int, report: Callable[[int], None]) -> Vectors:
    parts = []
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        parts.append(encoder.encode([encoded_text(a, characters) for a in chunk]))
        report(start + len(chunk))
    return np.concatenate(parts)


def _reporter(progress: Progress | None, before: int, total: int, month: str) -> Callable[[int], None]:
    def report(done: int) -> None:
        if progress is not None:
            progress(BuildProgress(done=before + done, total=total, month=month))

    return report


def _strangers(directory: Path, months: Iterable[str]) -> list[Path]:
    """Folders of months that are no longer part of the index, and of builds that were killed."""
    names = set(months)
    return [
        p
        for p in sorted(directory.iterdir())
        if p.is_dir() and (p.name.startswith(".building-") or (_MONTH_FOLDER.fullmatch(p.name) and p.name not in names))
    ]


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another build is working in {directory}; wait for it or choose another directory"
            ) from error
        yield


def _write_whole(file: Path, content: bytes) -> None:
    beside = file.with_suffix(".partial")
    beside.write_bytes(content)
    sync(beside)
    beside.rename(file)
    sync(file.parent)
