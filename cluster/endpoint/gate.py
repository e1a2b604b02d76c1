"""Which request may start now: keys, rates and the bound on requests in flight, as one pure state machine.

Every permit ends once: when its request is settled, when its lease runs out, or when its holder, a worker, has been silent for
so long that it must be dead.
The state machine knows neither secrets nor clocks: keys are numbers, and every question brings the time.
"""

import dataclasses
from typing import Literal

from cluster.config import ServerSettings
from cluster.endpoint.keys import KeyPool
from cluster.endpoint.rates import RateLimit
from cluster.record import Record

LEASE_MARGIN_S = 60.0
"""How much longer than the longest call a permit lives that nobody settles."""
SILENCE_S = 60.0
"""A worker from which nothing was heard for so long is dead, and what it holds is free again."""

Verdict = Literal["answered", "limited", "refused", "failed"]
"""`limited`: the key must rest. `refused`: the key is not accepted. `failed`: anything else, abandoned calls included."""


class Permit(Record):
    """One request may start, with this key."""

    number: int
    key: int
    holder: str = ""
    """The worker."""


class Settlement(Record):
    """How a request ended."""

    verdict: Verdict
    tokens: int | None = None
    """Input and output together; None if they are not known."""
    rest_s: float = 0.0
    """For `limited`: how long the key is to rest."""
    detail: str = ""
    """For `refused`: what the server said."""


@dataclasses.dataclass(frozen=True)
class Delay:
    """Nothing may start now. Ask again after so many seconds, or when a request was settled; None: only then."""

    seconds: float | None


@dataclasses.dataclass(frozen=True)
class NoKey:
    """Every key was refused: nothing will ever start again."""

    refusals: tuple[str, ...]


class Gate:
    """The limits of one run."""

    def __init__(self, keys: int, settings: ServerSettings) -> None:
        self._keys = KeyPool(keys)
        self._rates = RateLimit(settings.requests_per_minute, settings.tokens_per_minute)
        self._parallel = settings.parallel
        self._lease_s = settings.call_timeout_s + LEASE_MARGIN_S
        self._running: dict[int, tuple[Permit, float]] = {}
        self._heard: dict[str, float] = {}
        self._numbers = 0

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._running)

    def hear(self, now: float, holder: str) -> None:
        """The worker lives."""
        self._heard[holder] = now

    def lives(self, now: float, holder: str) -> bool:
        """Whether something was heard of the worker lately."""
        return self._heard.get(holder, now) + SILENCE_S > now

    def ask(self, now: float, tokens: int, holder: str = "") -> Permit | Delay | NoKey:
        """A permit for a worker's request of about so many tokens, or why there is none now."""
        self._expire(now)
        if self._keys.spent:
            return NoKey(tuple(self._keys.refusals))
        if len(self._running) >= self._parallel:
            return Delay(self._first_expiry(now))
        if wait := self._rates.wait_s(now, tokens):
            return Delay(wait)
        key = self._keys.pick(now)
        if key is None:
            waits = [w for w in (self._keys.wait_s(now), self._first_expiry(now)) if w is not None]
            return Delay(min(waits, default=None))
        self._numbers += 1
        self._keys.start(key)
        self._rates.start(self._numbers, now, tokens)
        permit = Permit(number=self._numbers, key=key, holder=holder)
        self._running[permit.number] = (permit, now + self._lease_s)
        return permit

    def settle(self, now: float, permit: Permit, how: Settlement) -> None:
        """A request has ended. Without effect for a permit that was settled, or whose lease ran out."""
        if self._running.pop(permit.number, None) is None:
            return
        self._keys.end(permit.key)
        if how.tokens is not None:
            self._rates.correct(permit.number, how.tokens)
        if how.verdict == "answered":
            self._keys.succeed(permit.key, now)
        elif how.verdict == "limited":
            self._keys.rest(permit.key, now + how.rest_s)
        elif how.verdict == "refused":
            self._keys.refuse(permit.key, how.detail)

    def others(self, permit: Permit) -> int:
        """Keys besides the permit's that were not refused."""
        return self._keys.others(permit.key)

    def key_wait_s(self, now: float) -> float | None:
        """Seconds until some key may serve, as far as time decides it: 0 at once, None if another request must end first."""
        return 0.0 if self._keys.pick(now) is not None else self._keys.wait_s(now)

    def _expire(self, now: float) -> None:
        for permit in [p for p, _ in self._running.values() if self._expiry(p) <= now]:
            del self._running[permit.number]
            self._keys.end(permit.key)

    def _first_expiry(self, now: float) -> float | None:
        return min((self._expiry(permit) - now for permit, _ in self._running.values()), default=None)

    def _expiry(self, permit: Permit) -> float:
        _, until = self._running[permit.number]
        heard = self._heard.get(permit.holder)
        return until if heard is None else min(until, heard + SILENCE_S)
