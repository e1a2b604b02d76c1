"""Simulated nodes: they take engines and workers, die with all they hold, are drained and joined during a run."""

import asyncio
from collections.abc import Collection

from rollout.simulator.actors import Network
from rollout.simulator.faults import Faults

ENGINES_PER_NODE = 2
SPOT_SECONDS = (5.0, 120.0)
"""How long a drained node still lives, at least and at most."""


class Nodes:
    """The nodes of one life of the driver. The driver's own node never dies: that is what killing the driver is for."""

    def __init__(self, count: int, spare: int, network: Network, faults: Faults) -> None:
        self._network, self._faults = network, faults
        self._spare = spare
        self._numbers = 0
        self.alive: list[str] = []
        self.draining: dict[str, float] = {}
        """Node → when it will be gone."""
        for _ in range(count):
            self._join()

    def room(self, avoid: Collection[str] = ()) -> str | None:
        """A node that takes one more engine; None if there is none."""
        free = [
            n for n in self.alive if n not in avoid and n not in self.draining and self._engines(n) < ENGINES_PER_NODE
        ]
        return min(free, key=self._engines) if free else None

    def rooms(self) -> int:
        """Engines that the nodes still take."""
        return sum(ENGINES_PER_NODE - self._engines(n) for n in self.alive if n not in self.draining)

    def left(self) -> dict[str, float | None]:
        """Draining nodes, with the seconds left to them."""
        return {node: max(0.0, until - self._faults.now) for node, until in self.draining.items()}

    def for_worker(self) -> str:
        """Where the next worker is put."""
        return self._faults.stream("nodes").choice(self.alive)

    async def live(self) -> None:
        """Once a minute, and for ever: things die, and new nodes come."""
        chance = self._faults.stream("nodes")
        while True:
            await asyncio.sleep(chance.uniform(5, 15))
            for process in list(self._network.processes.values()):
                kind = process.name.split("-")[0]
                if (
                    kind in ("engine", "worker", "pool")
                    and process.alive
                    and self._strikes(f"{kind}-dies", process.name)
                ):
                    self._network.kill(process, "it crashed")
            for node in list(self.alive):
                if self.draining.get(node, float("inf")) <= self._faults.now or self._strikes("node-dies", node):
                    self._die(node)
                elif node not in self.draining and self._strikes("node-drains", node):
                    self.draining[node] = self._faults.now + chance.uniform(*SPOT_SECONDS)
            if (self._spare and chance.random() < 0.1) or not self.alive:
                self._spare -= 1
                self._join()

    def _strikes(self, kind: str, what: str) -> bool:
        # Rates are per minute, and this is asked six times a minute.
        return self._faults.strikes(kind, what, times=1 / 6)

    def _engines(self, node: str) -> int:
        return sum(p.node == node and p.name.startswith("engine-") for p in self._network.processes.values())

    def _join(self) -> None:
        self._numbers += 1
        self.alive.append(f"node{self._numbers}")

    def _die(self, node: str) -> None:
        self.alive.remove(node)
        self.draining.pop(node, None)
        for process in [p for p in self._network.processes.values() if p.node == node]:
            self._network.kill(process, f"its node {node} died")
        # What a cluster loses is replaced, sooner or later.
        if not self._spare:
            self._spare = 1
