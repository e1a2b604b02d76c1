"""Which request may start now: keys, rates and the bound on requests in flight, as one pure state machine.

Every permit ends once: when its request is settled, or when its lease runs out because the worker that held it died.
The state machine knows neither secrets nor clocks: keys are numbers, and every question brings the time.
"""

import dataclasses
from typing import Literal

from cluster.config import EndpointSettings
from cluster.endpoint.keys import KeyPool
from cluster.endpoint.rates import RateLimit
from cluster.record import Record

LEASE_MARGIN_S = 60.0
"""How much longer than the longest call a permit lives that nobody settles."""

Verdict = Literal["answered", "limited", "refused", "failed"]
"""`limited`: the key must rest. `refused`: the key is not accepted. `failed`: anything else, abandoned calls included."""


class Permit(Record):
    """One request may start, with this key."""

    number: int
    key: int


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

    def __init__(self, keys: int, settings: EndpointSettings) -> None:
        self._keys = KeyPool(keys)
        self._rates = RateLimit(settings.requests_per_minute, settings.tokens_per_minute)
        self._parallel = settings.parallel
        self._lease_s = settings.call_timeout_s + LEASE_MARGIN_S
        self._running: dict[int, tuple[int, float]] = {}
        self._numbers = 0

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._running)

    def ask(self, now: float, tokens: int) -> Permit | Delay | NoKey:
        """A permit for a request of about so many tokens, or why there is none now."""
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
        self._running[self._numbers] = (key, now + self._lease_s)
        return Permit(number=self._numbers, key=key)

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
        for number in [n for n, (_, until) in self._running.items() if until <= now]:
            key, _ = self._running.pop(number)
            self._keys.end(key)

    def _first_expiry(self, now: float) -> float | None:
        return min((until - now for _, until in self._running.values()), default=None)
