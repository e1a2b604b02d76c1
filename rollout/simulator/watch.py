"""The witness of a simulated run: keeps books of its own and says at once when a promise is broken.

It believes nothing that a machine says of itself: what was acknowledged it knows from the disk, who holds a lease from the
wants, what a model was shown from the calls, and which weights an engine holds from the engine.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from cluster.config import Settings
from cluster.fleet_events import Grant
from cluster.health import RUNNING, SERVING
from cluster.pool_view import EngineState, PoolView
from rollout.episode import chains
from rollout.lease import Lease, StepOutcome
from rollout.model import Completion, SampleRequest
from rollout.notebook import NotebookState, render_notebook
from rollout.packed import PackedForecast, unpack_trajectory
from rollout.record import ForecastKey, ForecastRecord
from rollout.simulator.actors import Process, here
from rollout.simulator.faults import MARKER
from rollout.simulator.store import short
from rollout.simulator.trace import Trace
from rollout.wants import Abandon, Commit, Halt, Start, Want

ZOMBIE_SECONDS = 30.0
"""How long a step may go on after its lease has ended: until the news of it has surely arrived."""

ABORT_SECONDS = 30.0
"""How long an engine may go on with a call that was given up: as long as the news takes at its slowest."""
LATE_SECONDS = 5.0
"""How long after a deadline something may be done about it."""


@dataclasses.dataclass(eq=False)
class _Call:
    """One model call, as its worker sees it."""

    process: Process
    ended: float | None = None
    """When it was given up."""


class Watch:
    """Of one life of the driver; what is on the disk outlives it."""

    def __init__(
        self,
        settings: Settings,
        keys: Sequence[ForecastKey],
        acknowledged: dict[ForecastKey, str],
        weights: str,
        trace: Trace,
        broken: Callable[[str], None],
    ) -> None:
        """`acknowledged`: record by key, as the disk knows; `broken` is told of every broken promise."""
        self._settings, self._acknowledged = settings, acknowledged
        self._weights, self._trace, self._broken = weights, trace, broken
        self._chain = {key: chain.keys for chain in chains(keys) for key in chain.keys}
        self._seats: dict[int, int] = {}
        self._gone: set[int] = set()
        self._held: dict[int, tuple[int, Lease]] = {}
        self._ended: dict[int, float] = {}
        """When a lease ceased to be current."""
        self._abandoned: set[int] = set()
        self._since: dict[int, float] = {}
        """When a lease began, in time in which the pool was not paused."""
        self._unpaused = 0.0
        self._looked = trace.clock()
        self._tried: Counter[ForecastKey] = Counter()
        self._committing: set[ForecastKey] = set()
        self._halted = False
        self._closing = False
        self._view: PoolView | None = None
        self._spent = 0.0
        self._running: dict[tuple[str, ForecastKey], Lease] = {}
        self._contexts: dict[int, tuple[int, ...]] = {}
        """What an engine saw and said last, by lease."""
        self._attempts: dict[tuple[ForecastKey, int], int] = {}
        self._tickets: set[str] = set()
        self._calls: dict[tuple[int, ...], list[_Call]] = {}
        """Unanswered model calls by their context, which repetitions of one step share."""

    # The coordinator.

    def resumed(self, spent: float) -> None:
        """A life begins with what earlier ones have spent."""
        self._spent = spent

    def joined(self, worker: int, seats: int) -> None:
        """A worker takes leases."""
        self._seats[worker] = seats

    def lost(self, worker: int) -> None:
        """A worker was given up."""
        self._gone.add(worker)
        for number in [n for n, (holder, _) in self._held.items() if holder == worker]:
            self._end(number)

    def closing(self) -> None:
        """From now on nothing may be started."""
        self._closing = True

    def view(self, view: PoolView) -> None:
        """What the coordinator was told of the pool."""
        self._view = view

    def outcome(self, outcome: StepOutcome, counted: bool) -> None:
        """What a worker said, and whether the coordinator took it."""
        current = outcome.lease in self._held
        self._require(counted == current, f"an outcome of lease {outcome.lease} counted: {counted}, current: {current}")
        price = outcome.price if outcome.packed is None else outcome.packed.price
        if not current:
            # What an abandoned step cost is said once, after all.
            if outcome.lease in self._abandoned:
                self._abandoned.discard(outcome.lease)
                self._spent += price
            return
        self._spent += price
        _, lease = self._held[outcome.lease]
        self._end(outcome.lease)
        if outcome.packed is not None:
            self._require(outcome.packed.key == lease.key, f"a record of another key came for {short(lease.key)}")
        reason = outcome.failure.reason if outcome.failure else "done"
        self._trace.note(f"outcome {outcome.lease} {reason}")

    def wants(self, wants: Iterable[Want], leases: Callable[[int], frozenset[int]], running: int) -> None:
        """What the coordinator wants; `leases` and `running` are what it says of itself."""
        now = self._trace.clock()
        if self._view is None or not self._view.paused:
            self._unpaused += now - self._looked
        self._looked = now
        for want in wants:
            self._require(not self._halted, f"after its end it wants a {type(want).__name__}")
            match want:
                case Start(worker, lease):
                    self._starts(worker, lease)
                case Abandon(worker, lease):
                    self._require(
                        self._held.get(lease.number, (None,))[0] == worker, f"abandons {lease.number}, not held"
                    )
                    self._trace.note(f"abandon {lease.number}")
                    self._abandoned.add(lease.number)
                    self._end(lease.number)
                case Commit(batch):
                    self._commits(batch)
                case Halt(reason):
                    self._trace.note(f"halt {reason}")
                    self._require(not self._held, f"halts while {sorted(self._held)} are leased")
                    self._require(not self._committing, "halts while a commit is under way")
                    self._halted = True
        oldest = min((self._since[n] for n in self._held), default=self._unpaused)
        most = self._settings.rollout.deadlines.step_s + LATE_SECONDS
        self._require(self._unpaused - oldest <= most, f"a step has run for {self._unpaused - oldest:.0f} s")
        self._require(running == len(self._held), f"{running} leases run, {len(self._held)} are known")
        for worker in self._gone:
            self._require(not leases(worker), f"worker {worker} is gone and holds {sorted(leases(worker))}")

    def committed(self, keys: Iterable[ForecastKey]) -> None:
        """A commit was acknowledged."""
        self._committing -= set(keys)

    def _starts(self, worker: int, lease: Lease) -> None:
        key, name = lease.key, short(lease.key)
        self._trace.note(f"start {lease.number} {name} attempt {lease.attempt} at worker {worker}")
        self._tried[key] += 1
        limits = self._settings.rollout
        held = [n for n, (_, other) in self._held.items() if other.key == key]
        mine = sum(holder == worker for holder, _ in self._held.values())
        earlier = list(itertools.takewhile(lambda k: k != key, self._chain[key]))
        self._require(not self._closing, f"{name} is started after a stop")
        self._require(key not in self._acknowledged, f"{name} is drawn again after its record")
        self._require(key not in self._committing, f"{name} is drawn again while its record is committed")
        self._require(not held, f"{name} is leased twice at once: {held}")
        self._require(
            worker in self._seats and worker not in self._gone, f"{name} is leased to worker {worker}, who is gone"
        )
        self._require(mine < self._seats.get(worker, 0), f"worker {worker} has no seat for {name}")
        self._require(
            lease.attempt == self._tried[key], f"{name} starts attempt {lease.attempt}, it is {self._tried[key]}"
        )
        self._require(lease.attempt <= limits.attempts, f"{name} starts attempt {lease.attempt} of {limits.attempts}")
        self._require(
            all(k in self._acknowledged for k in earlier), f"{name} starts before the dates before it are stored"
        )
        if self._view is not None:
            self._require(not self._view.paused, f"{name} starts while the pool is paused")
            self._require(len(self._held) < self._view.limit, f"{name} starts above the limit of {self._view.limit}")
        if (most := self._settings.run.max_cost) is not None:
            self._require(self._spent < most, f"{name} starts after {self._spent:.3f} of {most:.3f} dollars were spent")
        if key.mode == "memory-on":
            self._carries(lease, earlier)
        else:
            self._require(lease.carried is None, f"{name} carries a notebook")
        self._held[lease.number] = worker, lease
        self._since[lease.number] = self._unpaused
        self._attempts[key, lease.attempt] = lease.number

    def _carries(self, lease: Lease, earlier: Sequence[ForecastKey]) -> None:
        """The notebook of the last earlier date that wrote a valid one."""
        states = [(k, record_of(self._acknowledged[k]).notebook) for k in earlier if k in self._acknowledged]
        valid = [(k, state) for k, state in states if state is not None and state.status == "valid"]
        carried = lease.carried or NotebookState(notebook=None, status="missing")
        if not valid:
            self._require(carried.notebook is None, f"{short(lease.key)} carries a notebook that no date wrote")
            return
        written, state = valid[-1]
        self._require(
            carried.notebook == state.notebook, f"{short(lease.key)} does not carry the notebook of {written.date}"
        )
        self._require(carried.written == written.date, f"{short(lease.key)} dates its notebook {carried.written}")

    def _commits(self, batch: Sequence[PackedForecast]) -> None:
        keys = [packed.key for packed in batch]
        self._trace.note(f"commit {', '.join(map(short, keys))}")
        self._require(not self._committing, "a commit is wanted while another is under way")
        self._require(len(set(keys)) == len(keys), "a key stands twice in a commit")
        for packed in batch:
            name = short(packed.key)
            self._require(packed.key not in self._acknowledged, f"{name} is committed again")
            holders = [n for n, (_, lease) in self._held.items() if lease.key == packed.key]
            self._require(not holders, f"{name} is committed while it is leased")
            if packed.trajectory is not None:
                self._token_exact(packed)
        self._committing |= set(keys)

    def _token_exact(self, packed: PackedForecast) -> None:
        """What is stored is what the engine saw and said, to the last token."""
        number = self._attempts.get((packed.key, record_of(packed.record).attempts))
        said = self._contexts.get(number, ()) if number is not None else ()
        stored = tuple(unpack_trajectory(packed.trajectory or b"").token_ids())
        name = short(packed.key)
        self._require(number is not None, f"{name} stores an attempt that was not leased")
        self._require(stored[: len(said)] == said, f"{name} stores other tokens than were sampled")

    def _end(self, number: int) -> None:
        del self._held[number]
        self._ended[number] = self._trace.clock()

    # Workers and models.

    def begins(self, lease: Lease) -> None:
        """A worker begins with a lease."""
        process = here()
        assert process is not None
        self._running[process.name, lease.key] = lease

    def ends(self, lease: Lease) -> None:
        """It has ended, well or not."""
        process = here()
        assert process is not None
        if self._running.get((process.name, lease.key)) is lease:
            del self._running[process.name, lease.key]

    def asks(self, request: SampleRequest) -> None:
        """A step wants a model call."""
        lease, process = self._lease(request), here()
        if lease is None or process is None:
            return
        self._calls.setdefault(request.prompt_ids, []).append(_Call(process))
        name = short(lease.key)
        if lease.number not in self._held:
            since = self._trace.clock() - self._ended.get(lease.number, 0.0)
            self._require(since <= ZOMBIE_SECONDS, f"{name} samples {since:.0f} s after its lease has ended")
        elif lease.key in self._acknowledged:
            self._require(False, f"{name} samples after its record")
        for message in request.messages:
            self._require(MARKER not in message.content, f"{name} is shown an error of the infrastructure")
        room = self._settings.engine.max_model_len - len(request.prompt_ids)
        self._require(
            1 <= request.max_tokens <= room, f"{name} asks for {request.max_tokens} tokens with room for {room}"
        )
        self._require(request.max_tokens <= self._settings.sampling.max_tokens, f"{name} asks for more than max_tokens")
        before = self._contexts.get(lease.number, ())
        self._require(request.prompt_ids[: len(before)] == before, f"{name} sends another context than it had")
        if not before and lease.carried is not None and lease.carried.notebook is not None:
            shown = render_notebook(lease.carried.notebook)
            self._require(any(shown in m.content for m in request.messages), f"{name} is not shown its notebook")

    def sampled(self, request: SampleRequest, completion: Completion) -> None:
        """A model call was answered."""
        lease = self._lease(request)
        if lease is None:
            return
        if (call := self._open_call(request)) is not None:
            self._calls[request.prompt_ids].remove(call)
        self._contexts[lease.number] = request.prompt_ids + completion.token_ids
        self._require(completion.weights == self._weights, f"{short(lease.key)} was sampled by {completion.weights}")
        self._require(len(completion.token_ids) <= request.max_tokens, f"{short(lease.key)} got too many tokens")

    def _lease(self, request: SampleRequest) -> Lease | None:
        process = here()
        if process is None or not process.alive:
            return None
        rollout = int(request.session.split("/")[2])
        for (name, key), lease in self._running.items():
            if name == process.name and (key.event, key.date, key.mode, key.rollout) == (
                request.event.id,
                request.date,
                request.mode,
                rollout,
            ):
                return lease
        self._require(False, f"{process.name} samples for {request.session} without a lease")
        return None

    def gave_up(self, request: SampleRequest) -> None:
        """A model call ended without an answer."""
        if (call := self._open_call(request)) is not None:
            call.ended = self._trace.clock()

    def _open_call(self, request: SampleRequest) -> "_Call | None":
        """The process's own call of that context."""
        calls = self._calls.get(request.prompt_ids, ())
        return next((c for c in calls if c.process is here() and c.ended is None), None)

    def works_on(self, engine: str, prompts: Iterable[tuple[int, ...]]) -> None:
        """What an engine works on now."""
        now = self._trace.clock()
        for ids in prompts:
            calls = self._calls.get(ids, ())
            for call in calls:
                if call.ended is None and not call.process.alive:
                    call.ended = now
            ended = [call.ended for call in calls if call.ended is not None]
            if ended and len(ended) == len(calls):
                since = now - max(ended)
                self._require(since <= ABORT_SECONDS, f"{engine} works on a call given up {since:.0f} s ago")

    # The fleet.

    def ticket_ended(self, ticket: str, granted: Iterable[str]) -> None:
        """A caller has said how its call ended, and the fleet still counts these as running."""
        self._require(ticket not in granted, "a ticket is held after its call has ended")

    def fleet(
        self,
        states: Mapping[int, tuple[EngineState, int]],
        sessions: dict[str, int],
        granted: dict[str, int],
        grants: Sequence[Grant],
        truth: Callable[[int, int], str | None],
    ) -> None:
        """The fleet after an event. `states`: state and restarts by engine.

        `truth`: the weights that an engine really holds, None if its process is gone."""
        for session, engine in sessions.items():
            state = states[engine][0] if engine in states else None
            self._require(state in SERVING, f"session {session} is on engine {engine}, which is {state}")
        for ticket, engine in granted.items():
            state = states[engine][0] if engine in states else None
            self._require(state in RUNNING, f"ticket {ticket} is at engine {engine}, which is {state}")
        for grant in grants:
            state = states[grant.engine][0] if grant.engine in states else None
            self._require(state in SERVING, f"a call goes to engine {grant.engine}, which is {state}")
            self._require(grant.ticket not in self._tickets, "a ticket is answered twice")
            self._tickets.add(grant.ticket)
            holds = truth(grant.engine, grant.incarnation)
            self._require(holds in (None, self._weights), f"a call goes to engine {grant.engine}, which holds {holds}")
        most = self._settings.engine.restarts
        for engine, (_, restarts) in states.items():
            self._require(restarts <= most, f"engine {engine} was restarted {restarts} times")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            self._broken(what)


def record_of(text: str) -> ForecastRecord:
    """A record from its JSON."""
    return ForecastRecord.model_validate_json(text)
