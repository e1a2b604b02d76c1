"""The pool's decisions without Ray: a driver of values plays the cluster."""

import pytest

from cluster.call import EngineFigures
from cluster.config import ConcurrencySettings, EngineSettings
from cluster.fleet import BACKOFF_S, PLACE_AGAIN_S, PROBE_EVERY_S, PROBE_LATE_S, TICKET_GRACE_S, Fleet
from cluster.fleet_events import Abort, Adapter, Checkpoint, Confirm, End, Grant, Probe, Refuse, Start, fleet_rules
from cluster.health import DEAD_AFTER_LATE

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


def test_the_fleet_opens_with_its_replicas_and_serves():
    cluster = Cluster(replicas=3).open()
    assert not cluster.fleet.opening
    assert cluster.states() == dict.fromkeys(range(3), "HEALTHY")
    assert sorted(cluster.ask(f"t{i}") for i in range(3)) == [0, 1, 2]
    assert cluster.fleet.view().paused == ""
    for i in range(3):
        cluster.end(f"t{i}")
    assert all(cluster.fleet.outstanding(e) == 0 for e in range(3))


def test_a_start_that_fails_is_final_while_the_pool_opens_and_names_the_first_fault():
    cluster = Cluster(replicas=2)
    cluster.broken = {1}
    cluster.open()
    assert cluster.fleet.hopeless == ("engine-start", "broken")


def test_an_elastic_pool_opens_with_its_minimum():
    cluster = Cluster(replicas=3, minimum=2)
    cluster.broken = {1}
    cluster.open()
    assert not cluster.fleet.opening
    assert cluster.fleet.hopeless is None
    cluster.broken = set()
    cluster.wait(BACKOFF_S + 1)
    assert set(cluster.states().values()) == {"HEALTHY"}


def test_a_request_that_comes_while_all_engines_restart_waits_and_is_granted_afterwards():
    cluster = Cluster(replicas=1).open()
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    assert cluster.ask("t") is None
    assert "0 of at least 1 engines serve; engine 0 is DEAD" in cluster.fleet.view().paused
    cluster.wait(BACKOFF_S * 2)
    assert cluster.granted["t"] == 0
    assert cluster.fleet.view().paused == ""


def test_restarts_are_bounded_and_then_nothing_is_granted_any_more():
    cluster = Cluster(replicas=1, restarts=2).open()
    cluster.broken = {0}
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.ask("t")
    cluster.wait(100)
    assert sum(isinstance(w, Start) for w in cluster.wants) == 3
    assert cluster.refused == {"t": "no-engine"}
    assert cluster.ask("late") is None
    assert cluster.refused["late"] == "no-engine"


def test_a_restarted_engine_is_stale_until_its_weights_are_confirmed():
    cluster = Cluster(replicas=1).open()
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.slow = True
    cluster.wait(BACKOFF_S * 2)
    cluster.do(cluster.fleet.placed(0, 2, ["n"], cluster.now) + cluster.fleet.started(0, 2, cluster.now))
    assert cluster.states() == {0: "STALE"}
    assert cluster.ask("t") is None
    cluster.running[0] = 2
    cluster.do(cluster.fleet.confirmed(cluster.last(Confirm), "old", {}, cluster.now))
    assert cluster.granted == {"t": 0}


def test_an_engine_that_holds_other_weights_never_serves():
    cluster = Cluster(replicas=2, minimum=1).open()
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.slow = True
    cluster.wait(BACKOFF_S * 2)
    cluster.do(cluster.fleet.placed(0, 2, ["n"], cluster.now) + cluster.fleet.started(0, 2, cluster.now))
    cluster.do(cluster.fleet.confirmed(cluster.last(Confirm), "foreign", {}, cluster.now))
    assert cluster.states()[0] == "DEAD"


def test_answers_about_an_earlier_incarnation_change_nothing():
    cluster = Cluster(replicas=1).open()
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.wait(BACKOFF_S * 2)
    assert cluster.states() == {0: "HEALTHY"}
    before = cluster.fleet.view()
    cluster.do(cluster.fleet.died(0, 1, "late news", cluster.now))
    cluster.do(cluster.fleet.not_started(0, 1, "engine-start", "late news", cluster.now))
    assert cluster.fleet.view() == before


