"""Scores by B.3 and B.4 against values worked by hand, and against the fixed ForecastBench figure."""

import datetime as dt
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.failures import DataError, Failure
from eval.discrete import score_answer, set_scores
from eval.scoring import (
    accuracy,
    binary_brier,
    brier,
    information_alpha,
    log_loss,
    market_distribution,
    score_forecast,
    uniform,
)
from rollout.events.event import Event
from rollout.record import ForecastKey, ForecastRecord
from rollout.report import Report

DAY = dt.date(2025, 3, 3)
OPTIONS = ("a", "b", "c")


def event(
    beliefs: dict[str, float] | None = None, options: tuple[str, ...] = OPTIONS, outcome: tuple[str, ...] = ("a",)
) -> Event:
    return Event(
        id="e",
        source="test",
        question="?",
        options=options,
        selection="single" if len(outcome) == 1 else "multi",
        opened=dt.datetime(2025, 3, 1, tzinfo=dt.UTC),
        closed=dt.datetime(2025, 4, 1, tzinfo=dt.UTC),
        outcome=outcome,
        beliefs={DAY: beliefs} if beliefs else {},
    )


def record(report: Report | None, failure: Failure | None = None, options: tuple[str, ...] = OPTIONS) -> ForecastRecord:
    key = ForecastKey(model="m", event="e", date=DAY, mode="memory-free", rollout=0)
    return ForecastRecord(key=key, options=options, report=report, failure=failure, prompt="p")


def usable(probabilities: dict[str, float]) -> Report:
    return Report(probabilities=probabilities, verdict="ok", usable_strict=True, usable_lenient=True)


UNUSABLE = Report(verdict="unusable", why="no tag", usable_strict=False, usable_lenient=False)


def test_brier_of_three_options_by_hand() -> None:
    assert brier({"a": 0.5, "b": 0.3, "c": 0.2}, "a") == pytest.approx(0.25 + 0.09 + 0.04)


def test_an_unreported_outcome_counts_as_zero_probability() -> None:
    assert brier({"b": 1.0}, "a") == pytest.approx(2.0)


def test_an_unsupported_label_keeps_its_mass() -> None:
    assert brier({"a": 0.6, "nobody": 0.4}, "a") == pytest.approx(0.16 + 0.16)


def test_labels_are_matched_exactly() -> None:
    assert brier({"A": 1.0}, "a") == pytest.approx(2.0)


def test_ties_share_the_credit() -> None:
    assert accuracy({"a": 0.4, "b": 0.4, "c": 0.2}, "b") == 0.5
    assert accuracy({"a": 0.4, "b": 0.4, "c": 0.2}, "c") == 0.0


def test_log_loss_is_natural_and_floored() -> None:
    assert log_loss({"a": 0.5}, "a") == pytest.approx(math.log(2))
    assert log_loss({"a": 1.0}, "b") == pytest.approx(math.log(1000))


def test_alpha_is_positive_where_the_forecast_beats_the_market() -> None:
    assert information_alpha(0.8, 0.4) == pytest.approx(math.log(2))
    assert information_alpha(0.0, 0.0) == 0.0


@pytest.mark.parametrize("count", [2, 3, 7])
def test_uniform_scores_are_those_of_the_paper(count: int) -> None:
    options = [f"o{i}" for i in range(count)]
    assert brier(uniform(options), "o0") == pytest.approx(1 - 1 / count)
    assert accuracy(uniform(options), "o0") == pytest.approx(1 / count)
    assert log_loss(uniform(options), "o0") == pytest.approx(math.log(count))


def test_the_binary_column_is_the_squared_error_of_yes() -> None:
    assert binary_brier({"No": 0.7, "Yes": 0.3}, ("No", "Yes"), "Yes") == pytest.approx(0.49)
    assert binary_brier({"a": 0.7, "b": 0.3}, ("a", "b"), "a") == pytest.approx(0.09)
    assert binary_brier({"a": 1.0}, OPTIONS, "a") is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda w: sum(w) > 1e-6), st.data())
def test_scores_stay_in_their_ranges(weights: list[float], data: st.DataObject) -> None:
    total = math.fsum(weights)
    probabilities = {str(i): w / total for i, w in enumerate(weights)}
    outcome = data.draw(st.sampled_from(sorted(probabilities)))
    assert 0.0 <= brier(probabilities, outcome) <= 2.0 + 1e-12
    assert 0.0 <= accuracy(probabilities, outcome) <= 1.0
    assert -1e-12 <= log_loss(probabilities, outcome) <= math.log(1000) + 1e-12


@given(st.floats(0, 1))
def test_the_binary_brier_is_half_of_the_multiclass_one(p: float) -> None:
    both = {"Yes": p, "No": 1 - p}
    half = binary_brier(both, ("Yes", "No"), "No")
    assert half is not None
    assert brier(both, "No") == pytest.approx(2 * half, abs=1e-12)


