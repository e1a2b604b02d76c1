"""Which engine serves which session: a pure state machine, without Ray, clock or network.

A session stays with its engine (prefix cache) until it is released or the engine dies. A session's first call goes to
the engine with the fewest outstanding tokens; ties rotate, so that a burst of equal sessions spreads over all engines.
"""

from collections.abc import Iterable


class Router:
    """Sticky assignment of sessions to engines, with outstanding tokens per engine."""

    def __init__(self, engines: Iterable[int]) -> None:
        self._outstanding: dict[int, int] = dict.fromkeys(engines, 0)
        self._alive: set[int] = set(self._outstanding)
        self._sessions: dict[str, int] = {}
        self._last = -1

    @property
    def alive(self) -> frozenset[int]:
        """Engines that may serve."""
        return frozenset(self._alive)

    @property
    def sessions(self) -> dict[str, int]:
        """Engine by session."""
        return dict(self._sessions)

    def outstanding(self, engine: int) -> int:
        """Tokens asked of an engine and not yet answered."""
        return self._outstanding[engine]

    def assign(self, session: str, tokens: int) -> int | None:
        """The engine for a call of `tokens` (prompt plus room for the answer); None while no engine is alive."""
        engine = self._sessions.get(session)
        if engine is None:
            engine = self._choose()
            if engine is None:
                return None
            self._sessions[session] = engine
        self._outstanding[engine] += tokens
        return engine

    def finish(self, engine: int, tokens: int) -> None:
        """A call has ended, well or not."""
        if engine in self._outstanding:
            self._outstanding[engine] = max(0, self._outstanding[engine] - tokens)

    def release(self, session: str) -> None:
        """A session has ended; unknown sessions are ignored."""
        self._sessions.pop(session, None)

    def died(self, engine: int) -> None:
        """An engine is gone: its sessions are pinned anew at their next call."""
        self._alive.discard(engine)
        self._outstanding[engine] = 0
        self._sessions = {s: e for s, e in self._sessions.items() if e != engine}

    def revived(self, engine: int) -> None:
        """An engine may serve (again)."""
        self._outstanding[engine] = 0
        self._alive.add(engine)

    def _choose(self) -> int | None:
        if not self._alive:
            return None
        size = max(self._outstanding) + 1
        engine = min(self._alive, key=lambda e: (self._outstanding[e], (e - self._last - 1) % size))
        self._last = engine
        return engine
