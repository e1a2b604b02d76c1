"""The engine pool as its users hold it: EnginePool in the driver, EngineClient in every worker.

A call asks the pool for an engine, talks to that engine directly, and says how it ended. A dead engine costs its running
calls (InfrastructureError, to be repeated elsewhere) and nothing else. A call that is cancelled or overdue is aborted at its engine.
"""

import asyncio
import logging
import socket
import uuid
from collections.abc import Sequence
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.call import EngineCall, EngineFacts, EngineOutput
from cluster.caller import Caller
from cluster.config import EngineSettings, SamplingSettings
from cluster.engine import EngineActor
from cluster.failures import InfrastructureError, PastcastError
from cluster.pool_actor import Assignment, PoolActor
from cluster.pool_view import PoolView
from cluster.replica import STOP_SECONDS, proves_death
from cluster.weights import Weights

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
"""How long the pool's actor may take to say what it can say at once. Whoever waits for an engine asks this often whether it lives."""


class EngineClient:
    """What a worker holds to reach the pool; picklable."""

    def __init__(self, pool: Any, facts: EngineFacts, timeout_s: float, patience_s: float = ANSWER_SECONDS) -> None:
        """`timeout_s` bounds every call at its engine, `patience_s` every question that the pool's actor can answer at once."""
        self._pool = pool
        self.facts = facts
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._caller = Caller()

    async def generate(
        self,
        session: str,
        ids: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        adapter: str | None = None,
        timeout_s: float | None = None,
    ) -> tuple[EngineOutput, str]:
        """One call; returns the output and the replica's name.

        `adapter`: its name, empty for the base weights, None for what the run samples with. `timeout_s` shortens this call's
        deadline; waiting for an engine does not count, as long as the pool says that it lives. Raises InfrastructureError, to be
        repeated elsewhere.
        """
        ticket, tokens = uuid.uuid4().hex, len(ids) + max_tokens
        self._caller.introduce(self._pool)
        found = await self._assigned(ticket, session, tokens, adapter)
        call = EngineCall(
            request_id=ticket,
            ids=tuple(ids),
            max_tokens=max_tokens,
            stop_ids=tuple(stop_ids),
            adapter=found.adapter,
            timeout_s=min(self._timeout_s, timeout_s or self._timeout_s),
        )
        try:
            output = await self._caller.generate(found.handle, call)
        except InfrastructureError as error:
            # Waited for: a call that is repeated must not go to the same dead engine.
            await self._ask(self._pool.failed.remote(ticket, error.reason, error.detail))
            raise
        except RayTaskError as error:
            # The engine's own code failed: a bug of ours, to be loud.
            self._pool.failed.remote(ticket, "engine-bug", str(error))
            raise
        except RayError as error:
            reason = "engine-lost" if proves_death(error) else "engine-unreachable"
            await self._ask(self._pool.failed.remote(ticket, reason, f"{type(error).__name__}: {error}"))
            raise InfrastructureError(reason, f"engine {found.engine}: {type(error).__name__}") from None
        except asyncio.CancelledError:
            self._pool.cancelled.remote(ticket)
            raise
        self._pool.finished.remote(ticket)
        return output, f"engine-{found.engine}.{found.incarnation}"

    async def release(self, session: str) -> None:
        """The session has ended."""
        self._pool.release.remote(session)

    async def view(self, in_flight: int | None = None) -> PoolView:
        """What the pool says of itself; `limit` is how many steps may be in flight, `in_flight` how many are, from whoever knows all.

        Raises InfrastructureError `pool-lost`, or `pool-unreachable` where the pool does not answer.
        """
        view: PoolView = await self._ask(self._pool.view.remote(in_flight))
        return view

    async def _assigned(self, ticket: str, session: str, tokens: int, adapter: str | None) -> Assignment:
        answer = asyncio.ensure_future(self._pool.assign.remote(ticket, session, tokens, adapter, self._caller.name))
        try:
            while not (await asyncio.wait([answer], timeout=self._patience_s))[0]:
                # There may be no engine for long; but somebody must be there who waits for one.
                await self.view()
            found: Assignment | None = await self._ask(answer)
        except asyncio.CancelledError:
            self._pool.cancelled.remote(ticket)
            raise
        except InfrastructureError as error:
            if error.reason == "pool-unreachable":
                # It may have granted what was asked.
                self._pool.cancelled.remote(ticket)
            raise
        finally:
            answer.cancel()
        if found is None:
            raise RuntimeError(f"the pool gave call {ticket} up, and its caller did not")
        return found

    async def _ask(self, answer: Any) -> Any:
        """The pool's answer. Raises InfrastructureError `pool-lost` when its actor is gone, `pool-unreachable` when it is
        only out of reach, or silent: what fails for a moment must not end a run."""
        try:
            async with asyncio.timeout(self._patience_s):
                return await answer
        except TimeoutError:
            raise InfrastructureError(
                "pool-unreachable",
                f"the engine pool's actor lives, but has not answered for {self._patience_s:g} s; look at what it does on the "
                "driver's node, or end the run and go on with --resume",
            ) from None
        except RayTaskError:
            raise
        except RayError as error:
            reason = "pool-lost" if proves_death(error) else "pool-unreachable"
            self._caller.forget(self._pool)
            raise InfrastructureError(reason, f"{type(error).__name__}: {error}") from None


