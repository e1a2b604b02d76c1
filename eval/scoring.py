"""Proper scores of one forecast (Forecast-Dojo B.3 and B.4), as pure functions of a report and an outcome.

Every score is computed from parsed probabilities alone. A forecast that the model failed to make is scored as the
uniform distribution over the offered options and stays marked as failed. A forecast that infrastructure, data or a bug
took away is not scored at all: it says nothing about the model, so it is counted and left out of the means.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Self

from cluster.failures import DataError
from cluster.record import Record
from rollout.events.event import Belief, Event, Selection, normalized_label
from rollout.record import ForecastKey, ForecastRecord

PROBABILITY_FLOOR = 1e-3
"""ε of log loss and Information-α (B.3)."""


class ProbabilityScores(Record):
    """The scores of one distribution against one realized option."""

    brier: float
    """Multiclass, in [0, 2], lower is better."""
    accuracy: float
    """In [0, 1]; ties at the top share the credit."""
    log_loss: float
    """Nats, lower is better, at most -ln ε."""

    @classmethod
    def of(cls, probabilities: Mapping[str, float], outcome: str) -> Self:
        """All three scores."""
        return cls(
            brier=brier(probabilities, outcome),
            accuracy=accuracy(probabilities, outcome),
            log_loss=log_loss(probabilities, outcome),
        )


class ScoredForecast(Record):
    """One recorded forecast of a single-answer event with its scores."""

    key: ForecastKey
    options: tuple[str, ...]
    """The offered options."""
    outcome: str
    probabilities: dict[str, float]
    """What was scored: the report, or the uniform fallback."""
    usable: bool
    """False: the model failed and the fallback was scored."""
    scores: ProbabilityScores
    binary_brier: float | None
    """(p(yes) - 1{yes})² in [0, 1]; two-option events only."""
    alpha: float | None
    """Information-α in nats, positive where the forecast beats the market; None without a market probability."""
    market: Belief | None
    """The whole market distribution of the forecast date; None unless every option has a price."""
    market_probability: float | None
    """The market's probability of the outcome; None without one."""
    floor: Belief | None
    """The best possible public forecast; synthetic worlds only."""


def brier(probabilities: Mapping[str, float], outcome: str) -> float:
    """Σ (p_c - 1{c = outcome})² over the union of reported labels and the outcome, labels matched exactly (B.3)."""
    return math.fsum((probabilities.get(c, 0.0) - (c == outcome)) ** 2 for c in probabilities.keys() | {outcome})


def accuracy(probabilities: Mapping[str, float], outcome: str) -> float:
    """1/|T| if the outcome is among the labels T of maximal probability, else 0 (B.3)."""
    highest = max(probabilities.values())
    top = [label for label, p in probabilities.items() if p == highest]
    return 1.0 / len(top) if outcome in top else 0.0


def log_loss(probabilities: Mapping[str, float], outcome: str) -> float:
    """-ln max(p(outcome), ε)."""
    return -math.log(max(probabilities.get(outcome, 0.0), PROBABILITY_FLOOR))


def information_alpha(probability: float, market_probability: float) -> float:
    """ln max(p, ε) - ln max(market, ε), both probabilities of the outcome (B.3)."""
    return math.log(max(probability, PROBABILITY_FLOOR)) - math.log(max(market_probability, PROBABILITY_FLOOR))


def binary_brier(probabilities: Mapping[str, float], options: Sequence[str], outcome: str) -> float | None:
    """(p(yes) - 1{outcome is yes})² in [0, 1] for two options, else None.

    `yes` is the option a reader would call so, else the first. Half of the [0, 2] score whenever no mass lies on labels
    that were not offered.
    """
    if len(options) != 2:
        return None
    yes = next((o for o in options if normalized_label(o) == "yes"), options[0])
    return (probabilities.get(yes, 0.0) - (outcome == yes)) ** 2


def uniform(options: Sequence[str]) -> dict[str, float]:
    """1/K on each of K options."""
    return dict.fromkeys(options, 1.0 / len(options))


def market_distribution(options: Sequence[str], belief: Belief | None) -> Belief | None:
    """The belief over all options, normalized; None unless every option has a price and their sum is positive.

    Of two options one price is enough: the other is its complement.
    """
    if not belief:
        return None
    prices = dict(belief)
    if len(options) == 2 and len(prices) == 1:
        (priced, price) = next(iter(prices.items()))
        other = options[1] if priced == options[0] else options[0]
        prices[other] = 1.0 - price
    total = math.fsum(prices.values())
    if any(o not in prices for o in options) or total <= 0.0:
        return None
    return {o: prices[o] / total for o in options}


def is_usable(record: ForecastRecord, selection: Selection) -> bool:
    """Whether a report was accepted by the run's own policy and holds what the event asks for.

    That is positive probability mass for a single answer, an answer set for several.
    """
    report = record.report
    if record.failure is not None or report is None or report.verdict == "unusable":
        return False
    return bool(report.answers) if selection == "multi" else math.fsum(report.probabilities.values()) > 0.0


def counts_against_model(record: ForecastRecord) -> bool:
    """Whether an unusable record is the model's doing and scored by the fallback, rather than lost to the run."""
    return record.failure is None or record.failure.kind == "model"


def score_forecast(record: ForecastRecord, event: Event, floor: Belief | None) -> ScoredForecast | None:
    """Score one record of a single-answer event; None where the forecast was lost to the run, not to the model.

    Raises DataError if the record's options are not the event's.
    """
    if record.options != event.options:
        raise DataError(
            f"forecast {record.key}: its options {list(record.options)} are not those of the run's event "
            f"{list(event.options)}; events.jsonl does not belong to this ledger"
        )
    reported = record.report.probabilities if record.report is not None else {}
    usable = is_usable(record, "single")
    if not usable and not counts_against_model(record):
        return None
    probabilities = dict(reported) if usable else uniform(event.options)
    (outcome,) = event.outcome
    belief = event.beliefs.get(record.key.date)
    market = market_distribution(event.options, belief)
    priced = market or belief or {}
    market_probability = priced.get(outcome)
    return ScoredForecast(
        key=record.key,
        options=event.options,
        outcome=outcome,
        probabilities=probabilities,
        usable=usable,
        scores=ProbabilityScores.of(probabilities, outcome),
        binary_brier=binary_brier(probabilities, event.options, outcome),
        alpha=None
        if market_probability is None
        else information_alpha(probabilities.get(outcome, 0.0), market_probability),
        market=market,
        market_probability=market_probability,
        floor=floor,
    )
