"""The lives of a fleet's engines: placed, started, confirmed, probed, emptied, buried, started again. Pure, as the fleet is.

Requests are not its business (cluster/fleet.py), except that those of an engine which is gone are gone with it. An engine that
fails by its own fault spends a restart; one whose node is gone or is drained does not, and leaves with it.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from cluster.call import EngineFigures
from cluster.fleet_engine import FleetEngine
from cluster.fleet_events import Abort, Adapter, Checkpoint, Confirm, End, FleetRules, Probe, Start, Want
from cluster.health import RUNNING, Health, ProbeResult
from cluster.holdings import Holdings
from cluster.rooms import Rooms
from cluster.standing import Standing
from cluster.tickets import Tickets

PROBE_EVERY_S = 5.0
"""Between two probes of an engine: figures are this fresh, and a probe costs next to nothing."""
PROBE_LATE_S = 10.0
"""A probe without an answer for this long counts as late, and so does every further such span."""
BACKOFF_S = 1.0
"""Before the first restart of an engine; doubled with each further one."""
LONGEST_BACKOFF_S = 60.0
"""No restart waits longer."""


class EngineLives(ABC):
    """All engines of a fleet."""

    def __init__(self, rules: FleetRules, weights: Checkpoint) -> None:
        """There is none at first."""
        self._rules = rules
        self._holdings = Holdings(weights)
        self._together = False
        self._tickets = Tickets()
        self._engines: dict[int, FleetEngine] = {}
        self._next = 0
        self._rooms = Rooms(rules)
        self._standing = Standing(rules)
        self._wants: list[Want] = []

    @property
    def swapping(self) -> bool:
        """Whether an engine holds other weights or adapters than it is to, or is not confirmed yet, or too few serve."""
        running = (e for e in self._engines.values() if e.health.state in (*RUNNING, "STALE"))
        return self._serving < self._rules.minimum or not all(map(self._holdings.fits, running))

    def holds(self, adapter: str) -> bool:
        """Whether every serving engine holds an adapter."""
        serving = [e for e in self._engines.values() if e.health.serves]
        return bool(serving) and all(adapter in e.adapters for e in serving)

    # Engines.

    def placed(self, engine: int, incarnation: int, nodes: Collection[str], now: float) -> tuple[Want, ...]:
        """An engine that is being started got its place, on these nodes."""
        found = self._current(engine, incarnation)
        if found is None or found.health.state != "RESTARTING":
            return ()
        found.nodes = frozenset(nodes)
        found.due = now + self._rules.start_timeout_s
        self._rooms.taken()
        for node in found.nodes & self._rooms.draining:
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
        self._standing.note(reason, detail)
        unplaced = reason in ("placement-timeout", "placement-scattered")
        self._bury(found, f"{reason}: {detail}", not unplaced, now)
        if unplaced:
            found.restart_at = self._rooms.unplaced(now)
            if found.incarnation == 1:
                del self._engines[found.number]
        return self._settle(now)

    def confirmed(self, want: Confirm, weights: str, adapters: Mapping[str, str], now: float) -> tuple[Want, ...]:
        """The answer to `want`: fingerprints of the weights and, by name, of the adapters that the engine holds."""
        found = self._current(want.engine, want.incarnation)
        if found is None or found.asked != want:
            return ()
        if (fault := self._holdings.difference(want, weights, adapters)) is not None:
            return self.not_confirmed(want, *fault, now)
        self._holdings.confirmed(want, adapters)
        found.asked, found.due = None, float("inf")
        found.weights, found.adapters = want.weights, dict(adapters)
        if self._holdings.fits(found):
            self._holdings.proved()
        if self._holdings.lacks(found) and found.health.state != "DRAINING":
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
            self._standing.note(reason, detail)
            self._bury(found, f"{reason}: {detail}", True, now)
        return self._settle(now)

    def adapter_refused(self, want: Confirm, name: str, detail: str, now: float) -> tuple[Want, ...]:
        """An engine could not load one of the adapters. If an engine has ever held it, that is the engine's fault, else the
        adapter's; one that came with a swap takes the swap back."""
        found = self._current(want.engine, want.incarnation)
        if found is None or found.asked != want:
            return ()
        if self._holdings.was_held(want, name):
            return self.not_confirmed(want, "adapter-refused", f"{name}: {detail}", now)
        if self._holdings.brought(name) and self._take_back(f"adapter {name}: {detail}", now):
            return self._settle(now)
        self._holdings.refuse(name, detail)
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
        self._standing.note("engine-lost", why)
        self._bury(found, why, True, now)
        return self._settle(now)

    # The cluster.

    def nodes_seen(
        self, alive: Collection[str], draining: Mapping[str, float | None], rooms: int, now: float
    ) -> tuple[Want, ...]:
        """The cluster as it is: nodes that live, nodes that leave (with the seconds left to them, where known), and how many
        more engines the free resources of the staying nodes would hold."""
        gone = self._rooms.seen(alive, rooms)
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

    # What they hold.

    def add_adapter(self, adapter: Adapter, now: float) -> tuple[Want, ...]:
        """Every engine, also those started later, is to hold an adapter. Engines go on serving while they load it."""
        self._holdings.add(adapter)
        self._complete(now)
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
        self._together = together
        self._holdings.swap(weights, adapters)
        self._aim(now)
        if any(e.health.serves and self._holdings.fits(e) for e in self._engines.values()):
            self._holdings.proved()
        self._complete(now)
        return self._settle(now)

    # Inside.

    @abstractmethod
    def _settle(self, now: float) -> tuple[Want, ...]:
        """Advance everything that follows without a further event, and take what is wanted."""

    @property
    def _serving(self) -> int:
        return sum(e.health.serves for e in self._engines.values())

    def _current(self, number: int, incarnation: int) -> FleetEngine | None:
        engine = self._engines.get(number)
        return engine if engine is not None and engine.incarnation == incarnation else None

    def _add(self, now: float) -> None:
        engine = FleetEngine(self._next, Health(self._rules.restarts))
        self._engines[engine.number] = engine
        self._next += 1
        self._start(engine, now)

    def _start(self, engine: FleetEngine, now: float) -> None:
        engine.health.start()
        engine.incarnation += 1
        engine.alive, engine.loads, engine.restart_at = True, self._holdings.weights, float("inf")
        engine.due = now + self._rules.placement_timeout_s + self._rules.start_timeout_s
        self._wants.append(
            Start(
                engine=engine.number,
                incarnation=engine.incarnation,
                weights=self._holdings.weights,
                avoid=frozenset(self._rooms.draining),
            )
        )

    def _take_back(self, why: str, now: float) -> bool:
        """Whether a swap was under way of which no engine has shown yet that its weights can be loaded; if so, it is over."""
        if not self._holdings.take_back(why):
            return False
        self._aim(now)
        return True

    def _aim(self, now: float) -> None:
        """Other things are to be held from now on."""
        for engine in self._engines.values():
            if engine.health.state == "STALE":
                self._confirm(engine, now)

    def _complete(self, now: float) -> None:
        """Engines that serve load what they lack while they go on."""
        for engine in self._engines.values():
            if engine.health.serves and engine.asked is None and self._holdings.lacks(engine):
                self._confirm(engine, now)

    def _confirm(self, engine: FleetEngine, now: float) -> None:
        engine.asked = self._holdings.confirmation(engine)
        engine.due = now + self._rules.start_timeout_s
        self._wants.append(engine.asked)

    def _bury(self, engine: FleetEngine, why: str, charged: bool, now: float) -> None:
        """An engine is dead; what it was doing is nobody's any more, and it may be started again."""
        if engine.leaving:
            self._retire(engine, why, gentle=False)
            return
        tried = engine.asked.weights if engine.asked else engine.loads
        if charged and engine.health.state in ("RESTARTING", "STALE") and tried == self._holdings.weights:
            charged = not self._take_back(why, now)
        engine.health.died(charged)
        self._clear(engine)
        self._wants.append(End(engine=engine.number, incarnation=engine.incarnation, gentle=False, why=why))
        if engine.health.may_start:
            engine.restart_at = now + min(BACKOFF_S * 2.0**engine.health.restarts, LONGEST_BACKOFF_S)

    def _retire(self, engine: FleetEngine, why: str, gentle: bool) -> None:
        """An engine ends and is not started again under its number."""
        if engine.alive:
            self._wants.append(End(engine=engine.number, incarnation=engine.incarnation, gentle=gentle, why=why))
        engine.health.died(charged=False)
        self._clear(engine)
        del self._engines[engine.number]

    def _clear(self, engine: FleetEngine) -> None:
        self._tickets.lost(engine.number, engine.tickets)
        engine.clear()

    def _empty(self, node: str, seconds: float, now: float) -> None:
        self._rooms.draining.add(node)
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

    def _abort(self, ticket: str) -> FleetEngine | None:
        """The request is no longer wanted; the engine where it was running, None if it was at none."""
        engine = self._give_back(ticket)
        if engine is not None:
            self._wants.append(Abort(engine=engine.number, incarnation=engine.incarnation, ticket=ticket))
        return engine

    def _give_back(self, ticket: str) -> FleetEngine | None:
        """The engine of a granted ticket that is no longer running; None if it is not known (any more)."""
        held = self._tickets.give_back(ticket)
        if held is None:
            return None
        engine = self._engines[held.engine]
        engine.tickets.pop(ticket, None)
        return engine

    def _judge(self, engine: FleetEngine, why: str, now: float) -> None:
        """What follows from something that was counted for or against an engine."""
        if engine.alive and engine.health.state == "DEAD":
            self._standing.note("engine-lost", why)
            self._bury(engine, why, True, now)
        else:
            self._route(engine)

    def _route(self, engine: FleetEngine) -> None:
        router = self._tickets.router
        if engine.health.state == "HEALTHY":
            router.admit(engine.number)
        elif engine.health.state == "SUSPECT":
            router.hold(engine.number)
        elif engine.health.state == "DRAINING":
            router.close(engine.number)

    def _tick_engine(self, engine: FleetEngine, now: float) -> None:
        if now > engine.due:
            what = "start" if engine.health.state == "RESTARTING" else "confirm its weights and adapters"
            why = f"engine {engine.number} did not {what} within {self._rules.start_timeout_s:g} s"
            self._standing.note("engine-start", why)
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

    def _swap_step(self, now: float) -> None:
        outdated = [e for e in self._engines.values() if e.health.serves and self._holdings.outdated(e)]
        if not self._together and outdated:
            moving = ("DRAINING", "STALE", "RESTARTING")
            busy = any(e.health.state in moving and not e.leaving for e in self._engines.values())
            outdated = [] if busy else outdated[:1]
        for engine in outdated:
            engine.health.drain()
            engine.drain_until = now + self._rules.drain_timeout_s
            self._route(engine)

    def _emptied(self, engine: FleetEngine, now: float) -> None:
        """A draining engine is empty, or its time is over and what it still does is aborted."""
        gentle = not engine.tickets
        for name in list(engine.tickets):
            self._abort(name)
        if engine.leaving:
            self._retire(engine, "it was emptied" if gentle else "its time to finish is over", gentle)
            return
        engine.health.unconfirm()
        engine.weights, engine.adapters = None, {}
        engine.drain_until, engine.probing = float("inf"), False
        self._tickets.router.remove(engine.number)
        self._confirm(engine, now)

    def _grow(self, now: float) -> None:
        """Start engines where there is room for more."""
        engines = self._engines.values()
        lost = sum(e.lost for e in engines)
        active = sum(not e.leaving and not e.lost for e in engines)
        claims = sum(not e.nodes and not e.lost for e in engines)
        for _ in range(self._rooms.new_engines(active, lost, claims, now)):
            self._add(now)
