"""The pool's decisions without Ray: a driver of values plays the cluster."""

from cluster.engine_lives import BACKOFF_S, PROBE_EVERY_S, PROBE_LATE_S
from cluster.fleet_events import Confirm, End, Start
from cluster.health import DEAD_AFTER_LATE
from cluster.rooms import PLACE_AGAIN_S
from cluster.tickets import TICKET_GRACE_S
from tests.cluster.played_cluster import NEW, Cluster


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


def test_a_closed_pool_ends_its_engines_and_refuses_who_waits():
    cluster = Cluster(replicas=2, restarts=0).open()
    cluster.slow = True
    cluster.do(cluster.fleet.swap(NEW, True, 0.0))
    cluster.ask("t")
    cluster.do(cluster.fleet.close(0.0))
    assert cluster.refused == {"t": "pool-stopped"}
    assert cluster.running == {}
