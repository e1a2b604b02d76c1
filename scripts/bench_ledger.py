"""How fast the ledger takes forecasts, how large it grows and how soon a run of that size goes on.

`python -m scripts.bench_ledger --forecasts 50000 --json ledger.json`. Forecasts have the size of a real step: a dozen turns
with token ids, log-probabilities and tool output.
"""

import datetime as dt
import random
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cluster.clock import monotonic
from cluster.record import Record
from rollout.ledger import Ledger
from rollout.notebook import Assessment, Notebook, NotebookState
from rollout.packed import PackedForecast, pack
from rollout.record import ForecastKey, ForecastRecord, Usage
from rollout.report import Report
from rollout.resumption import Recorded
from rollout.trajectory import Message, ToolCall, ToolResult, Trajectory, Turn

TURNS = 12
PROMPT_TOKENS = 500
"""Added by each turn: what its tools returned."""
SAMPLED_TOKENS = 120
RESULT_WORDS = 300
DIFFERENT = 16
"""Forecasts with contents of their own; the others repeat them under other keys."""
STAGES = ((1, 0.02), (16, 0.18), (256, 0.6), (16, 0.18), (1, 0.02))
"""(batch, share of the forecasts): small batches at both ends say whether it slows down as it grows."""


class BatchRate(Record):
    """One stage of the filling."""

    after: int
    """Forecasts that were there before."""
    batch: int
    """Forecasts in a transaction."""
    per_second: float


class LedgerBench(Record):
    """What was measured."""

    forecasts: int
    rates: tuple[BatchRate, ...]
    bytes_per_forecast: float
    """Of the file."""
    packed_bytes: float
    """Of record and trajectory as they came."""
    resume_s: float
    """Opening it and reading all that going on needs."""
    rss_mb: float
    """The process's largest, at the end."""


def measure_ledger(folder: Path, forecasts: int, seed: int = 0) -> LedgerBench:
    """Fill a ledger in `folder` and open it again."""
    keys = _keys(forecasts)
    contents = [_packed(keys[0], random.Random(f"{seed}/{i}")) for i in range(DIFFERENT)]
    path = folder / "ledger.sqlite"
    rates = []
    with Ledger.create(path, keys) as ledger:
        done = 0
        for number, (batch, share) in enumerate(STAGES):
            end = forecasts if number == len(STAGES) - 1 else done + int(share * forecasts)
            batches = [range(i, min(i + batch, end)) for i in range(done, end, batch)]
            began = monotonic()
            for some in batches:
                ledger.commit([contents[i % DIFFERENT].model_copy(update={"key": keys[i]}) for i in some])
            rates.append(BatchRate(after=done, batch=batch, per_second=(end - done) / (monotonic() - began)))
            done = end
    began = monotonic()
    with Ledger.open(path) as ledger:
        recorded = Recorded(ledger)
        found = sum(key in recorded for key in keys)
        scheduled, finished = ledger.counts()
    resume_s = monotonic() - began
    if not found == scheduled == finished == forecasts:
        raise RuntimeError(f"{found} of {forecasts} forecasts were found again")
    return LedgerBench(
        forecasts=forecasts,
        rates=tuple(rates),
        bytes_per_forecast=path.stat().st_size / forecasts,
        packed_bytes=sum(len(c.record) + len(c.trajectory or b"") for c in contents) / DIFFERENT,
        resume_s=resume_s,
        rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _keys(count: int) -> list[ForecastKey]:
    day = dt.date(2024, 7, 1)
    return [
        ForecastKey(
            model="model",
            event=f"event-{i // 16:06d}",
            date=day + dt.timedelta(days=i % 4),
            mode="memory-on" if i % 2 else "memory-free",
            rollout=i % 16 // 4,
        )
        for i in range(count)
    ]


def _packed(key: ForecastKey, chance: random.Random) -> PackedForecast:
    notebook = Notebook(assessment=Assessment(p={"YES": 0.5, "NO": 0.5}, open_questions=(_words(chance, 40),)))
    report = Report(probabilities={"YES": 0.5, "NO": 0.5}, verdict="ok", usable_strict=True, usable_lenient=True)
    record = ForecastRecord(
        key=key,
        options=("YES", "NO"),
        report=report,
        notebook=NotebookState(notebook=notebook, status="valid"),
        usage=Usage(model_calls=TURNS, output_tokens=TURNS * SAMPLED_TOKENS),
        prompt="0" * 64,
        weights="1" * 64,
    )
    return pack(record, Trajectory(turns=tuple(_turns(chance)), transcript="exact"))


def _turns(chance: random.Random) -> Iterator[Turn]:
    for number in range(TURNS):
        name, shown = f"call-{number}", _words(chance, RESULT_WORDS)
        yield Turn(
            messages=(Message(role="tool", content=shown, call_id=name, name="search"),),
            tools=("search", "scrape", "python"),
            prompt_ids=tuple(chance.randrange(150_000) for _ in range(PROMPT_TOKENS)),
            sampled_ids=tuple(chance.randrange(150_000) for _ in range(SAMPLED_TOKENS)),
            logprobs=tuple(-chance.expovariate(2.0) for _ in range(SAMPLED_TOKENS)),
            text=_words(chance, 60),
            tool_calls=(ToolCall(id=name, name="search", arguments='{"query": "who leads"}'),),
            results=(ToolResult(call_id=name, name="search", text=shown),),
        )


def _words(chance: random.Random, count: int) -> str:
    return " ".join("".join(chance.choices("aeinorst", k=chance.randrange(2, 9))) for _ in range(count))


def main(
    forecasts: Annotated[int, typer.Option(min=1)] = 50_000,
    folder: Annotated[
        Path | None, typer.Option(help="Where the ledger is made; by default a temporary folder.")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure a ledger: rates, size, resumption. Example: python -m scripts.bench_ledger --forecasts 1000."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        text = measure_ledger(Path(place), forecasts).model_dump_json(indent=1) + "\n"
    if json_ is not None:
        json_.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    typer.run(main)
