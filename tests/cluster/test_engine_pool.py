"""The pool's bookkeeping without Ray: what is said of a replica that is lost for good."""

import asyncio

import pytest

from cluster import pool as module
from cluster.config import EngineSettings, SamplingSettings
from cluster.failures import InfrastructureError
from cluster.pool import PoolActor, engine_seed
from cluster.weights import Weights


class DeadHandle:
    """Stands for a replica that was running and is gone."""


@pytest.fixture
def pool(monkeypatch):
    killed = []
    monkeypatch.setattr(module.ray, "kill", killed.append)
    weights = Weights(path="model", base="weights")
    made = PoolActor(weights, EngineSettings(replicas=1, restarts=0), SamplingSettings(), 0, None)
    made._handles[0] = DeadHandle()
    made._incarnations[0] = 1
    made._router.admit(0)
    return made


def test_many_reports_of_one_death_end_in_a_refusal_and_not_in_a_wait(pool):
    async def story():
        assert (await pool.assign("s", 10)).engine == 0
        for _ in range(3):
            await pool.lost(0, 1, "gone")
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            with pytest.raises(InfrastructureError, match="no-engine") as caught:
                await pool.assign("s", 10)
        assert caught.value.fatal

    asyncio.run(story())


def test_a_report_about_an_earlier_incarnation_is_out_of_date(pool):
    async def story():
        await pool.lost(0, 0, "late")
        assert (await pool.assign("s", 10)).engine == 0

    asyncio.run(story())


def test_every_start_of_every_replica_has_a_seed_of_its_own():
    seeds = {engine_seed(7, engine, start) for engine in range(30) for start in range(30)}
    assert len(seeds) == 900
