"""Whatever a cluster does to a fleet: no request on an engine that does not serve, every ticket answered once, starts bounded."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.call import EngineFigures
from cluster.config import ConcurrencySettings, EngineSettings
from cluster.fleet import Fleet
from cluster.fleet_events import (
    Abort,
    Adapter,
    Checkpoint,
    Confirm,
    End,
    Grant,
    Probe,
    Refuse,
    Start,
    fleet_rules,
)

RESTARTS, MAXIMUM = 2, 4
NODES = [f"node-{i}" for i in range(6)]
PICK = st.integers(0, 1_000)


class AnyCluster(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        settings = EngineSettings(
            replicas=2, maximum=MAXIMUM, restarts=RESTARTS, request_timeout_s=40, drain_timeout_s=20, start_timeout_s=50
        )
        self.fleet = Fleet(fleet_rules(settings, 30.0), ConcurrencySettings(), Checkpoint(path="0", fingerprint="0"))
        self.now = 0.0
        self.asked = 0
        self.tokens = {}
        self.answers = Counter()
        self.over = set()
        """Tickets that their caller gave up, or whose end was said."""
        self.starts, self.confirms, self.probes = [], [], []
        self.processes = {}
        """Incarnation by engine that was started and not ended."""
        self.charged = Counter()
        self.alive, self.draining = set(NODES[:3]), {}
        self.adapters = 0
        self.generated = 0
        self.do(self.fleet.open(self.now))

    def do(self, wants):
        # A grant is judged at the moment it is wanted: the wants of one event are one moment.
        states = {e.engine: e.state for e in self.fleet.view().engines}
        for want in wants:
            match want:
                case Grant():
                    assert states[want.engine] in ("HEALTHY", "SUSPECT")
                    assert want.ticket not in self.over
                    self.answers[want.ticket] += 1
                case Refuse():
                    self.answers[want.ticket] += 1
                    self.over.add(want.ticket)
                case Start():
                    assert self.processes.get(want.engine, 0) < want.incarnation
                    assert want.engine not in self.processes, "an engine is ended before it is started again"
                    self.processes[want.engine] = want.incarnation
                    self.starts.append(want)
                case Confirm():
                    self.confirms.append(want)
                case Probe():
                    self.probes.append(want)
                case End():
                    assert self.processes.pop(want.engine) == want.incarnation
                case Abort():
                    assert self.answers[want.ticket] == 1
                    self.over.add(want.ticket)

    def pick(self, things, number):
        return sorted(things, key=str)[number % len(things)]

    @rule(session=st.integers(0, 8), tokens=st.integers(1, 100), adapter=st.booleans(), caller=st.sampled_from("ab"))
    def assign(self, session, tokens, adapter, caller):
        ticket = f"t{self.asked}"
        self.asked += 1
        self.tokens[ticket] = tokens
        name = "a0" if adapter and self.adapters else ""
        self.do(self.fleet.assign(ticket, f"s{session}", tokens, self.now, name, caller))

    @precondition(lambda self: self.fleet.granted())
    @rule(number=PICK, how=st.sampled_from(["ok", "ok", "engine-lost", "engine-time-out", "engine-aborted", "cancel"]))
    def end(self, number, how):
        ticket = self.pick(self.fleet.granted(), number)
        if how == "ok":
            self.do(self.fleet.finished(ticket, self.now))
        elif how == "cancel":
            self.do(self.fleet.cancelled(ticket, self.now))
        else:
            self.do(self.fleet.failed(ticket, how, "", self.now))
        self.over.add(ticket)

    @precondition(lambda self: self.fleet.waiting())
    @rule(number=PICK)
    def give_up(self, number):
        ticket = self.pick(self.fleet.waiting(), number)
        self.over.add(ticket)
        self.do(self.fleet.cancelled(ticket, self.now))

    @precondition(lambda self: self.over)
    @rule(number=PICK)
    def late_news(self, number):
        ticket = self.pick(self.over, number)
        self.do(self.fleet.finished(ticket, self.now))
        self.do(self.fleet.failed(ticket, "engine-lost", "", self.now))

    @rule(session=st.integers(0, 8))
    def release(self, session):
        self.fleet.release(f"s{session}")

    @rule(caller=st.sampled_from("ab"))
    def caller_dies(self, caller):
        gone = self.fleet.waiting() | self.fleet.granted().keys()
        self.do(self.fleet.caller_gone(caller, self.now))
        self.over |= gone - self.fleet.waiting() - self.fleet.granted().keys()

    @precondition(lambda self: self.starts)
    @rule(number=PICK, node=PICK, how=st.sampled_from(["ok", "ok", "ok", "engine-start", "placement-timeout"]))
    def start(self, number, node, how):
        want = self.starts.pop(number % len(self.starts))
        if how == "ok" and self.alive:
            free = [n for n in self.alive if n not in want.avoid] or list(self.alive)
            self.do(self.fleet.placed(want.engine, want.incarnation, [self.pick(free, node)], self.now))
            self.do(self.fleet.started(want.engine, want.incarnation, self.now))
        else:
            reason = "placement-timeout" if how == "ok" else how
            self.do(self.fleet.not_started(want.engine, want.incarnation, reason, "", self.now))

    @precondition(lambda self: self.confirms)
    @rule(number=PICK, how=st.sampled_from(["ok", "ok", "ok", "other", "failed", "refused"]))
    def confirm(self, number, how):
        want = self.confirms.pop(number % len(self.confirms))
        held = {a.name: f"{want.weights.fingerprint}+{a.name}" for a in want.adapters}
        if how == "ok":
            self.do(self.fleet.confirmed(want, want.weights.fingerprint, held, self.now))
        elif how == "other":
            self.do(self.fleet.confirmed(want, "other", held, self.now))
        elif how == "refused" and want.adapters:
            self.do(self.fleet.adapter_refused(want, want.adapters[0].name, "", self.now))
        else:
            self.do(self.fleet.not_confirmed(want, "engine-reload", "", self.now))

    @precondition(lambda self: self.probes)
    @rule(number=PICK, moved=st.booleans(), running=st.integers(0, 2))
    def probe(self, number, moved, running):
        want = self.probes.pop(number % len(self.probes))
        self.generated += moved
        seen = EngineFigures(
            running=running, waiting=0, kv_cache_use=0.5, preemptions=0, generated_tokens=self.generated, age_s=0.0
        )
        self.do(self.fleet.answered(want.engine, want.incarnation, seen, self.now))

    @rule(number=PICK)
    def die(self, number):
        if engines := self.fleet.view().engines:
            engine = engines[number % len(engines)].engine
            self.do(self.fleet.died(engine, self.processes.get(engine, 0), "killed", self.now))

    @rule(alive=st.sets(st.sampled_from(NODES)), rooms=st.integers(0, 5), draining=st.sets(st.sampled_from(NODES)))
    def look(self, alive, rooms, draining):
        self.alive = alive
        leaving = dict.fromkeys(draining & alive)
        self.do(self.fleet.nodes_seen(alive, leaving, rooms, self.now))

    @rule(node=st.sampled_from(NODES))
    def drain(self, node):
        self.do(self.fleet.drain(node, self.now))

    @rule(number=st.integers(0, 2), together=st.booleans(), adapter=st.booleans())
    def swap(self, number, together, adapter):
        weights = Checkpoint(path=str(number), fingerprint=str(number))
        self.adapters = int(adapter)
        brought = (Adapter(name="a0", path="a0"),) if adapter else ()
        self.do(self.fleet.swap(weights, together, self.now, brought))

    @rule()
    def add_adapter(self):
        self.adapters = 1
        self.do(self.fleet.add_adapter(Adapter(name="a0", path="a0"), self.now))

    @rule(seconds=st.floats(0.1, 70.0))
    def wait(self, seconds):
        self.now += seconds
        self.do(self.fleet.tick(self.now))

    @invariant()
    def what_is_outstanding_is_what_was_granted(self):
        granted = self.fleet.granted()
        for engine in {*granted.values(), *(e.engine for e in self.fleet.view().engines)}:
            assert self.fleet.outstanding(engine) == sum(self.tokens[t] for t, e in granted.items() if e == engine)

    @invariant()
    def sessions_lie_on_serving_engines(self):
        serving = {e.engine for e in self.fleet.view().engines if e.state in ("HEALTHY", "SUSPECT")}
        assert set(self.fleet.sessions().values()) <= serving

    @invariant()
    def serving_engines_hold_one_checkpoint_when_no_swap_is_under_way(self):
        if not self.fleet.swapping:
            held = {e.weights for e in self.fleet.view().engines if e.state in ("HEALTHY", "SUSPECT")}
            assert held <= {self.fleet.weights.fingerprint}

    @invariant()
    def tickets_are_answered_once(self):
        assert all(count == 1 for count in self.answers.values())
        assert not self.fleet.waiting() & self.answers.keys()

    @invariant()
    def starts_are_bounded(self):
        view = self.fleet.view()
        assert all(e.restarts <= RESTARTS for e in view.engines)
        # Engines that leave may overlap with those that replace them.
        assert sum(e.state not in ("DRAINING", "DEAD") for e in view.engines) <= MAXIMUM

    @invariant()
    def every_process_belongs_to_an_engine(self):
        known = {e.engine for e in self.fleet.view().engines if e.state != "DEAD"}
        assert set(self.processes) == known

    def teardown(self):
        for ticket in list(self.fleet.granted()):
            self.do(self.fleet.finished(ticket, self.now))
        assert all(self.fleet.outstanding(e.engine) == 0 for e in self.fleet.view().engines)
        waiting = self.fleet.waiting()
        self.do(self.fleet.close(self.now))
        assert self.fleet.waiting() == frozenset()
        assert waiting <= self.answers.keys()
        assert self.processes == {}


TestAnyCluster = AnyCluster.TestCase
