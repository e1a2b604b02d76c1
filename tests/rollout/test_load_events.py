"""Events from files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster.config import EventsSettings, load_settings
from retrieval.corpus.load import load_articles
from rollout.events.dates import forecast_dates
from rollout.events.load import load_events
from rollout.events.split import split_events

REPOSITORY = Path(__file__).parents[2]
GOOD = {"url": "u/1", "title": "Will it?", "opened": "2024-07-01", "end": "2024-07-20 10:00:00", "result": True}
SETTINGS: dict[str, Any] = {
    "format": "jsonl",
    "fields": {"url": "url", "question": "title", "opened": "opened", "closed": "end", "outcome": "result"},
    "constants": {"options": ["YES", "NO"]},
    "outcomes": {"true": "YES", "false": "NO"},
}


def load(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> Any:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_events(EventsSettings(path=path, **(SETTINGS | settings)), tmp_path / "q")


def test_a_row_becomes_an_event_with_its_outcome_named(tmp_path: Path) -> None:
    loaded = load(tmp_path, [GOOD, GOOD | {"url": "u/2", "result": False}])
    assert [e.outcome for e in loaded.records] == [("YES",), ("NO",)]
    assert loaded.records[0].deadline is None
    assert loaded.naive_times == 4
    assert loaded.quarantined == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"result": None}, "no-outcome"),
        ({"result": []}, "no-outcome"),
        ({"result": 0.5}, "unknown-outcome"),
        ({"result": [True, False]}, "invalid-field"),
        ({"end": "soon"}, "unparsable-time"),
        ({"end": None}, "missing-field"),
        ({"end": "2024-06-30"}, "closes-before-opens"),
        ({"title": None}, "missing-field"),
        ({"url": None}, "missing-field"),
    ],
)
def test_a_bad_row_is_named_and_the_next_one_loads(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    loaded = load(tmp_path, [GOOD | change, GOOD | {"url": "u/2"}])
    assert len(loaded.records) == 1
    assert loaded.quarantined == {reason: 1}
    assert json.loads((tmp_path / "q" / "events.jsonl").read_text())["row"] == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["YES"], "fewer-than-two-options"),
        (["YES", "NO", "no "], "options-equal"),
        ("YES,NO", "invalid-field"),
        (["YES", 3], "invalid-field"),
        (None, "missing-field"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: Any, reason: str) -> None:
    fields = SETTINGS["fields"] | {"options": "options"}
    loaded = load(tmp_path, [GOOD | {"options": options}], fields=fields, constants={})
    assert loaded.quarantined == {reason: 1}


def test_a_row_without_an_outcome_claims_no_url(tmp_path: Path) -> None:
    loaded = load(tmp_path, [GOOD | {"result": None}, GOOD, GOOD | {"id": 5}])
    assert len(loaded.records) == 1
    assert loaded.quarantined == {"no-outcome": 1, "duplicate-id": 1}
    loaded = load(tmp_path, [GOOD | {"id": 4}, GOOD | {"id": 5}], fields=SETTINGS["fields"] | {"id": "id"})
    assert loaded.quarantined == {"duplicate-url": 1}


def test_a_text_that_states_its_outcome_is_quarantined_with_the_sentence(tmp_path: Path) -> None:
    told = GOOD | {"url": "u/2", "body": "Resolves YES if it does.\n\nTherefore, resolving YES"}
    fields = SETTINGS["fields"] | {"criteria": "body"}
    loaded = load(tmp_path, [GOOD, told], fields=fields)
    assert [e.url for e in loaded.records] == ["u/1"]
    assert loaded.quarantined == {"text-states-outcome": 1}
    row = json.loads((tmp_path / "q" / "events.jsonl").read_text())
    assert row["row"] == 2
    assert "Therefore, resolving YES" in row["detail"]


def test_in_summer2024_an_event_closes_when_it_was_settled_not_when_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (REPOSITORY.parent / "shared/data/summer2024").is_dir():
        pytest.skip("../shared/data/summer2024 is absent")
    monkeypatch.chdir(REPOSITORY)
    events = load_events(load_settings([Path("configs/summer2024.yaml")]).events).records
    (nominee,) = [e for e in events if e.question.startswith("Will Donald Trump be the Republican nominee")]
    assert nominee.deadline is not None
    assert (f"{nominee.closed:%m-%d}", f"{nominee.deadline:%m-%d}") == ("07-15", "08-01")


def test_summer2024_gives_637_events_of_which_most_forecastable_ones_are_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not (REPOSITORY.parent / "shared/data/summer2024").is_dir():
        pytest.skip("../shared/data/summer2024 is absent")
    monkeypatch.chdir(REPOSITORY)
    settings = load_settings([Path("configs/summer2024.yaml")])
    loaded = load_events(settings.events)
    assert len(loaded.records) == 637
    assert loaded.quarantined == {"duplicate-url": 182, "no-outcome": 49, "text-states-outcome": 1}
    assert not any(e.beliefs for e in loaded.records)
    activity = Counter(a.day for a in load_articles(settings.articles).records)
    split = split_events(loaded.records, settings.events.train, settings.events.eval)
    assert split.dropped == {"crosses-boundary": 154}
    schedule = settings.events.schedule
    forecast = Counter(e.split for e in split.events if forecast_dates(e, activity, min(activity), schedule))
    assert forecast == {"train": 39, "eval": 340}
