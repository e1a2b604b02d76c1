"""The pool on a real cluster of several nodes, with small engines: what is killed, joins or leaves costs its calls and nothing else.

The tests share one cluster and run in order: each leaves a pool of as many engines as it found.
"""

import asyncio
import contextlib
import os
import time

import pytest
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from cluster import pool as pool_module
from cluster.config import EngineSettings, SamplingSettings
from cluster.failures import InfrastructureError
from cluster.pool import EngineClient, EnginePool
from cluster.pool_actor import PoolActor
from cluster.weights import Weights
from tests.cluster.echo_engine import EchoEngine

pytestmark = pytest.mark.ray

PATIENCE_SECONDS = 60.0
"""How long anything may take that must come; nothing is said about how long it does take."""


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return Weights(path=str(tmp_path_factory.mktemp("model")), base="base")


def open_pool(weights, timeout_s=60.0, **settings):
    chosen = EngineSettings(**{"replicas": 2, "cpus": 1.0, "restarts": 5} | settings)
    return EnginePool(weights, chosen, SamplingSettings(), 7, timeout_s, EchoEngine)


@pytest.fixture(scope="module")
def pool(cluster, weights):
    with open_pool(weights, maximum=3) as made:
        yield made


def eventually(what, pool):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what(view := pool.view()):
        assert time.monotonic() < deadline, view
        time.sleep(0.2)
    return view


def serve(number):
    """Exactly so many engines exist and serve."""
    return lambda view: len(view.engines) == number and all(e.state == "HEALTHY" for e in view.engines)


def ask(pool, session, tokens=1, **more):
    return asyncio.run(pool.client().generate(session, [1, 2, 3], tokens, [], **more))


def engine_of(name):
    return int(name.removeprefix("engine-").split(".")[0])


def test_calls_are_answered_and_sessions_stay(pool):
    async def story():
        client = pool.client()
        names = [await client.generate(f"s{i % 4}", [i], 1, []) for i in range(8)]
        return [name for output, name in names]

    first = asyncio.run(story())
    assert first[:4] == first[4:]
    assert len(set(first)) == 2
    view = eventually(lambda v: all(e.outstanding_tokens == 0 for e in v.engines), pool)
    assert view.paused == ""
    assert view.limit > 0
    assert sum(e.sessions for e in view.engines) == 4
    assert len({e.node for e in view.engines}) == 2


def test_a_cancelled_call_is_aborted_at_the_engine(pool):
    async def story():
        call = asyncio.create_task(pool.client().generate("cancelled", [1], 100_000, []))
        while not sum(await asyncio.gather(*(h.unfinished.remote() for h in pool.handles().values()))):
            await asyncio.sleep(0.1)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        while sum(await asyncio.gather(*(h.unfinished.remote() for h in pool.handles().values()))):
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(story(), PATIENCE_SECONDS))
    eventually(lambda v: all(e.outstanding_tokens == 0 for e in v.engines), pool)


def test_a_killed_caller_leaves_no_request_and_no_load(pool):
    @ray.remote(num_cpus=0)
    class Worker:
        async def work(self, client):
            await asyncio.gather(*(client.generate(f"w{i}", [1], 100_000, []) for i in range(4)))

    worker = Worker.remote()
    worker.work.remote(pool.client())
    eventually(lambda v: sum(e.outstanding_tokens for e in v.engines) == 4 * 100_001, pool)
    ray.kill(worker)
    eventually(lambda v: all(e.outstanding_tokens == 0 for e in v.engines), pool)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sum(ray.get([h.unfinished.remote() for h in pool.handles().values()])):
        assert time.monotonic() < deadline


def test_a_killed_engine_costs_its_calls_and_is_started_again(pool):
    home = engine_of(ask(pool, "s")[1])
    ray.kill(pool.handles()[home])
    with pytest.raises(InfrastructureError, match="engine-lost"):
        ask(pool, "s")
    assert engine_of(ask(pool, "s")[1]) != home
    view = eventually(serve(2), pool)
    assert {e.engine: e.restarts for e in view.engines}[home] == 1


