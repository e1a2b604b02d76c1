"""Trajectories → token-exact training rows, with every trajectory that gives no row counted by reason.

A row holds the ids of one whole trajectory; its labels are the ids that an assistant sampled, stop tokens included,
and IGNORED elsewhere. A trajectory of the trainee's own tokens is concatenated as it is; any other is rendered with
the trainee's chat format, each turn once, in the order in which the coordinator would have rendered it. A row is whole
or it is not there: nothing is ever cut. What is chosen depends on reports and outcomes, never on text a tool returned.
"""

import datetime as dt
import json
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, Self

from pydantic import model_validator

from cluster.config import TrainingSettings
from cluster.record import Record
from eval.scoring import brier, is_usable
from rollout.chat import ChatFormat
from rollout.events.event import Event
from rollout.ledger import Ledger
from rollout.record import ForecastKey, ForecastRecord
from rollout.tools import TOOLS
from rollout.trajectory import Trajectory, Turn

IGNORED = -100
"""The label of a token that is outside the loss (PyTorch's `ignore_index`)."""

Refusal = Literal[
    "mode",
    "failed",
    "unusable",
    "eval-split",
    "no-split",
    "unknown-event",
    "no-single-outcome",
    "brier",
    "rendered-transcript",
    "no-trajectory",
    "not-renderable",
    "no-stop-token",
    "nothing-to-learn",
    "too-long",
    "limit",
]
"""Why a finished forecast gives no row.

`eval-split`: the event is held out. `no-split`: it belongs to no split. `not-renderable`: another tokenizer made it and
the turn was cut, or holds a call that is not valid JSON, so its messages do not say what was sampled. `no-stop-token`:
a turn ended by itself but its ids do not. `rendered-transcript`: its
chat was rendered anew each turn, so its turns are no one sequence of tokens. `limit`: enough rows were found.
"""

_logger = logging.getLogger(__name__)


class Refused(Exception):
    """A trajectory that gives no row."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason)
        self.reason: Refusal = reason


class TrainingRow(Record):
    """One trajectory as a trainer reads it."""

    key: ForecastKey
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    """Aligned with `input_ids` and not shifted: the id itself where it is learned, IGNORED elsewhere."""

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if len(self.labels) != len(self.input_ids):
            raise ValueError(f"{len(self.input_ids)} ids but {len(self.labels)} labels")
        if any(label not in (IGNORED, i) for i, label in zip(self.input_ids, self.labels, strict=True)):
            raise ValueError("a label is neither its own id nor ignored")
        if not self.learned:
            raise ValueError("no token is learned from this row")
        return self

    @property
    def learned(self) -> int:
        """Tokens inside the loss; the first id has no context and never counts."""
        return sum(label != IGNORED for label in self.labels[1:])


class RowSummary(Record):
    """What became of a run's finished forecasts."""

    forecasts: int
    """Finished forecasts that were looked at."""
    rows: int
    own_tokens: int
    """Rows of ids that the trainee's tokenizer and format made."""
    rendered: int
    """Rows rendered anew from messages."""
    without_reasoning: int
    """Rendered rows from which hidden reasoning was left out."""
    events: int
    """Distinct events among the rows."""
    tokens: int
    learned_tokens: int
    refused: dict[Refusal, int]
    """Forecasts without a row, by reason; with `rows` they sum to `forecasts`."""

    def __str__(self) -> str:
        refused = ", ".join(f"{n} {reason}" for reason, n in self.refused.items()) or "none"
        return (
            f"{self.rows} rows ({self.own_tokens} own tokens, {self.rendered} rendered) of {self.events} events from "
            f"{self.forecasts} forecasts; {self.tokens} tokens, {self.learned_tokens} learned; refused: {refused}"
        )


def training_rows(
    ledger: Ledger,
    events: Mapping[str, Event],
    chat: ChatFormat,
    settings: TrainingSettings,
) -> tuple[list[TrainingRow], RowSummary]:
    """The rows of a run in scheduled order, and what became of the rest.

    With `settings.limit`, forecasts are taken event by event in turn, in an order that only `settings.seed` decides.
    """
    refused: Counter[Refusal] = Counter()
    eligible: list[ForecastKey] = []
    forecasts = 0
    for record in ledger.records():
        forecasts += 1
        reason = refusal(record, events.get(record.key.event), settings)
        if reason is None:
            eligible.append(record.key)
        else:
            refused[reason] += 1
    if refused["eval-split"]:
        _logger.warning(
            "%s: %d forecasts of held-out events were refused as training rows; use a run of the train split",
            ledger.path,
            refused["eval-split"],
        )

    rows: dict[ForecastKey, TrainingRow] = {}
    own = reasoned = 0
    for key in spread(eligible, settings.seed) if settings.limit is not None else eligible:
        if settings.limit is not None and len(rows) == settings.limit:
            refused["limit"] += 1
            continue
        trajectory = ledger.trajectory(key)
        try:
            if trajectory is None or not trajectory.turns:
                raise Refused("no-trajectory")
            rows[key] = row(key, trajectory, chat, settings.max_length)
        except Refused as refusal_:
            refused[refusal_.reason] += 1
            continue
        if is_own(trajectory, chat):
            own += 1
        else:
            reasoned += any(turn.reasoning for turn in trajectory.turns)

    ordered = [rows[key] for key in eligible if key in rows]
    summary = RowSummary(
        forecasts=forecasts,
        rows=len(ordered),
        own_tokens=own,
        rendered=len(ordered) - own,
        without_reasoning=reasoned,
        events=len({r.key.event for r in ordered}),
        tokens=sum(len(r.input_ids) for r in ordered),
        learned_tokens=sum(r.learned for r in ordered),
        refused={reason: n for reason, n in sorted(refused.items()) if n},
    )
    return ordered, summary


