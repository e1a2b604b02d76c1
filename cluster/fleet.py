"""The engine pool as one pure state machine: health, routing, restart budgets, elasticity, weights; no Ray, clock or network.

Events go in as method calls with the time `now` in seconds of any monotonic clock; every event returns the wants that
follow from it, to be carried out in order (cluster/fleet_events.py). What concerns an engine is in
cluster/engine_lives.py, what concerns a request is here. Always: a ticket is answered once, by Grant or
Refuse; a grant names an engine that serves (HEALTHY, or SUSPECT) and holds the fleet's weights and the ticket's adapter;
an engine is restarted at most `restarts` times for faults of its own; answers about earlier incarnations change nothing.

The fleet opens with `replicas` engines. Later it starts engines where nodes have room, up to `maximum`, and empties
those whose nodes are drained. An engine number leaves with its node; a restart after a crash keeps it.
Below `minimum` serving engines the fleet is paused, which `view` says; running steps go on as far as engines serve. Only when
nothing can come back, or nothing came back for `pause_timeout_s`, every ticket is refused with `no-engine`.
"""

from collections import Counter

from cluster.concurrency import Concurrency
from cluster.config import ConcurrencySettings
from cluster.engine_lives import PROBE_EVERY_S, EngineLives
from cluster.fleet_engine import FleetEngine
from cluster.fleet_events import Checkpoint, FleetRules, Grant, Refuse, Want
from cluster.pool_view import PoolView
from cluster.tickets import TICKET_GRACE_S, Ticket

FIGURES_STALE_S = 15.0
"""Figures older than this say nothing about an engine's load now."""