def test_a_node_that_joins_is_used(pool, cluster):
    cluster.add_node(num_cpus=1)
    view = eventually(serve(3), pool)
    assert len({e.node for e in view.engines}) == 3


def test_a_node_that_is_drained_is_emptied_first_and_its_calls_finish(pool, cluster):
    async def story():
        client = pool.client()
        long = asyncio.create_task(client.generate("long", [7], 300, []))
        while not (loaded := [e for e in (await client.view()).engines if e.outstanding_tokens]):
            await asyncio.sleep(0.1)
        engine = loaded[0]
        accepted, why = GcsClient(address=cluster.address).drain_node(
            engine.node, autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "test", 0
        )
        assert accepted, why
        while {e.engine: e.state for e in (await client.view()).engines}.get(engine.engine) == "HEALTHY":
            await asyncio.sleep(0.1)
        elsewhere = engine_of((await client.generate("long", [7], 1, []))[1])
        assert elsewhere != engine.engine, "a session's next call leaves an engine that is being emptied"
        output, name = await long
        assert (output.token_ids, engine_of(name)) == ((7,), engine.engine)
        return engine

    gone = asyncio.run(asyncio.wait_for(story(), PATIENCE_SECONDS))
    view = eventually(lambda v: serve(2)(v) and gone.engine not in {e.engine for e in v.engines}, pool)
    assert gone.node not in {e.node for e in view.engines}
    drained = next(n for n in cluster.worker_nodes if n.node_id == gone.node)
    cluster.remove_node(drained)


def test_a_lost_node_costs_its_engine_and_no_restart(pool, cluster):
    restarts = sum(e.restarts for e in pool.view().engines)
    home = engine_of(ask(pool, "s")[1])
    node = {e.engine: e.node for e in pool.view().engines}[home]
    cluster.remove_node(next(n for n in cluster.worker_nodes if n.node_id == node), allow_graceful=False)
    deadline = time.monotonic() + PATIENCE_SECONDS
    served = home
    while served == home:
        # Its process outlives the node's by a moment, and may still answer.
        with contextlib.suppress(InfrastructureError):
            served = engine_of(ask(pool, "s")[1])
        assert time.monotonic() < deadline
    cluster.add_node(num_cpus=1)
    view = eventually(lambda v: serve(2)(v) and node not in {e.node for e in v.engines}, pool)
    assert sum(e.restarts for e in view.engines) <= restarts


def test_a_call_that_comes_while_no_engine_serves_waits_for_one(pool):
    async def story():
        client = pool.client()
        for handle in pool.handles().values():
            ray.kill(handle)
        while True:
            try:
                return await client.generate("patient", [1], 1, [])
            except InfrastructureError as error:
                if error.reason != "engine-lost":
                    raise

    restarts = sum(e.restarts for e in pool.view().engines)
    asyncio.run(asyncio.wait_for(story(), PATIENCE_SECONDS))
    # The other one's death is found by its next probe.
    eventually(lambda v: serve(2)(v) and sum(e.restarts for e in v.engines) == restarts + 2, pool)


def test_an_adapter_serves_by_name_and_a_bad_one_is_refused_without_harm(pool, tmp_path):
    pool.load_adapter("tuned", str(tmp_path))
    assert ask(pool, "a", adapter="tuned")[0].weights == "base+tuned"
    assert ask(pool, "b")[0].weights == "base"
    with pytest.raises(InfrastructureError, match=r"adapter-refused: .*is not an adapter folder"):
        pool.load_adapter("bad", str(tmp_path / "nothing"))
    with pytest.raises(InfrastructureError, match="adapter-unknown"):
        ask(pool, "c", adapter="never")
    eventually(serve(2), pool)


