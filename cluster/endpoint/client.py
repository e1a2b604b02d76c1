"""A worker's way to the endpoint: one chat completion, priced, within the run's limits."""

import asyncio
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from cluster.config import EndpointSettings, SamplingSettings
from cluster.endpoint.answer import Answer
from cluster.endpoint.attempts import Attempts, GateService
from cluster.endpoint.body import ChatCall, estimated_tokens, request_body
from cluster.endpoint.fault import Fault
from cluster.endpoint.gate import Permit, Settlement
from cluster.endpoint.gatekeeper import Admission
from cluster.endpoint.prices import TokenCount, price
from cluster.endpoint.transport import ChatTransport
from cluster.failures import InfrastructureError, PastcastError
from cluster.pool_view import PoolView
from cluster.record import Record

logger = logging.getLogger(__name__)


class Reply(Record):
    """What became of a call: an answer, or a fault of this conversation."""

    answer: Answer | None
    fault: Fault | None
    count: TokenCount
    """Zero for a fault."""
    price: float
    """US dollars."""
    seconds: float
    """Of the last try, waits for the run's limits left out."""


class RemoteGate:
    """The gatekeeper's actor as seen by a worker. Raises InfrastructureError `endpoint-gone`, which is fatal, when it is dead."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def hear(self, holder: str) -> None:
        """The worker lives."""
        await self._ask(self._actor.hear.remote(holder))

    async def admit(self, tokens: int, holder: str) -> Admission:
        """Waits for a turn."""
        admission: Admission = await self._ask(self._actor.admit.remote(tokens, holder))
        return admission

    async def settle(self, permit: Permit, how: Settlement) -> float | None:
        """The request has ended."""
        wait: float | None = await self._ask(self._actor.settle.remote(permit, how))
        return wait

    async def view(self) -> PoolView:
        """What the coordinator is to know."""
        view: PoolView = await self._ask(self._actor.view.remote())
        return view

    async def _ask(self, answer: Any) -> Any:
        try:
            return await answer
        except RayTaskError as error:
            if isinstance(error.cause, PastcastError):
                raise error.cause from None
            raise
        except ActorUnavailableError as error:
            # Out of reach, not gone: a network that fails for a moment must not end a run.
            raise InfrastructureError("endpoint-gate-unreachable", str(error)) from None
        except RayError as error:
            raise InfrastructureError("endpoint-gone", f"the gatekeeper of the run's limits died: {error}") from None


class EndpointClient:
    """What a worker holds; made in the worker's own process, since it owns connections."""

    def __init__(
        self,
        gate: GateService,
        settings: EndpointSettings,
        sampling: SamplingSettings,
        now: Callable[[], dt.datetime],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`now` is the wall clock, `clock` gives seconds from any origin."""
        self._settings, self._sampling = settings, sampling
        self._transport = ChatTransport(settings, now)
        self._attempts = Attempts(gate, settings, clock, sleep)
        self._uncounted = False

    async def complete(self, call: ChatCall) -> Reply:
        """One completion. Raises InfrastructureError when the attempt must be repeated, or cannot be."""
        body = request_body(call, self._settings, self._sampling)

        def size(answer: Answer) -> int:
            count = self._count(call, answer)
            return count.input + count.output

        tried = await self._attempts.make(estimated_tokens(call), lambda key: self._transport.send(key, body), size)
        count = TokenCount() if tried.answer is None else self._count(call, tried.answer)
        return Reply(
            answer=tried.answer, fault=tried.fault, count=count, price=self._price(count), seconds=tried.seconds
        )

    async def close(self) -> None:
        """Close the connections."""
        self._attempts.close()
        await self._transport.close()

    def _count(self, call: ChatCall, answer: Answer) -> TokenCount:
        """Where a server does not count: four characters a token, said once."""
        if answer.count is not None:
            return answer.count
        if not self._uncounted:
            self._uncounted = True
            logger.warning("%s does not count tokens; they and the cost are estimated", self._settings.base_url)
        said = len(answer.text) + len(answer.reasoning) + sum(len(c.arguments) for c in answer.calls)
        return TokenCount(input=estimated_tokens(call) - call.max_tokens, output=said // 4)

    def _price(self, count: TokenCount) -> float:
        return 0.0 if self._settings.price is None else price(count, self._settings.price)
