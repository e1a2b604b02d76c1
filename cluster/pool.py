"""The engine pool: replicas as Ray actors behind one router, restarted when they die.

One PoolActor owns the routing state, so that all workers see the same load. A call asks it for an engine, talks to that
engine directly, and tells it when the call has ended. A dead replica costs its running calls (InfrastructureError, to be
repeated elsewhere) and nothing else.
"""

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.call import EngineCall, EngineFacts, EngineOutput
from cluster.caller import Caller
from cluster.config import EngineSettings, SamplingSettings
from cluster.engine import EngineActor
from cluster.environment import engine_environment
from cluster.failures import InfrastructureError, PastcastError
from cluster.placement import place, release
from cluster.routing import Router
from cluster.weights import Weights

logger = logging.getLogger(__name__)

STOP_SECONDS = 20.0
"""How long a replica may take to end by itself."""


class Assignment(NamedTuple):
    """Where one call goes."""

    engine: int
    incarnation: int
    """How often this replica has been started; a report about an earlier one is out of date."""
    handle: Any


class PoolActor:
    """Starts, routes to and restarts the replicas. Made a Ray actor by EnginePool."""

    def __init__(
        self,
        weights: Weights,
        settings: EngineSettings,
        sampling: SamplingSettings,
        seed: int,
        group: PlacementGroup,
    ) -> None:
        self._weights, self._group = weights, group
        self._settings, self._sampling, self._seed = settings, sampling, seed
        self._router = Router()
        self._handles: dict[int, Any] = {}
        self._incarnations = dict.fromkeys(range(settings.replicas), 0)
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    async def start(self) -> list[EngineFacts]:
        """Start every replica side by side. Raises InfrastructureError if one does not come up in time."""
        return list(await asyncio.gather(*(self._start_one(e) for e in range(self._settings.replicas))))

    async def assign(self, session: str, tokens: int) -> Assignment:
        """An engine for a call; waits while all are restarting.

        Raises InfrastructureError `no-engine` when none is left to wait for.
        """
        while True:
            engine = self._router.assign(session, tokens)
            if engine is not None:
                return Assignment(engine, self._incarnations[engine], self._handles[engine])
            if not self._restarting:
                raise InfrastructureError("no-engine", "every replica has died and its restarts are spent")
            async with self._changed:
                await self._changed.wait()

    async def finish(self, session: str, engine: int, incarnation: int, tokens: int) -> None:
        """A call has ended."""
        if self._incarnations[engine] == incarnation:
            self._router.finish(session, engine, tokens)

    async def release(self, session: str) -> None:
        """A session has ended."""
        self._router.release(session)

    async def lost(self, engine: int, incarnation: int, why: str) -> None:
        """A caller found a replica dead; it is replaced once, however many callers say so."""
        if self._incarnations[engine] != incarnation or engine in self._restarting or engine not in self._handles:
            return
        self._router.remove(engine)
        logger.warning("engine %d died and is started again: %s", engine, why)
        self._restarting[engine] = asyncio.create_task(self._restart(engine))

    async def handles(self) -> list[Any]:
        """The replicas' actor handles, in order."""
        return [self._handles[e] for e in sorted(self._handles)]

    async def stop(self) -> None:
        """End every replica."""
        for task in self._restarting.values():
            task.cancel()
        for handle in list(self._handles.values()):
            try:
                await asyncio.wait_for(handle.shutdown.remote(), STOP_SECONDS)
            except (RayError, TimeoutError):
                logger.info("an engine did not shut down by itself and is killed")
            ray.kill(handle)
        self._handles.clear()

    async def _start_one(self, engine: int) -> EngineFacts:
        self._incarnations[engine] += 1
        actor = ray.remote(EngineActor).options(
            num_cpus=self._settings.cpus,
            num_gpus=self._settings.gpus,
            max_concurrency=10_000,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=engine),
            runtime_env={"env_vars": engine_environment(self._settings)},
        )
        seed = engine_seed(self._seed, engine, self._incarnations[engine])
        weights = self._weights
        handle = actor.remote(weights.path, weights.base, self._settings, self._sampling, seed)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                facts: EngineFacts = await handle.facts.remote()
                if weights.adapter:
                    loaded = await handle.load_adapter.remote(weights.adapter, weights.adapter_path)
                    if loaded != weights.fingerprint:
                        raise InfrastructureError(
                            "other-weights",
                            f"{weights.adapter_path} on node {facts.node} is not the run's adapter; name one on shared storage",
                        )
        except (TimeoutError, RayError) as error:
            ray.kill(handle)
            asked = f"{self._settings.cpus:g} CPU and {self._settings.gpus:g} GPU"
            late = isinstance(error, TimeoutError)
            why = (
                f"did not start within {self._settings.start_timeout_s:g} s"
                if late
                else f"died while starting: {error}"
            )
            raise InfrastructureError("engine-start", f"replica {engine} ({asked}) {why}") from None
        self._handles[engine] = handle
        self._router.admit(engine)
        return facts

    async def _restart(self, engine: int) -> None:
        """Start a replica again, until it comes up or its restarts are spent."""
        ray.kill(self._handles.pop(engine))
        try:
            while self._incarnations[engine] <= self._settings.restarts:
                try:
                    await self._start_one(engine)
                except InfrastructureError as error:
                    logger.error("engine %d could not be started again: %s", engine, error)
                else:
                    return
            logger.error("engine %d is lost for good: its %d restarts are spent", engine, self._settings.restarts)
        finally:
            del self._restarting[engine]
            async with self._changed:
                self._changed.notify_all()


