"""A real rollout, with a real encoder, whose driver is killed and whose directory is deleted: its mirror alone is enough to finish it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cluster.config import load_settings
from cluster.home import model_path
from retrieval.build import build_from_settings
from rollout.events.world import make_world, write_settings
from rollout.run import RunDirectory
from rollout.status import read_status

pytestmark = [pytest.mark.ray, pytest.mark.e2e]

REPOSITORY = Path(__file__).parents[2]


def test_a_rollout_is_finished_from_its_mirror(tmp_path):
    if not model_path("minilm").is_dir():
        pytest.skip("the MiniLM encoder is not prepared; run `make setup`")
    file = write_settings(tmp_path / "world", make_world(tmp_path / "world", 5, 12, 60, 4.0))
    overrides = {
        "index.directory": tmp_path / "index",
        "index.encoder": "minilm",
        "model.kind": "reader",
        "rollout.count": 2,
        "rollout.concurrency": 4,
        "run.directory": tmp_path / "run",
        "run.mirror": f"file://{tmp_path}/store",
        "run.mirror_lag_s": 1.0,
        "run.mirror_records": 10,
        "ray.cpus": 2,
    }
    values = [f"{name}={value}" for name, value in overrides.items()]
    build_from_settings(load_settings([file], values))
    options = ["--config", str(file), *(part for value in values for part in ("--set", value))]
    command = [sys.executable, "-m", "scripts", "rollout", *options]
    run, parts = RunDirectory(tmp_path / "run"), tmp_path / "store" / "parts"
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, stdout=log, stderr=log)
    try:
        while driver.poll() is None and len(list(parts.glob("*/*.committed"))) < 2:
            time.sleep(0.05)
        assert driver.poll() is None, (tmp_path / "log").read_text()
        report = read_status(str(run.path))
        assert report.driver
        assert report.status.mirror.address == f"file://{tmp_path}/store"
        assert report.status.metrics.startswith("http://")
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert "gone without a word" in read_status(str(run.path)).verdict
    with run.ledger() as ledger:
        scheduled, before = list(ledger.scheduled()), {r.key: r for r in ledger.records()}
    shipped = read_status(f"file://{tmp_path}/store").shipped
    shutil.rmtree(run.path)
    refused = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--resume restores it" in refused.stderr
    assert not run.exists

    subprocess.run([*command, "--resume"], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    with run.ledger() as ledger:
        changes, records = ledger.last_change(), list(ledger.records())
    assert Counter(r.key for r in records) == Counter(scheduled), "each scheduled forecast once"
    restored = {r.key for r in records if before.get(r.key) == r}
    assert len(restored) == shipped > 0, "what had been shipped is not made again"
    for where in (str(run.path), f"file://{tmp_path}/store"):
        report = read_status(where)
        assert report.verdict.startswith("complete")
        assert report.status.ended == "complete"
    assert report.shipped == changes
