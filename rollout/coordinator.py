"""All forecasts of a run as one pure state machine: who runs what, which results count, when to stop.

It is told what happened (a worker joined or was lost, a lease's outcome, a commit's acknowledgement, the pool's view, a stop)
and says by `next` what it wants: start a step, abandon one, commit records, be woken, end. Time comes in as seconds of any
one clock; it holds no tasks, clients or files. Whatever is told late, twice, out of order or never:

- A forecast counts as done only when its commit was acknowledged, and is never wanted committed again after that.
- An outcome counts if its lease is current, and no lease is current that a lost worker holds.
- A chain's next step starts after the commit of the one before, with the last valid notebook.
- An attempt that infrastructure failed is repeated, on another worker where there is one, at most `attempts` times in all.
- After `Halt` nothing is leased, nothing waits for a commit, and what has no record is left open for a resumption.
"""

import dataclasses
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from cluster.config import Settings
from cluster.failures import Failure, FailureKind
from cluster.pool_view import PoolView
from cluster.record import Record
from rollout.backoff import backoff_seconds
from rollout.episode import chains
from rollout.lease import Lease, StepOutcome
from rollout.notebook import NotebookState
from rollout.packed import PackedForecast
from rollout.record import ForecastKey
from rollout.work_order import WorkOrder

COMMIT_AT_MOST = 500
"""Records in one commit: a bound on how long the ledger is busy and on what a killed driver runs again."""
UNCOMMITTED_AT_MOST = 2000
"""No step is started while this many results wait for the ledger: a slow disk must not fill the driver's memory."""
SUSPECT_LOSSES = 2
"""A step whose workers died this often may be what kills them. Suspects begin one at a time, so that one such step does not
use up the attempts of all that run beside it; but where a node died twice, hundreds of steps are suspects and none is guilty.
So each that its worker survived lets one more run at once, and the next death ends that. One under which a further worker
died runs as the only suspect."""

HaltReason = Literal["complete", "stopped", "fatal", "max-cost", "data-failures", "bugs"]


class Limits(Record):
    """The settings that the coordinator decides by."""

    attempts: int
    """Tries of a step that infrastructure failed."""
    step_s: float
    """A step that has run this long is abandoned and recorded as `straggler`."""
    episode_s: float
    """A chain whose first step of this sitting started this long ago is ended; what it lacks is recorded as
    `episode-deadline`."""
    grace_s: float
    """How long running steps may still finish after infrastructure was lost for good."""
    data_failures: int
    """More of them than this stop the run."""
    bugs: int
    """More of them than this stop the run."""
    max_cost: float | None
    """US dollars; None: no bound."""
    seed: int

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        """As they are set."""
        rollout = settings.rollout
        return cls(
            attempts=rollout.attempts,
            step_s=rollout.deadlines.step_s,
            episode_s=rollout.deadlines.episode_s,
            grace_s=rollout.grace_s,
            data_failures=rollout.data_failures,
            bugs=rollout.bugs,
            max_cost=settings.run.max_cost,
            seed=settings.run.seed,
        )


@dataclasses.dataclass(frozen=True)
class Start:
    """Give the lease to the worker. To be answered by `outcome` or by `lost`."""

    worker: int
    lease: Lease


@dataclasses.dataclass(frozen=True)
class Abandon:
    """End the lease's step at its worker: abort its request at the engine, kill its cell. Needs no answer; one is ignored."""

    worker: int
    lease: Lease


@dataclasses.dataclass(frozen=True)
class Commit:
    """Store these in one transaction. To be answered by `committed`; no other commit is wanted before."""

    batch: tuple[PackedForecast, ...]


@dataclasses.dataclass(frozen=True)
class Wake:
    """Call `next` at this time if nothing happens before. It holds until the next call of `next`."""

    at: float


@dataclasses.dataclass(frozen=True)
class Halt:
    """The sitting is over; nothing is wanted after it."""

    reason: HaltReason
    failure: Failure | None = None
    """For `fatal`: what was lost for good."""


Want = Start | Abandon | Commit | Wake | Halt


@dataclasses.dataclass
class Tally:
    """Sums over records of a run."""

    failures: Counter[str] = dataclasses.field(default_factory=Counter)
    """By reason."""
    kinds: Counter[FailureKind] = dataclasses.field(default_factory=Counter)
    price: float = 0.0
    """US dollars."""
    output_tokens: int = 0

    def add(self, packed: PackedForecast) -> None:
        """Count one record."""
        self.price += packed.price
        self.output_tokens += packed.output_tokens
        if packed.failure is not None:
            self.failures[packed.failure.reason] += 1
            self.kinds[packed.failure.kind] += 1


