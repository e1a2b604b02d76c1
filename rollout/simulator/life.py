"""One life of the driver: pools and workers up, a sitting driven to its end, all of it down again.

The sitting, the crew, the workers and the machines are the real ones; a life ends by itself, by a signal, or by being
killed at any moment.
"""

import asyncio
import random
import signal
import traceback
from collections.abc import Iterable, Sequence

from ray.exceptions import ActorDiedError

from cluster.call import EngineFacts
from cluster.failures import FailureKind, PastcastError
from cluster.pool import EngineClient
from cluster.pool_view import PoolView
from cluster.weights import Weights
from rollout.coordinator import Coordinator
from rollout.lease import StepOutcome
from rollout.ledger import Ledger
from rollout.limits import Limits
from rollout.record import ForecastKey
from rollout.resumption import Recorded, earlier_tally
from rollout.simulator.actors import Handle, Network
from rollout.simulator.clock import VirtualLoop
from rollout.simulator.cluster import Nodes
from rollout.simulator.faults import Faults
from rollout.simulator.mirror import SimulatedMirror
from rollout.simulator.pool import SimulatedPool
from rollout.simulator.scenario import Scenario, event_prompt
from rollout.simulator.script import OPTIONS, ScriptedSampler
from rollout.simulator.store import SimulatedDisk
from rollout.simulator.tools import SimulatedSearcher
from rollout.simulator.trace import Trace
from rollout.simulator.watch import Watch
from rollout.simulator.words import WordFormat
from rollout.simulator.workers import FaultyCrew, SimulatedWorker
from rollout.sitting import Sitting
from rollout.wants import Halt, Want
from rollout.worker import Questions
from rollout.write_off import WriteOffs

WEIGHTS = Weights(path="/models/simulated", base="right-weights")
RETRIED: tuple[frozenset[FailureKind], ...] = (
    frozenset(),
    frozenset({"infrastructure"}),
    frozenset({"model"}),
    frozenset({"infrastructure", "model", "data", "bug"}),
)
"""What a person may ask to be run again."""
SETTLING_SECONDS = 45.0
"""How long after the end of a sitting the news of it may take to arrive everywhere."""


class WatchedCoordinator(Coordinator):
    """The real one, with a witness of what it is told and what it wants."""

    watch: Watch

    def joined(self, worker: int, seats: int) -> None:
        """As the real one."""
        self.watch.joined(worker, seats)
        super().joined(worker, seats)

    def lost(self, worker: int, now: float, detail: str = "") -> None:
        """As the real one."""
        super().lost(worker, now, detail)
        self.watch.lost(worker)

    def outcome(self, outcome: StepOutcome, now: float) -> bool:
        """As the real one."""
        counted = super().outcome(outcome, now)
        self.watch.outcome(outcome, counted)
        return counted

    def committed(self, keys: Iterable[ForecastKey]) -> None:
        """As the real one."""
        known = tuple(keys)
        super().committed(known)
        self.watch.committed(known)

    def view(self, view: PoolView, now: float) -> None:
        """As the real one."""
        self.watch.view(view)
        super().view(view, now)

    def stop(self, now: float, grace_s: float) -> None:
        """As the real one."""
        self.watch.closing()
        super().stop(now, grace_s)

    def next(self, now: float) -> list[Want]:
        """As the real one."""
        wants = super().next(now)
        if self.closing is not None:
            self.watch.closing()
        self.watch.wants(wants, self.leases, self.running)
        return wants


