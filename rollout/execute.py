"""A whole run: pools up, leases out, records in, until every scheduled forecast is in the ledger or the run is stopped.

The driver is the ledger's only writer and holds no forecast anywhere else: a record is in the ledger or its step is run
again.
"""

import asyncio
import contextlib
import hashlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import ray
from pydantic_core import PydanticSerializationError
from ray.exceptions import RayError, RayTaskError

from cluster.config import Settings
from cluster.endpoint.client import RemoteGate
from cluster.endpoint.service import EndpointService
from cluster.engine_shape import pool_bundles
from cluster.failures import FATAL_REASONS, Failure, InfrastructureError, PastcastError
from cluster.pool import EngineClient, EnginePool
from cluster.record import Record
from cluster.session import require, start_session
from retrieval.pool import start_retrieval_pool
from retrieval.view import Searcher
from rollout.coordinator import Coordinator, Lease
from rollout.endpoint_model import proving_calls
from rollout.ledger import Ledger
from rollout.mirror import mirrored, restore
from rollout.notebook import NotebookState
from rollout.packed import pack
from rollout.plan import Plan, uses_tools
from rollout.prompts import prompt_hash
from rollout.record import ForecastKey, ForecastRecord
from rollout.run import RunDirectory
from rollout.worker import RolloutWorker, StepOutcome

logger = logging.getLogger(__name__)

GRACE_SECONDS = 20.0
"""How long running steps may still finish after a stop was asked for."""
WORKER_RESTARTS = 20
"""A dead worker is replaced this often in one run."""
LONGEST_BACKOFF_SECONDS = 20.0


class Progress(Record):
    """The state of a run at one moment, for the terminal."""

    total: int
    done: int
    running: int
    failures: dict[str, int]
    retried: int
    """Attempts that infrastructure failed and that were queued again."""
    output_tokens: int
    seconds: float
    """Since the first lease of this process."""
    stage: str


class RunSummary(Record):
    """How a run ended."""

    scheduled: int
    recorded: int
    """Records in the ledger, of this process and earlier ones."""
    recorded_now: int
    failures: dict[str, int]
    retried: int
    stopped: bool
    """Whether it was asked to stop before all was done."""
    lost: int
    """Forecasts in the ledger as infrastructure failures, after every attempt failed."""
    bugs: int
    """Forecasts in the ledger that ended in a bug of ours."""
    seconds: float
    output_tokens: int


Report = Callable[[Progress], None]


def execute(plan: Plan, resume: bool, report: Report) -> RunSummary:
    """Run or resume a plan in its run directory.

    A run to be resumed whose directory is gone is restored from its mirror. Raises SettingsError if the directory or the
    mirror holds another run, or the directory the same one and `resume` is not set.
    """
    run = RunDirectory(plan.settings.run.directory)
    with contextlib.closing(run.lock()):
        if resume and not run.exists and plan.settings.run.mirror is not None:
            restore(run, plan.settings.run.mirror)
        if run.exists and resume:
            run.check_resumable(plan.manifest)
        else:
            run.create(plan.settings, plan.manifest, plan.events, plan.keys, plan.floor(), plan.unused_rows)
        with run.ledger() as ledger, mirrored(run, plan.settings.run):
            if len(ledger.finished()) == len(plan.keys):
                return _Run(plan, ledger, report).summary(stopped=False)
            with start_session(plan.settings.ray) as session:
                require(session, _bundles(plan.settings), "the run")
                return asyncio.run(_Run(plan, ledger, report).go())


