"""The coordinator's promises under whatever comes in whatever order: hypothesis plays workers, ledger, pool and clock."""

import dataclasses

from coordinated import LIMITS, keys, notebook, packed, view
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.failures import Failure
from rollout.coordinator import Coordinator
from rollout.lease import Lease, StepOutcome
from rollout.notebook import not_updated
from rollout.tally import Tally
from rollout.wants import Abandon, Commit, Halt, Start, Wake
from rollout.write_off import WriteOffs

SCHEDULED = keys(events=("a", "b"), count=1)
CHAINS = {
    event: sorted((k for k in SCHEDULED if k.event == event and k.mode == "memory-on"), key=lambda k: k.date)
    for event in ("a", "b")
}
WRITE_OFF = WriteOffs({"a": ("YES", "NO"), "b": ("YES", "NO")}, "compact", "")
KINDS = ("infrastructure", "infrastructure", "infrastructure", "data", "bug")
LIMIT = LIMITS.model_copy(update={"data_failures": 1000, "bugs": 1000})


@dataclasses.dataclass
class Given:
    lease: Lease
    worker: int


class Sittings(RuleBasedStateMachine):
    """One run over several sittings; the ledger outlives them, everything else does not."""

    @initialize()
    def lay(self):
        self.ledger = {}
        self.now = 0.0
        self.sit()

    def sit(self):
        finished = {key: forecast.notebook for key, forecast in self.ledger.items()}
        self.state = Coordinator(SCHEDULED, finished, LIMIT, WRITE_OFF, Tally())
        self.limit, self.paused, self.stopping = 1000, False, False
        self.alive: set[int] = set()
        self.workers = 0
        self.current: dict[int, Given] = {}
        self.past: list[Given] = []
        self.commit = None
        self.attempts: dict = {}
        self.wake = None

    def go(self):
        wants = self.state.next(self.now)
        self.wake = None
        for want in wants:
            assert self.state.halted is None or not isinstance(want, Wake)
            if isinstance(want, Start):
                self.started(want)
            elif isinstance(want, Abandon):
                self.past.append(self.current.pop(want.lease.number))
            elif isinstance(want, Commit):
                assert self.commit is None, "two commits at once"
                assert not any(p.key in self.ledger for p in want.batch), "recorded twice"
                self.commit = want.batch
            elif isinstance(want, Wake):
                self.wake = want.at
            elif isinstance(want, Halt):
                assert not self.current
                assert self.commit is None
                assert (want.reason == "complete") == (set(self.ledger) == set(SCHEDULED))

    def started(self, want):
        key = want.lease.key
        assert want.worker in self.alive
        assert not self.paused
        assert not self.stopping
        assert key not in self.ledger
        assert all(given.lease.key != key for given in self.current.values()), "leased twice"
        self.attempts[key] = self.attempts.get(key, 0) + 1
        assert want.lease.attempt == self.attempts[key] <= LIMIT.attempts
        if key.mode == "memory-on":
            earlier = [k for k in CHAINS[key.event] if k.date < key.date]
            assert all(k in self.ledger for k in earlier)
            assert want.lease.carried == (self.ledger[earlier[-1]].notebook if earlier else None)
        self.current[want.lease.number] = Given(want.lease, want.worker)

    def tell(self, given, **said):
        told = self.state.outcome(StepOutcome(lease=given.lease.number, **said), self.now)
        assert told == (given.lease.number in self.current)
        if told:
            self.past.append(self.current.pop(given.lease.number))
        self.go()

    @rule(data=st.data())
    @precondition(lambda self: self.current)
    def a_step_finishes(self, data):
        given = self.current[data.draw(st.sampled_from(sorted(self.current)))]
        key, state = given.lease.key, None
        if key.mode == "memory-on" and data.draw(st.booleans()):
            state = not_updated(given.lease.carried, key.date, "wrote none")
        elif key.mode == "memory-on":
            state = notebook(key.date)
        self.tell(given, packed=packed(key, state=state))

    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    @precondition(lambda self: self.current)
    def an_attempt_fails(self, data, kind):
        given = self.current[data.draw(st.sampled_from(sorted(self.current)))]
        self.tell(given, failure=Failure(kind=kind, reason="x"))

    @rule(data=st.data(), works=st.booleans())
    @precondition(lambda self: self.past)
    def a_result_arrives_late_or_twice(self, data, works):
        given = data.draw(st.sampled_from(self.past))
        if works:
            self.tell(given, packed=packed(given.lease.key))
        else:
            self.tell(given, failure=Failure(kind="infrastructure", reason="x"))

    @rule(seats=st.integers(1, 8))
    @precondition(lambda self: len(self.alive) < 3)
    def a_worker_joins(self, seats):
        self.workers += 1
        self.alive.add(self.workers)
        self.state.joined(self.workers, seats)
        self.go()

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def a_worker_dies(self, data):
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(worker)
        for number in [n for n, given in self.current.items() if given.worker == worker]:
            self.past.append(self.current.pop(number))
        self.state.lost(worker, self.now)
        self.go()

    @rule()
    @precondition(lambda self: self.commit)
    def a_commit_is_acknowledged(self):
        self.ledger |= {p.key: p for p in self.commit}
        batch, self.commit = self.commit, None
        self.state.committed(p.key for p in batch)
        self.state.committed(p.key for p in batch)
        self.go()

    @rule(seconds=st.sampled_from([0.1, 3.0, 30.0, 120.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.go()

    @rule()
    @precondition(lambda self: self.wake is not None)
    def it_is_woken(self):
        assert self.wake >= self.now - 1e-9 or self.state.halted
        self.now = max(self.now, self.wake)
        self.go()

    @rule(limit=st.integers(1, 20), paused=st.booleans())
    def the_pool_says_how_it_does(self, limit, paused):
        self.limit, self.paused = limit, paused
        before = self.state.running
        self.state.view(view(limit, "too few engines" if paused else ""), self.now)
        self.go()
        assert self.state.running <= max(limit, before)

    @rule(grace=st.sampled_from([0.0, 10.0]))
    @precondition(lambda self: len(self.ledger) > 3)
    def a_stop_is_asked_for(self, grace):
        self.stopping = True
        self.state.stop(self.now, grace)
        self.go()

    @rule(acknowledged=st.booleans())
    @precondition(lambda self: self.ledger or self.commit)
    def the_driver_is_killed_and_the_run_resumed(self, acknowledged):
        """The ledger may have the last commit although nobody learnt of it."""
        if self.commit and acknowledged:
            self.ledger |= {p.key: p for p in self.commit}
        self.sit()

    @invariant()
    def no_lease_is_held_by_the_dead(self):
        assert {n for w in self.alive for n in self.state.leases(w)} == set(self.current)
        assert self.state.running == len(self.current)
        assert {given.worker for given in self.current.values()} <= self.alive
        assert self.state.done == len(self.ledger)

    def teardown(self):
        """Whatever had happened, a run that is resumed with sound workers ends with every forecast recorded once."""
        if not hasattr(self, "ledger"):
            return
        self.sit()
        self.alive, self.workers = {1}, 1
        self.state.joined(1, 4)
        for _ in range(200):
            self.go()
            for given in list(self.current.values()):
                self.tell(given, packed=packed(given.lease.key))
            if self.commit:
                self.a_commit_is_acknowledged()
        assert self.state.halted == Halt("complete")
        assert set(self.ledger) == set(SCHEDULED)


TestSittings = Sittings.TestCase
TestSittings.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
