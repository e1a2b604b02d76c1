"""The engine pool as one pure state machine: health, routing, restart budgets, elasticity, weights; no Ray, clock or network.

Events go in as method calls with the time `now` in seconds of any monotonic clock; every event returns the wants that
follow from it, to be carried out in order (cluster/fleet_events.py). Always: a ticket is answered once, by Grant or
Refuse; a grant names an engine that serves (HEALTHY, or SUSPECT) and holds the fleet's weights and the ticket's adapter;
an engine is restarted at most `restarts` times for faults of its own; answers about earlier incarnations change nothing.

The fleet opens with `replicas` engines. Later it starts engines where nodes have room, up to `maximum`, and empties
those whose nodes are drained. An engine number leaves with its node; a restart after a crash keeps it.
Below `minimum` serving engines the fleet is paused, which `view` says; running steps go on as far as engines serve. Only when
nothing can come back, or nothing came back for `pause_timeout_s`, every ticket is refused with `no-engine`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cluster.call import EngineFigures
from cluster.concurrency import Concurrency
from cluster.config import ConcurrencySettings
from cluster.fleet_events import Abort, Adapter, Checkpoint, Confirm, End, FleetRules, Grant, Probe, Refuse, Start, Want
from cluster.health import RUNNING, Health, ProbeResult
from cluster.pool_view import EngineView, PoolView
from cluster.routing import Router

PROBE_EVERY_S = 5.0
"""Between two probes of an engine: figures are this fresh, and a probe costs next to nothing."""
PROBE_LATE_S = 10.0
"""A probe without an answer for this long counts as late, and so does every further such span."""
FIGURES_STALE_S = 15.0
"""Figures older than this say nothing about an engine's load now."""
BACKOFF_S = 1.0
"""Before the first restart of an engine; doubled with each further one."""
LONGEST_BACKOFF_S = 60.0
"""No restart waits longer."""
PLACE_AGAIN_S = 300.0
"""Between two attempts to place an engine for which no room is seen: the demand alone may make an autoscaler bring a node."""
TICKET_GRACE_S = 60.0
"""A granted ticket this long past its call's time-out has lost its caller: the engine itself has ended the call by then."""


@dataclass
class _Engine:
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
        return self.number, self.incarnation

    @property
    def lost(self) -> bool:
        """It is dead and may not be started again."""
        return self.health.state == "DEAD" and not self.health.may_start


@dataclass(frozen=True)
class _Ticket:
    session: str
    tokens: int
    adapter: str
    caller: str
    engine: int = -1
    until: float = float("inf")


