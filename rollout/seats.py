"""Which workers have room for a step, and which leases each holds: a pure class over numbers."""


class Seats:
    """Free seats and leases by worker. A worker's number is never used again."""

    def __init__(self) -> None:
        self._free: dict[int, int] = {}
        self._held: dict[int, set[int]] = {}
        self._turn = 0

    @property
    def free(self) -> int:
        """Steps that could be given out now."""
        return sum(self._free.values())

    def join(self, worker: int, seats: int) -> None:
        """A worker can take that many steps at once."""
        self._free[worker] = seats
        self._held[worker] = set()

    def leave(self, worker: int) -> list[int] | None:
        """A worker is gone; the leases it held, in order, or None if it is not known (any more)."""
        if self._free.pop(worker, None) is None:
            return None
        return sorted(self._held.pop(worker))

    def held(self, worker: int) -> frozenset[int]:
        """The leases of a worker."""
        return frozenset(self._held.get(worker, ()))

    def choose(self, shunned: int | None) -> int:
        """A worker with a free seat: not the one that failed the step if there is another, then the emptiest; ties rotate."""
        free = {w: seats for w, seats in self._free.items() if seats > 0}
        self._turn += 1
        return max(free, key=lambda w: (w != shunned, free[w], (w + self._turn) % (len(self._free) + 1)))

    def take(self, worker: int, lease: int) -> None:
        """A lease sits down."""
        self._held[worker].add(lease)
        self._free[worker] -= 1

    def give_back(self, worker: int, lease: int) -> None:
        """A lease has ended; ignored where its worker is gone."""
        if worker in self._free:
            self._free[worker] += 1
            self._held[worker].discard(lease)