def test_a_silent_engine_dies_and_its_sessions_go_elsewhere():
    cluster = Cluster(replicas=2).open()
    home = cluster.ask("t1", "s")
    cluster.silent = {home}
    cluster.wait(PROBE_EVERY_S + PROBE_LATE_S * (DEAD_AFTER_LATE + 1))
    assert any(isinstance(w, End) and w.engine == home and "probes" in w.why for w in cluster.wants)
    cluster.broken = {home}
    cluster.do(cluster.fleet.died(home, 2, "", cluster.now))
    assert cluster.ask("t2", "s") == 1 - home


def test_an_engine_whose_requests_come_back_is_busy_and_not_dead_however_late_its_probes():
    cluster = Cluster(replicas=1).open()
    cluster.silent = {0}
    for i in range(200):
        assert cluster.ask(f"t{i}", "s") == 0
        cluster.wait(PROBE_LATE_S / 2)
        cluster.end(f"t{i}")
    assert cluster.states() == {0: "HEALTHY"}


def test_a_cancelled_request_is_aborted_at_the_engine_and_a_waiting_one_is_forgotten():
    cluster = Cluster(replicas=1).open()
    cluster.ask("t")
    cluster.do(cluster.fleet.cancelled("t", 0.0))
    assert cluster.aborted == ["t"]
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.ask("waits")
    cluster.do(cluster.fleet.cancelled("waits", 0.0))
    cluster.wait(10)
    assert "waits" not in cluster.granted


def test_requests_of_a_dead_caller_are_aborted_and_its_sessions_stay():
    cluster = Cluster(replicas=2).open()
    home = cluster.ask("t", "chain", caller="worker")
    other = cluster.ask("u", caller="other")
    cluster.do(cluster.fleet.caller_gone("worker", 0.0))
    assert cluster.aborted == ["t"]
    assert (cluster.fleet.outstanding(home), cluster.fleet.outstanding(other)) == (0, 10)
    assert cluster.ask("t2", "chain") == home


def test_a_ticket_whose_end_nobody_says_is_aborted_after_its_time():
    cluster = Cluster(replicas=1, request_timeout_s=50).open()
    cluster.ask("t")
    cluster.wait(50 + TICKET_GRACE_S + 2)
    assert cluster.aborted == ["t"]
    assert cluster.fleet.outstanding(0) == 0


def test_a_drained_node_gets_nothing_new_finishes_what_runs_and_then_loses_its_engine():
    cluster = Cluster(replicas=2).open()
    cluster.do(cluster.fleet.nodes_seen(["node-0", "node-1", "node-2"], {}, 0, 0.0))
    home = cluster.ask("t", "s")
    cluster.do(cluster.fleet.drain(f"node-{home}", 0.0))
    assert cluster.states()[home] == "DRAINING"
    assert cluster.ask("t2", "s") == 1 - home
    assert not any(isinstance(w, End) for w in cluster.wants)
    cluster.end("t")
    assert cluster.last(End).gentle
    assert home not in cluster.states()
    cluster.do(cluster.fleet.nodes_seen(["node-0", "node-1", "node-2"], {}, 1, 1.0))
    assert cluster.last(Start).avoid == {f"node-{home}"}
    assert cluster.states() == {1 - home: "HEALTHY", 2: "HEALTHY"}


def test_a_drain_has_a_deadline_after_which_requests_are_aborted():
    cluster = Cluster(replicas=2, drain_timeout_s=30).open()
    home = cluster.ask("t")
    cluster.do(cluster.fleet.nodes_seen(["node-0", "node-1"], {f"node-{home}": 10.0}, 0, 0.0))
    cluster.wait(9)
    assert cluster.aborted == []
    cluster.wait(2)
    assert cluster.aborted == ["t"]
    assert not cluster.last(End).gentle


def test_a_lost_node_takes_its_engine_and_spends_no_restart():
    cluster = Cluster(replicas=2, restarts=0).open()
    nodes = ["node-0", "node-1", "node-2"]
    cluster.do(cluster.fleet.nodes_seen(nodes, {}, 0, 0.0))
    cluster.do(cluster.fleet.died(0, 1, "its node was lost, which is not known yet", 0.0))
    assert cluster.fleet.view().engines[0].state == "DEAD"
    cluster.do(cluster.fleet.nodes_seen(nodes[1:], {}, 1, 1.0))
    cluster.wait(5)
    assert sorted(cluster.states().values()) == ["HEALTHY", "HEALTHY"]


def test_nodes_that_join_are_used_up_to_the_maximum():
    cluster = Cluster(replicas=1, maximum=3).open()
    cluster.do(cluster.fleet.nodes_seen(["a", "b"], {}, 1, 0.0))
    assert len(cluster.states()) == 2
    cluster.do(cluster.fleet.nodes_seen(["a", "b", "c", "d", "e"], {}, 7, 1.0))
    assert len(cluster.states()) == 3