class Fleet:
    """All engines of a pool, and all requests that wait for one or have one."""

    def __init__(self, rules: FleetRules, concurrency: ConcurrencySettings, weights: Checkpoint) -> None:
        """Nothing is wanted before `open`."""
        self._rules = rules
        self._target = weights
        self._adapters: dict[str, Adapter] = {}
        self._refused_adapters: dict[str, str] = {}
        self._loaded: set[tuple[str, str]] = set()
        """Name and path of the adapters that some engine has held: they can be loaded."""
        self._former: tuple[Checkpoint, dict[str, Adapter]] | None = None
        self._brought: frozenset[str] = frozenset()
        """Adapters that the last swap brought along."""
        self._swap_fault = ""
        self._router = Router()
        self._concurrency = Concurrency(concurrency)
        self._engines: dict[int, _Engine] = {}
        self._next = 0
        self._waiting: dict[str, _Ticket] = {}
        self._granted: dict[str, _Ticket] = {}
        self._alive: frozenset[str] = frozenset()
        self._draining: set[str] = set()
        self._rooms = 0
        self._place_again_at = float("-inf")
        self._observe_at = float("-inf")
        self._opening = self._together = False
        self._paused_since: float | None = None
        self._first_fault = ("engine-start", "no engine came up")
        self._last_fault: tuple[str, str] | None = None
        self._hopeless: tuple[str, str] | None = None
        self._wants: list[Want] = []

    # What is known of it.

    @property
    def opening(self) -> bool:
        """Whether the engines of the start are still awaited."""
        return self._opening

    @property
    def hopeless(self) -> tuple[str, str] | None:
        """(reason, detail) once no ticket will be granted any more."""
        return self._hopeless

    @property
    def weights(self) -> Checkpoint:
        """What is to be served."""
        return self._target

    @property
    def draining(self) -> frozenset[str]:
        """Nodes that are being emptied."""
        return frozenset(self._draining)

    @property
    def swap_fault(self) -> str:
        """Why the last swap was taken back; empty if it was not."""
        return self._swap_fault

    @property
    def swapping(self) -> bool:
        """Whether an engine holds other weights or adapters than it is to, or is not confirmed yet, or too few serve."""
        moving = any(e.health.state in (*RUNNING, "STALE") and not self._fits(e) for e in self._engines.values())
        return moving or self._serving < self._rules.minimum

    def holds(self, adapter: str) -> bool:
        """Whether every serving engine holds an adapter."""
        serving = [e for e in self._engines.values() if e.health.serves]
        return bool(serving) and all(adapter in e.adapters for e in serving)

    def refused(self, adapter: str) -> str | None:
        """Why no engine takes an adapter, if so."""
        return self._refused_adapters.get(adapter)

    def outstanding(self, engine: int) -> int:
        """Tokens granted to an engine and not yet answered."""
        return self._router.outstanding(engine)

    def sessions(self) -> dict[str, int]:
        """Engine by session."""
        return self._router.sessions

    def waiting(self) -> frozenset[str]:
        """Tickets not yet answered."""
        return frozenset(self._waiting)

    def granted(self) -> dict[str, int]:
        """Engine by ticket whose end has not been said."""
        return {name: ticket.engine for name, ticket in self._granted.items()}

    def view(self) -> PoolView:
        """What the pool says of itself."""
        sessions: dict[int, int] = {}
        for engine in self._router.sessions.values():
            sessions[engine] = sessions.get(engine, 0) + 1
        return PoolView(
            engines=tuple(self._view(e, sessions.get(e.number, 0)) for e in self._engines.values()),
            limit=self._concurrency.limit(self._serving),
            paused=self._paused(),
            lost="" if self._hopeless is None else self._hopeless[1],
        )

    # Requests.

    def open(self, now: float) -> tuple[Want, ...]:
        """Start the engines of the beginning. The first failure of a start is final until the fleet has opened."""
        self._opening = True
        for _ in range(self._rules.replicas):
            self._add(now)
        return self._settle(now)

    def assign(
        self, ticket: str, session: str, tokens: int, now: float, adapter: str = "", caller: str = ""
    ) -> tuple[Want, ...]:
        """A request of `tokens` (prompt plus room for the answer) wants an engine; answered now or later, once.

        Raises RuntimeError if the ticket is in use.
        """
        if ticket in self._waiting or ticket in self._granted:
            raise RuntimeError(f"ticket {ticket} is in use")
        self._waiting[ticket] = _Ticket(session, tokens, adapter, caller)
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
        session = self._granted[ticket].session if ticket in self._granted else ""
        engine = self._give_back(ticket)
        if engine is None:
            return ()
        if reason == "engine-lost":
            self._note(reason, detail)
            self._bury(engine, f"{reason}: {detail}", True, now)
            return self._settle(now)
        if reason in ("engine-time-out", "engine-unreachable", "engine-full"):
            self._router.move(session, engine.number)
        if reason in ("engine-time-out", "engine-unreachable"):
            engine.health.request_failed()
            self._judge(engine, "", now)
        return self._hot(engine, now)

    def cancelled(self, ticket: str, now: float) -> tuple[Want, ...]:
        """The caller gave up, waiting or granted; a granted request is aborted at its engine."""
        engine = self._cancel(ticket)
        return () if engine is None else self._hot(engine, now)

    def release(self, session: str) -> None:
        """A session has ended; what is unknown is ignored."""
        self._router.release(session)

    def callers(self) -> frozenset[str]:
        """Who waits for an answer now."""
        return frozenset(t.caller for t in (*self._waiting.values(), *self._granted.values()) if t.caller)

    def caller_gone(self, caller: str, now: float) -> tuple[Want, ...]:
        """A caller died: its requests are aborted. Its sessions stay, since others may go on with them."""
        for name in [n for n, t in (*self._waiting.items(), *self._granted.items()) if t.caller == caller]:
            self._cancel(name)
        return self._settle(now)

    # Engines.

    def placed(self, engine: int, incarnation: int, nodes: Collection[str], now: float) -> tuple[Want, ...]:
        """An engine that is being started got its place, on these nodes."""
        found = self._current(engine, incarnation)
        if found is None or found.health.state != "RESTARTING":
            return ()
        found.nodes = frozenset(nodes)
        found.due = now + self._rules.start_timeout_s
        # Until the cluster is looked at again.
        self._rooms = max(0, self._rooms - 1)
        for node in found.nodes & self._draining:
            self._empty(node, self._rules.drain_timeout_s, now)
        return self._settle(now)

    def started(self, engine: int, incarnation: int, now: float) -> tuple[Want, ...]:
        """An engine that was started answers."""
        found = self._current(engine, incarnation)
        if found is None or found.health.state != "RESTARTING":
            return ()
        found.health.started()
        self._confirm(found, now)
        return self._settle(now)

    def not_started(self, engine: int, incarnation: int, reason: str, detail: str, now: float) -> tuple[Want, ...]:
        """A start failed. `placement-timeout` and `placement-scattered` are not the engine's fault and spend no restart."""
        found = self._current(engine, incarnation)
        if found is None or found.health.state != "RESTARTING":
            return ()
        self._note(reason, detail)
        unplaced = reason in ("placement-timeout", "placement-scattered")
        self._bury(found, f"{reason}: {detail}", not unplaced, now)
        if unplaced:
            self._place_again_at = found.restart_at = now + PLACE_AGAIN_S
            if found.incarnation == 1:
                del self._engines[found.number]
        return self._settle(now)

    def confirmed(self, want: Confirm, weights: str, adapters: Mapping[str, str], now: float) -> tuple[Want, ...]:
        """The answer to `want`: fingerprints of the weights and, by name, of the adapters that the engine holds."""
        found = self._current(want.engine, want.incarnation)
        if found is None or found.asked != want:
            return ()
        if (fault := self._difference(want, weights, adapters)) is not None:
            return self.not_confirmed(want, *fault, now)
        for adapter in want.adapters:
            self._loaded.add((adapter.name, adapter.path))
            if (known := self._adapters.get(adapter.name)) is not None and known.path == adapter.path:
                self._adapters[adapter.name] = known.model_copy(update={"fingerprint": adapters[adapter.name]})
        found.asked, found.due = None, float("inf")
        found.weights, found.adapters = want.weights, dict(adapters)
        if self._fits(found):
            self._former = None
        if self._lacks(found) and found.health.state != "DRAINING":
            self._confirm(found, now)
        elif found.health.state == "STALE":
            found.health.confirmed()
            found.probed_at = now
            self._route(found)
        return self._settle(now)

    def not_confirmed(self, want: Confirm, reason: str, detail: str, now: float) -> tuple[Want, ...]:
        """An engine could not be made to hold what `want` asks.

        `reload-failed` and `other-weights` say that it still holds its former weights."""
        found = self._current(want.engine, want.incarnation)
        if found is None or found.asked != want:
            return ()
        if reason not in ("reload-failed", "other-weights") or not self._take_back(detail, now):
            self._note(reason, detail)
            self._bury(found, f"{reason}: {detail}", True, now)
        return self._settle(now)

    def adapter_refused(self, want: Confirm, name: str, detail: str, now: float) -> tuple[Want, ...]:
        """An engine could not load one of the adapters. If an engine has ever held it, that is the engine's fault, else the
        adapter's; one that came with a swap takes the swap back."""
        found = self._current(want.engine, want.incarnation)
        if found is None or found.asked != want:
            return ()
        if any(a.name == name and (name, a.path) in self._loaded for a in want.adapters):
            return self.not_confirmed(want, "adapter-refused", f"{name}: {detail}", now)
        if name in self._brought and self._take_back(f"adapter {name}: {detail}", now):
            return self._settle(now)
        self._adapters.pop(name, None)
        self._refused_adapters[name] = detail
        self._confirm(found, now)
        return self._settle(now)

    def answered(self, engine: int, incarnation: int, figures: EngineFigures, now: float) -> tuple[Want, ...]:
        """An engine answered a probe."""
        found = self._current(engine, incarnation)
        if found is None:
            return ()
        before = found.figures.generated_tokens if found.figures else 0
        idle: ProbeResult = "stuck" if figures.running or figures.waiting else "idle"
        found.probing = False
        found.figures, found.figures_at = figures, now - figures.age_s
        found.health.probe_answered("moved" if figures.generated_tokens > before else idle)
        self._judge(found, "it answers, but generates nothing or fails its requests", now)
        return self._settle(now)

    def died(self, engine: int, incarnation: int, why: str, now: float) -> tuple[Want, ...]:
        """An engine's process is proved to be gone."""
        found = self._current(engine, incarnation)
        if found is None or found.health.state == "DEAD":
            return ()
        self._note("engine-lost", why)
        self._bury(found, why, True, now)
        return self._settle(now)

    # The cluster.

    def nodes_seen(
        self, alive: Collection[str], draining: Mapping[str, float | None], rooms: int, now: float
    ) -> tuple[Want, ...]:
        """The cluster as it is: nodes that live, nodes that leave (with the seconds left to them, where known), and how many
        more engines the free resources of the staying nodes would hold."""
        gone = self._alive - frozenset(alive)
        self._alive = frozenset(alive)
        self._draining = {n for n in self._draining if n in self._alive}
        self._rooms = rooms
        for engine in [e for e in self._engines.values() if e.nodes & gone]:
            self._retire(engine, f"its node {', '.join(sorted(engine.nodes & gone))} is gone", gentle=False)
        for engine in [e for e in self._engines.values() if e.died_on & gone]:
            # Its death was noticed before its node's.
            engine.died_on = frozenset()
            engine.health.excuse()
            if not engine.alive:
                engine.restart_at = now
        for node, left in draining.items():
            self._empty(node, self._rules.drain_timeout_s if left is None else left, now)
        return self._settle(now)

    def drain(self, node: str, now: float) -> tuple[Want, ...]:
        """Empty a node: its engines get no more requests, end once they have finished, and are not placed there again."""
        self._empty(node, self._rules.drain_timeout_s, now)
        return self._settle(now)

    # Checkpoint.

    def add_adapter(self, adapter: Adapter, now: float) -> tuple[Want, ...]:
        """Every engine, also those started later, is to hold an adapter. Engines go on serving while they load it."""
        if (known := self._adapters.get(adapter.name)) is not None and known.path != adapter.path:
            raise RuntimeError(f"adapter {adapter.name} is {known.path} already; give {adapter.path} another name")
        self._refused_adapters.pop(adapter.name, None)
        self._adapters.setdefault(adapter.name, adapter)
        for engine in self._engines.values():
            if engine.health.serves and engine.asked is None and self._lacks(engine):
                self._confirm(engine, now)
        return self._settle(now)

    def swap(
        self, weights: Checkpoint, together: bool, now: float, adapters: Collection[Adapter] = ()
    ) -> tuple[Want, ...]:
        """Serve another checkpoint: engines drain, reload and are confirmed, all together or one after another.

        One after another keeps the pool serving, but a step that moves between engines is then sampled by both checkpoints.
        Adapters belonged to the former checkpoint and are given up for `adapters`, also where the weights below them stay. If
        the first engine that tries fails or dies over the new checkpoint, or refuses one of `adapters`, the swap is taken back
        and `swap_fault` says why.
        """
        self._former, self._swap_fault = (self._target, dict(self._adapters)), ""
        self._together = together
        self._brought = frozenset(a.name for a in adapters)
        self._aim(weights, {a.name: a for a in adapters}, now)
        for engine in self._engines.values():
            if engine.health.serves and self._fits(engine):
                self._former = None
            elif engine.health.serves and engine.asked is None and self._lacks(engine):
                self._confirm(engine, now)
        return self._settle(now)

    # Time.

    def tick(self, now: float) -> tuple[Want, ...]:
        """Time has passed: probes, deadlines, restarts. To be called about once a second."""
        for engine in list(self._engines.values()):
            self._tick_engine(engine, now)
        for name in [n for n, t in self._granted.items() if now > t.until]:
            self._cancel(name)
        if now >= self._observe_at:
            self._observe_at = now + PROBE_EVERY_S
            self._observe(now)
        return self._settle(now)

    def close(self, now: float, reason: str = "pool-stopped", detail: str = "it was asked to") -> tuple[Want, ...]:
        """The pool is ended: every engine ends, every ticket is refused from now on."""
        self._hopeless = self._hopeless or (reason, detail)
        for engine in list(self._engines.values()):
            self._retire(engine, "the pool is stopped", gentle=not engine.tickets)
        self._serve(now)
        return self._take()

    # Inside.

    @property
    def _serving(self) -> int:
        return sum(e.health.serves for e in self._engines.values())

    def _outdated(self, engine: _Engine) -> bool:
        """Whether it holds something that is not to be served: other weights, or other bytes under an adapter's name."""
        if engine.weights is None or engine.weights.fingerprint != self._target.fingerprint:
            return True
        for name, fingerprint in engine.adapters.items():
            wanted = self._adapters.get(name)
            if wanted is None or wanted.fingerprint not in ("", fingerprint):
                return True
        return False

    def _fits(self, engine: _Engine) -> bool:
        """Whether it holds exactly what is to be served."""
        return not self._outdated(engine) and all(name in engine.adapters for name in self._adapters)

    def _lacks(self, engine: _Engine) -> bool:
        """Whether an engine is to be confirmed again; one that serves what it is not to is drained before that."""
        if self._outdated(engine):
            return engine.health.state == "STALE"
        return any(name not in engine.adapters for name in self._adapters)

    def _current(self, number: int, incarnation: int) -> _Engine | None:
        engine = self._engines.get(number)
        return engine if engine is not None and engine.incarnation == incarnation else None

    def _add(self, now: float) -> None:
        engine = _Engine(self._next, Health(self._rules.restarts))
        self._engines[engine.number] = engine
        self._next += 1
        self._start(engine, now)

    def _start(self, engine: _Engine, now: float) -> None:
        engine.health.start()
        engine.incarnation += 1
        engine.alive, engine.loads, engine.restart_at = True, self._target, float("inf")
        engine.due = now + self._rules.placement_timeout_s + self._rules.start_timeout_s
        self._wants.append(
            Start(
                engine=engine.number,
                incarnation=engine.incarnation,
                weights=self._target,
                avoid=frozenset(self._draining),
            )
        )

    def _take_back(self, why: str, now: float) -> bool:
        """Whether a swap was under way of which no engine has shown yet that its weights can be loaded; if so, it is over."""
        if self._former is None:
            return False
        (former, adapters), self._former = self._former, None
        self._swap_fault = why
        self._aim(former, adapters, now)
        return True

    def _aim(self, weights: Checkpoint, adapters: dict[str, Adapter], now: float) -> None:
        """Every engine is to hold these from now on."""
        self._target, self._adapters = weights, adapters
        for engine in self._engines.values():
            if engine.health.state == "STALE":
                self._confirm(engine, now)

    def _confirm(self, engine: _Engine, now: float) -> None:
        engine.asked = Confirm(
            engine=engine.number,
            incarnation=engine.incarnation,
            weights=engine.weights if engine.health.serves and engine.weights else self._target,
            adapters=tuple(self._adapters.values()),
        )
        engine.due = now + self._rules.start_timeout_s
        self._wants.append(engine.asked)

    def _bury(self, engine: _Engine, why: str, charged: bool, now: float) -> None:
        """An engine is dead; what it was doing is nobody's any more, and it may be started again."""
        if engine.leaving:
            self._retire(engine, why, gentle=False)
            return
        tried = engine.asked.weights if engine.asked else engine.loads
        if charged and engine.health.state in ("RESTARTING", "STALE") and tried == self._target:
            charged = not self._take_back(why, now)
        engine.health.died(charged)
        self._clear(engine)
        self._wants.append(End(engine=engine.number, incarnation=engine.incarnation, gentle=False, why=why))
        if engine.health.may_start:
            engine.restart_at = now + min(BACKOFF_S * 2.0**engine.health.restarts, LONGEST_BACKOFF_S)

    def _retire(self, engine: _Engine, why: str, gentle: bool) -> None:
        """An engine ends and is not started again under its number."""
        if engine.alive:
            self._wants.append(End(engine=engine.number, incarnation=engine.incarnation, gentle=gentle, why=why))
        engine.health.died(charged=False)
        self._clear(engine)
        del self._engines[engine.number]

    def _clear(self, engine: _Engine) -> None:
        for name in engine.tickets:
            del self._granted[name]
        self._router.remove(engine.number)
        engine.clear()

    def _empty(self, node: str, seconds: float, now: float) -> None:
        self._draining.add(node)
        for engine in [e for e in self._engines.values() if node in e.nodes]:
            until = now + min(seconds, self._rules.drain_timeout_s)
            engine.drain_until = min(engine.drain_until, until)
            if engine.leaving:
                continue
            engine.leaving = True
            if engine.health.serves:
                engine.health.drain()
                self._route(engine)
            elif engine.health.state != "DRAINING":
                self._retire(engine, f"its node {node} is being emptied", gentle=False)

    def _difference(self, want: Confirm, weights: str, adapters: Mapping[str, str]) -> tuple[str, str] | None:
        """(reason, detail) if an engine does not hold what it was asked to."""
        if weights != want.weights.fingerprint:
            return "other-weights", f"it holds weights {weights[:12]}, not {want.weights.fingerprint[:12]}"
        for wanted in want.adapters:
            found = adapters.get(wanted.name)
            known = self._adapters.get(wanted.name, wanted)
            # A swap meanwhile may have given the name to another one.
            expected = (known if known.path == wanted.path else wanted).fingerprint
            if found is None:
                return "other-adapter", f"it does not hold adapter {wanted.name}"
            if expected not in ("", found):
                return "other-adapter", f"its adapter {wanted.name} is {found[:12]}, not {expected[:12]}"
        return None

    def _cancel(self, ticket: str) -> _Engine | None:
        """Forget a ticket; the engine where it was running, if it was."""
        if self._waiting.pop(ticket, None) is not None:
            return None
        engine = self._give_back(ticket)
        if engine is not None:
            self._wants.append(Abort(engine=engine.number, incarnation=engine.incarnation, ticket=ticket))
        return engine

    def _give_back(self, ticket: str) -> _Engine | None:
        """The engine of a granted ticket that is no longer running; None if it is not known (any more)."""
        held = self._granted.pop(ticket, None)
        if held is None:
            return None
        engine = self._engines[held.engine]
        engine.tickets.pop(ticket, None)
        self._router.finish(held.session, held.engine, held.tokens)
        return engine

    def _judge(self, engine: _Engine, why: str, now: float) -> None:
        """What follows from something that was counted for or against an engine."""
        if engine.alive and engine.health.state == "DEAD":
            self._note("engine-lost", why)
            self._bury(engine, why, True, now)
        else:
            self._route(engine)

    def _hot(self, engine: _Engine, now: float) -> tuple[Want, ...]:
        """The end of an event that comes with every request: only an engine that is being emptied can move on by it."""
        return self._settle(now) if engine.health.state == "DRAINING" else self._take()

    def _route(self, engine: _Engine) -> None:
        if engine.health.state == "HEALTHY":
            self._router.admit(engine.number)
        elif engine.health.state == "SUSPECT":
            self._router.hold(engine.number)
        elif engine.health.state == "DRAINING":
            self._router.close(engine.number)

    def _serve(self, now: float) -> None:
        for ticket in list(self._waiting):
            self._serve_one(ticket, now)

    def _serve_one(self, name: str, now: float) -> None:
        ticket = self._waiting[name]
        refusal = self._hopeless or self._no_adapter(ticket.adapter)
        if refusal is not None:
            del self._waiting[name]
            self._wants.append(Refuse(ticket=name, reason=refusal[0], detail=refusal[1]))
            return
        able = None
        if ticket.adapter:
            able = {e.number for e in self._engines.values() if ticket.adapter in e.adapters}
        number = self._router.assign(ticket.session, ticket.tokens, able)
        if number is None:
            return
        engine = self._engines[number]
        del self._waiting[name]
        until = now + self._rules.call_timeout_s + TICKET_GRACE_S
        self._granted[name] = _Ticket(ticket.session, ticket.tokens, ticket.adapter, ticket.caller, number, until)
        engine.tickets[name] = None
        self._wants.append(Grant(ticket=name, engine=number, incarnation=engine.incarnation))

    def _no_adapter(self, name: str) -> tuple[str, str] | None:
        if not name or name in self._adapters:
            return None
        if (why := self._refused_adapters.get(name)) is not None:
            return "adapter-refused", f"{name}: {why}"
        return "adapter-unknown", f"{name} was never loaded; known: {', '.join(self._adapters) or 'none'}"

    def _tick_engine(self, engine: _Engine, now: float) -> None:
        if now > engine.due:
            what = "start" if engine.health.state == "RESTARTING" else "confirm its weights and adapters"
            why = f"engine {engine.number} did not {what} within {self._rules.start_timeout_s:g} s"
            self._note("engine-start", why)
            self._bury(engine, why, True, now)
            return
        if engine.health.state not in RUNNING:
            return
        if engine.probing and now >= engine.probed_at + PROBE_LATE_S:
            engine.probed_at = now
            engine.health.probe_late()
            self._judge(engine, "it does not answer probes", now)
        elif not engine.probing and now >= engine.probed_at + PROBE_EVERY_S:
            engine.probing, engine.probed_at = True, now
            self._wants.append(Probe(engine=engine.number, incarnation=engine.incarnation))

    def _observe(self, now: float) -> None:
        serving = [e for e in self._engines.values() if e.health.serves]
        fresh = {
            e.identity: e.figures for e in serving if e.figures is not None and now - e.figures_at <= FIGURES_STALE_S
        }
        self._concurrency.observe(fresh, [e.identity for e in serving], self._router.pinned)

    def _settle(self, now: float) -> tuple[Want, ...]:
        """Advance everything that follows without a further event."""
        self._swap_step(now)
        for engine in [e for e in self._engines.values() if e.health.state == "DRAINING"]:
            if not engine.tickets or now >= engine.drain_until:
                self._emptied(engine, now)
        if not self._opening and self._hopeless is None:
            for engine in self._engines.values():
                if engine.health.state == "DEAD" and engine.health.may_start and now >= engine.restart_at:
                    self._start(engine, now)
            self._grow(now)
        self._assess(now)
        self._serve(now)
        return self._take()

    def _swap_step(self, now: float) -> None:
        outdated = [e for e in self._engines.values() if e.health.serves and self._outdated(e)]
        if not self._together and outdated:
            moving = ("DRAINING", "STALE", "RESTARTING")
            busy = any(e.health.state in moving and not e.leaving for e in self._engines.values())
            outdated = [] if busy else outdated[:1]
        for engine in outdated:
            engine.health.drain()
            engine.drain_until = now + self._rules.drain_timeout_s
            self._route(engine)

    def _emptied(self, engine: _Engine, now: float) -> None:
        """A draining engine is empty, or its time is over and what it still does is aborted."""
        gentle = not engine.tickets
        for name in list(engine.tickets):
            self._cancel(name)
        if engine.leaving:
            self._retire(engine, "it was emptied" if gentle else "its time to finish is over", gentle)
            return
        engine.health.unconfirm()
        engine.weights, engine.adapters = None, {}
        engine.drain_until, engine.probing = float("inf"), False
        self._router.remove(engine.number)
        self._confirm(engine, now)

    def _grow(self, now: float) -> None:
        """Start engines where there is room for more, up to `maximum`; ask now and then also without seeing room."""
        lost = sum(e.lost for e in self._engines.values())
        active = sum(not e.leaving and not e.lost for e in self._engines.values())
        # What is being placed, or will be, has its claim on the rooms that are seen.
        claims = sum(not e.nodes and not e.lost for e in self._engines.values())
        new = min(self._rules.maximum - active - lost, self._rooms - claims)
        missing = self._rules.replicas - active - lost
        if new <= 0 < missing and now >= self._place_again_at:
            self._place_again_at = now + PLACE_AGAIN_S
            new = missing
        for _ in range(new):
            self._add(now)

    def _assess(self, now: float) -> None:
        """Whether the fleet has opened, is paused, or cannot come back."""
        serving = self._serving
        if self._hopeless is not None:
            return
        if self._opening:
            pending = any(e.health.state in ("RESTARTING", "STALE") for e in self._engines.values())
            if serving >= self._rules.replicas or (not pending and serving >= self._rules.opening_minimum):
                self._opening = False
            elif not pending:
                self._hopeless = self._first_fault
            return
        if serving >= self._rules.minimum:
            self._paused_since = None
            return
        if self._paused_since is None:
            self._paused_since = now
        lost = sum(e.lost for e in self._engines.values())
        last = f"; the last to fail: {self._last_fault[1]}" if self._last_fault else ""
        if self._rules.maximum - lost < self._rules.minimum:
            why = f"{lost} of at most {self._rules.maximum} engines are dead and their {self._rules.restarts} restarts spent"
            self._hopeless = ("no-engine", f"{why}; {self._rules.minimum} must serve{last}")
        elif now - self._paused_since > self._rules.pause_timeout_s:
            why = f"fewer than {self._rules.minimum} engines served for {self._rules.pause_timeout_s:g} s"
            self._hopeless = ("no-engine", f"{why}, and none came back{last}")

    def _paused(self) -> str:
        if self._hopeless is not None:
            return f"{self._hopeless[0]}: {self._hopeless[1]}"
        serving = self._serving
        if self._opening:
            return f"the engines are starting: {serving} of {self._rules.replicas} serve"
        if serving >= self._rules.minimum:
            return ""
        others = ", ".join(
            f"engine {e.number} is {e.health.state}" for e in self._engines.values() if not e.health.serves
        )
        return f"{serving} of at least {self._rules.minimum} engines serve; {others or 'no node has room for one'}"

    def _view(self, engine: _Engine, sessions: int) -> EngineView:
        figures = engine.figures
        return EngineView(
            engine=engine.number,
            state=engine.health.state,
            node=",".join(sorted(engine.nodes)),
            sessions=sessions,
            outstanding_tokens=self._router.outstanding(engine.number),
            running=figures.running if figures else 0,
            waiting=figures.waiting if figures else 0,
            kv_cache_use=figures.kv_cache_use if figures else 0.0,
            restarts=engine.health.restarts,
            weights=engine.weights.fingerprint if engine.weights else "",
        )

    def _note(self, reason: str, detail: str) -> None:
        if self._last_fault is None:
            self._first_fault = (reason, detail)
        self._last_fault = (reason, detail)

    def _take(self) -> tuple[Want, ...]:
        wants, self._wants = tuple(self._wants), []
        return wants
