"""A coordinator under test with everything around it played by hand: its wants are collected, time is a number."""

import datetime as dt

from cluster.failures import Failure
from cluster.pool_view import PoolView
from rollout.coordinator import Coordinator
from rollout.episode import schedule
from rollout.lease import StepOutcome
from rollout.limits import Limits
from rollout.notebook import Assessment, Notebook, NotebookState
from rollout.packed import pack
from rollout.record import ForecastRecord
from rollout.tally import Tally
from rollout.wants import Abandon, Commit, Release, Start, Wake
from rollout.write_off import WriteOffs

DAYS = [dt.date(2030, 1, d) for d in (3, 1, 9)]
ALL = ("no-tools", "memory-free", "memory-on")
OPTIONS = ("YES", "NO")
BROKEN = Failure(kind="infrastructure", reason="engine-lost")
LIMITS = Limits(
    attempts=3,
    step_s=100.0,
    episode_s=250.0,
    grace_s=10.0,
    data_failures=1,
    bugs=2,
    max_cost=None,
    seed=7,
)


def keys(events=("a", "b"), modes=ALL, count=2, days=DAYS):
    return schedule("m", dict.fromkeys(events, days), modes, count)


def limits(**changes):
    return LIMITS.model_copy(update=changes)


def notebook(date, p=0.5):
    return NotebookState(notebook=Notebook(assessment=Assessment(p={"YES": p})), status="valid", written=date)


def packed(key, failure=None, price=0.0, state=None, carried=None):
    """What a worker would return for that forecast."""
    if state is None and key.mode == "memory-on":
        state = notebook(key.date)
    usage = {"price": price}
    record = ForecastRecord(
        key=key, options=OPTIONS, report=None, notebook=state, failure=failure, usage=usage, prompt="p"
    )
    return pack(record, None)


def view(limit=1000, paused="", lost=""):
    return PoolView(engines=(), limit=limit, paused=paused, lost=lost)


class Played:
    """One sitting. Commits are acknowledged at once unless `hold`; started leases wait in `leases`."""

    def __init__(self, scheduled, finished=None, limits=LIMITS, earlier=None, workers=1, seats=100, hold=False):
        options = {k.event: OPTIONS for k in scheduled}
        self.state = Coordinator(
            scheduled, finished or {}, limits, WriteOffs(options, "compact", ""), earlier or Tally()
        )
        self.now = 0.0
        self.hold = hold
        self.leases = {}
        """Started and unanswered: lease by number."""
        self.where = {}
        self.abandoned = []
        self.released = []
        """Sessions that the engines are to forget."""
        self.held = []
        """Commits that wait to be acknowledged."""
        self.ledger = {}
        self.wake = None
        for worker in range(1, workers + 1):
            self.state.joined(worker, seats)
        self.go()

    def go(self, seconds=0.0):
        """Let time pass and do what is wanted; the number of leases that began."""
        self.now += seconds
        began = 0
        while True:
            wants = self.state.next(self.now)
            self.wake = None
            for want in wants:
                if isinstance(want, Start):
                    began += 1
                    self.leases[want.lease.number] = want.lease
                    self.where[want.lease.number] = want.worker
                elif isinstance(want, Abandon):
                    del self.leases[want.lease.number]
                    self.abandoned.append(want.lease)
                elif isinstance(want, Commit):
                    self.held.append(want.batch)
                    if not self.hold:
                        self.acknowledge()
                elif isinstance(want, Release):
                    self.released.append(want.session)
                elif isinstance(want, Wake):
                    self.wake = want.at
            if all(isinstance(want, Wake) for want in wants):
                break
        return began

    def acknowledge(self):
        for batch in self.held:
            for forecast in batch:
                assert forecast.key not in self.ledger, "recorded twice"
                self.ledger[forecast.key] = forecast
            self.state.committed(p.key for p in batch)
        self.held = []

    def lease(self, key):
        (found,) = [lease for lease in self.leases.values() if lease.key == key]
        return found

    def finish(self, lease, **made):
        self.leases.pop(lease.number, None)
        told = self.state.outcome(StepOutcome(lease=lease.number, packed=packed(lease.key, **made)), self.now)
        self.go()
        return told

    def finish_late(self, lease, **made):
        return self.state.outcome(StepOutcome(lease=lease.number, packed=packed(lease.key, **made)), self.now)

    def fail(self, lease, failure=BROKEN, price=0.0):
        self.leases.pop(lease.number, None)
        told = self.state.outcome(StepOutcome(lease=lease.number, failure=failure, price=price), self.now)
        self.go()
        return told

    def lose(self, worker):
        for number in [n for n in self.leases if self.where[n] == worker]:
            del self.leases[number]
        self.state.lost(worker, self.now)
        self.go()

    def failures(self):
        return {k: f.failure.reason for k, f in self.ledger.items() if f.failure is not None}