class Fleet(EngineLives):
    """All engines of a pool, and all requests that wait for one or have one."""

    def __init__(self, rules: FleetRules, concurrency: ConcurrencySettings, weights: Checkpoint) -> None:
        """Nothing is wanted before `open`."""
        super().__init__(rules, weights)
        self._concurrency = Concurrency(concurrency)
        self._observe_at = float("-inf")
        self._steps = 0

    # What is known of it.

    @property
    def opening(self) -> bool:
        """Whether the engines of the start are still awaited."""
        return self._standing.opening

    @property
    def hopeless(self) -> tuple[str, str] | None:
        """(reason, detail) once no ticket will be granted any more."""
        return self._standing.hopeless

    @property
    def weights(self) -> Checkpoint:
        """What is to be served."""
        return self._holdings.weights

    @property
    def draining(self) -> frozenset[str]:
        """Nodes that are being emptied."""
        return frozenset(self._rooms.draining)

    @property
    def swap_fault(self) -> str:
        """Why the last swap was taken back; empty if it was not."""
        return self._holdings.swap_fault

    def refused(self, adapter: str) -> str | None:
        """Why no engine takes an adapter, if so."""
        return self._holdings.refused(adapter)

    def outstanding(self, engine: int) -> int:
        """Tokens granted to an engine and not yet answered."""
        return self._tickets.router.outstanding(engine)

    def sessions(self) -> dict[str, int]:
        """Engine by session."""
        return self._tickets.router.sessions

    def waiting(self) -> frozenset[str]:
        """Tickets not yet answered."""
        return frozenset(self._tickets.waiting)

    def granted(self) -> dict[str, int]:
        """Engine by ticket whose end has not been said."""
        return {name: ticket.engine for name, ticket in self._tickets.granted.items()}

    def view(self) -> PoolView:
        """What the pool says of itself."""
        sessions = Counter(self.sessions().values())
        others = ", ".join(
            f"engine {e.number} is {e.health.state}" for e in self._engines.values() if not e.health.serves
        )
        return PoolView(
            engines=tuple(e.view(sessions[e.number], self.outstanding(e.number)) for e in self._engines.values()),
            limit=self._concurrency.limit(self._serving),
            paused=self._standing.paused(self._serving, others),
            lost="" if self.hopeless is None else self.hopeless[1],
        )

    # Requests.

    def open(self, now: float) -> tuple[Want, ...]:
        """Start the engines of the beginning. The first failure of a start is final until the fleet has opened."""
        self._standing.opening = True
        for _ in range(self._rules.replicas):
            self._add(now)
        return self._settle(now)

    def assign(
        self, ticket: str, session: str, tokens: int, now: float, adapter: str = "", caller: str = ""
    ) -> tuple[Want, ...]:
        """A request of `tokens` (prompt plus room for the answer) wants an engine; answered now or later, once.

        Raises RuntimeError if the ticket is in use.
        """
        self._tickets.add(ticket, Ticket(session, tokens, adapter, caller))
        self._serve_one(ticket, now)
        return self._take()

    def finished(self, ticket: str, now: float) -> tuple[Want, ...]:
        """A granted request came back whole."""
        engine = self._give_back(ticket)
        if engine is None:
            return ()
        engine.health.request_succeeded()
        self._judge(engine, "", now)
        return self._hot(engine, now)

    def failed(self, ticket: str, reason: str, detail: str, now: float) -> tuple[Want, ...]:
        """A granted request failed: `engine-lost` proves its engine dead; `engine-time-out` and `engine-unreachable` speak
        against it, `engine-full` does not; after these three the session's next call goes elsewhere. Any other reason says nothing."""
        held = self._tickets.granted.get(ticket)
        engine = self._give_back(ticket)
        if engine is None or held is None:
            return ()
        if reason == "engine-lost":
            self._standing.note(reason, detail)
            self._bury(engine, f"{reason}: {detail}", True, now)
            return self._settle(now)
        if reason in ("engine-time-out", "engine-unreachable", "engine-full"):
            self._tickets.router.move(held.session, engine.number)
        if reason in ("engine-time-out", "engine-unreachable"):
            engine.health.request_failed()
            self._judge(engine, "", now)
        return self._hot(engine, now)

    def cancelled(self, ticket: str, now: float) -> tuple[Want, ...]:
        """The caller gave up, waiting or granted; a granted request is aborted at its engine."""
        engine = self._cancel(ticket)
        return () if engine is None else self._hot(engine, now)

    def steps(self, in_flight: int) -> None:
        """So many steps are in flight: only their driver knows, since a step is also in flight while its tools run, and a session that is
        remembered need not be."""
        self._steps = in_flight

    def release(self, session: str) -> None:
        """A session has ended; what is unknown is ignored."""
        self._tickets.router.release(session)

    def callers(self) -> frozenset[str]:
        """Who waits for an answer now."""
        return self._tickets.callers()

    def caller_gone(self, caller: str, now: float) -> tuple[Want, ...]:
        """A caller died: its requests are aborted. Its sessions stay, since others may go on with them."""
        for name in self._tickets.of_caller(caller):
            self._cancel(name)
        return self._settle(now)

    # Time.

    def tick(self, now: float) -> tuple[Want, ...]:
        """Time has passed: probes, deadlines, restarts. To be called about once a second."""
        for engine in list(self._engines.values()):
            self._tick_engine(engine, now)
        for name in self._tickets.overdue(now):
            self._cancel(name)
        if now >= self._observe_at:
            self._observe_at = now + PROBE_EVERY_S
            self._observe(now)
        return self._settle(now)

    def close(self, now: float, reason: str = "pool-stopped", detail: str = "it was asked to") -> tuple[Want, ...]:
        """The pool is ended: every engine ends, every ticket is refused from now on."""
        self._standing.close(reason, detail)
        for engine in list(self._engines.values()):
            self._retire(engine, "the pool is stopped", gentle=not engine.tickets)
        self._serve(now)
        return self._take()

    # Inside.

    def _cancel(self, ticket: str) -> FleetEngine | None:
        """Forget a ticket; the engine where it was running, if it was."""
        if self._tickets.waiting.pop(ticket, None) is not None:
            return None
        return self._abort(ticket)

    def _hot(self, engine: FleetEngine, now: float) -> tuple[Want, ...]:
        """The end of an event that comes with every request: only an engine that is being emptied can move on by it."""
        return self._settle(now) if engine.health.state == "DRAINING" else self._take()

    def _serve(self, now: float) -> None:
        for ticket in list(self._tickets.waiting):
            self._serve_one(ticket, now)

    def _serve_one(self, name: str, now: float) -> None:
        adapter = self._tickets.waiting[name].adapter
        refusal = self.hopeless or self._holdings.refusal(adapter)
        if refusal is not None:
            del self._tickets.waiting[name]
            self._wants.append(Refuse(ticket=name, reason=refusal[0], detail=refusal[1]))
            return
        able = {e.number for e in self._engines.values() if adapter in e.adapters} if adapter else None
        number = self._tickets.grant(name, able, now + self._rules.call_timeout_s + TICKET_GRACE_S)
        if number is None:
            return
        engine = self._engines[number]
        engine.tickets[name] = None
        self._wants.append(Grant(ticket=name, engine=number, incarnation=engine.incarnation))

    def _observe(self, now: float) -> None:
        serving = [e for e in self._engines.values() if e.health.serves]
        fresh = {
            e.identity: e.figures for e in serving if e.figures is not None and now - e.figures_at <= FIGURES_STALE_S
        }
        self._concurrency.observe(fresh, [e.identity for e in serving], self._steps)

    def _settle(self, now: float) -> tuple[Want, ...]:
        """Advance everything that follows without a further event."""
        self._swap_step(now)
        for engine in [e for e in self._engines.values() if e.health.state == "DRAINING"]:
            if not engine.tickets or now >= engine.drain_until:
                self._emptied(engine, now)
        if not self.opening and self.hopeless is None:
            for engine in self._engines.values():
                if engine.health.state == "DEAD" and engine.health.may_start and now >= engine.restart_at:
                    self._start(engine, now)
            self._grow(now)
        self._assess(now)
        self._serve(now)
        return self._take()

    def _assess(self, now: float) -> None:
        engines = self._engines.values()
        pending = any(e.health.state in ("RESTARTING", "STALE") for e in engines)
        self._standing.assess(self._serving, pending, sum(e.lost for e in engines), now)

    def _take(self) -> tuple[Want, ...]:
        wants, self._wants = tuple(self._wants), []
        return wants
