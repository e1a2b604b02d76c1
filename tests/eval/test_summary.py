"""Stages, calibration, summaries and comparisons of runs in real run directories."""

import datetime as dt
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from cluster.config import ScoreSettings
from cluster.failures import DataError
from eval.calibration import calibration
from eval.checkpoints import compare_checkpoints
from eval.longitudinal import stage_of, stage_table
from eval.runs import load_run
from eval.summary import Row, Scores, score_runs
from eval.tables import comparison_table, score_tables
from rollout.ledger import Ledger
from rollout.packed import pack
from rollout.run import RunDirectory

RunMaker = Callable[..., Path]
FAST = ScoreSettings(draws=200)


def row_of(scores: Scores, mode: str) -> Row:
    return next(r for r in scores.rows if r.mode == mode)


def test_thirds_of_the_relative_position() -> None:
    assert [stage_of(i, 4) for i in range(4)] == ["early", "middle", "late", "late"]
    assert [stage_of(i, 3) for i in range(3)] == ["early", "middle", "late"]
    assert [stage_of(i, 10) for i in range(10)] == ["early"] * 3 + ["middle"] * 3 + ["late"] * 4
    assert stage_of(0, 1) is None


def test_stages_keep_only_events_that_stand_in_all_three_thirds(make_run: RunMaker) -> None:
    run = load_run(make_run(modes=("no-tools",), events=3))
    first_day = min(f.key.date for f in run.forecasts)
    partial = [f for f in run.forecasts if f.key.event != "event-0" or f.key.date == first_day]
    table = stage_table(partial, run.dates(), FAST)
    assert (table.events, table.left_out) == (2, 1)
    assert [s.stage for s in table.stages] == ["early", "middle", "late"]
    assert all(s.brier.events == 2 and s.market is not None and s.floor is not None for s in table.stages)


def test_every_event_weighs_the_same_in_a_stage(make_run: RunMaker) -> None:
    run = load_run(make_run(modes=("no-tools",), events=2, rollouts=2))
    late = [f for f in run.forecasts if f.key.date >= run.dates()["event-0"][2]]
    thinned = [f for f in run.forecasts if not (f in late and f.key.event == "event-0" and f.key.rollout == 1)]
    table = stage_table(thinned, run.dates(), FAST)
    means = []
    for event in ("event-0", "event-1"):
        group = [f.scores.brier for f in late if f.key.event == event and (event, f.key.rollout) != ("event-0", 1)]
        means.append(sum(group) / len(group))
    assert table.stages[2].brier.mean == pytest.approx(sum(means) / 2)


def test_dates_without_a_market_count_where_no_date_has_one(make_run: RunMaker) -> None:
    run = load_run(make_run(modes=("no-tools",), beliefs=False, floor=False))
    table = stage_table(run.forecasts, run.dates(), FAST)
    assert not table.market_dates_only
    assert table.events == 4
    assert all(s.market is None and s.floor is None for s in table.stages)


def test_calibration_counts_every_option_of_usable_forecasts(make_run: RunMaker) -> None:
    run = load_run(make_run(modes=("no-tools",)))
    usable = [f for f in run.forecasts if f.usable]
    table = calibration(run.forecasts)
    assert len(usable) < len(run.forecasts)
    assert table.n == sum(len(f.options) for f in usable) == sum(b.n for b in table.bins)


def test_certain_and_right_is_perfectly_calibrated(make_run: RunMaker) -> None:
    run = load_run(make_run(modes=("no-tools",)))
    certain = [f.model_copy(update={"probabilities": {f.outcome: 1.0}, "usable": True}) for f in run.forecasts]
    assert calibration(certain).ece == 0.0
    wrong = [
        f.model_copy(update={"probabilities": {next(o for o in f.options if o != f.outcome): 1.0}, "usable": True})
        for f in run.forecasts
        if len(f.options) == 2
    ]
    assert calibration(wrong).ece == 1.0


def test_every_scheduled_forecast_is_somewhere_in_the_counts(make_run: RunMaker) -> None:
    scores = score_runs([make_run(unrecorded=3, lost=2)], FAST)
    for row in scores.rows:
        counts = row.counts
        assert counts.scheduled == counts.recorded + counts.missing == 16
        assert counts.recorded == counts.scored + counts.lost
        assert sum(f.n for f in row.failures) == counts.lost + counts.unusable
        assert counts.usable_strict <= counts.usable_lenient <= counts.recorded
    assert row_of(scores, "memory-on").counts.missing == 3
    lost = row_of(scores, "no-tools")
    assert lost.counts.lost == 2
    assert ("infrastructure", "engine-lost", 2) in [(f.kind, f.reason, f.n) for f in lost.failures]


