"""One request to a server, tried again as its retries allow, within the limits that its gate keeps.

What comes back is an answer, or a fault that no repetition mends and that belongs to this request alone. All else is
InfrastructureError; those that would meet every other request too are fatal, so that a run stops instead of writing forecasts off.
"""

import asyncio
import contextlib
import logging
import os
import platform
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cluster.config import ServerSettings
from cluster.endpoint.answer import EndpointFault
from cluster.endpoint.fault import Fault, FaultKind
from cluster.endpoint.gate import SILENCE_S, Permit, Settlement
from cluster.endpoint.gatekeeper import Admission
from cluster.endpoint.retry import Retries
from cluster.failures import InfrastructureError

logger = logging.getLogger(__name__)

Answered = TypeVar("Answered")

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


@dataclass(frozen=True)
class Tried(Generic[Answered]):
    """What became of a request: an answer, or a fault of its own."""

    answer: Answered | None
    fault: Fault | None
    seconds: float
    """Of the last try, waits for the limits left out."""


class Attempts:
    """Makes requests in one process; belongs to one event loop."""

    def __init__(
        self,
        gate: GateService,
        settings: ServerSettings,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`clock` gives seconds from any origin."""
        self._gate, self._settings = gate, settings
        self._clock, self._sleep = clock, sleep
        self._holder = f"{platform.node()}/{os.getpid()}"
        self._calls = 0
        self._heart: asyncio.Task[None] | None = None
        self._returning: set[asyncio.Future[float | None]] = set()

    async def make(
        self, tokens: int, send: Callable[[str], Awaitable[Answered]], size: Callable[[Answered], int]
    ) -> Tried[Answered]:
        """One request of about so many tokens. `send` is given the key and raises EndpointFault; `size` gives an answer's tokens.

        Raises InfrastructureError when the request must be repeated, or cannot be.
        """
        self._calls += 1
        if self._heart is None or self._heart.done():
            self._heart = asyncio.create_task(self._beat())
        try:
            return await self._make(tokens, send, size)
        finally:
            self._calls -= 1

    async def _beat(self) -> None:
        """Say that this worker lives while it has calls; if nobody can be told, the calls find out."""
        while self._calls:
            with contextlib.suppress(InfrastructureError):
                await self._gate.hear(self._holder)
            await asyncio.sleep(HEARTBEAT_S)

    async def _make(
        self, tokens: int, send: Callable[[str], Awaitable[Answered]], size: Callable[[Answered], int]
    ) -> Tried[Answered]:
        retries = Retries(self._settings)
        swaps = 0
        while True:
            admission = await self._admit(tokens)
            began = self._clock()
            how = Settlement(verdict="failed")
            fault: Fault | None = None
            try:
                answer = await send(admission.key.get_secret_value())
                how = Settlement(verdict="answered", tokens=size(answer))
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
                return Tried(answer, None, seconds)
            if fault.kind in _OF_THIS_CALL:
                return Tried(None, fault, seconds)
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

    def close(self) -> None:
        """Nothing is said to the gate any more."""
        if self._heart is not None:
            self._heart.cancel()

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


def _without(fault: Fault, key: str) -> Fault:
    """The fault without the key, should the server have repeated it."""
    return fault.model_copy(update={"detail": fault.detail.replace(key, "…")}) if key else fault
