"""New articles into an index that exists, as if it had been built from the old ones and then these.

Only months that they belong to are written again, and only they are encoded. An article whose id is there already is never
replaced. Until the last month is written the old index stays what it is; a killed add is finished, or done over, by the next one.
"""

import logging
import shutil
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cluster.config import ArticlesSettings, Settings
from cluster.failures import SettingsError
from cluster.record import Record
from retrieval.article import Article
from retrieval.article_table import article_of
from retrieval.build import ADDED, QUARANTINE, Progress, Reporter, encoder_identity, encoding, index_kind
from retrieval.chunks import Encode
from retrieval.corpus.load import load_articles
from retrieval.corpus.rows import BadRow
from retrieval.encoder import facts_of
from retrieval.index_folder import ADDING, alone_in, move_into_place, publish
from retrieval.library import Library
from retrieval.local import require_encoder
from retrieval.manifest import ShardManifest
from retrieval.months import Form, Known, Month, write_months
from retrieval.shard_files import (
    file_hash,
    finished_shard,
    load_shard,
    load_texts,
    month_of,
    row_order,
    source_hash,
    stored_vectors,
)

_log = logging.getLogger(__name__)


class AddSummary(Record):
    """What an add did."""

    added: int
    already: int
    """Articles that the index held, word for word."""
    quarantined: dict[str, int]
    """Reason → rows that became no article of the index; `changed-article`: the index holds another one with that id."""
    naive_times: int
    """Times without an offset; they were taken in `articles.time_zone`."""
    rewritten: tuple[str, ...]
    """Months that were written."""
    articles: int
    shards: int
    fingerprint: str
    directory: Path


def add_from_settings(settings: Settings, file: Path, progress: Progress | None = None) -> AddSummary:
    """Add the articles of `file`, read as `articles` says, to the index that the settings name.

    Raises DataError if there is no index or it is damaged, SettingsError if the settings name another encoder or kind than it
    has, InfrastructureError if the encoder cannot be reached.
    """
    index = settings.index
    facts = facts_of(index.encoder, settings.encoder)
    source = settings.articles.model_copy(update={"path": file})
    with alone_in(index.directory):
        move_into_place(index.directory)
        library = Library.open(index.directory)
        library.require_kind(index_kind(index))
        require_encoder(library.manifest.encoder, facts)
        if library.manifest.encoder.text_characters != index.text_characters:
            raise SettingsError(
                f"{index.directory} was built with index.text_characters {library.manifest.encoder.text_characters}, the settings say "
                f"{index.text_characters}; change the setting or build the index again"
            )
        holdings = Holdings(library, _named_in(source))

        def judge(article: Article) -> None:
            if fault := holdings.fault(article):
                raise fault

        name = f"{ADDED}{file_hash(file)[:12]}"
        loaded = load_articles(source, index.directory / QUARANTINE, name, judge)
        new = [article for article in loaded.records if article.id not in holdings.articles]
        form = Form(
            encoder_identity(facts, index.text_characters), index_kind(index), library.manifest.lexical is not None
        )
        _require_form(library, form)
        rewritten = _add(library, new, form, encoding(settings, facts), progress)
        whole = Library.open(index.directory)
    _log.info("index %s: %d articles added in %d months", index.directory, len(new), len(rewritten))
    return AddSummary(
        added=len(new),
        already=len(loaded.records) - len(new),
        quarantined=dict(loaded.quarantined),
        naive_times=loaded.naive_times,
        rewritten=rewritten,
        articles=whole.rows,
        shards=len(whole.manifest.shards),
        fingerprint=whole.fingerprint,
        directory=index.directory,
    )


