"""A worker's way to the endpoint: one call, tried again as its retries allow, within the run's limits.

What comes back is an answer, or a fault that no repetition mends and that belongs to this conversation alone. All else is
InfrastructureError; those that would meet every other call too are fatal, so that a run stops instead of writing forecasts off.
"""

import asyncio
import contextlib
import datetime as dt
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from cluster.config import EndpointSettings, SamplingSettings
from cluster.endpoint.answer import Answer, EndpointFault
from cluster.endpoint.body import ChatCall, estimated_tokens, request_body
from cluster.endpoint.fault import Fault, FaultKind
from cluster.endpoint.gate import SILENCE_S, Permit, Settlement
from cluster.endpoint.gatekeeper import Admission
from cluster.endpoint.prices import TokenCount, price
from cluster.endpoint.retry import Retries
from cluster.endpoint.transport import Transport
from cluster.failures import InfrastructureError, PastcastError
from cluster.pool_view import PoolView
from cluster.record import Record

logger = logging.getLogger(__name__)

HEARTBEAT_S = SILENCE_S / 6
"""How often a worker that has calls says that it lives."""
SHORTEST_REST_S = 1.0
"""A key that was limited rests at least so long, whatever the server says."""

_OF_THIS_CALL: frozenset[FaultKind] = frozenset({"refused", "context-full", "bad-request"})
_REASONS: dict[FaultKind, str] = {
    "network": "endpoint-unreachable",
    "malformed": "endpoint-malformed",
    "server": "endpoint-error",
    "rate-limit": "endpoint-limited",
    "quota": "endpoint-quota",
    "unknown-model": "endpoint-model",
}


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


class GateService(Protocol):
    """The gatekeeper, here or in its actor."""

    async def hear(self, holder: str) -> None:
        """The worker lives."""
        ...

    async def admit(self, tokens: int, holder: str) -> Admission:
        """Waits for a turn. Raises InfrastructureError."""
        ...

    async def settle(self, permit: Permit, how: Settlement) -> float | None:
        """The request has ended; answers how long until some key may serve."""
        ...


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
        self._gate, self._settings, self._sampling = gate, settings, sampling
        self._transport = Transport(settings, now)
        self._clock, self._sleep = clock, sleep
        self._uncounted = False
        self._holder = f"{platform.node()}/{os.getpid()}"
        self._calls = 0
        self._heart: asyncio.Task[None] | None = None
        self._returning: set[asyncio.Future[float | None]] = set()

    async def complete(self, call: ChatCall) -> Reply:
        """One completion. Raises InfrastructureError when the attempt must be repeated, or cannot be."""
        self._calls += 1
        if self._heart is None or self._heart.done():
            self._heart = asyncio.create_task(self._beat())
        try:
            return await self._complete(call)
        finally:
            self._calls -= 1

    async def _beat(self) -> None:
        """Say that this worker lives while it has calls; if nobody can be told, the calls find out."""
        while self._calls:
            with contextlib.suppress(InfrastructureError):
                await self._gate.hear(self._holder)
            await asyncio.sleep(HEARTBEAT_S)

    async def _complete(self, call: ChatCall) -> Reply:
        body = request_body(call, self._settings, self._sampling)
        tokens = estimated_tokens(call)
        retries = Retries(self._settings)
        swaps = 0
        while True:
            admission = await self._admit(tokens)
            began = self._clock()
            how = Settlement(verdict="failed")
            fault: Fault | None = None
            try:
                answer = await self._transport.send(admission.key.get_secret_value(), body)
                count = answer.count or self._estimate(call, answer)
                how = Settlement(verdict="answered", tokens=count.input + count.output)
            except EndpointFault as error:
                fault = _without(error.fault, admission.key.get_secret_value())
                wait = (
                    None if admission.others and fault.kind in ("rate-limit", "quota") else retries.wait_s(fault.kind)
                )
                how = self._verdict(fault, admission, wait)
            finally:
                # Also when the step is abandoned: the slot must not stay taken.
                settled = asyncio.ensure_future(self._gate.settle(admission.permit, how))
            free_in = await asyncio.shield(settled)
            seconds = self._clock() - began
            if fault is None:
                return Reply(answer=answer, fault=None, count=count, price=self._price(count), seconds=seconds)
            if fault.kind in _OF_THIS_CALL:
                return Reply(answer=None, fault=fault, count=TokenCount(), price=0.0, seconds=seconds)
            if fault.kind == "auth":
                logger.warning("a key was refused and is not used again: %s", fault.detail)
                continue
            if how.verdict == "limited":
                if free_in is not None and free_in > self._settings.longest_retry_after_s:
                    detail = f"{fault.detail}; no key may be used for {free_in:.0f} s, resume the run after that"
                    raise InfrastructureError("endpoint-quota", detail)
                if admission.others:
                    if free_in == 0.0 and swaps < admission.others:
                        swaps += 1
                        continue
                    swaps = 0
                    wait = retries.wait_s(fault.kind)
            if wait is None:
                raise InfrastructureError(_REASONS[fault.kind], f"{self._settings.base_url}: {fault.detail}")
            logger.info("trying again after %s: %s", fault.kind, fault.detail)
            if how.verdict != "limited":
                # A limited key rests at the gate, where all calls wait for it.
                asked = min(fault.retry_after_s or 0.0, self._settings.longest_retry_after_s)
                await self._sleep(max(wait, asked))

    async def close(self) -> None:
        """Close the connections."""
        if self._heart is not None:
            self._heart.cancel()
        await self._transport.close()

    async def _admit(self, tokens: int) -> Admission:
        asking = asyncio.ensure_future(self._gate.admit(tokens, self._holder))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The turn will come all the same, and must be given back.
            asking.add_done_callback(self._give_back)
            raise

    def _give_back(self, asking: "asyncio.Future[Admission]") -> None:
        if not asking.cancelled() and asking.exception() is None:
            back = asyncio.ensure_future(
                self._gate.settle(asking.result().permit, Settlement(verdict="failed", tokens=0))
            )
            self._returning.add(back)
            back.add_done_callback(self._returning.discard)

    def _verdict(self, fault: Fault, admission: Admission, wait: float | None) -> Settlement:
        if fault.kind == "auth":
            return Settlement(verdict="refused", detail=fault.detail, tokens=0)
        if fault.kind not in ("rate-limit", "quota"):
            return Settlement(verdict="failed")
        rest = fault.retry_after_s
        if rest is None:
            rest = self._settings.key_cooldown_s if admission.others or wait is None else wait
        return Settlement(verdict="limited", rest_s=max(rest, SHORTEST_REST_S), tokens=0)

    def _estimate(self, call: ChatCall, answer: Answer) -> TokenCount:
        """Where a server does not count: four characters a token, said once."""
        if not self._uncounted:
            self._uncounted = True
            logger.warning("%s does not count tokens; they and the cost are estimated", self._settings.base_url)
        said = len(answer.text) + len(answer.reasoning) + sum(len(c.arguments) for c in answer.calls)
        return TokenCount(input=estimated_tokens(call) - call.max_tokens, output=said // 4)

    def _price(self, count: TokenCount) -> float:
        return 0.0 if self._settings.price is None else price(count, self._settings.price)


def _without(fault: Fault, key: str) -> Fault:
    """The fault without the key, should the server have repeated it."""
    return fault.model_copy(update={"detail": fault.detail.replace(key, "…")}) if key else fault
