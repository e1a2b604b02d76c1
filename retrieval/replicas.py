"""Which replica gets the next requests: a pure state machine, without Ray, clock or network.

Requests go to the open replica with the fewest of them outstanding; ties rotate. A replica that was lost gets nothing until it is
seen to answer again, and one that will not come back never. No replica is given more calls at once than it may hold.
"""

from collections import Counter
from typing import Literal

State = Literal["open", "down", "gone"]


class Replicas:
    """The replicas of one group, by number from 0, as one process sees them."""

    def __init__(self, count: int, calls: int) -> None:
        """All are open at first. `calls`: how many a replica may hold of each line."""
        if count < 1 or calls < 1:
            raise ValueError(f"{count} replicas with {calls} calls each can answer nothing")
        self._states: list[State] = ["open"] * count
        self._faults: dict[int, str] = {}
        self._limit = calls
        self._calls: Counter[tuple[int, str]] = Counter()
        self._outstanding = [0] * count
        self._last = count - 1

    @property
    def states(self) -> tuple[State, ...]:
        """By number."""
        return tuple(self._states)

    @property
    def fault(self) -> str | None:
        """Why nothing will be answered any more; None while a replica is open or may come back."""
        return "; ".join(self._faults.values()) if len(self._faults) == len(self._states) else None

    def outstanding(self, replica: int) -> int:
        """Requests that were sent to it and have not ended."""
        return self._outstanding[replica]

    def others_open(self, replica: int) -> bool:
        """Whether another one could take over."""
        return any(state == "open" for i, state in enumerate(self._states) if i != replica)

    def choose(self, line: str) -> int | None:
        """The replica for the next call of a line; None while none may have one. Only `sent` changes what is outstanding."""
        fit = [i for i, state in enumerate(self._states) if state == "open" and self._calls[i, line] < self._limit]
        if not fit:
            return None
        count = len(self._states)
        return min(fit, key=lambda i: (self._outstanding[i], (i - self._last - 1) % count))

    def sent(self, replica: int, line: str, requests: int) -> None:
        """A call with so many requests is on its way."""
        self._calls[replica, line] += 1
        self._outstanding[replica] += requests
        self._last = replica

    def ended(self, replica: int, line: str, requests: int) -> None:
        """That call has ended, well or not."""
        self._calls[replica, line] -= 1
        self._outstanding[replica] -= requests

    def lost(self, replica: int) -> bool:
        """It failed. True if that is news: somebody has to find out when it is back."""
        news = self._states[replica] == "open"
        if news:
            self._states[replica] = "down"
        return news

    def back(self, replica: int) -> None:
        """It answers again."""
        if self._states[replica] == "down":
            self._states[replica] = "open"

    def give_up(self, replica: int, why: str) -> None:
        """It will not come back."""
        self._states[replica] = "gone"
        self._faults.setdefault(replica, why)
