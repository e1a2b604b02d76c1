"""The belief notebook: the only thing carried from one step to the next in memory-on. (Parsing follows.)"""

import datetime as dt
from typing import Literal

from cluster.record import Record


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
