"""What the fleet machine says it wants, and the rules it decides by: values without behaviour.

Whoever drives the fleet (Ray, a simulator) carries out each want and answers with the event that the want names.
An engine is named by its number and its incarnation, which counts its starts: an answer about an earlier one is ignored.
"""

from cluster.config import EngineSettings
from cluster.record import Record


class Checkpoint(Record):
    """A checkpoint that engines are to serve."""

    path: str
    fingerprint: str


class Adapter(Record):
    """A LoRA adapter that every engine is to hold."""

    name: str
    path: str
    fingerprint: str = ""
    """As engines say it once they hold it over the fleet's weights; empty until a first one does, then the same for all."""


class Start(Record):
    """Place an engine, start it, answer `placed` and then `started`, or `not_started`."""

    engine: int
    incarnation: int
    weights: Checkpoint
    """What to load; whether it did is asked again by Confirm."""
    avoid: frozenset[str]
    """Nodes that are being emptied: not to be placed there."""


class Confirm(Record):
    """Make the engine hold exactly these weights and these adapters (reload what differs); answer `confirmed`,
    `not_confirmed`, or `adapter_refused`."""

    engine: int
    incarnation: int
    weights: Checkpoint
    adapters: tuple[Adapter, ...]


class Probe(Record):
    """Ask the engine for its figures; answer `answered`, `died`, or nothing. A late answer is welcome too."""

    engine: int
    incarnation: int


class Grant(Record):
    """The ticket's request may go to this engine; answer `finished`, `failed` or `cancelled`."""

    ticket: str
    engine: int
    incarnation: int


class Refuse(Record):
    """The ticket will never be granted; no answer."""

    ticket: str
    reason: str
    """`no-engine`: nothing can come back. `pool-stopped`: the pool is ended. `adapter-unknown`, `adapter-refused`: no engine
    holds what the request names."""
    detail: str


class Abort(Record):
    """Abort the ticket's request at the engine, if it is still there; no answer."""

    engine: int
    incarnation: int
    ticket: str


class End(Record):
    """End the engine's process, if there is one, and give its place back; no answer."""

    engine: int
    incarnation: int
    gentle: bool
    """It is empty and may end by itself; otherwise it is killed."""
    why: str
    """For the log."""


Want = Start | Confirm | Probe | Grant | Refuse | Abort | End


class FleetRules(Record):
    """What the fleet decides by; seconds unless said otherwise."""

    replicas: int
    minimum: int
    """Serving engines below which the pool is paused."""
    opening_minimum: int
    """Serving engines without which the pool does not open."""
    maximum: int
    restarts: int
    placement_timeout_s: float
    start_timeout_s: float
    """For a start and for a confirmation."""
    call_timeout_s: float
    drain_timeout_s: float
    pause_timeout_s: float


def fleet_rules(settings: EngineSettings, placement_timeout_s: float) -> FleetRules:
    """The rules that a run's settings mean."""
    return FleetRules(
        replicas=settings.replicas,
        minimum=settings.minimum or 1,
        opening_minimum=settings.minimum or settings.replicas,
        maximum=settings.maximum or settings.replicas,
        restarts=settings.restarts,
        placement_timeout_s=placement_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        call_timeout_s=settings.request_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        pause_timeout_s=settings.pause_timeout_s,
    )
