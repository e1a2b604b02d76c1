"""The endpoint as an actor: workers share its limits, a refused key stops all of them, and a dead actor stops the run."""

import asyncio
import datetime as dt

import pytest
import ray

from cluster.clock import utc_now
from cluster.config import EndpointSettings, RaySettings, SamplingSettings
from cluster.endpoint.body import ChatCall
from cluster.endpoint.client import EndpointClient, RemoteGate
from cluster.endpoint.service import EndpointService
from cluster.failures import InfrastructureError, SettingsError
from cluster.session import start_session
from tests.cluster.endpoint_server import Asked, EndpointServer, fail, say, scripted

pytestmark = pytest.mark.ray

CALL = ChatCall(messages=({"role": "user", "content": "q"},), max_tokens=10, date=dt.date(2031, 5, 4))


@pytest.fixture(scope="module", autouse=True)
def session():
    with start_session(RaySettings(cpus=2)):
        yield


@ray.remote(num_cpus=0.1)
def ask(gate: RemoteGate, settings: EndpointSettings, calls: int) -> list[str]:
    """A worker process of its own."""

    async def run() -> list[str]:
        client = EndpointClient(gate, settings, SamplingSettings(), utc_now)
        replies = await asyncio.gather(*(client.complete(CALL) for _ in range(calls)), return_exceptions=True)
        await client.close()
        return [str(r) if isinstance(r, BaseException) else r.answer.text for r in replies]

    return asyncio.run(run())


def settings(server: EndpointServer, **more: object) -> EndpointSettings:
    return EndpointSettings.model_validate({"base_url": server.url, "model": "m", "key_env": ("TEST_KEYS",), **more})


def test_workers_share_the_limits_and_keys_of_the_run(monkeypatch):
    monkeypatch.setenv("TEST_KEYS", "sk-a,sk-b")

    async def behave(asked: Asked):
        await asyncio.sleep(0.03)
        return await say(asked, "well")

    with EndpointServer(behave) as server:
        tree = settings(server, parallel=3)
        with EndpointService(tree, SamplingSettings(), [CALL]) as service:
            answers = ray.get([ask.remote(service.gate(), tree, 12) for _ in range(2)])
        assert server.most == 3
    assert answers == [["well"] * 12] * 2
    counts = [[a.key for a in server.asked].count(key) for key in ("sk-a", "sk-b")]
    assert sum(counts) == 25
    assert abs(counts[0] - counts[1]) <= 1


def test_a_first_request_that_is_refused_stops_the_run_in_the_servers_words(monkeypatch):
    monkeypatch.setenv("TEST_KEYS", "sk-a")
    for behaviour, reason, words in [
        (lambda a: fail(401, "who are you"), "endpoint-auth", "who are you"),
        (lambda a: fail(400, "unsupported parameter: top_p"), "endpoint-refuses", "top_p"),
        (lambda a: say(a, "x", annotations=[{"type": "url_citation"}]), "endpoint-browses", "url_citation"),
    ]:
        with EndpointServer(scripted(behaviour)) as server:
            with pytest.raises(InfrastructureError, match=words) as error:
                EndpointService(settings(server), SamplingSettings(), [CALL])
            assert (error.value.reason, error.value.fatal) == (reason, True)
            assert len(server.asked) == 1
    monkeypatch.delenv("TEST_KEYS")
    with pytest.raises(SettingsError, match="TEST_KEYS"):
        EndpointService(settings(server), SamplingSettings(), [CALL])


def test_when_the_actor_dies_every_call_says_that_the_run_cannot_go_on(monkeypatch):
    monkeypatch.setenv("TEST_KEYS", "sk-a")
    with EndpointServer(scripted(say)) as server:
        tree = settings(server)
        service = EndpointService(tree, SamplingSettings(), [])
        assert asyncio.run(service.view()).paused == ""
        service.stop()
        (said,) = ray.get(ask.remote(service.gate(), tree, 1))
        assert said.startswith("endpoint-gone")
        assert InfrastructureError("endpoint-gone").fatal
        assert server.asked == []