class _Run:
    def __init__(self, plan: Plan, ledger: Ledger, report: Report) -> None:
        self._plan, self._ledger, self._report = plan, ledger, report
        finished: dict[ForecastKey, NotebookState | None] = {}
        kinds: Counter[str] = Counter()
        for done in ledger.progress():
            finished[done.key] = done.notebook
            if done.kind is not None:
                kinds[done.kind] += 1
        self._settings: Settings = plan.settings
        self._coordinator = Coordinator(plan.keys, finished, plan.settings.rollout.attempts)
        self._events = {e.id: e for e in plan.events}
        self._failures = Counter(ledger.failures())
        # Also those of earlier sittings: a resumed run must not look sound because its losses are old.
        self._lost, self._bugs = kinds["infrastructure"], kinds["bug"]
        self._retried = self._output_tokens = self._recorded_now = 0
        self._began = time.monotonic()
        self._stopping = asyncio.Event()
        self._fatal: Failure | None = None

    async def go(self) -> RunSummary:
        # The event loop would only note an interrupt, and it is blocked while the pools start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.ExitStack() as stack:
            searcher, engines = self._pools(stack)
            crew = Crew(lambda: self._worker(searcher, engines), self._settings.rollout.workers, WORKER_RESTARTS)
            stack.callback(crew.dismiss)
            self._say("starting workers")
            await crew.ready(self._settings.ray.placement_timeout_s)
            self._began = time.monotonic()
            # Only from here on there is something to finish: before, an interrupt ends the process.
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
                stack.callback(asyncio.get_running_loop().remove_signal_handler, number)
            await self._work(crew)
        if self._fatal is not None:
            raise InfrastructureError(
                self._fatal.reason,
                f"{self._fatal.detail}\n{self._coordinator.done} of {self._coordinator.total} forecasts are recorded and the "
                f"others are left open; mend the cause and go on with --resume",
            )
        return self.summary(stopped=self._stopping.is_set() and not self._coordinator.complete)

    def summary(self, stopped: bool) -> RunSummary:
        return RunSummary(
            scheduled=self._coordinator.total,
            recorded=self._coordinator.done,
            recorded_now=self._recorded_now,
            failures=dict(self._failures),
            retried=self._retried,
            stopped=stopped,
            lost=self._lost,
            bugs=self._bugs,
            seconds=time.monotonic() - self._began,
            output_tokens=self._output_tokens,
        )

    def _pools(self, stack: contextlib.ExitStack) -> tuple[Searcher | None, EngineClient | RemoteGate | None]:
        searcher: Searcher | None = None
        engines: EngineClient | RemoteGate | None = None
        if uses_tools(self._settings):
            self._say("starting the retrieval pool")
            retrieval = start_retrieval_pool(self._settings)
            stack.callback(retrieval.close)
            searcher = retrieval.client()
        if self._plan.model is not None:
            self._say("starting the engines")
            pool = EnginePool(
                self._plan.model,
                self._settings.engine,
                self._settings.sampling,
                self._engine_seed(),
                self._settings.ray.placement_timeout_s,
            )
            stack.callback(pool.stop)
            engines = pool.client()
        if self._settings.model.kind == "endpoint":
            self._say("asking the endpoint")
            proofs = proving_calls(self._plan.keys, self._settings.sampling.max_tokens)
            service = EndpointService(self._settings.endpoint, self._settings.sampling, proofs)
            stack.callback(service.stop)
            engines = service.gate()
        return searcher, engines

    def _engine_seed(self) -> int:
        """Different in each sitting of a run: a resumed run must not draw again what it drew before it was stopped."""
        text = f"{self._settings.run.seed}/{self._coordinator.done}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def _worker(self, searcher: Searcher | None, engines: EngineClient | RemoteGate | None) -> Any:
        actor = ray.remote(RolloutWorker).options(
            num_cpus=self._settings.ray.worker_cpus, max_concurrency=self._settings.rollout.concurrency + 1
        )
        return actor.remote(self._settings, engines, searcher, self._plan.manifest.inputs["sandbox"])

    async def _work(self, crew: "Crew") -> None:
        """Keep every worker at its concurrency until nothing is left, or a stop was asked for."""
        free = [
            seat for _ in range(self._settings.rollout.concurrency) for seat in range(self._settings.rollout.workers)
        ]
        running: dict[asyncio.Task[StepOutcome], int] = {}
        stop = asyncio.create_task(self._stopping.wait())
        deadline = None
        while not self._coordinator.complete:
            for seat, lease in self._admit(free):
                running[asyncio.create_task(self._attempt(crew, seat, lease))] = seat
            if not running:
                break
            if self._stopping.is_set() and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
                self._say(f"stopping: waiting up to {GRACE_SECONDS:g} s for {len(running)} running steps")
            waiting: list[asyncio.Task[Any]] = [*running] if deadline else [*running, stop]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for finished in [t for t in running if t in done]:
                free.append(running.pop(finished))
                self._take(finished.result())
            if not done and deadline:
                break
            self._say("running")
        for task in (*running, stop):
            task.cancel()
        await asyncio.gather(*running, stop, return_exceptions=True)

    def _admit(self, free: list[int]) -> Iterator[tuple[int, Lease]]:
        while free and not self._stopping.is_set() and (lease := self._coordinator.lease()) is not None:
            yield free.pop(), lease

    async def _attempt(self, crew: "Crew", seat: int, lease: Lease) -> StepOutcome:
        """One lease on one worker; a dead worker is an infrastructure failure of the attempt."""
        event = self._events[lease.key.event]
        beliefs = event.beliefs if self._settings.model.kind == "market" else None
        worker = crew.worker(seat)
        try:
            outcome: StepOutcome = await worker.run.remote(lease, event.prompt(), beliefs)
        except RayTaskError as error:
            # The worker's own code raised, although it promises not to: a bug of ours.
            outcome = StepOutcome(lease=lease, failure=Failure(kind="bug", reason="worker-raised", detail=str(error)))
        except RayError as error:
            reason = "worker-lost" if crew.replace(seat, worker) else "no-worker"
            failure = Failure(kind="infrastructure", reason=reason, detail=f"{type(error).__name__}: {error}")
            outcome = StepOutcome(lease=lease, failure=failure)
        failed = outcome.failure
        if failed is not None and failed.kind == "infrastructure" and failed.reason not in FATAL_REASONS:
            await asyncio.sleep(min(0.5 * 2**lease.attempt, LONGEST_BACKOFF_SECONDS))
        return outcome

    def _take(self, outcome: StepOutcome) -> None:
        lease, failure = outcome.lease, outcome.failure
        record = outcome.record
        if failure is not None and failure.reason in FATAL_REASONS:
            # Not the step's fault and not to be recorded as its end: the run stops and can be resumed.
            self._fatal = self._fatal or failure
            self._stopping.set()
            return
        if failure is not None and failure.kind == "infrastructure":
            again = self._coordinator.fail(lease)
            if again is not False:
                self._retried += bool(again)
                logger.warning("attempt %d of %s failed: %s", lease.attempt, lease.key, failure.reason)
                return
        if record is None:
            self._lost += failure is not None and failure.kind == "infrastructure"
            self._bugs += failure is not None and failure.kind == "bug"
            record = self._without_report(lease, failure)
        # The ledger first: a record that the coordinator counts is always on disk.
        try:
            self._ledger.commit([pack(record, outcome.trajectory)])
        except PydanticSerializationError as error:
            logger.error("a record cannot be stored, %s: %s", lease.key, error)
            self._bugs += 1
            record = self._without_report(lease, Failure(kind="bug", reason="not-storable", detail=repr(error)))
            self._ledger.commit([pack(record, None)])
        if self._coordinator.finish(lease, record.notebook):
            self._recorded_now += 1
            self._output_tokens += record.usage.output_tokens
            if record.failure is not None:
                self._failures[record.failure.reason] += 1

    def _without_report(self, lease: Lease, failure: Failure | None) -> ForecastRecord:
        return ForecastRecord(
            key=lease.key,
            options=self._events[lease.key.event].options,
            report=None,
            notebook=_not_updated(lease.carried, failure),
            failure=failure,
            attempts=lease.attempt,
            prompt=prompt_hash(lease.key.mode, self._settings.rollout.prompt),
            weights=self._plan.weights,
        )

    def _say(self, stage: str) -> None:
        self._report(
            Progress(
                total=self._coordinator.total,
                done=self._coordinator.done,
                running=self._coordinator.leased,
                failures=dict(self._failures),
                retried=self._retried,
                output_tokens=self._output_tokens,
                seconds=time.monotonic() - self._began,
                stage=stage,
            )
        )


