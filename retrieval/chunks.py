"""What a build has to encode, cut into chunks, and the vectors of a month as they come in.

A chunk is a run of rows of one month, cut by the rows alone: which texts are encoded together depends on neither what was
finished before nor who encodes. Vectors are written to a file as they come, in any order; no month of them is held in memory.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cluster.failures import DataError
from retrieval.article import Article
from retrieval.encoder import Encoder
from retrieval.mask import Vectors

CHUNK_ROWS = 256
"""Texts that are given to an encoder at once."""


@dataclass(frozen=True)
class Chunk:
    """Some texts of a month."""

    month: str
    rows: tuple[int, ...]
    """Where their vectors belong."""
    texts: tuple[str, ...]
    """Aligned with `rows`."""


@dataclass(frozen=True)
class Encoded:
    """The vectors of a chunk."""

    month: str
    rows: tuple[int, ...]
    vectors: Vectors
    """float32 [len(rows), dimension]."""


Encode = Callable[[Iterable[Chunk]], Generator[Encoded, None, None]]
"""Vectors of all chunks, each once, in any order."""


def chunks_of(month: str, articles: Sequence[Article], rows: Sequence[int], characters: int) -> Iterator[Chunk]:
    """These rows of a month as chunks. `characters`: how much of an article is encoded."""
    for start in range(0, len(rows), CHUNK_ROWS):
        some = tuple(rows[start : start + CHUNK_ROWS])
        yield Chunk(month, some, tuple(encoded_text(articles[row], characters) for row in some))


def encoded_text(article: Article, characters: int) -> str:
    """What of an article is encoded: title, summary and text, cut."""
    parts = (article.title, article.summary, article.text)
    return "\n".join(part for part in parts if part.strip())[:characters]


def encode_here(opened: Callable[[], Encoder]) -> Encode:
    """Encodes in this process, chunk after chunk; the encoder is opened at the first one."""

    def encode(chunks: Iterable[Chunk]) -> Generator[Encoded, None, None]:
        encoder: Encoder | None = None
        for chunk in chunks:
            encoder = encoder or opened()
            yield Encoded(chunk.month, chunk.rows, encoder.encode(chunk.texts))

    return encode


class MonthVectors:
    """The vectors of one month while they come in: a memory-mapped .npy file."""

    def __init__(self, file: Path, rows: int, dimension: int, wanted: int) -> None:
        """`wanted`: rows that are still to come by `put`; the others are there by `copy`."""
        self._file = file
        self._vectors: Vectors = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(rows, dimension))  # type: ignore[no-untyped-call]
        self._wanted = wanted

    def copy(self, rows: Sequence[int], source: Vectors, source_rows: Sequence[int]) -> None:
        """Rows that were encoded before."""
        for start in range(0, len(rows), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            self._vectors[np.asarray(rows[part], np.int64)] = source[np.asarray(source_rows[part], np.int64)]

    def put(self, encoded: Encoded) -> bool:
        """Whether all rows are there now. Raises DataError for vectors that are not one for each row, or of another dimension."""
        expected = (len(encoded.rows), self._vectors.shape[1])
        if encoded.vectors.shape != expected or encoded.vectors.dtype != np.float32:
            raise DataError(
                f"the encoder gave {encoded.vectors.dtype} {encoded.vectors.shape} for {expected[0]} texts, not float32 {expected}"
            )
        self._vectors[np.asarray(encoded.rows, np.int64)] = encoded.vectors
        self._wanted -= len(encoded.rows)
        return self._wanted == 0

    def finished(self) -> Vectors:
        """The whole month, memory-mapped and read-only; the file is the caller's to remove."""
        del self._vectors
        vectors: Vectors = np.load(self._file, mmap_mode="r", allow_pickle=False)
        return vectors
