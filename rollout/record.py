"""The key, the usage and the record of one forecast: what the ledger holds once for every scheduled forecast."""

import datetime as dt
from typing import Literal

from cluster.failures import Failure
from cluster.record import Record
from rollout.notebook import NotebookState
from rollout.report import Report
from rollout.trajectory import Transcript

Mode = Literal["no-tools", "memory-free", "memory-on"]
MODES: tuple[Mode, ...] = ("no-tools", "memory-free", "memory-on")


class ForecastKey(Record):
    """The primary key everywhere."""

    model: str
    event: str
    date: dt.date
    """Forecast date, a UTC day."""
    mode: Mode
    rollout: int
    """Index of the independent repetition, from 0."""

    @property
    def session(self) -> str:
        """A chain of one event and rollout is one session, so that its steps share an engine's prefix cache."""
        return f"{self.event}/{self.mode}/{self.rollout}" + ("" if self.mode == "memory-on" else f"/{self.date}")


class Usage(Record):
    """What one forecast cost."""

    model_calls: int = 0
    tool_calls: dict[str, int] = {}
    """Calls by tool name, errors included; unknown tools under `other`."""
    tool_errors: dict[str, int] = {}
    """Failed calls by error name."""
    malformed_calls: dict[str, int] = {}
    """Calls that could not be read, by MalformedKind; `bad-json` also counts those whose arguments are not JSON."""
    cut_characters: dict[str, int] = {}
    """Characters that were cut from what tools returned, by tool name."""
    input_tokens: int = 0
    """Sum over model calls of the context length."""
    cached_tokens: int = 0
    output_tokens: int = 0
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    seconds: float = 0.0
    """Wall-clock seconds of the whole step."""
    price: float = 0.0
    """US dollars asked by an endpoint; 0 for our own engines."""


class CarriedNotebook(Record):
    """Whose notebook a memory-on step began with."""

    written: dt.date | None
    """Forecast date of the step that wrote it; None if there was none to begin with."""
    missed: tuple[dt.date, ...] = ()
    """Forecast dates between, whose steps left no valid notebook: failed, or without one. The prompt says so."""

    @classmethod
    def of(cls, carried: NotebookState | None) -> "CarriedNotebook | None":
        """None for the first step of an episode and for other modes."""
        return None if carried is None else cls(written=carried.written, missed=carried.missed)


class ForecastRecord(Record):
    """One finished forecast, report or failure; the trajectory is stored beside it."""

    key: ForecastKey
    options: tuple[str, ...]
    report: Report | None
    """None only for a failure that produced no text to parse (infrastructure, data, bug)."""
    notebook: NotebookState | None = None
    """memory-on only: the notebook carried to the next date."""
    carried: CarriedNotebook | None = None
    """memory-on only: where the notebook came from that this step was shown."""
    failure: Failure | None = None
    usage: Usage = Usage()
    attempts: int = 1
    prompt: str
    """Hash of the prompt templates."""
    weights: str = ""
    transcript: Transcript = "messages"
    """`rendered`: its turns are not to be trained on token by token."""