def test_the_room_that_a_crashed_engine_left_is_kept_for_its_restart():
    cluster = Cluster(replicas=1, maximum=2).open()
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.do(cluster.fleet.nodes_seen(["node-0"], {}, 1, 0.5))
    assert cluster.states() == {0: "DEAD"}
    cluster.do(cluster.fleet.nodes_seen(["node-0"], {}, 2, 0.6))
    assert set(cluster.states()) == {0, 1}


def test_engines_that_are_lost_for_good_are_not_replaced_beyond_the_maximum():
    cluster = Cluster(replicas=2, maximum=3, restarts=0).open()
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.do(cluster.fleet.nodes_seen(["a"], {}, 5, 1.0))
    assert cluster.states() == {0: "DEAD", 1: "HEALTHY", 2: "HEALTHY"}


def test_an_engine_that_dies_while_its_node_is_emptied_does_not_come_back():
    cluster = Cluster(replicas=2).open()
    home = cluster.ask("t")
    cluster.do(cluster.fleet.drain(f"node-{home}", 0.0))
    cluster.do(cluster.fleet.failed("t", "engine-lost", "killed", 0.0))
    cluster.wait(100)
    assert home not in cluster.states()


def test_a_suspect_engine_keeps_its_sessions_and_a_failed_call_goes_elsewhere():
    cluster = Cluster(replicas=2).open()
    home = cluster.ask("t0", "s")
    cluster.ask("t1", "s")
    for ticket in ("t0", "t1"):
        cluster.do(cluster.fleet.failed(ticket, "engine-time-out", "", 0.0))
    assert cluster.states()[home] == "SUSPECT"
    assert cluster.ask("t2", "s") == 1 - home
    assert [cluster.ask(f"n{i}") for i in range(3)] == [1 - home] * 3
    cluster.do(cluster.fleet.died(1 - home, 1, "killed", 0.0))
    assert cluster.ask("t3", "s") == home, "where nothing healthy is left, a suspect engine serves"


def test_a_pool_without_any_engine_pauses_and_gives_up_only_after_its_time():
    cluster = Cluster(replicas=1, pause_timeout_s=1000).open()
    cluster.do(cluster.fleet.nodes_seen(["node-0", "n"], {}, 0, 0.0))
    cluster.slow = True
    cluster.do(cluster.fleet.nodes_seen(["n"], {}, 0, 0.0))
    cluster.ask("t")
    assert "0 of at least 1 engines serve" in cluster.fleet.view().paused
    cluster.wait(990)
    starts = sum(isinstance(w, Start) for w in cluster.wants) - 1
    assert 1 <= starts <= 990 / PLACE_AGAIN_S + 1
    assert cluster.refused == {}
    assert cluster.fleet.view().lost == ""
    cluster.wait(20)
    assert cluster.refused == {"t": "no-engine"}
    assert "none came back" in cluster.fleet.view().lost


@pytest.mark.parametrize("together", [True, False])
def test_a_swap_drains_reloads_and_confirms(together):
    cluster = Cluster(replicas=3).open()
    homes = {t: cluster.ask(t) for t in ("a", "b", "c")}
    cluster.do(cluster.fleet.swap(NEW, together, 0.0))
    draining = [e for e, s in cluster.states().items() if s == "DRAINING"]
    assert len(draining) == (3 if together else 1)
    waits = cluster.ask("new")
    assert (waits is None) == together
    assert cluster.fleet.swapping
    for ticket, engine in homes.items():
        assert cluster.holds[engine] == "old", "an engine reloads only when it is empty"
        cluster.end(ticket)
    if not together:
        cluster.end("new")
    assert not cluster.fleet.swapping
    assert cluster.holds == dict.fromkeys(range(3), "new")
    assert {e.weights for e in cluster.fleet.view().engines} == {"new"}
    assert cluster.granted["new"] in range(3)


@pytest.mark.parametrize("reason", ["reload-failed", "engine-lost"])
def test_a_swap_over_which_the_first_engine_fails_or_dies_is_taken_back(reason):
    cluster = Cluster(replicas=2, restarts=0).open()
    cluster.do(cluster.fleet.add_adapter(Adapter(name="lora", path="/lora"), 0.0))
    cluster.slow = True
    cluster.do(cluster.fleet.swap(NEW, False, 0.0))
    tried = cluster.last(Confirm)
    cluster.slow = False
    cluster.do(cluster.fleet.not_confirmed(tried, reason, "nonsense", 0.0))
    cluster.wait(10)
    assert "nonsense" in cluster.fleet.swap_fault
    assert not cluster.fleet.swapping
    assert cluster.states() == {0: "HEALTHY", 1: "HEALTHY"}, "and no restart is spent on it"
    assert {e.weights for e in cluster.fleet.view().engines} == {"old"}
    assert cluster.fleet.holds("lora")


