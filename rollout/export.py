"""A run as a folder of Parquet files that `datasets` loads and streams, with a card that says what they are.

Forecasts, events and market beliefs are three configurations, so that the row of a forecast, which is what models are
trained on, never holds the answer. Outcomes may be left out; beliefs are the market's data and only written when asked
for. Memory does not grow with the run: rows are written in bounded groups, and files are closed at a bounded size.
"""

import datetime as dt
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cluster.failures import SettingsError
from cluster.record import Record
from rollout.events.event import Event
from rollout.ledger import Ledger
from rollout.manifest import Manifest
from rollout.record import ForecastRecord
from rollout.run import RunDirectory
from rollout.trajectory import Trajectory, Transcript

FILE_MIB = 256
"""A file is closed once it is larger."""
GROUP_ROWS = 256
GROUP_BYTES = 16 * 2**20
"""A row group is written once its texts and tokens are larger: all that an export keeps in memory."""
TRANSCRIPTS: dict[Transcript, str] = {
    "exact": "`token_ids` are what the engine saw and sampled, in order; train on them where `mask` is 1",
    "rendered": "ids were rendered anew each turn and are not given; not for token-exact training",
    "messages": "no ids were involved; render `messages` with the chat template of your model",
}

_TEXTS = pa.list_(pa.string())
_COUNTS = pa.list_(pa.struct([("name", pa.string()), ("count", pa.int64())]))
_CALL = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())])
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.list_(_CALL)),
        ("call_id", pa.string()),
        ("name", pa.string()),
    ]
)
_TURN = pa.struct(
    [
        ("tools", _TEXTS),
        ("reasoning", pa.string()),
        ("finish", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("sampled_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("seconds", pa.float64()),
        ("engine", pa.string()),
        ("weights", pa.string()),
    ]
)
_SHOWN = pa.struct([("article_id", pa.string()), ("day", pa.date32())])

Column = tuple[str, pa.DataType, str]
FORECAST_COLUMNS: tuple[Column, ...] = (
    ("model", pa.string(), "name of the model"),
    ("event", pa.string(), "id of the event"),
    ("date", pa.date32(), "forecast date, a UTC day"),
    ("mode", pa.string(), "`no-tools`, `memory-free` or `memory-on`"),
    ("rollout", pa.int64(), "index of the independent repetition"),
    ("split", pa.string(), "`train` or `eval`: the event's"),
    ("options", _TEXTS, "what could be answered"),
    (
        "probabilities",
        pa.list_(pa.struct([("label", pa.string()), ("probability", pa.float64())])),
        "the report of a single-answer event; empty when unusable",
    ),
    ("answers", _TEXTS, "the report of a multi-answer event"),
    ("verdict", pa.string(), "`ok`, `repaired` or `unusable`; null when there was no text to parse"),
    ("why", pa.string(), "of the verdict"),
    ("remainder", pa.string(), "what stood in the answer and was not understood"),
    ("usable_strict", pa.bool_(), "whether the strict policy takes the answer"),
    ("usable_lenient", pa.bool_(), "whether the lenient policy takes it"),
    ("failure_kind", pa.string(), "`infrastructure`, `model`, `data` or `bug`; null without a failure"),
    ("failure_reason", pa.string(), "a short name; null without a failure"),
    ("failure_detail", pa.string(), "for a person"),
    ("notebook", pa.string(), "memory-on: the belief notebook that was carried on, as JSON"),
    ("attempts", pa.int64(), "tries, the last one included"),
    ("model_calls", pa.int64(), "calls of the model"),
    ("tool_calls", _COUNTS, "by tool"),
    ("tool_errors", _COUNTS, "failed calls by error"),
    ("malformed_calls", _COUNTS, "calls that could not be read, by kind"),
    ("cut_characters", _COUNTS, "characters cut from what tools returned, by tool"),
    ("input_tokens", pa.int64(), "sum over calls of the context length"),
    ("cached_tokens", pa.int64(), "of these, from the prefix cache"),
    ("output_tokens", pa.int64(), "sampled"),
    ("model_seconds", pa.float64(), "in the model"),
    ("tool_seconds", pa.float64(), "in tools"),
    ("seconds", pa.float64(), "of the whole step"),
    ("price", pa.float64(), "US dollars asked by an endpoint"),
    ("transcript", pa.string(), "`exact`, `rendered` or `messages`, see below; null when nothing was kept"),
    ("messages", pa.list_(_MESSAGE), "the chat, in order"),
    ("token_ids", pa.list_(pa.int32()), "all ids of an exact transcript, given and sampled, in order; else null"),
    ("mask", pa.list_(pa.int8()), "one per token id: 1 where it was sampled"),
    ("logprobs", pa.list_(pa.float64()), "one per sampled id (mask 1), natural log"),
    ("turns", pa.list_(_TURN), "one per call of the model; `weights` says which weights sampled it"),
    ("shown", pa.list_(_SHOWN), "every article of which something was shown, with its day"),
    ("tokenizer", pa.string(), "fingerprint of tokenizer and chat template"),
    ("prompt", pa.string(), "hash of the prompt templates"),
    ("weights", pa.string(), "fingerprint of the model's weights"),
)
EVENT_COLUMNS: tuple[Column, ...] = (
    ("event", pa.string(), "id"),
    ("source", pa.string(), "where it comes from"),
    ("url", pa.string(), "its page"),
    ("question", pa.string(), "as shown"),
    ("criteria", pa.string(), "as shown"),
    ("background", pa.string(), "as shown"),
    ("options", _TEXTS, "what could be answered"),
    ("selection", pa.string(), "`single` or `multi`"),
    ("split", pa.string(), "`train` or `eval`"),
    ("opened", pa.timestamp("us", tz="UTC"), "when it opened"),
    ("deadline", pa.timestamp("us", tz="UTC"), "scheduled end, where the source has one"),
)
OUTCOME_COLUMNS: tuple[Column, ...] = (
    ("closed", pa.timestamp("us", tz="UTC"), "actual settlement; never shown to a model"),
    ("outcome", _TEXTS, "what came true; never shown to a model"),
)
BELIEF_COLUMNS: tuple[Column, ...] = (
    ("event", pa.string(), "id"),
    ("day", pa.date32(), "UTC day"),
    ("option", pa.string(), "one of the event's"),
    ("probability", pa.float64(), "the market's; never shown to a model"),
)


class ExportSummary(Record):
    """What an export wrote."""

    path: Path
    forecasts: int
    open: int
    """Scheduled forecasts that have no record yet."""
    files: int
    bytes: int


class FileWriter:
    """Rows into `folder/NAME-00000-of-0000N.parquet`, in bounded groups and files of bounded size."""

    def __init__(self, folder: Path, name: str, columns: tuple[Column, ...], file_bytes: int) -> None:
        folder.mkdir(parents=True)
        self._folder, self._name, self._limit = folder, name, file_bytes
        self._schema = pa.schema([(column, kind) for column, kind, _ in columns])
        self._rows: list[Mapping[str, Any]] = []
        self._size = 0
        self._files: list[Path] = []
        self._writer: pq.ParquetWriter | None = None

    def add(self, row: Mapping[str, Any], size: int) -> None:
        """One row, of about `size` bytes."""
        self._rows.append(row)
        self._size += size
        if len(self._rows) >= GROUP_ROWS or self._size >= GROUP_BYTES:
            self._write_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and (self._rows or not self._files):
            self._write_group()
        self._close_file()
        if kind is None:
            for number, file in enumerate(self._files):
                file.rename(self._folder / f"{self._name}-{number:05d}-of-{len(self._files):05d}.parquet")

    def _write_group(self) -> None:
        if self._writer is None:
            self._files.append(self._folder / f"{self._name}-{len(self._files):05d}.parquet")
            self._writer = pq.ParquetWriter(self._files[-1], self._schema, compression="zstd")
        columns = {name: [row[name] for row in self._rows] for name in self._schema.names}
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._rows, self._size = [], 0
        if self._files[-1].stat().st_size >= self._limit:
            self._close_file()

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def export_run(
    run: Path,
    out: Path,
    *,
    outcomes: bool = True,
    beliefs: bool = False,
    licence: str = "unknown",
    file_mib: int = FILE_MIB,
    report: Callable[[int, int], None] = lambda _done, _total: None,
) -> ExportSummary:
    """Write the run's finished forecasts, its events and a card to the new folder `out`; also while the run goes on.

    `licence` is an identifier of the Hugging Face hub. `report` is told (done, total) forecasts. Raises SettingsError if
    `out` holds something. The folder appears when it is whole.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"{out} holds something already; choose another folder for the export")
    directory = RunDirectory(run)
    manifest, events = directory.manifest(), directory.events()
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    file_bytes = file_mib * 2**20
    with directory.ledger() as ledger:
        counts, scheduled = _write_forecasts(ledger, events, part, file_bytes, report)
    columns = EVENT_COLUMNS + (OUTCOME_COLUMNS if outcomes else ())
    with FileWriter(part / "events", "events", columns, file_bytes) as writer:
        for event in events.values():
            writer.add(_event_row(event), len(event.question) + len(event.criteria) + len(event.background))
    configurations = {"forecasts": FORECAST_COLUMNS, "events": columns}
    if beliefs:
        configurations["beliefs"] = BELIEF_COLUMNS
        with FileWriter(part / "beliefs", "beliefs", BELIEF_COLUMNS, file_bytes) as writer:
            for row in _belief_rows(events.values()):
                writer.add(row, 100)
    done = sum(counts.values())
    card = _card(manifest, licence, configurations, counts, scheduled, events)
    (part / "README.md").write_text(card, encoding="utf-8")
    if out.is_dir():
        out.rmdir()
    part.rename(out)
    written = list(out.rglob("*.parquet"))
    return ExportSummary(
        path=out,
        forecasts=done,
        open=scheduled - done,
        files=len(written),
        bytes=sum(f.stat().st_size for f in written),
    )


def _write_forecasts(
    ledger: Ledger,
    events: Mapping[str, Event],
    part: Path,
    file_bytes: int,
    report: Callable[[int, int], None],
) -> tuple[Counter[tuple[str, str, str]], int]:
    """Number of forecasts by (model, mode, failure), and how many were scheduled."""
    scheduled, finished = ledger.counts()
    counts: Counter[tuple[str, str, str]] = Counter()
    with FileWriter(part / "forecasts", "forecasts", FORECAST_COLUMNS, file_bytes) as writer:
        for done, (record, trajectory) in enumerate(ledger.forecasts(), 1):
            row, size = _forecast_row(record, trajectory, events[record.key.event])
            writer.add(row, size)
            failure = record.failure.reason if record.failure else ""
            counts[record.key.model, record.key.mode, failure] += 1
            report(done, finished)
    return counts, scheduled


def _forecast_row(record: ForecastRecord, trajectory: Trajectory | None, event: Event) -> tuple[dict[str, Any], int]:
    report, failure, usage = record.report, record.failure, record.usage
    row: dict[str, Any] = dict.fromkeys(name for name, _, _ in FORECAST_COLUMNS)
    row |= record.key.model_dump()
    row |= {
        "split": event.split,
        "options": record.options,
        "notebook": record.notebook.model_dump_json() if record.notebook else None,
        "attempts": record.attempts,
        "prompt": record.prompt,
        "weights": record.weights,
        "tool_calls": _counts(usage.tool_calls),
        "tool_errors": _counts(usage.tool_errors),
        "malformed_calls": _counts(usage.malformed_calls),
        "cut_characters": _counts(usage.cut_characters),
    }
    for name in ("model_calls", "input_tokens", "cached_tokens", "output_tokens", "model_seconds", "tool_seconds"):
        row[name] = getattr(usage, name)
    row |= {"seconds": usage.seconds, "price": usage.price}
    if report is not None:
        row["probabilities"] = [{"label": label, "probability": p} for label, p in report.probabilities.items()]
        for name in ("answers", "verdict", "why", "remainder", "usable_strict", "usable_lenient"):
            row[name] = getattr(report, name)
    if failure is not None:
        row |= {"failure_kind": failure.kind, "failure_reason": failure.reason, "failure_detail": failure.detail}
    size = 2000 + len(row["notebook"] or "")
    if trajectory is not None:
        size += _add_trajectory(row, trajectory)
    return row, size


def _add_trajectory(row: dict[str, Any], trajectory: Trajectory) -> int:
    messages = [m.model_dump() for m in trajectory.messages()]
    row["messages"] = messages
    row["transcript"] = trajectory.transcript
    row["tokenizer"] = trajectory.tokenizer
    row["shown"] = [s.model_dump() for s in trajectory.shown()]
    row["turns"] = [
        {
            "tools": turn.tools,
            "reasoning": turn.reasoning,
            "finish": turn.finish,
            "prompt_tokens": len(turn.prompt_ids),
            "sampled_tokens": len(turn.sampled_ids),
            "cached_tokens": turn.cached_tokens,
            "seconds": turn.seconds,
            "engine": turn.engine,
            "weights": turn.weights,
        }
        for turn in trajectory.turns
    ]
    tokens = 0
    if trajectory.transcript == "exact":
        # Arrays, not lists: a row waits for its group at a few bytes a token.
        row["token_ids"] = np.array(trajectory.token_ids(), dtype=np.int32)
        row["mask"] = np.array(trajectory.mask(), dtype=np.int8)
        row["logprobs"] = np.array([p for turn in trajectory.turns for p in turn.logprobs], dtype=np.float64)
        tokens = len(row["token_ids"])
    texts = sum(len(m["content"]) + sum(len(c["arguments"]) for c in m["tool_calls"]) for m in messages)
    return texts + sum(len(turn.reasoning) for turn in trajectory.turns) + 13 * tokens


def _event_row(event: Event) -> dict[str, Any]:
    row = event.model_dump(exclude={"id", "beliefs"})
    return {"event": event.id, **row}


def _belief_rows(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    for event in events:
        for day, belief in sorted(event.beliefs.items()):
            for option, p in belief.items():
                yield {"event": event.id, "day": day, "option": option, "probability": p}


def _counts(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "count": count} for name, count in sorted(counts.items())]


def _card(
    manifest: Manifest,
    licence: str,
    configurations: Mapping[str, tuple[Column, ...]],
    counts: Counter[tuple[str, str, str]],
    scheduled: int,
    events: Mapping[str, Event],
) -> str:
    """The dataset card; the block at its top is what `datasets` reads."""
    configs = [
        f"- config_name: {name}\n"
        + ("  default: true\n" if name == "forecasts" else "")
        + f"  data_files: {name}/*.parquet"
        for name in configurations
    ]
    done = sum(counts.values())
    sources = Counter(e.source for e in events.values())
    days = sorted(e.opened.astimezone(dt.UTC).date() for e in events.values())
    between = f", opened between {days[0]} and {days[-1]}" if days else ""
    lines = [
        "---",
        f"license: {json.dumps(licence)}",
        "tags: [forecasting, agents, pastcast]",
        "configs:",
        *configs,
        "---",
        "",
        "# Dated forecasts",
        "",
        f"{done:,} of {scheduled:,} scheduled forecasts of {len(events):,} resolved events{between}, made by pastcast: an agent "
        "stands at a past date, sees only what had been published by then, and reports a probability for every option.",
        "",
        f"- Run fingerprint: `{manifest.fingerprint}` (code `{manifest.code[:12]}`)",
        f"- Sources of the events: {', '.join(f'{name} ({count})' for name, count in sorted(sources.items()))}",
        f"- Licence: `{licence}`." + (_NO_LICENCE if licence == "unknown" else ""),
        "- "
        + ("Outcomes are in `events` alone" if "outcome" in _names(configurations) else "Outcomes were left out")
        + "; a row of `forecasts` never holds the answer."
        + (" Market beliefs are in `beliefs`." if "beliefs" in configurations else " Market beliefs were left out."),
        "- Rows whose `split` is `eval` are held out: do not train on them.",
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'forecasts = load_dataset("THIS_FOLDER", "forecasts", split="train", streaming=True)',
        "```",
        "",
        "## Forecasts by model, mode and failure",
        "",
        "| model | mode | failure | forecasts |",
        "| --- | --- | --- | ---: |",
        *(
            f"| {model} | {mode} | {failure or 'none'} | {count} |"
            for (model, mode, failure), count in sorted(counts.items())
        ),
        "",
    ]
    for name, columns in configurations.items():
        lines += [f"## Columns of `{name}`", "", "| column | type | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{column}` | `{kind}` | {meaning} |" for column, kind, meaning in columns]
        lines.append("")
    lines += ["## Transcripts", "", *(f"- `{name}`: {meaning}." for name, meaning in TRANSCRIPTS.items()), ""]
    return "\n".join(lines)


_NO_LICENCE = (
    " None was stated at the export (`--licence`). The chats quote news articles and questions, which keep the licences of "
    "their sources: check these before you publish."
)


def _names(configurations: Mapping[str, tuple[Column, ...]]) -> set[str]:
    return {column for columns in configurations.values() for column, _, _ in columns}