@pytest.mark.parametrize("together", [True, False])
def test_a_swapped_checkpoint_serves_and_a_broken_one_is_taken_back(pool, tmp_path, together):
    async def run_during_the_swap():
        client = pool.client()
        call = asyncio.create_task(client.generate("running", [1], 100, []))
        while not any(e.outstanding_tokens for e in (await client.view()).engines):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(pool.swap, Weights(path=str(tmp_path), base=f"new-{together}"), together)
        return (await call)[0].weights

    eventually(serve(2), pool)
    before = ask(pool, "s")[0].weights
    assert asyncio.run(run_during_the_swap()) == before, "what runs is finished by the weights that began it"
    assert {ask(pool, f"s{i}")[0].weights for i in range(4)} == {f"new-{together}"}
    for fault, said in (("unreadable", r"\S*model\.safetensors is not what its name says"), ("broken", ".*is broken")):
        (tmp_path / fault).touch()
        with pytest.raises(InfrastructureError, match=f"^reload-failed: {said}"):
            pool.swap(Weights(path=str(tmp_path), base="other"), together)
    assert {ask(pool, f"s{i}")[0].weights for i in range(4)} == {f"new-{together}"}
    eventually(serve(2), pool)


@pytest.mark.usefixtures("cluster")
def test_a_pool_that_hangs_is_said_and_not_waited_for():
    @ray.remote(num_cpus=0)
    class Hanging:
        async def until_stopped(self):
            await asyncio.sleep(PATIENCE_SECONDS)

        async def watch(self, caller, alive):
            pass

        async def view(self, in_flight):
            time.sleep(PATIENCE_SECONDS)

        async def assign(self, ticket, session, tokens, adapter, caller):
            await asyncio.sleep(PATIENCE_SECONDS)

        async def cancelled(self, ticket):
            pass

    for what in ("view", "generate"):
        hanging = Hanging.remote()
        client = EngineClient(hanging, None, 10.0, patience_s=1.0)
        with pytest.raises(InfrastructureError, match=r"^pool-unreachable: the engine pool's actor lives, but"):
            asyncio.run(client.view() if what == "view" else client.generate("s", [1], 1, []))
        ray.kill(hanging)


@pytest.mark.usefixtures("cluster")
def test_an_engine_is_waited_for_as_long_as_the_pool_says_that_it_lives():
    @ray.remote(num_cpus=0)
    class Waiting:
        asked = 0

        async def until_stopped(self):
            await asyncio.sleep(PATIENCE_SECONDS)

        async def watch(self, caller, alive):
            pass

        async def view(self, in_flight):
            self.asked += 1

        async def assign(self, ticket, session, tokens, adapter, caller):
            while self.asked < 3:
                await asyncio.sleep(0.05)
            raise InfrastructureError("no-engine", "in the end there was none")

    waiting = Waiting.remote()
    ray.get(waiting.view.remote(0))
    with pytest.raises(InfrastructureError, match="in the end there was none"):
        asyncio.run(EngineClient(waiting, None, 10.0, patience_s=2.0).generate("s", [1], 1, []))
    ray.kill(waiting)


def test_a_pool_whose_own_actor_dies_while_it_starts_says_where_and_what_to_do(pool, weights, monkeypatch):
    class Dying(PoolActor):
        async def start(self):
            os._exit(1)

    monkeypatch.setattr(pool_module, "PoolActor", Dying)
    with pytest.raises(
        InfrastructureError, match=r"(?s)^pool-lost: the engine pool's actor on \S+, .*is gone.*--resume"
    ):
        open_pool(weights)
    eventually(serve(2), pool)


def test_a_pool_that_does_not_fit_names_what_is_missing_and_leaves_nothing_reserved(pool, weights):
    with pytest.raises(InfrastructureError, match=r"placement-timeout: .*asked: 1 CPU.*missing: 1 CPU"):
        open_pool(weights, timeout_s=1.0)
    assert len(pool.view().engines) == 2, "another pool's engines are left alone"
    eventually(serve(2), pool)


def test_a_pool_whose_engines_do_not_start_says_why(pool, tmp_path):
    pool.stop()
    (tmp_path / "broken").touch()
    with pytest.raises(InfrastructureError, match=r"(?s)engine-start: .*is broken"):
        open_pool(Weights(path=str(tmp_path), base="base"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while ray.available_resources().get("CPU", 0.0) < 2.0:
        assert time.monotonic() < deadline, "a pool that is gone still holds cores"
        time.sleep(0.2)
