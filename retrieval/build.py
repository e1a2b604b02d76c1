"""Articles → an index on disk, month by month.

A month that an earlier build finished from the same articles with the same encoder is kept; the manifest, without
which nothing opens, is written last. The same input gives the same bytes.
"""

import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from cluster.config import IndexSettings, Settings
from cluster.failures import DataError
from cluster.record import Record
from retrieval.article import Article
from retrieval.corpus.load import load_articles
from retrieval.encoder import Encoder, Vectors, open_encoder
from retrieval.index_folder import alone_in, publish, withdraw
from retrieval.lexical import ANALYSIS
from retrieval.manifest import EXACT, Approximation, EncoderIdentity, IndexKind, ShardManifest
from retrieval.shard_files import finished_shard, month_of, row_order, source_hash, stored_vectors, write_shard

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
    summary = build_index(
        loaded.records,
        encoder,
        index.directory,
        progress,
        text_characters=index.text_characters,
        kind=index_kind(index),
        lexical=index.lexical,
    )
    return summary.model_copy(update={"quarantined": dict(loaded.quarantined)})


def build_index(
    articles: Iterable[Article],
    encoder: Encoder,
    directory: Path,
    progress: Progress | None = None,
    *,
    text_characters: int = 1000,
    kind: IndexKind = EXACT,
    lexical: bool = True,
) -> BuildSummary:
    """Make `directory` an index of exactly these articles, with postings if it is to be searched by words (`lexical`).

    Months in which only the kind or the postings have changed are not encoded again.
    Raises DataError if there are none, if two share an id, or if another build works in the same directory.
    """
    identity = encoder_identity(encoder, text_characters)
    months = _by_month(articles)
    total = sum(len(rows) for rows in months.values())
    with alone_in(directory):
        finished = {
            month: finished_shard(directory, month, source_hash(rows), identity) for month, rows in months.items()
        }
        wanted = (kind, ANALYSIS if lexical else None)
        kept = {
            m: shard for m, shard in finished.items() if shard is not None and (shard.kind, shard.lexical) == wanted
        }
        if len(kept) < len(months) or _strangers(directory, months):
            withdraw(directory)
        for stranger in _strangers(directory, months):
            shutil.rmtree(stranger)
        done = 0
        shards: list[ShardManifest] = []
        for month, rows in months.items():
            shard = kept.get(month)
            if shard is None:
                report = _reporter(progress, done, total, month)
                encoded = finished[month] is not None
                vectors = (
                    stored_vectors(directory, month) if encoded else _encode(rows, encoder, text_characters, report)
                )
                shard = write_shard(directory, month, rows, vectors, identity, kind, lexical)
            shards.append(shard)
            done += len(rows)
            _reporter(progress, done, total, month)(0)
        manifest = publish(directory, identity, kind, shards)
    reused = len(kept)
    _log.info("index %s: %d articles in %d shards, %d of them kept", directory, total, len(shards), reused)
    return BuildSummary(
        articles=total, shards=len(shards), kept=reused, fingerprint=manifest.fingerprint, directory=directory
    )


def encoder_identity(encoder: Encoder, text_characters: int) -> EncoderIdentity:
    """What an index says about the encoder of its vectors."""
    return EncoderIdentity(
        name=encoder.name,
        fingerprint=encoder.fingerprint,
        dimension=encoder.dimension,
        text_characters=text_characters,
    )


def index_kind(index: IndexSettings) -> IndexKind:
    """The kind that the settings ask for."""
    if index.kind != "approximate":
        return IndexKind(name=index.kind)
    return IndexKind(name=index.kind, approximation=Approximation(**index.approximate.model_dump()))


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
