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
from collections import deque
from collections.abc import Iterable

from cluster.failures import Failure
from cluster.pool_view import PoolView
from rollout.agenda import Agenda, ChainState, Finished
from rollout.backoff import backoff_seconds
from rollout.closing import Closing
from rollout.lease import Lease, StepOutcome
from rollout.limits import Limits
from rollout.packed import PackedForecast
from rollout.record import ForecastKey
from rollout.run_time import RunTime
from rollout.seats import Seats
from rollout.suspects import SUSPECT_LOSSES, Suspects
from rollout.tally import Budgets, Tally
from rollout.uncommitted import Uncommitted
from rollout.wants import Abandon, Commit, Halt, Release, Start, Wake, Want
from rollout.work_order import WorkOrder
from rollout.write_off import WriteOff


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
        finished: Finished,
        limits: Limits,
        write_off: WriteOff,
        earlier: Tally | None = None,
    ) -> None:
        """`finished` are the forecasts that have a record, with the notebook each left.

        `earlier` sums up these records, so that budgets hold over all sittings.
        """
        self._limits, self._write_off = limits, write_off
        self.tally = earlier or Tally()
        self._budgets = Budgets(limits, self.tally)
        self._order = WorkOrder()
        self._chains = Agenda(keys, finished, self._order)
        self.total, self.done, self.recorded_now = self._chains.total, self._chains.finished, 0
        self.retried = 0
        """Attempts that infrastructure failed and that were queued again."""
        self._waiting: list[tuple[float, int]] = []
        """Heap of (time to try again, chain)."""
        self._suspects = Suspects()
        self._seats = Seats()
        self._running: dict[int, _Running] = {}
        """By lease, in the order in which they started: the first is the one whose deadline is next."""
        self._abandoned: set[int] = set()
        """Leases whose workers have not yet said what they cost."""
        self._numbers = 0
        self._episodes: deque[tuple[float, int]] = deque()
        """(deadline in run time, chain), in the order in which chains began."""
        self._uncommitted = Uncommitted()
        self._wanted: list[Want] = []
        self._limit: int | None = None
        self._run_time = RunTime()
        self.paused = ""
        """Why the pool wants no step started; empty if it does not hinder."""
        self._closing = Closing()
        self.halted: Halt | None = None
        self._check_budgets()

    # What is told.

    def joined(self, worker: int, seats: int) -> None:
        """A worker can take that many steps at once. Its number was never used before."""
        self._seats.join(worker, seats)

    def lost(self, worker: int, now: float, detail: str = "") -> None:
        """A worker is gone or given up: its leases return. Telling it twice changes nothing."""
        leases = self._seats.leave(worker)
        if leases is None:
            return
        failure = Failure(kind="infrastructure", reason="worker-lost", detail=detail)
        self._suspects.worker_died()
        for number in leases:
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
        self._suspects.survived(outcome.lease)
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
            if (record := self._uncommitted.acknowledged(key)) is None:
                continue
            number, packed = record
            self.done += 1
            self.recorded_now += 1
            self.tally.add(packed)
            self._advance(number, packed)

    def view(self, view: PoolView, now: float) -> None:
        """The pool as it is now. While it is paused no step is started and deadlines stand still."""
        self._limit = view.limit
        if view.paused:
            self._run_time.pause(now)
        else:
            self._run_time.go_on(now)
        self.paused = view.paused
        if view.lost:
            # Calls are told too, but where nothing runs and nothing may start there is no call that could hear of it.
            self.fatal(Failure(kind="infrastructure", reason="no-engine", detail=view.lost), now)

    def stop(self, now: float, grace_s: float) -> None:
        """Start nothing more, and abandon what still runs after `grace_s` seconds. A second call can only shorten it."""
        self._closing.close(Halt("stopped"), now + grace_s)

    def fatal(self, failure: Failure, now: float) -> None:
        """Infrastructure is gone for good: as `stop`, but a fault."""
        self._closing.close(Halt("fatal", failure), now + self._limits.grace_s)

    # What is wanted.

    def next(self, now: float) -> list[Want]:
        """Everything wanted since the last call; each want is said once. To be called after any news, and when woken."""
        if self.halted is not None:
            return []
        self._expire(now)
        if batch := self._uncommitted.batch():
            self._wanted.append(Commit(batch))
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
        return len(self._uncommitted)

    @property
    def over(self) -> Halt | None:
        """Why nothing is left to be done, such as a budget that earlier sittings spent; None while there is."""
        return self.halted or self._halt()

    @property
    def closing(self) -> Halt | None:
        """Why no step is started any more; None while the run goes on."""
        return self._closing.halt

    @property
    def spent(self) -> float:
        """US dollars, of records and of this sitting's failed attempts."""
        return self._budgets.spent

    def leases(self, worker: int) -> frozenset[int]:
        """Numbers of the leases that a worker holds."""
        return self._seats.held(worker)

    # Outcomes.

    def _fail(self, number: int, failure: Failure, now: float) -> None:
        """The attempt has failed: it is tried again, written off, or (fatal) left open."""
        running = self._end(number)
        chain = self._chains[running.chain]
        if failure.fatal:
            self.fatal(failure, now)
            return
        if failure.kind == "infrastructure" and self._closing.lost:
            return  # of the same loss, whatever it is called: it is left open, also at the last of its attempts
        if failure.kind != "infrastructure" or chain.attempts >= self._limits.attempts:
            self._give_up(running.chain, failure)
            return
        self.retried += 1
        chain.shunned = running.worker
        wait = backoff_seconds(self._limits.seed, running.lease.key, chain.attempts)
        heapq.heappush(self._waiting, (now + wait, running.chain))

    def _give_up(self, number: int, failure: Failure) -> None:
        """The chain's first open step ends with that failure."""
        chain = self._chains[number]
        packed = self._write_off(chain.key, failure, chain.carried, max(1, chain.attempts))
        chain.orphaned = True
        self._arrive(number, packed)

    def _owe(self, outcome: StepOutcome) -> None:
        self._budgets.owe(outcome.price if outcome.packed is None else outcome.packed.price)

    def _arrive(self, number: int, packed: PackedForecast) -> None:
        self._chains[number].committing = True
        self._uncommitted.add(number, self._budgets.take(packed))

    def _advance(self, number: int, packed: PackedForecast) -> None:
        """A step of the chain has its record."""
        chain = self._chains[number]
        chain.recorded()
        if not chain.left:
            if chain.orphaned:
                self._wanted.append(Release(packed.key.session))
            self._chains.close(number)
            return
        if chain.ended:
            return
        if packed.notebook is not None:
            chain.carried = packed.notebook
        chain.next_step()
        if chain.overdue:
            self._write_off_rest(number)
        else:
            self._queue(number, chain)

    def _queue(self, number: int, chain: ChainState) -> None:
        self._order.add(number, chain.key.mode, chain.left, begun=True)

    def _end(self, number: int) -> _Running:
        """The lease is no longer current and its seat is free."""
        running = self._running.pop(number)
        self._chains[running.chain].lease = None
        self._seats.give_back(running.worker, number)
        self._suspects.ended(number)
        return running

    # Deadlines.

    def _expire(self, now: float) -> None:
        if self._closing.stop_at is not None and now >= self._closing.stop_at:
            for running in list(self._running.values()):
                self._abandon(running)
        while self._episodes and self._run_time.past(self._episodes[0][0], now):
            self._end_episode(self._episodes.popleft()[1])
        while (oldest := self._oldest()) is not None and self._run_time.past(oldest.since + self._limits.step_s, now):
            self._abandon(oldest)
            detail = f"abandoned after {self._limits.step_s:g} s (rollout.deadlines.step_s)"
            self._give_up(oldest.chain, Failure(kind="infrastructure", reason="straggler", detail=detail))
        while self._waiting and self._waiting[0][0] <= now:
            number = heapq.heappop(self._waiting)[1]
            chain = self._chains.get(number)
            if chain is None or chain.ended:
                continue
            if chain.losses >= SUSPECT_LOSSES:
                self._suspects.add(number)
            else:
                self._queue(number, chain)

    def _oldest(self) -> _Running | None:
        return next(iter(self._running.values()), None)

    def _end_episode(self, number: int) -> None:
        chain = self._chains.get(number)
        if chain is None:
            return
        if self.closing is not None and chain.lease is None:
            return  # it waits because nothing is started any more: what it lacks is left open
        chain.overdue = True
        if chain.committing:
            return  # what it carries is settled by that commit
        if chain.lease is not None:
            self._abandon(self._running[chain.lease])
        self._write_off_rest(number)

    def _write_off_rest(self, number: int) -> None:
        chain = self._chains[number]
        chain.ended = chain.orphaned = True
        carried = chain.carried
        detail = f"its episode had run for {self._limits.episode_s:g} s (rollout.deadlines.episode_s)"
        failure = Failure(kind="infrastructure", reason="episode-deadline", detail=detail)
        for key in chain.open_keys:
            packed = self._write_off(key, failure, carried, max(1, chain.attempts))
            chain.attempts = 0
            carried = packed.notebook or carried
            self._arrive(number, packed)

    def _abandon(self, running: _Running) -> None:
        self._end(running.lease.number)
        self._abandoned.add(running.lease.number)
        self._wanted.append(Abandon(running.worker, running.lease))

    # Starting, ending.

    def _start(self, now: float) -> None:
        while self._may_start() and (number := self._pick()) is not None:
            chain = self._chains[number]
            key = chain.key
            worker = self._seats.choose(chain.shunned)
            at = self._run_time.at(now)
            if not chain.began and key.mode == "memory-on":
                self._episodes.append((at + self._limits.episode_s, number))
            chain.began = True
            chain.attempts += 1
            self._numbers += 1
            lease = Lease(
                number=self._numbers, key=key, attempt=chain.attempts, carried=chain.carried, last=chain.left == 1
            )
            chain.lease = lease.number
            if chain.losses >= SUSPECT_LOSSES:
                self._suspects.watch(lease.number)
            self._running[lease.number] = _Running(lease, number, worker, at)
            self._seats.take(worker, lease.number)
            self._wanted.append(Start(worker, lease))

    def _may_start(self) -> bool:
        if self.closing is not None or self.paused or self._uncommitted.full:
            return False
        if self._limit is not None and self.running >= self._limit:
            return False
        return self._seats.free > 0

    def _pick(self) -> int | None:
        if (suspect := self._suspects.pop(self._losses)) is not None:
            return suspect
        while (waiting := self._order.pop()) is not None:
            if self._losses(waiting) is not None:
                return waiting
        return None

    def _losses(self, number: int) -> int | None:
        """Workers that died under the chain's open step; None for a chain that has ended."""
        chain = self._chains.get(number)
        return None if chain is None or chain.ended else chain.losses

    def _check_budgets(self) -> None:
        for reason in self._budgets.exceeded():
            self._closing.close(Halt(reason), None)

    def _halt(self) -> Halt | None:
        if self.running or self.uncommitted:
            return None
        return Halt("complete") if self.done == self.total else self.closing

    def _wake_at(self, now: float) -> float | None:
        times = []
        if self._closing.stop_at is not None and self._running:
            times.append(self._closing.stop_at)
        if self.closing is None and self._waiting:
            times.append(self._waiting[0][0])
        if not self._run_time.stands:
            while self._episodes and self._episodes[0][1] not in self._chains:
                self._episodes.popleft()
            deadlines = [self._episodes[0][0]] if self._episodes else []
            if (oldest := self._oldest()) is not None:
                deadlines.append(oldest.since + self._limits.step_s)
            times += map(self._run_time.clock, deadlines)
        return max(now, min(times)) if times else None
