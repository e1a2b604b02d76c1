"""The settings tree: what is refused, what wins, what survives a round trip."""

from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import BudgetSettings, ModelSettings, Settings, dump_settings, load_settings
from cluster.failures import SettingsError


def file(folder: Path, text: str, name: str = "settings.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("rollout.cuont=4", "rollout.count"),
        ("rolout.count=4", "rollout"),
        ("rollout.budget.iteration=3", "rollout.budget.iterations"),
        # the right leaf in the wrong place
        ("engine.temperature=0.5", "sampling.temperature"),
        ("count=4", "rollout.count"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override: str, nearest: str) -> None:
    with pytest.raises(SettingsError, match=rf"unknown key .*did you mean {nearest}\?"):
        load_settings([], [override])


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, "rollout: {cuont: 4}")
    with pytest.raises(SettingsError, match=rf"{path}: unknown key rollout.cuont; did you mean rollout.count"):
        load_settings([path])
    with pytest.raises(SettingsError, match=r"unknown key run\.zzzzzz; known here: directory, seed"):
        load_settings([file(tmp_path, "run: {zzzzzz: 1}")])


def test_later_files_win_key_by_key_and_overrides_win_over_files(tmp_path: Path) -> None:
    first = file(tmp_path, "rollout: {count: 2, workers: 3, budget: {calls: 5, iterations: 6}}", "a.yaml")
    second = file(tmp_path, "rollout: {count: 4, budget: {calls: 7}}", "b.yaml")
    settings = load_settings([first, second], ["rollout.count=8", "rollout.modes=[no-tools]"]).rollout
    assert (settings.count, settings.workers, settings.modes) == (8, 3, ("no-tools",))
    assert (settings.budget.calls, settings.budget.iterations) == (7, 6)
    assert load_settings([second, first]).rollout.count == 2


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_settings([file(tmp_path, "# nothing\n")]) == Settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- rollout\n- model\n", "the top level must be a mapping of sections, not list"),
        ("rollout", "the top level must be a mapping of sections, not str"),
        ("rollout: {count: [\n", "is not YAML"),
        ("rollout: {count: 0}", "rollout.count: .*greater than 0 .got 0"),
        ("rollout: 3", "rollout: .*RolloutSettings"),
        ("ray: {address: auto, cpus: 2}", "cpus sizes a local session"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings([file(tmp_path, text)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: No such file.*check --config"):
        load_settings([tmp_path / "nowhere.yaml"])


@pytest.mark.parametrize("override", ["rollout.count", "=4", "rollout.count=[", "rollout.count=many"])
def test_a_wrong_override_is_refused(override: str) -> None:
    with pytest.raises(SettingsError, match=r"not of the form|not YAML|rollout\.count: "):
        load_settings([], [override])


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    seed=st.integers(-(2**40), 2**40),
    temperature=st.floats(0, 5, allow_nan=False),
    name=TEXT,
    constants=st.dictionaries(TEXT, TEXT | st.booleans() | st.lists(TEXT, max_size=2), max_size=3),
    modes=st.lists(st.sampled_from(["no-tools", "memory-free", "memory-on"]), min_size=1, max_size=3),
    first_day=st.none() | st.dates(),
)
def test_dumped_settings_load_as_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    temperature: float,
    name: str,
    constants: dict[str, Any],
    modes: list[str],
    first_day: Any,
) -> None:
    settings = Settings.model_validate(
        {
            "run": {"seed": seed},
            "sampling": {"temperature": temperature},
            "model": {"name": name},
            "events": {"constants": constants, "train": {"start": "2024-01-01", "end": "2024-02-01"}},
            "rollout": {"modes": modes},
            "retrieval": {"first_day": first_day},
        }
    )
    saved = file(tmp_path_factory.mktemp("dumped"), dump_settings(settings))
    assert load_settings([saved]) == settings


def test_the_environment_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN__SEED", "RUN_SEED", "SEED", "PASTCAST_RUN__SEED", "MODEL", "PATH_", "ENGINE", "ROLLOUT"):
        monkeypatch.setenv(name, "77")
    monkeypatch.setenv("run", '{"seed": 77}')
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert load_settings().model_dump() == Settings.model_construct().model_dump()
    assert load_settings().run.seed == 0
    assert load_settings().ray.address is None


def test_a_vllm_model_is_called_by_its_folder_and_a_rule_by_its_kind() -> None:
    assert ModelSettings(path="a/b/tuned").label == "tuned"
    assert ModelSettings(kind="reader").label == "reader"
    assert ModelSettings(kind="reader", name="teacher").label == "teacher"


@pytest.mark.parametrize(
    ("preset", "iterations", "calls"), [("dojo", 120, 400), ("dojo-train", 80, 200), ("oracleproto", 6, 4)]
)
def test_a_budget_preset_is_its_papers_and_gives_way_to_what_is_said(
    preset: Literal["dojo", "dojo-train", "oracleproto"], iterations: int, calls: int
) -> None:
    assert BudgetSettings(preset=preset).resolved == (iterations, calls)
    assert BudgetSettings(preset=preset, iterations=3).resolved == (3, calls)
    assert BudgetSettings(preset=preset, calls=2).resolved == (iterations, 2)
