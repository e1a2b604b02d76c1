"""The pool's actor without Ray: its methods are called in any order, as Ray may deliver them."""

import asyncio

import pytest
from ray.exceptions import OwnerDiedError

from cluster.config import EngineSettings, SamplingSettings
from cluster.pool_actor import PoolActor
from cluster.weights import Weights


def pool():
    return PoolActor(Weights(path="/m", base="w"), EngineSettings(), SamplingSettings(), 0, 10.0, object)


@pytest.mark.ray
@pytest.mark.usefixtures("session_ends")
def test_a_call_that_arrives_after_its_caller_has_died_gets_no_engine():
    """Found by the simulator: it was given one, and nobody was left to give it back."""

    async def play():
        actor = pool()
        gone = asyncio.get_running_loop().create_future()
        gone.set_exception(OwnerDiedError("0" * 56, None, ""))
        await actor.watch("caller", [gone])
        return await actor.assign("t", "session", 10, None, "caller"), actor._fleet.waiting()

    assert asyncio.run(play()) == (None, frozenset())


def test_a_call_that_was_given_up_before_it_arrived_gets_no_engine():
    async def play():
        actor = pool()
        await actor.cancelled("t")
        return await actor.assign("t", "session", 10, None, "caller"), actor._fleet.waiting()

    assert asyncio.run(play()) == (None, frozenset())
