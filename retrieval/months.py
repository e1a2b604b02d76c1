"""Months that are to be written: their articles, which vectors are known, and the writing of each as soon as the last vector is there."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from retrieval.article import Article
from retrieval.chunks import Chunk, Encode, MonthVectors, chunks_of
from retrieval.lexical import ANALYSIS
from retrieval.manifest import EncoderIdentity, IndexKind, ShardManifest
from retrieval.mask import Vectors
from retrieval.shard_files import write_shard

Report = Callable[[str, int], None]
"""Told a month and how many more of its articles are done."""

_SCRATCH = ".building-vectors"


@dataclass(frozen=True)
class Form:
    """How months are kept: equal for all months of an index."""

    encoder: EncoderIdentity
    kind: IndexKind
    lexical: bool
    """With postings."""

    def is_of(self, shard: ShardManifest) -> bool:
        """Whether a month is kept like this, its postings by this version's analysis."""
        analysis = ANALYSIS if self.lexical else None
        return (shard.encoder, shard.kind, shard.lexical) == (self.encoder, self.kind, analysis)


@dataclass(frozen=True)
class Known:
    """Vectors that were made before."""

    vectors: Vectors
    """float32 [m, dimension], memory-mapped."""
    rows: Sequence[int]
    """Rows of the new month that have one."""
    source_rows: Sequence[int]
    """Where it is in `vectors`; aligned with `rows`."""


@dataclass(frozen=True)
class Month:
    """A month as it is to be."""

    name: str
    articles: Sequence[Article]
    """In row order."""
    known: Known | None = None

    @property
    def new_rows(self) -> list[int]:
        """Rows without a vector."""
        known = set(self.known.rows) if self.known else set()
        return [row for row in range(len(self.articles)) if row not in known]


def whole(vectors: Vectors) -> Known:
    """All vectors of a month, in row order."""
    rows = range(len(vectors))
    return Known(vectors, rows, rows)


def write_months(
    directory: Path, months: Sequence[Month], encode: Encode, form: Form, report: Report
) -> dict[str, ShardManifest]:
    """Writes these months into `directory`; each is there whole or not at all. Raises what `encode` and `write_shard` raise."""
    scratch = directory / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    written: dict[str, ShardManifest] = {}
    by_name = {month.name: month for month in months}
    coming: dict[str, MonthVectors] = {}

    def write(month: Month, vectors: Vectors) -> None:
        written[month.name] = write_shard(
            directory, month.name, month.articles, vectors, form.encoder, form.kind, form.lexical
        )

    def chunks() -> Iterator[Chunk]:
        for month in months:
            if not (rows := month.new_rows):
                continue
            file = scratch / f"{month.name}.npy"
            vectors = MonthVectors(file, len(month.articles), form.encoder.dimension, wanted=len(rows))
            if month.known is not None:
                vectors.copy(month.known.rows, month.known.vectors, month.known.source_rows)
            coming[month.name] = vectors
            yield from chunks_of(month.name, month.articles, rows, form.encoder.text_characters)

    for month in months:
        if month.known is not None and not month.new_rows:
            write(month, month.known.vectors)
            report(month.name, len(month.articles))
    with closing(encode(chunks())) as encoded:
        for some in encoded:
            whole_month = coming[some.month].put(some)
            report(some.month, len(some.rows))
            if whole_month:
                write(by_name[some.month], coming.pop(some.month).finished())
                (scratch / f"{some.month}.npy").unlink()
    shutil.rmtree(scratch)
    return written
