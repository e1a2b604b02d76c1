"""Several jobs divide one schedule by event, so that the chains of an event stay in one job.

The shares of N jobs are disjoint, together they are everything, and they differ by one event at most.
"""

from collections.abc import Iterable, Sequence

from rollout.events.event import Event


def share_of(events: Sequence[Event], share: str) -> list[Event]:
    """The events of a share such as `2/4` or `1,3/4`, by their place in the sequence: every fourth one from the second on."""
    numbers, of = _parsed(share)
    return [event for place, event in enumerate(events) if place % of + 1 in numbers]


def joined_share(shares: Iterable[str | None]) -> str | None:
    """What the runs of these shares hold together; None is everything. Raises ValueError if they divide it differently."""
    numbers: set[int] = set()
    divisors = set()
    whole = False
    for share in shares:
        if share is None:
            whole = True
            continue
        some, of = _parsed(share)
        numbers |= some
        divisors.add(of)
    if len(divisors) > 1:
        raise ValueError(f"they divide the events into {' and '.join(str(d) for d in sorted(divisors))} shares")
    if whole or not divisors or len(numbers) == max(divisors):
        return None
    return f"{','.join(str(n) for n in sorted(numbers))}/{max(divisors)}"


def _parsed(share: str) -> tuple[set[int], int]:
    numbers, of = share.split("/")
    return {int(n) for n in numbers.split(",")}, int(of)
