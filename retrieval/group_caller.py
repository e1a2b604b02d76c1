"""GroupCaller: one process's side of its calls to the replicas of one group.

Requests that arrive together travel together, and each replica holds few calls of this process: what comes meanwhile waits here, in
order. A call whose replica fails is sent to another one at once; where none is open it waits until one answers again. Nobody waits
beyond his deadline, and nothing is sent that nobody waits for. Belongs to one event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ray.exceptions import ActorDiedError, RayError, RayTaskError

from cluster.failures import InfrastructureError, PastcastError
from retrieval.replicas import Replicas

_log = logging.getLogger(__name__)

CALLS = 2
"""Calls of one process that a replica may hold of each method: one that is worked on, and one that is there when that ends."""

GRACE_SECONDS = 5.0
"""How long after a call's deadline the replica's own answer is waited for."""

PROBE_SECONDS = 0.2
"""Between two questions whether a lost replica is back."""

PROOFS = 2
"""A replica that is said to be dead so many times in a row, by calls that began after its loss, will not come back."""


@dataclass(eq=False)
class _Waiting:
    request: Any
    until: float
    """Deadline, seconds of the loop's clock."""
    answer: asyncio.Future[Any]


class GroupCaller:
    """Asks whichever replica can answer."""

    def __init__(self, name: str, handles: Sequence[Any], largest: int, silence_s: float) -> None:
        """`handles`: Ray actors whose methods take a list of requests and seconds, and return an answer or an exception for
        each; their `ready` returns when they can serve.

        `largest`: most requests of a call; `silence_s`: a replica that leaves a call unanswered for so long has lost it, if
        another one is open.
        """
        self._name = name
        self._handles = tuple(handles)
        self._largest = largest
        self._silence_s = silence_s
        self._replicas = Replicas(len(self._handles), CALLS)
        self._lines: dict[str, deque[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._due = False
        self._loop = asyncio.get_running_loop()
        self.fault = ""
        """Of the call that failed last."""

    async def ask(self, method: str, request: Any, until: float) -> Any:
        """The answer of a replica to one request. `until`: deadline, seconds of the loop's clock; the caller stops waiting then.

        Raises InfrastructureError `retrieval-gone` if no replica will ever answer, and what the replica says is wrong with the request.
        """
        waiting = _Waiting(request, until, self._loop.create_future())
        self._lines.setdefault(method, deque()).append(waiting)
        self._send_soon()
        return await waiting.answer

    def _send_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._send)  # requests of the same moment travel together

    def _send(self) -> None:
        self._due = False
        for method, line in self._lines.items():
            while (batch := self._front(line)) and (replica := self._replicas.choose(method)) is not None:
                for _ in batch:
                    line.popleft()
                self._replicas.sent(replica, method, len(batch))
                self._start(self._call(replica, method, batch))
            if (fault := self._replicas.fault) is not None:
                for waiting in line:
                    _fail(waiting, InfrastructureError("retrieval-gone", f"{self._name}: {fault}"))
                line.clear()

    def _front(self, line: deque[_Waiting]) -> list[_Waiting]:
        """The first requests of a line that somebody still waits for; the others leave it."""
        alive = [waiting for waiting in line if not waiting.answer.done()]
        if len(alive) < len(line):
            line.clear()
            line.extend(alive)
        return alive[: self._largest]

    async def _call(self, replica: int, method: str, batch: list[_Waiting]) -> None:
        seconds = max(waiting.until for waiting in batch) - self._loop.time()
        if self._replicas.others_open(replica):
            seconds = min(seconds, self._silence_s)
        requests = [waiting.request for waiting in batch]
        outcome: Any
        [outcome] = await asyncio.gather(self._answers(replica, method, requests, seconds), return_exceptions=True)
        self._replicas.ended(replica, method, len(batch))
        if isinstance(outcome, BaseException):
            self._failed(replica, method, batch, outcome)
        else:
            for waiting, answer in zip(batch, outcome, strict=True):
                if not isinstance(answer, Exception):
                    _settle(waiting, answer)
                elif isinstance(answer, TimeoutError):
                    self._again(method, [waiting])  # it was given less than its own deadline
                else:
                    _fail(waiting, answer)
        self._send_soon()

    async def _answers(self, replica: int, method: str, requests: list[Any], seconds: float) -> list[Any]:
        async with asyncio.timeout(seconds + GRACE_SECONDS):
            answers: list[Any] = await getattr(self._handles[replica], method).remote(requests, seconds)
        if len(answers) != len(requests):
            raise RuntimeError(f"{self._name}: {len(answers)} answers to {len(requests)} requests of {method}")
        return answers

    def _failed(self, replica: int, method: str, batch: list[_Waiting], error: BaseException) -> None:
        match _verdict(error):
            case "late":
                pass
            case "lost":
                self._lost(replica, error)
            case "gone":
                self._replicas.give_up(replica, str(_cause(error)))
            case "bug":
                for waiting in batch:
                    _fail(waiting, error)
        self._again(method, batch)

    def _again(self, method: str, batch: list[_Waiting]) -> None:
        """These are the first to be sent, as far as anybody still waits for them."""
        self._lines[method].extendleft(waiting for waiting in reversed(batch) if not waiting.answer.done())

    def _lost(self, replica: int, error: BaseException) -> None:
        self.fault = f"{self._name}: {_said(error)}"
        if self._replicas.lost(replica):
            _log.warning("%s: replica %d is lost: %s", self._name, replica, _said(error))
            self._start(self._until_back(replica))

    async def _until_back(self, replica: int) -> None:
        died = 0
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            [outcome] = await asyncio.gather(self._ready(replica), return_exceptions=True)
            if not isinstance(outcome, BaseException):
                self._replicas.back(replica)
                _log.warning("%s: replica %d is back", self._name, replica)
                break
            died = died + 1 if isinstance(outcome, ActorDiedError) else 0
            if died >= PROOFS or _verdict(outcome) in ("gone", "bug"):
                self._replicas.give_up(replica, _said(outcome))
                break
        self._send_soon()

    async def _ready(self, replica: int) -> None:
        await self._handles[replica].ready.remote()

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)


def _settle(waiting: _Waiting, answer: Any) -> None:
    if not waiting.answer.done():
        waiting.answer.set_result(answer)


def _fail(waiting: _Waiting, error: BaseException) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)


def _cause(error: BaseException) -> BaseException:
    """What a remote method raised, or what Ray said of the call."""
    return error.cause if isinstance(error, RayTaskError) else error


def _said(error: BaseException) -> str:
    cause = _cause(error)
    return str(cause) if isinstance(cause, PastcastError) else f"{type(cause).__name__}: {cause}"


def _verdict(error: BaseException) -> Literal["late", "lost", "gone", "bug"]:
    """What the failure of a call says of its replica: nothing, that it may come back, that it will not, or of our code."""
    cause = _cause(error)
    if isinstance(error, RayTaskError):
        if isinstance(cause, TimeoutError):
            return "late"
        if isinstance(cause, InfrastructureError):
            return "lost"
        return "gone" if isinstance(cause, PastcastError) else "bug"
    return "lost" if isinstance(error, (RayError, TimeoutError)) else "bug"
