"""What happened in a simulated run, line by line, as a hash that two runs of one seed must share."""

import hashlib
from collections import Counter
from collections.abc import Callable


class Trace:
    """Notes events with their virtual time; keeps their hash, and the lines too if asked."""

    def __init__(self, clock: Callable[[], float], print_line: Callable[[str], None] | None = None) -> None:
        """`print_line` gets every line as it happens."""
        self.clock = clock
        self._print = print_line
        self._digest = hashlib.sha256()
        self.events = 0
        self.faults: Counter[str] = Counter()
        """Injected faults by kind."""

    def note(self, what: str) -> None:
        """One event."""
        line = f"{self.clock():12.4f} {what}"
        self.events += 1
        self._digest.update(line.encode() + b"\n")
        if self._print is not None:
            self._print(line)

    def fault(self, kind: str, what: str = "") -> None:
        """One injected fault."""
        self.faults[kind] += 1
        self.note(f"fault {kind} {what}".rstrip())

    @property
    def digest(self) -> str:
        """SHA-256 of all lines so far, 16 hex digits."""
        return self._digest.hexdigest()[:16]
