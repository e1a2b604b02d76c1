"""The endpoint as a run's driver holds it: started, proved and stopped here, handed to workers as a gate.

Proving asks the server for a word, with the run's own parameters and tools, before any forecast: a wrong key, model,
address or parameter would meet every call alike, and is said once instead of being recorded for every forecast.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.clock import utc_now
from cluster.config import EndpointSettings, SamplingSettings
from cluster.endpoint.body import ChatCall
from cluster.endpoint.client import EndpointClient, RemoteGate, Reply
from cluster.endpoint.gatekeeper import Gatekeeper, read_keys
from cluster.failures import InfrastructureError, PastcastError
from cluster.pool_view import PoolView

logger = logging.getLogger(__name__)


class EndpointActor(Gatekeeper):
    """The gatekeeper, and a first call through it."""

    def __init__(self, settings: EndpointSettings) -> None:
        super().__init__(settings)
        self._endpoint = settings

    async def prove(self, call: ChatCall, sampling: SamplingSettings) -> Reply:
        """The reply to one call. Raises InfrastructureError, fatal where every call would fail like this one."""
        client = EndpointClient(self, self._endpoint, sampling, utc_now)
        try:
            reply = await client.complete(call)
        finally:
            await client.close()
        where = f"{self._endpoint.base_url} ({self._endpoint.model})"
        if reply.fault is not None:
            raise InfrastructureError(
                "endpoint-refuses", f"{where} refuses a first, plain request: {reply.fault.detail}"
            )
        if reply.answer is not None and reply.answer.browsed:
            detail = f"{where} browsed in answer to a first, plain request: {reply.answer.browsed}; turn that off or take another"
            raise InfrastructureError("endpoint-browses", detail)
        return reply


class EndpointService:
    """Blocks while it starts."""

    def __init__(self, settings: EndpointSettings, sampling: SamplingSettings, proofs: Sequence[ChatCall]) -> None:
        """Each of `proofs` must be answered. Raises SettingsError for missing keys and InfrastructureError otherwise."""
        keys = read_keys(settings.key_env, os.environ)
        here = ray.get_runtime_context().get_node_id()
        self._actor: Any = (
            ray.remote(EndpointActor)
            .options(
                num_cpus=0,
                max_concurrency=100_000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote(settings)
        )
        try:
            ray.get(self._actor.open.remote(keys))
            for proof in proofs:
                reply: Reply = ray.get(self._actor.prove.remote(proof, sampling))
                if reply.answer is not None:
                    logger.info("%s serves %s", settings.base_url, reply.answer.model or settings.model)
        except BaseException as error:
            # Also on Ctrl-C: a session that was opened before would keep the actor, and the keys in it.
            ray.kill(self._actor)
            if isinstance(error, RayTaskError) and isinstance(error.cause, PastcastError):
                raise error.cause from None
            if isinstance(error, RayError) and not isinstance(error, RayTaskError):
                raise InfrastructureError("endpoint-gone", f"the gatekeeper could not be started: {error}") from None
            raise

    def gate(self) -> RemoteGate:
        """For workers."""
        return RemoteGate(self._actor)

    async def view(self, _in_flight: int = 0, /) -> PoolView:
        """What the endpoint says of itself now. Raises InfrastructureError when the gatekeeper is gone."""
        return await self.gate().view()

    async def release(self, _session: str, /) -> None:
        """A server is sent every conversation whole: it keeps none for us."""

    def stop(self) -> None:
        """End the actor."""
        ray.kill(self._actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
