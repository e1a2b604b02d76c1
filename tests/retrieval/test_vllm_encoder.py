"""The vLLM encoder: a real pooling engine in a Ray actor, against sentence-transformers with the same weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from cluster.config import EncoderSettings
from cluster.failures import InfrastructureError
from cluster.home import model_path
from retrieval.encoder import LocalEncoder, encode_queries, encoder_facts, facts_of, open_encoder
from retrieval.mask import Vectors

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

INSTRUCTED = EncoderSettings.model_validate(
    {"kind": "vllm", "instruction": "Find news.", "vllm": {"dtype": "float32", "threads": 2}}
)
TEXTS = [
    "Interest rates were cut.",
    "Central banks lower borrowing costs",
    "A goalkeeper saved two penalties",
    "word " * 2000,
    "",
    "\ud800 harbour",
]


def owning(name: str, settings: EncoderSettings) -> Any:
    """An actor whose process an encoder may take over."""

    class Owner:
        def __init__(self) -> None:
            self._encoder = open_encoder(name, 64, settings)

        def facts(self) -> Any:
            return encoder_facts(self._encoder)

        def encode(self, texts: list[str], queries: bool) -> Vectors:
            return encode_queries(self._encoder, texts) if queries else self._encoder.encode(texts)

        def refuse(self, other: EncoderSettings) -> None:
            open_encoder(name, 64, other)

    return ray.remote(num_cpus=0.5)(Owner).remote()


@pytest.fixture(scope="module")
def owner() -> Iterator[Any]:
    if not (model_path("minilm") / "modules.json").is_file():
        pytest.skip("the MiniLM encoder is not prepared on this machine; run `make setup`")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield owning("minilm", INSTRUCTED)
    ray.shutdown()


def test_vectors_and_facts_are_those_of_sentence_transformers(owner: Any) -> None:
    local = LocalEncoder(model_path("minilm"))
    theirs = ray.get(owner.encode.remote(TEXTS, False))
    ours = local.encode(TEXTS)
    assert theirs.dtype == np.float32
    assert theirs.shape == ours.shape
    np.testing.assert_allclose(np.linalg.norm(theirs, axis=1), 1, atol=1e-5)
    cosines = (ours * theirs).sum(axis=1)
    assert (cosines > 0.999).all(), cosines
    assert ray.get(owner.facts.remote()) == facts_of("minilm", INSTRUCTED)
    assert ray.get(owner.encode.remote([], False)).shape == (0, 384)


def test_queries_are_encoded_with_the_instruction(owner: Any) -> None:
    query, article = ray.get([owner.encode.remote(["rate cut"], True), owner.encode.remote(["rate cut"], False)])
    (instructed,) = LocalEncoder(model_path("minilm")).encode(["Instruct: Find news.\nQuery:rate cut"])
    assert query[0] @ instructed > 0.999
    assert query[0] @ article[0] < 0.99


def test_what_vllm_does_not_take_is_said_with_its_reason(owner: Any) -> None:
    refused = EncoderSettings.model_validate({"kind": "vllm", "vllm": {"dtype": "nonsense"}})
    with pytest.raises(InfrastructureError, match=r"(?s)encoder-start.*nonsense"):
        ray.get(owner.refuse.remote(refused))
