"""The coordinator alone: what it wants, told anything in any order."""

import pytest
from coordinated import LIMITS, Played, keys, limits, notebook, packed, view
from hypothesis import given
from hypothesis import strategies as st

from cluster.failures import Failure
from rollout.episode import chains
from rollout.lease import StepOutcome
from rollout.record import ForecastRecord
from rollout.tally import Tally
from rollout.uncommitted import COMMIT_AT_MOST
from rollout.wants import Halt

CHAIN = sorted(keys(events=("a",), modes=("memory-on",), count=1), key=lambda k: k.date)
ONE = keys(events=("a",), modes=("no-tools",), count=1)[:1]


def test_every_event_date_mode_and_rollout_is_scheduled_once():
    made = keys()
    assert len(made) == len(set(made)) == 2 * 3 * 3 * 2


def test_only_memory_on_steps_wait_for_each_other():
    lengths = sorted(len(c.keys) for c in chains(keys(events=("a",), count=1)))
    assert lengths == [1] * 6 + [3]


def test_a_forecast_is_done_when_its_commit_is_acknowledged_and_not_before():
    run = Played(CHAIN, hold=True)
    assert run.finish(run.lease(CHAIN[0]))
    assert (run.state.done, run.state.uncommitted, len(run.leases)) == (0, 1, 0)
    assert [p.key for batch in run.held for p in batch] == [CHAIN[0]]
    run.acknowledge()
    run.go()
    assert run.state.done == 1
    assert run.lease(CHAIN[1]).carried == notebook(CHAIN[0].date)


def test_results_gather_while_a_commit_is_under_way():
    made = keys(events=map(str, range(400)), modes=("memory-free",), count=1)
    run = Played(made, seats=2000, hold=True)
    for lease in list(run.leases.values()):
        run.finish(lease)
    assert [len(batch) for batch in run.held] == [1]
    sizes = []
    while run.held:
        run.acknowledge()
        run.go()
        sizes += [len(batch) for batch in run.held]
    assert sum(sizes) == len(made) - 1
    assert max(sizes) == COMMIT_AT_MOST
    assert run.state.halted == Halt("complete")


def test_a_failed_step_does_not_end_its_chain_and_the_next_one_knows():
    run = Played(CHAIN)
    run.finish(run.lease(CHAIN[0]))
    run.fail(run.lease(CHAIN[1]), Failure(kind="bug", reason="key-error"))
    third = run.lease(CHAIN[2])
    assert third.carried.notebook == notebook(CHAIN[0].date).notebook
    assert (third.carried.written, third.carried.missed) == (CHAIN[0].date, (CHAIN[1].date,))
    assert (third.carried.status, third.carried.why) == ("missing", "key-error")
    record = ForecastRecord.model_validate_json(run.ledger[CHAIN[1]].record)
    assert record.carried.written == CHAIN[0].date


def test_a_resumed_chain_starts_at_its_first_missing_date_with_the_notebook_before_it():
    run = Played(CHAIN, {CHAIN[0]: notebook(CHAIN[0].date, 0.8)})
    (lease,) = run.leases.values()
    assert (lease.key, lease.carried) == (CHAIN[1], notebook(CHAIN[0].date, 0.8))
    assert not lease.last
    assert (run.state.done, run.state.total) == (1, 3)
    between = Played(CHAIN, {CHAIN[1]: notebook(CHAIN[1].date, 0.1)})
    between.finish(between.lease(CHAIN[0]))
    (third,) = between.leases.values()
    assert (third.key, third.carried, third.last) == (CHAIN[2], notebook(CHAIN[1].date, 0.1), True)


def test_a_result_that_arrives_late_or_twice_changes_nothing():
    run = Played(ONE)
    (late,) = run.leases.values()
    assert run.fail(late)
    run.go(60.0)
    (again,) = run.leases.values()
    assert again.attempt == 2
    assert not run.finish(late)
    assert not run.fail(late)
    assert run.finish(again)
    assert not run.finish(again)
    assert run.state.halted == Halt("complete")
    assert list(run.ledger) == ONE