def engine_seed(seed: int, engine: int, incarnation: int) -> int:
    """A seed of its own for every start of every replica; `seed` must differ between the sittings of a run."""
    digest = hashlib.sha256(f"{seed}/{engine}/{incarnation}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


class EngineClient:
    """What a worker holds to reach the pool; picklable."""

    def __init__(self, pool: Any, facts: EngineFacts, weights: Weights, timeout_s: float) -> None:
        """`timeout_s` bounds every call."""
        self._pool = pool
        self.facts = facts
        self._weights = weights
        self._timeout_s = timeout_s
        self._caller = Caller()

    async def generate(
        self, session: str, ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]
    ) -> tuple[EngineOutput, str]:
        """One call; returns the output and the replica's name. Raises InfrastructureError, to be repeated elsewhere."""
        tokens = len(ids) + max_tokens
        call = EngineCall(
            request_id=uuid.uuid4().hex,
            ids=tuple(ids),
            max_tokens=max_tokens,
            stop_ids=tuple(stop_ids),
            adapter=self._weights.adapter,
            timeout_s=self._timeout_s,
        )
        engine, incarnation, handle = await self._ask(self._pool.assign.remote(session, tokens))
        try:
            output = await self._caller.generate(handle, call)
        except InfrastructureError as error:
            if error.reason == "engine-lost":
                await self._ask(self._pool.lost.remote(engine, incarnation, error.detail))
            raise
        except RayTaskError:
            raise  # the engine's own code failed: a bug of ours, to be loud
        except RayError as error:
            await self._ask(self._pool.lost.remote(engine, incarnation, str(error)))
            raise InfrastructureError("engine-lost", f"replica {engine}: {type(error).__name__}") from None
        finally:
            self._pool.finish.remote(session, engine, incarnation, tokens)
        return output, f"engine-{engine}.{incarnation}"

    async def _ask(self, answer: Any) -> Any:
        """The pool's answer. Raises InfrastructureError `pool-lost` when its actor is gone."""
        try:
            return await answer
        except RayTaskError:
            raise
        except RayError as error:
            raise InfrastructureError("pool-lost", f"{type(error).__name__}: {error}") from None

    async def release(self, session: str) -> None:
        """The session has ended."""
        self._pool.release.remote(session)


class EnginePool:
    """The pool as the driver holds it: started here, stopped here."""

    def __init__(
        self,
        weights: Weights,
        settings: EngineSettings,
        sampling: SamplingSettings,
        seed: int,
        placement_timeout_s: float,
    ) -> None:
        """Blocks until every replica can serve. Raises InfrastructureError that names what is missing."""
        if weights.adapter:
            settings = settings.model_copy(update={"adapters": settings.adapters + 1})
        self._weights, self._timeout_s = weights, settings.request_timeout_s
        # Ray refuses a bundle of nothing.
        bundle = {"CPU": max(settings.cpus, 0.001), "GPU": settings.gpus}
        self._group = place([bundle] * settings.replicas, "PACK", placement_timeout_s)
        self._actor = (
            ray.remote(PoolActor)
            .options(num_cpus=0, max_concurrency=10_000)
            .remote(weights, settings, sampling, seed, self._group)
        )
        try:
            self.facts: list[EngineFacts] = ray.get(self._actor.start.remote())
        except BaseException as error:
            # Also on Ctrl-C: a session that was opened before would keep the actor and the group.
            ray.kill(self._actor)
            release(self._group)
            # Ray's own wrapper carries a remote traceback as its text; the cause says it in our words.
            if isinstance(error, RayTaskError) and isinstance(error.cause, PastcastError):
                raise error.cause from None
            raise

    def client(self) -> EngineClient:
        """A handle for workers."""
        return EngineClient(self._actor, self.facts[0], self._weights, self._timeout_s)

    def handles(self) -> list[Any]:
        """The replicas' actor handles: for tests and tools."""
        return list(ray.get(self._actor.handles.remote()))

    def stop(self) -> None:
        """End the replicas and the router; never raises for what is dead already."""
        try:
            ray.get(self._actor.stop.remote(), timeout=STOP_SECONDS * (1 + len(self.facts)))
        except RayError as error:
            logger.warning("the engine pool did not stop by itself and is killed: %s", error)
        finally:
            ray.kill(self._actor)
            release(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
