"""What an index says about itself: which encoder made it, from which articles, and the hash of every file.

The index's fingerprint is the hash of this record, so that a run which names it names all of its bytes.
"""

import datetime as dt
import hashlib
from typing import Literal

from cluster.record import Record

MANIFEST_FILE = "manifest.json"


class EncoderIdentity(Record):
    """The encoder and the rule by which an article's text became its input."""

    name: str
    fingerprint: str
    dimension: int
    text_characters: int
    """Title, summary and text, joined by new lines and cut here, were encoded."""


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
    files: dict[str, str]
    """File name → SHA-256 of its bytes."""


class Manifest(Record):
    """The whole index."""

    format: Literal["pastcast-index-1"] = "pastcast-index-1"
    kind: Literal["exact"] = "exact"
    encoder: EncoderIdentity
    source: str
    """SHA-256 over the shards' sources."""
    shards: tuple[ShardManifest, ...]
    """In order of month, at least one."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the record as it is stored."""
        return hashlib.sha256(self.stored()).hexdigest()

    def stored(self) -> bytes:
        """The bytes of `manifest.json`: the same for the same index."""
        return self.model_dump_json(indent=1).encode() + b"\n"
