"""Deadlines of sources that move them: a shown deadline must have been the deadline at the forecast date.

Some sources overwrite the scheduled end with the settlement when an event ends early (Manifold does). Of such a source no
deadline is shown, not only the moved ones: if those alone were missing, a deadline in sight would say that the event ran
its full course. Whether a deadline is shown depends on the source and on nothing that came later.
"""

from collections.abc import Collection, Sequence

from cluster.failures import SettingsError
from rollout.events.event import Event


def hide_moved_deadlines(events: Sequence[Event], sources: Collection[str]) -> tuple[list[Event], int]:
    """The events, those of these sources without a deadline, and how many lost one.

    Raises SettingsError for a source that no event has: a misspelt name would hide nothing.
    """
    known = {e.source for e in events}
    if unknown := sorted(set(sources) - known):
        raise SettingsError(
            f"events.deadlines_move names {', '.join(map(repr, unknown))}, but the events come from "
            f"{', '.join(map(repr, sorted(known))) or 'nowhere'}; name sources as the events do"
        )
    moved = [e.source in sources and e.deadline is not None for e in events]
    checked = [e.model_copy(update={"deadline": None}) if m else e for e, m in zip(events, moved, strict=True)]
    return checked, sum(moved)
