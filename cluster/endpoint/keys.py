"""Which of several API keys serves the next request: a pure state machine over their numbers (OracleProto, Table 14).

The least used key that may be used serves, ties by number. A key that is refused (401, 403) never serves again. A key that
was limited rests until a moment; then it is tried with one request alone, and serves freely again once that succeeds.
"""

import dataclasses


@dataclasses.dataclass
class _Key:
    uses: int = 0
    running: int = 0
    rests_until: float = 0.0
    """On the caller's clock, in seconds."""
    on_trial: bool = False
    refused: str = ""


class KeyPool:
    """Knows keys by number alone, never the secrets."""

    def __init__(self, size: int) -> None:
        self._keys = [_Key() for _ in range(size)]

    @property
    def refusals(self) -> list[str]:
        """Why each refused key was refused."""
        return [key.refused for key in self._keys if key.refused]

    @property
    def spent(self) -> bool:
        """Whether no key is left."""
        return all(key.refused for key in self._keys)

    def pick(self, now: float) -> int | None:
        """The key for a request that starts now; None if none may be used."""
        usable = [i for i, key in enumerate(self._keys) if self._usable(key, now)]
        return min(usable, key=lambda i: (self._keys[i].uses, i), default=None)

    def start(self, number: int) -> None:
        """A request starts with this key."""
        self._keys[number].uses += 1
        self._keys[number].running += 1

    def end(self, number: int) -> None:
        """A request with this key has ended, however it did."""
        self._keys[number].running -= 1

    def succeed(self, number: int, now: float) -> None:
        """A request was answered; while the key rests that proves nothing, for the request started before."""
        key = self._keys[number]
        if key.rests_until <= now:
            key.on_trial = False

    def rest(self, number: int, until: float) -> None:
        """The key was limited."""
        key = self._keys[number]
        key.rests_until = max(key.rests_until, until)
        key.on_trial = True

    def refuse(self, number: int, why: str) -> None:
        """The key is not accepted, for good."""
        self._keys[number].refused = why or "refused"

    def others(self, number: int) -> int:
        """Keys besides this one that were not refused."""
        return sum(not key.refused for i, key in enumerate(self._keys) if i != number)

    def wait_s(self, now: float) -> float | None:
        """Seconds until some key ends its rest; None if no key rests, so that time alone changes nothing."""
        rests = [k.rests_until - now for k in self._keys if not k.refused and k.rests_until > now]
        return min(rests, default=None)

    def _usable(self, key: _Key, now: float) -> bool:
        return not key.refused and key.rests_until <= now and not (key.on_trial and key.running > 0)