def test_attempts_are_bounded_and_then_the_failure_is_recorded():
    run = Played(ONE)
    waits = []
    for attempt in (1, 2, 3):
        (lease,) = run.leases.values()
        assert lease.attempt == attempt
        run.fail(lease)
        if attempt < 3:
            waits.append(run.wake - run.now)
            assert run.go(run.wake - run.now - 0.01) == 0, "before its time"
            assert run.go(0.01) == 1
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2, "the wait doubles"
    assert run.failures() == {ONE[0]: "engine-lost"}
    assert run.state.halted == Halt("complete")
    assert ForecastRecord.model_validate_json(run.ledger[ONE[0]].record).attempts == 3
    same = Played(ONE)
    same.fail(next(iter(same.leases.values())))
    assert same.wake == waits[0], "the spread is drawn from the seed"


def test_an_attempt_is_repeated_on_another_worker():
    run = Played(ONE, workers=2, seats=1)
    (lease,) = run.leases.values()
    first = run.where[lease.number]
    run.fail(lease)
    run.go(60.0)
    (lease,) = run.leases.values()
    assert run.where[lease.number] != first
    run.fail(lease)
    run.lose(first)
    run.go(60.0)
    (lease,) = run.leases.values()
    assert run.where[lease.number] != first, "the one that is left, although it failed"


def test_a_dead_workers_leases_return_and_it_is_given_none():
    made = keys()
    run = Played(made, workers=2, seats=4)
    assert len(run.leases) == 8
    run.lose(1)
    assert run.state.leases(1) == frozenset()
    assert run.state.running == len(run.leases) == 4
    run.state.lost(1, run.now)
    assert run.state.retried == 4
    run.state.joined(3, 100)
    run.go(60.0)
    assert {run.where[n] for n in run.leases} == {2, 3}


def test_a_step_that_kills_its_workers_does_not_use_up_the_attempts_of_others():
    made = keys(events=("poison", "b", "c"), modes=("memory-free",), count=2)
    poison = made[-1]
    run = Played(made, limits=limits(attempts=5), seats=50)
    worker = 1
    while run.state.halted is None:
        for lease in list(run.leases.values()):
            if lease.key != poison:
                continue
            run.lose(worker)
            worker += 1
            run.state.joined(worker, 50)
            run.go()
            break
        else:
            for lease in list(run.leases.values()):
                run.finish(lease)
            run.go(30.0)
    assert run.failures() == {poison: "worker-lost"}
    assert run.state.halted == Halt("complete")


def test_steps_whose_node_died_twice_do_not_run_one_by_one_to_the_end():
    run = Played(keys(modes=("memory-free",), count=20), limits=limits(attempts=5), seats=200)
    everything = len(run.leases)
    for worker in (1, 2):
        run.lose(worker)
        run.state.joined(worker + 1, 200)
        run.go(30.0)
    together = []
    while run.state.halted is None:
        together.append(len(run.leases))
        for lease in list(run.leases.values()):
            run.finish(lease)
            # What begins meanwhile is answered in the next round.
    assert everything == 120
    assert together[0] == 1
    assert len(together) < 10
    assert not run.failures()


def test_a_death_among_suspects_makes_them_run_one_at_a_time_again():
    made = keys(modes=("memory-free",), count=4)
    run = Played(made, limits=limits(attempts=5), seats=200)
    for worker in (1, 2):
        run.lose(worker)
        run.state.joined(worker + 1, 200)
        run.go(30.0)
    for _ in range(3):
        run.finish(next(iter(run.leases.values())))
    assert len(run.leases) > 2
    again = {lease.key for lease in run.leases.values()}
    run.lose(3)
    run.state.joined(4, 200)
    run.go(30.0)
    assert len(run.leases) == 1
    seen = 0
    while run.state.halted is None:
        running = [lease.key for lease in run.leases.values()]
        if again & set(running):
            seen += 1
            assert len(running) == 1, "one under which a third worker died runs as the only suspect"
        for lease in list(run.leases.values()):
            run.finish(lease)
        run.go(30.0)
    assert seen == len(again)
    assert not run.failures()