@given(st.floats(0.01, 0.99), st.floats(0, 1))
def test_the_brier_score_is_proper(truth: float, said: float) -> None:
    def expected(p: float) -> float:
        report = {"a": p, "b": 1 - p}
        return truth * brier(report, "a") + (1 - truth) * brier(report, "b")

    assert expected(truth) <= expected(said) + 1e-12


def test_an_unusable_report_is_scored_as_uniform_and_stays_a_failure() -> None:
    scored = score_forecast(record(UNUSABLE), event({"a": 0.5, "b": 0.25, "c": 0.25}), None)
    assert scored is not None
    assert not scored.usable
    assert scored.scores.brier == pytest.approx(2 / 3)
    assert scored.scores.accuracy == pytest.approx(1 / 3)
    assert scored.scores.log_loss == pytest.approx(math.log(3))
    assert scored.alpha == pytest.approx(math.log(2 / 3))


def test_a_failed_forecast_is_scored_as_uniform_even_with_a_report() -> None:
    failed = record(usable({"a": 1.0}), Failure(kind="model", reason="no-notebook"))
    scored = score_forecast(failed, event(), None)
    assert scored is not None
    assert scored.probabilities == uniform(OPTIONS)


@pytest.mark.parametrize("kind", ["infrastructure", "data", "bug"])
def test_a_forecast_lost_to_the_run_is_not_scored(kind: str) -> None:
    failure = Failure.model_validate({"kind": kind, "reason": "engine-lost"})
    assert score_forecast(record(None, failure), event(), None) is None


def test_alpha_needs_only_the_price_of_the_outcome() -> None:
    scored = score_forecast(record(usable({"a": 0.8, "b": 0.2})), event({"a": 0.4}), None)
    assert scored is not None
    assert scored.market is None
    assert scored.alpha == pytest.approx(math.log(2))


def test_there_is_no_alpha_without_a_price_on_that_day() -> None:
    scored = score_forecast(record(usable({"a": 1.0})), event({"b": 0.4}), None)
    assert scored is not None
    assert scored.alpha is None
    assert scored.market_probability is None


def test_one_price_of_two_gives_both() -> None:
    assert market_distribution(("Yes", "No"), {"Yes": 0.25}) == {"Yes": 0.25, "No": 0.75}
    assert market_distribution(OPTIONS, {"a": 0.5}) is None
    assert market_distribution(OPTIONS, {"a": 0.0, "b": 0.0, "c": 0.0}) is None
    assert market_distribution(("a", "b"), {"a": 0.6, "b": 0.6}) == {"a": 0.5, "b": 0.5}


def test_a_ledger_of_other_events_is_refused() -> None:
    with pytest.raises(DataError, match=r"events\.jsonl does not belong"):
        score_forecast(record(usable({"x": 1.0}), options=("x", "y")), event(), None)


def test_answer_sets_by_hand() -> None:
    truth = frozenset({"a", "b"})
    exact = set_scores(frozenset({"a", "b"}), truth)
    assert (exact.exact, exact.recall_or_zero, exact.f1_points) == (1.0, 1.0, 3.0)
    partial = set_scores(frozenset({"a"}), truth)
    assert (partial.exact, partial.recall_or_zero) == (0.0, 0.5)
    assert partial.f1_points == pytest.approx(3 * 2 / 3)
    wrong = set_scores(frozenset({"a", "c"}), truth)
    assert wrong.recall_or_zero == 0.0
    assert wrong.f1_points == pytest.approx(1.5)
    assert set_scores(frozenset(), truth).f1_points == 0.0


def test_an_unusable_answer_set_scores_zero() -> None:
    scored = score_answer(record(UNUSABLE), event(outcome=("a", "b")))
    assert scored is not None
    assert (scored.usable, scored.scores.exact, scored.scores.f1_points) == (False, 0.0, 0.0)


def test_the_market_of_forecastbench_scores_its_published_figure() -> None:
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "forecastbench"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    outcomes: dict[tuple[str, str], float] = {}
    for file in sorted((folder / "resolution_sets").glob("*.json")):
        for row in json.loads(file.read_text())["resolutions"]:
            if row["resolved"] and row["resolved_to"] in (0, 1):
                outcomes[row["source"], row["id"]] = row["resolved_to"]
    binary, multiclass = [], []
    for file in sorted((folder / "question_sets").glob("*.json")):
        for row in json.loads(file.read_text())["questions"]:
            outcome = outcomes.get((row["source"], row["id"]))
            value = number(row["freeze_datetime_value"])
            if outcome is None or value is None:
                continue
            truth = "Yes" if outcome == 1 else "No"
            said = {"Yes": value, "No": 1 - value}
            squared = binary_brier(said, ("Yes", "No"), truth)
            assert squared is not None
            binary.append(squared)
            multiclass.append(brier(said, truth))
    assert len(outcomes) == 877
    assert len(binary) == 1438
    assert sum(binary) / 1438 == pytest.approx(0.085896, abs=5e-7)
    assert sum(multiclass) / 1438 == pytest.approx(0.171792, abs=5e-7)


def number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
