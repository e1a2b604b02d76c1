"""The command line as a user meets it: every verb has an example that parses, and an error is a message."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.config import load_settings
from cluster.failures import Interrupted
from retrieval.build import build_from_settings
from rollout.events.world import make_world, write_settings
from rollout.progress import Bug, RunSummary
from scripts.cli import app, main, say_how_it_ended

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VERBS = (
    "doctor",
    "demo",
    "eval",
    "rollout",
    "status",
    "merge",
    "export",
    "score",
    "report",
    "world make",
    "index build",
    "index add",
    "index verify",
    "index stats",
    "index import",
    "index export",
    "train sft",
)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def commands() -> dict[str, typer.core.TyperCommand]:
    group = typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {n}": c for n, c in inner.items()} if inner else {name: command}
    return found


def test_help_lists_every_verb_with_an_example_that_parses():
    found = commands()
    assert set(found) == set(VERBS)
    for name, command in found.items():
        example = re.search(r"Example: pastcast (.+)$", command.help).group(1)
        words = shlex.split(example)
        assert " ".join(words).startswith(name)
        command.make_context(name, words[len(name.split()) :], resilient_parsing=False)
    top = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert top.count("Example: pastcast") == 12


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_that_a_page_shows_has_that_verb_and_those_options(page):
    text = page.read_text().replace("\\\n", " ")
    shown = [
        line.split("#")[0].strip()
        for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
    ]
    lines = [
        m.group(1)
        for line in shown
        if (m := re.search(r"(?:^|-- +)(?:pastcast|python -m scripts) (?!--help)(.+)$", line))
    ]
    found = commands()
    for line in lines:
        words = shlex.split(line)
        name = next(n for n in sorted(found, key=len, reverse=True) if " ".join(words).startswith(n))
        found[name].make_context(name, words[len(name.split()) :], resilient_parsing=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_in_running_text_has_that_verb_and_those_options(page):
    found = commands()
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for line in re.findall(r"`(?:\.venv/bin/)?pastcast ([^`]+)`", text):
        name = next((n for n in sorted(found, key=len, reverse=True) if line.startswith(n)), None)
        assert name, f"{page.name} names pastcast {line}"
        known = {option for param in found[name].params for option in (*param.opts, *param.secondary_opts)}
        assert set(re.findall(r"--[a-z-]+", line)) <= known, f"{page.name} names pastcast {line}"


def test_an_unknown_key_is_a_message_that_names_the_nearest():
    ended = run("rollout", "--set", "rollout.coutn=3")
    assert ended.returncode == 2
    assert "did you mean rollout.count?" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_missing_run_is_a_message(tmp_path):
    for verb in ("score", "report", "status"):
        ended = run(verb, tmp_path / "nothing")
        assert ended.returncode == 2
        assert "is not a run directory" in ended.stderr


def test_a_dry_run_says_how_large_the_run_is_and_writes_nothing(tmp_path):
    world = tmp_path / "world"
    settings = write_settings(world, make_world(world, 4, 6, 60, 4.0))
    common = ["--config", settings, "--set", "index.encoder=hashing", "--set", "model.kind=reader"]
    assert run("index", "build", *common).returncode == 0
    before = sorted(p for p in tmp_path.rglob("*"))
    ended = run("rollout", *common, "--set", f"run.directory={tmp_path / 'run'}", "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"(\d+) events, (\d+) episodes, (\d+) forecasts, roughly [\d,]+ tokens", ended.stdout)
    assert "reader_top_k" in ended.stdout
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_an_index_goes_out_as_faiss_shards_and_comes_in_again(tmp_path):
    world = tmp_path / "world"
    settings = write_settings(world, make_world(world, 4, 6, 60, 4.0))
    common = ["--config", settings, "--set", "index.encoder=hashing"]
    assert run("index", "build", *common).returncode == 0
    out = run("index", "export", "--out", tmp_path / "shards", "--format", "faiss", *common)
    assert (out.returncode, "monthly shards" in out.stdout) == (0, True), out.stderr
    again = ["index", "import", tmp_path / "shards", *common, "--set", f"index.directory={tmp_path / 'again'}"]
    into = run(*again, "--set", "index.kind=exact-bf16")
    assert into.returncode == 0, into.stderr
    assert re.search(r"\d+ articles of \d+ folders in \d+ monthly shards", into.stdout)
    refused = run(*again)
    assert (refused.returncode, "holds an index already" in refused.stderr) == (2, True)


def test_articles_are_added_to_an_index_that_is_verified_and_counted(tmp_path):
    world = tmp_path / "world"
    settings = write_settings(world, make_world(world, 4, 6, 60, 4.0))
    common = ["--config", settings, "--set", "index.encoder=hashing"]
    rows = (world / "articles.jsonl").read_text().splitlines()
    (world / "articles.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    build_from_settings(load_settings([settings], ["index.encoder=hashing"]))
    undated = json.dumps({**json.loads(rows[0]), "id": "undated", "published": None})
    (tmp_path / "news.jsonl").write_text("\n".join([rows[0], rows[-1], undated]) + "\n")
    added = run("index", "add", tmp_path / "news.jsonl", *common)
    assert (added.returncode, "1 articles added in 1 months, 1 were there already" in added.stdout) == (0, True), added
    stats = run("index", "stats", "--json", *common)
    counted = json.loads(stats.stdout)
    assert (counted["articles"], counted["without_date"]) == (len(rows), 1)
    assert "1 of" in CliRunner().invoke(app, ["index", "stats", *map(str, common)]).output
    sound = run("index", "verify", *common)
    assert (sound.returncode, "nothing is wrong" in sound.stdout) == (0, True)
    victim = next((world / "index").glob("*/vectors.npy"))
    victim.write_bytes(victim.read_bytes()[:-1])
    damaged = run("index", "verify", *common)
    assert damaged.returncode == 1
    assert str(victim) in damaged.stdout


def test_a_retry_without_resume_is_refused():
    ended = run("rollout", "--retry", "model")
    assert ended.returncode == 2
    assert "--retry goes with --resume" in ended.stderr


@pytest.mark.parametrize(
    ("ended", "signal", "bugs", "status", "said"),
    [
        ("complete", None, 0, 0, "3 of 9 forecasts"),
        ("complete", None, 2, 1, "key-error"),
        ("stopped", 15, 0, 143, "asked to stop; go on with --resume"),
        ("stopped", 2, 0, 130, "asked to stop"),
        ("max-cost", None, 0, 1, "raise run.max_cost ($4.0); go on with --resume"),
        ("data-failures", None, 0, 1, "rollout.data_failures (0)"),
        ("bugs", None, 30, 1, "rollout.bugs (20)"),
    ],
)
def test_how_a_run_ended_is_said_and_is_its_exit_status(ended, signal, bugs, status, said, capsys):
    traceback = 'Traceback: File "x.py"\nKeyError: "[/red]"'
    summary = RunSummary(
        scheduled=9,
        recorded=3,
        recorded_now=1,
        failures={"key-error": bugs} if bugs else {},
        retried=0,
        reopened=0,
        ended=ended,
        signal=signal,
        lost=0,
        bugs=bugs,
        tracebacks=(Bug(reason="key-error", traceback=traceback, count=bugs),) if bugs else (),
        seconds=1.0,
        output_tokens=5,
        price=4.5,
    )
    assert say_how_it_ended(summary, load_settings([], ["run.max_cost=4"])) == status
    out, err = capsys.readouterr()
    assert said in " ".join((out + err).split())
    assert (traceback in err) == bool(bugs)


def test_an_evaluation_that_a_signal_ended_has_that_signals_status(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise Interrupted("runs/base holds 3 of 9 forecasts; run the same command again", 2)

    monkeypatch.setattr("eval.evaluate.evaluate_checkpoint", interrupted)
    monkeypatch.setattr("sys.argv", ["pastcast", "eval", "--checkpoint", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert "stopped: runs/base holds 3 of 9 forecasts; run the same command again" in " ".join(
        capsys.readouterr().err.split()
    )
