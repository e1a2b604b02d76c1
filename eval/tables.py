"""Scores and comparisons as rich tables for the terminal."""

from pathlib import Path

from rich.table import Table

from eval.bootstrap import Interval, PairedDifference
from eval.checkpoints import CheckpointComparison
from eval.summary import Counts, Row, Scores


def interval_text(interval: Interval | None, digits: int = 3, signed: bool = False) -> str:
    """`0.512 [0.480, 0.545]`; only the mean where there is no interval, a dash where there is no value."""
    if interval is None:
        return "–"
    sign = "+" if signed else ""
    mean = f"{interval.mean:{sign}.{digits}f}"
    if interval.low is None or interval.high is None:
        return mean
    return f"{mean} [{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]"


def share_text(counts: Counts, count: int) -> str:
    """A percentage of the recorded forecasts."""
    share = counts.share(count)
    return "–" if share is None else f"{share:.1%}"


def score_tables(scores: Scores) -> list[Table]:
    """What `pastcast score` prints: scores with their references, failures, answers, cost, then paired differences."""
    tables = [_scores(scores)]
    if any(row.failures or row.counts.missing for row in scores.rows):
        tables.append(_failures(scores))
    if any(row.answers for row in scores.rows):
        tables.append(_answers(scores))
    if any(row.usage and row.usage.price for row in scores.rows):
        tables.append(_costs(scores))
    if scores.paired:
        table = _table("Paired differences in Brier (second minus first, negative is better)")
        for column in ("first", "second", "mode", "difference", "pairs", "unpaired"):
            table.add_column(column)
        for paired in scores.paired:
            table.add_row(paired.first, paired.second, paired.mode, *_difference(paired.brier))
        tables.append(table)
    return tables


def comparison_table(comparison: CheckpointComparison) -> Table:
    """What `pastcast eval` prints: before, after and the paired difference of every score and mode."""
    table = _table(f"{comparison.base} → {comparison.checkpoint} (paired by event, date, mode, rollout)")
    for column in ("mode", "score", comparison.base, comparison.checkpoint, "difference", "pairs", "unpaired"):
        table.add_column(column)
    for mode in comparison.modes:
        base, checkpoint = mode.base, mode.checkpoint
        for name, before, after, difference in (
            ("Brier ↓", base.scores.brier, checkpoint.scores.brier, mode.brier),
            ("accuracy ↑", base.scores.accuracy, checkpoint.scores.accuracy, mode.accuracy),
            ("log loss ↓", base.scores.log_loss, checkpoint.scores.log_loss, mode.log_loss),
        ):
            table.add_row(mode.mode, name, interval_text(before), interval_text(after), *_difference(difference))
        table.add_row(
            mode.mode,
            "usable ↑",
            share_text(base.counts, base.counts.scored - base.counts.unusable),
            share_text(checkpoint.counts, checkpoint.counts.scored - checkpoint.counts.unusable),
            *_difference(mode.usable),
        )
    return table


def _scores(scores: Scores) -> Table:
    table = _table(f"Scores (mean [{scores.settings.level:.0%} interval over events])")
    for column in ("run", "model", "mode"):
        table.add_column(column, overflow="fold")
    for column in ("scored", "usable", "Brier ↓", "accuracy ↑", "log loss ↓", "Information-α ↑"):
        table.add_column(column, justify="right")
    for row in scores.rows:
        mean = row.scores
        table.add_row(
            Path(row.run).name,
            row.model,
            row.mode,
            _scored_text(row),
            share_text(row.counts, row.counts.scored - row.counts.unusable),
            interval_text(mean.brier),
            interval_text(mean.accuracy),
            interval_text(mean.log_loss),
            interval_text(mean.alpha, signed=True),
        )
        for reference in row.references:
            covered = "" if reference.n == mean.n else f" of {mean.n}"
            table.add_row(
                "",
                f"  {reference.name}",
                "",
                f"{reference.n}{covered}",
                "",
                interval_text(reference.brier),
                f"{reference.accuracy:.3f}",
                f"{reference.log_loss:.3f}",
                "",
                style="dim",
            )
    return table


def _failures(scores: Scores) -> Table:
    table = _table("Forecasts without a usable report")
    for column in ("run", "model", "mode", "reason", "forecasts", "scored as"):
        table.add_column(column)
    for row in scores.rows:
        name = (Path(row.run).name, row.model, row.mode)
        for failure in row.failures:
            treatment = "fallback" if failure.kind == "model" else f"not scored ({failure.kind})"
            table.add_row(*name, failure.reason, str(failure.n), treatment)
        if row.counts.missing:
            table.add_row(*name, "not recorded", str(row.counts.missing), "not scored (missing)")
    return table


def _costs(scores: Scores) -> Table:
    table = _table("Cost of endpoints (US dollars)")
    for column in ("run", "model", "mode"):
        table.add_column(column, overflow="fold")
    for column in ("forecasts", "cost", "a forecast", "tokens in", "of them cached", "tokens out"):
        table.add_column(column, justify="right")
    for row in scores.rows:
        usage, n = row.usage, row.counts.recorded
        if usage is not None and usage.price:
            table.add_row(
                Path(row.run).name,
                row.model,
                row.mode,
                str(n),
                f"{usage.price * n:.4f}",
                f"{usage.price:.4f}",
                f"{usage.input_tokens * n:,.0f}",
                f"{usage.cached_tokens * n:,.0f}",
                f"{usage.output_tokens * n:,.0f}",
            )
    return table


def _answers(scores: Scores) -> Table:
    table = _table("Multi-answer events (unusable answers score zero)")
    for column in ("run", "model", "mode", "answers", "unusable", "exact", "recall or zero", "F1 points of 3"):
        table.add_column(column)
    for row in scores.rows:
        if (answers := row.answers) is not None:
            table.add_row(
                Path(row.run).name,
                row.model,
                row.mode,
                str(answers.n),
                str(answers.unusable),
                interval_text(answers.exact),
                interval_text(answers.recall_or_zero),
                interval_text(answers.f1_points),
            )
    return table


def _scored_text(row: Row) -> str:
    counts = row.counts
    return str(counts.scored) if counts.scored == counts.scheduled else f"{counts.scored} of {counts.scheduled}"


def _difference(paired: PairedDifference) -> tuple[str, str, str]:
    return (
        interval_text(paired.difference, signed=True),
        str(paired.pairs),
        str(paired.only_first + paired.only_second),
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold")
