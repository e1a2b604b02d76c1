from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.failures import SettingsError
from cluster.home import model_path
from retrieval.encoder import (
    HashingEncoder,
    LocalEncoder,
    encoder_facts,
    facts_of,
    folder_fingerprint,
    open_encoder,
)

surrogates = st.characters(categories=["Cs"])


@given(st.lists(st.text() | st.text(surrogates), max_size=5))
def test_every_text_has_a_unit_vector(texts: list[str]) -> None:
    vectors = HashingEncoder(16).encode(texts)
    assert vectors.shape == (len(texts), 16)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_shared_words_bring_texts_nearer() -> None:
    query, near, far = HashingEncoder().encode(["copper tariff", "A tariff on COPPER", "glacier railway"])
    assert query @ near > query @ far


def test_another_dimension_is_another_encoder() -> None:
    assert HashingEncoder(16).fingerprint != HashingEncoder(32).fingerprint


def test_an_encoder_that_was_not_prepared_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent.*make setup"):
        open_encoder(str(tmp_path / "absent"))


def test_the_fingerprint_follows_weights_and_names_but_not_notes(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "1_Pooling").mkdir()
    weights = tmp_path / "1_Pooling" / "model.safetensors"
    weights.write_bytes(b"weights")
    before = folder_fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("notes")
    (tmp_path / ".lock").write_text("")
    (tmp_path / "prepared.json").write_text("{}")
    assert folder_fingerprint(tmp_path) == before
    weights.write_bytes(b"weightz")
    changed = folder_fingerprint(tmp_path)
    weights.rename(tmp_path / "model.safetensors")
    assert len({before, changed, folder_fingerprint(tmp_path)}) == 3


def test_minilm_finds_a_paraphrase_that_shares_no_word() -> None:
    path = model_path("minilm")
    if not (path / "modules.json").is_file():
        pytest.skip("the MiniLM encoder is not prepared on this machine; run `make setup`")
    encoder = LocalEncoder(path, batch_size=2)
    texts = [
        "Interest rates were cut.",
        "Central banks lower borrowing costs",
        "A goalkeeper saved two penalties",
        "\ud800",
    ]
    vectors = encoder.encode(texts)
    assert vectors.shape == (4, encoder.dimension) == (4, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > 2 * abs(vectors[0] @ vectors[2])
    assert encoder.encode([]).shape == (0, 384)
    assert encoder.fingerprint == folder_fingerprint(path)
    assert encoder_facts(encoder) == facts_of("minilm")
