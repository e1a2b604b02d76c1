"""Events from a file: our own records, or foreign rows through a field mapping.

Every row becomes one event or one quarantined row with a reason. A url counts once: the first of its rows that makes a
valid event is kept and later ones are duplicates; a row without an outcome, or otherwise bad, claims no url.
"""

import datetime as dt
from pathlib import Path
from typing import Any

from cluster.config import EventsSettings
from retrieval.corpus.rows import BadRow, Loaded, Values, identity, load_rows, mapped_values, text_value
from retrieval.corpus.times import TimeReader
from rollout.events.event import Event, normalized_label
from rollout.events.stated_outcome import stated_outcome


def load_events(settings: EventsSettings, quarantine_dir: Path | None = None) -> Loaded[Event]:
    """The events of the configured file; bad rows go to `quarantine_dir/events.jsonl`.

    Reasons: not-json, not-utf8, not-an-object, missing-field, unknown-field, invalid-field, no-outcome, unknown-outcome,
    unparsable-time, fewer-than-two-options, options-equal, closes-before-opens, duplicate-id, duplicate-url,
    text-states-outcome.
    Raises DataError if the file cannot be read.
    """
    times = TimeReader(settings.time_zone)
    rows_by_id: dict[str, int] = {}
    rows_by_url: dict[str, int] = {}

    def build(row: Values, number: int) -> Event:
        values = dict(row) if settings.format == "pastcast" else mapped_values(row, settings)
        values["id"] = identity(values)
        for field in ("source", "url", "criteria", "background"):
            values[field] = text_value(values, field)
        values["options"] = _options(values)
        values["outcome"] = _outcome(values, settings.outcomes)
        for field in ("opened", "deadline", "closed"):
            values[field] = _time(values, field, times)
        if values["closed"] < values["opened"]:
            raise BadRow("closes-before-opens", f"opened {values['opened']}, closed {values['closed']}")
        if (earlier := rows_by_id.get(values["id"])) is not None:
            raise BadRow("duplicate-id", f"id {values['id']} was loaded from row {earlier}")
        if values["url"] and (earlier := rows_by_url.get(values["url"])) is not None:
            raise BadRow("duplicate-url", f"{values['url']} was loaded from row {earlier}")
        event = Event.model_validate(values)
        if (sentence := stated_outcome((event.question, event.criteria, event.background), event.options)) is not None:
            raise BadRow("text-states-outcome", f"{sentence!r} gives the outcome away")
        rows_by_id[event.id] = number
        rows_by_url[event.url] = number
        return event

    records, counts = load_rows(settings.path, settings.format, build, quarantine_dir, "events")
    return Loaded[Event](records=records, quarantined=counts, naive_times=times.naive_times)


def _options(values: Values) -> tuple[str, ...]:
    options = values.get("options")
    if options is None:
        raise BadRow("missing-field", "options; map them or give them as a constant")
    if not isinstance(options, list | tuple) or not all(isinstance(o, str) and o.strip() for o in options):
        raise BadRow("invalid-field", f"options must be a list of texts, not {options!r}")
    if len(options) < 2:
        raise BadRow("fewer-than-two-options", f"options are {list(options)}")
    if len({normalized_label(o) for o in options}) < len(options):
        raise BadRow("options-equal", f"equal after normalization: {list(options)}")
    return tuple(options)


def _outcome(values: Values, outcomes: dict[str, str]) -> tuple[str, ...]:
    raw = values.get("outcome")
    found = list(raw) if isinstance(raw, list | tuple) else [raw]
    if raw in (None, "") or not found:
        raise BadRow("no-outcome", "the row carries no outcome")
    named: list[str] = []
    for one in found:
        text = _as_text(one)
        option = outcomes.get(text) if outcomes else text
        if option is None or option not in values["options"]:
            raise BadRow("unknown-outcome", f"outcome {text!r} names none of {list(values['options'])}")
        named.append(option)
    return tuple(named)


def _as_text(outcome: Any) -> str:
    return str(outcome).lower() if isinstance(outcome, bool) else str(outcome)


def _time(values: Values, field: str, times: TimeReader) -> dt.datetime | None:
    raw = values.get(field)
    if raw in (None, ""):
        if field == "deadline":
            return None
        raise BadRow("missing-field", field)
    try:
        return times.read(raw)
    except ValueError as error:
        raise BadRow("unparsable-time", f"{field}: {error}") from error
