"""Whole events in one window or none."""

import datetime as dt

import pytest

from cluster.config import SplitWindow
from cluster.failures import SettingsError
from rollout.events.event import Event
from rollout.events.split import split_events

TRAIN = SplitWindow(start=dt.date(2030, 1, 1), end=dt.date(2030, 2, 1))
EVAL = SplitWindow(start=dt.date(2030, 2, 1), end=dt.date(2030, 3, 1))


def event(label: str, opened: str, closed: str) -> Event:
    return Event(
        id=label,
        source="s",
        question="q",
        options=("A", "B"),
        opened=dt.datetime.fromisoformat(opened).replace(tzinfo=dt.UTC),
        closed=dt.datetime.fromisoformat(closed).replace(tzinfo=dt.UTC),
        outcome=("A",),
    )


def test_an_event_belongs_to_a_window_only_with_its_whole_life() -> None:
    split = split_events(
        [
            event("b", "2030-02-01", "2030-02-28T23:59"),
            event("a", "2030-01-01", "2030-01-31T23:59"),
            event("c", "2030-01-31", "2030-02-01"),
            event("d", "2029-12-31", "2030-01-05"),
            event("e", "2030-02-20", "2030-03-01"),
            event("f", "2030-03-02", "2030-03-09"),
        ],
        TRAIN,
        EVAL,
    )
    assert [(e.id, e.split) for e in split.events] == [("a", "train"), ("b", "eval")]
    assert split.dropped == {"crosses-boundary": 3, "outside-windows": 1}


def test_a_limit_keeps_the_first_ids_of_each_split_and_counts_the_others() -> None:
    events = [event(f"t{i}", "2030-01-02", "2030-01-09") for i in range(3)] + [event("v", "2030-02-02", "2030-02-09")]
    split = split_events(reversed(events), TRAIN, EVAL, limit=2)
    assert [e.id for e in split.events] == ["t0", "t1", "v"]
    assert split.dropped == {"over-limit": 1}


def test_without_windows_events_are_held_out_unless_they_say_otherwise() -> None:
    given = event("b", "2030-01-02", "2030-01-09").model_copy(update={"split": "train"})
    split = split_events([event("a", "2030-01-02", "2030-01-09"), given], None, None)
    assert [(e.id, e.split) for e in split.events] == [("a", "eval"), ("b", "train")]


def test_overlapping_windows_are_refused() -> None:
    with pytest.raises(SettingsError, match="overlap"):
        split_events([], TRAIN, SplitWindow(start=dt.date(2030, 1, 31), end=dt.date(2030, 3, 1)))