WriteOff = Callable[[ForecastKey, Failure, NotebookState | None, int], PackedForecast]
"""The record of a forecast that ends without a worker's: (key, failure, what it would have carried, attempts)."""


@dataclasses.dataclass(slots=True)
class _Chain:
    """The open steps of a chain; the first of them is the one that waits, runs or is being committed."""

    keys: deque[ForecastKey]
    carried: NotebookState | None
    restored: dict[ForecastKey, NotebookState | None]
    """Open steps right after one with a record from before this sitting → the notebook it left."""
    began: bool = False
    """Whether a step of it started in this sitting."""
    lease: int | None = None
    """Of its first open step, while it runs."""
    attempts: int = 0
    """Of its first open step."""
    losses: int = 0
    """Workers that died under its first open step."""
    shunned: int | None = None
    """The worker of the last failed attempt."""
    committing: bool = False
    """Whether its first open step has a result that the ledger has not acknowledged."""
    overdue: bool = False
    """Whether its deadline has passed."""
    ended: bool = False
    """Whether its remaining steps are written off."""


@dataclasses.dataclass(slots=True)
class _Running:
    lease: Lease
    chain: int
    worker: int
    since: float
    """In run time."""


class Coordinator:
    """The state of all forecasts of one sitting of a run."""

    def __init__(
        self,
        keys: Iterable[ForecastKey],
        finished: Mapping[ForecastKey, NotebookState | None],
        limits: Limits,
        write_off: WriteOff,
        earlier: Tally | None = None,
    ) -> None:
        """`finished` are the forecasts that have a record, with the notebook each left.

        `earlier` sums up these records, so that budgets hold over all sittings.
        """
        self._limits, self._write_off = limits, write_off
        self.tally = earlier or Tally()
        self.total = self.done = self.recorded_now = 0
        self.retried = 0
        """Attempts that infrastructure failed and that were queued again."""
        self._spent = self.tally.price
        self._owed = 0.0
        """US dollars that attempts without a record cost and that no record carries yet."""
        self._kinds = Counter(self.tally.kinds)
        self._chains: dict[int, _Chain] = {}
        self._order = WorkOrder()
        self._waiting: list[tuple[float, int]] = []
        """Heap of (time to try again, chain)."""
        self._suspects: deque[int] = deque()
        self._watched: set[int] = set()
        """The leases of the suspects that run."""
        self._watched_at_most = 1
        self._seats: dict[int, int] = {}
        """Free seats by worker."""
        self._turn = 0
        self._running: dict[int, _Running] = {}
        """By lease, in the order in which they started: the first is the one whose deadline is next."""
        self._held: dict[int, set[int]] = {}
        """Leases by worker."""
        self._abandoned: set[int] = set()
        """Leases whose workers have not yet said what they cost."""
        self._numbers = 0
        self._episodes: deque[tuple[float, int]] = deque()
        """(deadline in run time, chain), in the order in which chains began."""
        self._arrived: deque[tuple[int, PackedForecast]] = deque()
        self._committing: dict[ForecastKey, tuple[int, PackedForecast]] = {}
        self._wanted: list[Want] = []
        self._limit: int | None = None
        self._paused_since: float | None = None
        self._paused_before = 0.0
        self.paused = ""
        """Why the pool wants no step started; empty if it does not hinder."""
        self._closed: Halt | None = None
        self._stop_at: float | None = None
        self.halted: Halt | None = None
        for number, chain in enumerate(chains(keys)):
            self._lay(number, chain.keys, finished)
        self._check_budgets()

    def _lay(
        self, number: int, keys: tuple[ForecastKey, ...], finished: Mapping[ForecastKey, NotebookState | None]
    ) -> None:
        self.total += len(keys)
        open_keys = deque(k for k in keys if k not in finished)
        self.done += len(keys) - len(open_keys)
        if not open_keys:
            return
        pairs = itertools.pairwise(keys)
        restored = {k: finished[before] for before, k in pairs if before in finished and k not in finished}
        chain = _Chain(keys=open_keys, carried=None, restored=restored)
        self._restore(chain)
        self._chains[number] = chain
        self._order.add(number, open_keys[0].mode, len(open_keys), begun=len(open_keys) < len(keys))

    # What is told.

    def joined(self, worker: int, seats: int) -> None:
        """A worker can take that many steps at once. Its number was never used before."""
        self._seats[worker] = seats
        self._held[worker] = set()

    def lost(self, worker: int, now: float, detail: str = "") -> None:
        """A worker is gone or given up: its leases return. Telling it twice changes nothing."""
        if self._seats.pop(worker, None) is None:
            return
        failure = Failure(kind="infrastructure", reason="worker-lost", detail=detail)
        self._watched_at_most = 1
        for number in sorted(self._held.pop(worker)):
            self._chains[self._running[number].chain].losses += 1
            self._fail(number, failure, now)

    def outcome(self, outcome: StepOutcome, now: float) -> bool:
        """A lease has ended. False if it is not current: then nothing counts of it but the cost of one that was abandoned."""
        running = self._running.get(outcome.lease)
        if running is None:
            if outcome.lease in self._abandoned:
                self._abandoned.discard(outcome.lease)
                self._owe(outcome)
                self._check_budgets()
            return False
        lease, packed, failure = running.lease, outcome.packed, outcome.failure
        if outcome.lease in self._watched:
            self._watched_at_most += 1
        if packed is None or packed.key != lease.key:
            self._owe(outcome)
        if packed is not None and packed.key != lease.key:
            failure = Failure(kind="bug", reason="wrong-key", detail=f"the record of {lease.key} says {packed.key}")
            packed = None
        if packed is None and failure is None:
            failure = Failure(kind="bug", reason="no-outcome", detail=f"the worker of {lease.key} said nothing")
        if packed is not None:
            self._end(outcome.lease)
            self._order.took(lease.key.mode, outcome.seconds)
            self._arrive(running.chain, packed)
        elif failure is not None:
            self._fail(outcome.lease, failure, now)
        self._check_budgets()
        return True

    def committed(self, keys: Iterable[ForecastKey]) -> None:
        """The ledger holds these for good, whether by this commit or an earlier one."""
        for key in keys:
            entry = self._committing.pop(key, None)
            if entry is None:
                continue
            number, packed = entry
            self.done += 1
            self.recorded_now += 1
            self.tally.add(packed)
            self._advance(number, packed)

    def view(self, view: PoolView, now: float) -> None:
        """The pool as it is now. While it is paused no step is started and deadlines stand still."""
        self._limit = view.limit
        if view.paused and self._paused_since is None:
            self._paused_since = now
        elif not view.paused and self._paused_since is not None:
            self._paused_before += now - self._paused_since
            self._paused_since = None
        self.paused = view.paused
        if view.lost:
            # Calls are told too, but where nothing runs and nothing may start there is no call that could hear of it.
            self.fatal(Failure(kind="infrastructure", reason="no-engine", detail=view.lost), now)

    def stop(self, now: float, grace_s: float) -> None:
        """Start nothing more, and abandon what still runs after `grace_s` seconds. A second call can only shorten it."""
        self._close(Halt("stopped"), now + grace_s)

    def fatal(self, failure: Failure, now: float) -> None:
        """Infrastructure is gone for good: as `stop`, but a fault."""
        self._close(Halt("fatal", failure), now + self._limits.grace_s)

    # What is wanted.

    def next(self, now: float) -> list[Want]:
        """Everything wanted since the last call; each want is said once. To be called after any news, and when woken."""
        if self.halted is not None:
            return []
        self._expire(now)
        self._commit()
        self._start(now)
        if (halt := self._halt()) is not None:
            self.halted = halt
            self._wanted.append(halt)
        elif (at := self._wake_at(now)) is not None:
            self._wanted.append(Wake(at))
        wanted, self._wanted = self._wanted, []
        return wanted

    @property
    def running(self) -> int:
        """Steps that are leased."""
        return len(self._running)

    @property
    def uncommitted(self) -> int:
        """Results that the ledger has not acknowledged."""
        return len(self._arrived) + len(self._committing)

    @property
    def waiting(self) -> int:
        """Steps that wait before they are tried again."""
        return len(self._waiting)

    @property
    def over(self) -> Halt | None:
        """Why nothing is left to be done, such as a budget that earlier sittings spent; None while there is."""
        return self.halted or self._halt()

    @property
    def closing(self) -> Halt | None:
        """Why no step is started any more; None while the run goes on."""
        return self._closed

    @property
    def spent(self) -> float:
        """US dollars, of records and of this sitting's failed attempts."""
        return self._spent

    @property
    def seats(self) -> int:
        """Steps that the workers can take at once, those that run included."""
        return sum(self._seats.values()) + len(self._running)

    def leases(self, worker: int) -> frozenset[int]:
        """Numbers of the leases that a worker holds."""
        return frozenset(self._held.get(worker, ()))

    # Outcomes.

    def _fail(self, number: int, failure: Failure, now: float) -> None:
        """The attempt has failed: it is tried again, written off, or (fatal) left open."""
        running = self._end(number)
        chain = self._chains[running.chain]
        if failure.fatal:
            self.fatal(failure, now)
            return
        if failure.kind == "infrastructure" and self._closed is not None and self._closed.reason == "fatal":
            return  # of the same loss, whatever it is called: it is left open, also at the last of its attempts
        if failure.kind != "infrastructure" or chain.attempts >= self._limits.attempts:
            self._give_up(running.chain, failure)
            return
        self.retried += 1
        chain.shunned = running.worker
        key = running.lease.key
        wait = backoff_seconds(self._limits.seed, key, chain.attempts)
        heapq.heappush(self._waiting, (now + wait, running.chain))

    def _give_up(self, number: int, failure: Failure) -> None:
        """The chain's first open step ends with that failure."""
        chain = self._chains[number]
        packed = self._write_off(chain.keys[0], failure, chain.carried, max(1, chain.attempts))
        self._arrive(number, packed)

    def _owe(self, outcome: StepOutcome) -> None:
        """What it cost counts at once, and is in the ledger with the next record."""
        price = outcome.price if outcome.packed is None else outcome.packed.price
        self._spent += price
        self._owed += price

    def _arrive(self, number: int, packed: PackedForecast) -> None:
        self._chains[number].committing = True
        self._spent += packed.price
        if self._owed:
            packed, self._owed = packed.model_copy(update={"price": packed.price + self._owed}), 0.0
        self._arrived.append((number, packed))
        if packed.failure is not None:
            self._kinds[packed.failure.kind] += 1

    def _advance(self, number: int, packed: PackedForecast) -> None:
        """A step of the chain has its record."""
        chain = self._chains[number]
        chain.keys.popleft()
        if not chain.keys:
            del self._chains[number]
            return
        if chain.ended:
            return
        if packed.notebook is not None:
            chain.carried = packed.notebook
        chain.committing = False
        chain.attempts = chain.losses = 0
        chain.shunned = None
        self._restore(chain)
        if chain.overdue:
            self._write_off_rest(number)
        else:
            self._order.add(number, chain.keys[0].mode, len(chain.keys), begun=True)

    def _restore(self, chain: _Chain) -> None:
        """Where an earlier sitting has the record before the first open step, that record's notebook is carried."""
        chain.carried = chain.restored.pop(chain.keys[0], chain.carried)

    def _end(self, number: int) -> _Running:
        """The lease is no longer current and its seat is free."""
        running = self._running.pop(number)
        self._chains[running.chain].lease = None
        if running.worker in self._seats:
            self._seats[running.worker] += 1
            self._held[running.worker].discard(number)
        self._watched.discard(number)
        return running

    # Deadlines.

    def _run_time(self, now: float) -> float:
        """Seconds without those in which the pool was paused."""
        return (now if self._paused_since is None else self._paused_since) - self._paused_before

    def _expire(self, now: float) -> None:
        if self._stop_at is not None and now >= self._stop_at:
            for running in list(self._running.values()):
                self._abandon(running)
        while self._episodes and self._past(self._episodes[0][0], now):
            self._end_episode(self._episodes.popleft()[1])
        while (oldest := self._oldest()) is not None and self._past(oldest.since + self._limits.step_s, now):
            self._abandon(oldest)
            detail = f"abandoned after {self._limits.step_s:g} s (rollout.deadlines.step_s)"
            self._give_up(oldest.chain, Failure(kind="infrastructure", reason="straggler", detail=detail))
        while self._waiting and self._waiting[0][0] <= now:
            number = heapq.heappop(self._waiting)[1]
            chain = self._chains.get(number)
            if chain is None or chain.ended:
                continue
            if chain.losses >= SUSPECT_LOSSES:
                self._suspects.append(number)
            else:
                self._order.add(number, chain.keys[0].mode, len(chain.keys), begun=True)

    def _past(self, deadline: float, now: float) -> bool:
        """Whether a deadline in run time has passed: by the sum that `_wake_at` waits for, since a difference may be rounded
        to just before it, and the wake would be due for ever."""
        return self._paused_since is None and deadline + self._paused_before <= now

    def _oldest(self) -> _Running | None:
        return next(iter(self._running.values()), None)

    def _end_episode(self, number: int) -> None:
        chain = self._chains.get(number)
        if chain is None:
            return
        if self._closed is not None and chain.lease is None:
            return  # it waits because nothing is started any more: what it lacks is left open
        chain.overdue = True
        if chain.committing:
            return  # what it carries is settled by that commit
        if chain.lease is not None:
            self._abandon(self._running[chain.lease])
        self._write_off_rest(number)

    def _write_off_rest(self, number: int) -> None:
        chain = self._chains[number]
        chain.ended = True
        carried = chain.carried
        detail = f"its episode had run for {self._limits.episode_s:g} s (rollout.deadlines.episode_s)"
        failure = Failure(kind="infrastructure", reason="episode-deadline", detail=detail)
        for key in chain.keys:
            packed = self._write_off(key, failure, carried, max(1, chain.attempts))
            chain.attempts = 0
            carried = packed.notebook or carried
            self._arrive(number, packed)

    def _abandon(self, running: _Running) -> None:
        self._end(running.lease.number)
        self._abandoned.add(running.lease.number)
        self._wanted.append(Abandon(running.worker, running.lease))

    # Starting, committing, ending.

    def _start(self, now: float) -> None:
        while self._may_start() and (number := self._pick()) is not None:
            chain = self._chains[number]
            key = chain.keys[0]
            worker = self._choose(chain.shunned)
            at = self._run_time(now)
            if not chain.began and key.mode == "memory-on":
                self._episodes.append((at + self._limits.episode_s, number))
            chain.began = True
            chain.attempts += 1
            self._numbers += 1
            lease = Lease(
                number=self._numbers,
                key=key,
                attempt=chain.attempts,
                carried=chain.carried,
                last=len(chain.keys) == 1,
            )
            chain.lease = lease.number
            if chain.losses >= SUSPECT_LOSSES:
                self._watched.add(lease.number)
            self._running[lease.number] = _Running(lease, number, worker, at)
            self._held[worker].add(lease.number)
            self._seats[worker] -= 1
            self._wanted.append(Start(worker, lease))

    def _may_start(self) -> bool:
        if self._closed is not None or self.paused or self.uncommitted >= UNCOMMITTED_AT_MOST:
            return False
        if self._limit is not None and self.running >= self._limit:
            return False
        return any(self._seats.values())

    def _pick(self) -> int | None:
        while self._suspects and self._may_watch(self._suspects[0]):
            if self._alive(number := self._suspects.popleft()):
                return number
        while (waiting := self._order.pop()) is not None:
            if self._alive(waiting):
                return waiting
        return None

    def _may_watch(self, number: int) -> bool:
        """Whether that suspect may run beside those that do."""
        alone = self._alive(number) and self._chains[number].losses > SUSPECT_LOSSES
        return len(self._watched) < (1 if alone else self._watched_at_most)

    def _alive(self, number: int) -> bool:
        chain = self._chains.get(number)
        return chain is not None and not chain.ended

    def _choose(self, shunned: int | None) -> int:
        """A worker with a free seat: not the one that failed the step if there is another, then the emptiest; ties rotate."""
        free = {w: seats for w, seats in self._seats.items() if seats > 0}
        self._turn += 1
        return max(free, key=lambda w: (w != shunned, free[w], (w + self._turn) % (len(self._seats) + 1)))

    def _commit(self) -> None:
        if self._committing or not self._arrived:
            return
        batch = [self._arrived.popleft() for _ in range(min(COMMIT_AT_MOST, len(self._arrived)))]
        self._committing = {packed.key: (number, packed) for number, packed in batch}
        self._wanted.append(Commit(tuple(packed for _, packed in batch)))

    def _check_budgets(self) -> None:
        limits = self._limits
        if limits.max_cost is not None and self._spent >= limits.max_cost:
            self._close(Halt("max-cost"), None)
        if self._kinds["data"] > limits.data_failures:
            self._close(Halt("data-failures"), None)
        if self._kinds["bug"] > limits.bugs:
            self._close(Halt("bugs"), None)

    def _close(self, halt: Halt, stop_at: float | None) -> None:
        """Of several reasons the first is given, but one that ends running steps goes before one that lets them finish."""
        if self._closed is None or (self._stop_at is None and stop_at is not None):
            self._closed = halt
        if stop_at is not None:
            self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)

    def _halt(self) -> Halt | None:
        if self.running or self.uncommitted:
            return None
        return Halt("complete") if self.done == self.total else self._closed

    def _wake_at(self, now: float) -> float | None:
        times = []
        if self._stop_at is not None and self._running:
            times.append(self._stop_at)
        if self._closed is None and self._waiting:
            times.append(self._waiting[0][0])
        if self._paused_since is None:
            while self._episodes and self._episodes[0][1] not in self._chains:
                self._episodes.popleft()
            deadlines = [self._episodes[0][0]] if self._episodes else []
            if (oldest := self._oldest()) is not None:
                deadlines.append(oldest.since + self._limits.step_s)
            times += [at + self._paused_before for at in deadlines]
        return max(now, min(times)) if times else None
