"""The real pool's actor over simulated nodes: only the placing, starting and ending of an engine's process are played."""

import asyncio
from collections.abc import Callable, Collection

from cluster.call import EngineFacts
from cluster.cluster_nodes import NodesSeen
from cluster.config import Settings
from cluster.failures import InfrastructureError
from cluster.fleet import Fleet
from cluster.fleet_events import Checkpoint, Grant, Start, Want, fleet_rules
from cluster.pool_actor import PoolActor
from cluster.replica import Replica
from cluster.weights import Weights
from rollout.simulator.actors import Handle, Network, Process
from rollout.simulator.cluster import Nodes
from rollout.simulator.engines import SimulatedEngine
from rollout.simulator.faults import MARKER, Faults
from rollout.simulator.script import ScriptedSampler
from rollout.simulator.tools import SILENCE
from rollout.simulator.watch import Watch

PLACEMENT_SECONDS = 60.0
"""How long an engine waits for a place."""
OTHER_WEIGHTS = "other-weights"
"""The fingerprint of what an engine holds that loaded something else."""


class WatchedFleet(Fleet):
    """The real one; every event's outcome is shown to the watch."""

    watch: Watch
    truth: Callable[[int, int], str | None]

    def finished(self, ticket: str, now: float) -> tuple[Want, ...]:
        """As the real one."""
        return self._ended(ticket, super().finished(ticket, now))

    def failed(self, ticket: str, reason: str, detail: str, now: float) -> tuple[Want, ...]:
        """As the real one."""
        return self._ended(ticket, super().failed(ticket, reason, detail, now))

    def cancelled(self, ticket: str, now: float) -> tuple[Want, ...]:
        """As the real one."""
        return self._ended(ticket, super().cancelled(ticket, now))

    def _ended(self, ticket: str, wants: tuple[Want, ...]) -> tuple[Want, ...]:
        self.watch.ticket_ended(ticket, self.granted())
        return wants

    def _take(self) -> tuple[Want, ...]:
        wants = super()._take()
        grants = [w for w in wants if isinstance(w, Grant)]
        states = {e.number: (e.health.state, e.health.restarts) for e in self._engines.values()}
        self.watch.fleet(states, self.sessions(), self.granted(), grants, self.truth)
        return wants


class SimulatedReplica(Replica):
    """One start of one engine on a simulated node."""

    def __init__(
        self, want: Start, settings: Settings, sampler: ScriptedSampler, network: Network, nodes: Nodes, faults: Faults
    ) -> None:
        super().__init__(want.engine, SimulatedEngine, settings.engine, settings.sampling, want.incarnation)
        self._name = f"engine-{want.engine}.{want.incarnation}"
        self._all, self._sampler, self._network, self._nodes, self._faults = settings, sampler, network, nodes, faults
        self.process: Process | None = None
        self.actor: SimulatedEngine | None = None

    async def place(self, avoid: Collection[str], timeout_s: float) -> frozenset[str]:
        """As the real one."""
        until = self._faults.now + timeout_s
        while (node := self._nodes.room(avoid)) is None:
            await asyncio.sleep(1)
            if self._faults.now >= until:
                raise InfrastructureError("placement-timeout", f"{MARKER}: no node has room for {self._name}")
        self.process = self._network.begin(self._name, node)
        return frozenset({node})

    async def start(self, checkpoint: Checkpoint) -> EngineFacts:
        """As the real one."""
        process, faults, name = self.process, self._faults, self._name
        assert process is not None
        seconds = faults.stream("start").uniform(5, 40)
        if faults.strikes("engine-start-late", name):
            seconds = faults.stream("start").choice((100.0, SILENCE))
        await asyncio.sleep(seconds)
        if faults.strikes("engine-start-fails", name):
            self._network.kill(process, "it did not start")
        if not process.alive:
            raise InfrastructureError("engine-start", f"{MARKER}: {name} died while starting")
        loaded = OTHER_WEIGHTS if faults.strikes("engine-other-weights", name) else checkpoint.fingerprint
        self.actor = SimulatedEngine(
            loaded,
            self._all,
            self._seed,
            name,
            process.node,
            self._sampler,
            faults,
            lambda: self._network.kill(process, "vLLM died"),
        )
        self.handle = Handle(self._network, process, self.actor)
        facts: EngineFacts = await self.handle.facts.remote()
        return facts

    async def end(self, gentle: bool) -> None:
        """As the real one."""
        if self.process is not None:
            self._network.kill(self.process, "it is empty" if gentle else "it is given up")


class SimulatedPool(PoolActor):
    """The pool's actor."""

    def __init__(
        self,
        weights: Weights,
        settings: Settings,
        seed: int,
        sampler: ScriptedSampler,
        network: Network,
        nodes: Nodes,
        faults: Faults,
        watch: Watch,
    ) -> None:
        super().__init__(weights, settings.engine, settings.sampling, seed, PLACEMENT_SECONDS, SimulatedEngine)
        self._all, self._sampler, self._network, self._nodes_there = settings, sampler, network, nodes
        self._faults, self._watch = faults, watch
        self._begun: dict[tuple[int, int], SimulatedReplica] = {}
        rules = fleet_rules(settings.engine, PLACEMENT_SECONDS)
        checkpoint = Checkpoint(path=weights.path, fingerprint=weights.base)
        watched = WatchedFleet(rules, settings.engine.concurrency, checkpoint)
        watched.watch, watched.truth = watch, self._truth
        self._fleet = watched

    def left(self) -> dict[str, int]:
        """What has not ended: requests that engines work on, tickets that wait or are granted."""
        actors = [
            r.actor for r in self._begun.values() if r.actor is not None and r.process is not None and r.process.alive
        ]
        return {
            "requests": sum(len(actor.contexts()) for actor in actors),
            "waiting": len(self._fleet.waiting()),
            "granted": len(self._fleet.granted()),
        }

    def _replica(self, want: Start) -> Replica:
        replica = SimulatedReplica(want, self._all, self._sampler, self._network, self._nodes_there, self._faults)
        self._begun[want.engine, want.incarnation] = replica
        return replica

    async def _nodes(self) -> NodesSeen:
        nodes = self._nodes_there
        for replica in self._begun.values():
            if replica.actor is not None and replica.process is not None and replica.process.alive:
                self._watch.works_on(replica.process.name, replica.actor.contexts())
        return NodesSeen(alive=frozenset(nodes.alive), draining=nodes.left(), rooms=nodes.rooms())

    def _truth(self, engine: int, incarnation: int) -> str | None:
        replica = self._begun[engine, incarnation]
        if replica.actor is None or replica.process is None or not replica.process.alive:
            return None
        return replica.actor.weights
