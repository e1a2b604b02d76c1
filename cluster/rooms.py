"""Where engines may lie: nodes that live, nodes that leave, and room for more engines. A pure class."""

from collections.abc import Collection

from cluster.fleet_events import FleetRules

PLACE_AGAIN_S = 300.0
"""Between two attempts to place an engine for which no room is seen: the demand alone may make an autoscaler bring a node."""


class Rooms:
    """As the cluster was seen last."""

    def __init__(self, rules: FleetRules) -> None:
        self._rules = rules
        self._alive: frozenset[str] = frozenset()
        self.draining: set[str] = set()
        """Nodes that are being emptied."""
        self._free = 0
        self._again_at = float("-inf")

    def seen(self, alive: Collection[str], free: int) -> frozenset[str]:
        """These nodes live, and the free resources of those that stay would hold so many more engines; the nodes that are gone."""
        gone, self._alive = self._alive - frozenset(alive), frozenset(alive)
        self.draining &= self._alive
        self._free = free
        return gone

    def taken(self) -> None:
        """An engine got its place; until the cluster is looked at again, there is room for one less."""
        self._free = max(0, self._free - 1)

    def unplaced(self, now: float) -> float:
        """An engine got no place; when it may be tried again."""
        self._again_at = now + PLACE_AGAIN_S
        return self._again_at

    def new_engines(self, active: int, lost: int, claims: int, now: float) -> int:
        """How many to start: where there is room, up to `maximum`; now and then also without seeing room.

        `active`: engines that are there or will be again; `lost`: dead for good; `claims`: those that have a claim on the room
        which is seen, because they are being placed or will be.
        """
        new = min(self._rules.maximum - active - lost, self._free - claims)
        missing = self._rules.replicas - active - lost
        if new <= 0 < missing and now >= self._again_at:
            self._again_at = now + PLACE_AGAIN_S
            new = missing
        return max(0, new)
