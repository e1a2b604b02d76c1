"""A checkpoint's run against its base model's, paired by event, date, mode and rollout."""

from collections.abc import Callable
from pathlib import Path

from cluster.config import ScoreSettings
from cluster.failures import DataError
from cluster.record import Record
from eval.bootstrap import PairedDifference, paired_difference
from eval.runs import ScoredRun, load_run
from eval.scoring import ScoredForecast
from eval.summary import Row, summarize_condition
from rollout.record import Mode


class ModeComparison(Record):
    """One mode. Differences are checkpoint minus base, over the forecasts that both runs scored."""

    mode: Mode
    base: Row
    checkpoint: Row
    brier: PairedDifference
    """Negative is better."""
    accuracy: PairedDifference
    """Positive is better."""
    log_loss: PairedDifference
    """Nats; negative is better."""
    usable: PairedDifference
    """Share of usable reports; positive is better."""


class CheckpointComparison(Record):
    """Every mode that both runs scheduled."""

    base: str
    """`model`, as its keys name it."""
    checkpoint: str
    modes: tuple[ModeComparison, ...]
    unmatched_modes: tuple[Mode, ...]
    """Modes that only one of the runs has."""


def compare_checkpoints(base_run: Path, checkpoint_run: Path, settings: ScoreSettings) -> CheckpointComparison:
    """Compare two runs of one model each. Raises DataError if a run holds several models or no mode is shared."""
    base, checkpoint = load_run(base_run), load_run(checkpoint_run)
    base_model, checkpoint_model = _only_model(base), _only_model(checkpoint)
    base_modes = [mode for _, mode in base.conditions()]
    checkpoint_modes = [mode for _, mode in checkpoint.conditions()]
    shared = [mode for mode in base_modes if mode in checkpoint_modes]
    if not shared:
        raise DataError(
            f"{base_run} has the modes {base_modes} and {checkpoint_run} has {checkpoint_modes}: "
            "nothing to compare; roll both out in a common mode"
        )
    return CheckpointComparison(
        base=base_model,
        checkpoint=checkpoint_model,
        modes=tuple(_compare(mode, base, checkpoint, settings) for mode in shared),
        unmatched_modes=tuple(dict.fromkeys(m for m in (*base_modes, *checkpoint_modes) if m not in shared)),
    )


def _only_model(run: ScoredRun) -> str:
    models = list(dict.fromkeys(model for model, _ in run.conditions()))
    if len(models) != 1:
        raise DataError(f"{run.path} holds {len(models)} models {models}; a checkpoint comparison needs one per run")
    return models[0]


def _compare(mode: Mode, base: ScoredRun, checkpoint: ScoredRun, settings: ScoreSettings) -> ModeComparison:
    before = [f for f in base.forecasts if f.key.mode == mode]
    after = [f for f in checkpoint.forecasts if f.key.mode == mode]

    def paired(value: Callable[[ScoredForecast], float]) -> PairedDifference:
        return paired_difference(before, after, value, settings)

    return ModeComparison(
        mode=mode,
        base=summarize_condition(base, _only_model(base), mode, settings),
        checkpoint=summarize_condition(checkpoint, _only_model(checkpoint), mode, settings),
        brier=paired(lambda f: f.scores.brier),
        accuracy=paired(lambda f: f.scores.accuracy),
        log_loss=paired(lambda f: f.scores.log_loss),
        usable=paired(lambda f: float(f.usable)),
    )
