"""Results on their way into the ledger: gathered while a commit is under way, and forgotten only once it is acknowledged."""

from collections import deque

from rollout.packed import PackedForecast
from rollout.record import ForecastKey

COMMIT_AT_MOST = 500
"""Records in one commit: a bound on how long the ledger is busy and on what a killed driver runs again."""
UNCOMMITTED_AT_MOST = 2000
"""No step is started while this many results wait for the ledger: a slow disk must not fill the driver's memory."""


class Uncommitted:
    """Records with the number of their chain, in the order in which they came."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, PackedForecast]] = deque()
        self._committing: dict[ForecastKey, tuple[int, PackedForecast]] = {}

    def __len__(self) -> int:
        return len(self._arrived) + len(self._committing)

    @property
    def full(self) -> bool:
        """Whether so many wait that no more are to be made."""
        return len(self) >= UNCOMMITTED_AT_MOST

    def add(self, chain: int, packed: PackedForecast) -> None:
        """A record has come."""
        self._arrived.append((chain, packed))

    def batch(self) -> tuple[PackedForecast, ...]:
        """What is to be committed now; empty while there is nothing, or a commit is not acknowledged yet."""
        if self._committing:
            return ()
        batch = [self._arrived.popleft() for _ in range(min(COMMIT_AT_MOST, len(self._arrived)))]
        self._committing = {packed.key: (chain, packed) for chain, packed in batch}
        return tuple(packed for _, packed in batch)

    def acknowledged(self, key: ForecastKey) -> tuple[int, PackedForecast] | None:
        """A record is in the ledger: its chain and itself, or None if that was known already."""
        return self._committing.pop(key, None)
