"""The fleet machine on Ray: carries out what it wants, tells it what happened, and nothing else.

One PoolActor sees all requests of all workers, so that all of them see the same load. It lives on the driver's node and
owns the engines: when it goes, they go.
"""

import asyncio
import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.call import EngineFacts
from cluster.clock import monotonic
from cluster.cluster_nodes import NodesSeen, look_at_nodes
from cluster.config import EngineSettings, SamplingSettings
from cluster.engine_shape import replica_bundles
from cluster.failures import InfrastructureError
from cluster.fleet import Fleet
from cluster.fleet_events import (
    Abort,
    Adapter,
    Checkpoint,
    Confirm,
    End,
    Grant,
    Probe,
    Refuse,
    Start,
    Want,
    fleet_rules,
)
from cluster.pool_view import PoolView
from cluster.replica import AdapterRefused, Replica, engine_seed, proves_death
from cluster.weights import Weights

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
"""Between two ticks of the fleet."""
LOOK_SECONDS = 3.0
"""Between two looks at the cluster's nodes."""
REMEMBERED_ENDS = 10_000
"""Tickets whose end was said before they arrived: Ray does not keep the order of an actor's calls."""


class Assignment(NamedTuple):
    """Where one call goes."""

    engine: int
    incarnation: int
    handle: Any
    adapter: str
    """What the call is to be sampled with; empty: the base weights."""


