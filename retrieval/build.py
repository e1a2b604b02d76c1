"""Articles → an index on disk, month by month.

A month that an earlier build finished from the same articles with the same encoder is kept; the manifest, without
which nothing opens, is written last. The same input gives the same bytes, whoever encodes: exactly with `hashing`, and up to the
last bits of a vector with a sentence encoder on another machine or with other threads.
"""

import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from cluster.config import IndexSettings, Settings
from cluster.failures import DataError
from cluster.record import Record
from retrieval.article import Article
from retrieval.chunks import Encode, encode_here
from retrieval.corpus.load import load_articles
from retrieval.encoder import Encoder, encoder_facts, facts_of, open_encoder
from retrieval.index_folder import ADDING, alone_in, publish, withdraw
from retrieval.manifest import EXACT, Approximation, EncoderFacts, EncoderIdentity, IndexKind
from retrieval.months import Form, Month, whole, write_months
from retrieval.shard_files import finished_shard, month_of, row_order, source_hash, stored_vectors

_log = logging.getLogger(__name__)

QUARANTINE, ADDED = "quarantine", "added-"
"""The folder beside the shards for rows that became no article, and how files there begin that `pastcast index add` wrote."""
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
    naive_times: int = 0
    """Times without an offset; they were taken in `articles.time_zone`."""
    fingerprint: str
    directory: Path


Progress = Callable[[BuildProgress], None]


class Reporter:
    """Counts what is done and passes it on; never backwards."""

    def __init__(self, progress: Progress | None, total: int, done: int = 0) -> None:
        self._progress, self._total, self._done = progress, total, done
        if done:
            self("", 0)

    def __call__(self, month: str, more: int) -> None:
        """So many more articles of a month are done."""
        self._done += more
        if self._progress is not None:
            self._progress(BuildProgress(done=self._done, total=self._total, month=month))


def build_from_settings(settings: Settings, progress: Progress | None = None) -> BuildSummary:
    """Build the index that the settings name; with `encoder.actors`, as a Ray Data job.

    Bad rows are quarantined in `index.directory/quarantine`. Raises DataError, SettingsError and InfrastructureError.
    """
    index = settings.index
    quarantine = index.directory / QUARANTINE
    facts = facts_of(index.encoder, settings.encoder)
    loaded = load_articles(settings.articles, quarantine)
    form = Form(encoder_identity(facts, index.text_characters), index_kind(index), index.lexical)
    summary = _build(loaded.records, form, encoding(settings, facts), index.directory, progress)
    for file in quarantine.glob(f"{ADDED}*.jsonl"):
        file.unlink()  # of rows that were added to the index that this one replaces
    return summary.model_copy(update={"quarantined": dict(loaded.quarantined), "naive_times": loaded.naive_times})


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

    Months in which only the kind, the query template or the postings have changed are not encoded again.
    Raises DataError if there are none, if two share an id, or if another build works in the same directory.
    """
    identity = encoder_identity(encoder_facts(encoder), text_characters)
    return _build(articles, Form(identity, kind, lexical), encode_here(lambda: encoder), directory, progress)


def encoding(settings: Settings, facts: EncoderFacts) -> Encode:
    """Who encodes: this process, or actors of a Ray Data job. Loads nothing before there is something to encode."""
    if settings.encoder.build_actors:
        from retrieval.encode_job import encode_on_ray  # Ray Data, which takes a while to import

        return encode_on_ray(settings, facts)
    index = settings.index
    return encode_here(lambda: open_encoder(index.encoder, index.batch_size, settings.encoder))


def _build(
    articles: Iterable[Article], form: Form, encode: Encode, directory: Path, progress: Progress | None
) -> BuildSummary:
    months = _by_month(articles)
    total = sum(len(rows) for rows in months.values())
    with alone_in(directory):
        finished = {
            month: finished_shard(directory, month, source_hash(rows), form.encoder) for month, rows in months.items()
        }
        shards = {month: shard for month, shard in finished.items() if shard is not None and form.is_of(shard)}
        kept = len(shards)
        if kept < len(months) or _strangers(directory, months):
            withdraw(directory)
        for stranger in _strangers(directory, months):
            shutil.rmtree(stranger)
        report = Reporter(progress, total, sum(shard.rows for shard in shards.values()))
        work = [
            Month(month, rows, None if finished[month] is None else whole(stored_vectors(directory, month)))
            for month, rows in months.items()
            if month not in shards
        ]
        shards |= write_months(directory, work, encode, form, report)
        manifest = publish(directory, form.encoder, form.kind, [shards[month] for month in months])
    _log.info("index %s: %d articles in %d shards, %d of them kept", directory, total, len(shards), kept)
    return BuildSummary(
        articles=total, shards=len(shards), kept=kept, fingerprint=manifest.fingerprint, directory=directory
    )


def encoder_identity(facts: EncoderFacts, text_characters: int) -> EncoderIdentity:
    """What an index says about the encoder of its vectors."""
    return EncoderIdentity(**facts.model_dump(), text_characters=text_characters)


def index_kind(index: IndexSettings) -> IndexKind:
    """The kind that the settings ask for."""
    if index.kind != "approximate":
        return IndexKind(name=index.kind)
    return IndexKind(name=index.kind, approximation=Approximation(**index.approximate.model_dump()))


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


def _strangers(directory: Path, months: Iterable[str]) -> list[Path]:
    """Folders of months that are no longer part of the index, and of builds that were killed."""
    names = set(months)
    return [
        p
        for p in sorted(directory.iterdir())
        if p.is_dir()
        and (
            p.name.startswith(".building-")
            or p.name == ADDING
            or (_MONTH_FOLDER.fullmatch(p.name) and p.name not in names)
        )
    ]