class Life:
    """From the start of the driver to its end."""

    def __init__(
        self,
        number: int,
        scenario: Scenario,
        disk: SimulatedDisk,
        chat: WordFormat,
        faults: Faults,
        trace: Trace,
        loop: VirtualLoop,
        mirror: SimulatedMirror | None,
    ) -> None:
        self._scenario, self._disk, self._chat, self._faults, self._trace = scenario, disk, chat, faults, trace
        self._loop, self._number = loop, number
        self.network = Network(faults, trace, lambda what: loop.breaks(f"a bug: {what}"))
        self.mirror = mirror
        self.halt: Halt | None = None
        self.error: BaseException | None = None
        """What ended it other than its own end."""
        settings = scenario.settings
        self._watch = Watch(settings, scenario.keys, disk.acknowledged, WEIGHTS.fingerprint, trace, loop.breaks)

    async def run(self) -> None:
        """As the driver's process."""
        driver = self.network.begin("driver", "head")
        await self.network.run_in(driver, self._drive())

    async def _drive(self) -> None:
        scenario, settings, faults, watch = self._scenario, self._scenario.settings, self._faults, self._watch
        ledger = self._disk.open()
        if scenario.retries and self._number and not faults.calm:
            kinds = RETRIED[faults.stream("retries").randrange(len(RETRIED))]
            self._trace.note(f"retry of {' '.join(sorted(kinds))} opens {self._disk.retry(ledger, kinds)}")
        coordinator = self._coordinator(ledger)
        shipping = asyncio.ensure_future(self.mirror.ship(ledger)) if self.mirror is not None else None
        nodes = Nodes(scenario.nodes, scenario.spare_nodes, self.network, faults)
        living = asyncio.ensure_future(nodes.live())
        sampler = ScriptedSampler(self._chat, scenario.temper)
        pool_process = self.network.begin("pool", "head")
        pool = SimulatedPool(WEIGHTS, settings, self._number, sampler, self.network, nodes, faults, watch)
        handle = Handle(self.network, pool_process, pool)
        searcher = SimulatedSearcher(faults, settings.retrieval.request_timeout_s)
        questions = Questions(prompts={k.event: event_prompt(k.event) for k in scenario.keys}, beliefs={})
        hired = 0

        def hire() -> Handle:
            nonlocal hired
            hired += 1
            process = self.network.begin(f"worker-{hired}", nodes.for_worker())
            client = EngineClient(handle, facts, settings.engine.request_timeout_s)
            worker = SimulatedWorker(
                settings, client, searcher, questions, self._chat, scenario.token_price, watch, faults
            )
            return Handle(self.network, process, worker)

        def end(worker: Handle) -> None:
            self.network.kill(worker.process, "it is given up")

        try:
            facts: EngineFacts = await handle.start.remote()
            crew = FaultyCrew(hire, settings.rollout.workers, settings.ray.placement_timeout_s, end, faults)
            sitting = Sitting(
                coordinator,
                crew,
                settings.rollout.concurrency,
                ledger,
                EngineClient(handle, facts, settings.engine.request_timeout_s),
                settings.rollout.grace_s,
                lambda: None,
            )
            self._interrupt(faults.stream("signals"))
            try:
                self.halt = await sitting.run()
            finally:
                crew.dismiss_all()
            if pool_process.alive:
                await self._settle(pool)
                await handle.stop.remote()
        except (PastcastError, ActorDiedError) as error:
            # The pool's actor may die while it starts.
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever the driver raises that is not named is a bug, and named here
            self._loop.breaks(f"a bug: the driver raised {''.join(traceback.format_exception(error))}")
        finally:
            living.cancel()
            if shipping is not None:
                shipping.cancel()
        self._trace.note(f"life ends {self.halt.reason if self.halt else type(self.error).__name__}")

    def _coordinator(self, ledger: Ledger) -> WatchedCoordinator:
        settings = self._scenario.settings
        earlier = earlier_tally(ledger)
        options: dict[str, Sequence[str]] = {k.event: OPTIONS for k in self._scenario.keys}
        write_off = WriteOffs(options, settings.rollout.prompt, WEIGHTS.fingerprint)
        WatchedCoordinator.watch = self._watch
        self._watch.resumed(earlier.price)
        return WatchedCoordinator(self._scenario.keys, Recorded(ledger), Limits.of(settings), write_off, earlier)

    def _interrupt(self, chance: random.Random) -> None:
        if self._number < self._scenario.lives and self._faults.strikes("told-to-stop"):
            for _ in range(chance.choice((1, 1, 2))):
                self._loop.call_later(chance.expovariate(1 / 60), self._loop.deliver, signal.SIGTERM)

    async def _settle(self, pool: SimulatedPool) -> None:
        """Everything that was given up is soon over everywhere."""
        began = self._loop.time()
        while any(pool.left().values()):
            if self._loop.time() - began > SETTLING_SECONDS:
                self._loop.breaks(f"left running after the end: {pool.left()}")
                return
            await asyncio.sleep(1)
