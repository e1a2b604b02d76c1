"""What a run needs of Ray, in one process: nodes, processes that die, and handles whose methods are called from afar.

`handle.method.remote(...)` gives an awaitable, as Ray's does, so that the real code behind such calls runs here unchanged. As
with Ray: calls and answers arrive in any order; a call goes on when its caller stops
waiting; whoever waits for a dead process is told some time later, and so is whoever waits for an answer whose owner has
died. What a dead process would still do is never seen.
"""

import asyncio
import contextvars
import functools
import inspect
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from ray.exceptions import ActorDiedError, OwnerDiedError, RayTaskError

from cluster.failures import PastcastError
from rollout.simulator.faults import MARKER, Faults
from rollout.simulator.trace import Trace

NOTICED_SECONDS = (0.05, 8.0)
"""How long it takes at least and at most until a death is noticed."""


class Process:
    """An actor's process, or the driver's."""

    def __init__(self, name: str, node: str) -> None:
        self.name, self.node = name, node
        self.alive = True
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.waited: dict[asyncio.Future[Any], None] = {}
        """Unanswered calls to it."""
        self.owned: dict[asyncio.Future[Any], None] = {}
        """Unanswered calls of it."""
        self.children: list[Process] = []


_here: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def here() -> Process | None:
    """The process whose code is running."""
    return _here.get()


def make_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Task[Any]:
    """A task factory: every task belongs to the process that began it, and dies with it."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    process = here()
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))
    return task


class Network:
    """Delivers calls and answers, and keeps the processes."""

    def __init__(self, faults: Faults, trace: Trace, bug: Callable[[str], None]) -> None:
        """`bug` is told what our own code raised where nobody could have caught it."""
        self._faults, self._trace, self._bug = faults, trace, bug
        self.processes: dict[str, Process] = {}
        """Those that live, by name."""

    def begin(self, name: str, node: str) -> Process:
        """A new process, owned by the one whose code is running: it ends with its owner. Names are never used again."""
        self._trace.note(f"begin {name} on {node}")
        process = self.processes[name] = Process(name, node)
        if (owner := here()) is not None:
            owner.children.append(process)
        return process

    def kill(self, process: Process, why: str) -> None:
        """It is gone at once; others notice later."""
        if not process.alive:
            return
        self._trace.note(f"end {process.name}: {why}")
        process.alive = False
        del self.processes[process.name]
        for task in list(process.tasks):
            task.cancel()
        for child in process.children:
            self.kill(child, f"{process.name}, its owner, has ended")
        for answer in list(process.waited):
            self._later(answer, None, ActorDiedError())
        for answer in list(process.owned):
            self._later(answer, None, OwnerDiedError("0" * 56, None, ""))

    def run_in(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin work as that process."""
        context = contextvars.copy_context()
        context.run(_here.set, process)
        return context.run(asyncio.get_running_loop().create_task, work)

    def call(self, process: Process, method: Callable[[], Any], what: str) -> asyncio.Future[Any]:
        """Call a method of an actor in that process from where we are."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        sender = here()
        if sender is not None and not sender.alive:
            return answer
        process.waited[answer] = None
        answer.add_done_callback(lambda done: process.waited.pop(done, None))
        if sender is not None:
            sender.owned[answer] = None
            answer.add_done_callback(lambda done: sender.owned.pop(done, None))
        if process.alive:
            loop.call_later(self._latency(what), self._deliver, process, method, answer, what)
        else:
            self._later(answer, None, ActorDiedError())
        return answer

    def _deliver(self, process: Process, method: Callable[[], Any], answer: asyncio.Future[Any], what: str) -> None:
        if process.alive:
            self.run_in(process, self._execute(process, method, answer, what))

    async def _execute(
        self, process: Process, method: Callable[[], Any], answer: asyncio.Future[Any], what: str
    ) -> None:
        value, error = None, None
        try:
            value = method()
            if inspect.isawaitable(value):
                value = await value
        except asyncio.CancelledError:
            raise
        except Exception as raised:  # noqa: BLE001 - as Ray: whatever an actor raises is carried to its caller
            if not isinstance(raised, PastcastError) and MARKER not in str(raised):
                self._bug(f"{what} raised {''.join(traceback.format_exception(raised))}")
            error = RayTaskError(what, str(raised), raised).as_instanceof_cause()
        if process.alive and not answer.done():
            asyncio.get_running_loop().call_later(self._latency(what), _settle, answer, value, error)

    def _later(self, answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        seconds = self._faults.stream("network").uniform(*NOTICED_SECONDS)
        asyncio.get_running_loop().call_later(seconds, _settle, answer, value, error)

    def _latency(self, what: str) -> float:
        chance = self._faults.stream("network")
        if self._faults.strikes("message-late", what):
            return chance.uniform(0.1, 20)
        return chance.uniform(0.0005, 0.01)


class Handle:
    """What Ray gives for an actor."""

    def __init__(self, network: Network, process: Process, actor: object) -> None:
        self._network, self._process, self._actor = network, process, actor

    @property
    def process(self) -> Process:
        """Where it lives."""
        return self._process

    def __getattr__(self, name: str) -> "_Method":
        return _Method(self._network, self._process, getattr(self._actor, name), name)


class _Method:
    def __init__(self, network: Network, process: Process, method: Callable[..., Any], name: str) -> None:
        self._network, self._process, self._method, self._name = network, process, method, name

    def remote(self, *arguments: Any, **named: Any) -> Awaitable[Any]:
        call = functools.partial(self._method, *arguments, **named)
        return self._network.call(self._process, call, f"{self._process.name}.{self._name}")


def _settle(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
        # An answer that nobody waits for any more is no news.
        answer.exception()
