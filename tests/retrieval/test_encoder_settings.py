"""How an encoder is named, and which one may ask an index."""

import asyncio
import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from corpora import corpus

from cluster.config import EncoderSettings, load_settings
from cluster.failures import SettingsError
from cluster.home import model_path
from retrieval.build import build_index
from retrieval.encoder import HashingEncoder, encode_queries, facts_of, folder_dimension, open_encoder
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.mask import Vectors

INSTRUCTED = "Instruct: Find news.\nQuery:{query}"


class Noting(HashingEncoder):
    """Remembers what it was given."""

    def __init__(self, dimension: int = 32, query_template: str = "{query}") -> None:
        super().__init__(dimension, query_template)
        self.given: list[str] = []

    def encode(self, texts: Sequence[str]) -> Vectors:
        self.given += texts
        return super().encode(texts)


def test_an_instruction_reaches_queries_and_no_article(tmp_path: Path) -> None:
    encoder = Noting(query_template=INSTRUCTED)
    build_index(corpus(), encoder, tmp_path)
    assert len(encoder.given) == len(corpus())
    assert not any("Instruct" in text for text in encoder.given)
    encoder.given.clear()
    searcher = LocalSearcher(Library.open(tmp_path), encoder)
    asyncio.run(searcher.search("copper", None, dt.date(2024, 7, 1), 3))
    assert encoder.given == ["Instruct: Find news.\nQuery:copper"]


def test_braces_in_a_query_are_text() -> None:
    encoder = Noting(query_template=INSTRUCTED)
    encode_queries(encoder, ["{query} {instruction} {0}"])
    assert encoder.given == ["Instruct: Find news.\nQuery:{query} {instruction} {0}"]


def test_an_index_is_not_asked_with_another_instruction_or_dimension(tmp_path: Path) -> None:
    build_index(corpus(), HashingEncoder(32, INSTRUCTED), tmp_path)
    library = Library.open(tmp_path)
    assert library.manifest.encoder.query_template == INSTRUCTED
    LocalSearcher(library, HashingEncoder(32, INSTRUCTED))
    with pytest.raises(SettingsError, match=r"encoder\.instruction"):
        LocalSearcher(library, HashingEncoder(32))
    with pytest.raises(SettingsError, match=r"32 dimensions.*16 dimensions"):
        LocalSearcher(library, HashingEncoder(16, INSTRUCTED))


def test_another_instruction_makes_another_index_and_encodes_nothing_again(tmp_path: Path) -> None:
    before = build_index(corpus(), Noting(), tmp_path).fingerprint
    encoder = Noting(query_template=INSTRUCTED)
    after = build_index(corpus(), encoder, tmp_path)
    assert (after.kept, encoder.given) == (0, [])
    assert after.fingerprint != before
    assert build_index(corpus(), Noting(), tmp_path).fingerprint == before
    clean = build_index(corpus(), Noting(), tmp_path / "clean")
    assert clean.fingerprint == before


def test_the_default_template_is_the_one_of_qwen3_embedding() -> None:
    settings = EncoderSettings(instruction="Given a question, find news.")
    assert settings.queries == "Instruct: Given a question, find news.\nQuery:{query}"
    assert EncoderSettings().queries == "{query}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("encoder.query_template=no place", "query_template"),
        ("encoder.query_template='{instruction} {query} {query}'", "query_template"),
        ("encoder.instruction='a {query}'", "instruction"),
        ("encoder.kind=remote", "server.base_url and dimension"),
        ("encoder.server.base_url=ftp://x", "whole address"),
        ("encoder.server.base_url=https://a.example/v1/embeddings", "must end before"),
        ("encoder.server.key_env=[sk-secret]", "never keys"),
        ("encoder.vllm.options={runner: generate}", r"encoder\.kind"),
        ("encoder.vllm.options={max_model_len: 8}", r"encoder\.vllm\.max_model_len"),
        ("encoder.vllm.tensor_parallel=2", "needs as many gpus"),
        ("encoder={kind: remote, dimension: 8, actors: 2, server: {base_url: 'http://a.example/v1'}}", "drop actors"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_and_no_key_is_repeated(wrong: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as raised:
        load_settings([], [wrong])
    assert "sk-secret" not in str(raised.value)


def test_a_dimension_that_the_encoder_does_not_have_is_refused() -> None:
    assert open_encoder("hashing", settings=EncoderSettings(dimension=64)).dimension == 64
    path = model_path("minilm")
    if not (path / "modules.json").is_file():
        pytest.skip("the MiniLM encoder is not prepared on this machine; run `make setup`")
    with pytest.raises(SettingsError, match=r"384 dimensions.*encoder\.dimension is 512"):
        facts_of("minilm", EncoderSettings(dimension=512))


def test_facts_are_read_from_a_folder_without_loading_it(tmp_path: Path) -> None:
    def module(name: str, config: dict[str, int]) -> dict[str, str]:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return {"path": name}

    modules = [{"path": ""}, module("1_Pooling", {"word_embedding_dimension": 8})]
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"path": "2_Normalize"}]))
    assert folder_dimension(tmp_path) == 8
    assert facts_of(str(tmp_path)).dimension == 8
    dense = module("2_Dense", {"in_features": 8, "out_features": 4})
    (tmp_path / "modules.json").write_text(json.dumps([*modules, dense]))
    assert folder_dimension(tmp_path) == 4
    (tmp_path / "modules.json").write_text("[]")
    with pytest.raises(SettingsError, match="how long its vectors are"):
        folder_dimension(tmp_path)
