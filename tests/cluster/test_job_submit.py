"""A rollout submitted with `ray job submit`, as docs/cluster.md shows it, to a cluster that this test starts and ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.config import Settings, dump_settings, load_settings
from retrieval.build import build_from_settings
from rollout.events.world import make_world
from rollout.run import RunDirectory

pytestmark = [pytest.mark.ray, pytest.mark.e2e]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {
    # Tokens would be written to the user's home; on loopback nobody else is to be kept out.
    "RAY_AUTH_MODE": "disabled",
    "PATH": f"{BIN}:{os.environ['PATH']}",
}


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds; found all at once, so that none comes twice."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


@dataclass(frozen=True)
class Cluster:
    """A running Ray cluster: its dashboard's address and what `ray start` printed so far."""

    dashboard: str
    log: Path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Ray cluster on loopback, with ports and a temporary folder of its own."""
    control, web, client, agent, agent_grpc, runtime_env, metrics = free_ports(7)
    # Not pytest's folder: a socket's path may have 107 characters only.
    temporary = Path(tempfile.mkdtemp(prefix="pastcast-ray-", dir="/tmp"))
    command = [str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=2"]
    command += [f"--port={control}", f"--dashboard-port={web}", f"--ray-client-server-port={client}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"]
    command += [f"--runtime-env-agent-port={runtime_env}", f"--metrics-export-port={metrics}"]
    # Ray's default range of worker ports is the same for every cluster of a machine.
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    command += [f"--temp-dir={temporary}", "--disable-usage-stats", "--object-store-memory=200000000"]
    log = temporary / "start.log"
    with log.open("wb") as output:
        head = subprocess.Popen(
            command, stdout=output, stderr=output, env=ENVIRONMENT, cwd=temporary, start_new_session=True
        )
    address = f"http://127.0.0.1:{web}"
    try:
        wait_until_it_answers(f"{address}/api/jobs/", head, log)
        yield Cluster(address, log)
    finally:
        # `ray stop` would end every Ray process of the machine; this one ends those that it started.
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(temporary, ignore_errors=True)


def wait_until_it_answers(url: str, head: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert head.poll() is None, f"the cluster ended: {log.read_text()[-2000:]}"
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"no dashboard at {url}: {log.read_text()[-2000:]}")


def submit(cluster: Cluster, *entrypoint: str, source: Path = ROOT) -> str:
    """Submits a job from a folder of the source, by default the repository, waits for it, and returns what it printed."""
    runtime_env = ROOT / "cluster" / "deploy" / "runtime-env.yaml"
    command = [str(BIN / "ray"), "job", "submit", "--address", cluster.dashboard, "--runtime-env", str(runtime_env)]
    done = subprocess.run(
        [*command, "--working-dir", ".", "--", *entrypoint],
        cwd=source,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:] + cluster.log.read_text()[-2000:]
    return output


PROBE = """
import os, ray, cluster
from cluster.config import RaySettings
from cluster.session import start_session

@ray.remote(num_cpus=0)
def code_of_a_worker():
    return cluster.__file__

session = start_session(RaySettings())
print("joined", not session.local)
print("same code", ray.get(code_of_a_worker.remote()) == cluster.__file__ == os.path.abspath("cluster/__init__.py"))
print("uploaded", not {".git", ".venv", "tests"} & set(os.listdir(".")), os.path.isfile("configs/summer2024.yaml"))
"""


def test_a_job_joins_its_cluster_and_all_its_processes_run_the_uploaded_code(cluster: Cluster) -> None:
    output = submit(cluster, "python", "-c", PROBE)
    assert "joined True" in output
    assert "same code True" in output
    assert "uploaded True True" in output


def tiny_world(folder: Path) -> Settings:
    """A world and its index in `folder`, and settings that name them by absolute paths: data is not uploaded."""
    make_world(folder / "world", seed=5, events=6, days=60, articles_per_day=4)
    settings = load_settings(
        [],
        [
            f"run.directory={folder / 'run'}",
            f"events.path={folder / 'world' / 'events.jsonl'}",
            f"events.floor={folder / 'world' / 'floor.jsonl'}",
            f"articles.path={folder / 'world' / 'articles.jsonl'}",
            f"index.directory={folder / 'index'}",
            "index.encoder=hashing",
            "rollout.splits=[train, eval]",
        ],
    )
    build_from_settings(settings)
    return settings


def test_a_submitted_rollout_leaves_every_scheduled_forecast_in_the_ledger(cluster: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(dump_settings(tiny_world(tmp_path)))
    # A copy: a run goes on only with the code that began it, and somebody may be editing the repository.
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "runs", "demo"))
    rollout = ("python", "-m", "scripts", "rollout", "--config", str(config), "--resume", "--set", "model.kind=reader")
    submit(cluster, *rollout, source=source)
    with RunDirectory(tmp_path / "run").ledger() as ledger:
        scheduled, records = set(ledger.scheduled()), {r.key: r for r in ledger.records()}
    assert scheduled
    assert set(records) == scheduled
    assert [r.failure for r in records.values() if r.failure is not None] == []
    # Submitted again it goes on where it stopped: nothing is left to do, and nothing is drawn again.
    submit(cluster, *rollout, source=source)
    with RunDirectory(tmp_path / "run").ledger() as ledger:
        assert {r.key: r for r in ledger.records()} == records
