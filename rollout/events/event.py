"""Event and what an agent may see of it.

Rollout code hands agents an `EventPrompt`, which has no outcome, no market belief and no actual close: what a type does
not hold cannot reach a prompt.
"""

import datetime as dt
import unicodedata
from typing import Literal, Self

from pydantic import AwareDatetime, model_validator

from cluster.record import Record

Selection = Literal["single", "multi"]
Split = Literal["train", "eval"]
Belief = dict[str, float]
"""Probability by option; options without a price are absent."""


def normalized_label(label: str) -> str:
    """A label after Unicode (NFKC), case, white-space, quote and dash normalization: equal results mean the same option to a reader."""
    folded = unicodedata.normalize("NFKC", label).translate(_TYPOGRAPHY).casefold()
    return " ".join(folded.split())


_TYPOGRAPHY = str.maketrans(
    dict.fromkeys("‘’‚‛′ʼ`´", "'") | dict.fromkeys("“”„‟″«»", '"') | dict.fromkeys("‐‑‒–—―−", "-")
)


class EventPrompt(Record):
    """What an agent is told about an event."""

    id: str
    question: str
    criteria: str
    background: str
    options: tuple[str, ...]
    selection: Selection
    deadline: AwareDatetime | None
    """Scheduled end, where the source has one; never the actual settlement."""


class Event(Record):
    """A resolved question. `outcome`, `closed` and `beliefs` never leave the environment."""

    id: str
    source: str
    url: str = ""
    question: str
    criteria: str = ""
    background: str = ""
    options: tuple[str, ...]
    selection: Selection = "single"
    opened: AwareDatetime
    deadline: AwareDatetime | None = None
    closed: AwareDatetime
    """Actual settlement."""
    outcome: tuple[str, ...]
    """The realized option; one for `single`, one or more for `multi`."""
    beliefs: dict[dt.date, Belief] = {}
    """Market belief by UTC day."""
    split: Split | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.options) < 2:
            raise ValueError(f"event {self.id}: {len(self.options)} option(s), at least two are needed")
        if len({normalized_label(o) for o in self.options}) < len(self.options):
            raise ValueError(f"event {self.id}: options are equal after normalization: {list(self.options)}")
        if self.closed < self.opened:
            raise ValueError(f"event {self.id}: closes {self.closed} before it opens {self.opened}")
        if not self.outcome or any(o not in self.options for o in self.outcome):
            raise ValueError(
                f"event {self.id}: outcome {list(self.outcome)} is not among the options {list(self.options)}"
            )
        if self.selection == "single" and len(self.outcome) != 1:
            raise ValueError(f"event {self.id}: a single-answer event with {len(self.outcome)} outcomes")
        for day, belief in self.beliefs.items():
            for option, p in belief.items():
                if option not in self.options or not 0.0 <= p <= 1.0:
                    raise ValueError(f"event {self.id}: belief of {day} gives {option!r} the value {p}")
        return self

    def prompt(self) -> EventPrompt:
        """The part an agent may see."""
        return EventPrompt(
            id=self.id,
            question=self.question,
            criteria=self.criteria,
            background=self.background,
            options=self.options,
            selection=self.selection,
            deadline=self.deadline,
        )
