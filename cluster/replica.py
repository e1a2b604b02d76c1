"""One engine's place and process on Ray: placed with a deadline, started, made to hold what is to be served, ended.

It decides nothing; what it finds wrong becomes an InfrastructureError with a reason that the fleet knows.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup

from cluster.adapters import AdapterError
from cluster.call import EngineFacts, EngineFigures
from cluster.config import EngineSettings, SamplingSettings
from cluster.engine_shape import actor_options, replica_bundles, replica_strategy, scattered
from cluster.failures import DataError, InfrastructureError
from cluster.fleet_events import Adapter, Checkpoint, Confirm
from cluster.placement import place, release
from cluster.resources import amounts, total

STOP_SECONDS = 20.0
"""How long an engine may take to end by itself."""


class AdapterRefused(AdapterError):
    """An engine does not take one adapter; it serves on without it."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(name, detail)
        self.name, self.detail = name, detail


class Replica:
    """One start of one engine."""

    def __init__(
        self, number: int, engine: type[Any], settings: EngineSettings, sampling: SamplingSettings, seed: int
    ) -> None:
        """`engine`: EngineActor, or a class with its methods; `seed`: of this start alone."""
        self._number, self._engine = number, engine
        self._settings, self._sampling, self._seed = settings, sampling, seed
        self._group: PlacementGroup | None = None
        self._confirming = asyncio.Lock()
        self.handle: Any = None
        """The engine's actor; None before it is started."""

    async def place(self, avoid: Collection[str], timeout_s: float) -> frozenset[str]:
        """Reserves the engine's resources on nodes other than `avoid`; returns the ids of its nodes.

        Raises InfrastructureError `placement-timeout` that names what is missing, or `placement-scattered` where ranks that
        share layers would lie on different nodes.
        """
        bundles, strategy = replica_bundles(self._settings), replica_strategy(self._settings)
        self._group, where = await place(bundles, strategy, timeout_s, avoid)
        if self._settings.nodes > 1 and (fault := scattered(where, self._settings)) is not None:
            raise InfrastructureError("placement-scattered", fault)
        return frozenset(where)

    async def start(self, checkpoint: Checkpoint) -> EngineFacts:
        """Starts the actor and waits until it can serve. Raises InfrastructureError `engine-start`."""
        if self._group is None:
            raise RuntimeError("an engine is placed before it is started")
        actor = ray.remote(self._engine).options(**actor_options(self._settings, self._group))
        self.handle = actor.remote(checkpoint.path, checkpoint.fingerprint, self._settings, self._sampling, self._seed)
        try:
            facts: EngineFacts = await self.handle.facts.remote()
        except RayError as error:
            asked = amounts(total(replica_bundles(self._settings)))
            raise InfrastructureError(
                "engine-start", f"engine {self._number} ({asked}) died while starting: {error}"
            ) from None
        return facts

    async def confirm(self, want: Confirm) -> tuple[str, dict[str, str]]:
        """Makes the engine hold what `want` says; returns the fingerprints of its weights and, by name, of its adapters.

        Raises AdapterRefused, InfrastructureError of the engine (`reload-failed` also for weights that it cannot read), or Ray's
        errors when it is gone.
        """
        async with self._confirming:
            weights = str((await self.handle.facts.remote()).weights)
            if weights != want.weights.fingerprint:
                weights = await self._reload(want.weights)
            held: dict[str, str] = await self.handle.adapters.remote()
            # First: what is given up holds slots that the others need.
            for name in held.keys() - {adapter.name for adapter in want.adapters}:
                await self.handle.unload_adapter.remote(name)
                del held[name]
            for adapter in want.adapters:
                if held.get(adapter.name) != adapter.fingerprint or not adapter.fingerprint:
                    held[adapter.name] = await self._load(adapter)
            return weights, held

    async def _reload(self, checkpoint: Checkpoint) -> str:
        try:
            return str(await self.handle.reload.remote(checkpoint.path, checkpoint.fingerprint))
        except DataError as error:
            raise InfrastructureError("reload-failed", str(getattr(error, "cause", error))) from None

    async def _load(self, adapter: Adapter) -> str:
        try:
            return str(await self.handle.load_adapter.remote(adapter.name, adapter.path))
        except AdapterError as error:
            raise AdapterRefused(adapter.name, str(getattr(error, "cause", error))) from None

    async def figures(self) -> EngineFigures:
        """How busy the engine is. Raises InfrastructureError `engine-lost` when vLLM has died, Ray's errors when its actor has."""
        figures: EngineFigures = await self.handle.figures.remote()
        return figures

    async def end(self, gentle: bool) -> None:
        """Ends the process and gives its place back; never raises for what is dead already."""
        if self.handle is not None:
            if gentle:
                with contextlib.suppress(RayError, TimeoutError):
                    await asyncio.wait_for(self.handle.shutdown.remote(), STOP_SECONDS)
            ray.kill(self.handle)
        if self._group is not None:
            release(self._group)
            self._group = None


def engine_seed(seed: int, engine: int, incarnation: int) -> int:
    """A seed of its own for every start of every replica; `seed` must differ between the sittings of a run."""
    digest = hashlib.sha256(f"{seed}/{engine}/{incarnation}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def proves_death(error: RayError) -> bool:
    """Whether an error of a call says that the actor is gone for good, not only out of reach."""
    return isinstance(error, RayActorError) and not isinstance(error, ray.exceptions.ActorUnavailableError)