def refusal(record: ForecastRecord, event: Event | None, settings: TrainingSettings) -> Refusal | None:
    """Why this record may not be learned from; None if it may. Reads the report and the outcome, no trajectory."""
    if record.key.mode not in settings.modes:
        return "mode"
    if event is None:
        return "unknown-event"
    if event.split != "train":
        return "eval-split" if event.split == "eval" else "no-split"
    if record.failure is not None:
        return "failed"
    if record.transcript == "rendered":
        return "rendered-transcript"
    if record.report is None or not is_usable(record, event.selection):
        return "unusable"
    if settings.maximum_brier is not None:
        if len(event.outcome) != 1 or not record.report.probabilities:
            return "no-single-outcome"
        if brier(record.report.probabilities, event.outcome[0]) > settings.maximum_brier:
            return "brier"
    return None


def spread(keys: Iterable[ForecastKey], seed: int) -> list[ForecastKey]:
    """The keys, one of each event, then a second of each, and so on; events and their keys in an order drawn by `seed`."""
    by_event: defaultdict[str, list[ForecastKey]] = defaultdict(list)
    for key in keys:
        by_event[key.event].append(key)
    draw = random.Random(seed)
    columns = [by_event[event] for event in sorted(by_event)]
    draw.shuffle(columns)
    for column in columns:
        draw.shuffle(column)
    return [key for rank in zip_longest(*columns) for key in rank if key is not None]


def is_own(trajectory: Trajectory, chat: ChatFormat) -> bool:
    """Whether the trajectory's ids mean to the trainee what they meant to the model that sampled them."""
    return bool(trajectory.tokenizer) and trajectory.tokenizer == chat.fingerprint


def row(key: ForecastKey, trajectory: Trajectory, chat: ChatFormat, max_length: int) -> TrainingRow:
    """The row of a trajectory. Raises Refused where it has none of at most `max_length` ids."""
    own = is_own(trajectory, chat)
    ids, mask = own_tokens(trajectory, chat) if own else rendered(trajectory, chat, key.date)
    if len(ids) > max_length:
        raise Refused("too-long")
    if not any(mask[1:]):
        raise Refused("nothing-to-learn")
    labels = [i if m else IGNORED for i, m in zip(ids, mask, strict=True)]
    return TrainingRow(key=key, input_ids=tuple(ids), labels=tuple(labels))


def own_tokens(trajectory: Trajectory, chat: ChatFormat) -> tuple[list[int], list[int]]:
    """(ids, mask) exactly as the engine saw and sampled them. Raises Refused."""
    for turn in trajectory.turns:
        if turn.finish == "stop" and turn.sampled_ids and turn.sampled_ids[-1] not in chat.stop_ids:
            raise Refused("no-stop-token")
    return trajectory.token_ids(), trajectory.mask()


def rendered(trajectory: Trajectory, chat: ChatFormat, today: dt.date) -> tuple[list[int], list[int]]:
    """(ids, mask) as the trainee would have read and written the same messages on the forecast date `today`.

    Raises Refused.
    """
    ids: list[int] = []
    mask: list[int] = []
    for turn in trajectory.turns:
        if not _is_renderable(turn):
            raise Refused("not-renderable")
        offered = [TOOLS[name] for name in turn.tools]
        given = chat.extend(turn.messages, ids[-1], today) if ids else chat.open(turn.messages, offered, today)
        try:
            said = chat.assistant(turn.assistant(), today)
        except RecursionError:
            # Arguments can be nested just shallowly enough to be read.
            raise Refused("not-renderable") from None
        ids += [*given, *said]
        mask += [0] * len(given) + [1] * len(said)
    return ids, mask


def _is_renderable(turn: Turn) -> bool:
    return turn.finish == "stop" and not turn.malformed_calls and _are_objects(c.arguments for c in turn.tool_calls)


def _are_objects(texts: Iterable[str]) -> bool:
    try:
        return all(isinstance(json.loads(text), dict) for text in texts)
    except (ValueError, RecursionError):
        return False


def columns(rows: Sequence[TrainingRow]) -> dict[str, list[list[int]]]:
    """The two columns a trainer reads."""
    return {"input_ids": [list(r.input_ids) for r in rows], "labels": [list(r.labels) for r in rows]}
