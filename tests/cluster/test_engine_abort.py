"""What an engine's actor and the pool's do about calls that are given up, without Ray and vLLM."""

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError, OwnerDiedError

from cluster.call import EngineCall
from cluster.config import EngineSettings, SamplingSettings
from cluster.engine import EngineActor
from cluster.failures import DataError, InfrastructureError
from cluster.fingerprint import weights_hash
from cluster.pool_actor import PoolActor
from cluster.vllm_engine import Sampled, VllmEngine
from cluster.weights import Weights
from tests.cluster.echo_engine import EchoEngine


class SlowHandOver:
    """As vLLM: it takes a request over after a while, and until then ignores its abort."""

    max_model_len, vocabulary = 100, 100

    def __init__(self):
        self.running = {}
        self.taking = asyncio.Event()
        self.go_on = asyncio.Event()

    async def sample(self, request_id, ids, max_tokens, stop_ids, adapter, salt):
        self.taking.set()
        await self.go_on.wait()
        self.running[request_id] = asyncio.Event()
        try:
            await self.running[request_id].wait()
        finally:
            del self.running[request_id]
        return Sampled(token_ids=(), logprobs=(), finish="abort", cached_tokens=0, prompt_ids=tuple(ids))

    async def abort(self, request_id):
        if request_id in self.running:
            self.running[request_id].set()


class Engine(EngineActor):
    def _enter(self, path, weights):
        """Nothing to prepare."""

    def _start(self, path):
        self._engine = SlowHandOver()


def engine():
    return Engine("", "w", EngineSettings(), SamplingSettings(), 0)


def call(name="r", caller="c", timeout_s=30.0):
    return EngineCall(request_id=name, ids=(1,), max_tokens=5, timeout_s=timeout_s, caller=caller)


def test_an_abort_while_a_request_is_handed_over_to_vllm_leaves_nothing_running():
    async def story():
        actor = engine()
        answer = asyncio.create_task(actor.generate(call()))
        await actor._engine.taking.wait()
        await actor.abort("r")
        actor._engine.go_on.set()
        with pytest.raises(InfrastructureError, match="engine-aborted: its caller gave it up"):
            await asyncio.wait_for(answer, 5.0)
        assert actor._engine.running == {}

    asyncio.run(story())


def test_weights_that_cannot_be_read_are_named_and_change_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0[]")

    async def story():
        actor = engine()
        served = actor._engine
        with pytest.raises(DataError, match=r"model\.safetensors is not what its name says.*copy or save"):
            await actor.reload(str(tmp_path), weights_hash(tmp_path))
        assert (actor._weights, actor._engine) == ("w", served)

    asyncio.run(story())


def test_an_abort_ends_a_call_that_waits_for_other_weights():
    async def story():
        actor = engine()
        async with actor._gate.closed():
            answer = asyncio.create_task(actor.generate(call()))
            await asyncio.sleep(0)
            await actor.abort("r")
            with pytest.raises(InfrastructureError, match="engine-aborted"):
                await asyncio.wait_for(answer, 5.0)
        assert not actor._engine.taking.is_set()

    asyncio.run(story())


async def raises(error):
    raise error


def pool_actor():
    return PoolActor(Weights(path="", base="w"), EngineSettings(), SamplingSettings(), 0, 1.0, EchoEngine)


@pytest.mark.ray
@pytest.mark.usefixtures("session_ends")
@pytest.mark.parametrize("made", [engine, pool_actor])
def test_a_caller_that_lost_sight_of_an_actor_for_a_moment_is_not_taken_for_dead(made):
    async def story():
        actor = made()
        await actor.watch("c", [raises(ActorUnavailableError("a blink", b"0" * 16))])
        assert actor._lost_callers == set()
        await actor.watch("c", [raises(OwnerDiedError("0" * 56, None, ""))])
        assert actor._lost_callers == {"c"}

    asyncio.run(story())


@pytest.mark.ray
@pytest.mark.usefixtures("session_ends")
def test_a_call_that_waits_for_an_engine_is_answered_when_its_caller_dies():
    async def story():
        actor = pool_actor()
        waits = asyncio.create_task(actor.assign("t", "s", 1, None, "c"))
        await asyncio.sleep(0)
        await actor.watch("c", [raises(OwnerDiedError("0" * 56, None, ""))])
        assert await asyncio.wait_for(waits, 5.0) is None
        assert actor._tickets == {}

    asyncio.run(story())


class Llm:
    """vLLM's side of one request that fails."""

    def __init__(self, error, errored):
        self.error, self.errored = error, errored

    async def generate(self, *_, **__):
        raise self.error
        yield

    async def abort(self, request_id):
        """Nothing runs."""


@pytest.mark.parametrize(
    ("what", "errored", "raised", "says"),
    [
        ("EngineDeadError", True, InfrastructureError, "engine-lost"),
        ("EngineGenerateError", True, InfrastructureError, "engine-lost: ValueError: nonsense"),
        ("EngineGenerateError", False, RuntimeError, "vLLM fails call r: ValueError: nonsense"),
        ("QueueOverflowError", False, InfrastructureError, "engine-full"),
        ("VLLMValidationError", False, RuntimeError, "vLLM refuses call r"),
    ],
)
def test_only_what_ends_vllm_is_said_to_have_ended_it(what, errored, raised, says):
    from vllm import exceptions
    from vllm.v1.engine import exceptions as engine_exceptions

    kind = getattr(exceptions, what, None) or getattr(engine_exceptions, what)
    error = kind("nonsense") if what == "VLLMValidationError" else kind()
    error.__cause__ = ValueError("nonsense")
    vllm = object.__new__(VllmEngine)
    vllm._llm, vllm._sampling = Llm(error, errored), SamplingSettings()
    with pytest.raises(raised, match=says):
        asyncio.run(vllm.sample("r", [1], 5, [2], None, "salt"))
