"""Whole runs of the reader over the retrieval pool, in the modes of search that are not the default."""

import datetime as dt

import pytest

from cluster.config import RaySettings, load_settings
from cluster.failures import SettingsError
from cluster.session import start_session
from retrieval.build import build_from_settings
from rollout.events.world import make_world, write_settings
from rollout.execute import execute
from rollout.plan import make_plan
from rollout.run import RunDirectory


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    file = write_settings(folder, make_world(folder, 11, 12, 60, 3.0))
    build_from_settings(load_settings([file], ["index.encoder=hashing"]))
    return file


def settings(world, run, mode, *overrides):
    chosen = [
        f"run.directory={run}",
        f"search.mode={mode}",
        "index.encoder=hashing",
        "model.kind=reader",
        "rollout.prompt=compact",
        "rollout.modes=[memory-free]",
        "events.limit=2",
        "events.schedule.maximum=3",
        "retrieval.cutoff_lag_days=1",
        *overrides,
    ]
    return load_settings([world], chosen)


def shown(run):
    """(forecast date, article's day, the search result in which it was shown) of all that the run's searches showed."""
    with RunDirectory(run).ledger() as ledger:
        for record in ledger.records():
            assert record.failure is None, record.failure
            for turn in ledger.trajectory(record.key).turns:
                for result in turn.results:
                    if result.name == "search":
                        yield from ((record.key.date, a.day, result.text) for a in result.shown)


@pytest.mark.ray
@pytest.mark.e2e
def test_a_run_searches_in_the_mode_of_its_settings_and_never_beyond_the_cutoff(world, tmp_path):
    with start_session(RaySettings(cpus=2)):
        for mode, encoder in (("hybrid", "hashing"), ("lexical", "no-such-encoder")):
            run = tmp_path / mode
            made = make_plan(settings(world, run, mode, f"index.encoder={encoder}"))
            summary = execute(made, False, lambda _: None)
            assert (summary.ended, summary.recorded, summary.failures) == ("complete", len(made.keys), {})
            articles = list(shown(run))
            assert len(articles) > len(made.keys)
            assert all(day <= date - dt.timedelta(days=1) for date, day, _ in articles)
            assert RunDirectory(run).manifest().inputs["search"].startswith(f"{mode}: ")
            scores = {float(text.split("| score ")[1].split()[0]) for _, _, text in articles}
            assert (max(scores) <= 0.0328) == (mode == "hybrid"), "two first ranks are 2/61"


def test_the_mode_belongs_to_the_fingerprint_and_an_index_without_postings_is_refused(world, tmp_path):
    plans = {mode: make_plan(settings(world, tmp_path, mode)) for mode in ("dense", "lexical", "hybrid")}
    assert len({plan.manifest.fingerprint for plan in plans.values()}) == 3
    assert plans["dense"].manifest.inputs["search"] == "exact"
    assert plans["dense"].keys == plans["hybrid"].keys
    bare = [f"index.directory={tmp_path / 'bare'}", "index.lexical=false"]
    build_from_settings(settings(world, tmp_path, "dense", *bare))
    make_plan(settings(world, tmp_path, "dense", *bare))
    with pytest.raises(SettingsError, match=r"search\.mode hybrid needs; set index\.lexical: true"):
        make_plan(settings(world, tmp_path, "hybrid", *bare))
