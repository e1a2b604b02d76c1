"""What changes a run's fingerprint, and what does not."""

from pathlib import Path

import pytest

import rollout.manifest
from cluster.config import Settings, load_settings
from cluster.fingerprint import hash_files, weights_hash
from rollout.manifest import OPERATIONAL, differences, make_manifest

INPUTS = {"events": "e", "schedule": "s", "index": "i", "weights": "w", "sandbox": "bubblewrap", "prompt.no-tools": "p"}


@pytest.mark.parametrize(
    "override",
    [
        "sampling.temperature=0.3",
        "run.seed=1",
        "rollout.budget.calls=9",
        "rollout.python.isolation=process",
        "retrieval.cutoff_lag_days=1",
        "search.mode=hybrid",
        "search.candidates=20",
        "engine.max_model_len=1024",
        "engine.options={enable_chunked_prefill: false}",
        "events.deadlines_move=[manifold]",
        "model.tool_parser=other",
    ],
)
def test_a_setting_that_can_alter_a_forecast_changes_the_fingerprint(override: str) -> None:
    old, new = make_manifest(Settings(), INPUTS), make_manifest(load_settings([], [override]), INPUTS)
    assert old.fingerprint != new.fingerprint
    key = override.partition("=")[0]
    assert [line for line in differences(old, new) if line.startswith(f"settings.{key}")] == differences(old, new) != []


@pytest.mark.parametrize(
    "override",
    [
        "run.directory=elsewhere",
        "ray.address=auto",
        "rollout.workers=9",
        "rollout.concurrency=9",
        "rollout.attempts=9",
        "rollout.python.parallel=9",
        "engine.replicas=9",
        "engine.gpus=1",
        "retrieval.shard_actors=9",
        "index.lexical=false",
        "scores.draws=9",
        "training.epochs=9",
    ],
)
def test_a_setting_that_says_only_where_and_how_fast_does_not(override: str) -> None:
    old, new = make_manifest(Settings(), INPUTS), make_manifest(load_settings([], [override]), INPUTS)
    assert old == new
    assert differences(old, new) == []


def test_every_operational_setting_is_left_out_of_the_manifest() -> None:
    settings = make_manifest(Settings(), INPUTS).settings
    for path in OPERATIONAL:
        *parents, leaf = path.split(".")
        branch = settings
        for parent in parents:
            branch = branch[parent]
        assert leaf not in branch


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_every_input_changes_the_fingerprint_and_is_named(name: str) -> None:
    old, new = make_manifest(Settings(), INPUTS), make_manifest(Settings(), INPUTS | {name: "changed"})
    assert old.fingerprint != new.fingerprint
    assert differences(old, new) == [f"inputs.{name}: {INPUTS[name]!r} → 'changed'"]


def test_an_input_that_is_new_is_named_as_absent_before() -> None:
    old = make_manifest(Settings(), {})
    new = make_manifest(Settings(), {"prompt.memory-on": "p"})
    assert differences(old, new) == ["inputs.prompt.memory-on: 'absent' → 'p'"]


def test_changed_code_and_templates_change_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("cluster", "retrieval", "rollout", "eval"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "module.py").write_text("x = 1\n")
    (tmp_path / "rollout" / "prompt.jinja").write_text("Forecast.")
    monkeypatch.setattr(rollout.manifest, "__file__", str(tmp_path / "rollout" / "manifest.py"))
    old = make_manifest(Settings(), INPUTS)
    (tmp_path / "eval" / "module.py").write_text("x = 2\n")
    (tmp_path / "rollout" / "notes.md").write_text("notes")
    assert make_manifest(Settings(), INPUTS) == old
    for file in (tmp_path / "cluster" / "module.py", tmp_path / "rollout" / "prompt.jinja"):
        before = make_manifest(Settings(), INPUTS)
        file.write_text("changed")
        after = make_manifest(Settings(), INPUTS)
        assert after.fingerprint != before.fingerprint
        assert [line.partition(":")[0] for line in differences(before, after)] == ["code"]


def test_a_model_folder_is_named_by_its_bytes_and_not_by_where_it_lies(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "tokenizer.json").write_text("{}")
    assert weights_hash(tmp_path / "a") == weights_hash(tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("about")
    assert weights_hash(tmp_path / "a") == weights_hash(tmp_path / "b")
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ messages }}")
    assert weights_hash(tmp_path / "a") != weights_hash(tmp_path / "b")


def test_names_count_as_well_as_bytes_and_order_does_not(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    assert hash_files([one, two], tmp_path) == hash_files([two, one], tmp_path)
    before = hash_files([one, two], tmp_path)
    one.write_text("2")
    two.write_text("1")
    assert hash_files([one, two], tmp_path) != before
