import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.health import (
    DEAD_AFTER_FAILED,
    DEAD_AFTER_LATE,
    DEAD_AFTER_STUCK,
    RUNNING,
    SERVING,
    SUSPECT_AFTER_FAILED,
    SUSPECT_AFTER_LATE,
    SUSPECT_AFTER_STUCK,
    Health,
)


@pytest.fixture
def health():
    made = Health(restarts=2)
    made.start()
    made.started()
    made.confirmed()
    return made


def test_a_new_engine_is_stale_until_it_is_confirmed():
    health = Health(restarts=0)
    health.start()
    assert (health.state, health.serves) == ("RESTARTING", False)
    health.started()
    assert (health.state, health.serves) == ("STALE", False)
    health.confirmed()
    assert (health.state, health.serves) == ("HEALTHY", True)


def test_late_probes_make_an_engine_suspect_and_then_dead(health):
    states = []
    for _ in range(DEAD_AFTER_LATE):
        health.probe_late()
        states.append(health.state)
    healthy, suspect = SUSPECT_AFTER_LATE - 1, DEAD_AFTER_LATE - SUSPECT_AFTER_LATE
    assert states == ["HEALTHY"] * healthy + ["SUSPECT"] * suspect + ["DEAD"]


def test_an_answer_ends_a_row_of_late_probes(health):
    for _ in range(10):
        for _ in range(DEAD_AFTER_LATE - 1):
            health.probe_late()
        health.probe_answered("idle")
        assert health.state == "HEALTHY"


def test_a_busy_engine_is_not_dead_however_late_its_probes(health):
    for _ in range(10 * DEAD_AFTER_LATE):
        health.request_succeeded()
        health.probe_late()
        assert health.state == "HEALTHY"


def test_an_engine_that_answers_but_generates_nothing_for_its_requests_is_stuck(health):
    states = []
    for _ in range(DEAD_AFTER_STUCK):
        health.probe_answered("stuck")
        states.append(health.state)
    assert states.index("SUSPECT") == SUSPECT_AFTER_STUCK - 1
    assert states.index("DEAD") == DEAD_AFTER_STUCK - 1


def test_failed_requests_alone_only_make_an_engine_suspect(health):
    for _ in range(100):
        health.request_failed()
    assert health.state == "SUSPECT"


def test_a_burst_of_time_outs_of_an_engine_that_generates_is_forgiven(health):
    for _ in range(100):
        health.request_failed()
    health.probe_answered("moved")
    assert health.state == "HEALTHY"


@pytest.mark.parametrize("result", ["idle", "stuck", "late"])
def test_failed_requests_without_any_progress_make_it_dead_at_its_next_probe(health, result):
    for _ in range(DEAD_AFTER_FAILED):
        health.request_failed()
    health.probe_late() if result == "late" else health.probe_answered(result)
    assert health.state == "DEAD"


def test_probes_and_requests_are_counted_apart(health):
    for _ in range(SUSPECT_AFTER_LATE - 1):
        health.probe_late()
    for _ in range(SUSPECT_AFTER_FAILED - 1):
        health.request_failed()
    assert health.state == "HEALTHY"
    health.request_failed()
    assert health.state == "SUSPECT"
    health.probe_answered("idle")
    assert health.state == "SUSPECT", "an answered probe says nothing about requests"


def test_only_deaths_of_its_own_spend_restarts():
    health = Health(restarts=1)
    health.start()
    for _ in range(5):
        health.died(charged=False)
        health.start()
    assert health.restarts == 0
    health.died(charged=True)
    health.start()
    health.died(charged=True)
    assert not health.may_start
    with pytest.raises(RuntimeError, match="restarts are spent"):
        health.start()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_death_that_was_its_nodes_is_excused_also_after_the_restart(restarted):
    health = Health(restarts=1)
    health.start()
    health.died(charged=True)
    if restarted:
        health.start()
    health.excuse()
    assert health.restarts == 0
    if restarted:
        health.died(charged=False)
    assert health.may_start


def test_a_draining_engine_serves_nothing_and_is_stale_after_its_reload(health):
    health.drain()
    assert not health.serves
    health.request_succeeded()
    assert health.state == "DRAINING", "what it finishes does not open it again"
    health.unconfirm()
    assert health.state == "STALE"


def test_a_transition_that_cannot_be_is_loud(health):
    with pytest.raises(RuntimeError, match="an engine is HEALTHY, where only STALE can be"):
        health.confirmed()


class AnyLife(RuleBasedStateMachine):
    """Whatever happens to an engine, it serves only between a confirmation and the next doubt, and its starts are bounded."""

    def __init__(self):
        super().__init__()
        self.health = Health(restarts=3)
        self.confirmed_since_start = False
        self.charged = 0

    @precondition(lambda self: self.health.state == "DEAD" and self.health.may_start)
    @rule()
    def start(self):
        self.health.start()
        self.confirmed_since_start = False

    @precondition(lambda self: self.health.state == "RESTARTING")
    @rule()
    def started(self):
        self.health.started()

    @precondition(lambda self: self.health.state == "STALE")
    @rule()
    def confirmed(self):
        self.health.confirmed()
        self.confirmed_since_start = True

    @precondition(lambda self: self.health.state in SERVING)
    @rule()
    def drain(self):
        self.health.drain()

    @precondition(lambda self: self.health.state == "DRAINING")
    @rule()
    def unconfirm(self):
        self.health.unconfirm()
        self.confirmed_since_start = False

    @precondition(lambda self: self.health.state != "DEAD")
    @rule(charged=st.booleans())
    def died(self, charged):
        self.health.died(charged)

    @rule(times=st.integers(1, 40), event=st.sampled_from(["late", "moved", "idle", "stuck", "ok", "failed"]))
    def happen(self, times, event):
        before = self.health.state
        for _ in range(times):
            match event:
                case "late":
                    self.health.probe_late()
                case "ok":
                    self.health.request_succeeded()
                case "failed":
                    self.health.request_failed()
                case _:
                    self.health.probe_answered(event)
        if before not in RUNNING:
            assert self.health.state == before

    @invariant()
    def serves_only_what_is_confirmed(self):
        assert not self.health.serves or self.confirmed_since_start

    @invariant()
    def restarts_are_bounded(self):
        assert 0 <= self.health.restarts <= 3


TestAnyLife = AnyLife.TestCase
