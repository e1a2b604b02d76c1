"""The vLLM encoder: a real pooling engine in the actor that encodes a run's queries, against sentence-transformers, same weights."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from cluster.config import EncoderSettings
from cluster.failures import InfrastructureError
from cluster.home import model_path
from retrieval.encoder import LocalEncoder, encode_queries, facts_of, located, open_encoder
from retrieval.encoder_server import EncoderServer

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

SETTINGS = EncoderSettings.model_validate(
    {"kind": "vllm", "instruction": "Find news.", "vllm": {"dtype": "float32", "threads": 2}}
)
QUERIES = ["Interest rates were cut.", "A goalkeeper saved two penalties", "word " * 2000, "", "\ud800 harbour"]


def server_class() -> Any:
    """Made here, for a class of a test module cannot be imported by an actor."""

    class AlsoRefusing(EncoderServer):
        async def refuse(self, other: EncoderSettings) -> None:
            await asyncio.to_thread(open_encoder, self._name, 64, other)

    return AlsoRefusing


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    if not (model_path("minilm") / "modules.json").is_file():
        pytest.skip("the MiniLM encoder is not prepared on this machine; run `make setup`")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray.remote(num_cpus=0.5)(server_class()).remote(located("minilm"), 64, SETTINGS)
    ray.shutdown()


def test_the_vectors_of_queries_are_those_of_sentence_transformers(server: Any) -> None:
    theirs = np.stack(ray.get(server.encode.remote(QUERIES, 300.0)))
    ours = encode_queries(LocalEncoder(model_path("minilm"), query_template=SETTINGS.queries), QUERIES)
    assert theirs.dtype == np.float32
    assert theirs.shape == ours.shape
    np.testing.assert_allclose(np.linalg.norm(theirs, axis=1), 1, atol=1e-5)
    cosines = (ours * theirs).sum(axis=1)
    assert (cosines > 0.999).all(), cosines
    bare = LocalEncoder(model_path("minilm")).encode(QUERIES[:1])
    assert bare[0] @ theirs[0] < 0.99


def test_it_says_that_it_is_the_encoder_of_the_folder(server: Any) -> None:
    assert ray.get(server.ready.remote()) == facts_of("minilm", SETTINGS)


def test_what_vllm_does_not_take_is_said_with_its_reason(server: Any) -> None:
    refused = EncoderSettings.model_validate({"kind": "vllm", "vllm": {"dtype": "nonsense"}})
    with pytest.raises(InfrastructureError, match=r"(?s)encoder-start.*nonsense"):
        ray.get(server.refuse.remote(refused))
