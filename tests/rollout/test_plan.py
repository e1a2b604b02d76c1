"""Plans over a small synthetic world: what is run, what is dropped and why, and what does not depend on the model."""

import asyncio
import datetime as dt
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Settings, load_settings
from cluster.failures import DataError, SettingsError
from retrieval.article import utc_day
from retrieval.build import build_from_settings
from retrieval.encoder import open_encoder
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.view import DatedView
from rollout.episode import chains
from rollout.events.world import World, make_world
from rollout.execute import execute
from rollout.plan import Plan, first_forecast_day, make_plan
from rollout.run import RunDirectory

EVENTS = 20


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    """Twenty events, two of whose rows are spoilt, and a lexical index of their articles."""
    folder = tmp_path_factory.mktemp("plan")
    made = make_world(folder / "world", 11, EVENTS, 60, 6.0)
    file = folder / "world" / "events.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["outcome"] = []
    rows[1]["criteria"] += "\nTherefore, resolving to " + rows[1]["outcome"][0]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_from_settings(settings((folder, made)))
    return folder, made


def settings(world: tuple[Path, World], **changes: Any) -> Settings:
    folder, made = world
    values = {
        "events.path": folder / "world/events.jsonl",
        "events.floor": folder / "world/floor.jsonl",
        "events.train": made.train.model_dump(mode="json"),
        "events.eval": made.eval.model_dump(mode="json"),
        "articles.path": folder / "world/articles.jsonl",
        "index.directory": folder / "index",
        "index.encoder": "hashing",
        "run.directory": folder / "run",
        "model.kind": "reader",
        "rollout.prompt": "compact",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return load_settings(
        [], [f"{key}={json.dumps(v) if isinstance(v, dict | list) else v}" for key, v in values.items()]
    )


def dates(plan: Plan) -> set[tuple[str, dt.date, str, int]]:
    return {(k.event, k.date, k.mode, k.rollout) for k in plan.keys}


def test_every_row_of_the_file_is_run_or_counted(world: tuple[Path, World]) -> None:
    plan = make_plan(settings(world))
    assert plan.quarantined == {"no-outcome": 1, "text-states-outcome": 1}
    assert [(r.row, r.reason) for r in plan.unused_rows] == [(1, "no-outcome"), (2, "text-states-outcome")]
    assert len(plan.events) + sum(plan.quarantined.values()) + sum(plan.dropped.values()) == EVENTS
    assert plan.dropped["other-split"] > 0
    assert {e.split for e in plan.events} == {"eval"}
    both = make_plan(settings(world, rollout__splits=["train", "eval"]))
    assert both.dropped == {k: v for k, v in plan.dropped.items() if k != "other-split"}
    assert len(both.events) == len(plan.events) + plan.dropped["other-split"]


def test_events_with_too_few_days_are_dropped_and_counted(world: tuple[Path, World]) -> None:
    both: dict[str, Any] = {"rollout__splits": ["train", "eval"], "events__schedule__maximum": 60}
    plain = make_plan(settings(world, **both))
    lengths = sorted((utc_day(e.closed) - utc_day(e.opened)).days - 1 for e in plain.events)
    longest = lengths[-1]
    assert lengths[0] < longest
    tight = make_plan(settings(world, events__schedule__minimum=longest, **both))
    assert len(tight.events) == lengths.count(longest)
    assert tight.dropped["too-few-eligible-days"] == len(lengths) - lengths.count(longest)


def test_a_plan_without_events_says_where_they_went(world: tuple[Path, World]) -> None:
    with pytest.raises(
        DataError, match=r"no event of .*18 loaded, quarantined .*'too-few-eligible-days'.*events\.eval"
    ):
        make_plan(settings(world, events__schedule__minimum=1000, events__schedule__maximum=1000))


def test_the_schedule_holds_every_mode_and_rollout_of_every_date_once(world: tuple[Path, World]) -> None:
    plan = make_plan(settings(world, rollout__count=2, rollout__modes=["no-tools", "memory-on"]))
    assert len(dates(plan)) == len(plan.keys)
    per_event = Counter(k.event for k in plan.keys)
    for event in plan.events:
        days = {k.date for k in plan.keys if k.event == event.id}
        assert per_event[event.id] == 2 * 2 * len(days)
        assert 3 <= len(days) <= 10
    assert plan.episodes == 2 * 2 * len(plan.events)
    assert len(chains(plan.keys)) == len(plan.keys) // 2 + 2 * len(plan.events)
    assert set(plan.floor()) == {(k.event, k.date) for k in plan.keys}
    assert plan.tokens > 0


def test_dates_are_the_same_for_every_kind_of_model(world: tuple[Path, World]) -> None:
    limits: dict[str, Any] = {"retrieval__cutoff_lag_days": 3, "retrieval__first_day": dt.date(2030, 1, 20)}
    plans = [make_plan(settings(world, model__kind=kind, **limits)) for kind in ("reader", "uniform", "market")]
    assert dates(plans[0]) == dates(plans[1]) == dates(plans[2])
    assert len({p.manifest.inputs["events"] for p in plans}) == 1
    assert len({p.manifest.fingerprint for p in plans}) == 3


@pytest.mark.parametrize(("first", "lag"), [(0, 0), (0, 4), (25, 0), (25, 4), (-400, 4)])
def test_every_forecast_date_leaves_an_article_to_be_seen(world: tuple[Path, World], first: int, lag: int) -> None:
    library = Library.open(world[0] / "index")
    bound = library.first_day + dt.timedelta(days=first)
    chosen = settings(
        world,
        retrieval__first_day=bound,
        retrieval__cutoff_lag_days=lag,
        rollout__splits=["train", "eval"],
        # every eligible day
        events__schedule__maximum=60,
        events__schedule__minimum=1,
        model__kind="reader",
    )
    plan = make_plan(chosen)
    earliest = max(library.first_day, bound) + dt.timedelta(days=lag)
    assert min(k.date for k in plan.keys) >= earliest
    searcher = LocalSearcher(library, open_encoder("hashing"))
    for day in {k.date for k in plan.keys}:
        view = DatedView(searcher, day - dt.timedelta(days=lag), bound)
        assert len(asyncio.run(view.search("survey", 1))) == 1


def test_the_first_forecast_day_is_the_first_article_that_may_be_shown_plus_the_lag() -> None:
    retrieval = settings_of(first_day="2024-03-05", lag=2)
    assert first_forecast_day(retrieval, dt.date(2024, 3, 1)) == dt.date(2024, 3, 7)
    assert first_forecast_day(retrieval, dt.date(2024, 3, 9)) == dt.date(2024, 3, 11)
    assert first_forecast_day(retrieval, None) == dt.date(2024, 3, 7)
    assert first_forecast_day(settings_of(first_day="null", lag=2), None) is None


def settings_of(first_day: str, lag: int) -> Any:
    return load_settings([], [f"retrieval.first_day={first_day}", f"retrieval.cutoff_lag_days={lag}"]).retrieval


def test_a_missing_index_is_refused_with_what_to_do(
    world: tuple[Path, World], caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = world[0] / "nowhere"
    with pytest.raises(SettingsError, match=f"no index at {nowhere}; run `pastcast index build`"):
        make_plan(settings(world, index__directory=nowhere))
    with caplog.at_level(logging.WARNING):
        make_plan(settings(world, index__directory=nowhere, model__kind="uniform"))
    assert f"no index at {nowhere}" in caplog.text


def test_a_missing_model_is_refused_with_what_to_do(world: tuple[Path, World]) -> None:
    with pytest.raises(
        SettingsError, match=r"model\.path no/such/model is neither prepared nor a folder; run `make setup`"
    ):
        make_plan(settings(world, model__kind="vllm", model__path="no/such/model"))


def test_deadlines_of_a_source_that_moves_them_reach_no_prompt(world: tuple[Path, World]) -> None:
    (source,) = {e.source for e in make_plan(settings(world)).events}
    plan = make_plan(settings(world, events__deadlines_move=[source]))
    assert plan.hidden_deadlines == EVENTS - 2
    assert all(e.prompt().deadline is None for e in plan.events)


def test_the_plan_of_another_run_touches_nothing_of_the_one_that_is_there(
    world: tuple[Path, World], tmp_path: Path
) -> None:
    plan = make_plan(settings(world, run__directory=tmp_path))
    assert list(tmp_path.iterdir()) == []
    run = RunDirectory(tmp_path)
    run.create(plan.settings, plan.manifest, plan.events, plan.keys, plan.floor(), plan.unused_rows)
    laid = contents(tmp_path)
    assert len((run.quarantine / "events.jsonl").read_text().splitlines()) == 2
    # other events altogether, none of them spoilt
    make_world(tmp_path.parent / f"{tmp_path.name}-other", 12, EVENTS, 60, 6.0)
    other = settings(
        world, run__directory=tmp_path, events__path=tmp_path.parent / f"{tmp_path.name}-other/events.jsonl"
    )
    for resume in (False, True):
        with pytest.raises(SettingsError, match=r"holds a run already|cannot be resumed"):
            execute(make_plan(other), resume, lambda progress: None)
    with run.lock(), pytest.raises(SettingsError, match="in use by another process"):
        execute(make_plan(other), True, lambda progress: None)
    assert contents(tmp_path) == laid


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def test_a_run_with_an_adapter_is_named_by_the_bytes_of_base_and_adapter(
    world: tuple[Path, World], tmp_path: Path
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "tuned"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    plain = make_plan(settings(world, model__kind="vllm", model__path=base))
    tuned = make_plan(settings(world, model__kind="vllm", model__path=base, model__adapter=adapter))
    assert (plain.keys[0].model, tuned.keys[0].model) == ("base", "tuned")
    assert tuned.model is not None
    assert tuned.model.adapter_path == str(adapter)
    assert tuned.manifest.inputs["weights"] == tuned.weights != plain.weights
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    again = make_plan(settings(world, model__kind="vllm", model__path=base, model__adapter=adapter))
    assert again.weights != tuned.weights
    assert again.manifest.fingerprint != tuned.manifest.fingerprint
    with pytest.raises(SettingsError, match=r"model\.adapter: .* is not an adapter folder"):
        make_plan(settings(world, model__kind="vllm", model__path=base, model__adapter=tmp_path / "none"))
    with pytest.raises(SettingsError, match="adapter is for kind vllm"):
        settings(world, model__adapter=adapter)