class PoolActor:
    """Made a Ray actor by EnginePool."""

    def __init__(
        self,
        weights: Weights,
        settings: EngineSettings,
        sampling: SamplingSettings,
        seed: int,
        placement_timeout_s: float,
        engine: type[Any],
    ) -> None:
        """`engine`: EngineActor, or a class with its methods."""
        self._settings, self._sampling, self._seed, self._engine = settings, sampling, seed, engine
        self._placement_timeout_s = placement_timeout_s
        checkpoint = Checkpoint(path=weights.path, fingerprint=weights.base)
        self._fleet = Fleet(fleet_rules(settings, placement_timeout_s), settings.concurrency, checkpoint)
        self._adapter = weights.adapter
        if weights.adapter:
            self._fleet.add_adapter(_adapter(weights), _now())
        self._replicas: dict[tuple[int, int], Replica] = {}
        self._starting: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._facts: EngineFacts | None = None
        self._tickets: dict[str, asyncio.Future[Assignment | None]] = {}
        self._adapters_of: dict[str, str] = {}
        self._ended_early: OrderedDict[str, None] = OrderedDict()
        self._lost_callers: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Event()
        self._stopped = asyncio.Event()
        self._paused = ""

    async def start(self) -> EngineFacts:
        """Start the engines; answers once the pool is open. Raises InfrastructureError with the first fault if it cannot."""
        self._do(self._fleet.open(_now()))
        self._spawn(self._tick(), name="loop")
        self._spawn(self._look(), name="loop")
        await self._until(lambda: not self._fleet.opening or self._fleet.hopeless is not None)
        if self._fleet.hopeless is not None:
            raise InfrastructureError(*self._fleet.hopeless)
        if self._adapter and (why := self._fleet.refused(self._adapter)) is not None:
            raise InfrastructureError("adapter-refused", why)
        if self._facts is None:
            raise RuntimeError("the pool is open, but no engine has said what it is")
        return self._facts

    async def assign(
        self, ticket: str, session: str, tokens: int, adapter: str | None, caller: str
    ) -> Assignment | None:
        """An engine for a call; waits while none serves. None if the call was ended before it had one, or its caller has died.

        `adapter`: None is the run's own. Raises InfrastructureError with the reason of a refusal (`Refuse`).
        """
        if ticket in self._ended_early or caller in self._lost_callers:
            self._ended_early.pop(ticket, None)
            return None
        future: asyncio.Future[Assignment | None] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = future
        chosen = self._adapter if adapter is None else adapter
        self._adapters_of[ticket] = chosen
        self._do(self._fleet.assign(ticket, session, tokens, _now(), chosen, caller))
        try:
            return await future
        finally:
            del self._tickets[ticket]
            del self._adapters_of[ticket]

    async def finished(self, ticket: str) -> None:
        """A call came back whole."""
        self._do(self._fleet.finished(ticket, _now()))

    async def failed(self, ticket: str, reason: str, detail: str) -> None:
        """A call failed."""
        self._do(self._fleet.failed(ticket, reason, detail, _now()))

    async def cancelled(self, ticket: str) -> None:
        """A caller gave a call up, wherever it was."""
        if ticket in self._tickets:
            self._answer(ticket, None)
        elif ticket not in self._fleet.granted():
            self._ended_early[ticket] = None
            if len(self._ended_early) > REMEMBERED_ENDS:
                self._ended_early.popitem(last=False)
        self._do(self._fleet.cancelled(ticket, _now()))

    async def release(self, session: str) -> None:
        """A session has ended."""
        self._fleet.release(session)

    async def watch(self, caller: str, alive: Sequence[ray.ObjectRef]) -> None:
        """Ends the calls of `caller` when it dies; see `EngineActor.watch`."""
        try:
            await alive[0]
        except RayActorError:
            return
        except RayError:
            # What it had sent may still be on its way.
            self._lost_callers.add(caller)
            left = self._fleet.waiting()
            self._do(self._fleet.caller_gone(caller, _now()))
            for ticket in left - self._fleet.waiting():
                self._answer(ticket, None)

    async def until_stopped(self) -> None:
        """Answers when the pool is stopped; see `watch`."""
        await self._stopped.wait()

    async def view(self, in_flight: int | None = None) -> PoolView:
        """What the pool says of itself. `in_flight`: steps of the run, from its driver; None from anybody else."""
        if in_flight is not None:
            self._fleet.steps(in_flight)
        return self._fleet.view()

    async def drain(self, node: str) -> None:
        """Empty a node, by its id in Ray."""
        self._do(self._fleet.drain(node, _now()))

    async def load_adapter(self, name: str, path: str) -> None:
        """Answers once every serving engine holds the adapter. Raises InfrastructureError `adapter-refused`."""
        self._do(self._fleet.add_adapter(Adapter(name=name, path=path), _now()))
        await self._loaded(name)

    async def swap(self, weights: Weights, together: bool) -> None:
        """Answers once every engine serves other weights. Raises InfrastructureError `reload-failed` if the swap was taken back."""
        checkpoint = Checkpoint(path=weights.path, fingerprint=weights.base)
        former, self._adapter = self._adapter, weights.adapter
        adapters = (_adapter(weights),) if weights.adapter else ()
        self._do(self._fleet.swap(checkpoint, together, _now(), adapters))
        await self._until(lambda: not self._fleet.swapping or self._fleet.hopeless is not None)
        if self._fleet.swap_fault:
            self._adapter = former
            raise InfrastructureError("reload-failed", f"{self._fleet.swap_fault}; the former weights serve again")
        self._raise_if_hopeless()

    async def handles(self) -> dict[int, Any]:
        """The serving engines' actors by number: for tests and tools."""
        serving = {e.engine for e in self._fleet.view().engines if e.state in ("HEALTHY", "SUSPECT")}
        return {number: r.handle for (number, _), r in sorted(self._replicas.items()) if number in serving}

    async def stop(self) -> None:
        """End every engine; callers that wait are told."""
        self._do(self._fleet.close(_now()))
        self._stopped.set()
        for task in self._tasks - {asyncio.current_task()}:
            if task.get_name() != "end":
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The fleet's wants.

    def _do(self, wants: Sequence[Want]) -> None:
        for want in wants:
            match want:
                case Grant():
                    self._answer(want.ticket, self._assignment(want))
                case Refuse():
                    self._answer(want.ticket, InfrastructureError(want.reason, want.detail))
                case Start():
                    self._start(want)
                case Confirm():
                    self._spawn(self._confirm(want), want)
                case Probe():
                    self._spawn(self._probe(want), want)
                case Abort():
                    if (replica := self._replicas.get((want.engine, want.incarnation))) is not None:
                        replica.handle.abort.remote(want.ticket)
                case End():
                    self._end(want)
        if wants:
            self._turn.set()
            self._turn = asyncio.Event()

    def _assignment(self, want: Grant) -> Assignment:
        handle = self._replicas[want.engine, want.incarnation].handle
        return Assignment(want.engine, want.incarnation, handle, self._adapters_of[want.ticket])

    def _answer(self, ticket: str, answer: Assignment | InfrastructureError | None) -> None:
        future = self._tickets.get(ticket)
        if future is None or future.done():
            return
        if isinstance(answer, InfrastructureError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _start(self, want: Start) -> None:
        key = (want.engine, want.incarnation)
        self._replicas[key] = self._replica(want)
        if want.incarnation > 1:
            logger.warning("engine %d is started again", want.engine)
        self._starting[key] = self._spawn(self._bring_up(want, self._replicas[key]), want)

    def _replica(self, want: Start) -> Replica:
        seed = engine_seed(self._seed, want.engine, want.incarnation)
        return Replica(want.engine, self._engine, self._settings, self._sampling, seed)

    async def _bring_up(self, want: Start, replica: Replica) -> None:
        key = (want.engine, want.incarnation)
        try:
            nodes = await replica.place(want.avoid, self._placement_timeout_s)
            self._do(self._fleet.placed(*key, nodes, _now()))
            facts = await replica.start(want.weights)
        except InfrastructureError as error:
            self._do(self._fleet.not_started(*key, error.reason, error.detail, _now()))
            return
        except RayError as error:
            self._do(self._fleet.not_started(*key, "engine-start", f"{type(error).__name__}: {error}", _now()))
            return
        self._facts = self._facts or facts
        self._do(self._fleet.started(*key, _now()))

    async def _confirm(self, want: Confirm) -> None:
        replica = self._replicas.get((want.engine, want.incarnation))
        if replica is None:
            return
        try:
            weights, adapters = await replica.confirm(want)
        except AdapterRefused as error:
            self._do(self._fleet.adapter_refused(want, error.name, error.detail, _now()))
        except InfrastructureError as error:
            self._do(self._fleet.not_confirmed(want, error.reason, error.detail, _now()))
        except RayTaskError:
            raise
        except RayError as error:
            self._do(self._fleet.not_confirmed(want, "engine-lost", f"{type(error).__name__}: {error}", _now()))
        else:
            self._do(self._fleet.confirmed(want, weights, adapters, _now()))

    async def _probe(self, want: Probe) -> None:
        replica = self._replicas.get((want.engine, want.incarnation))
        if replica is None:
            return
        try:
            figures = await replica.figures()
        except InfrastructureError as error:
            # The actor lives, and says that vLLM behind it does not.
            self._do(self._fleet.died(want.engine, want.incarnation, str(error), _now()))
            return
        except RayTaskError:
            raise
        except RayError as error:
            if proves_death(error):
                why = f"{type(error).__name__}: {error}"
                self._do(self._fleet.died(want.engine, want.incarnation, why, _now()))
            # Otherwise the probe stays without an answer, and the fleet counts it.
            return
        self._do(self._fleet.answered(want.engine, want.incarnation, figures, _now()))

    def _end(self, want: End) -> None:
        key = (want.engine, want.incarnation)
        logger.log(logging.INFO if want.gentle else logging.WARNING, "engine %d is ended: %s", want.engine, want.why)
        if (task := self._starting.pop(key, None)) is not None and task is not asyncio.current_task():
            task.cancel()
        replica = self._replicas.pop(key, None)
        if replica is not None:
            self._spawn(replica.end(want.gentle), name="end")

    # Time, and the tasks.

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._do(self._fleet.tick(_now()))
            paused = self._fleet.view().paused
            if paused != self._paused and not self._fleet.opening:
                logger.warning("the pool is paused: %s", paused) if paused else logger.warning("the pool goes on")
                self._paused = paused

    async def _look(self) -> None:
        while True:
            try:
                seen = await self._nodes()
            except RayError as error:
                logger.warning("the cluster's nodes cannot be seen now: %s", error)
            else:
                self._do(self._fleet.nodes_seen(seen.alive, seen.draining, seen.rooms, _now()))
            await asyncio.sleep(LOOK_SECONDS)

    async def _nodes(self) -> NodesSeen:
        most = self._settings.maximum or self._settings.replicas
        return await asyncio.to_thread(look_at_nodes, replica_bundles(self._settings), most, self._fleet.draining)

    async def _loaded(self, adapter: str) -> None:
        fleet = self._fleet
        await self._until(
            lambda: fleet.holds(adapter) or fleet.refused(adapter) is not None or fleet.hopeless is not None
        )
        if (why := fleet.refused(adapter)) is not None:
            raise InfrastructureError("adapter-refused", f"{adapter}: {why}")
        self._raise_if_hopeless()

    def _raise_if_hopeless(self) -> None:
        if self._fleet.hopeless is not None:
            raise InfrastructureError(*self._fleet.hopeless)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self._turn.wait()

    def _spawn(
        self, work: Coroutine[Any, Any, None], of: Start | Confirm | Probe | None = None, name: str = "work"
    ) -> asyncio.Task[None]:
        """Run in the background. What goes wrong there is a bug of ours: it is loud, and costs the engine it was `of`, or the pool
        where nothing would go on without it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            self._tasks.discard(finished)
            error = None if finished.cancelled() else finished.exception()
            if error is None:
                return
            logger.error("a bug in the engine pool:\n%s", "".join(traceback.format_exception(error)))
            if of is not None:
                self._do(self._fleet.died(of.engine, of.incarnation, f"bug: {error!r}", _now()))
            elif name == "loop":
                self._do(self._fleet.close(_now(), "pool-lost", f"bug: {error!r}"))

        task.add_done_callback(done)
        return task


def _adapter(weights: Weights) -> Adapter:
    return Adapter(name=weights.adapter, path=weights.adapter_path, fingerprint=weights.fingerprint)


def _now() -> float:
    return monotonic()