class EnginePool:
    """The pool as the driver holds it: started here, stopped here."""

    def __init__(
        self,
        weights: Weights,
        settings: EngineSettings,
        sampling: SamplingSettings,
        seed: int,
        placement_timeout_s: float,
        engine: type[Any] = EngineActor,
    ) -> None:
        """Blocks until the pool can serve: with all replicas, or at least `engine.minimum` where that is set.

        `engine`: the class of the engines' actors. Raises InfrastructureError that names what is missing, or `pool-lost` if the
        pool's own actor dies.
        """
        if weights.adapter:
            settings = settings.model_copy(update={"adapters": settings.adapters + 1})
        self._timeout_s = settings.request_timeout_s
        # Here and not where there is room: the pool is lost with its node, and the run ends with the driver's anyway.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._actor = (
            ray.remote(PoolActor)
            .options(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)
            .remote(weights, settings, sampling, seed, placement_timeout_s, engine)
        )
        try:
            self.facts: EngineFacts = self._answer(self._actor.start.remote())
        except BaseException:
            # Also on Ctrl-C: a session that was opened before would keep the actor, and with it the engines.
            self.stop()
            raise

    def client(self) -> EngineClient:
        """A handle for workers."""
        return EngineClient(self._actor, self.facts, self._timeout_s)

    def view(self) -> PoolView:
        """What the pool says of itself."""
        view: PoolView = self._answer(self._actor.view.remote())
        return view

    def drain(self, node: str) -> None:
        """Empty a node (its id in Ray): its engines get nothing new, finish what runs within `engine.drain_timeout_s`, and end."""
        self._answer(self._actor.drain.remote(node))

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter in every engine, also in those that are started later; blocks until the serving ones hold it.

        Calls name it as `adapter`. Raises InfrastructureError `adapter-refused` with the engine's reason; every engine serves on.
        """
        self._answer(self._actor.load_adapter.remote(name, path))

    def swap(self, weights: Weights, together: bool = True) -> None:
        """Serve other weights: engines drain, reload and are confirmed; blocks until then. Adapters loaded by name are given up.

        `together`: all at once, so that no two calls see different weights; otherwise one engine after another, and the
        pool serves meanwhile. Raises InfrastructureError `reload-failed` if the first engine cannot load them, or the adapter that
        `weights` names; the former weights and adapters then serve again.
        """
        self._answer(self._actor.swap.remote(weights, together))

    def handles(self) -> dict[int, Any]:
        """The serving engines' actors by number: for tests and tools."""
        handles: dict[int, Any] = self._answer(self._actor.handles.remote())
        return handles

    def stop(self) -> None:
        """End the engines and the pool; never raises for what is dead already."""
        try:
            ray.get(self._actor.stop.remote(), timeout=2 * STOP_SECONDS)
        except RayError as error:
            logger.warning("the engine pool did not stop by itself and is killed: %s", error)
        finally:
            ray.kill(self._actor)

    def _answer(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayTaskError as error:
            # Ray's own wrapper carries a remote traceback as its text; the cause says it in our words.
            if isinstance(error.cause, PastcastError):
                raise error.cause from None
            raise
        except RayError as error:
            raise InfrastructureError(
                "pool-lost",
                f"the engine pool's actor on {socket.gethostname()}, the driver's node, is gone ({type(error).__name__}: {error}); "
                "its last words are in Ray's session folder there, logs/worker-*; see whether the node lacks memory, and go on with "
                "--resume",
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
