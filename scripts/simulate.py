"""`python -m scripts.simulate`: whole runs under a virtual clock, one a seed, until a promise is broken or the seeds are spent.

Example: `python -m scripts.simulate --seeds 10000 --json simulation.json`; `--seed N --trace` replays one, line by line.
"""

import json
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from cluster.record import Record
from rollout.simulator.run import Simulated, simulate

SAY_SECONDS = 10.0
"""Between two lines of progress."""


class Summary(Record):
    """What many seeds came to."""

    first: int
    seeds: int
    seconds: float
    """Wall clock."""
    virtual_hours: float
    lives: int
    """Of the driver: every one but the first of a run resumed from the ledger."""
    forecasts: int
    recorded: int
    events: int
    ended: dict[str, int]
    """Runs by how they ended."""
    faults: dict[str, int]
    """Injected, by kind."""
    broken: dict[int, str]
    """Seed → the promise that it broke."""


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 500,
    first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this one.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event.")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the summary there.")] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on after a broken promise.")] = False,
) -> None:
    """Simulate runs. Exit status 1 if a promise was broken."""
    logging.disable(logging.CRITICAL)
    chosen = range(first, first + seeds) if seed is None else range(seed, seed + 1)
    began = said = time.monotonic()
    results: list[Simulated] = []
    broken: dict[int, str] = {}
    for number in chosen:
        results.append(simulate(number, _say if trace else None))
        if results[-1].broken:
            broken[number] = results[-1].broken
            _say(f"seed {number} breaks a promise: {results[-1].broken}")
            _say(f"replay it with: python -m scripts.simulate --seed {number} --trace")
            if not keep_going:
                break
        if time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            _say(f"{len(results)} of {len(chosen)} seeds, {(said - began) / len(results) * 1000:.0f} ms each")
    summary = _summary(chosen.start, results, broken, time.monotonic() - began)
    if json_ is not None:
        json_.write_text(summary.model_dump_json(indent=1) + "\n")
    _say(json.dumps(summary.model_dump(mode="json"), indent=1))
    raise typer.Exit(1 if broken else 0)


def _summary(first: int, results: list[Simulated], broken: dict[int, str], seconds: float) -> Summary:
    faults: Counter[str] = Counter()
    for result in results:
        faults.update(result.faults)
    return Summary(
        first=first,
        seeds=len(results),
        seconds=round(seconds, 1),
        virtual_hours=round(sum(r.seconds for r in results) / 3600, 1),
        lives=sum(r.lives for r in results),
        forecasts=sum(r.forecasts for r in results),
        recorded=sum(r.recorded for r in results),
        events=sum(r.events for r in results),
        ended=dict(sorted(Counter(r.ended or "broken" for r in results).items())),
        faults=dict(sorted(faults.items())),
        broken=broken,
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
