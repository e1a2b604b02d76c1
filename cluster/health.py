"""What state one engine is in: a pure machine of counts, without Ray, clock or network.

HEALTHY serves; SUSPECT keeps the sessions it has and gets new ones only where no engine is healthy; nothing else serves.
An engine that was started or reloaded is STALE until its weights and adapters are confirmed. Probes that fail and
requests that fail are counted apart: probes say whether the process lives, requests whether it works. An engine that made
progress since it was last judged is busy and not dead, however late it answers.
"""

from typing import Literal

from cluster.pool_view import EngineState

ProbeResult = Literal["moved", "idle", "stuck"]
"""What an answered probe shows: tokens were generated since the last one; nothing is to be done; requests wait and no token came."""

SUSPECT_AFTER_LATE = 2
"""Probes in a row without an answer, and without progress between them, that make an engine suspect: one may be chance."""
DEAD_AFTER_LATE = 6
"""Such probes that make it dead: long enough for a pause of the process (a collection, a swapped page), short for a run."""
SUSPECT_AFTER_STUCK = 6
"""Answered probes in a row that found requests and not one new token: a long prompt may take some."""
DEAD_AFTER_STUCK = 36
"""Such probes that make it dead; at one every five seconds, three minutes without a token."""
SUSPECT_AFTER_FAILED = 2
"""Requests that failed at the engine since its last progress that make it suspect."""
DEAD_AFTER_FAILED = 5
"""Such requests that make it dead at its next probe, unless that shows progress: a burst of time-outs of a busy engine does not."""

SERVING: frozenset[EngineState] = frozenset({"HEALTHY", "SUSPECT"})
"""States in which an engine may be given requests."""
RUNNING: frozenset[EngineState] = frozenset({"HEALTHY", "SUSPECT", "DRAINING"})
"""States in which an engine may hold unfinished requests."""


class Health:
    """One engine from its first start to its end. Begins DEAD, with no start spent."""

    def __init__(self, restarts: int) -> None:
        """`restarts`: how often it may be started again after deaths that were its own."""
        self.state: EngineState = "DEAD"
        self.restarts = 0
        """Starts after deaths of its own."""
        self._allowed = restarts
        self._charged = self._counted = False
        self._progressed = False
        self._late = self._stuck = self._failed = 0

    @property
    def serves(self) -> bool:
        """Whether requests may be routed to it."""
        return self.state in SERVING

    @property
    def may_start(self) -> bool:
        """Whether its restarts are not spent."""
        return not self._charged or self.restarts < self._allowed

    def start(self) -> None:
        """Its process is being started. Raises RuntimeError if it is not dead or its restarts are spent."""
        self._expect("DEAD")
        if not self.may_start:
            raise RuntimeError(f"an engine's {self._allowed} restarts are spent")
        self.restarts += self._charged
        self._counted, self._charged = self._charged, False
        self._become("RESTARTING")

    def started(self) -> None:
        """Its process answers; what it holds is not known yet."""
        self._expect("RESTARTING")
        self._become("STALE")

    def confirmed(self) -> None:
        """It holds the weights and adapters that are to be served."""
        self._expect("STALE")
        self._become("HEALTHY")

    def drain(self) -> None:
        """It gets no more requests; those it has may finish."""
        self._expect("HEALTHY", "SUSPECT")
        self._become("DRAINING")

    def unconfirm(self) -> None:
        """It is empty and its weights are being replaced."""
        self._expect("DRAINING")
        self._become("STALE")

    def died(self, charged: bool) -> None:
        """Its process is gone or is given up. `charged`: by its own fault, so that the next start spends a restart."""
        self._charged = charged
        self._become("DEAD")

    def excuse(self) -> None:
        """Its last death turned out not to be its own fault: the restart is not spent."""
        self.restarts -= self._counted
        self._charged = self._counted = False

    def request_succeeded(self) -> None:
        """A request came back whole: the engine works, and what was counted against it is forgotten."""
        self._progress()

    def request_failed(self) -> None:
        """A request failed at the engine (a time-out, a broken connection), which proves nothing by itself."""
        if self.state in RUNNING:
            self._failed += 1
            self._judge()

    def probe_answered(self, result: ProbeResult) -> None:
        """The engine answered a probe."""
        if self.state not in RUNNING:
            return
        self._late = 0
        if result == "moved":
            self._progress()
            return
        self._stuck = self._stuck + 1 if result == "stuck" and not self._progressed else 0
        self._judge_probe()

    def probe_late(self) -> None:
        """The engine did not answer a probe in time."""
        if self.state not in RUNNING:
            return
        self._late = 0 if self._progressed else self._late + 1
        self._judge_probe()

    def _progress(self) -> None:
        self._late = self._stuck = self._failed = 0
        self._progressed = True
        self._judge()

    def _judge_probe(self) -> None:
        if not self._progressed and self._failed >= DEAD_AFTER_FAILED:
            self.died(charged=True)
        self._progressed = False
        self._judge()

    def _judge(self) -> None:
        if self.state not in RUNNING:
            return
        if self._late >= DEAD_AFTER_LATE or self._stuck >= DEAD_AFTER_STUCK:
            self.died(charged=True)
        elif self.state in SERVING:
            suspect = (
                self._late >= SUSPECT_AFTER_LATE
                or self._stuck >= SUSPECT_AFTER_STUCK
                or self._failed >= SUSPECT_AFTER_FAILED
            )
            self.state = "SUSPECT" if suspect else "HEALTHY"

    def _become(self, state: EngineState) -> None:
        self.state = state
        self._late = self._stuck = self._failed = 0
        self._progressed = False

    def _expect(self, *states: EngineState) -> None:
        if self.state not in states:
            raise RuntimeError(f"an engine is {self.state}, where only {' or '.join(states)} can be")
