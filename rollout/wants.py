"""What the coordinator says it wants: values without behaviour. Whoever drives it (asyncio on Ray, a simulator) carries out each."""

import dataclasses
from typing import Literal

from cluster.failures import Failure
from rollout.lease import Lease
from rollout.packed import PackedForecast

HaltReason = Literal["complete", "stopped", "fatal", "max-cost", "data-failures", "bugs"]


@dataclasses.dataclass(frozen=True)
class Start:
    """Give the lease to the worker. To be answered by `outcome` or by `lost`."""

    worker: int
    lease: Lease


@dataclasses.dataclass(frozen=True)
class Abandon:
    """End the lease's step at its worker: abort its request at the engine, kill its cell. Needs no answer; one is ignored."""

    worker: int
    lease: Lease


@dataclasses.dataclass(frozen=True)
class Commit:
    """Store these in one transaction. To be answered by `committed`; no other commit is wanted before."""

    batch: tuple[PackedForecast, ...]


@dataclasses.dataclass(frozen=True)
class Release:
    """A step or chain has ended without a worker that could say so: the engines are to forget its session. Needs no answer."""

    session: str


@dataclasses.dataclass(frozen=True)
class Wake:
    """Call `next` at this time if nothing happens before. It holds until the next call of `next`."""

    at: float


@dataclasses.dataclass(frozen=True)
class Halt:
    """The sitting is over; nothing is wanted after it."""

    reason: HaltReason
    failure: Failure | None = None
    """For `fatal`: what was lost for good."""


Want = Start | Abandon | Commit | Release | Wake | Halt
