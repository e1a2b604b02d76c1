"""How much of the seats' time a run wastes: the coordinator over simulated durations, against what no order could beat."""

import datetime as dt
import heapq
import random

import pytest
from coordinated import LIMITS, keys, packed

from rollout.coordinator import Coordinator
from rollout.episode import chains
from rollout.lease import StepOutcome
from rollout.wants import Commit, Start, Wake

SECONDS = {"no-tools": 2.0, "memory-free": 30.0, "memory-on": 30.0}
WORKERS, SEATS = 4, 8


def simulate(scheduled, durations, workers=WORKERS, seats=SEATS):
    """(when the last forecast is recorded, leases by worker after every result)."""
    limits = LIMITS.model_copy(update={"step_s": 1e9, "episode_s": 1e9})
    state = Coordinator(scheduled, {}, limits, None)
    for worker in range(workers):
        state.joined(worker, seats)
    now, coming, held = 0.0, [], []
    while state.halted is None:
        while wants := [w for w in state.next(now) if not isinstance(w, Wake)]:
            for want in wants:
                if isinstance(want, Start):
                    heapq.heappush(coming, (now + durations[want.lease.key], want.lease.number, want.lease))
                elif isinstance(want, Commit):
                    state.committed(p.key for p in want.batch)
        held.append([len(state.leases(w)) for w in range(workers)])
        if coming:
            now, number, lease = heapq.heappop(coming)
            seconds = durations[lease.key]
            assert state.outcome(StepOutcome(lease=number, packed=packed(lease.key), seconds=seconds), now)
    return now, held


def work(seed, events=200, days=6):
    chance = random.Random(seed)
    dates = [dt.date(2030, 1, 1) + dt.timedelta(days=n) for n in range(days)]
    scheduled = []
    for event in range(events):
        scheduled += keys(events=(str(event),), count=1, days=dates[: chance.randrange(1, days + 1)])
    # Tool steps are long and of very different lengths; those without are short.
    return scheduled, {k: SECONDS[k.mode] * chance.lognormvariate(0, 0.6) for k in scheduled}


def waste(seed):
    """The run's time over a bound that holds for every order, also for one that knew all durations; 1 is perfect."""
    scheduled, durations = work(seed)
    end, _ = simulate(scheduled, durations)
    longest = max(sum(durations[k] for k in chain.keys) for chain in chains(scheduled))
    return end / max(sum(durations.values()) / (WORKERS * SEATS), longest)


def test_the_seats_are_full_to_the_end():
    found = [waste(seed) for seed in range(10)]
    assert sum(found) / len(found) <= 1.03, found
    assert max(found) <= 1.1, found


@pytest.mark.parametrize("seed", range(5))
def test_the_last_steps_are_not_all_one_workers(seed):
    _, held = simulate(*work(seed))
    ending = [leases for leases in held if WORKERS <= sum(leases) <= WORKERS * SEATS // 2]
    assert ending
    assert all(max(leases) < sum(leases) for leases in ending)


def test_chains_that_would_end_last_begin_first():
    long, short = (
        keys(events=("long",), modes=("memory-on",), count=1),
        keys(events=("s",), modes=("no-tools",), count=4),
    )
    durations = dict.fromkeys([*long, *short], 10.0)
    end, _ = simulate([*short, *long], durations, workers=1, seats=2)
    assert end == 80.0, "15 steps in two seats, and three of them one after the other"
