"""What the engine pool says of itself at one moment: to the coordinator, to `pastcast status`, to metrics."""

from typing import Literal, Protocol

from cluster.record import Record

EngineState = Literal["HEALTHY", "SUSPECT", "DEAD", "RESTARTING", "STALE", "DRAINING"]


class EngineView(Record):
    """One replica."""

    engine: int
    state: EngineState
    node: str
    sessions: int
    outstanding_tokens: int
    running: int
    """Requests that the engine decodes now."""
    waiting: int
    """Requests that the engine has not begun."""
    kv_cache_use: float
    """Share of the KV cache in use, from 0 to 1."""
    restarts: int
    weights: str
    """Fingerprint; empty until it is confirmed."""


class PoolView(Record):
    """The whole pool."""

    engines: tuple[EngineView, ...]
    limit: int
    """Steps that may be in flight now, over all workers (adaptive concurrency)."""
    paused: str
    """Why no step should be started now; empty if nothing hinders."""
    lost: str = ""
    """Why no engine will ever serve again; empty while one may."""


class PoolLink(Protocol):
    """What a run's driver needs of the engines, or of what stands for them."""

    async def view(self, in_flight: int, /) -> PoolView:
        """What the pool says of itself, told how many steps are in flight. Raises InfrastructureError."""
        ...

    async def release(self, session: str, /) -> None:
        """A session has ended whose worker could not say so. Never raises."""
        ...