def test_a_swap_is_taken_back_when_an_engine_cannot_start_with_the_new_weights():
    cluster = Cluster(replicas=1, restarts=1).open()
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.slow = True
    cluster.do(cluster.fleet.swap(NEW, True, 0.0))
    cluster.wait(5)
    assert cluster.last(Start).weights == NEW
    cluster.slow = False
    cluster.do(cluster.fleet.not_started(0, 2, "engine-start", "nonsense", cluster.now))
    cluster.wait(5)
    assert cluster.last(Start).weights == OLD
    assert cluster.states() == {0: "HEALTHY"}


def test_once_an_engine_serves_the_new_weights_another_that_fails_is_at_fault_itself():
    cluster = Cluster(replicas=2).open()
    cluster.slow = True
    cluster.do(cluster.fleet.swap(NEW, True, 0.0))
    first, second = [w for w in cluster.wants if isinstance(w, Confirm)][-2:]
    cluster.do(cluster.fleet.confirmed(first, "new", {}, 0.0))
    cluster.do(cluster.fleet.not_confirmed(second, "reload-failed", "disk", 0.0))
    assert cluster.fleet.swap_fault == ""
    assert cluster.states() == {first.engine: "HEALTHY", second.engine: "DEAD"}


def test_an_engine_that_restarts_after_a_swap_starts_with_the_new_weights():
    cluster = Cluster(replicas=1).open()
    cluster.do(cluster.fleet.swap(NEW, True, 0.0))
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.wait(5)
    assert cluster.last(Start).weights == NEW
    assert cluster.states() == {0: "HEALTHY"}


def test_an_adapter_is_loaded_in_every_engine_also_in_those_started_later():
    cluster = Cluster(replicas=2).open()
    cluster.do(cluster.fleet.add_adapter(Adapter(name="lora", path="/lora"), 0.0))
    assert cluster.fleet.holds("lora")
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.wait(5)
    confirm = cluster.last(Confirm)
    assert (confirm.engine, [a.name for a in confirm.adapters]) == (0, ["lora"])
    assert confirm.adapters[0].fingerprint == "f-lora"
    assert cluster.ask("t", adapter="lora") in (0, 1)


def test_a_request_for_an_adapter_waits_for_an_engine_that_holds_it_and_is_refused_if_none_ever_will():
    cluster = Cluster(replicas=1).open()
    cluster.ask("unknown", adapter="other")
    assert cluster.refused == {"unknown": "adapter-unknown"}
    cluster.slow = True
    cluster.do(cluster.fleet.add_adapter(Adapter(name="lora", path="/lora"), 0.0))
    assert cluster.ask("t", adapter="lora") is None
    assert cluster.ask("base") == 0, "an engine serves while it loads an adapter"
    cluster.do(cluster.fleet.adapter_refused(cluster.last(Confirm), "lora", "rank too high", 0.0))
    assert cluster.refused["t"] == "adapter-refused"
    assert cluster.fleet.refused("lora") == "rank too high"
    assert cluster.states() == {0: "HEALTHY"}, "a bad adapter kills no engine"


def test_a_swap_while_an_adapter_loads_never_reloads_an_engine_that_serves():
    cluster = Cluster(replicas=1).open()
    cluster.slow = True
    cluster.ask("t")
    cluster.do(cluster.fleet.add_adapter(Adapter(name="lora", path="/lora"), 0.0))
    loads = cluster.last(Confirm)
    cluster.do(cluster.fleet.swap(NEW, True, 0.0))
    cluster.do(cluster.fleet.confirmed(loads, "old", {"lora": "f"}, 0.0))
    assert cluster.last(Confirm) == loads
    cluster.end("t")
    assert cluster.last(Confirm).weights == NEW
    assert cluster.states() == {0: "STALE"}
    assert cluster.fleet.view().engines[0].weights == ""
    assert cluster.last(Confirm).adapters == (), "an adapter belongs to the weights it was trained over"


