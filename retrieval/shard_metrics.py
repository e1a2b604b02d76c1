"""What a shard actor did, counted once and told twice: as Ray metrics, and as figures to whoever asks."""

from ray.util.metrics import Counter, Gauge

from cluster.record import Record

_TAGS = ("index", "group", "replica")

_GAUGES = {
    "pastcast_shard_queue": "Queries that wait for a batch.",
    "pastcast_shard_batch": "Queries of the last batch.",
}
_COUNTERS = {
    "pastcast_shard_queries_total": "Queries that were searched.",
    "pastcast_shard_batches_total": "Batches in which they were searched.",
    "pastcast_shard_rows_total": "Rows that these queries ranged over.",
    "pastcast_shard_seconds_total": "Seconds of searching.",
    "pastcast_shard_fallbacks_total": "Queries that the index kind's fast path could not answer.",
}


class Work(Record):
    """A sum over batches; of one batch, before it is added."""

    queries: int = 0
    """A search by words asks twice, and counts as two."""
    batches: int = 0
    rows: int = 0
    """Rows that the queries ranged over."""
    seconds: float = 0.0
    """Of searching."""
    fallbacks: int = 0
    """Queries that the index kind's fast path could not answer."""

    @property
    def mean_batch(self) -> float:
        """Queries per batch; 0 before the first."""
        return self.queries / self.batches if self.batches else 0.0

    def __add__(self, other: "Work") -> "Work":
        mine, others = self.model_dump(), other.model_dump()
        return Work(**{name: mine[name] + others[name] for name in mine})

    def __sub__(self, other: "Work") -> "Work":
        mine, others = self.model_dump(), other.model_dump()
        return Work(**{name: mine[name] - others[name] for name in mine})


class ShardFigures(Record):
    """A shard actor since it was last started."""

    group: int
    replica: int
    node: str
    """Id in Ray."""
    process: int
    waiting: int
    """Queries that wait for a batch now."""
    longest_queue: int
    """Most queries that were in the queue at once, those of the running batch included."""
    work: Work


class ShardMetrics:
    """Publishes what one shard actor does."""

    def __init__(self, index: str, group: int, replica: int) -> None:
        """`index`: fingerprint."""
        tags = {"index": index[:12], "group": str(group), "replica": str(replica)}
        self._gauges = {n: Gauge(n, description=d, tag_keys=_TAGS) for n, d in _GAUGES.items()}
        self._counters = {n: Counter(n, description=d, tag_keys=_TAGS) for n, d in _COUNTERS.items()}
        for metric in (*self._gauges.values(), *self._counters.values()):
            metric.set_default_tags(tags)
        self.sum = Work()

    def searched(self, batch: Work, waiting: int) -> None:
        """One more batch, and how many queries wait behind it."""
        self.sum += batch
        for name, amount in batch.model_dump().items():
            if amount:  # Ray's counters refuse to count nothing
                self._counters[f"pastcast_shard_{name}_total"].inc(amount)
        self._gauges["pastcast_shard_batch"].set(batch.queries)
        self._gauges["pastcast_shard_queue"].set(waiting)
