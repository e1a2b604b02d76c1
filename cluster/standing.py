"""Whether a fleet is opening, serves, is paused, or cannot come back: pure, over counts of engines and seconds.

It opens with `replicas` engines, or with what came up if that is enough. Below `minimum` serving engines it is paused. It is
beyond hope when nothing can come back, or nothing came back for `pause_timeout_s`; that is final.
"""

from cluster.fleet_events import FleetRules


class Standing:
    """One fleet's."""

    def __init__(self, rules: FleetRules) -> None:
        self._rules = rules
        self.opening = False
        """Whether the engines of the start are still awaited."""
        self.hopeless: tuple[str, str] | None = None
        """(reason, detail) once no ticket will be granted any more."""
        self._paused_since: float | None = None
        self._first_fault = ("engine-start", "no engine came up")
        self._last_fault: tuple[str, str] | None = None

    def note(self, reason: str, detail: str) -> None:
        """An engine failed."""
        if self._last_fault is None:
            self._first_fault = (reason, detail)
        self._last_fault = (reason, detail)

    def close(self, reason: str, detail: str) -> None:
        """The pool is ended."""
        self.hopeless = self.hopeless or (reason, detail)

    def assess(self, serving: int, pending: bool, lost: int, now: float) -> None:
        """Engines that serve; whether others are on their way; engines that are dead for good."""
        if self.hopeless is not None:
            return
        if self.opening:
            if serving >= self._rules.replicas or (not pending and serving >= self._rules.opening_minimum):
                self.opening = False
            elif not pending:
                self.hopeless = self._first_fault
            return
        if serving >= self._rules.minimum:
            self._paused_since = None
            return
        if self._paused_since is None:
            self._paused_since = now
        last = f"; the last to fail: {self._last_fault[1]}" if self._last_fault else ""
        if self._rules.maximum - lost < self._rules.minimum:
            why = f"{lost} of at most {self._rules.maximum} engines are dead and their {self._rules.restarts} restarts spent"
            self.hopeless = ("no-engine", f"{why}; {self._rules.minimum} must serve{last}")
        elif now - self._paused_since > self._rules.pause_timeout_s:
            why = f"fewer than {self._rules.minimum} engines served for {self._rules.pause_timeout_s:g} s"
            self.hopeless = ("no-engine", f"{why}, and none came back{last}")

    def paused(self, serving: int, others: str) -> str:
        """Why no step is to be started, in words; empty if nothing hinders. `others`: what those are that do not serve."""
        if self.hopeless is not None:
            return f"{self.hopeless[0]}: {self.hopeless[1]}"
        if self.opening:
            return f"the engines are starting: {serving} of {self._rules.replicas} serve"
        if serving >= self._rules.minimum:
            return ""
        return f"{serving} of at least {self._rules.minimum} engines serve; {others or 'no node has room for one'}"
