"""One engine as the fleet knows it: its health, its process, what it holds and what it is doing."""

from dataclasses import dataclass, field

from cluster.call import EngineFigures
from cluster.fleet_events import Checkpoint, Confirm
from cluster.health import Health
from cluster.pool_view import EngineView


@dataclass
class FleetEngine:
    """A number leaves with its node; a restart after a crash keeps it and counts the incarnation up."""

    number: int
    health: Health
    incarnation: int = 0
    nodes: frozenset[str] = frozenset()
    died_on: frozenset[str] = frozenset()
    """Where it was when it last died."""
    loads: Checkpoint | None = None
    """What its process was started with."""
    weights: Checkpoint | None = None
    """What it is known to hold."""
    adapters: dict[str, str] = field(default_factory=dict)
    alive: bool = False
    """There is a process, or one is being started."""
    asked: Confirm | None = None
    """The confirmation that is awaited."""
    due: float = float("inf")
    """When the start or confirmation that is awaited is given up."""
    restart_at: float = float("inf")
    drain_until: float = float("inf")
    leaving: bool = False
    """It ends once it is empty."""
    figures: EngineFigures | None = None
    figures_at: float = float("-inf")
    probed_at: float = float("-inf")
    """When it was last probed, or the probe last counted as late."""
    probing: bool = False
    tickets: dict[str, None] = field(default_factory=dict)
    """Granted and not ended, in order."""

    def clear(self) -> None:
        """Nothing of its last process is left."""
        self.alive = self.probing = False
        self.died_on, self.nodes = self.nodes or self.died_on, frozenset()
        self.weights, self.adapters = None, {}
        self.asked = self.figures = None
        self.due = self.restart_at = self.drain_until = float("inf")
        self.figures_at = self.probed_at = float("-inf")
        self.tickets = {}

    @property
    def identity(self) -> tuple[int, int]:
        """Number and incarnation: what an answer must name to count."""
        return self.number, self.incarnation

    @property
    def lost(self) -> bool:
        """It is dead and may not be started again."""
        return self.health.state == "DEAD" and not self.health.may_start

    def view(self, sessions: int, outstanding_tokens: int) -> EngineView:
        """What the pool says of it."""
        figures = self.figures
        return EngineView(
            engine=self.number,
            state=self.health.state,
            node=",".join(sorted(self.nodes)),
            sessions=sessions,
            outstanding_tokens=outstanding_tokens,
            running=figures.running if figures else 0,
            waiting=figures.waiting if figures else 0,
            kv_cache_use=figures.kv_cache_use if figures else 0.0,
            restarts=self.health.restarts,
            weights=self.weights.fingerprint if self.weights else "",
        )
