"""A whole run against an endpoint over HTTP, through the command line: with faults, two keys, a price and a bound on cost."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.events.world import make_world, write_settings
from rollout.run import RunDirectory
from tests.cluster.endpoint_server import USAGE, Asked, EndpointServer, fail, say

pytestmark = [pytest.mark.ray, pytest.mark.e2e]

REPO = Path(__file__).resolve().parents[2]
GOOD_KEY, BAD_KEY = "sk-good-key-of-this-test", "sk-bad-key-of-this-test"
PRICE = (60 * 3 + 40 * 0.3 + 10 * 15) / 1e6
"""Of one answer with the server's fixed token counts."""


def pastcast(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts", *map(str, arguments)]
    environment = os.environ | {"TEST_ENDPOINT_KEYS": f"{BAD_KEY},{GOOD_KEY}", "COLUMNS": "200"}
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, env=environment)


async def forecaster(asked: Asked):
    """Searches once, computes once, then answers with the first option ahead; now and then it fails as servers do."""
    if asked.key == BAD_KEY:
        return fail(401, "no such key")
    if asked.number % 11 == 3:
        return fail(429, "slow down", {"Retry-After": "0"})
    if asked.number % 11 == 7:
        return fail(500, "oops")
    body = asked.body
    question = next((m["content"] for m in body["messages"] if m["role"] == "user"), "")
    options = re.search(r"Options: \[(.+)\]", question)
    if options is None:
        return await say(asked, "ready")
    results = [m for m in body["messages"] if m["role"] == "tool"]
    if body.get("tool_choice") == "auto" and len(results) < 2:
        calls = [("search", {"query": question.splitlines()[0]}), ("python", {"code": "print(1 / 3)"})]
        name, arguments = calls[len(results)]
        return await say(
            asked, "", [{"name": name, "arguments": json.dumps(arguments)}], reasoning_content="Let me see."
        )
    labels = options.group(1).split(", ")
    rest = dict.fromkeys(labels[1:], 0.4 / (len(labels) - 1))
    answer = json.dumps({labels[0]: 0.6} | rest)
    notebook = json.dumps({"assessment": {"p": {labels[0]: 0.6}}, "evidence_ledger": [{"claim": "it was reported"}]})
    return await say(asked, f"<belief_notebook>{notebook}</belief_notebook>\n<answer>{answer}</answer>")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("endpoint")
    settings = write_settings(folder / "world", make_world(folder / "world", 5, 10, 60, 4.0))
    built = pastcast("index", "build", "--config", settings, "--set", "index.encoder=hashing")
    assert built.returncode == 0, built.stderr
    return folder, settings


@pytest.fixture(scope="module")
def server():
    with EndpointServer(forecaster) as server:
        yield server


def options(world: tuple[Path, Path], server: EndpointServer, run: str) -> list[object]:
    folder, settings = world
    values = {
        "index.encoder": "hashing",
        "run.directory": folder / run,
        "model.kind": "endpoint",
        "endpoint.base_url": server.url,
        "endpoint.model": "vendor/m-1",
        "endpoint.key_env": "[TEST_ENDPOINT_KEYS]",
        "endpoint.price": "{input: 3, cached: 0.3, output: 15}",
        "endpoint.parallel": 8,
        "endpoint.server_backoff_s": "[0.1, 0.1, 0.1, 0.1]",
        "endpoint.rate_limit_backoff_s": "[0.1, 0.1, 0.1, 0.1]",
        "events.limit": 3,
        "events.schedule": "{maximum: 3}",
        "rollout.prompt": "compact",
        "rollout.workers": 2,
        "rollout.concurrency": 4,
        "rollout.budget.preset": "oracleproto",
        "ray.cpus": 2,
    }
    return ["--config", settings, *(part for k, v in values.items() for part in ("--set", f"{k}={v}"))]


