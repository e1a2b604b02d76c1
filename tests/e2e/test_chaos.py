"""A run on three nodes, while engines, shard actors, workers, a node and the driver itself are killed at random moments.

Real engines, real shards, real processes. `make chaos` runs the short form; PASTCAST_CHAOS_KILLS and PASTCAST_CHAOS_SEED ask for
more of it.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.config import dump_settings, load_settings
from cluster.home import model_path
from retrieval.build import build_from_settings
from rollout.events.world import make_world, write_settings
from rollout.run import RunDirectory

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.vllm, pytest.mark.e2e]

REPO = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("PASTCAST_CHAOS_SEED", "20261130"))
KILLS = int(os.environ.get("PASTCAST_CHAOS_KILLS", "3"))
"""Of actors, of every kind before one is chosen twice; a node and the driver are killed besides, once each."""
STEPS = 100
"""At least so many forecasts."""
PATIENCE_SECONDS = 900.0
"""How long the whole may take before the run counts as stuck; nothing is said about how long it does take."""

ACTORS = {"engine": "EngineActor", "shards": "ShardServer", "worker": "CallingWorker"}


@pytest.fixture
def cluster():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=2)
    made.add_node(num_cpus=2)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def settings(tmp_path, cluster):
    if not model_path("smollm2-135m").is_dir():
        pytest.skip("the model is not prepared; run `make setup`")
    world = make_world(tmp_path / "world", seed=5, events=11, days=60, articles_per_day=2)
    overrides = [
        f"run.directory={tmp_path / 'run'}",
        f"ray.address={cluster.address}",
        "index.encoder=hashing",
        "rollout.splits=[train, eval]",
        "rollout.prompt=compact",
        "rollout.workers=2",
        "rollout.concurrency=16",
        "rollout.modes=[memory-free, memory-on]",
        "rollout.check_share=1.0",
        "rollout.budget.iterations=1",
        "sampling.max_tokens=12",
        "engine.replicas=2",
        "engine.minimum=1",
        "engine.restarts=20",
        "retrieval.restarts=20",
    ]
    file = write_settings(tmp_path / "world", world)
    chosen = load_settings([file], overrides)
    build_from_settings(chosen, lambda _: None)
    (tmp_path / "settings.yaml").write_text(dump_settings(chosen))
    return tmp_path


def start(folder):
    command = [sys.executable, "-m", "tests.e2e.chaos_run", folder / "settings.yaml", folder / "said.json"]
    log = (folder / "driver.log").open("ab")
    return subprocess.Popen(list(map(str, command)), cwd=REPO, start_new_session=True, stderr=log, stdout=log)


def recorded(run):
    if not run.exists:
        return 0
    with run.ledger() as ledger:
        return ledger.counts()[1]


def workers(cluster):
    """Everything that the cluster's raylets have started, and what that has started."""
    found = []
    for node in cluster.list_all_nodes():
        for raylet in node.all_processes["raylet"]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(raylet.process.pid).children(recursive=True)
    return found


def alive(cluster, kind):
    """Process ids of the cluster's living actors of a kind, in a stable order."""
    found = []
    for process in workers(cluster):
        with contextlib.suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(f"ray::{ACTORS[kind]}"):
                found.append(process.pid)
    return sorted(found)


