"""A checkpoint has its name only after vLLM has loaded it."""

import os

import pytest
import ray
from hand_made import event, forecast, key, taught

from cluster.config import Settings, TrainingSettings
from cluster.failures import DataError, SettingsError
from training.checkpoint import Verification, read_origin, unverified_path
from training.launch import launch_sft


@pytest.fixture(scope="module")
def session():
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("changes", "agrees"),
    [
        ({}, True),
        ({"largest_gap": 1.5}, False),
        ({"mean_gap": 0.3}, False),
        ({"largest_regret": 3.0}, False),
        ({"mean_gap": float("nan")}, False),
    ],
)
def test_engines_agree_only_within_rounding(changes, agrees):
    figures = {"tokens": 32, "largest_gap": 0.05, "mean_gap": 0.01, "largest_regret": 0.0, **changes}
    assert Verification(**figures).agrees is agrees


def test_a_launch_without_a_session_says_so(tmp_path):
    with pytest.raises(SettingsError, match="Ray session"):
        launch_sft(tmp_path, Settings(), lambda _: None)


def launched(tiny, out, **changes) -> Settings:
    return Settings(
        training=TrainingSettings(
            base=str(tiny), output=out, **{"epochs": 4, "learning_rate": 1e-2, "lora_rank": 4, **changes}
        )
    )


@pytest.mark.ray
@pytest.mark.vllm
def test_a_launched_training_reports_progress_and_ends_as_a_folder_that_vllm_loads(session, tiny, make_run, tmp_path):
    run = make_run([event(f"e{n}") for n in range(8)], [(forecast(key(f"e{n}")), taught(f"e{n}")) for n in range(8)])
    told = []
    out = tmp_path / "out"
    summary = launch_sft(run.path, launched(tiny, out), told.append)
    assert summary.path == out
    assert not unverified_path(out).exists()
    assert summary.verification.agrees
    assert summary.verification.tokens == 32
    assert read_origin(out) == summary.origin
    assert [t.step for t in told] == sorted({t.step for t in told})
    assert (told[-1].step, told[-1].tokens) == (summary.steps, summary.tokens)


@pytest.mark.ray
def test_an_error_of_the_training_process_arrives_as_itself_and_leaves_no_checkpoint(session, tiny, make_run, tmp_path):
    run = make_run([event("held-out", "eval")], [(forecast(key("held-out")), taught("held-out"))])
    with pytest.raises(DataError, match="1 eval-split"):
        launch_sft(run.path, launched(tiny, tmp_path / "out"), lambda _: None)
    assert not (tmp_path / "out").exists()
