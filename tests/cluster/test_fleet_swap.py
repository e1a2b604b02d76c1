"""Other checkpoints and adapters in a running fleet: what serves is always what was asked for, and what cannot be loaded is taken back."""

import pytest

from cluster.fleet_events import Adapter, Confirm, Start
from tests.cluster.played_cluster import NEW, OLD, Cluster


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
