"""The main job in small: a world, its index, baselines, the base model in three modes, a teacher, fine-tuning, the
checkpoint re-evaluated on held-out events, and the report. Everything is real; only the sizes are small.

Every stage keeps its result under the output folder, so that an interrupted demo goes on where it was.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from cluster.config import ModelSettings, Settings, load_settings
from cluster.failures import SettingsError
from cluster.session import start_session
from eval.checkpoints import compare_checkpoints
from eval.evaluate import roll_out
from eval.html.page import write_report
from eval.summary import Row, score_runs
from eval.tables import comparison_table, interval_text, share_text
from retrieval.build import build_from_settings
from rollout.events.world import make_world, write_settings
from rollout.record import Mode
from rollout.sandbox import Sandbox
from scripts.terminal import ProgressBar, console
from training.checkpoint import read_origin
from training.launch import launch_sft

SEED, EVENTS, DAYS, ARTICLES_PER_DAY = 7, 48, 100, 4.0
STAGES = 8
EVAL_EVENTS = 12
"""Held-out events that are forecast, three dates each: a model without a clue samples long, and two cores are slow."""


def run_demo(out: Path, config: Sequence[Path], overrides: Sequence[str]) -> None:
    """Run every stage; prints the table and the report's path."""
    began = time.monotonic()
    stage = _Stages(began)

    stage("a synthetic world")
    world = make_world(out / "world", SEED, EVENTS, DAYS, ARTICLES_PER_DAY)
    settings = load_settings([*config, write_settings(out / "world", world)], overrides)
    console.print(f"{world.events} events, {world.articles} articles ({world.surveys} surveys) over {world.days} days")
    sandbox = Sandbox(settings.rollout.python)
    console.print(f"sandbox: {sandbox.describe()}", highlight=False)

    stage("its index")
    with ProgressBar("articles") as bar:
        index = build_from_settings(settings, lambda p: bar.update(p.done, p.total, p.month))
    console.print(f"{index.articles} articles in {index.shards} monthly shards")

    with start_session(settings.ray):
        stage("baselines: uniform, market, reader")
        for kind in ("uniform", "market", "reader"):
            _rolled(settings, out / "runs" / kind, kind, ("memory-free",))
        stage("the base model: no tools, memory-free, memory-on")
        _rolled(settings, out / "runs" / "base", "vllm", settings.rollout.modes)
        stage("the teacher's trajectories on the train split")
        teacher = out / "runs" / "teacher"
        _rolled(settings, teacher, "reader", settings.training.modes, split="train")

        stage("fine-tuning the base model on them")
        checkpoint = out / "checkpoints" / "fine-tuned"
        if (checkpoint / "checkpoint.json").is_file():
            console.print(f"{checkpoint} is there already: {read_origin(checkpoint).rows}")
        else:
            _fine_tune(teacher, checkpoint, settings)

        stage("the checkpoint on held-out events")
        tuned = out / "runs" / "fine-tuned"
        _rolled(settings, tuned, "vllm", ("memory-free",), path=str(checkpoint))

    stage("scores and report")
    runs = [out / "runs" / name for name in ("uniform", "market", "reader", "base", "fine-tuned")]
    page = write_report(runs, out / "report.html", settings.scores)
    console.print(comparison_table(compare_checkpoints(out / "runs" / "base", tuned, settings.scores)))
    console.print(_table({r.model: r for r in score_runs(runs, settings.scores).rows if r.mode == "memory-free"}))
    console.print(f"report: {page.resolve()}\nthe whole demo took {time.monotonic() - began:.0f} s", highlight=False)


def _rolled(
    settings: Settings,
    directory: Path,
    kind: str,
    modes: tuple[Mode, ...],
    split: str = "eval",
    path: str | None = None,
) -> None:
    name = directory.name if kind == "vllm" else ""
    model = settings.model.model_dump() | {"kind": kind, "path": path or settings.model.path, "name": name}
    chosen = settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"directory": directory}),
            "model": ModelSettings.model_validate(model),
            "events": settings.events.model_copy(update={"limit": EVAL_EVENTS if split == "eval" else None}),
            "rollout": settings.rollout.model_copy(update={"modes": modes, "splits": (split,)}),
        }
    )
    with ProgressBar(f"{directory.name} forecasts") as bar:
        try:
            summary = roll_out(chosen, bar.run)
        except SettingsError as error:
            raise SettingsError(
                f"{error}\nTo begin the demo anew, remove {directory.parent.parent} (`make clean`)."
            ) from None
    failures = ", ".join(f"{n} {reason}" for reason, n in summary.failures.items()) or "none"
    console.print(
        f"{directory.name}: {summary.recorded} forecasts in {summary.seconds:.0f} s; failures: {failures}",
        highlight=False,
    )


def _fine_tune(teacher: Path, checkpoint: Path, settings: Settings) -> None:
    training = settings.training.model_copy(update={"output": checkpoint})
    with ProgressBar("steps") as bar:
        made = launch_sft(
            teacher,
            settings.model_copy(update={"training": training}),
            lambda p: bar.update(p.step, p.steps, f"loss {p.loss:.3f}, {p.tokens_per_second:.0f} tokens/s"),
        )
    console.print(
        f"{made.rows}; {made.tokens_per_second:.0f} tokens/s; vLLM loads it: {made.verification}", highlight=False
    )


def _table(rows: dict[str, Row]) -> Table:
    """The demo's result: every forecaster over the same held-out forecasts."""
    table = Table(title="Held-out events, memory-free (Brier in [0, 2], lower is better)", title_justify="left")
    for column in ("forecaster", "Brier", "accuracy", "usable"):
        table.add_column(column)
    for name, row in rows.items():
        usable = share_text(row.counts, row.counts.scored - row.counts.unusable)
        table.add_row(name, interval_text(row.scores.brier), interval_text(row.scores.accuracy), usable)
        if name == "market":
            floor = next(r for r in row.references if r.name == "floor")
            table.add_row("floor (best possible)", interval_text(floor.brier), f"{floor.accuracy:.3f}", "")
    return table


class _Stages:
    def __init__(self, began: float) -> None:
        self._began, self._number = began, 0

    def __call__(self, title: str) -> None:
        self._number += 1
        elapsed = time.monotonic() - self._began
        console.rule(f"[{self._number}/{STAGES}] {title} ({elapsed:.0f} s)", align="left")
