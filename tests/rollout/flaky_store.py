"""An object store on a local folder that fails at random, for the mirror: `flaky://SEED/absolute/folder`.

Of every hundred operations some fail before they do anything, some after they have done all, and writes also half-way;
and now and then everything fails for a while. A file `healed` in a folder above ends all that.
"""

import random
import time
from pathlib import Path

import fsspec
from fsspec.spec import AbstractFileSystem

FAILING = 0.15
"""Share of the operations that fail by themselves."""
OUTAGE = 0.02
"""Chance of an operation to begin an outage."""


class FlakyFileSystem(AbstractFileSystem):
    protocol = "flaky"
    cachable = False

    def __init__(self, **options):
        super().__init__(**options)
        self._chance = None
        self._out_until = 0.0

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("flaky://").rstrip("/")

    def _local(self, path):
        seed, _, folder = self._strip_protocol(path).partition("/")
        self._chance = self._chance or random.Random(seed)
        return Path("/" + folder)

    def _fault(self, path):
        """`None`, `before`, `half` or `after`."""
        if any((p / "healed").exists() for p in path.parents):
            return None
        if self._chance.random() < OUTAGE:
            self._out_until = time.monotonic() + self._chance.uniform(0.1, 0.6)
        if time.monotonic() < self._out_until:
            return "before"
        if self._chance.random() < 0.1:
            time.sleep(0.02)
        return self._chance.choice(["before", "half", "after"]) if self._chance.random() < FAILING else None

    def _raise(self, fault):
        if fault is not None:
            raise self._chance.choice([OSError, TimeoutError, RuntimeError])(f"the store failed ({fault})")

    def makedirs(self, path, exist_ok=False):
        pass

    def pipe_file(self, path, value, mode="overwrite", **options):
        file = self._local(path)
        fault = self._fault(file)
        if fault == "before":
            self._raise(fault)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value[: len(value) // 2] if fault == "half" else value)
        self._raise(fault)

    def cat_file(self, path, start=None, end=None, **options):
        file = self._local(path)
        self._raise(self._fault(file))
        return file.read_bytes()

    def ls(self, path, detail=True, **options):
        folder = self._local(path)
        self._raise(self._fault(folder))
        names = sorted(f"{self._strip_protocol(path)}/{p.name}" for p in folder.iterdir())
        return [{"name": n, "size": None, "type": "file"} for n in names] if detail else names


def register():
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
