"""The open chains of a run, by number.

A chain that has not begun costs a few bytes, so that a driver's memory does not grow with its run; one that has begun has
a state until its last step is recorded. The notebook that waits for a next step is kept packed: it may be long, and
thousands of chains wait at a time.
"""

import dataclasses
import datetime as dt
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rollout.episode import Chain, chains
from rollout.notebook import NotebookState
from rollout.record import ForecastKey
from rollout.work_order import WorkOrder

Finished = Mapping[ForecastKey, NotebookState | None]
"""The forecasts that have a record from before this sitting → the notebook each left."""


class ChainState:
    """The open steps of a chain that has begun; `key` is the one that waits, runs or is being committed."""

    __slots__ = (
        "_carried",
        "_restored",
        "_step",
        "_steps",
        "attempts",
        "began",
        "committing",
        "ended",
        "lease",
        "losses",
        "orphaned",
        "overdue",
        "shunned",
    )

    def __init__(self, steps: Chain, restored: dict[dt.date, bytes | None]) -> None:
        """`steps` are those without a record; `restored`: those right after one with a record from before this sitting → the packed
        notebook it left."""
        self._steps, self._step, self._restored = steps, 0, restored
        self._carried: bytes | None = None
        self.began = False
        """Whether a step of it started in this sitting."""
        self.lease: int | None = None
        """Of `key`, while it runs."""
        self.attempts = 0
        """Of `key`."""
        self.losses = 0
        """Workers that died under `key`."""
        self.shunned: int | None = None
        """The worker of the last failed attempt."""
        self.committing = False
        """Whether `key` has a result that the ledger has not acknowledged."""
        self.orphaned = False
        """Whether `key` was written off: its worker may be gone, and its session with nobody to end it."""
        self.overdue = False
        """Whether its deadline has passed."""
        self.ended = False
        """Whether its remaining steps are written off."""
        self._restore()

    @property
    def key(self) -> ForecastKey:
        """Its first open step."""
        return self._steps.key(self._step)

    @property
    def left(self) -> int:
        """How many steps are open."""
        return len(self._steps) - self._step

    @property
    def open_keys(self) -> Iterator[ForecastKey]:
        """Every open step, in order."""
        return map(self._steps.key, range(self._step, len(self._steps)))

    @property
    def carried(self) -> NotebookState | None:
        """What `key` is to begin with."""
        return _unfold(self._carried)

    @carried.setter
    def carried(self, state: NotebookState | None) -> None:
        self._carried = _fold(state)

    def recorded(self) -> None:
        """`key` has its record."""
        self._step += 1

    def next_step(self) -> None:
        """`key` is a new step. Where an earlier sitting has the record before it, that record's notebook is carried."""
        self.committing = self.orphaned = False
        self.attempts = self.losses = 0
        self.shunned = None
        self._restore()

    def _restore(self) -> None:
        self._carried = self._restored.pop(self._steps.dates[self._step], self._carried)


class Agenda(Mapping[int, ChainState]):
    """The chains with open steps; a state is made when a chain is first asked for."""

    def __init__(self, keys: Iterable[ForecastKey], finished: Finished, order: WorkOrder) -> None:
        """Every open chain is given to `order`."""
        self.total = self.finished = 0
        """Forecasts of the run, and those that have a record from before this sitting."""
        self._open: dict[int, Chain | ChainState] = {}
        self._restored: dict[int, dict[dt.date, bytes | None]] = {}
        # Asked once: what answers may be a file.
        resumed = len(finished) > 0
        for number, chain in enumerate(chains(keys)):
            done = [resumed and key in finished for key in chain.keys]
            self.total += len(chain)
            self.finished += sum(done)
            if not all(done):
                self._lay(number, chain, done, finished)
                order.add(number, chain.mode, done.count(False), begun=any(done))

    def __getitem__(self, number: int) -> ChainState:
        found = self._open[number]
        if isinstance(found, Chain):
            found = self._open[number] = ChainState(found, self._restored.pop(number, {}))
        return found

    def __contains__(self, number: object) -> bool:
        return number in self._open

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def close(self, number: int) -> None:
        """Every step of the chain has its record."""
        del self._open[number]

    def _lay(self, number: int, chain: Chain, done: Sequence[bool], finished: Finished) -> None:
        """`done`: for each step whether it has a record."""
        self._open[number] = chain
        if any(done):
            days = tuple(day for day, recorded in zip(chain.dates, done, strict=True) if not recorded)
            self._open[number] = dataclasses.replace(chain, dates=days)
            after = [i for i in range(1, len(done)) if done[i - 1] and not done[i]]
            self._restored[number] = {chain.dates[i]: _fold(finished[chain.key(i - 1)]) for i in after}


def _fold(state: NotebookState | None) -> bytes | None:
    return None if state is None else zlib.compress(state.model_dump_json().encode(), 1)


def _unfold(folded: bytes | None) -> NotebookState | None:
    return None if folded is None else NotebookState.model_validate_json(zlib.decompress(folded))
