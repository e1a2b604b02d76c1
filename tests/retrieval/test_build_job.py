"""An index built as a Ray Data job: the bytes of a build without Ray, whoever encodes and whatever kills it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from corpora import corpus

from cluster.config import Settings, load_settings
from cluster.failures import InfrastructureError, SettingsError
from cluster.home import model_path
from retrieval.build import BuildProgress, build_from_settings
from retrieval.library import Library
from retrieval.shard_files import stored_vectors
from retrieval.verify import verify_index

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[str]:
    context = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def articles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 articles of three months: six chunks."""
    file = tmp_path_factory.mktemp("articles") / "articles.jsonl"
    rows = [a.model_dump(mode="json", exclude={"day"}) for a in corpus(1500)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def overrides(articles: Path, index: Path, *more: str) -> list[str]:
    return [f"articles.path={articles}", f"index.directory={index}", "index.encoder=hashing", *more]


def settings_for(articles: Path, index: Path, *more: str) -> Settings:
    return load_settings(overrides=overrides(articles, index, *more))


def contents(index: Path) -> dict[str, bytes]:
    files = (p for p in index.rglob("*") if p.is_file() and p.name != ".lock")
    return {p.relative_to(index).as_posix(): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def clean(articles: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    index = tmp_path_factory.mktemp("clean")
    build_from_settings(settings_for(articles, index))
    return contents(index)


def test_the_job_gives_the_bytes_of_a_build_without_ray(
    articles: Path, clean: dict[str, bytes], tmp_path: Path
) -> None:
    seen: list[int] = []
    settings = settings_for(articles, tmp_path, "encoder.actors=2", "encoder.cpus=0.5")
    summary = build_from_settings(settings, lambda p: seen.append(p.done))
    assert contents(tmp_path) == clean
    assert (summary.articles, summary.kept) == (1500, 0)
    assert seen == sorted(seen)
    assert seen[-1] == 1500
    assert build_from_settings(settings).kept == summary.shards


def test_a_build_killed_at_several_moments_leaves_no_wrong_shard_and_ends_in_the_same_bytes(
    articles: Path, clean: dict[str, bytes], tmp_path: Path, session: str
) -> None:
    """A real `pastcast index build`, killed while it encodes, and when a month has just appeared."""
    options = [
        word for o in overrides(articles, tmp_path, "encoder.actors=1", "encoder.cpus=0.5") for word in ("--set", o)
    ]
    command = [sys.executable, "-m", "scripts", "index", "build", *options]
    environment = {**os.environ, "RAY_ADDRESS": session, "PYTHONPATH": str(ROOT)}
    months = sorted({name.split("/")[0] for name in clean if "/" in name})
    moments = [tmp_path / ".building-vectors" / f"{months[0]}.npy", tmp_path / months[0]]
    for moment in moments:
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as build:
            while not moment.exists():
                assert build.poll() is None, build.stderr and build.stderr.read()
                time.sleep(0.001)
            build.send_signal(signal.SIGKILL)
        assert not (tmp_path / "manifest.json").exists() or Library.open(tmp_path).load()
        for month in months:
            if (tmp_path / month).exists():
                assert {n: c for n, c in contents(tmp_path).items() if n.startswith(month)} == {
                    n: c for n, c in clean.items() if n.startswith(month)
                }
    assert (tmp_path / months[0]).exists()
    kept = build_from_settings(settings_for(articles, tmp_path, "encoder.actors=1", "encoder.cpus=0.5")).kept
    assert kept >= 1
    assert contents(tmp_path) == clean
    assert verify_index(tmp_path).faults == ()


def test_an_actor_that_dies_costs_nothing_but_time(tmp_path: Path) -> None:
    long = [a.model_copy(update={"text": " ".join(f"{a.id}w{i}" for i in range(300))}) for a in corpus(1500)]
    file = tmp_path / "articles.jsonl"
    file.write_text("".join(json.dumps(a.model_dump(mode="json", exclude={"day"})) + "\n" for a in long))
    killed: list[int] = []

    def kill(progress: BuildProgress) -> None:
        if not killed and 0 < progress.done < progress.total:
            workers = [
                p
                for p in psutil.Process().children(recursive=True)
                if "ray::MapWorker" in p.name() + "".join(p.cmdline())
            ]
            for worker in workers:
                worker.kill()
                killed.append(worker.pid)

    settings = settings_for(
        file, tmp_path / "job", "encoder.actors=1", "encoder.cpus=0.5", "index.text_characters=3000"
    )
    build_from_settings(settings, kill)
    assert killed
    build_from_settings(settings_for(file, tmp_path / "here", "index.text_characters=3000"))
    assert contents(tmp_path / "job") == contents(tmp_path / "here")


def test_an_encoder_that_an_actor_cannot_open_ends_the_build_with_its_reason(articles: Path, tmp_path: Path) -> None:
    wrong = {"kind": "remote", "dimension": 8, "server": {"base_url": "http://127.0.0.1:9/v1", "network_backoff_s": []}}
    settings = settings_for(articles, tmp_path, f"encoder={json.dumps(wrong)}", "index.encoder=m")
    with pytest.raises(InfrastructureError, match="endpoint-unreachable"):
        build_from_settings(settings)
    assert not (tmp_path / "manifest.json").exists()


def test_actors_that_would_never_fit_are_refused(articles: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"encoder\.cpus"):
        build_from_settings(settings_for(articles, tmp_path, "encoder.actors=1", "encoder.cpus=64"))


def test_a_sentence_encoder_gives_the_same_vectors_in_actors_up_to_their_last_bits(
    articles: Path, tmp_path: Path
) -> None:
    if not (model_path("minilm") / "modules.json").is_file():
        pytest.skip("the MiniLM encoder is not prepared on this machine; run `make setup`")
    rows = articles.read_text().splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text("".join(rows[:120]))
    for name, actors in (("job", 2), ("here", 0)):
        more = (f"encoder.actors={actors}", "index.encoder=minilm", "encoder.cpus=0.5")
        build_from_settings(settings_for(tmp_path / "some.jsonl", tmp_path / name, *more))
    job, here = (Library.open(tmp_path / name).manifest for name in ("job", "here"))
    assert [(s.month, s.source, s.encoder) for s in job.shards] == [(s.month, s.source, s.encoder) for s in here.shards]
    for shard in job.shards:
        ours, theirs = (stored_vectors(tmp_path / name, shard.month) for name in ("here", "job"))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