class Holdings:
    """What an index holds of some ids and urls."""

    def __init__(self, library: Library, named: "Named") -> None:
        """Looks through the articles of every month. Raises DataError for damaged ones."""
        self.articles: dict[str, Article] = {}
        """By id."""
        self._id_of_url: dict[str, str] = {}
        for shard in library.manifest.shards:
            texts = load_texts(library.directory, shard)
            for row in _rows_with(texts, "id", named.ids):
                article = article_of(texts.slice(row, 1).to_pylist()[0])
                self.articles[article.id] = article
            for row in _rows_with(texts, "url", named.urls):
                self._id_of_url[texts["url"][row].as_py()] = texts["id"][row].as_py()

    def fault(self, article: Article) -> BadRow | None:
        """Why the article cannot be added; None if it can, or is there as it is."""
        held = self.articles.get(article.id)
        if held == article:
            return None
        if held is not None:
            different = sorted(name for name in Article.model_fields if getattr(held, name) != getattr(article, name))
            return BadRow(
                "changed-article",
                f"the index holds {article.id} with another {', '.join(different)}; it was not replaced",
            )
        other = self._id_of_url.get(article.url) if article.url else None
        return None if other is None else BadRow("duplicate-url", f"the index holds {article.url} as {other}")


class Named(Record):
    """Ids and urls that a file names."""

    ids: frozenset[str]
    urls: frozenset[str]


def _named_in(source: ArticlesSettings) -> Named:
    """Every id and url of a usable row, repeated ones included."""
    ids: set[str] = set()
    urls: set[str] = set()

    def note(article: Article) -> None:
        ids.add(article.id)
        urls.add(article.url)
        raise BadRow("noted", article.id)  # so that a row behind it with the same id or url is seen too

    load_articles(source, judge=note)
    return Named(ids=frozenset(ids), urls=frozenset(urls - {""}))


def _rows_with(texts: pa.Table, column: str, values: Collection[str]) -> list[int]:
    if not values:
        return []
    wanted = pa.array(sorted(values), pa.large_string())
    return pc.indices_nonzero(pc.is_in(texts[column], value_set=wanted)).to_pylist()  # type: ignore[no-any-return]


def _add(
    library: Library, new: Sequence[Article], form: Form, encode: Encode, progress: Progress | None
) -> tuple[str, ...]:
    """Writes the months of these articles beside the index, then moves them into their places. The months."""
    coming: dict[str, list[Article]] = defaultdict(list)
    for article in new:
        coming[month_of(article.day)].append(article)
    adding = library.directory / ADDING
    if not coming:
        shutil.rmtree(adding, ignore_errors=True)  # of an add that was killed and is not wanted any more
        return ()
    shards = {shard.month: shard for shard in library.manifest.shards}
    months = [_merged(library, shards.get(name), name, articles) for name, articles in sorted(coming.items())]
    adding.mkdir(exist_ok=True)
    kept: dict[str, ShardManifest] = {}
    for month in months:
        found = finished_shard(adding, month.name, source_hash(month.articles), form.encoder)
        if found is not None and form.is_of(found):
            kept[month.name] = found
    for left in adding.iterdir():
        if left.name not in kept:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    work = [month for month in months if month.name not in kept]
    report = Reporter(progress, sum(len(month.new_rows) for month in work))
    written = write_months(adding, work, encode, form, report)
    shards |= kept | written
    publish(adding, form.encoder, form.kind, [shards[name] for name in sorted(shards)])
    move_into_place(library.directory)
    return tuple(month.name for month in months)


def _require_form(library: Library, form: Form) -> None:
    """Raises SettingsError if months that are not written would differ from those that are."""
    other = next((shard for shard in library.manifest.shards if not form.is_of(shard)), None)
    if other is not None:
        raise SettingsError(
            f"month {other.month} of {library.directory} was built by another encoder, kind or analysis of words than this version and "
            "these settings would; run `pastcast index build`, which encodes nothing again where the encoder is the same"
        )


def _merged(library: Library, shard: ShardManifest | None, name: str, new: Sequence[Article]) -> Month:
    """The month with these articles, and the vectors of those that it has already. Raises DataError if it is damaged."""
    if shard is None:
        return Month(name, row_order(new))
    stored = load_shard(library.directory, shard)
    old = [stored.article(row) for row in range(shard.rows)]
    articles = row_order([*old, *new])
    source_row = {article.id: row for row, article in enumerate(old)}
    rows = [row for row, article in enumerate(articles) if article.id in source_row]
    source_rows = [source_row[articles[row].id] for row in rows]
    return Month(name, articles, Known(stored_vectors(library.directory, name), rows, source_rows))
