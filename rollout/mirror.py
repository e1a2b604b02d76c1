"""A run's mirror: what is in its ledger also lies at an fsspec address, shipped while the run goes on.

First goes what the run was begun with, then its changes as immutable parts. The run never waits for it: a thread reads
the ledger by change number, so that nothing piles up in memory however long the mirror cannot be reached, and a record
lags by a stated time at most while it can. A run whose directory is gone is restored from the mirror alone.
"""

import contextlib
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from cluster.clock import monotonic
from cluster.config import RunSettings
from cluster.failures import DataError, PastcastError, SettingsError
from cluster.log_limit import LogLimit
from cluster.record import Record
from rollout.changes import Change
from rollout.ledger import Ledger
from rollout.manifest import Manifest, differences
from rollout.mirror_store import CONFIRMATION, MirrorStore, MirrorUnreachable
from rollout.parts import FOLDER, Part, committed_parts, folder_of, pack_part, unpack_part
from rollout.record import ForecastKey
from rollout.run import STATUS_FILE, RunDirectory

logger = logging.getLogger(__name__)

PART_BYTES = 16 * 2**20
"""A part is closed once it holds more: all that the mirror keeps in memory."""
ATTACH_SECONDS = 15.0
"""How long a run's start waits to learn whether the mirror is another run's."""
FLUSH_SECONDS = 60.0
"""How long a run's end waits for what is not shipped yet."""
PATIENCE_SECONDS = 60.0
"""How long a restoration goes on asking for one object."""
LONGEST_DELAY_SECONDS = 30.0
"""Between two tries while the mirror cannot be reached."""
CLOSING_TICK_SECONDS = 0.05

_START = "start"
SCHEDULE_FILE = "schedule.jsonl"


class MirrorState(Record):
    """How far a mirror is, at one moment."""

    address: str
    parts: int
    shipped: int
    """The last change that is in the mirror."""
    unshipped: int
    """Changes that are only in the ledger."""
    lag_s: float
    """Seconds for which the oldest of these has been waiting; 0 when there is none."""
    fault: str
    """Why nothing can be shipped now; empty while nothing hinders."""


class Pace:
    """When to ship: a pure state machine over seconds and change numbers."""

    def __init__(self, lag_s: float, records: int) -> None:
        self._lag_s, self._records = lag_s, records
        self._seen: deque[tuple[int, float]] = deque()
        """(newest change, when it was first seen), growing."""
        self._last = 0
        self.shipped_to = 0
        """The mirror holds every change up to this one."""
        self._failures = 0
        self._not_before = 0.0

    @property
    def tick_s(self) -> float:
        """How often to look."""
        return min(1.0, self._lag_s / 8)

    @property
    def half_lag_s(self) -> float:
        """How long a change waits before it is shipped: the other half of the lag is for the shipping itself."""
        return self._lag_s / 2

    @property
    def unshipped(self) -> int:
        """Changes that are not in the mirror."""
        return self._last - self.shipped_to

    def saw(self, now: float, last: int) -> None:
        """The ledger's newest change is `last`."""
        if last > self._last:
            self._last = last
            self._seen.append((last, now))

    def shipped(self, last: int) -> None:
        """The mirror holds every change up to `last`."""
        self.shipped_to = last
        self._last = max(self._last, last)
        self.reached()
        while self._seen and self._seen[0][0] <= last:
            self._seen.popleft()

    def reached(self) -> None:
        """The mirror did something that it was asked to do."""
        self._failures, self._not_before = 0, 0.0

    def failed(self, now: float, closing: bool) -> None:
        """The mirror could not be reached. The delay grows, but not so far that lag is lost once it can be again."""
        longest = min(1.0 if closing else LONGEST_DELAY_SECONDS, self.half_lag_s)
        self._not_before = now + min(longest, 0.05 * 2**self._failures)
        self._failures = min(self._failures + 1, 16)

    def may_try(self, now: float) -> bool:
        """Whether the delay after the last failure is over."""
        return now >= self._not_before

    def lag_s(self, now: float) -> float:
        """Seconds since the oldest change that is not shipped was seen."""
        return now - self._seen[0][1] if self._seen else 0.0

    def due(self, now: float, closing: bool) -> bool:
        """Whether to ship now."""
        if not self.unshipped or not self.may_try(now):
            return False
        return closing or self.unshipped >= self._records or self.lag_s(now) >= self.half_lag_s


