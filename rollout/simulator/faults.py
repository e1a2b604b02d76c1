"""Which faults strike, and when: every kind has its own stream of chance, drawn from the seed.

A seed switches each kind on or off and gives it a rate, so that some runs suffer from one fault alone and others from all.
After `calm` nothing more is injected: whatever happened before, a run must then come to its end.
"""

import random
from collections.abc import Mapping

from rollout.simulator.trace import Trace

MARKER = "INJECTED-ERROR-TEXT"
"""Stands in the text of every injected error: no model may ever be shown it."""

FAULTS: Mapping[str, float] = {
    "engine-late": 0.2,
    "engine-silent": 0.1,
    "engine-refuses": 0.1,
    "engine-full": 0.1,
    "engine-wrong-prompt": 0.05,
    "engine-dies-answering": 0.1,
    "engine-start-fails": 0.5,
    "engine-start-late": 0.5,
    "engine-other-weights": 0.3,
    "engine-figures-old": 0.3,
    "engine-dies": 1.5,
    "probe-late": 0.3,
    "probe-lost": 0.2,
    "node-dies": 0.5,
    "node-drains": 0.5,
    "worker-dies": 1.0,
    "pool-dies": 0.1,
    "worker-silent": 0.1,
    "message-late": 0.1,
    "result-lost": 0.1,
    "result-late": 0.3,
    "result-twice": 0.2,
    "search-late": 0.5,
    "search-silent": 0.3,
    "search-down": 0.5,
    "search-gone": 0.05,
    "search-leaks": 0.2,
    "article-gone": 0.5,
    "cell-late": 0.5,
    "cell-time-out": 0.4,
    "cell-lost": 0.4,
    "disk-full": 0.2,
    "disk-locked": 0.2,
    "killed-before-commit": 0.1,
    "killed-in-commit": 0.1,
    "killed-after-commit": 0.1,
    "disk-lost": 0.5,
    "mirror-down": 0.5,
    "mirror-torn": 0.3,
    "mirror-unsure": 0.3,
    "killed-shipping": 0.1,
    "killed": 1.0,
    "told-to-stop": 1.0,
}
"""The highest rate of each kind: per call, start, probe, result or commit; per minute for what dies by itself; per life of the
driver for kills and stops."""


class Faults:
    """The faults of one run."""

    def __init__(self, seed: str, trace: Trace, calm: float, only: frozenset[str] | None = None) -> None:
        """`calm` is the virtual second after which none strikes; `only` restricts the kinds."""
        self._seed = seed
        self._trace = trace
        self._calm = calm
        chance = random.Random(f"{seed}/faults")
        share = chance.choice((0.05, 0.2, 0.5, 0.9))
        self.rates: dict[str, float] = {}
        for kind, highest in FAULTS.items():
            on, rate = chance.random() < share, highest * chance.random() ** 1.5
            if on and (only is None or kind in only):
                self.rates[kind] = rate
        self._streams: dict[str, random.Random] = {}

    def stream(self, name: str) -> random.Random:
        """A source of chance of its own for each purpose, so that one more draw here changes nothing there."""
        if name not in self._streams:
            self._streams[name] = random.Random(f"{self._seed}/{name}")
        return self._streams[name]

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._trace.clock()

    @property
    def calm(self) -> bool:
        """Whether the time of faults is over."""
        return self._trace.clock() >= self._calm

    def calmed(self) -> "Faults":
        """The same streams and no fault at all."""
        calm = Faults(self._seed, self._trace, self._calm, frozenset())
        calm._streams = self._streams
        return calm

    def strikes(self, kind: str, what: str = "", times: float = 1.0) -> bool:
        """Whether a fault strikes now; it is counted. `times` multiplies the rate."""
        rate = self.rates.get(kind, 0.0)
        if rate == 0.0 or self.calm or self.stream(kind).random() >= rate * times:
            return False
        self._trace.fault(kind, what)
        return True
