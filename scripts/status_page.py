"""A run's status as a person reads it in a terminal."""

import time

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollout.mirror import MirrorState
from rollout.status import RunStatus, StatusReport, duration, read_status
from scripts.terminal import console

WATCH_SECONDS = 2.0


def status_page(report: StatusReport) -> RenderableType:
    """Everything the report says."""
    done = "?" if report.done is None else f"{report.done:,}"
    share = f" ({report.done / report.scheduled:.1%})" if report.scheduled and report.done is not None else ""
    lines: list[tuple[str, str]] = [
        ("run", report.run),
        ("state", report.verdict),
        ("forecasts", f"{done} of {report.scheduled:,}{share}"),
    ]
    if report.parts is not None:
        lines.append(("parts", f"{report.parts:,}, up to change {report.shipped:,}"))
    if report.status is not None:
        lines += _lines(report.status)
        # A mirror's own parts say how far it is; the status in it was said before the last of them.
        if (mirror := report.status.mirror) is not None and report.parts is None:
            lines.append(("mirror", _mirror(mirror)))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, Text(text))
    parts: list[RenderableType] = [table]
    if report.failures:
        parts += [Text(), _failures(report.failures)]
    if report.status is not None and report.status.engines:
        parts += [Text(), _engines(report.status)]
    return Group(*parts)


def watch_status(run: str) -> None:
    """Show it again and again, until no driver works on the run or Ctrl-C."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            report = read_status(run)
            live.update(status_page(report), refresh=True)
            over = report.status is not None and bool(report.status.ended)
            if report.driver is False or (report.driver is None and over):
                return
            time.sleep(WATCH_SECONDS)


def _lines(status: RunStatus) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    if not status.ended:
        lines.append(("stage", status.stage))
        lines.append(("running", f"{status.running} steps" + (f" of {status.limit} at most" if status.limit else "")))
        lines.append(("rate", f"{status.per_second:.2f} forecasts/s, {status.tokens_per_second:,.0f} tokens/s"))
    if status.expected_end is not None:
        left = duration((status.expected_end - status.updated).total_seconds())
        lines.append(("expected end", f"{status.expected_end:%Y-%m-%d %H:%M} UTC, in {left}"))
    if status.paused:
        lines.append(("paused", status.paused))
    lines.append(("this sitting", f"{status.done_now:,} recorded, {status.output_tokens:,} sampled tokens"))
    if status.retried:
        lines.append(("repeated", f"{status.retried:,} attempts that infrastructure failed"))
    if status.price:
        lines.append(("cost", f"${status.price:,.2f}"))
    if status.metrics:
        lines.append(("metrics", status.metrics))
    return lines


def _mirror(mirror: MirrorState) -> str:
    behind = (
        f"{mirror.unshipped:,} changes behind for {duration(mirror.lag_s)}" if mirror.unshipped else "all is shipped"
    )
    return f"{mirror.address}: {behind}" + (f"; {mirror.fault}" if mirror.fault else "")


def _failures(failures: dict[str, int]) -> Table:
    table = Table(title="failures", title_justify="left", show_header=False, box=None, pad_edge=False)
    for reason, count in sorted(failures.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(f"{count:,}", reason)
    return table


def _engines(status: RunStatus) -> Table:
    table = Table(title="engines", title_justify="left", box=None, pad_edge=False)
    for name in ("engine", "state", "running", "waiting", "KV cache", "sessions", "restarts", "node"):
        table.add_column(name, justify="left" if name in ("state", "node") else "right")
    for e in status.engines:
        row = (e.engine, e.state, e.running, e.waiting, f"{e.kv_cache_use:.0%}", e.sessions, e.restarts, e.node)
        table.add_row(*(str(cell) for cell in row))
    return table
