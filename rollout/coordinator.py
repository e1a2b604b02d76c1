"""Who runs what: leases, attempts and chains of one run, as a pure state machine.

Every scheduled forecast is pending, leased or finished. A lease that fails for infrastructure returns to the queue until
its attempts are spent; then it is finished as that failure. A result is accepted for a lease that is current and for no
other, so a result that arrives twice, or late from a worker given up for dead, changes nothing. It holds no tasks,
clients or clocks.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from cluster.record import Record
from rollout.episode import chains
from rollout.notebook import NotebookState
from rollout.record import ForecastKey


class Lease(Record):
    """Permission to run one step once."""

    number: int
    """Unique within the process."""
    key: ForecastKey
    attempt: int
    """From 1."""
    carried: NotebookState | None
    """memory-on: what the chain's earlier steps left."""
    last: bool
    """Whether no later step of the chain is to follow: its engine session may be released."""


class Coordinator:
    """The state of all forecasts of a run."""

    def __init__(
        self, keys: Iterable[ForecastKey], finished: Mapping[ForecastKey, NotebookState | None], attempts: int
    ) -> None:
        """`finished` are the forecasts that have a record, with the notebook each left."""
        self._attempts = attempts
        self._chain_of: dict[ForecastKey, tuple[ForecastKey, ...]] = {}
        self._notebook: dict[ForecastKey, NotebookState | None] = dict(finished)
        self._tried: dict[ForecastKey, int] = {}
        self._ready: deque[ForecastKey] = deque()
        self._leases: dict[int, Lease] = {}
        self._numbers = 0
        self.total = 0
        self.done = 0
        for chain in chains(keys):
            self.total += len(chain.keys)
            self.done += sum(k in finished for k in chain.keys)
            for key in chain.keys:
                self._chain_of[key] = chain.keys
            first = next((k for k in chain.keys if k not in finished), None)
            if first is not None:
                self._ready.append(first)

    @property
    def leased(self) -> int:
        """Steps that are running."""
        return len(self._leases)

    @property
    def complete(self) -> bool:
        """Whether every scheduled forecast has its record."""
        return self.done == self.total

    def lease(self) -> Lease | None:
        """The next step; None if nothing may start now."""
        if not self._ready:
            return None
        key = self._ready.popleft()
        self._tried[key] = self._tried.get(key, 0) + 1
        self._numbers += 1
        last = self._chain_of[key][-1] == key
        lease = Lease(number=self._numbers, key=key, attempt=self._tried[key], carried=self._carried(key), last=last)
        self._leases[lease.number] = lease
        return lease

    def finish(self, lease: Lease, notebook: NotebookState | None) -> bool:
        """The step has its record; the next of its chain may start. False (and nothing changes) if the lease is not current."""
        if not self._end(lease):
            return False
        self._notebook[lease.key] = notebook
        self.done += 1
        chain = self._chain_of[lease.key]
        following = next((k for k in chain if k not in self._notebook), None)
        if following is not None:
            # A chain that has begun goes before fresh work: its length is what a run waits for at its end.
            self._ready.appendleft(following)
        return True

    def fail(self, lease: Lease) -> bool | None:
        """Infrastructure failed the attempt. True: it is queued again; False: attempts are spent and the caller records it
        and calls `finish`; None: the lease is not current."""
        if lease.number not in self._leases:
            return None
        if self._tried[lease.key] >= self._attempts:
            return False
        self._end(lease)
        self._ready.append(lease.key)
        return True

    def _end(self, lease: Lease) -> bool:
        return self._leases.pop(lease.number, None) is not None

    def _carried(self, key: ForecastKey) -> NotebookState | None:
        chain = self._chain_of[key]
        earlier = [self._notebook.get(k) for k in chain[: chain.index(key)]]
        return next((state for state in reversed(earlier) if state is not None), None)
