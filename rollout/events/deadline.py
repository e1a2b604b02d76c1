"""Deadlines that a source moved: a shown deadline must have been the deadline at the forecast date.

Some sources overwrite the scheduled end with the settlement when an event ends early (Manifold does). Such a deadline
gives the close away, so it is not shown; an honest one that coincides with the settlement is lost with it.
"""

import datetime as dt
from collections.abc import Sequence

from rollout.events.event import Event

COINCIDENCE = dt.timedelta(hours=1)
"""A deadline this near to the settlement may have been moved there."""


def hide_moved_deadlines(events: Sequence[Event]) -> tuple[list[Event], int]:
    """The events, those whose deadline coincides with the settlement without one, and how many they are."""
    checked = [
        e.model_copy(update={"deadline": None})
        if e.deadline is not None and abs(e.deadline - e.closed) < COINCIDENCE
        else e
        for e in events
    ]
    hidden = sum(a.deadline is not None and b.deadline is None for a, b in zip(events, checked, strict=True))
    return checked, hidden
