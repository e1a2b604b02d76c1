"""The `pastcast` command: one verb for each thing a user does."""

import enum
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from cluster.config import Settings, dump_settings, load_settings
from cluster.failures import FailureKind, Interrupted, PastcastError, SettingsError
from scripts.index_cli import index_app
from scripts.terminal import ProgressBar, console, errors
from scripts.verbs import Config, Set, print_counts, print_naive_times, verb

if TYPE_CHECKING:
    from rollout.progress import RunSummary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Replays resolved events as dated forecasts for LLM agents.",
)
world_app = typer.Typer(no_args_is_help=True)
train_app = typer.Typer(no_args_is_help=True)
app.add_typer(world_app, name="world", help="Synthetic worlds. Example: pastcast world make --seed 7 --out world")
app.add_typer(
    index_app, name="index", help="The dated index. Example: pastcast index build --config world/settings.yaml"
)
app.add_typer(train_app, name="train", help="Fine-tuning. Example: pastcast train sft --run runs/teacher")


class Retry(enum.StrEnum):
    """What `--retry` takes back."""

    INFRASTRUCTURE = "infrastructure"
    MODEL = "model"
    ALL = "all"

    @property
    def kinds(self) -> tuple[FailureKind, ...]:
        """As failures are recorded."""
        kinds: tuple[FailureKind, ...] = get_args(FailureKind)
        return kinds if self is Retry.ALL else tuple(kind for kind in kinds if kind == self.value)


Runs = Annotated[list[Path], typer.Argument(help="Run directories.")]


@app.callback()
def _main(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done.")] = False) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


@verb(app, "doctor", "pastcast doctor")
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not start a Ray session.")] = False,
) -> None:
    """Check this machine and say what to do about each fault."""
    from scripts.doctor import doctor as check

    raise typer.Exit(check(deep=not quick))


@verb(world_app, "make", "pastcast world make --seed 7 --events 60 --days 120 --articles-per-day 20 --out world")
def world_make(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    seed: Annotated[int, typer.Option()] = 0,
    events: Annotated[int, typer.Option(min=1)] = 60,
    days: Annotated[int, typer.Option(min=30)] = 120,
    articles_per_day: Annotated[float, typer.Option(min=0.1)] = 20.0,
    fault: Annotated[list[str], typer.Option(help="Plant a fault; may be repeated.")] = [],  # noqa: B006 - typer copies it
) -> None:
    """Write a synthetic world whose best possible forecasts are known."""
    from rollout.events.world import make_world, write_settings

    made = make_world(out, seed, events, days, articles_per_day, frozenset(fault))
    file = write_settings(out, made)
    console.print(
        f"{made.events} events over {made.days} days, {made.articles} articles ({made.surveys} surveys), "
        f"{len(made.planted)} planted faults; use it with --config {file}",
        highlight=False,
    )


