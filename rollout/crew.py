"""The rollout workers of a run as Ray actors: hired, listened to, replaced when they die.

A worker has a number that no other ever has. One that raises, dies or says nothing for too long is given up: it is killed,
so that it does no more work that would not count, and another is hired, at a bounded rate.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from cluster.clock import monotonic
from cluster.failures import InfrastructureError, PastcastError
from rollout.lease import Lease, StepOutcome

logger = logging.getLogger(__name__)

REPLACEMENTS = 20
REPLACEMENT_SECONDS = 3600.0
"""So many workers are hired anew in this time at the most. A rate, not a sum: over days many nodes are lost, one at a time."""
PATIENCE_SECONDS = 5.0
"""A worker without outcomes says so this often."""
SILENCE_SECONDS = 120.0
"""A worker that says nothing for this long is given up. One that is only busy answers late, not never."""


class WorkerGone(Exception):
    """A worker was given up; the message says why."""


class Crew:
    """The workers by number."""

    def __init__(
        self,
        hire: Callable[[], Any],
        size: int,
        timeout_s: float,
        end: Callable[[Any], None] = ray.kill,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`hire` makes a worker actor and `end` ends one; `timeout_s` is how long one may take until it is ready."""
        self._hire, self._size, self._timeout_s, self._kill = hire, size, timeout_s, end
        self._clock = clock
        self._hired_again: deque[float] = deque(maxlen=REPLACEMENTS)
        """When, in seconds of the clock."""
        self._workers: dict[int, Any] = {}
        self._unread: dict[int, list[Any]] = {}
        """By worker: answers of `take` that were not looked at."""
        self._numbers = 0

    async def assemble(self) -> list[int]:
        """Hire all; their numbers once every one can take leases. Raises InfrastructureError after the time-out."""
        numbers = [self._add() for _ in range(self._size)]
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(*(self._workers[n].ready.remote() for n in numbers))
        except RayTaskError as error:
            if isinstance(error.cause, PastcastError):
                raise error.cause from None
            raise
        except RayError as error:
            raise InfrastructureError("worker-start", f"{type(error).__name__}: {error}") from None
        except TimeoutError:
            free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
            raise InfrastructureError(
                "worker-start",
                f"{self._size} rollout worker(s) did not start within {self._timeout_s:g} s; free in the cluster: {free}. "
                "Lower ray.worker_cpus, engine.cpus or retrieval.actor_cpus, or raise ray.placement_timeout_s",
            ) from None
        return numbers

    async def replace(self) -> int | None:
        """Hire one more; its number when it can take leases. None when none may be hired for `replacement_in` seconds."""
        while not self.replacement_in():
            self._hired_again.append(self._clock())
            number = self._add()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._workers[number].ready.remote()
            except (RayError, TimeoutError) as error:
                logger.warning("a rollout worker could not be replaced: %s: %s", type(error).__name__, error)
                self.dismiss(number)
            else:
                return number
        return None

    def replacement_in(self) -> float:
        """Seconds until a worker may be replaced; 0 when one may be now."""
        if len(self._hired_again) < REPLACEMENTS:
            return 0.0
        return max(0.0, self._hired_again[0] + REPLACEMENT_SECONDS - self._clock())

    def give(self, number: int, leases: Sequence[Lease], abandoned: Sequence[int]) -> None:
        """Tell a worker what to begin and what to end; a dead one is found by `listen`."""
        self._unread[number].append(self._workers[number].take.remote(leases, abandoned))

    async def listen(self, number: int) -> list[StepOutcome]:
        """A worker's next outcomes, now and then none. Raises WorkerGone, and the worker is no more.

        One that was given leases and did not hear it is gone too, although it lives: nobody would run them.
        """
        given, self._unread[number] = self._unread[number], []
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                results = self._workers[number].results.remote(PATIENCE_SECONDS)
                outcomes: list[StepOutcome] = (await asyncio.gather(results, *given))[0]
        except (RayError, TimeoutError) as error:
            why = f"it was silent for {SILENCE_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
            self.dismiss(number)
            raise WorkerGone(f"rollout worker {number}: {why}") from None
        return outcomes

    def dismiss(self, number: int) -> None:
        """End a worker."""
        del self._unread[number]
        self._kill(self._workers.pop(number))

    def dismiss_all(self) -> None:
        """End every worker."""
        for number in list(self._workers):
            self.dismiss(number)

    def handles(self) -> dict[int, Any]:
        """The actors by number: for tests and tools."""
        return dict(self._workers)

    def _add(self) -> int:
        self._numbers += 1
        self._workers[self._numbers] = self._hire()
        self._unread[self._numbers] = []
        return self._numbers