class StartIndex(Record):
    """What a mirrored run was begun with."""

    fingerprint: str
    files: dict[str, str]
    """SHA-256 by name."""


class Mirror:
    """Ships one run's ledger from a thread of its own. The run's writer is not touched and never waits."""

    def __init__(
        self,
        run: RunDirectory,
        address: str,
        lag_s: float,
        records: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Raises SettingsError for an address that cannot be opened here."""
        self._run = run
        self._store = MirrorStore(address)
        self._pace = Pace(lag_s, records)
        self._records = records
        self._clock = clock
        self._log = LogLimit(logger, clock=clock)
        self._lock = threading.Lock()
        self._fault = ""
        self._parts = 0
        self._status: str | None = None
        self._started: set[str] = set()
        """Start files that have been put by this process."""
        self._pending: tuple[Part, bytes] | None = None
        self._refusal: PastcastError | None = None
        self._settled, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> Self:
        """Begin to ship. Raises SettingsError or DataError if the mirror belongs to another run or went another way.

        A mirror that cannot be reached is no error: it is said, and caught up with later.
        """
        self._thread.start()
        self._settled.wait(ATTACH_SECONDS)
        if self._refusal is not None:
            raise self._refusal
        return self

    def note(self, status: str) -> None:
        """The newest status of the run, to lie beside its parts; the last one noted is the one that is shipped."""
        with self._lock:
            self._status = status

    def state(self) -> MirrorState:
        """How far it is."""
        with self._lock:
            return MirrorState(
                address=self._store.address,
                parts=self._parts,
                shipped=self._pace.shipped_to,
                unshipped=self._pace.unshipped,
                lag_s=self._pace.lag_s(self._clock()),
                fault=self._fault,
            )

    def close(self, within_s: float = FLUSH_SECONDS) -> MirrorState:
        """Ship what is left, for at most `within_s` seconds, and say what is not shipped."""
        self._closing.set()
        self._thread.join(within_s)
        state = self.state()
        self._log.flush()
        if state.unshipped or state.fault:
            logger.error(
                "mirror %s: %d changes are only in %s and not in the mirror (%s); keep the directory, and resume from it",
                state.address,
                state.unshipped,
                self._run.path,
                state.fault or f"not done within {within_s:g} s",
            )
        return state

    def _work(self) -> None:
        try:
            with self._run.ledger() as ledger:
                self._pace.saw(self._clock(), ledger.last_change())
                self._ship_all(ledger)
        except (SettingsError, DataError) as error:
            self._refusal = error
            self._note_fault(str(error))
            logger.error("%s; nothing is shipped any more", error)
        except Exception as error:
            self._note_fault(f"a bug of ours: {error!r}")
            logger.exception("mirror %s: stopped by a bug of ours; the run goes on without it", self._store.address)
        finally:
            self._settled.set()

    def _ship_all(self, ledger: Ledger) -> None:
        attached = False
        status_shipped: str | None = None
        status_due = 0.0
        while True:
            closing = self._closing.is_set()
            try:
                # Asked before the lock is taken, for which the driver's loop may wait.
                last = ledger.last_change()
                with self._lock:
                    self._pace.saw(self._clock(), last)
                    may_try = self._pace.may_try(self._clock())
                if not attached and may_try:
                    self._attach(ledger)
                    attached = True
                    self._settled.set()
                while attached and self._due():
                    self._ship(ledger)
                status = self._status
                if attached and may_try and status != status_shipped and (closing or self._clock() >= status_due):
                    self._store.put(STATUS_FILE, (status or "").encode())
                    status_shipped, status_due = status, self._clock() + max(1.0, self._pace.half_lag_s)
                if attached:
                    self._note_fault("")
            except MirrorUnreachable as error:
                with self._lock:
                    self._pace.failed(self._clock(), closing)
                self._note_fault(error.detail)
                self._log.error(
                    "mirror-unreachable",
                    "mirror %s cannot be reached, %d changes wait for %.0f s: %s. The run goes on; it is tried again",
                    self._store.address,
                    self._pace.unshipped,
                    self._pace.lag_s(self._clock()),
                    error.detail,
                )
            if closing and attached and not self._pace.unshipped and status_shipped == self._status:
                return
            if closing:
                time.sleep(CLOSING_TICK_SECONDS)
            else:
                self._closing.wait(self._pace.tick_s)

    def _due(self) -> bool:
        with self._lock:
            return self._pace.due(self._clock(), self._closing.is_set())

    def _note_fault(self, fault: str) -> None:
        with self._lock:
            self._fault = fault

    def _attach(self, ledger: Ledger) -> None:
        """Find how far the mirror is, and ship what the run was begun with if it holds nothing yet."""
        index = read_index(self._store)
        mine = self._run.manifest()
        if index is None:
            self._ship_start(ledger)
        else:
            _refuse_another(self._store, index, mine)
        parts = read_parts(self._store)
        if parts:
            last = parts[-1]
            held = unpack_part(last, self._store.get(last.path), self._store.address)
            if held != ledger.changes(last.first - 1, len(held)):
                raise SettingsError(
                    f"mirror {self._store.address} holds records up to change {last.last} that {self._run.path} does not "
                    "have: the directory is older than its mirror, or two drivers went on from one. Move the directory away "
                    "and --resume restores it from the mirror, or choose another run.mirror"
                )
        with self._lock:
            self._parts = len(parts)
            self._pace.shipped(parts[-1].last if parts else 0)

    def _ship_start(self, ledger: Ledger) -> None:
        files = {name: path.read_bytes() for name, path in self._run.start_files().items()}
        files[SCHEDULE_FILE] = "".join(k.model_dump_json() + "\n" for k in ledger.scheduled()).encode()
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        for name in files.keys() - self._started:
            self._store.put(_start_path(name, digests[name]), files[name])
            self._started.add(name)
            with self._lock:
                self._pace.reached()
        index = StartIndex(fingerprint=self._run.manifest().fingerprint, files=digests).model_dump_json().encode()
        self._store.put_confirmed(f"{_START}/index-{hashlib.sha256(index).hexdigest()}.json", index)

    def _ship(self, ledger: Ledger) -> None:
        """Ship one part. After a failure the same one is tried again: it may have arrived all the same."""
        if self._pending is None:
            changes = ledger.changes(self._pace.shipped_to, self._records, PART_BYTES)
            self._pending = pack_part(self._parts + 1, changes)
        part, data = self._pending
        there = committed_parts_of(self._store, part.number)
        if any(p.number >= part.number and p != part for p in there):
            raise DataError(
                f"mirror {self._store.address}: another driver ships the same run and has part {part.number}; end one of them"
            )
        if part not in there:
            self._store.put_confirmed(part.path, data)
        self._pending = None
        with self._lock:
            self._parts = part.number
            self._pace.shipped(part.last)


@contextlib.contextmanager
def mirrored(run: RunDirectory, settings: RunSettings) -> Iterator[Mirror | None]:
    """Ship the run for as long as the context is open, and what is left at its end; None without `run.mirror`."""
    if settings.mirror is None:
        yield None
        return
    mirror = Mirror(run, settings.mirror, settings.mirror_lag_s, settings.mirror_records).start()
    try:
        yield mirror
    finally:
        mirror.close()


def take_up(run: RunDirectory, address: str, manifest: Manifest, resume: bool) -> None:
    """Restore a run that has no directory, if its mirror holds it and it is to be resumed; a mirror that is free is left.

    Raises SettingsError if the mirror holds another run, or this one and `resume` is not set; MirrorUnreachable if it is to
    be resumed and the mirror does not answer: beginning anew would not be resuming.
    """
    try:
        store = MirrorStore(address)
        index = _patiently(PATIENCE_SECONDS if resume else 0.0)(read_index, store)
        if index is None:
            return
        _refuse_another(store, index, manifest)
    except MirrorUnreachable:
        if resume:
            raise
        return  # said, and caught up with, by the mirror of the run
    if not resume:
        raise SettingsError(
            f"mirror {address} holds this run already; --resume restores it from there, or choose another run.mirror"
        )
    restore(run, address)


def restore(run: RunDirectory, address: str, patience_s: float = PATIENCE_SECONDS) -> bool:
    """Lay a run as its mirror holds it; False if the mirror holds none.

    Raises DataError that names a damaged or missing part, MirrorUnreachable when the store does not answer.
    """
    store = MirrorStore(address)
    patiently = _patiently(patience_s)
    index = patiently(read_index, store)
    if index is None:
        return False
    files = {name: patiently(read_start_file, store, index, name) for name in index.files}
    schedule = map(ForecastKey.model_validate_json, files.pop(SCHEDULE_FILE).decode().splitlines())
    parts = patiently(read_parts, store)

    def changes() -> Iterator[list[Change]]:
        for part in parts:
            yield unpack_part(part, patiently(store.get, part.path), store.address)

    logger.info("restoring %s from %s: %d parts", run.path, store.address, len(parts))
    run.lay(files, schedule, changes())
    return True


def _patiently(patience_s: float) -> Retrying:
    return Retrying(
        retry=retry_if_exception_type(MirrorUnreachable),
        stop=stop_after_delay(patience_s),
        wait=wait_exponential(0.1, max=5.0),
        reraise=True,
    )


def _refuse_another(store: MirrorStore, index: StartIndex, mine: Manifest) -> None:
    if index.fingerprint != mine.fingerprint:
        theirs = Manifest.model_validate_json(read_start_file(store, index, "manifest.json"))
        lines = "\n".join(f"  {line}" for line in differences(theirs, mine))
        raise SettingsError(
            f"mirror {store.address} holds another run (its value → this run's):\n{lines}\nChoose another run.mirror"
        )


def read_index(store: MirrorStore) -> StartIndex | None:
    """What the mirrored run was begun with; None if the mirror holds no run yet. Raises DataError if it is damaged."""
    names = set(store.names(_START))
    found = sorted(n for n in names if n.endswith(".json") and n + CONFIRMATION in names)
    if not found:
        return None
    if len(found) > 1:
        raise DataError(
            f"mirror {store.address}: two runs were begun here ({', '.join(found)}); choose another run.mirror"
        )
    content = store.get(f"{_START}/{found[0]}")
    if found[0] != f"index-{hashlib.sha256(content).hexdigest()}.json":
        raise DataError(f"mirror {store.address}: {_START}/{found[0]} is damaged; bring it back from a copy")
    return StartIndex.model_validate_json(content)


def read_start_file(store: MirrorStore, index: StartIndex, name: str) -> bytes:
    """One file that the run was begun with. Raises DataError if it is damaged."""
    path = _start_path(name, index.files[name])
    content = store.get(path)
    if hashlib.sha256(content).hexdigest() != index.files[name]:
        raise DataError(f"mirror {store.address}: {path} is damaged; bring it back from a copy")
    return content


def read_parts(store: MirrorStore) -> list[Part]:
    """Every part that counts, in order. Raises DataError for a gap."""
    names = [name for folder in store.names(FOLDER) for name in store.names(f"{FOLDER}/{folder}")]
    return committed_parts(names, store.address)


def committed_parts_of(store: MirrorStore, number: int) -> list[Part]:
    """The parts that count in the folder of that number."""
    names = store.names(folder_of(number))
    found = [Part.named(n.removesuffix(CONFIRMATION)) for n in names if n.endswith(CONFIRMATION)]
    return [p for p in found if p is not None]


def _start_path(name: str, digest: str) -> str:
    return f"{_START}/{digest}/{name}"
