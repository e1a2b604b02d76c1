"""The trainer sees our ids and labels and changes the weights that are exported."""

import filecmp

import pytest
import torch
from hand_made import event, forecast, key, taught
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.config import Settings, TrainingSettings
from cluster.failures import DataError, SettingsError
from cluster.fingerprint import weights_hash
from training.checkpoint import ADAPTER, read_origin, unverified_path
from training.examples import IGNORED, TrainingRow
from training.sft import make_trainer, train_sft

STOP = 2


def quick(tiny, out, **changes) -> Settings:
    return Settings(
        training=TrainingSettings(
            base=str(tiny),
            output=out,
            **{"epochs": 5, "learning_rate": 2e-2, "batch_size": 4, "threads": 1, **changes},
        )
    )


@pytest.fixture
def run(make_run):
    finished = [(forecast(key(f"e{n}")), taught(f"e{n}")) for n in range(4)]
    finished.append((forecast(key("long")), taught("long", padding=" very" * 4096)))
    return make_run([event(f"e{n}") for n in range(4)] + [event("long")], finished)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_batch_that_the_model_sees_holds_exactly_our_labels(tiny, tmp_path, lora_rank):
    # One row is longer than TRL's default limit, and the stop token is also the padding token.
    lengths = [5, 1100, 40, 7, 30]
    rows = [
        TrainingRow(
            key=key(f"e{n}"),
            input_ids=tuple([10 + n] * (length - 1) + [STOP]),
            labels=tuple([IGNORED] * (length // 2) + [10 + n] * (length - length // 2 - 1) + [STOP]),
        )
        for n, length in enumerate(lengths)
    ]
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}

    def look(_module, _args, inputs):
        for ids, labels, attention in zip(
            inputs["input_ids"].tolist(), inputs["labels"].tolist(), inputs["attention_mask"].tolist(), strict=True
        ):
            real = sum(attention)
            assert attention == [1] * real + [0] * (len(ids) - real)
            assert labels[real:] == [IGNORED] * (len(ids) - real)
            seen[tuple(ids[:real])] = tuple(labels[:real])

    settings = TrainingSettings(batch_size=2, threads=1, lora_rank=lora_rank)
    trainer = make_trainer(
        rows, AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny), settings, tmp_path
    )
    trainer.model.register_forward_pre_hook(look, with_kwargs=True)
    trainer.train()
    assert seen == {r.input_ids: r.labels for r in rows}


def test_the_loss_is_the_mean_over_the_learned_tokens_stop_tokens_included(tiny, tmp_path, chat):
    rows = [
        TrainingRow(key=key("a"), input_ids=(5, 6, 7, STOP), labels=(IGNORED, IGNORED, 7, STOP)),
        TrainingRow(key=key("b"), input_ids=(8, 9, STOP), labels=(IGNORED, IGNORED, STOP)),
    ]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    expected = []
    with torch.no_grad():
        for r in rows:
            scores = model(torch.tensor([r.input_ids])).logits[0].log_softmax(-1)
            expected += [-scores[i - 1, label].item() for i, label in enumerate(r.labels) if label != IGNORED]
    trainer = make_trainer(rows, model, AutoTokenizer.from_pretrained(tiny), TrainingSettings(batch_size=2), tmp_path)
    trainer.train()
    (first,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(expected) == 3
    # bfloat16 arithmetic against float32.
    assert first == pytest.approx(sum(expected) / 3, abs=0.02)


def test_training_lowers_the_loss_and_exports_what_transformers_loads(tiny, source, run, tmp_path):
    told = []
    settings = quick(tiny, tmp_path / "out")
    summary = train_sft(run.path, settings, told.append)

    assert summary.path == unverified_path(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    losses = summary.origin.losses
    assert losses[-1] < losses[0] - 2
    assert [t.step for t in told] == list(range(1, 6))
    assert {t.steps for t in told} == {5}
    assert told[-1].tokens == summary.tokens == 5 * summary.rows.tokens
    assert summary.rows.refused == {"too-long": 1}

    weights = load_file(summary.path / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert weights.keys() == load_file(tiny / "model.safetensors").keys()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert filecmp.cmp(summary.path / name, source / name, shallow=False)
    assert AutoModelForCausalLM.from_pretrained(summary.path).config.vocab_size == 49152

    origin = read_origin(summary.path)
    assert origin == summary.origin
    assert origin.base_fingerprint == weights_hash(tiny)
    assert origin.run_fingerprint == run.manifest().fingerprint


def test_an_adapter_is_merged_and_kept_beside(tiny, run, tmp_path):
    summary = train_sft(run.path, quick(tiny, tmp_path / "out", lora_rank=4), lambda _: None)
    before, after = load_file(tiny / "model.safetensors"), load_file(summary.path / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
    assert (summary.path / ADAPTER / "adapter_model.safetensors").is_file()


def test_equal_seeds_give_equal_weights_and_other_seeds_another_order(tiny, run, tmp_path):
    made = [
        train_sft(run.path, quick(tiny, tmp_path / f"out{n}", epochs=1, batch_size=1, seed=seed), lambda _: None)
        for n, seed in enumerate((1, 1, 2))
    ]
    first, second, other = (load_file(m.path / "model.safetensors") for m in made)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert made[0].origin == made[1].origin
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_an_output_that_exists_is_refused_before_training(tiny, run, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(SettingsError, match="exists already"):
        train_sft(run.path, quick(tiny, tmp_path / "out"), lambda _: None)


def test_a_run_without_rows_says_what_became_of_its_forecasts(tiny, run, tmp_path):
    with pytest.raises(DataError, match="5 mode"):
        train_sft(run.path, quick(tiny, tmp_path / "out", modes=("no-tools",)), lambda _: None)


def test_weights_that_are_not_finite_are_not_exported(tiny, run, tmp_path):
    with pytest.raises(DataError, match="not finite"):
        train_sft(run.path, quick(tiny, tmp_path / "out", learning_rate=1e38), lambda _: None)
    assert not unverified_path(tmp_path / "out").exists()
