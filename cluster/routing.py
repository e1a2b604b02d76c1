"""Which engine serves which session: a pure state machine, without Ray, clock or network.

A session stays with its engine (prefix cache) until it is released, its engine closes, or it is young and its engine is
far above the others. A session's first call goes to the engine with the fewest outstanding tokens; ties rotate, so that
a burst of equal sessions spreads over all engines. An engine that is not open is never chosen.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass

SESSIONS_KEPT = 50_000
"""Idle sessions that are remembered: a chain whose step was given up never says so, and must not stay for ever. The one that called
longest ago is forgotten first, which costs it a cold prefix cache and nothing else."""
SHED_FACTOR = 2.0
"""An engine with this many times the mean outstanding tokens of the other open ones is far above it."""
SHED_TOKENS = 16_384
"""And at least this many tokens above it, so that nothing moves among engines that are all but idle."""
YOUNG_CALLS = 2
"""A session with fewer calls behind it is new: its cached prefix is short, and moving it costs little."""


@dataclass
class _Pin:
    engine: int
    calls: int = 0
    running: int = 0


class Router:
    """Sticky assignment of sessions to engines, with outstanding tokens per engine."""

    def __init__(self, engines: Iterable[int] = (), sessions_kept: int = SESSIONS_KEPT) -> None:
        """All `engines` are open at first."""
        self._outstanding: dict[int, int] = {}
        self._open: set[int] = set()
        self._held: set[int] = set()
        self._pins: OrderedDict[str, _Pin] = OrderedDict()
        self._kept = sessions_kept
        self._last = -1
        for engine in engines:
            self.admit(engine)

    @property
    def serving(self) -> frozenset[int]:
        """Engines that may be chosen."""
        return frozenset(self._open | self._held)

    @property
    def sessions(self) -> dict[str, int]:
        """Engine by session."""
        return {session: pin.engine for session, pin in self._pins.items()}

    def outstanding(self, engine: int) -> int:
        """Tokens asked of an engine and not yet answered; 0 for one that is not known."""
        return self._outstanding.get(engine, 0)

    def admit(self, engine: int) -> None:
        """An engine serves pinned and new sessions."""
        self._outstanding.setdefault(engine, 0)
        self._held.discard(engine)
        self._open.add(engine)

    def hold(self, engine: int) -> None:
        """An engine serves the sessions it has, and new ones only where no engine is open."""
        self._outstanding.setdefault(engine, 0)
        self._open.discard(engine)
        self._held.add(engine)

    def close(self, engine: int) -> None:
        """An engine gets no more calls; its sessions are pinned anew at their next one, its running calls still count."""
        self._open.discard(engine)
        self._held.discard(engine)
        for session in [s for s, pin in self._pins.items() if pin.engine == engine]:
            del self._pins[session]

    def remove(self, engine: int) -> None:
        """An engine is gone with the calls it had."""
        self.close(engine)
        self._outstanding.pop(engine, None)

    def assign(self, session: str, tokens: int, able: Container[int] | None = None) -> int | None:
        """The engine for a call of `tokens` (prompt plus room for the answer); None while no engine may serve it.

        `able`: the engines that hold what the call needs; None: all do.
        """
        pin = self._pins.get(session)
        if pin is None or (able is not None and pin.engine not in able) or self._sheds(pin):
            engine = self._choose(able)
            if engine is None:
                return None
            if pin is None or pin.engine != engine:
                pin = self._pins[session] = _Pin(engine)
        pin.calls += 1
        pin.running += 1
        self._pins.move_to_end(session)
        self._outstanding[pin.engine] += tokens
        self._forget()
        return pin.engine

    def finish(self, session: str, engine: int, tokens: int) -> None:
        """A call has ended, well or not; of an engine that was removed it is ignored."""
        if engine in self._outstanding:
            self._outstanding[engine] = max(0, self._outstanding[engine] - tokens)
        pin = self._pins.get(session)
        if pin is not None and pin.engine == engine:
            pin.running = max(0, pin.running - 1)

    def move(self, session: str, engine: int) -> None:
        """A session's call failed at an engine that may be at fault: its next one goes elsewhere, if another engine is open."""
        pin = self._pins.get(session)
        if pin is None or pin.engine != engine:
            return
        other = self._choose(self._open - {engine})
        if other is not None:
            self._pins[session] = _Pin(other)

    def release(self, session: str) -> None:
        """A session has ended; unknown sessions are ignored."""
        self._pins.pop(session, None)

    def _sheds(self, pin: _Pin) -> bool:
        """Whether a pinned session is to leave its engine, because that is overloaded and the session is new."""
        others = self._open - {pin.engine}
        if pin.running or pin.calls >= YOUNG_CALLS or not others:
            return False
        mean = sum(self._outstanding[e] for e in others) / len(others)
        own = self._outstanding[pin.engine]
        return own > SHED_FACTOR * mean and own > mean + SHED_TOKENS

    def _choose(self, able: Container[int] | None) -> int | None:
        for engines in (self._open, self._held):
            fit = engines if able is None else {e for e in engines if e in able}
            if fit:
                size = max(self._outstanding) + 1
                engine = min(fit, key=lambda e: (self._outstanding[e], (e - self._last - 1) % size))
                self._last = engine
                return engine
        return None

    def _forget(self) -> None:
        for _ in range(len(self._pins) - self._kept):
            session, pin = next(iter(self._pins.items()))
            if pin.running:
                self._pins.move_to_end(session)
            else:
                del self._pins[session]
