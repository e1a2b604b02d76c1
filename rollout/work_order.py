"""Which waiting chain goes next: the one that is expected to take longest, so that a run does not end in one long tail.

What is expected is the number of steps left times the mean seconds of a finished step of that mode in this sitting; chains
that are alike share one queue, so that a choice costs no more with 50,000 waiting than with ten.
"""

from collections import deque

from rollout.record import Mode

EXPECTED_SECONDS: dict[Mode, float] = {"no-tools": 1.0, "memory-free": 10.0, "memory-on": 10.0}
"""Before any step of a mode has finished. Only the proportion matters: a step with tools makes many model calls."""


class WorkOrder:
    """Chains that may start a step now, by number."""

    def __init__(self) -> None:
        self._queues: dict[tuple[Mode, int], deque[int]] = {}
        self._seconds = dict.fromkeys(EXPECTED_SECONDS, 0.0)
        self._finished = dict.fromkeys(EXPECTED_SECONDS, 0)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, chain: int, mode: Mode, steps: int, begun: bool) -> None:
        """`steps` are left to do. One that has begun goes before its equals: its engine still holds its prefix."""
        queue = self._queues.setdefault((mode, steps), deque())
        if begun:
            queue.appendleft(chain)
        else:
            queue.append(chain)

    def took(self, mode: Mode, seconds: float) -> None:
        """A step of that mode has finished."""
        self._seconds[mode] += seconds
        self._finished[mode] += 1

    def expected(self, mode: Mode) -> float:
        """Mean seconds of a step."""
        count = self._finished[mode]
        return self._seconds[mode] / count if count else EXPECTED_SECONDS[mode]

    def pop(self) -> int | None:
        """The chain to go on with; None if none waits."""
        waiting = [kind for kind, queue in self._queues.items() if queue]
        if not waiting:
            return None
        longest = max(waiting, key=lambda kind: (kind[1] * self.expected(kind[0]), kind))
        return self._queues[longest].popleft()
