"""One process's side of its calls to engines: whatever becomes of a call, its request does not go on without it.

Ray lets a remote call run on when its caller stops waiting, and when its caller dies. So a cancelled or overdue call is aborted by
name, and every engine is given a reference that only this process can own: when the process is gone, Ray tells the
engine, and the engine aborts what it still works on for it.
"""

import asyncio
import uuid
from typing import Any

from ray.exceptions import RayActorError

from cluster.call import EngineCall, EngineOutput
from cluster.failures import InfrastructureError

GRACE_SECONDS = 30.0
"""How long after a call's deadline the engine's own answer is waited for."""


class Caller:
    """Made anew, under a name of its own, in every process that it is sent to."""

    def __init__(self, grace_s: float = GRACE_SECONDS) -> None:
        self.name = uuid.uuid4().hex
        self._grace_s = grace_s
        self._watched: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[type["Caller"], tuple[float]]:
        return Caller, (self._grace_s,)

    def introduce(self, actor: Any) -> None:
        """Once for each engine, and for the pool: it is told when this process dies (`EngineActor.watch`)."""
        if actor not in self._watched:
            self._watched[actor] = actor.until_stopped.remote()
            actor.watch.remote(self.name, [self._watched[actor]])

    def forget(self, actor: Any) -> None:
        """The actor was out of reach: what it was given to watch may have failed with that, and is given anew at the next call."""
        self._watched.pop(actor, None)

    async def generate(self, engine: Any, call: EngineCall) -> EngineOutput:
        """The engine's answer. Raises what `EngineActor.generate` raises, and Ray's own errors when the engine is gone."""
        self.introduce(engine)
        answer = engine.generate.remote(call.model_copy(update={"caller": self.name}))
        try:
            async with asyncio.timeout(call.timeout_s + self._grace_s):
                output: EngineOutput = await answer
        except asyncio.CancelledError:
            engine.abort.remote(call.request_id)
            raise
        except TimeoutError:
            engine.abort.remote(call.request_id)
            raise InfrastructureError(
                "engine-time-out", f"the engine's actor did not answer within {call.timeout_s + self._grace_s:g} s"
            ) from None
        except RayActorError:
            self.forget(engine)
            raise
        return output