def test_a_run_stops_at_its_cost_goes_on_with_more_and_leaves_no_key_anywhere(world, server):
    common = options(world, server, "whole")
    planned = pastcast("rollout", *common, "--dry-run")
    assert re.search(r"roughly [\d,]+ tokens for \$\d+\.\d\d;", planned.stdout), planned.stdout + planned.stderr
    assert server.asked == []

    run = RunDirectory(world[0] / "whole")
    bound = 8 * PRICE
    stopped = pastcast("rollout", *common, "--max-cost", f"{bound:.6f}")
    assert stopped.returncode == 1, stopped.stdout + stopped.stderr
    assert "run.max_cost" in stopped.stdout
    with run.ledger() as ledger:
        first = list(ledger.records())
    assert 0 < len(first) < 27
    # No step begins beyond the bound; the eight that may be in flight finish, with at most three calls each.
    assert bound <= sum(r.usage.price for r in first) <= bound + 8 * 3 * PRICE

    ended = pastcast("rollout", *common, "--max-cost", "1000", "--resume")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with run.ledger() as ledger:
        records, scheduled = list(ledger.records()), list(ledger.scheduled())
        trajectories = [ledger.trajectory(r.key) for r in records]
    assert len(records) == len(scheduled) == 27
    assert {r.key: r for r in records}.items() >= {r.key: r for r in first}.items()
    assert all(r.failure is None for r in records)
    assert {r.weights for r in records} == {f"vendor/m-1@{server.url} served=served-1 system_fingerprint=fp_7"}
    assert {r.key.model for r in records} == {"vendor/m-1"}
    assert run.manifest().inputs["weights"] == f"vendor/m-1@{server.url}"

    calls = sum(r.usage.model_calls for r in records)
    assert calls == sum(3 if r.key.mode != "no-tools" else 1 for r in records)
    assert sum(r.usage.price for r in records) == pytest.approx(calls * PRICE)
    assert all(r.usage.input_tokens == r.usage.model_calls * USAGE["prompt_tokens"] for r in records)
    assert all(t.tokenizer == "" and not t.token_ids() for t in trajectories)
    assert all(t.turns[0].reasoning for r, t in zip(records, trajectories, strict=True) if r.key.mode != "no-tools")
    # Nothing was shown from after the cutoff, and a refused key was tried only by calls that had begun together.
    assert all(a.day <= r.key.date for r, t in zip(records, trajectories, strict=True) for a in t.shown())
    assert sum(t.turns[0].results[0].shown != () for t in trajectories if t.turns[0].results) > 0
    assert 2 <= [a.key for a in server.asked].count(BAD_KEY) <= 4

    scored = pastcast("score", run.path)
    assert "Cost of endpoints" in scored.stdout
    assert f"{sum(r.usage.price for r in records if r.key.mode == 'memory-on'):.4f}" in scored.stdout
    said = stopped.stdout + stopped.stderr + ended.stdout + ended.stderr + scored.stdout
    files = [f.read_bytes() for f in run.path.rglob("*") if f.is_file()]
    for key in (GOOD_KEY, BAD_KEY):
        assert key not in said
        assert not any(key.encode() in content for content in files)


def test_a_missing_key_is_said_before_anything_is_laid(world, server):
    common = [*options(world, server, "missing"), "--set", "endpoint.key_env=[TEST_OTHER_KEY]"]
    missing = pastcast("rollout", *common)
    assert missing.returncode == 2
    assert "TEST_OTHER_KEY" in missing.stderr
    assert "Traceback" not in missing.stderr
    assert not RunDirectory(world[0] / "missing").exists


def test_a_server_that_does_not_know_the_model_ends_the_run_before_any_forecast(world):
    async def unknown(asked: Asked):
        refused = fail(401, f"no such key: {asked.key}")
        return refused if asked.key == BAD_KEY else fail(404, "The model vendor/m-1 does not exist")

    with EndpointServer(unknown) as server:
        ended = pastcast("rollout", *options(world, server, "unknown"))
        assert len(server.asked) <= 2
    assert ended.returncode == 2
    assert "The model vendor/m-1 does not exist" in " ".join(ended.stderr.split())
    assert BAD_KEY not in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr
    with RunDirectory(world[0] / "unknown").ledger() as ledger:
        assert not list(ledger.records())