def test_a_straggler_is_abandoned_recorded_and_its_late_result_ignored():
    run = Played(CHAIN)
    first = run.lease(CHAIN[0])
    assert run.wake == LIMITS.step_s
    assert run.go(99.0) == 0
    assert run.go(1.0) == 1
    assert run.abandoned == [first]
    assert run.failures() == {CHAIN[0]: "straggler"}
    assert not run.finish(first)
    assert run.lease(CHAIN[1]).carried.missed == (CHAIN[0].date,)


def test_an_attempt_that_is_repeated_has_the_whole_time_again():
    run = Played(ONE)
    run.go(90.0)
    run.fail(next(iter(run.leases.values())))
    run.go(5.0)
    run.go(99.0)
    assert not run.abandoned
    run.go(2.0)
    assert run.failures() == {ONE[0]: "straggler"}


@pytest.mark.parametrize("moment", ["running", "waiting", "committing"])
def test_an_episode_past_its_deadline_ends_and_what_it_lacks_is_recorded(moment):
    run = Played(CHAIN, limits=limits(step_s=1000.0))
    run.go(200.0)
    run.finish(run.lease(CHAIN[0]))
    second = run.lease(CHAIN[1])
    run.go(49.5)
    if moment == "waiting":
        run.fail(second)
    if moment == "committing":
        run.hold = True
        run.finish(second)
    run.go(1.0)
    run.hold = False
    run.acknowledge()
    run.go()
    rest = CHAIN[1:] if moment != "committing" else CHAIN[2:]
    assert run.failures() == dict.fromkeys(rest, "episode-deadline")
    assert run.abandoned == ([second] if moment == "running" else [])
    last = ForecastRecord.model_validate_json(run.ledger[CHAIN[2]].record)
    assert last.notebook.written == (CHAIN[0].date if moment != "committing" else CHAIN[1].date)
    assert run.state.halted == Halt("complete")


def test_an_episode_that_only_waits_because_the_run_is_ending_is_left_open():
    other = keys(events=("b",), modes=("memory-free",), count=1)[:1]
    run = Played(CHAIN + other, limits=limits(step_s=1000.0, max_cost=1.0))
    run.finish(run.lease(CHAIN[0]), price=1.0)
    run.go(300.0)
    run.finish(run.lease(other[0]))
    assert run.state.halted == Halt("max-cost")
    assert set(run.ledger) == {CHAIN[0], other[0]}


def test_independent_steps_have_no_episode_deadline():
    run = Played(keys(modes=("memory-free",)), seats=1, limits=limits(step_s=1000.0))
    run.go(900.0)
    assert not run.ledger


def test_a_paused_pool_starts_nothing_and_stops_the_clocks():
    run = Played(keys(modes=("memory-free",)), seats=2)
    run.state.view(view(paused="1 of 4 engines serve"), run.now)
    assert run.state.paused == "1 of 4 engines serve"
    run.finish(next(iter(run.leases.values())))
    assert len(run.leases) == 1
    run.go(10_000.0)
    assert not run.abandoned
    assert run.wake is None
    run.state.view(view(), run.now)
    run.go()
    assert len(run.leases) == 2
    run.go(99.0)
    assert not run.abandoned
    run.go(2.0)
    assert len(run.abandoned) == 2


