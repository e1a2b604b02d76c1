"""The gate of one run as a service: permits in the order in which they were asked for, to all workers of the run.

Limits belong to the account, not to a process, so one actor holds them for every worker. It runs on the driver's node and
is given the keys by a call: they are not in the settings, not in Ray's store of actors, and no text of ours shows them.
If it dies, the run stops and can be resumed.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pydantic import SecretStr

from cluster.config import ServerSettings
from cluster.endpoint.gate import Delay, Gate, NoKey, Permit, Settlement
from cluster.failures import InfrastructureError, SettingsError
from cluster.pool_view import PoolView
from cluster.record import Record

NO_KEY = SecretStr("")
"""Where the server asks for none."""

UNBOUNDED = 1_000_000
"""Steps in flight, as far as an endpoint goes: its own bound is on requests."""


class Admission(Record):
    """A permit and the secret to send."""

    permit: Permit
    key: SecretStr
    others: int
    """Other keys that could take over."""


def read_keys(
    names: Sequence[str], environment: Mapping[str, str], setting: str = "endpoint.key_env"
) -> tuple[SecretStr, ...]:
    """The keys in these variables, in order, each once. Raises SettingsError that names the variables that hold none, and `setting`."""
    found: dict[str, None] = {}
    for name in names:
        keys = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        if not keys:
            raise SettingsError(f"the environment variable {name} (from {setting}) is not set; export it with the key")
        if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
            raise SettingsError(
                f"the environment variable {name} (from {setting}) holds what no key can: spaces, line breaks or "
                "letters beyond ASCII"
            )
        found |= dict.fromkeys(keys)
    return tuple(SecretStr(key) for key in found) or (NO_KEY,)


class Gatekeeper:
    """Made a Ray actor by the run; works as it is inside one process."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds from any origin."""
        self._settings, self._clock = settings, clock
        self._keys: tuple[SecretStr, ...] = ()
        self._gate = Gate(0, settings)
        self._line: deque[tuple[int, str, asyncio.Future[Admission]]] = deque()
        self._changed = asyncio.Event()
        self._usher: asyncio.Task[None] | None = None

    async def open(self, keys: Sequence[SecretStr]) -> None:
        """Must come before the first question."""
        self._keys = tuple(keys)
        self._gate = Gate(len(self._keys), self._settings)

    async def hear(self, holder: str) -> None:
        """The worker lives; to be said every few seconds while it has calls."""
        self._gate.hear(self._clock(), holder)

    async def admit(self, tokens: int, holder: str = "") -> Admission:
        """Waits for its turn; those of a worker that fell silent are skipped.

        Raises InfrastructureError `endpoint-auth`, which is fatal, when every key was refused.
        """
        self._gate.hear(self._clock(), holder)
        turn: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()
        self._line.append((tokens, holder, turn))
        self._changed.set()
        if self._usher is None or self._usher.done():
            self._usher = asyncio.create_task(self._serve())
        return await turn

    async def settle(self, permit: Permit, how: Settlement) -> float | None:
        """The request has ended. Answers `Gate.key_wait_s`: how long until some key may serve."""
        self._gate.settle(self._clock(), permit, how)
        self._changed.set()
        return self._gate.key_wait_s(self._clock())

    async def view(self) -> PoolView:
        """What the coordinator is to know: while every key rests, no step need be started, and running ones are not to blame."""
        wait = self._gate.key_wait_s(self._clock())
        paused = f"every key of the endpoint rests; the first one for {wait:.0f} s" if wait else ""
        return PoolView(engines=(), limit=UNBOUNDED, paused=paused)

    async def running(self) -> int:
        """Requests in flight."""
        return self._gate.running

    async def _serve(self) -> None:
        """Admit whoever is first in line until nobody is."""
        while self._line:
            tokens, holder, turn = self._line[0]
            if turn.done():
                self._line.popleft()
                continue
            if not self._gate.lives(self._clock(), holder):
                self._line.popleft()
                turn.set_exception(
                    InfrastructureError("endpoint-silent", f"nothing was heard of worker {holder} for long")
                )
                continue
            self._changed.clear()
            found = self._gate.ask(self._clock(), tokens, holder)
            if isinstance(found, Delay):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), found.seconds)
                continue
            self._line.popleft()
            if isinstance(found, NoKey):
                turn.set_exception(InfrastructureError("endpoint-auth", self._refusal(found)))
            else:
                key = self._keys[found.key]
                turn.set_result(Admission(permit=found, key=key, others=self._gate.others(found)))

    def _refusal(self, found: NoKey) -> str:
        names = ", ".join(self._settings.key_env) or "none: key_env is empty"
        return f"{self._settings.base_url} accepts none of {len(self._keys)} key(s) (from {names}): {'; '.join(found.refusals)}"
