"""A tiny trainee with the real tokenizer, and hand-made runs for it."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hand_made import Finished

from cluster.config import Settings
from cluster.fingerprint import weights_hash
from cluster.home import model_path
from rollout.chat import HermesFormat, ParsedTurn
from rollout.events.event import Event
from rollout.manifest import make_manifest
from rollout.packed import pack
from rollout.run import RunDirectory
from training.checkpoint import TOKENIZER_FILES


class WordParser:
    """Rows are never parsed; dialogues only need an answer."""

    def parse(self, text: str, thinking: bool = False, ended: bool = True) -> ParsedTurn:
        return ParsedTurn(text=text)


@pytest.fixture(scope="session")
def source() -> Path:
    """The prepared SmolLM2."""
    path = model_path("smollm2-135m")
    if not (path / "tokenizer.json").is_file():
        pytest.skip("smollm2-135m is not prepared; run `make setup`")
    return path


@pytest.fixture(scope="session")
def chat(source: Path) -> HermesFormat:
    from transformers import AutoTokenizer

    return HermesFormat(AutoTokenizer.from_pretrained(source), WordParser(), weights_hash(source))


@pytest.fixture(scope="session")
def tiny(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers behind SmolLM2's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[Iterable[Event], Iterable[Finished]], RunDirectory]:
    """A run directory that holds these events and finished forecasts."""

    def make(events: Iterable[Event], finished: Iterable[Finished]) -> RunDirectory:
        done = list(finished)
        directory = RunDirectory(tmp_path / "run")
        settings = Settings()
        directory.create(settings, make_manifest(settings, {}), events, [r.key for r, _ in done], {})
        with directory.ledger() as ledger:
            for record, trajectory in done:
                assert ledger.commit([pack(record, trajectory)]) == [True]
        return directory

    return make
