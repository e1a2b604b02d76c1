"""Sessions and placement on a real Ray."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray

from cluster.config import RaySettings
from cluster.failures import InfrastructureError, SettingsError
from cluster.placement import place, release
from cluster.session import Session, require, start_session

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with start_session(RaySettings(cpus=2)) as started:
        yield started


def test_a_local_session_has_the_cores_it_was_given(session: Session) -> None:
    assert session.local
    assert sum(node["CPU"] for node in session.nodes()) == 2
    assert session.logs is not None
    assert session.logs.is_dir()


def test_a_second_session_of_the_process_leaves_the_first_open(session: Session) -> None:
    with start_session(RaySettings()) as second:
        assert second.address == session.address
    assert ray.is_initialized()


@pytest.mark.usefixtures("session")
def test_workers_see_the_environment_of_the_session() -> None:
    @ray.remote(num_cpus=0)
    def offline() -> str | None:
        import os

        return os.environ.get("HF_HUB_OFFLINE")

    assert ray.get(offline.remote()) == "1"


def test_a_demand_that_can_never_fit_is_refused_before_ray_is_asked(session: Session) -> None:
    with pytest.raises(SettingsError, match=r"the engine pool does not fit.*asked: 6 CPU.*missing: 4 CPU.*ray\.cpus"):
        require(session, [{"CPU": 3.0}, {"CPU": 3.0}], "the engine pool")
    require(session, [{"CPU": 1.0}, {"CPU": 1.0}], "the engine pool")


@pytest.mark.usefixtures("session")
def test_a_group_too_large_fails_at_its_deadline_and_names_the_missing_cores() -> None:
    with pytest.raises(InfrastructureError, match=r"placement-timeout.*within 1 s.*missing: 3 CPU"):
        asyncio.run(place([{"CPU": 2.0}, {"CPU": 3.0}], "PACK", timeout_s=1.0))


@pytest.mark.usefixtures("session")
def test_cores_held_by_other_work_are_named_and_a_failed_group_leaves_nothing_reserved() -> None:
    held, _ = asyncio.run(place([{"CPU": 2.0}], "PACK", timeout_s=30.0))
    with pytest.raises(InfrastructureError, match=r"free now: 0 CPU; missing: 1 CPU, held by other work"):
        asyncio.run(place([{"CPU": 1.0}], "PACK", timeout_s=1.0))
    release(held)
    release(asyncio.run(place([{"CPU": 1.0}, {"CPU": 1.0}], "PACK", timeout_s=30.0))[0])


@pytest.mark.usefixtures("session")
def test_a_node_that_is_to_be_avoided_is_not_used() -> None:
    (node,) = (n["NodeID"] for n in ray.nodes())
    with pytest.raises(InfrastructureError, match=r"the cluster has 0 CPU on 0 node"):
        asyncio.run(place([{"CPU": 1.0}], "PACK", timeout_s=1.0, avoid={node}))


def test_sizing_a_cluster_that_is_only_joined_is_refused() -> None:
    with pytest.raises(ValueError, match="address names a running cluster"):
        RaySettings(address="10.0.0.1:6379", cpus=2)


def test_a_cluster_that_does_not_answer_fails_with_its_address() -> None:
    # In a process of its own: this one is connected.
    code = """
from cluster.config import RaySettings
from cluster.session import start_session
start_session(RaySettings(address="127.0.0.1:1"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "cluster-not-reached: nothing answers at 127.0.0.1:1" in done.stderr
