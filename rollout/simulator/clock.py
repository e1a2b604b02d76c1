"""Virtual time: an asyncio event loop that never waits.

Whenever nothing is ready the clock jumps to the next timer. The order of everything depends on the timers alone, so the same
program runs the same way every time. A loop that could never go on, or goes on for too long, raises Stuck; it can be
killed at any moment, as a process is.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from rollout.simulator.actors import make_task

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

BUSY_TURNS = 200_000
"""A loop that turns this often without any time passing is busy for ever."""


class Stuck(BaseException):
    """Nothing will ever happen again, or nothing ends: the run has lost its liveness."""


class Broken(BaseException):
    """A promise was broken."""


class Killed(SystemExit):
    """The process is gone. No code of it may handle this, so it is no Exception."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers only; there are no files to wait for."""

    def __init__(self, began: float, limit: float) -> None:
        """`began` is the time on the clock at the start and `limit` the time at which the run is Stuck, in seconds."""
        self._now = began
        self._limit = limit
        self._idle = 0
        self.kill_at: float | None = None
        """The time at which the process is killed."""
        self._broken: Broken | None = None
        self._handlers: dict[int, Callable[[], object]] = {}
        super().__init__(_Timers(self))
        self.set_task_factory(make_task)
        self.set_exception_handler(lambda _loop, _context: None)

    def breaks(self, what: str) -> None:
        """A promise was broken: the run ends before anything else happens."""
        self._broken = self._broken or Broken(what)

    def add_signal_handler(self, sig: int, callback: Callable[[*_Arguments], object], *args: *_Arguments) -> None:
        """Signals are delivered by `deliver`."""
        self._handlers[sig] = functools.partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        """As the real one."""
        return self._handlers.pop(sig, None) is not None

    def deliver(self, sig: int) -> None:
        """A signal arrives; without a handler it ends the process."""
        handler = self._handlers.get(sig)
        if handler is None:
            raise Killed(f"ended by signal {sig}")
        handler()

    def run_in_executor(
        self,
        executor: Executor | None,  # noqa: ARG002 - the real one's signature
        func: Callable[[*_Arguments], _Result],
        *args: *_Arguments,
    ) -> asyncio.Future[_Result]:
        """A thread takes some time, and then does its work all at once."""
        result: asyncio.Future[_Result] = self.create_future()
        self.call_later(0.02, self._work, result, functools.partial(func, *args))
        return result

    def _work(self, result: asyncio.Future[Any], work: Callable[[], Any]) -> None:
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - as an executor: whatever is raised is carried to whoever waits
            if not result.cancelled():
                result.set_exception(error)
        else:
            if not result.cancelled():
                result.set_result(value)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def pass_time(self, seconds: float | None) -> None:
        """Called when the loop would wait. Raises Killed, Broken or Stuck."""
        if self._broken is not None:
            raise self._broken
        if seconds is None:
            raise Stuck("nothing is scheduled: the run waits for ever")
        self._idle = 0 if seconds else self._idle + 1
        if self._idle > BUSY_TURNS:
            raise Stuck(f"busy for ever at {self._now:.1f} s")
        if self.kill_at is not None and self._now + seconds >= self.kill_at:
            self._now = max(self._now, self.kill_at)
            self.kill_at = None
            raise Killed("the driver is killed")
        self._now += seconds
        if self._now > self._limit:
            raise Stuck(f"not ended after {self._limit:.0f} virtual seconds")

    def run_killable(self, life: Coroutine[Any, Any, None]) -> bool:
        """Run until the coroutine ends; False if it was killed. What was left is unwound without time passing."""
        try:
            self.run_until_complete(life)
        except Killed:
            return False
        return True

    def bury(self) -> None:
        """Unwind every task that is left, then close. Their clean-up code runs in a world that must no longer listen to it."""
        self.kill_at = self._broken = None
        self._limit, self._idle = float("inf"), 0
        left = asyncio.all_tasks(self)
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()


class _Timers(selectors.BaseSelector):
    """A selector over nothing that passes virtual time instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Only the loop's own wake-up pipe is ever registered."""
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return self._keys[number]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget the pipe."""
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing is ever readable."""
        self._loop.pass_time(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """What is registered, by file number."""
        return self._keys