def _bundles(settings: Settings) -> list[dict[str, float]]:
    """What the run's actors ask of Ray, one entry for each that cannot be divided."""
    bundles = [{"CPU": settings.ray.worker_cpus}] * settings.rollout.workers
    if settings.model.kind == "vllm":
        bundles += pool_bundles(settings.engine)
    if uses_tools(settings):
        # The encoder is one more actor beside the shards.
        bundles += [{"CPU": settings.retrieval.actor_cpus}] * (settings.retrieval.shard_actors + 1)
    return bundles


def _not_updated(carried: NotebookState | None, failure: Failure | None) -> NotebookState | None:
    """The chain's notebook after a step that wrote none."""
    if carried is None:
        return None
    why = failure.reason if failure else ""
    return NotebookState(notebook=carried.notebook, status="missing", why=why)


class Crew:
    """The rollout workers by seat. A dead one is replaced, so that its seat can be leased to again."""

    def __init__(self, hire: Callable[[], Any], size: int, replacements: int) -> None:
        """`hire` makes a worker actor; `replacements` bounds how often it is called after the first `size` times."""
        self._hire = hire
        self._workers = [hire() for _ in range(size)]
        self._replacements = replacements

    async def ready(self, timeout_s: float) -> None:
        """Answers once every worker can take leases. Raises InfrastructureError after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(w.ready.remote() for w in self._workers))
        except RayTaskError as error:
            if isinstance(error.cause, PastcastError):
                raise error.cause from None
            raise
        except RayError as error:
            raise InfrastructureError("worker-start", f"{type(error).__name__}: {error}") from None
        except TimeoutError:
            free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
            raise InfrastructureError(
                "worker-start",
                f"{len(self._workers)} rollout worker(s) did not start within {timeout_s:g} s; free in the cluster: {free}. "
                "Lower ray.worker_cpus, engine.cpus or retrieval.actor_cpus, or raise ray.placement_timeout_s",
            ) from None

    def worker(self, seat: int) -> Any:
        """Who sits there now."""
        return self._workers[seat]

    def replace(self, seat: int, dead: Any) -> bool:
        """Seat a new worker, once for each that died, however many of its steps report it. False: none is left to hire."""
        if self._workers[seat] is not dead:
            return True
        if self._replacements == 0:
            return False
        self._replacements -= 1
        logger.warning("rollout worker %d died and is replaced; its steps are repeated", seat)
        self._workers[seat] = self._hire()
        return True

    def dismiss(self) -> None:
        """End every worker."""
        for worker in self._workers:
            ray.kill(worker)
