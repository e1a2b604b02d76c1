"""Joins the runs of several jobs over one plan: the shares of a schedule, or copies that went on apart.

The result is a run like any other: it is scored, reported, exported and resumed, and when all shares are there its
fingerprint is that of the run that was never divided. Runs that came from something else, and keys with two different
records, are refused. What was taken back in any of the runs is taken back in the result, and kept.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cluster.failures import DataError, SettingsError
from cluster.record import Record
from rollout.changes import Change, Committed, Superseded
from rollout.events.event import Event
from rollout.ledger import Ledger
from rollout.manifest import Manifest, content_hashes, differences, regrouped
from rollout.record import ForecastKey
from rollout.run import RunDirectory, start_content
from rollout.share import joined_share

BATCH_CHANGES = 500
BATCH_BYTES = 64 * 2**20
"""A batch is closed once it holds more: all that a merge keeps in memory of records."""
CONFLICTS_NAMED = 5

Chain = tuple[str, str, str, int]
"""Model, event, mode and rollout."""


class MergeSummary(Record):
    """What a merge made."""

    path: Path
    runs: int
    scheduled: int
    recorded: int
    repeated: int
    """Records that stood in more than one run and are one now."""
    superseded: int


class _Held(Record):
    """What one run holds, its records by digest."""

    path: Path
    until: int
    """Its newest change when it was looked at: what a driver adds meanwhile is left out."""
    current: dict[ForecastKey, tuple[str, str]]
    """(identity, content)"""
    retracted: dict[str, Superseded]
    """By the identity of the record that was taken back."""


def merge_runs(out: Path, runs: Sequence[Path]) -> MergeSummary:
    """Write the run that holds everything of `runs`.

    Raises SettingsError if `out` is a run already or the runs came from different things, DataError if they hold
    different records for one key.
    """
    directories = [RunDirectory(path) for path in runs]
    if len({d.path.resolve() for d in directories}) < 2:
        raise SettingsError("a merge takes at least two different runs")
    target = RunDirectory(out)
    target.require_new()
    manifests = [d.manifest() for d in directories]
    share = _common_share(directories, manifests)
    events, schedule = _content(directories)
    manifest = regrouped(manifests[0], share, content_hashes(events, schedule))
    settings = directories[0].settings()
    run = settings.run.model_copy(update={"directory": out, "share": share, "mirror": None})
    floor = {key: p for d in directories for key, p in d.floor().items()}
    unused = list({row: None for d in directories for row in d.unused()})
    held = [_look(d) for d in directories]
    retracted = _taken_back(held)
    _refuse_conflicts(held, retracted)
    files = start_content(settings.model_copy(update={"run": run}), manifest, events, floor, unused)
    with target.lock():
        target.lay(files, schedule, _changes(directories, held, retracted))
    with target.ledger() as ledger:
        scheduled, recorded = ledger.counts()
        superseded = ledger.last_change() - recorded
    return MergeSummary(
        path=out,
        runs=len(directories),
        scheduled=scheduled,
        recorded=recorded,
        repeated=sum(len(h.current) for h in held) - len({k for h in held for k in h.current}),
        superseded=superseded // 2,
    )


def _common_share(directories: Sequence[RunDirectory], manifests: Sequence[Manifest]) -> str | None:
    """The share that the runs make together. Raises SettingsError that names every other difference."""
    shares = [m.settings["run"].get("share") for m in manifests]
    alike = {"events": "", "schedule": ""}
    first = regrouped(manifests[0], None, alike)
    by_share: dict[str | None, tuple[RunDirectory, Manifest]] = {}
    for directory, manifest, share in zip(directories, manifests, shares, strict=True):
        changed = differences(first, regrouped(manifest, None, alike))
        known, same = by_share.setdefault(share, (directory, manifest))
        if not changed and (changed := differences(same, manifest)):
            _refuse(known, directory, changed)
        if changed:
            _refuse(directories[0], directory, changed)
    try:
        return joined_share(shares)
    except ValueError as error:
        raise SettingsError(
            f"the runs cannot be merged: {error}; merge runs with the same divisor in run.share"
        ) from error


def _refuse(one: RunDirectory, other: RunDirectory, changed: Iterable[str]) -> None:
    lines = "\n".join(f"  {line}" for line in changed)
    raise SettingsError(
        f"{other.path} cannot be merged with {one.path}: they came from different things ({one.path} → {other.path}):\n{lines}"
    )


def _content(directories: Sequence[RunDirectory]) -> tuple[list[Event], list[ForecastKey]]:
    """All events in order of id and all keys in scheduled order."""
    events: dict[str, Event] = {}
    keys: dict[str, list[ForecastKey]] = {}
    for directory in directories:
        for name, event in directory.events().items():
            if events.setdefault(name, event) != event:
                raise DataError(f"{directory.path}: event {name} is not the event of that id in the other runs")
        mine: dict[str, list[ForecastKey]] = {}
        with directory.ledger() as ledger:
            for key in ledger.scheduled():
                mine.setdefault(key.event, []).append(key)
        for name, scheduled in mine.items():
            if keys.setdefault(name, scheduled) != scheduled:
                raise DataError(f"{directory.path}: event {name} is scheduled otherwise than in the other runs")
    # The order in which a plan schedules: by event, and within an event as it stands.
    return [events[name] for name in sorted(events)], [key for name in sorted(keys) for key in keys[name]]


def _look(directory: RunDirectory) -> _Held:
    current: dict[ForecastKey, tuple[str, str]] = {}
    retracted: dict[str, Superseded] = {}
    committed: dict[int, tuple[ForecastKey, str]] = {}
    with directory.ledger() as ledger:
        until = ledger.last_change()
        for change in _all_changes(ledger, until):
            if isinstance(change, Committed):
                committed[change.change] = (change.key, _identity(change))
                current[change.key] = (_identity(change), _content_digest(change))
            else:
                key, identity = committed[change.forecast]
                del current[key]
                retracted[identity] = change
    return _Held(path=directory.path, until=until, current=current, retracted=retracted)


def _taken_back(held: Sequence[_Held]) -> dict[str, Superseded]:
    """By identity: what one of the runs took back, and what another had made meanwhile from the notebook of such a record.

    That is what the retry itself would have taken back, had it seen it.
    """
    retracted = {identity: change for h in held for identity, change in h.retracted.items()}
    made_from = {}
    for h in held:
        stale: dict[Chain, tuple[ForecastKey, Superseded]] = {}
        for key, (identity, _) in h.current.items():
            first = stale.get(_chain(key))
            if key.mode == "memory-on" and identity in retracted and (first is None or key.date < first[0].date):
                stale[_chain(key)] = key, retracted[identity]
        for key, (identity, _) in h.current.items():
            if (first := stale.get(_chain(key))) is not None and key.date > first[0].date:
                made_from[identity] = first[1]
    return made_from | retracted


def _chain(key: ForecastKey) -> Chain:
    return key.model, key.event, key.mode, key.rollout


def _refuse_conflicts(held: Sequence[_Held], retracted: Mapping[str, Superseded]) -> None:
    kept: dict[ForecastKey, tuple[str, Path]] = {}
    conflicts = []
    for h in held:
        for key, (identity, content) in h.current.items():
            if identity in retracted:
                continue
            there, path = kept.setdefault(key, (content, h.path))
            if there != content:
                conflicts.append(f"  {key.model_dump_json()} in {path} and {h.path}")
    if conflicts:
        more = f"\n  and {len(conflicts) - CONFLICTS_NAMED} more" if len(conflicts) > CONFLICTS_NAMED else ""
        raise DataError(
            f"the runs cannot be merged: {len(conflicts)} forecasts have different records:\n"
            + "\n".join(conflicts[:CONFLICTS_NAMED])
            + f"{more}\nMerge only one of these runs: which record is right cannot be decided here"
        )


def _changes(
    directories: Sequence[RunDirectory], held: Sequence[_Held], retracted: Mapping[str, Superseded]
) -> Iterator[list[Change]]:
    """What the result's ledger replays: first what was taken back, so that its keys are open, then what stands."""
    number = 0
    for taken_back in (True, False):
        written: set[str | ForecastKey] = set()
        for directory, h in zip(directories, held, strict=True):
            with directory.ledger() as ledger:
                batch: list[Change] = []
                size = 0
                for change in _all_changes(ledger, h.until):
                    if isinstance(change, Superseded):
                        continue
                    identity = _identity(change)
                    what = identity if taken_back else change.key
                    if (identity in retracted) is not taken_back or what in written:
                        continue
                    written.add(what)
                    number += 1
                    batch.append(change.model_copy(update={"change": number}))
                    size += len(change.record) + len(change.trajectory or b"")
                    if taken_back:
                        taken = retracted[identity].model_copy(update={"change": number + 1, "forecast": number})
                        number += 1
                        batch.append(taken)
                    if size > BATCH_BYTES or len(batch) >= BATCH_CHANGES:
                        yield batch
                        batch, size = [], 0
                yield batch


def _all_changes(ledger: Ledger, until: int) -> Iterator[Change]:
    after = 0
    while after < until and (changes := ledger.changes(after, BATCH_CHANGES, BATCH_BYTES)):
        yield from (c for c in changes if c.change <= until)
        after = changes[-1].change


def _content_digest(change: Committed) -> str:
    return hashlib.sha256(change.record.encode() + b"\0" + (change.trajectory or b"")).hexdigest()


def _identity(change: Committed) -> str:
    """The same for copies of one record, and for no other: a step that fails twice in the same way has two records."""
    return f"{change.at.isoformat()} {_content_digest(change)}"
