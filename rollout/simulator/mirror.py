"""The real mirror over an object store in memory that fails: before a put, within it, or after it.

Its thread is played by a task, and the driver may be killed between an object and its confirmation.
"""

import asyncio
from pathlib import Path

from rollout.changes import Change
from rollout.ledger import Ledger
from rollout.mirror import Mirror, read_parts
from rollout.mirror_store import CONFIRMATION, MirrorStore, MirrorUnreachable
from rollout.parts import unpack_part
from rollout.run import RunDirectory
from rollout.simulator.clock import Killed
from rollout.simulator.faults import MARKER, Faults

LAG_SECONDS = 8.0
RECORDS = 3
"""Changes in one part, at most."""


class SimulatedStore(MirrorStore):
    """Outlives every driver and every disk."""

    def __init__(self, faults: Faults) -> None:
        super().__init__("memory://simulated")
        self._faults = faults
        self._objects: dict[str, bytes] = {}

    def put(self, path: str, data: bytes) -> None:
        """As the real one."""
        if path.endswith(CONFIRMATION) and self._faults.strikes("killed-shipping"):
            raise Killed("the driver is killed before it confirms a part")
        self._may_fail(path)
        if self._faults.strikes("mirror-torn"):
            self._objects[path] = data[: self._faults.stream("store").randrange(len(data))]
            raise MirrorUnreachable("mirror-unreachable", f"{MARKER}: cut while writing")
        self._objects[path] = data
        if self._faults.strikes("mirror-unsure"):
            raise MirrorUnreachable("mirror-unreachable", f"{MARKER}: no answer")

    def get(self, path: str) -> bytes:
        """As the real one."""
        return self._objects[path]

    def names(self, folder: str) -> list[str]:
        """As the real one."""
        self._may_fail(folder)
        below = f"{folder}/"
        found = (path.removeprefix(below).split("/")[0] for path in self._objects if path.startswith(below))
        return list(dict.fromkeys(found))

    def parts(self) -> list[list[Change]]:
        """The changes of every part that counts, in order; the faults are over for whoever restores patiently."""
        faults, self._faults = self._faults, self._faults.calmed()
        try:
            return [unpack_part(part, self.get(part.path), self.address) for part in read_parts(self)]
        finally:
            self._faults = faults

    def _may_fail(self, what: str) -> None:
        if self._faults.strikes("mirror-down", what):
            raise MirrorUnreachable("mirror-unreachable", f"{MARKER}: refused")


class SimulatedMirror(Mirror):
    """Ships one life's ledger."""

    def __init__(self, folder: Path, store: SimulatedStore, faults: Faults) -> None:
        super().__init__(RunDirectory(folder), store.address, LAG_SECONDS, RECORDS, lambda: faults.now)
        self._store = store

    @property
    def shipped_to(self) -> int:
        """The last change that the mirror is known to hold."""
        return self._pace.shipped_to

    async def ship(self, ledger: Ledger) -> None:
        """For ever; as the real one's thread."""
        attached = False
        while True:
            now = self._clock()
            self._pace.saw(now, ledger.last_change())
            try:
                if not attached and self._pace.may_try(now):
                    parts = read_parts(self._store)
                    self._parts = len(parts)
                    self._pace.shipped(parts[-1].last if parts else 0)
                    attached = True
                while attached and self._pace.due(self._clock(), closing=False):
                    self._ship(ledger)
            except MirrorUnreachable:
                self._pace.failed(self._clock(), closing=False)
            await asyncio.sleep(self._pace.tick_s)
