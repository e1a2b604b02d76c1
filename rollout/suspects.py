"""Steps whose workers died under them: one of them may be what kills workers. A pure class over numbers.

Suspects begin one at a time, so that one such step does not use up the attempts of all that run beside it; but where a node
died twice, hundreds of steps are suspects and none is guilty. So each that its worker survived lets one more run at once, and
the next death ends that. One under which a further worker died runs as the only suspect.
"""

from collections import deque
from collections.abc import Callable

SUSPECT_LOSSES = 2
"""A step whose workers died this often is a suspect."""


class Suspects:
    """Chains that wait under suspicion, and the leases of those that run."""

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        self._watched: set[int] = set()
        self._at_most = 1

    def add(self, chain: int) -> None:
        """It waits for its turn."""
        self._waiting.append(chain)

    def pop(self, losses: Callable[[int], int | None]) -> int | None:
        """The chain that may begin now; None if none waits or may. `losses`: workers that died under a chain's step, None for one
        that has ended meanwhile."""
        while self._waiting:
            lost = losses(self._waiting[0])
            alone = lost is not None and lost > SUSPECT_LOSSES
            if len(self._watched) >= (1 if alone else self._at_most):
                return None
            chain = self._waiting.popleft()
            if lost is not None:
                return chain
        return None

    def watch(self, lease: int) -> None:
        """A suspect has begun under that lease."""
        self._watched.add(lease)

    def survived(self, lease: int) -> None:
        """A lease was answered by its worker."""
        if lease in self._watched:
            self._at_most += 1

    def ended(self, lease: int) -> None:
        """A lease is over, however."""
        self._watched.discard(lease)

    def worker_died(self) -> None:
        """From now on they begin one at a time again."""
        self._at_most = 1
