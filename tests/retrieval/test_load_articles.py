"""Articles from files."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ArticlesSettings, load_settings
from retrieval.build import build_from_settings
from retrieval.corpus.load import load_articles

REPOSITORY = Path(__file__).parents[2]
MAPPING = {"url": "url", "title": "title", "text": "content", "published": "publishedAt", "source": "source.name"}
GOOD = {"url": "https://n.example/1", "title": "T", "content": "B", "publishedAt": "2024-07-01T23:59:59Z"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_foreign_rows_become_articles_or_named_reasons(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        GOOD | {"content": "Cut off… [+1830 chars]", "source": {"name": "AP"}},
        GOOD | {"url": "https://n.example/2", "title": None},
        GOOD,
        GOOD | {"url": "https://n.example/3", "title": None, "content": " "},
        GOOD | {"url": "https://n.example/4", "publishedAt": None},
        GOOD | {"url": "https://n.example/5", "publishedAt": "1988"},
        GOOD | {"url": "https://n.example/6", "title": ["list"]},
        GOOD | {"url": None},
        GOOD | {"url": "https://n.example/7", "title": "\ud800"},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    loaded = load_articles(ArticlesSettings(path=path, format="jsonl", fields=MAPPING), tmp_path / "q")
    assert [(a.title, a.text, a.source) for a in loaded.records] == [("T", "Cut off…", "AP"), ("", "B", "")]
    assert str(loaded.records[0].day) == "2024-07-01"
    assert loaded.quarantined == {
        "duplicate-id": 1,
        "empty": 1,
        "no-date": 1,
        "unparsable-time": 1,
        "invalid-field": 1,
        "not-utf8": 1,
        "missing-field": 1,
    }
    assert len((tmp_path / "q" / "articles.jsonl").read_text().splitlines()) == 7


NAIVE_AND_NOT = ["2024-07-01T12:00:00", "2024-07-01", "2024-07-01T12:00:00+02:00"]
CRAWL_MAPPING = MAPPING | {"crawled": "fetched"}


def days_and_reasons(tmp_path: Path, rows: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """(UTC day, date source) of every article, and the reasons of the others."""
    numbered = [GOOD | {"url": f"https://n.example/{i}"} | row for i, row in enumerate(rows)]
    path = write(tmp_path / "a.jsonl", numbered)
    loaded = load_articles(ArticlesSettings(path=path, format="jsonl", fields=CRAWL_MAPPING))
    return [(str(a.day), a.date_source) for a in loaded.records], loaded.quarantined


@pytest.mark.parametrize(
    ("published", "day"),
    [
        ("2024-07-01T23:59:59Z", "2024-07-01"),
        ("2024-07-01T23:59:59.999999Z", "2024-07-01"),
        ("2024-07-02T00:00:00Z", "2024-07-02"),
        ("2024-07-01T23:30:00-00:45", "2024-07-02"),
        ("2024-07-02T01:30:00+02:00", "2024-07-01"),
        ("2024-07-01T10:00:01-14:00", "2024-07-02"),
        ("2024-07-02T13:59:59+14:00", "2024-07-01"),
        ("2016-12-31T23:59:60Z", "2016-12-31"),
        ("2017-01-01T08:59:60+09:00", "2016-12-31"),
        ("2024-07-01 23:59:59", "2024-07-01"),
        ("2024-07-01", "2024-07-01"),
        ("2010-01-01T00:00:00Z", "2010-01-01"),
        ("2009-12-31T23:30:00-01:00", "2010-01-01"),
        ("2030-12-31T23:59:60Z", "2030-12-31"),
    ],
)
def test_an_article_belongs_to_the_utc_day_of_its_instant(tmp_path: Path, published: str, day: str) -> None:
    assert days_and_reasons(tmp_path, [{"publishedAt": published}]) == ([(day, "published")], {})


@pytest.mark.parametrize(
    "published", ["2009-12-31T23:59:60Z", "2010-01-01T00:30:00+01:00", "2030-12-31T23:30:00-01:00", 1.3e8]
)
def test_a_publication_in_an_impossible_year_is_none(tmp_path: Path, published: object) -> None:
    crawled = {"fetched": "2024-07-03T04:00:00+05:00"}
    rows = [{"publishedAt": published}, {"publishedAt": published} | crawled, {"publishedAt": None} | crawled]
    by_crawl = ("2024-07-02", "crawled")
    assert days_and_reasons(tmp_path, rows) == ([by_crawl, by_crawl], {"year-out-of-range": 1})
    assert days_and_reasons(tmp_path, [{"publishedAt": published, "fetched": "2035-01-01"}]) == (
        [],
        {"year-out-of-range": 1},
    )


def test_an_article_that_is_dated_after_its_crawl_is_quarantined(tmp_path: Path) -> None:
    rows = [
        {"publishedAt": "2024-07-01T12:00:00Z", "fetched": "2024-07-01T11:59:59Z"},
        {"publishedAt": "2024-07-01T12:00:00Z", "fetched": "2024-07-01T13:30:00+02:00"},
        {"publishedAt": "2024-07-02T00:00:00Z", "fetched": "2024-07-01"},
        {"publishedAt": "2024-07-01T12:00:00Z", "fetched": "2024-07-01T12:00:00Z"},
        {"publishedAt": "2024-07-01T12:00:00Z", "fetched": "2024-07-01"},
        {"publishedAt": "2024-07-01T12:00:00Z", "fetched": "soon"},
    ]
    day = ("2024-07-01", "published")
    assert days_and_reasons(tmp_path, rows) == ([day, day], {"dated-after-crawl": 3, "unparsable-time": 1})


def test_a_build_tells_how_many_times_had_no_offset(tmp_path: Path) -> None:
    rows = [GOOD | {"url": f"https://n.example/{i}", "publishedAt": at} for i, at in enumerate(NAIVE_AND_NOT)]
    settings = load_settings(
        overrides=[
            f"articles.path={write(tmp_path / 'a.jsonl', rows)}",
            "articles.format=jsonl",
            f"articles.fields={json.dumps(MAPPING)}",
            f"index.directory={tmp_path / 'index'}",
            "index.encoder=hashing",
        ]
    )
    summary = build_from_settings(settings)
    assert (summary.articles, summary.naive_times) == (3, 2)


def test_the_years_of_publication_are_a_setting(tmp_path: Path) -> None:
    row = {
        "id": "a",
        "url": "u",
        "title": "t",
        "text": "x",
        "published": "2042-01-01T00:00:00Z",
        "crawled": "2042-01-02",
    }
    settings = ArticlesSettings(path=write(tmp_path / "a.jsonl", [row]))
    assert load_articles(settings).quarantined == {"year-out-of-range": 1}
    assert len(load_articles(settings.model_copy(update={"last_year": 2042})).records) == 1


def test_two_ids_with_one_url_are_one_article(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD | {"id": "a"}, GOOD | {"id": "b"}, GOOD | {"id": "a", "url": "other"}])
    settings = ArticlesSettings(path=path, format="jsonl", fields=MAPPING | {"id": "id"})
    loaded = load_articles(settings)
    assert [a.id for a in loaded.records] == ["a"]
    assert loaded.quarantined == {"duplicate-url": 1, "duplicate-id": 1}


def test_our_own_format_refuses_unknown_fields_row_by_row(tmp_path: Path) -> None:
    good = {"id": "a", "url": "u", "title": "t", "text": "x", "published": "2030-01-01T00:00:00Z"}
    path = write(tmp_path / "a.jsonl", [good, good | {"id": "b", "url": "v", "mood": "happy"}])
    loaded = load_articles(ArticlesSettings(path=path))
    assert [a.id for a in loaded.records] == ["a"]
    assert loaded.quarantined == {"unknown-field": 1}


def test_the_summer2024_articles_all_load(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (REPOSITORY.parent / "shared/data/summer2024").is_dir():
        pytest.skip("../shared/data/summer2024 is absent")
    monkeypatch.chdir(REPOSITORY)
    loaded = load_articles(load_settings([Path("configs/summer2024.yaml")]).articles)
    assert (len(loaded.records), loaded.quarantined, loaded.naive_times) == (1272, {}, 0)
    assert sum(a.title == "" for a in loaded.records) == 4
    assert not any("chars]" in a.text for a in loaded.records)
    assert str(min(a.day for a in loaded.records)) == "2024-06-16"
