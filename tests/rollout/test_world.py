"""Synthetic worlds: the same bytes for a seed, a floor that holds, faults where they say."""

import datetime as dt
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cluster.config import ArticlesSettings, EventsSettings
from cluster.failures import DataError, SettingsError
from retrieval.article import Article, utc_day
from retrieval.corpus.load import load_articles
from rollout.events.event import Event
from rollout.events.load import load_events
from rollout.events.split import split_events
from rollout.events.world import FAULTS, World, make_world

FILES = ("events.jsonl", "articles.jsonl", "floor.jsonl", "world.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    out = tmp_path_factory.mktemp("world")
    return out, make_world(out, 7, 60, 120, 8.0)


def events_of(out: Path) -> tuple[Event, ...]:
    loaded = load_events(EventsSettings(path=out / "events.jsonl"))
    assert loaded.quarantined == {}
    return loaded.records


def articles_of(out: Path) -> tuple[Article, ...]:
    return load_articles(ArticlesSettings(path=out / "articles.jsonl")).records


def floor_of(out: Path) -> dict[tuple[str, str], dict[str, float]]:
    rows = [json.loads(line) for line in (out / "floor.jsonl").read_text().splitlines()]
    return {(row["event"], row["date"]): row["probabilities"] for row in rows}


def digest(out: Path) -> str:
    return hashlib.sha256(b"".join((out / name).read_bytes() for name in FILES)).hexdigest()


def brier(probabilities: dict[str, float], event: Event) -> float:
    return sum((p - (option in event.outcome)) ** 2 for option, p in probabilities.items())


def test_a_seed_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rollout.events.world import FAULTS, make_world;"
        "make_world(Path(sys.argv[1]), 3, 12, 40, 5.5, FAULTS)"
    )
    for salt in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / salt)],
            env=os.environ | {"PYTHONHASHSEED": salt},
            cwd=Path(__file__).parents[2],
            check=True,
        )
    assert digest(tmp_path / "1") == digest(tmp_path / "2")
    make_world(tmp_path / "3", 4, 12, 40, 5.5, FAULTS)
    assert digest(tmp_path / "3") != digest(tmp_path / "1")


def test_the_floor_is_far_better_than_uniform_and_the_market_knows_more(made: tuple[Path, World]) -> None:
    out, _ = made
    floor = floor_of(out)
    best, market, equal, count = 0.0, 0.0, 0.0, 0
    for event in events_of(out):
        for day, belief in event.beliefs.items():
            if (utc_day(event.closed) - day).days >= 2:
                best += brier(floor[event.id, f"{day}"], event)
                market += brier(belief, event)
                equal += 1 - 1 / len(event.options)
                count += 1
    assert count > 1000
    assert 0.25 < best / count < 0.45 < equal / count
    assert market < best


def test_the_floor_is_calibrated(made: tuple[Path, World]) -> None:
    out, _ = made
    floor = floor_of(out)
    cases = [
        (p, o in e.outcome)
        for e in events_of(out)
        for d in list(e.beliefs)[10:11]
        for o, p in floor[e.id, f"{d}"].items()
    ]
    likely = [hit for p, hit in cases if p > 0.6]
    unlikely = [hit for p, hit in cases if p < 0.2]
    assert sum(likely) / len(likely) > 0.6
    assert sum(unlikely) / len(unlikely) < 0.2


def test_no_page_states_an_outcome_or_a_later_day_before_the_close(made: tuple[Path, World]) -> None:
    out, _ = made
    closes = {e.question.removeprefix("Who will win the ").rstrip("?"): utc_day(e.closed) for e in events_of(out)}
    decided = 0
    for article in articles_of(out):
        if article.title.endswith(" decided"):
            assert article.day > closes[article.title.removesuffix(" decided")]
            decided += 1
        for day in (word.strip(".,") for word in article.text.split() if word.startswith("2030-")):
            assert dt.date.fromisoformat(day) == article.day
    assert decided == 60


def test_a_survey_names_every_option_of_one_event_and_fits_a_snippet(made: tuple[Path, World]) -> None:
    out, world = made
    events = events_of(out)
    names = Counter(o for e in events for o in e.options)
    assert set(names.values()) == {1}
    surveys = [a for a in articles_of(out) if " points." in a.text]
    assert len(surveys) == world.surveys > 500
    for article in surveys:
        assert len(article.text) <= 280
        named = [e for e in events if any(f"{o} at " in article.text for o in e.options)]
        assert len(named) == 1
        assert all(f"{o} at " in article.text for o in named[0].options)
        assert utc_day(named[0].opened) <= article.day < utc_day(named[0].closed)


def test_the_suggested_windows_hold_about_three_to_two_and_some_events_cross(made: tuple[Path, World]) -> None:
    out, world = made
    split = split_events(events_of(out), world.train, world.eval)
    assert Counter(e.split for e in split.events) == {"train": 34, "eval": 23}
    assert split.dropped == {"crosses-boundary": 3}


def test_faults_are_planted_where_the_world_says_and_change_nothing_else(tmp_path: Path) -> None:
    make_world(tmp_path / "clean", 5, 20, 60, 6.0)
    world = make_world(tmp_path / "bad", 5, 20, 60, 6.0, FAULTS)
    assert Counter(p.fault for p in world.planted) == dict.fromkeys(FAULTS, 2)
    assert (tmp_path / "bad/floor.jsonl").read_bytes() == (tmp_path / "clean/floor.jsonl").read_bytes()

    loaded = load_articles(ArticlesSettings(path=tmp_path / "bad/articles.jsonl"))
    assert loaded.quarantined == {"no-date": 2, "duplicate-id": 2}
    bad, clean = {a.id: a for a in loaded.records}, {a.id: a for a in articles_of(tmp_path / "clean")}
    assert {i: a for i, a in bad.items() if i in clean} == clean
    before = {e.id: e for e in events_of(tmp_path / "clean")}
    after = {e.id: e for e in events_of(tmp_path / "bad")}
    for p in world.planted:
        if p.fault == "duplicate":
            assert bad[p.article].text == bad[p.other].text
            assert bad[p.article].url != bad[p.other].url
        elif p.fault == "future-text":
            assert after[p.event].outcome[0] in bad[p.article].text
            assert bad[p.article].day < utc_day(after[p.event].closed)
        elif p.fault == "no-date":
            assert p.article not in bad
        else:
            assert after[p.other].outcome[0] in after[p.event].background
            assert after[p.event].background != before[p.event].background


def test_another_world_is_never_written_over(tmp_path: Path) -> None:
    make_world(tmp_path, 1, 4, 30, 2.0)
    make_world(tmp_path, 1, 4, 30, 2.0)
    with pytest.raises(DataError, match="other parameters"):
        make_world(tmp_path, 2, 4, 30, 2.0)


@pytest.mark.parametrize(("events", "days", "articles"), [(0, 60, 1.0), (5, 29, 1.0), (5, 60, -1.0)])
def test_an_impossible_world_is_refused(tmp_path: Path, events: int, days: int, articles: float) -> None:
    with pytest.raises(SettingsError, match="cannot be made"):
        make_world(tmp_path, 1, events, days, articles)
    with pytest.raises(SettingsError, match="unknown fault 'typo'"):
        make_world(tmp_path, 1, 5, 60, 1.0, {"typo"})


@pytest.mark.parametrize("seed", range(5))
def test_small_and_silent_worlds_can_be_made_too(tmp_path: Path, seed: int) -> None:
    world = make_world(tmp_path, seed, 25, 30, 0.0, FAULTS)
    assert world.surveys == 0
    assert len(events_of(tmp_path)) == 25
