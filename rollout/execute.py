"""A whole run: its directory laid or resumed, pools and workers up, one sitting driven to its end, all of it down again.

The driver is the ledger's only writer and holds no forecast anywhere else: a record is in the ledger or its step is run
again.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

import ray

from cluster.clock import monotonic
from cluster.config import Settings
from cluster.endpoint.client import RemoteGate
from cluster.endpoint.gatekeeper import read_keys
from cluster.endpoint.service import EndpointService
from cluster.engine_shape import pool_bundles
from cluster.failures import FailureKind, InfrastructureError
from cluster.pool import EngineClient, EnginePool
from cluster.pool_view import PoolLink
from cluster.session import require, start_session
from retrieval.placing import retrieval_bundles
from retrieval.pool import start_retrieval_pool
from retrieval.view import Searcher
from rollout.coordinator import Coordinator
from rollout.crew import Crew
from rollout.endpoint_model import proving_calls
from rollout.ledger import Ledger
from rollout.limits import Limits
from rollout.metrics import RunMetrics, metrics_address
from rollout.mirror import mirrored, take_up
from rollout.plan import Plan, uses_tools
from rollout.progress import Progress, Report, RunSummary
from rollout.resumption import Recorded, earlier_tally
from rollout.run import RunDirectory
from rollout.sitting import Sitting
from rollout.status import StatusWriter
from rollout.wants import Halt
from rollout.worker import Questions, RolloutWorker
from rollout.write_off import WriteOffs


def execute(plan: Plan, resume: bool, report: Report, retry: Collection[FailureKind] = ()) -> RunSummary:
    """Run or resume a plan in its run directory; failures of the kinds `retry` in it are taken back and run again.

    A run to be resumed whose directory is gone is restored from its mirror. Raises SettingsError if the directory or the
    mirror holds another run, or the directory the same one and `resume` is not set, or the cluster is too small, or an
    endpoint's key is missing: then nothing was laid. Raises InfrastructureError when infrastructure is lost for good.
    """
    run = RunDirectory(plan.settings.run.directory)
    mirror = plan.settings.run.mirror
    resumed: _Run | None = None
    with contextlib.closing(run.lock()), contextlib.ExitStack() as stack:
        if not run.exists and mirror is not None:
            take_up(run, mirror, plan.manifest, resume)
        if not run.exists or not resume:
            run.require_new()
        else:
            run.check_resumable(plan.manifest)
            ledger = stack.enter_context(run.ledger())
            status = stack.enter_context(_status(run, plan.settings))
            if not ledger.kinds().keys() & set(retry):
                resumed = _Run(plan, ledger, report, status, 0)
                if (halt := resumed.over) is not None:
                    return resumed.summary(halt)
        if plan.settings.model.kind == "endpoint":
            # Here only to be said before anything is laid or started.
            read_keys(plan.settings.endpoint.key_env, os.environ)
        session = stack.enter_context(start_session(plan.settings.ray))
        require(session, _bundles(plan.settings), "the run")
        if not run.exists:
            run.create(plan.settings, plan.manifest, plan.events, plan.keys, plan.floor(), plan.unused_rows)
            ledger = stack.enter_context(run.ledger())
            status = stack.enter_context(_status(run, plan.settings))
        status.measure(RunMetrics(plan.manifest.fingerprint).publish, metrics_address())
        reopened = ledger.retry(retry, f"--retry {' '.join(sorted(retry))}").total if retry else 0
        return asyncio.run((resumed or _Run(plan, ledger, report, status, reopened)).go())


class _Run:
    def __init__(self, plan: Plan, ledger: Ledger, report: Report, status: StatusWriter, reopened: int) -> None:
        self._plan, self._ledger, self._report, self._status, self._reopened = plan, ledger, report, status, reopened
        self._settings: Settings = plan.settings
        options = {e.id: e.options for e in plan.events}
        write_off = WriteOffs(options, plan.settings.rollout.prompt, plan.weights)
        self._coordinator = Coordinator(
            plan.keys, Recorded(ledger), Limits.of(plan.settings), write_off, earlier_tally(ledger)
        )
        self._sitting: Sitting | None = None
        self._began = monotonic()

    @property
    def over(self) -> Halt | None:
        """Why nothing needs to be started: all is recorded, or a budget is spent."""
        return self._coordinator.over

    async def go(self) -> RunSummary:
        settings = self._settings.rollout
        with contextlib.ExitStack() as stack:
            stack.enter_context(_leaving_at_once())
            searcher, engines, link = self._pools(stack)
            questions = ray.put(Questions.of(self._plan.events, self._settings))
            crew = Crew(
                lambda: self._worker(searcher, engines, questions),
                settings.workers,
                self._settings.ray.placement_timeout_s,
            )
            stack.callback(crew.dismiss_all)
            self._say("starting workers")
            self._began = monotonic()
            self._sitting = Sitting(
                self._coordinator, crew, settings.concurrency, self._ledger, link, settings.grace_s, self._say
            )
            halt = await self._sitting.run()
            self._status.end(halt.reason)
        if halt.failure is not None:
            raise InfrastructureError(
                halt.failure.reason,
                f"{halt.failure.detail}\n{self._coordinator.done} of {self._coordinator.total} forecasts are recorded and the "
                f"others are left open; mend the cause and go on with --resume",
            )
        return self.summary(halt)

    def summary(self, halt: Halt) -> RunSummary:
        state, tally = self._coordinator, self._coordinator.tally
        return RunSummary(
            scheduled=state.total,
            recorded=state.done,
            recorded_now=state.recorded_now,
            failures=dict(tally.failures),
            retried=state.retried,
            reopened=self._reopened,
            ended=halt.reason,
            signal=self._sitting.signal if self._sitting else None,
            # Also those of earlier sittings: a resumed run must not look sound because its losses are old.
            lost=tally.kinds["infrastructure"],
            bugs=tally.kinds["bug"],
            tracebacks=self._sitting.bugs if self._sitting else (),
            seconds=monotonic() - self._began,
            output_tokens=tally.output_tokens,
            price=state.spent,
        )

    def _pools(
        self, stack: contextlib.ExitStack
    ) -> tuple[Searcher | None, EngineClient | RemoteGate | None, PoolLink | None]:
        searcher: Searcher | None = None
        link: PoolLink | None = None
        engines: EngineClient | RemoteGate | None = None
        if self._settings.model.kind == "endpoint":
            self._say("asking the endpoint")
            proofs = proving_calls(self._plan.keys, self._settings.sampling.max_tokens)
            service = EndpointService(self._settings.endpoint, self._settings.sampling, proofs)
            stack.callback(service.stop)
            engines, link = service.gate(), service
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
            engines = link = pool.client()
        return searcher, engines, link

    def _engine_seed(self) -> int:
        """Different in each sitting of a run: a resumed run must not draw again what it drew before it was stopped."""
        text = f"{self._settings.run.seed}/{self._ledger.last_change()}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def _worker(self, searcher: Searcher | None, engines: EngineClient | RemoteGate | None, questions: Any) -> Any:
        # `take`, `results` and `ready` are all that is ever called at once; steps are tasks of the worker's own.
        actor = ray.remote(RolloutWorker).options(num_cpus=self._settings.ray.worker_cpus, max_concurrency=100)
        return actor.remote(self._settings, engines, searcher, questions, self._plan.manifest.inputs["sandbox"])

    def _say(self, stage: str = "") -> None:
        state = self._coordinator
        closing = state.closing
        if closing is not None:
            stage = f"ending ({closing.reason}): {state.running} steps still run"
        elif state.paused:
            stage = f"paused: {state.paused}"
        progress = Progress(
            total=state.total,
            done=state.done,
            done_now=state.recorded_now,
            running=state.running,
            failures=dict(state.tally.failures),
            retried=state.retried,
            output_tokens=state.tally.output_tokens,
            price=state.spent,
            seconds=monotonic() - self._began,
            stage=stage or "running",
        )
        self._status.tell(progress, self._sitting.pool if self._sitting else None)
        self._report(progress)


@contextlib.contextmanager
def _status(run: RunDirectory, settings: Settings) -> Iterator[StatusWriter]:
    """The run's status and mirror, which end in that order: the mirror ships the last status too."""
    with contextlib.ExitStack() as after, mirrored(run, settings.run) as mirror, StatusWriter(run, mirror) as status:
        after.callback(status.settle)
        yield status


@contextlib.contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Until there are steps that could finish, a signal ends the process: the event loop is blocked while the pools start."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bundles(settings: Settings) -> list[dict[str, float]]:
    """What the run's actors ask of Ray, one entry for each that cannot be divided."""
    bundles = [{"CPU": settings.ray.worker_cpus}] * settings.rollout.workers
    if settings.model.kind == "vllm":
        bundles += pool_bundles(settings.engine)
    if uses_tools(settings):
        bundles += retrieval_bundles(settings.retrieval, settings.search)
    return bundles