class Chaos:
    """Kills at seeded moments, and remembers what it killed."""

    def __init__(self, folder, cluster):
        self.folder, self.cluster = folder, cluster
        self.run = RunDirectory(folder / "run")
        self.chance = random.Random(SEED)
        self.killed = Counter()
        self.fallen = False
        """Whether a node has been killed that may have been the driver's."""
        self.seen = set()
        """Processes of the cluster and of the drivers."""
        self.process = start(folder)
        self.deadline = time.monotonic() + PATIENCE_SECONDS

    def wait_for(self, count):
        """Until so many forecasts are recorded."""
        while (now := recorded(self.run)) < count:
            self.tend(f"stuck at {now} of {count}")

    def tend(self, what):
        """Let half a second pass; `what` is said if that was too much. The driver is started again if it fell with a node."""
        if self.process.poll() is not None and self.process.returncode != 0:
            # A driver ends with the node that it joined the cluster by.
            assert self.fallen, f"the run ended by itself ({self.process.returncode}): {self.log()}"
            self.killed["driver, by its node"] += 1
            self.fallen = False
            self.process = start(self.folder)
        assert time.monotonic() < self.deadline, f"{what} after {dict(self.killed)}: {self.log()}"
        with contextlib.suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.process.pid)
            self.seen |= {driver, *driver.children(recursive=True)}
        self.seen.update(workers(self.cluster))
        time.sleep(0.5)

    def kill_an_actor(self):
        while not (living := {kind: pids for kind in ACTORS if (pids := alive(self.cluster, kind))}):
            # A driver that has just been started has none yet.
            self.tend("no actor comes up")
        kind = self.chance.choice(sorted(set(living) - set(self.killed)) or sorted(living))
        victim = self.chance.choice(living[kind])
        os.kill(victim, signal.SIGKILL)
        self.killed[kind] += 1

    def kill_a_node(self):
        nodes = self.cluster.worker_nodes
        victim = self.chance.choice(sorted(nodes, key=lambda n: n.node_id))
        self.cluster.remove_node(victim, allow_graceful=False)
        self.killed["node"] += 1
        self.fallen = True
        self.cluster.add_node(num_cpus=2)

    def kill_the_driver(self):
        self.tend("no driver to kill")
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.killed["driver"] += 1
        self.fallen = False
        self.process = start(self.folder)

    def log(self):
        return (self.folder / "driver.log").read_text()[-4000:]


def test_what_dies_at_random_costs_no_forecast_and_leaves_nothing_behind(settings, cluster):
    chaos = Chaos(settings, cluster)
    chaos.wait_for(1)
    with chaos.run.ledger() as ledger:
        scheduled = list(ledger.scheduled())
    assert len(scheduled) >= STEPS
    deeds = [chaos.kill_an_actor] * KILLS + [chaos.kill_a_node, chaos.kill_the_driver]
    chaos.chance.shuffle(deeds)
    # Spread over the run, each at a moment that the seed decides.
    moments = sorted(chaos.chance.sample(range(2, int(len(scheduled) * 0.8)), len(deeds)))
    for moment, deed in zip(moments, deeds, strict=True):
        chaos.wait_for(moment)
        time.sleep(chaos.chance.uniform(0, 2))
        deed()
    chaos.wait_for(len(scheduled))
    assert chaos.process.wait(timeout=PATIENCE_SECONDS) == 0, chaos.log()
    print(f"killed {dict(chaos.killed)} over {len(scheduled)} forecasts")
    said = json.loads((settings / "said.json").read_text())
    with chaos.run.ledger() as ledger:
        records = list(ledger.records())
        trajectories = {r.key: ledger.trajectory(r.key) for r in records}
    assert Counter(r.key for r in records) == Counter(scheduled), "each scheduled forecast once"
    lost = [r.failure for r in records if r.failure is not None and r.failure.kind != "model"]
    assert not lost, "what dies is repeated elsewhere, and no failure of ours is a forecast"
    for record in records:
        _consistent(record, trajectories[record.key])
    assert any(t.shown() for t in trajectories.values()), "nothing was searched, so no shard was asked"
    assert said["unfinished"]
    assert not any(n for sitting in said["unfinished"] for n in sitting), "orphaned requests"
    ray.shutdown()
    cluster.shutdown()
    assert {p.pid for p in chaos.seen} > {chaos.process.pid}
    _gone(chaos.seen)


def _consistent(record, trajectory):
    """The transcript is whole: one mask entry for each id, one log-probability for each sampled one, one set of weights."""
    ids, mask = trajectory.token_ids(), trajectory.mask()
    assert len(ids) == len(mask)
    assert sum(mask) == sum(len(t.logprobs) for t in trajectory.turns) == record.usage.output_tokens
    assert {t.weights for t in trajectory.turns} == {record.weights}
    assert all(t.prompt_ids and t.sampled_ids for t in trajectory.turns)


def _gone(seen):
    """No process that the cluster or the driver ever had is left. (One that nobody but init can reap is none of ours.)"""
    deadline = time.monotonic() + 60
    while left := [p for p in seen if _lives(p)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def _lives(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and not (process.status() == psutil.STATUS_ZOMBIE and process.ppid() == 1)
    return False
