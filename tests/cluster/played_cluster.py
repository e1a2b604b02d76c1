"""A cluster of values around a fleet: carries out what it wants, without Ray."""

from cluster.call import EngineFigures
from cluster.config import ConcurrencySettings, EngineSettings
from cluster.fleet import Fleet
from cluster.fleet_events import Abort, Checkpoint, Confirm, End, Grant, Probe, Refuse, Start, fleet_rules

OLD, NEW = Checkpoint(path="/old", fingerprint="old"), Checkpoint(path="/new", fingerprint="new")


def figures(tokens=0, running=0, waiting=0, kv=0.0, preemptions=0):
    return EngineFigures(
        running=running,
        waiting=waiting,
        kv_cache_use=kv,
        preemptions=preemptions,
        generated_tokens=tokens,
        age_s=0.0,
    )


class Cluster:
    """Carries out what a fleet wants, at once and well, except where a test says otherwise."""

    def __init__(self, **settings):
        chosen = EngineSettings(**settings)
        self.now = 0.0
        self.fleet = Fleet(fleet_rules(chosen, 100.0), ConcurrencySettings(), OLD)
        self.wants = []
        self.granted, self.refused, self.aborted = {}, {}, []
        self.running = {}
        """Incarnation by engine."""
        self.holds = {}
        self.broken = set()
        """Engines that do not start."""
        self.silent = set()
        """Engines that do not answer probes."""
        self.tokens = 0
        self.slow = False
        """Whether starts and confirmations are left to the test."""

    def do(self, wants):
        queue = list(wants)
        while queue:
            want = queue.pop(0)
            self.wants.append(want)
            queue += self._carry_out(want)

    def _carry_out(self, want):
        f, now = self.fleet, self.now
        match want:
            case Grant():
                assert want.ticket not in self.granted
                assert want.ticket not in self.refused
                assert self.running[want.engine] == want.incarnation
                state = {e.engine: e.state for e in f.view().engines}[want.engine]
                assert state in ("HEALTHY", "SUSPECT")
                self.granted[want.ticket] = want.engine
            case Refuse():
                assert want.ticket not in self.granted
                assert want.ticket not in self.refused
                self.refused[want.ticket] = want.reason
            case Abort():
                self.aborted.append(want.ticket)
            case End():
                self.running.pop(want.engine, None)
            case Start() if not self.slow:
                if want.engine in self.broken:
                    return f.not_started(want.engine, want.incarnation, "engine-start", "broken", now)
                self.running[want.engine] = want.incarnation
                node = self.node(want.engine)
                return f.placed(want.engine, want.incarnation, [node], now) + f.started(
                    want.engine, want.incarnation, now
                )
            case Confirm() if not self.slow:
                self.holds[want.engine] = want.weights.fingerprint
                return f.confirmed(want, want.weights.fingerprint, {a.name: f"f-{a.name}" for a in want.adapters}, now)
            case Probe() if want.engine not in self.silent:
                self.tokens += 1
                return f.answered(want.engine, want.incarnation, figures(self.tokens), now)
        return ()

    def node(self, engine):
        return f"node-{engine}"

    def open(self):
        self.do(self.fleet.open(self.now))
        return self

    def ask(self, ticket, session=None, tokens=10, **more):
        self.do(self.fleet.assign(ticket, session or ticket, tokens, self.now, **more))
        return self.granted.get(ticket)

    def end(self, ticket):
        self.do(self.fleet.finished(ticket, self.now))

    def wait(self, seconds, step=1.0):
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step)
            self.do(self.fleet.tick(self.now))

    def states(self):
        return {e.engine: e.state for e in self.fleet.view().engines}

    def last(self, kind):
        return [w for w in self.wants if isinstance(w, kind)][-1]