def test_references_are_over_the_same_forecasts(make_run: RunMaker) -> None:
    row = row_of(score_runs([make_run()], FAST), "memory-free")
    assert [r.name for r in row.references] == ["uniform", "market", "floor"]
    assert row.scores.brier is not None
    for reference in row.references:
        assert reference.n == row.counts.scored
        assert reference.difference.mean == pytest.approx(row.scores.brier.mean - reference.brier.mean)


def test_raw_scores_stand_beside_the_fallback_ones(make_run: RunMaker) -> None:
    row = row_of(score_runs([make_run()], FAST), "no-tools")
    assert row.usable_scores.n == row.scores.n - row.counts.unusable < row.scores.n


def test_scores_survive_json(make_run: RunMaker) -> None:
    scores = score_runs([make_run(), make_run("other", model="teacher", skill=1.0)], FAST)
    assert Scores.model_validate_json(scores.model_dump_json()) == scores
    assert [(p.mode, p.brier.pairs) for p in scores.paired] == [
        ("no-tools", 16),
        ("memory-free", 16),
        ("memory-on", 16),
    ]


def test_a_better_checkpoint_shows_a_negative_paired_difference(make_run: RunMaker) -> None:
    base, better = make_run("base", skill=0.0), make_run("tuned", model="tuned", skill=3.0, unrecorded=2)
    comparison = compare_checkpoints(base, better, FAST)
    assert [m.mode for m in comparison.modes] == ["no-tools", "memory-free", "memory-on"]
    last = comparison.modes[-1]
    assert (last.brier.pairs, last.brier.only_first, last.brier.only_second) == (14, 2, 0)
    assert last.brier.difference is not None
    assert last.brier.difference.mean < 0
    assert last.accuracy.difference is not None
    assert last.accuracy.difference.mean > 0


def test_runs_without_a_common_mode_cannot_be_compared(make_run: RunMaker) -> None:
    with pytest.raises(DataError, match="nothing to compare"):
        compare_checkpoints(make_run("a", modes=("no-tools",)), make_run("b", modes=("memory-on",)), FAST)


def test_tables_show_every_model_mode_and_failure(make_run: RunMaker) -> None:
    console = Console(width=220, record=True, file=io.StringIO())
    run = make_run(unrecorded=1, lost=1)
    for table in score_tables(score_runs([run], FAST)):
        console.print(table)
    console.print(comparison_table(compare_checkpoints(run, make_run("tuned", model="tuned"), FAST)))
    text = console.export_text()
    for expected in ("memory-on", "uniform", "market", "floor", "no-answer", "engine-lost", "not recorded", "usable ↑"):
        assert expected in text


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a run directory"):
        score_runs([tmp_path], FAST)


def test_dates_of_a_run_are_in_order(make_run: RunMaker) -> None:
    dates = load_run(make_run(modes=("no-tools",))).dates()["event-1"]
    assert list(dates) == sorted(dates)
    assert dates[0] == dt.date(2025, 3, 3)


def test_what_an_endpoint_cost_is_summed_and_shown(make_run: RunMaker) -> None:
    free, priced = make_run(name="free"), make_run(name="priced")
    assert not any("Cost" in str(t.title) for t in score_tables(score_runs([free], FAST)))
    with RunDirectory(priced).ledger() as ledger:
        records = [(r, ledger.trajectory(r.key)) for r in ledger.records()]
    (priced / "ledger.sqlite").unlink()
    for leftover in priced.glob("ledger.sqlite-*"):
        leftover.unlink()
    with Ledger.create(priced / "ledger.sqlite", [r.key for r, _ in records]) as ledger:
        for record, trajectory in records:
            usage = record.usage.model_copy(update={"price": 0.25})
            ledger.commit([pack(record.model_copy(update={"usage": usage}), trajectory)])
    scores = score_runs([priced], FAST)
    assert all(row.usage and row.usage.price == 0.25 for row in scores.rows)
    out = io.StringIO()
    Console(file=out, width=200).print(next(t for t in score_tables(scores) if "Cost" in str(t.title)))
    assert f"{0.25 * scores.rows[0].counts.recorded:.4f}" in out.getvalue()
