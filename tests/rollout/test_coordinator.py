import datetime as dt
import random

from hypothesis import given
from hypothesis import strategies as st

from rollout.coordinator import Coordinator
from rollout.episode import chains, schedule
from rollout.notebook import Assessment, Notebook, NotebookState

DAYS = [dt.date(2030, 1, d) for d in (3, 1, 9)]
ALL = ("no-tools", "memory-free", "memory-on")


def keys(events=("a", "b"), modes=ALL, count=2):
    return schedule("m", dict.fromkeys(events, DAYS), modes, count)


def notebook(p):
    return NotebookState(notebook=Notebook(assessment=Assessment(p={"YES": p})), status="valid")


def test_every_event_date_mode_and_rollout_is_scheduled_once():
    made = keys()
    assert len(made) == len(set(made)) == 2 * 3 * 3 * 2


def test_only_memory_on_steps_wait_for_each_other():
    lengths = sorted(len(c.keys) for c in chains(keys(events=("a",), count=1)))
    assert lengths == [1] * 6 + [3]


def test_a_chain_carries_the_last_notebook_and_goes_on_after_a_failure():
    state = Coordinator(keys(events=("a",), modes=("memory-on",), count=1), {}, attempts=2)
    first = state.lease()
    assert first.carried is None
    assert state.lease() is None, "the second date must wait"
    assert state.finish(first, notebook(0.3))
    second = state.lease()
    assert (second.key.date, second.carried) == (dt.date(2030, 1, 3), notebook(0.3))
    assert state.finish(second, None), "a failed step leaves no notebook"
    assert state.lease().carried == notebook(0.3)


def test_a_resumed_chain_starts_at_its_first_missing_date():
    made = sorted(keys(events=("a",), modes=("memory-on",), count=1), key=lambda k: k.date)
    state = Coordinator(made, {made[0]: notebook(0.8)}, attempts=1)
    assert state.lease().key == made[1]
    assert (state.done, state.total) == (1, 3)


def test_a_late_result_of_a_repeated_attempt_counts_once():
    state = Coordinator(keys(events=("a",), modes=("no-tools",), count=1)[:1], {}, attempts=3)
    late = state.lease()
    assert state.fail(late)
    again = state.lease()
    assert again.attempt == 2
    assert not state.finish(late, None)
    assert state.finish(again, None)
    assert not state.finish(again, None)
    assert state.complete


def test_spent_attempts_are_said_and_leave_the_record_to_the_caller():
    state = Coordinator(keys(events=("a",), modes=("no-tools",), count=1)[:1], {}, attempts=1)
    lease = state.lease()
    assert state.fail(lease) is False
    assert not state.complete
    assert state.finish(lease, None)
    assert state.complete


@given(seed=st.integers(0, 10**6), attempts=st.integers(1, 4), faults=st.floats(0, 0.7), kills=st.integers(0, 4))
def test_whatever_fails_each_forecast_is_recorded_once(seed, attempts, faults, kills):
    """Random completions, infrastructure failures, duplicated and late results, and killed drivers that resume."""
    chance = random.Random(seed)
    scheduled = keys()
    recorded = {}
    for life in range(kills + 1):
        state = Coordinator(scheduled, dict(recorded), attempts)
        assert state.done == len(recorded)
        running, ended = [], []
        patience = chance.randrange(1, 60) if life < kills else 10**6
        while not state.complete and patience:
            patience -= 1
            while len(running) < 5 and (lease := state.lease()) is not None:
                earlier = [k for k in scheduled if k.mode == "memory-on" and lease.key.mode == "memory-on"]
                same = [k for k in earlier if (k.event, k.rollout) == (lease.key.event, lease.key.rollout)]
                assert all(k in recorded for k in same if k.date < lease.key.date)
                running.append(lease)
            lease = running.pop(chance.randrange(len(running)))
            if ended and chance.random() < 0.2:
                assert not state.finish(chance.choice(ended), None)
            if chance.random() < faults and state.fail(lease) is not False:
                ended.append(lease)
                continue
            assert lease.key not in recorded, "drawn twice"
            recorded[lease.key] = None
            assert state.finish(lease, None)
            ended.append(lease)
    assert set(recorded) == set(scheduled)
