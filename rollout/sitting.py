"""One sitting of a run: drives the coordinator with asyncio on Ray, until it halts.

It decides nothing. It carries the coordinator's wants to workers and ledger and tells it what they answered, what time it is, how the
pool does and that a signal came. The ledger's disk is waited for in a thread of its own.
"""

import asyncio
import contextlib
import logging
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.clock import monotonic
from cluster.failures import Failure, InfrastructureError, failure_of
from cluster.log_limit import LogLimit
from cluster.pool_view import PoolLink, PoolView
from rollout.coordinator import Coordinator
from rollout.crew import Crew, WorkerGone
from rollout.ledger import Ledger
from rollout.packed import PackedForecast
from rollout.progress import Bug
from rollout.wants import Abandon, Commit, Halt, Release, Start, Wake

logger = logging.getLogger(__name__)

VIEW_SECONDS = 1.0
"""How often the pool is asked how it does."""
SILENT_SECONDS = 600.0
"""A pool that says nothing of itself for this long is taken for lost."""
SAY_SECONDS = 0.5
"""How often progress is said at the most."""
LINE_CHARACTERS = 400
"""Of a failure's detail in the log."""
BUGS_KEPT = 20
"""Different tracebacks kept for the end; all of them are in the ledger."""


class Sitting:
    """Coordinator, workers and ledger wired together."""

    def __init__(
        self,
        coordinator: Coordinator,
        crew: Crew,
        seats: int,
        ledger: Ledger,
        pool: PoolLink | None,
        grace_s: float,
        say: Callable[[], None],
    ) -> None:
        """`seats` per worker; `pool` leads to the engines, if there are any; `say` is called now and then."""
        self._coordinator, self._crew, self._seats, self._ledger = coordinator, crew, seats, ledger
        self._link, self._grace_s, self._say = pool, grace_s, say
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._workers = 0
        """Those that take leases, and those being hired."""
        self._broken: BaseException | None = None
        self._bugs: Counter[tuple[str, str]] = Counter()
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._log = LogLimit(logger)
        self.signal: int | None = None
        """The first one that came."""
        self.pool: PoolView | None = None
        """What the pool said last."""

    async def run(self) -> Halt:
        """Until the coordinator halts. Raises what the ledger raises when it cannot be written."""
        try:
            workers = await self._crew.assemble()
            # Only from here on there is something to finish: before, a signal ends the process.
            with self._signals():
                for number in workers:
                    self._seat(number)
                if self._link is not None:
                    self._spawn(self._watch(self._link))
                return await self._loop()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            # A commit that is under way is finished: what it holds is not run again.
            self._thread.shutdown()
            self._log.flush()

    @property
    def bugs(self) -> tuple[Bug, ...]:
        """What went wrong by our own fault in this sitting, the most frequent first."""
        return tuple(Bug(reason=r, traceback=t, count=n) for (r, t), n in self._bugs.most_common())

    async def _loop(self) -> Halt:
        said = float("-inf")
        while True:
            now = monotonic()
            wake = now + SAY_SECONDS
            starts: defaultdict[int, list[Any]] = defaultdict(list)
            ends: defaultdict[int, list[int]] = defaultdict(list)
            for want in self._coordinator.next(now):
                match want:
                    case Start(worker, lease):
                        starts[worker].append(lease)
                    case Abandon(worker, lease):
                        ends[worker].append(lease.number)
                    case Commit(batch):
                        self._spawn(self._commit(batch))
                    case Release(session):
                        if self._link is not None:
                            self._spawn(self._link.release(session))
                    case Wake(at):
                        wake = min(wake, at)
                    case Halt():
                        self._give(starts, ends)
                        self._say()
                        return want
            self._give(starts, ends)
            if now - said >= SAY_SECONDS:
                self._say()
                said = now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wake - now)):
                    await self._news.wait()
            self._news.clear()
            if self._broken is not None:
                raise self._broken

    def _give(self, starts: dict[int, list[Any]], ends: dict[int, list[int]]) -> None:
        for number in starts.keys() | ends.keys():
            self._crew.give(number, starts.get(number, []), ends.get(number, []))

    async def _commit(self, batch: tuple[PackedForecast, ...]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._ledger.commit, batch)
        for packed in batch:
            failure = packed.failure
            if failure is not None and failure.kind == "bug":
                bug = (failure.reason, failure.detail)
                if bug in self._bugs or len(self._bugs) < BUGS_KEPT:
                    self._bugs[bug] += 1
        self._coordinator.committed(p.key for p in batch)

    def _seat(self, number: int) -> None:
        self._workers += 1
        self._coordinator.joined(number, self._seats)
        self._spawn(self._listen(number))

    async def _listen(self, number: int) -> None:
        """Take a worker's outcomes until it is gone, then hire another in its place."""
        while True:
            try:
                outcomes = await self._crew.listen(number)
            except WorkerGone as gone:
                self._log.warning("worker-lost", "%s; its steps are repeated", gone)
                self._coordinator.lost(number, monotonic(), str(gone))
                break
            for outcome in outcomes:
                if self._coordinator.outcome(outcome, monotonic()) and outcome.failure is not None:
                    self._tell(outcome.failure)
            self._news.set()
        self._news.set()
        replacement = await self._crew.replace()
        self._workers -= 1
        while replacement is None:
            if self._workers == 0:
                detail = "every rollout worker has died and no more may be hired now; the log says of what"
                self._coordinator.fatal(Failure(kind="infrastructure", reason="no-worker", detail=detail), monotonic())
                self._news.set()
                return
            wait = self._crew.replacement_in()
            self._log.warning(
                "too-many-replacements",
                "rollout workers die too often: %d are left, and the next is hired in %.0f s",
                self._workers,
                wait,
            )
            await asyncio.sleep(wait)
            replacement = await self._crew.replace()
        self._seat(replacement)
        self._news.set()

    def _tell(self, failure: Failure) -> None:
        """One line for each kind of failure, however often it comes; a bug's traceback is printed at the end."""
        if failure.kind == "bug":
            self._log.error(failure.reason, "a forecast ends in a bug of pastcast: %s", failure.reason)
        else:
            self._log.warning(
                failure.reason, "an attempt failed: %s: %s", failure.reason, failure.detail[:LINE_CHARACTERS]
            )

    async def _watch(self, link: PoolLink) -> None:
        """Tell what the pool says of itself. While it does not answer, its last word stands, but no step is started."""
        heard = monotonic()
        while True:
            try:
                self.pool = await link.view(self._coordinator.running)
                heard = monotonic()
                self._coordinator.view(self.pool, heard)
            except InfrastructureError as error:
                now = monotonic()
                if error.fatal or now - heard >= SILENT_SECONDS:
                    gone = Failure(kind="infrastructure", reason="pool-lost", detail=str(error))
                    self._coordinator.fatal(failure_of(error) if error.fatal else gone, now)
                    return
                self._log.warning(error.reason, "the engine pool says nothing of itself: %s", error)
                if self.pool is not None:
                    # Attempts must not be spent on a pool that does not answer.
                    silent = self.pool.model_copy(update={"paused": f"the engine pool does not answer: {error.reason}"})
                    self._coordinator.view(silent, now)
            self._news.set()
            await asyncio.sleep(VIEW_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside the loop; what it raises ends the sitting."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = self._broken or error
        self._news.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM lets running steps finish for `grace_s` seconds, the second does not."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)

        def came(number: int) -> None:
            if self.signal is None:
                self.signal = number
                self._coordinator.stop(monotonic(), self._grace_s)
            else:
                self._coordinator.stop(monotonic(), 0.0)
                for each in numbers:
                    loop.remove_signal_handler(each)  # a third one ends the process
            self._news.set()

        for number in numbers:
            loop.add_signal_handler(number, came, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
