"""What every engine of a fleet is to hold: one checkpoint and some adapters, and how a swap to others is taken back.

A swap can be taken back until a first engine has shown that what it brings can be loaded; after that, an engine which fails
over it is at fault itself. A pure class: it looks at engines and changes none.
"""

from collections.abc import Collection, Mapping

from cluster.fleet_engine import FleetEngine
from cluster.fleet_events import Adapter, Checkpoint, Confirm


class Holdings:
    """The target, and what is known of adapters."""

    def __init__(self, weights: Checkpoint) -> None:
        self.weights = weights
        """What is to be served."""
        self.swap_fault = ""
        """Why the last swap was taken back; empty if it was not."""
        self._adapters: dict[str, Adapter] = {}
        self._refused: dict[str, str] = {}
        self._loaded: set[tuple[str, str]] = set()
        """Name and path of the adapters that some engine has held: they can be loaded."""
        self._former: tuple[Checkpoint, dict[str, Adapter]] | None = None
        self._brought: frozenset[str] = frozenset()
        """Adapters that the last swap brought along."""

    # What an engine is, measured by it.

    def outdated(self, engine: FleetEngine) -> bool:
        """Whether it holds something that is not to be served: other weights, or other bytes under an adapter's name."""
        if engine.weights is None or engine.weights.fingerprint != self.weights.fingerprint:
            return True
        for name, fingerprint in engine.adapters.items():
            wanted = self._adapters.get(name)
            if wanted is None or wanted.fingerprint not in ("", fingerprint):
                return True
        return False

    def fits(self, engine: FleetEngine) -> bool:
        """Whether it holds exactly what is to be served."""
        return not self.outdated(engine) and all(name in engine.adapters for name in self._adapters)

    def lacks(self, engine: FleetEngine) -> bool:
        """Whether an engine is to be confirmed again; one that serves what it is not to is drained before that."""
        if self.outdated(engine):
            return engine.health.state == "STALE"
        return any(name not in engine.adapters for name in self._adapters)

    def confirmation(self, engine: FleetEngine) -> Confirm:
        """What to ask of it: an engine that serves keeps the weights that it has until it is drained."""
        return Confirm(
            engine=engine.number,
            incarnation=engine.incarnation,
            weights=engine.weights if engine.health.serves and engine.weights else self.weights,
            adapters=tuple(self._adapters.values()),
        )

    def difference(self, want: Confirm, weights: str, adapters: Mapping[str, str]) -> tuple[str, str] | None:
        """(reason, detail) if an engine does not hold what it was asked to."""
        if weights != want.weights.fingerprint:
            return "other-weights", f"it holds weights {weights[:12]}, not {want.weights.fingerprint[:12]}"
        for wanted in want.adapters:
            found = adapters.get(wanted.name)
            known = self._adapters.get(wanted.name, wanted)
            # A swap meanwhile may have given the name to another one.
            expected = (known if known.path == wanted.path else wanted).fingerprint
            if found is None:
                return "other-adapter", f"it does not hold adapter {wanted.name}"
            if expected not in ("", found):
                return "other-adapter", f"its adapter {wanted.name} is {found[:12]}, not {expected[:12]}"
        return None

    def confirmed(self, want: Confirm, adapters: Mapping[str, str]) -> None:
        """An engine holds the adapters of `want`, with these fingerprints: from now on the same is asked of all."""
        for adapter in want.adapters:
            self._loaded.add((adapter.name, adapter.path))
            if (known := self._adapters.get(adapter.name)) is not None and known.path == adapter.path:
                self._adapters[adapter.name] = known.model_copy(update={"fingerprint": adapters[adapter.name]})

    # Adapters.

    def add(self, adapter: Adapter) -> None:
        """Every engine is to hold it. Raises RuntimeError if its name is another one's."""
        if (known := self._adapters.get(adapter.name)) is not None and known.path != adapter.path:
            raise RuntimeError(f"adapter {adapter.name} is {known.path} already; give {adapter.path} another name")
        self._refused.pop(adapter.name, None)
        self._adapters.setdefault(adapter.name, adapter)

    def refuse(self, name: str, why: str) -> None:
        """No engine is to hold it any more."""
        self._adapters.pop(name, None)
        self._refused[name] = why

    def refused(self, name: str) -> str | None:
        """Why no engine takes an adapter, if so."""
        return self._refused.get(name)

    def was_held(self, want: Confirm, name: str) -> bool:
        """Whether an engine has ever held that adapter of `want`."""
        return any(a.name == name and (name, a.path) in self._loaded for a in want.adapters)

    def brought(self, name: str) -> bool:
        """Whether an adapter came with the last swap."""
        return name in self._brought

    def refusal(self, name: str) -> tuple[str, str] | None:
        """(reason, detail) if a request for that adapter will never be granted; empty names the base weights."""
        if not name or name in self._adapters:
            return None
        if (why := self._refused.get(name)) is not None:
            return "adapter-refused", f"{name}: {why}"
        return "adapter-unknown", f"{name} was never loaded; known: {', '.join(self._adapters) or 'none'}"

    # Swaps.

    def swap(self, weights: Checkpoint, adapters: Collection[Adapter]) -> None:
        """Other weights and adapters are to be served from now on."""
        self._former, self.swap_fault = (self.weights, dict(self._adapters)), ""
        self._brought = frozenset(a.name for a in adapters)
        self.weights, self._adapters = weights, {a.name: a for a in adapters}

    def proved(self) -> None:
        """An engine holds what is to be served."""
        self._former = None

    def take_back(self, why: str) -> bool:
        """Whether a swap was under way that nothing has proved yet; if so, what was served before is to be served again."""
        if self._former is None:
            return False
        (self.weights, self._adapters), self._former = self._former, None
        self.swap_fault = why
        return True