def test_a_swap_to_another_adapter_of_the_same_name_over_the_same_weights_is_no_longer_served_by_the_former():
    cluster = Cluster(replicas=2).open()
    first, second = (Adapter(name="lora", path=f"/{n}/lora", fingerprint="f-lora") for n in (1, 2))
    cluster.do(cluster.fleet.add_adapter(first, 0.0))
    cluster.ask("t", adapter="lora")
    cluster.slow = True
    other = second.model_copy(update={"fingerprint": "f-other"})
    cluster.do(cluster.fleet.swap(OLD, True, 0.0, (other,)))
    assert sorted(cluster.states().values()) == ["DRAINING", "STALE"]
    assert cluster.fleet.swapping
    assert cluster.ask("new", adapter="lora") is None
    cluster.end("t")
    for want in [w for w in cluster.wants if isinstance(w, Confirm)][-2:]:
        assert want.adapters == (other,)
        cluster.do(cluster.fleet.confirmed(want, "old", {"lora": "f-other"}, 0.0))
    assert not cluster.fleet.swapping
    assert "new" in cluster.granted


def test_an_adapter_that_is_given_up_while_the_weights_stay_is_drained_and_taken_off_the_engines():
    cluster = Cluster(replicas=1).open()
    cluster.do(cluster.fleet.add_adapter(Adapter(name="lora", path="/lora"), 0.0))
    cluster.do(cluster.fleet.swap(OLD, True, 0.0))
    assert cluster.last(Confirm).adapters == ()
    assert not cluster.fleet.swapping
    assert cluster.states() == {0: "HEALTHY"}


def test_a_swap_whose_adapter_no_engine_takes_is_taken_back_with_its_adapters():
    cluster = Cluster(replicas=1).open()
    cluster.do(cluster.fleet.add_adapter(Adapter(name="lora", path="/lora"), 0.0))
    cluster.slow = True
    cluster.do(cluster.fleet.swap(NEW, True, 0.0, (Adapter(name="big", path="/big"),)))
    cluster.slow = False
    cluster.do(cluster.fleet.adapter_refused(cluster.last(Confirm), "big", "rank too high", 0.0))
    assert "rank too high" in cluster.fleet.swap_fault
    assert not cluster.fleet.swapping
    assert cluster.fleet.holds("lora")
    assert {e.weights for e in cluster.fleet.view().engines} == {"old"}


def test_an_adapter_that_was_held_before_is_never_refused_for_the_fault_of_one_engine():
    cluster = Cluster(replicas=1, restarts=1).open()
    cluster.do(cluster.fleet.add_adapter(Adapter(name="lora", path="/lora"), 0.0))
    cluster.slow = True
    cluster.do(cluster.fleet.died(0, 1, "killed", 0.0))
    cluster.wait(5)
    cluster.do(cluster.fleet.placed(0, 2, ["n"], cluster.now) + cluster.fleet.started(0, 2, cluster.now))
    cluster.do(cluster.fleet.adapter_refused(cluster.last(Confirm), "lora", "no such folder on this node", cluster.now))
    assert cluster.fleet.refused("lora") is None
    assert cluster.states() == {0: "DEAD"}
    cluster.ask("t", adapter="lora")
    assert cluster.refused == {"t": "no-engine"}, "which ends the run to be resumed and writes nothing off"


def test_the_answer_about_an_adapter_that_a_swap_has_replaced_meanwhile_kills_no_engine():
    cluster = Cluster(replicas=1).open()
    cluster.slow = True
    cluster.do(cluster.fleet.add_adapter(Adapter(name="lora", path="/1/lora"), 0.0))
    loads = cluster.last(Confirm)
    other = Adapter(name="lora", path="/2/lora", fingerprint="f-2")
    cluster.do(cluster.fleet.swap(OLD, True, 0.0, (other,)))
    cluster.do(cluster.fleet.confirmed(loads, "old", {"lora": "f-1"}, 0.0))
    assert cluster.states() == {0: "STALE"}
    cluster.do(cluster.fleet.confirmed(cluster.last(Confirm), "old", {"lora": "f-2"}, 0.0))
    assert cluster.states() == {0: "HEALTHY"}
    assert not cluster.fleet.swapping


def test_a_closed_pool_ends_its_engines_and_refuses_who_waits():
    cluster = Cluster(replicas=2, restarts=0).open()
    cluster.slow = True
    cluster.do(cluster.fleet.swap(NEW, True, 0.0))
    cluster.ask("t")
    cluster.do(cluster.fleet.close(0.0))
    assert cluster.refused == {"t": "pool-stopped"}
    assert cluster.running == {}
