"""What a person sees while something runs: a live bar on a terminal, a line every few seconds in a log."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rollout.progress import Progress as RunProgress

LOG_WIDTH = 140
"""Columns where there is no terminal to ask."""

# Without markup: what is printed names paths and quotes errors, and "[/tmp]" in one of them would be a closing tag of nothing.
console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH, markup=False)
errors = Console(stderr=True, width=None if sys.stderr.isatty() else LOG_WIDTH, markup=False)

LOG_LINE_SECONDS = 10.0
"""How often a log without a terminal gets a line."""


class ProgressBar:
    """One task's progress; `update` may be called as often as one likes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=None, note="")
        self._printed = 0.0

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total`."""
        self._bar.update(self._task, completed=done, total=total, note=note)
        now = time.monotonic()
        if not console.is_terminal and (now - self._printed >= LOG_LINE_SECONDS or done == total):
            self._printed = now
            console.print(f"{self._title}: {done}/{total} {note}", highlight=False)

    def run(self, progress: "RunProgress") -> None:
        """Show a run's state: throughput, tokens and failures by reason."""
        rate = progress.done_now / progress.seconds if progress.seconds > 1 and progress.running else 0.0
        tokens = progress.output_tokens / progress.seconds if progress.seconds > 1 else 0.0
        parts = [progress.stage]
        if progress.stage == "running":
            parts = [f"{progress.running} running", f"{rate:.2f} forecasts/s", f"{tokens:.0f} tokens/s"]
        if progress.retried:
            parts.append(f"{progress.retried} attempts repeated")
        parts += [f"{count} {reason}" for reason, count in sorted(progress.failures.items())]
        self.update(progress.done, progress.total, ", ".join(parts))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
