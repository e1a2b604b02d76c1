"""Requests and tokens per minute: in no window of 60 seconds do more start than allowed. Pure, on the caller's clock.

A request counts with its estimated tokens when it starts and with the true ones once they are known. One that is
larger than a whole minute's allowance starts when the window is empty, or it never would.
"""

from collections import deque

WINDOW_S = 60.0


class RateLimit:
    """A sliding window over what has started."""

    def __init__(self, requests: int | None, tokens: int | None) -> None:
        """Limits per minute; None: no limit."""
        self._requests, self._tokens = requests, tokens
        self._started: deque[tuple[int, float]] = deque()
        self._tokens_of: dict[int, int] = {}
        self._total = 0

    def wait_s(self, now: float, tokens: int) -> float:
        """Seconds until a request of so many tokens may start; 0 if it may now."""
        self._forget(now)
        requests, total, wait = len(self._started), self._total, 0.0
        for number, began in self._started:
            few = self._requests is None or requests < self._requests
            if few and (self._tokens is None or total + tokens <= self._tokens):
                break
            wait = began + WINDOW_S - now
            requests -= 1
            total -= self._tokens_of[number]
        return wait

    def start(self, number: int, now: float, tokens: int) -> None:
        """A request starts; `number` is its own."""
        if self._requests is None and self._tokens is None:
            return
        self._forget(now)
        self._started.append((number, now))
        self._tokens_of[number] = tokens
        self._total += tokens

    def correct(self, number: int, tokens: int) -> None:
        """The request's true size; without effect once it has left the window."""
        if number in self._tokens_of:
            self._total += tokens - self._tokens_of[number]
            self._tokens_of[number] = tokens

    def _forget(self, now: float) -> None:
        while self._started and self._started[0][1] + WINDOW_S <= now:
            number, _ = self._started.popleft()
            self._total -= self._tokens_of.pop(number)
