"""The report of a forecast step: parsed probabilities or answer set, and how they were obtained. (Parsing follows.)"""

from typing import Literal

from cluster.record import Record

Verdict = Literal["ok", "repaired", "unusable"]
ParsePolicy = Literal["strict", "lenient"]


class Report(Record):
    """What a step reported."""

    probabilities: dict[str, float] = {}
    """By reported label, not negative, summing to one; empty when unusable or for a discrete answer."""
    answers: tuple[str, ...] = ()
    """The discrete answer set, where the event asks for one."""
    remainder: str = ""
    """What stood in the answer and was not understood."""
    verdict: Verdict
    """`ok`: taken as written. `repaired`: clipped, normalized or matched leniently. `unusable`: scored by the fallback."""
    why: str = ""
    usable_strict: bool
    """Whether the strict policy accepts this output."""
    usable_lenient: bool
    """Whether the lenient policy accepts this output."""
