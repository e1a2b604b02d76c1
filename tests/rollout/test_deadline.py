"""Deadlines that sources move."""

import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import load_settings
from cluster.failures import SettingsError
from rollout.events.deadline import hide_moved_deadlines
from rollout.events.event import Event
from rollout.events.load import load_events

REPOSITORY = Path(__file__).parents[2]
OPENED = dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)
HOURS = st.floats(0, 2000, allow_nan=False)


def event(source: str, deadline_hours: float | None, closed_hours: float) -> Event:
    return Event(
        id=source,
        source=source,
        question="Will it?",
        options=("YES", "NO"),
        opened=OPENED,
        deadline=None if deadline_hours is None else OPENED + dt.timedelta(hours=deadline_hours),
        closed=OPENED + dt.timedelta(hours=closed_hours),
        outcome=("YES",),
    )


@given(deadline=HOURS, settlements=st.lists(HOURS, min_size=1, max_size=5))
def test_whether_a_deadline_is_shown_says_nothing_about_the_settlement(
    deadline: float, settlements: list[float]
) -> None:
    moving = [event("manifold", deadline, hours) for hours in [*settlements, deadline]]
    honest = [event("metaculus", deadline, hours) for hours in [*settlements, deadline]]
    checked, hidden = hide_moved_deadlines([*moving, *honest], ("manifold",))
    assert [e.deadline for e in checked] == [None] * len(moving) + [e.deadline for e in honest]
    assert hidden == len(moving)


def test_events_without_a_deadline_are_not_counted() -> None:
    _, hidden = hide_moved_deadlines([event("manifold", None, 3), event("manifold", 2, 3)], ("manifold",))
    assert hidden == 1


def test_a_misspelt_source_is_named() -> None:
    with pytest.raises(SettingsError, match="'Manifold', but the events come from 'manifold'"):
        hide_moved_deadlines([event("manifold", 2, 3)], ("Manifold",))


def test_in_summer2024_every_shown_deadline_was_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (REPOSITORY.parent / "shared/data/summer2024").is_dir():
        pytest.skip("../shared/data/summer2024 is absent")
    monkeypatch.chdir(REPOSITORY)
    settings = load_settings([Path("configs/summer2024.yaml")]).events
    loaded = load_events(settings).records
    checked, hidden = hide_moved_deadlines(loaded, settings.deadlines_move)
    shown = [e for e in checked if e.deadline is not None]
    assert hidden == 466
    # Once written to the second, these two were the moment Biden withdrew and the moment a market was closed by hand.
    by_id = {e.id[:8]: e for e in checked}
    assert by_id["262f26c7"].deadline is by_id["be4f6ed5"].deadline is None
    # An honest schedule outlives events that end early, and lies before those that are settled late.
    assert sum(e.deadline > e.closed for e in shown if e.deadline) == 41
    assert sum(e.deadline < e.closed for e in shown if e.deadline) == 130
