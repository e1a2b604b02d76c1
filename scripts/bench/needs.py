"""What a corpus of any size needs, computed from what was measured on a small one. The formulas of docs/scaling.md, and nothing else.

They say what the arithmetic and the memory of a machine allow when a scan goes on as it was measured: the same share of a core's speed at
any number of cores, no time on the network. Both are assumptions, and the page says so.
"""

import math
from typing import Literal

from cluster.record import Record

Kind = Literal["exact", "exact-bf16", "approximate"]

GIB = float(1 << 30)

USABLE = 0.8
"""Share of a node's or a GPU's memory that vectors may fill; the rest is for texts, queries and the system."""

_SCANNED_BYTES = {"exact": 4, "exact-bf16": 2, "approximate": 1}
"""Per value, read by a search again and again: what has to lie in memory. The float32 rows behind the other two may lie on a local disk."""


class Corpus(Record):
    """What is searched."""

    rows: int
    dim: int
    visible: float = 0.5
    """Mean share of the rows that a cutoff admits."""

    def scanned_bytes(self, kind: Kind) -> float:
        """What has to lie in memory: rows · dim · bytes per value."""
        return float(self.rows * self.dim * _SCANNED_BYTES[kind])

    def disk_bytes(self, kind: Kind) -> float:
        """All vectors on disk: float32, and what the kind adds."""
        return self.scanned_bytes("exact") + (0 if kind == "exact" else self.scanned_bytes(kind))

    def operations(self) -> float:
        """Of one query: a multiplication and an addition for each visible value."""
        return 2 * self.dim * self.rows * self.visible


class Speed(Record):
    """What one core achieves in a scan of one kind."""

    read_per_s: float
    """Float32 bytes' worth of rows per second with one query; a half-precision scan reads half of them."""
    operations_per_s: float
    """With many queries."""


class Node(Record):
    """A machine of a cluster."""

    cores: int
    memory_gib: float

    def count(self, corpus: Corpus, kind: Kind) -> int:
        """Nodes whose memory holds what a search reads."""
        return max(1, math.ceil(corpus.scanned_bytes(kind) / (USABLE * self.memory_gib * GIB)))

    def batch_seconds(self, corpus: Corpus, kind: Kind, speed: Speed, queries: int, nodes: int | None = None) -> float:
        """One batch, every node searching its share of the rows: the larger of reading them once and multiplying."""
        cores = self.cores * (nodes or self.count(corpus, kind))
        reading = 4 * corpus.rows * corpus.dim / (cores * speed.read_per_s)
        multiplying = queries * corpus.operations() / (cores * speed.operations_per_s)
        return max(reading, multiplying)


class Gpu(Record):
    """A GPU, by its data sheet; `share` by `gpu_check`, which a machine with one has to run."""

    memory_gib: float
    read_per_s: float
    operations_per_s: float
    """Of half-precision products."""
    share: float
    """Of its bandwidth and of its arithmetic that a scan achieves."""

    def count(self, corpus: Corpus, kind: Kind) -> int:
        """GPUs whose memory holds what a search reads."""
        return max(1, math.ceil(corpus.scanned_bytes(kind) / (USABLE * self.memory_gib * GIB)))

    def batch_seconds(self, corpus: Corpus, kind: Kind, queries: int) -> float:
        """As `Node.batch_seconds`."""
        gpus = self.count(corpus, kind)
        reading = corpus.scanned_bytes(kind) / (gpus * self.share * self.read_per_s)
        multiplying = queries * corpus.operations() / (gpus * self.share * self.operations_per_s)
        return max(reading, multiplying)
