"""Evaluate one checkpoint: roll out the held-out split with it, and with the base model unless that run exists."""

from pathlib import Path

from cluster.config import Settings
from cluster.failures import DataError, Interrupted
from eval.checkpoints import CheckpointComparison, compare_checkpoints
from rollout.execute import execute
from rollout.plan import make_plan
from rollout.progress import Report, RunSummary
from rollout.wants import HaltReason

FIRST: dict[HaltReason, str] = {
    "max-cost": "raise run.max_cost, and ",
    "data-failures": "mend its inputs or raise rollout.data_failures, and ",
    "bugs": "raise rollout.bugs, and ",
}
"""What has to be done about a budget that is spent."""


def roll_out(settings: Settings, report: Report) -> RunSummary:
    """Run or resume the run of these settings in its directory.

    Raises DataError if it did not finish, Interrupted if that is what a signal asked for.
    """
    plan = make_plan(settings)
    summary = execute(plan, resume=True, report=report)
    if summary.recorded < summary.scheduled:
        message = (
            f"{settings.run.directory} holds {summary.recorded} of {summary.scheduled} forecasts; "
            f"{FIRST.get(summary.ended, '')}run the same command again"
        )
        raise DataError(message) if summary.signal is None else Interrupted(message, summary.signal)
    if summary.bugs or summary.lost:
        raise DataError(
            f"{settings.run.directory}: {summary.bugs} forecasts ended in a bug of pastcast and {summary.lost} were lost to "
            "infrastructure; its ledger says why. Scores without them would mislead; run them again with `pastcast rollout "
            f"--config {settings.run.directory}/settings.yaml --resume --retry {'all' if summary.bugs else 'infrastructure'}`"
        )
    return summary


def evaluate_checkpoint(
    settings: Settings, checkpoint: Path, base_run: Path | None, report: Report
) -> CheckpointComparison:
    """Compare a checkpoint with `settings.model` on the held-out events, paired by event, date, mode and rollout.

    Runs are kept under `run.directory` by the model's name and resumed when they were interrupted.
    """
    if not (checkpoint / "config.json").is_file():
        raise DataError(f"--checkpoint {checkpoint} is not a model folder (no config.json)")
    if base_run is None:
        base_run = settings.run.directory / settings.model.label
        roll_out(with_model(settings, settings.model.path, base_run), report)
    checkpoint_run = settings.run.directory / checkpoint.resolve().name
    if checkpoint_run.resolve() == base_run.resolve():
        raise DataError(f"the checkpoint and the base model are both called {checkpoint_run.name}; rename the folder")
    roll_out(with_model(settings, str(checkpoint), checkpoint_run), report)
    return compare_checkpoints(base_run, checkpoint_run, settings.scores)


def with_model(settings: Settings, path: str, directory: Path) -> Settings:
    """The same settings for another vLLM model, on the held-out split, in another run directory."""
    return settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"directory": directory}),
            "model": settings.model.model_copy(update={"kind": "vllm", "path": path, "name": ""}),
            "rollout": settings.rollout.model_copy(update={"splits": ("eval",)}),
        }
    )
