"""The LoRA adapters of one engine: which name means which weights, and how many fit.

vLLM knows adapters by number and, when its slots are full, quietly drops one and reads it from disk again when it is
asked for, whatever lies there by then. Here a number is never used twice and the slots never overflow, so a name always means the bytes
that were fingerprinted.
"""

import hashlib
from pathlib import Path

from cluster.failures import PastcastError
from cluster.record import Record


class AdapterError(PastcastError):
    """An adapter cannot be loaded or is not there; the engine serves on without it."""


class Adapter(Record):
    """One loaded adapter."""

    name: str
    number: int
    """vLLM's name for it, from 1."""
    path: str
    files: str
    """Fingerprint of its folder."""


class AdapterShelf:
    """Adapters by name; pure bookkeeping."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: dict[str, Adapter] = {}
        self._last = 0

    def get(self, name: str) -> Adapter:
        """Raises AdapterError that names what is there."""
        if name not in self._held:
            raise AdapterError(f"no adapter {name!r} is loaded here; loaded: {', '.join(sorted(self._held)) or 'none'}")
        return self._held[name]

    def find(self, name: str) -> Adapter | None:
        """The adapter of that name, if one is loaded."""
        return self._held.get(name)

    def prepare(self, name: str, path: str, files: str) -> Adapter:
        """What is to be loaded under a name; it is not held before `put`. Raises AdapterError if no slot is free for it."""
        if not name:
            raise AdapterError("an adapter needs a name: the empty one means the base weights")
        if name not in self._held and len(self._held) >= self._slots:
            raise AdapterError(
                f"adapter {name!r} does not fit: engine.adapters={self._slots} and loaded are "
                f"{', '.join(sorted(self._held)) or 'none'}; raise it or unload one"
            )
        self._last += 1
        return Adapter(name=name, number=self._last, path=path, files=files)

    def put(self, adapter: Adapter) -> None:
        """From now on the name means this one."""
        self._held[adapter.name] = adapter

    def drop(self, name: str) -> Adapter:
        """Raises AdapterError if there is none."""
        adapter = self.get(name)
        del self._held[name]
        return adapter

    def clear(self) -> None:
        """All are gone, with the engine that held them."""
        self._held.clear()

    def fingerprints(self, base: str) -> dict[str, str]:
        """Name → fingerprint of the base with that adapter."""
        return {name: with_adapter(base, a.files) for name, a in sorted(self._held.items())}


def with_adapter(base: str, files: str) -> str:
    """Fingerprint of base weights with an adapter over them, from the fingerprints of both; `files` empty: the base's."""
    return hashlib.sha256(f"{base}+{files}".encode()).hexdigest() if files else base


def check_adapter(path: Path) -> None:
    """Raises AdapterError if the folder cannot be an adapter."""
    for names in (("adapter_config.json",), ("adapter_model.safetensors", "adapter_model.bin")):
        if not any((path / name).is_file() for name in names):
            raise AdapterError(
                f"{path} is not an adapter folder: it has no {' or '.join(names)}; set model.adapter to one"
            )
