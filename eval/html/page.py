"""The report a person reads: one HTML file that needs nothing else, from ledgers alone.

It asks for nothing over the network, and its security policy allows no script but its own: what models and articles
wrote is escaped, and could not run if it were not. Everything is in the file except what it says it left out.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from cluster.config import ScoreSettings, dump_settings
from cluster.record import Record
from eval.html.browser import EVENTS, embed_episodes, event_entry, group_events
from eval.html.charts import shortened
from eval.html.figures import calibration_figures, mode_style, score_plot, stage_figures
from eval.runs import ScoredRun, load_run
from eval.summary import summarize
from rollout.record import Mode
from rollout.run import RunDirectory

EPISODES = 120
"""Full episodes in one file unless told otherwise."""
EPISODE_BYTES = 30_000_000
"""Bound on the markup of full episodes, whatever their number: browsers stay quick below it."""
_HERE = Path(__file__).parent


class RunFacts(Record):
    """What was run."""

    name: str
    path: str
    fingerprint: str
    code: str
    inputs: dict[str, str]
    versions: dict[str, str]
    settings: str
    models: tuple[str, ...]
    modes: tuple[Mode, ...]
    events: int
    quarantined: tuple[tuple[str, int], ...]
    """(file, rows)."""
    scheduled: int
    recorded: int


def write_report(
    paths: Sequence[Path],
    out: Path,
    settings: ScoreSettings,
    episodes: int = EPISODES,
    episode_bytes: int = EPISODE_BYTES,
) -> Path:
    """Write the page about these runs to `out` and return it. At most `episodes` full episodes are embedded, their
    markup at most `episode_bytes` long.

    Raises DataError if a path is no run.
    """
    runs = [load_run(path) for path in paths]
    scores = summarize(runs, settings)
    environment = _environment()
    events = group_events(runs)
    listed = events[:EVENTS]
    markup = embed_episodes(environment.get_template("episode.html.jinja"), listed, episodes, episode_bytes)
    script = (_HERE / "report.js").read_text()
    page = environment.get_template("report.html.jinja").render(
        runs=[_facts(run) for run in runs],
        rows=scores.rows,
        settings=settings,
        paired=scores.paired,
        score_plot=score_plot(scores),
        stage_figures=stage_figures(scores),
        calibration_figures=calibration_figures(scores),
        priced=any(row.usage.price for row in scores.rows if row.usage),
        tools=sorted({tool for row in scores.rows if row.usage for tool in row.usage.tool_calls}),
        events=[event_entry(group) for group in listed],
        events_left_out=len(events) - len(listed),
        episodes_total=sum(len(group.episodes) for group in events),
        episode_markup=markup,
        style=Markup((_HERE / "report.css").read_text()),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(page)
    part.replace(out)
    return out


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda share: "–" if share is None else f"{share:.1%}"
    environment.filters["score"] = lambda value: "–" if value is None else f"{value:.3f}"
    environment.filters["signed"] = lambda value: "–" if value is None else f"{value:+.3f}"
    environment.filters["shortened"] = shortened
    environment.filters["base"] = lambda path: Path(path).resolve().name
    environment.filters["style"] = mode_style
    return environment


def _facts(run: ScoredRun) -> RunFacts:
    folder = RunDirectory(run.path).quarantine
    files = sorted(f for f in folder.rglob("*.jsonl")) if folder.is_dir() else []
    conditions = run.conditions()
    return RunFacts(
        name=run.name,
        path=str(run.path),
        fingerprint=run.manifest.fingerprint,
        code=run.manifest.code,
        inputs=run.manifest.inputs,
        versions=run.manifest.versions,
        settings=dump_settings(run.settings),
        models=tuple(dict.fromkeys(model for model, _ in conditions)),
        modes=tuple(dict.fromkeys(mode for _, mode in conditions)),
        events=len(run.events),
        quarantined=tuple((f.name, sum(1 for line in f.open() if line.strip())) for f in files),
        scheduled=len(run.scheduled),
        recorded=len(run.records),
    )
