"""What an index says about itself: which encoder made it, from which articles, and the hash of every file.

The index's fingerprint is the hash of this record, so that a run which names it names all of its bytes.
"""

import datetime as dt
import hashlib
from typing import Literal, Self

from pydantic import model_validator

from cluster.record import Record

MANIFEST_FILE = "manifest.json"


FORMAT: Literal["pastcast-index-3"] = "pastcast-index-3"

FEWEST_ROWS = 5_000
"""An approximate index searches a month with fewer articles exactly: lists for it would save nothing."""


class Approximation(Record):
    """How an approximate index is made and searched (`index.approximate`)."""

    code: Literal["pq", "sq"]
    lists: int | None
    """Wished number of inverted lists of a month; None: four times the root of its rows."""
    probes: int
    """Lists that a query looks into."""
    rescored: int
    """Rows that are scored exactly per row asked for."""


class IndexKind(Record):
    """Which search an index was made for, and all settings of it that can alter an answer."""

    name: Literal["exact", "exact-bf16", "approximate"] = "exact"
    """`exact` and `exact-bf16` give the same answers."""
    approximation: Approximation | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.name == "approximate") != (self.approximation is not None):
            raise ValueError("an index is approximate if and only if it says how")
        return self


EXACT = IndexKind()


AS_IT_IS = "{query}"
"""The template of queries that are encoded without an instruction."""


class EncoderFacts(Record):
    """Which encoder it is: whoever differs in any of this, but the name, gives vectors that do not compare."""

    name: str
    """For people."""
    fingerprint: str
    """SHA-256 of what an article's vector depends on."""
    dimension: int
    query_template: str = AS_IT_IS
    """What a query becomes before it is encoded; `{query}` stands for it. Articles are encoded as they are."""


class EncoderIdentity(EncoderFacts):
    """The encoder and the rule by which an article's text became its input."""

    text_characters: int
    """Title, summary and text, joined by new lines and cut here, were encoded."""

    def encoded_alike(self, other: "EncoderIdentity") -> bool:
        """Whether the same article has the same vector in both; queries may be encoded with another instruction."""
        ours = (self.fingerprint, self.dimension, self.text_characters)
        return ours == (other.fingerprint, other.dimension, other.text_characters)


class ShardManifest(Record):
    """One month on disk."""

    month: str
    """`YYYY-MM`, also the folder's name."""
    rows: int
    first_day: dt.date
    last_day: dt.date
    source: str
    """SHA-256 over the articles in row order."""
    encoder: EncoderIdentity
    kind: IndexKind = EXACT
    lexical: str | None = None
    """How the words of its postings were made (`lexical.ANALYSIS`). None: it has no postings, and is searched by vectors alone."""
    recall: float | None = None
    """Approximate months only: the share of the exact best 10 that is found. None: answers are exact."""
    files: dict[str, str]
    """File name → SHA-256 of its bytes."""


class Manifest(Record):
    """The whole index."""

    format: Literal["pastcast-index-3"] = FORMAT
    kind: IndexKind = EXACT
    encoder: EncoderIdentity
    source: str
    """SHA-256 over the shards' sources."""
    shards: tuple[ShardManifest, ...]
    """In order of month, at least one."""

    @property
    def recall(self) -> float:
        """The share of the exact best 10 that a search finds, averaged over the rows; 1 where answers are exact."""
        rows = sum(s.rows for s in self.shards)
        return sum(s.rows * (1.0 if s.recall is None else s.recall) for s in self.shards) / rows

    @property
    def lexical(self) -> str | None:
        """How the words of its postings were made; None unless every month has such postings."""
        (found, *others) = {s.lexical for s in self.shards}
        return None if others else found

    @property
    def search(self) -> str:
        """What a report says about how the vectors of this index are searched."""
        how = self.kind.approximation
        if how is None:
            return self.kind.name
        return f"approximate ({how.code}, {how.probes} lists a query), recall@10 {self.recall:.3f} of exact search"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the record as it is stored."""
        return hashlib.sha256(self.stored()).hexdigest()

    def stored(self) -> bytes:
        """The bytes of `manifest.json`: the same for the same index."""
        return self.model_dump_json(indent=1).encode() + b"\n"