@verb(app, "rollout", "pastcast rollout --config configs/summer2024.yaml --set rollout.count=4")
def rollout(
    config: Config = [],  # noqa: B006
    set_: Set = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that the directory holds.")] = False,
    retry: Annotated[
        Retry | None,
        typer.Option("--retry", help="With --resume: run recorded failures of this kind again, stragglers included."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the settings and what would run; start nothing.")
    ] = False,
    max_cost: Annotated[
        float | None,
        typer.Option("--max-cost", help="US dollars: start no step once the run has cost this much (run.max_cost)."),
    ] = None,
) -> None:
    """Run every scheduled forecast of the configured events, modes and rollouts."""
    from rollout.execute import execute
    from rollout.plan import make_plan

    if retry is not None and not resume:
        raise SettingsError("--retry goes with --resume: it runs failures of an existing run again")
    settings = load_settings(config, set_ if max_cost is None else [*set_, f"run.max_cost={max_cost}"])
    plan = make_plan(settings)
    if dry_run:
        console.print(dump_settings(settings), highlight=False, markup=False)
    print_counts("rows of the events file not used", plan.quarantined)
    print_counts("events not run", plan.dropped)
    print_naive_times(plan.naive_times, settings.events.time_zone)
    if plan.hidden_deadlines:
        console.print(f"{plan.hidden_deadlines} deadlines are not shown: their source moves them to the settlement")
    cost = "" if plan.cost is None else f" for ${plan.cost:,.2f}"
    console.print(
        f"{len(plan.events)} events, {plan.episodes} episodes, {len(plan.keys)} forecasts, "
        f"roughly {plan.tokens:,} tokens{cost}; run {plan.manifest.fingerprint[:12]} in {settings.run.directory}"
    )
    if dry_run:
        return
    with ProgressBar("forecasts") as bar:
        summary = execute(plan, resume, bar.run, () if retry is None else retry.kinds)
    raise typer.Exit(say_how_it_ended(summary, settings))


@verb(app, "status", "pastcast status runs/demo --watch")
def status(
    run: Annotated[str, typer.Argument(help="A run directory, or the address of a mirror.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until the run ends.")] = False,
) -> None:
    """Say how a run goes: progress, rate, expected end, engines, failures, cost; from any terminal, at any time."""
    from rollout.status import read_status
    from scripts.status_page import status_page, watch_status

    if watch:
        watch_status(run)
    elif json_:
        sys.stdout.write(read_status(run).model_dump_json(indent=1) + "\n")
    else:
        console.print(status_page(read_status(run)))


@verb(app, "merge", "pastcast merge runs/all runs/share-1 runs/share-2")
def merge(
    out: Annotated[Path, typer.Argument(help="The run directory to write.")],
    runs: Runs,
) -> None:
    """Join the runs of several jobs over one plan; whatever they do not agree on is refused."""
    from rollout.merge import merge_runs

    made = merge_runs(out, runs)
    console.print(
        f"{made.path}: {made.recorded} of {made.scheduled} forecasts of {made.runs} runs, {made.repeated} of them in more "
        f"than one; {made.superseded} records that were taken back are kept",
        highlight=False,
    )


@verb(app, "export", "pastcast export runs/demo --out exports/demo --licence cc-by-4.0")
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    outcomes: Annotated[bool, typer.Option(help="Write outcomes, beside the events.")] = True,
    beliefs: Annotated[bool, typer.Option(help="Write market beliefs too.")] = False,
    licence: Annotated[str, typer.Option(help="The licence that the card states.")] = "unknown",
    file_mib: Annotated[int, typer.Option(min=1, help="Size of a file.")] = 256,
) -> None:
    """Write a run as Parquet files for `datasets`, with a card."""
    from rollout.export import export_run

    with ProgressBar("forecasts") as bar:
        made = export_run(
            run, out, outcomes=outcomes, beliefs=beliefs, licence=licence, file_mib=file_mib, report=bar.update
        )
    console.print(
        f"{made.path}: {made.forecasts} forecasts ({made.open} are open) in {made.files} files, {made.bytes / 2**20:.1f} MiB",
        highlight=False,
    )


@verb(app, "score", "pastcast score runs/demo --json")
def score(
    runs: Runs,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    config: Config = [],  # noqa: B006
    set_: Set = [],  # noqa: B006
) -> None:
    """Print scores with intervals, failures and usage, from the ledgers alone."""
    from eval.summary import score_runs
    from eval.tables import score_tables

    scores = score_runs(runs, load_settings(config, set_).scores)
    if json_:
        sys.stdout.write(scores.model_dump_json(indent=1) + "\n")
        return
    for table in score_tables(scores):
        console.print(table)


@verb(app, "report", "pastcast report runs/base runs/sft --out report.html")
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    config: Config = [],  # noqa: B006
    set_: Set = [],  # noqa: B006
) -> None:
    """Write one self-contained HTML page about one or more runs."""
    from eval.html.page import write_report

    console.print(f"wrote {write_report(runs, out, load_settings(config, set_).scores)}")


