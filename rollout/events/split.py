"""Whole events into train and eval by time (Forecast-Dojo A.3).

An event belongs to a window if it opens on or after its start and closes before its end, both as UTC days. An event
that only overlaps a window is dropped: part of its life would be seen from both sides. Nothing is dropped uncounted.
"""

from collections import Counter
from collections.abc import Iterable

from cluster.config import SplitWindow
from cluster.failures import SettingsError
from cluster.record import Record
from retrieval.article import utc_day
from rollout.events.event import Event, Split


class SplitEvents(Record):
    """Events with their split, in order of id, and the dropped ones by reason."""

    events: tuple[Event, ...]
    dropped: dict[str, int]
    """`crosses-boundary`, `outside-windows`, `over-limit`."""


def split_events(
    events: Iterable[Event], train: SplitWindow | None, eval_: SplitWindow | None, limit: int | None = None
) -> SplitEvents:
    """Assigns every event to a window; at most `limit` events per split, the first in order of id.

    Without any window an event keeps the split its record carries, and one without is held out (`eval`).
    Raises SettingsError if the windows overlap.
    """
    if train and eval_ and train.start < eval_.end and eval_.start < train.end:
        raise SettingsError(
            f"events.train [{train.start}, {train.end}) and events.eval [{eval_.start}, {eval_.end}) overlap; "
            "an event would belong to both"
        )
    windows: list[tuple[Split, SplitWindow]] = [("train", train)] if train else []
    windows += [("eval", eval_)] if eval_ else []
    kept: list[Event] = []
    dropped: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for event in sorted(events, key=lambda e: e.id):
        split = _split(event, windows) if windows else (event.split or "eval")
        if split in ("crosses-boundary", "outside-windows"):
            dropped[split] += 1
        elif limit is not None and taken[split] >= limit:
            dropped["over-limit"] += 1
        else:
            taken[split] += 1
            kept.append(event.model_copy(update={"split": split}))
    return SplitEvents(events=tuple(kept), dropped=dict(dropped))


def _split(event: Event, windows: list[tuple[Split, SplitWindow]]) -> str:
    opened, closed = utc_day(event.opened), utc_day(event.closed)
    for split, window in windows:
        if window.start <= opened and closed < window.end:
            return split
    if any(opened < window.end and window.start <= closed for _, window in windows):
        return "crosses-boundary"
    return "outside-windows"
