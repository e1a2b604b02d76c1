"""Letter-set scores of multi-answer events, each named after its contract; an unusable answer scores zero.

`exact` is strict equality, `recall_or_zero` the OracleProto paper's partial credit (equation 18), `f1_points` the
OracleProto README's credit of at most three points.
"""

from collections.abc import Set

from cluster.record import Record
from eval.scoring import counts_against_model, is_usable
from rollout.events.event import Event
from rollout.record import ForecastKey, ForecastRecord

FULL_POINTS = 3.0
"""What an exact multi-answer response earns in the README's contract."""


class SetScores(Record):
    """The scores of one answer set against the realized set."""

    exact: float
    recall_or_zero: float
    """|A ∩ G| / |G|, but 0 with any false positive; in [0, 1]."""
    f1_points: float
    """3 · 2TP / (2TP + FP + FN), in [0, 3]."""


class ScoredAnswer(Record):
    """One recorded forecast of a multi-answer event with its scores."""

    key: ForecastKey
    outcome: tuple[str, ...]
    answers: tuple[str, ...]
    """Empty when unusable."""
    usable: bool
    scores: SetScores


def set_scores(answers: Set[str], outcome: Set[str]) -> SetScores:
    """All three scores. `outcome` is not empty."""
    hits = len(answers & outcome)
    wrong, missed = len(answers - outcome), len(outcome - answers)
    return SetScores(
        exact=float(answers == outcome),
        recall_or_zero=0.0 if wrong else hits / len(outcome),
        f1_points=FULL_POINTS * 2 * hits / (2 * hits + wrong + missed),
    )


def score_answer(record: ForecastRecord, event: Event) -> ScoredAnswer | None:
    """Score one record of a multi-answer event; None where the forecast was lost to the run, not to the model."""
    reported = record.report.answers if record.report is not None else ()
    usable = is_usable(record, "multi")
    if not usable and not counts_against_model(record):
        return None
    answers = reported if usable else ()
    return ScoredAnswer(
        key=record.key,
        outcome=event.outcome,
        answers=answers,
        usable=usable,
        scores=set_scores(frozenset(answers), frozenset(event.outcome)),
    )