@verb(train_app, "sft", "pastcast train sft --run runs/teacher --set training.output=checkpoints/sft")
def train_sft(
    run: Annotated[Path, typer.Option(help="The run whose trajectories are learned.")],
    config: Config = [],  # noqa: B006
    set_: Set = [],  # noqa: B006
) -> None:
    """Fine-tune on a run's trajectories; the checkpoint is loaded by vLLM before it is called done."""
    from cluster.session import start_session
    from training.launch import launch_sft

    settings = load_settings(config, set_)
    with start_session(settings.ray), ProgressBar("steps") as bar:
        made = launch_sft(
            run,
            settings,
            lambda p: bar.update(p.step, p.steps, f"loss {p.loss:.3f}, {p.tokens_per_second:.0f} tokens/s"),
        )
    console.print(f"{made.path}: {made.rows}; vLLM loads it: {made.verification}", highlight=False)


@verb(app, "eval", "pastcast eval --checkpoint checkpoints/sft --config world/settings.yaml")
def evaluate(
    checkpoint: Annotated[Path, typer.Option(help="A model folder that vLLM can load.")],
    config: Config = [],  # noqa: B006
    set_: Set = [],  # noqa: B006
    base_run: Annotated[
        Path | None, typer.Option(help="A run of the base model; by default it is rolled out too.")
    ] = None,
) -> None:
    """Roll out the held-out split with a checkpoint and compare it, paired, with the base model."""
    from eval.evaluate import evaluate_checkpoint
    from eval.tables import comparison_table

    settings = load_settings(config, set_)
    with ProgressBar("forecasts") as bar:
        comparison = evaluate_checkpoint(settings, checkpoint, base_run, bar.run)
    console.print(comparison_table(comparison))


@verb(app, "demo", "pastcast demo --out demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("demo"),
    config: Config = [Path("configs/demo.yaml")],  # noqa: B006
    set_: Set = [],  # noqa: B006
) -> None:
    """The main job, end to end: world, index, baselines, base model, teacher, fine-tuning, re-evaluation, report."""
    from scripts.demo import run_demo

    run_demo(out, config, set_)


def say_how_it_ended(summary: "RunSummary", settings: Settings) -> int:
    """Print it; returns the exit status: 128 and the signal's number, 1 for bugs and spent budgets."""
    cost = f", ${summary.price:.2f}" if summary.price else ""
    console.print(
        f"{summary.recorded} of {summary.scheduled} forecasts recorded ({summary.recorded_now} now, "
        f"{summary.seconds:.0f} s, {summary.output_tokens:,} sampled tokens{cost}); {summary.retried} attempts repeated"
        + (f"; {summary.reopened} records taken back by --retry" if summary.reopened else ""),
        highlight=False,
    )
    print_counts("failures", summary.failures)
    for bug in summary.tracebacks:
        errors.print(
            f"{bug.count} forecasts ended in this bug of pastcast, {bug.reason}:", style="red", highlight=False
        )
        errors.print(bug.traceback, markup=False, highlight=False)
    if summary.bugs:
        errors.print(
            f"{summary.bugs} forecasts ended in a bug of pastcast; their tracebacks are in the ledger", style="red"
        )
    if summary.ended == "complete":
        return 1 if summary.bugs else 0
    why = {
        "stopped": "it was asked to stop",
        "max-cost": f"the run has cost ${summary.price:.2f}; raise run.max_cost (${settings.run.max_cost})",
        "data-failures": f"more forecasts than rollout.data_failures ({settings.rollout.data_failures}) failed for their "
        "inputs; mend these or raise it",
        "bugs": f"more forecasts than rollout.bugs ({settings.rollout.bugs}) ended in a bug; raise it",
    }[summary.ended]
    console.print(f"stopped: {why}; go on with --resume (run {settings.run.directory})", highlight=False)
    return 128 + summary.signal if summary.signal else 1


def main() -> None:
    """The console script: an error of ours is a message and exit status 2, never a traceback; a signal's is 128 and its number."""
    try:
        app()
    except Interrupted as error:
        errors.print(f"stopped: {error}", markup=False, highlight=False)
        sys.exit(128 + error.signal)
    except PastcastError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)
