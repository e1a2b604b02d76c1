"""The belief notebook: the only thing carried from one step to the next in memory-on.

A step cannot wipe the memory: a missing or invalid notebook keeps the last valid one and is marked. What the model
wrote is kept as written; earlier claims that it dropped are counted, not put back, because its later reports follow
from what it carries.
"""

import datetime as dt
import re
from collections.abc import Callable
from typing import Any, Literal

from pydantic import ValidationError

from cluster.record import Record
from rollout.events.event import EventPrompt, normalized_label
from rollout.report import plain_text, strict_json

_TAG = re.compile(r"<(/?)belief_notebook>")
_WHY_CHARACTERS = 500


class Assessment(Record):
    """The notebook's current view."""

    p: dict[str, float]
    open_questions: tuple[str, ...] = ()


class LedgerEntry(Record):
    """One established fact of the evidence ledger."""

    claim: str
    supports: tuple[str, ...] = ()
    rules_out: tuple[str, ...] = ()
    date_observed: dt.date | None = None
    """The day the evidence itself carries; None where it was not a valid day."""
    status: Literal["active", "superseded"] = "active"
    note: str = ""


class Notebook(Record):
    """Assessment and append-only evidence ledger (Forecast-Dojo Figure 6)."""

    assessment: Assessment
    evidence_ledger: tuple[LedgerEntry, ...] = ()


class NotebookState(Record):
    """What a step leaves for the next one."""

    notebook: Notebook | None
    """The last valid notebook; None when there has not been one."""
    status: Literal["valid", "missing", "invalid"]
    """What this step's own output held; `missing` and `invalid` carry the earlier notebook on."""
    why: str = ""
    dropped_entries: int = 0
    """Earlier claims that this notebook silently dropped (the ledger is append-only)."""
    written: dt.date | None = None
    """Forecast date of the step that wrote the notebook; None when there has not been one."""
    missed: tuple[dt.date, ...] = ()
    """Forecast dates since then whose steps left no valid notebook: failed, or without one."""


def not_updated(
    previous: NotebookState | None, date: dt.date, why: str, status: Literal["missing", "invalid"] = "missing"
) -> NotebookState:
    """The state after a step of that date that left no valid notebook: the earlier one is carried on, and that is said."""
    if previous is None:
        return NotebookState(notebook=None, status=status, why=why, missed=(date,))
    missed = (*previous.missed, date)
    return NotebookState(notebook=previous.notebook, status=status, why=why, written=previous.written, missed=missed)


def parse_notebook(
    text: str,
    previous: NotebookState | None,
    event: EventPrompt,
    date: dt.date,
    limit: int | None = None,
    tokens: Callable[[str], int] = len,
) -> NotebookState:
    """The state after a step of that date whose final text is `text`: the last complete `<belief_notebook>{json}</belief_notebook>`.

    `limit` bounds the notebook as `render_notebook` writes it, in what `tokens` counts: it is repeated in every later
    prompt. An invalid date of an entry becomes None, absent
    `supports` and `rules_out` are empty, unknown fields are left out; anything else that does not fit, or a `p` that
    names no option, makes the notebook invalid. Never raises.
    """
    body = _last_notebook(text)
    if body is None:
        return not_updated(previous, date, "no complete <belief_notebook>...</belief_notebook>")
    try:
        notebook = _notebook(strict_json(body), event)
        if limit is not None and (length := tokens(render_notebook(notebook))) > limit:
            raise ValueError(f"{length} tokens, at most {limit} are carried")
    except RecursionError:
        return not_updated(previous, date, "nested too deeply", "invalid")
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        return not_updated(previous, date, plain_text(why[:_WHY_CHARACTERS]), "invalid")
    except ValueError as error:
        return not_updated(previous, date, plain_text(str(error)[:_WHY_CHARACTERS]), "invalid")
    dropped = _dropped(previous.notebook if previous is not None else None, notebook)
    return NotebookState(notebook=notebook, status="valid", dropped_entries=dropped, written=date)


def render_notebook(notebook: Notebook) -> str:
    """Compact JSON that parses back to an equal notebook. `<` is escaped, so that no claim can close the tag around it."""
    return notebook.model_dump_json().replace("<", "\\u003c")


def _last_notebook(text: str) -> str | None:
    last, opened = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened is not None:
            last, opened = text[opened : tag.start()], None
    return last


def _notebook(value: Any, event: EventPrompt) -> Notebook:
    """A notebook from parsed JSON. Raises ValueError (or pydantic's ValidationError, which is one)."""
    if not isinstance(value, dict) or not isinstance(value.get("assessment"), dict):
        raise ValueError("no object with an `assessment` object")
    assessment = value["assessment"]
    p = assessment.get("p")
    if not isinstance(p, dict) or not all(isinstance(v, float) and 0 <= v <= 1 for v in p.values()):
        raise ValueError("`assessment.p` must map option labels to numbers from 0 to 1")
    if not any(option in p for option in event.options):
        raise ValueError("`assessment.p` names no option of the question")
    entries = value.get("evidence_ledger", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("`evidence_ledger` must be a list of objects")
    return Notebook.model_validate(
        {
            "assessment": {"p": _storable(p), "open_questions": _storable(_given(assessment, "open_questions", []))},
            "evidence_ledger": [
                {
                    "claim": _storable(entry.get("claim")),
                    "supports": _storable(_given(entry, "supports", [])),
                    "rules_out": _storable(_given(entry, "rules_out", [])),
                    "date_observed": _day(entry.get("date_observed")),
                    "status": _given(entry, "status", "active"),
                    "note": _storable(_given(entry, "note", "")),
                }
                for entry in entries
            ],
        }
    )


def _given(fields: dict[str, Any], name: str, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else value


def _storable(value: Any) -> Any:
    """The value with lone surrogates replaced in its texts."""
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, list):
        return [_storable(each) for each in value]
    if isinstance(value, dict):
        return {plain_text(key): _storable(each) for key, each in value.items()}
    return value


def _day(value: Any) -> dt.date | None:
    if not isinstance(value, str):
        return None
    try:
        return dt.date.fromisoformat(value)
    except ValueError:
        return None


def _dropped(earlier: Notebook | None, later: Notebook) -> int:
    """How many earlier claims the later ledger no longer holds, by meaning."""
    if earlier is None:
        return 0
    kept = {normalized_label(entry.claim) for entry in later.evidence_ledger}
    return sum(normalized_label(entry.claim) not in kept for entry in earlier.evidence_ledger)