@given(st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_deadline_has_passed_at_the_very_time_at_which_it_was_to_be_woken(start, before, pause):
    """Found by the simulator: rounding put the deadline behind its own wake, which was then due for ever."""
    run = Played(ONE, workers=0)
    run.now = start
    run.state.view(view(paused="p"), run.now)
    run.go(pause)
    run.state.view(view(), run.now)
    run.go(before)
    run.state.joined(1, 1)
    run.go()
    run.go(run.wake - run.now)
    run.now = max(run.now, run.wake or 0.0)
    run.go()
    assert run.failures() == {ONE[0]: "straggler"}


def test_no_more_steps_run_than_the_pool_says_and_the_seats_allow():
    run = Played(keys(), workers=2, seats=5)
    assert len(run.leases) == 10
    made = keys()
    small = Played(made, workers=2, seats=5)
    small.state.view(view(limit=3), small.now)
    for lease in list(small.leases.values())[:8]:
        small.finish(lease)
    assert len(small.leases) == 3
    small.state.view(view(limit=7), small.now)
    small.go()
    assert len(small.leases) == 7


def test_leases_are_spread_over_workers():
    run = Played(keys(), workers=4, seats=50)
    counts = [sum(w == worker for w in run.where.values()) for worker in (1, 2, 3, 4)]
    assert max(counts) - min(counts) <= 1


def test_a_stop_lets_running_steps_finish_and_abandons_them_after_the_grace():
    run = Played(keys(), seats=2, hold=True)
    first, second = run.leases.values()
    run.state.stop(run.now, 20.0)
    run.finish(first)
    assert len(run.leases) == 1, "nothing new begins"
    assert run.wake == 20.0
    run.go(20.0)
    assert run.abandoned == [second]
    assert run.state.halted is None, "a result still waits for the ledger"
    run.acknowledge()
    run.go()
    assert run.state.halted == Halt("stopped")
    assert list(run.ledger) == [first.key], "what was abandoned is left open"
    assert run.state.next(run.now + 1000) == []


def test_a_stopped_run_that_only_waits_for_its_ledger_is_woken_by_nothing_else():
    """Found by the simulator: the end of the grace period was a wake that was due for ever, and the driver span."""
    run = Played(CHAIN, hold=True)
    run.state.stop(run.now, 0.0)
    run.finish(run.lease(CHAIN[0]))
    run.go(1.0)
    assert (run.state.uncommitted, run.state.halted) == (1, None)
    assert run.wake > run.now
    run.acknowledge()
    run.go()
    assert run.state.halted == Halt("stopped")


def test_a_second_stop_ends_at_once():
    run = Played(keys(), seats=2)
    run.state.stop(run.now, 20.0)
    run.go()
    run.state.stop(run.now + 1, 0.0)
    run.go(1.0)
    assert run.state.halted == Halt("stopped")
    assert len(run.abandoned) == 2


def test_lost_infrastructure_stops_the_run_and_writes_nothing_off():
    run = Played(keys(), seats=2)
    first, second = run.leases.values()
    gone = Failure(kind="infrastructure", reason="no-engine", detail="restarts are spent")
    run.fail(first, gone)
    assert run.state.halted is None
    run.finish(second)
    assert run.state.halted == Halt("fatal", gone)
    assert list(run.ledger) == [second.key]


def test_what_fails_beside_lost_infrastructure_is_left_open_even_at_its_last_attempt():
    run = Played(keys(modes=("memory-free",)), seats=2, limits=limits(attempts=1))
    first, second = run.leases.values()
    run.fail(first, Failure(kind="infrastructure", reason="no-engine"))
    run.fail(second)
    assert run.state.halted.reason == "fatal"
    assert not run.ledger


def test_a_pool_that_is_lost_while_nothing_runs_ends_the_run():
    """Found by the simulator: the pool was paused, so that no call was made that could have been refused, and the run hung."""
    run = Played(keys(), workers=0)
    run.state.view(view(paused="no-engine: restarts are spent", lost="restarts are spent"), run.now)
    run.go()
    assert run.state.halted == Halt(
        "fatal", Failure(kind="infrastructure", reason="no-engine", detail="restarts are spent")
    )


def test_the_run_stops_once_it_has_cost_enough_and_counts_what_failed_attempts_cost():
    made = keys(modes=("memory-free",))
    run = Played(made, seats=2, limits=limits(max_cost=1.0))
    first, second = run.leases.values()
    run.finish(first, price=0.5)
    assert len(run.leases) == 2
    run.fail(second, price=0.5)
    assert run.state.spent == 1.0
    assert len(run.leases) == 1
    run.finish(*run.leases.values(), price=0.25)
    assert run.state.halted == Halt("max-cost")
    assert len(run.ledger) == 2
    resumed = Played(made, limits=limits(max_cost=1.0), earlier=Tally(price=1.25))
    assert resumed.state.halted == Halt("max-cost")
    assert not resumed.leases


def test_what_an_abandoned_step_cost_is_counted_once():
    run = Played(ONE)
    (lease,) = run.leases.values()
    run.go(100.0)
    for _ in range(2):
        assert not run.fail(lease, Failure(kind="infrastructure", reason="abandoned"), price=0.75)
    assert run.state.spent == 0.75


def test_a_result_that_came_too_late_has_still_cost_what_it_says():
    run = Played(ONE)
    (lease,) = run.leases.values()
    run.go(100.0)
    assert not run.finish_late(lease, price=0.75)
    assert run.state.spent == 0.75


def test_what_attempts_without_a_record_cost_is_in_the_ledger_and_known_to_the_next_sitting():
    made = keys(modes=("memory-free",))
    run = Played(made, seats=3)
    failing, abandoned, wrong = run.leases.values()
    run.fail(failing, price=0.5)
    run.leases.pop(wrong.number)
    run.state.outcome(StepOutcome(lease=wrong.number, packed=packed(made[-1], price=0.125)), run.now)
    run.go(100.0)
    run.fail(abandoned, Failure(kind="infrastructure", reason="abandoned"), price=0.25)
    run.finish(next(iter(run.leases.values())), price=1.0)
    assert run.state.spent == 1.875
    assert sum(stored.price for stored in run.ledger.values()) == 1.875
    own = [ForecastRecord.model_validate_json(stored.record).usage.price for stored in run.ledger.values()]
    assert sum(own) == 1.0, "a record says what its own attempt cost"


@pytest.mark.parametrize(("kind", "reason", "budget"), [("data", "data-failures", 1), ("bug", "bugs", 2)])
def test_the_run_goes_on_until_the_budget_of_wrong_inputs_or_bugs_is_spent(kind, reason, budget):
    run = Played(keys(), seats=3)
    for _ in range(budget):
        run.fail(next(iter(run.leases.values())), Failure(kind=kind, reason="x"))
        assert len(run.leases) == 3
    run.fail(next(iter(run.leases.values())), Failure(kind=kind, reason="x"))
    assert len(run.leases) == 2
    for lease in list(run.leases.values()):
        run.finish(lease)
    assert run.state.halted == Halt(reason)
    assert len(run.ledger) == budget + 3, "the others have been saved"


def test_a_model_failure_is_recorded_and_stops_nothing():
    run = Played(keys(), seats=1)
    while run.leases:
        run.finish(next(iter(run.leases.values())), failure=Failure(kind="model", reason="no-answer"))
    assert run.state.halted == Halt("complete")


def test_a_record_of_another_forecast_is_a_bug():
    run = Played(keys(modes=("no-tools",)), seats=1)
    (lease,) = run.leases.values()
    other = next(k for k in keys(modes=("no-tools",)) if k != lease.key)
    run.leases.clear()
    assert run.state.outcome(StepOutcome(lease=lease.number, packed=packed(other)), run.now)
    run.go()
    assert run.failures() == {lease.key: "wrong-key"}


def test_a_finished_run_halts_at_once():
    run = Played(keys(), dict.fromkeys(keys()))
    assert run.state.halted == Halt("complete")


def test_a_session_that_no_worker_can_end_is_released_and_no_other():
    run = Played(CHAIN, limits=limits(step_s=1000.0))
    for date in range(2):
        run.finish(run.lease(CHAIN[date]))
    run.go(251.0)
    assert run.failures() == {CHAIN[2]: "episode-deadline"}
    assert run.released == [CHAIN[0].session]
    sound = Played(CHAIN)
    sound.fail(sound.lease(CHAIN[0]), Failure(kind="bug", reason="x"))
    for date in (1, 2):
        sound.finish(sound.lease(CHAIN[date]))
    assert sound.released == []
    lost = Played(ONE, limits=limits(attempts=1))
    lost.lose(1)
    assert lost.released == [ONE[0].session]
