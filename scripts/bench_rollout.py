"""Measures rollouts: engine time lost to tools and coordination, the coordinator's capacity, prefix-cache hits, resumption.

    python -m scripts.bench_rollout --json build/rollout.json
    python -m scripts.bench_rollout --part capacity --forecasts 1000

Every figure is a ratio or a count; absolute rates are printed beside their peer of the same run.
"""

import logging
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cluster.record import Record
from scripts.bench.capacity import Capacity, measure_capacity, measure_resume
from scripts.bench.efficiency import Efficiency, measure_efficiency
from scripts.bench.prefix import Prefix, measure_prefix
from scripts.terminal import console

PARTS = ("efficiency", "capacity", "prefix")


class RolloutFigures(Record):
    """What `--json` writes; parts that were not measured are empty."""

    efficiency: tuple[Efficiency, ...] = ()
    capacity: tuple[Capacity, ...] = ()
    prefix: Prefix | None = None
    resume_s: float | None = None
    """At the largest of the capacity runs: from asking for the resumption to its first running step."""


def main(
    part: Annotated[list[str], typer.Option(help=f"One of {', '.join(PARTS)}; may be repeated.")] = list(PARTS),  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Steps of an efficiency or prefix rollout.")] = 96,
    concurrency: Annotated[int, typer.Option(min=1, help="Steps at once in efficiency.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Alternations of rollout and plain batch.")] = 2,
    tool_ms: Annotated[list[int], typer.Option(help="Milliseconds a tool takes; may be repeated.")] = [0, 50, 500],  # noqa: B006
    forecasts: Annotated[list[int], typer.Option(help="Sizes of capacity runs; may be repeated.")] = [  # noqa: B006
        1_000,
        10_000,
        50_000,
    ],
    workers: Annotated[int, typer.Option(min=1, help="Rollout workers of a capacity run.")] = 1,
    json_: Annotated[Path | None, typer.Option("--json", help="Where to write the figures for programs.")] = None,
) -> None:
    """Measure and print; `--json` writes the same for programs."""
    if unknown := set(part) - set(PARTS):
        raise typer.BadParameter(f"no part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    logging.basicConfig(level=logging.ERROR)
    figures = RolloutFigures()
    with tempfile.TemporaryDirectory(prefix="pastcast-bench-") as name:
        folder = Path(name)
        if "capacity" in part:
            measured = [measure_capacity(folder / f"capacity-{n}", n, workers, _say) for n in sorted(forecasts)]
            resume = measure_resume(folder / f"capacity-{max(forecasts)}")
            _say(f"resumed in {resume:.1f} s")
            figures = figures.model_copy(update={"capacity": tuple(measured), "resume_s": resume})
        if "efficiency" in part:
            ratios = measure_efficiency(folder / "efficiency", tool_ms, steps, concurrency, rounds, _say)
            figures = figures.model_copy(update={"efficiency": tuple(ratios)})
        if "prefix" in part:
            figures = figures.model_copy(update={"prefix": measure_prefix(folder / "prefix", steps, _say)})
    _print(figures)
    if json_ is not None:
        json_.parent.mkdir(parents=True, exist_ok=True)
        json_.write_text(figures.model_dump_json(indent=1) + "\n")


def _say(line: str) -> None:
    console.print(line, highlight=False)


def _print(figures: RolloutFigures) -> None:
    if figures.efficiency:
        table = Table(
            "tools take", "of the plain batch", "rounds", "tokens/s", "plain tokens/s", "prefix reused", "by the batch"
        )
        for e in figures.efficiency:
            rounds = ", ".join(f"{r:.3f}" for r in e.ratios)
            rates = f"{e.rollout_tokens_per_second:.0f}", f"{e.batch_tokens_per_second:.0f}"
            table.add_row(
                f"{e.tool_ms} ms", f"{e.ratio:.3f}", rounds, *rates, f"{e.reused:.3f}", f"{e.batch_reused:.3f}"
            )
        console.print(table)
    if figures.capacity:
        table = Table("forecasts", "per second", "driver, MiB", "largest worker, MiB", "ledger, bytes each")
        for c in figures.capacity:
            sizes = f"{c.rss_mb:.0f}", f"{c.worker_rss_mb:.0f}", str(c.ledger_bytes)
            table.add_row(str(c.forecasts), f"{c.per_second:.0f}", *sizes)
        console.print(table)
        _say(f"resumed at {max(c.forecasts for c in figures.capacity)} records in {figures.resume_s:.1f} s")
    if figures.prefix is not None:
        p = figures.prefix
        _say(f"reusable prompt tokens from the cache: sticky {p.sticky:.3f}, round-robin {p.round_robin:.3f}")


if __name__ == "__main__":
    typer.run(main)
