"""`pastcast index add`: the same index as a build from all articles, touching nothing else, whatever kills it."""

import asyncio
import datetime as dt
import itertools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from corpora import article, corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from killed_builds import killed_at

from cluster.config import Settings, load_settings
from cluster.failures import DataError, SettingsError
from retrieval.add import AddSummary, add_from_settings
from retrieval.article import Article
from retrieval.build import build_from_settings
from retrieval.encoder import HashingEncoder
from retrieval.index_folder import ADDING
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.mask import Vectors
from retrieval.verify import verify_index

LATE = dt.datetime(2024, 6, 5, 12, tzinfo=dt.UTC)
NEW_DAY = dt.datetime(2024, 9, 2, tzinfo=dt.UTC)


def write(file: Path, articles: Sequence[Article]) -> Path:
    rows = [a.model_dump(mode="json", exclude={"day"}) for a in articles]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings_for(directory: Path, *overrides: str) -> Settings:
    return load_settings(
        overrides=[
            f"articles.path={directory / 'articles.jsonl'}",
            f"index.directory={directory / 'index'}",
            "index.encoder=hashing",
            "encoder.dimension=32",
            *overrides,
        ]
    )


def build(directory: Path, articles: Sequence[Article]) -> Path:
    directory.mkdir(exist_ok=True)
    write(directory / "articles.jsonl", articles)
    build_from_settings(settings_for(directory))
    return directory


def add(directory: Path, articles: Sequence[Article], name: str = "new.jsonl") -> AddSummary:
    return add_from_settings(settings_for(directory), write(directory / name, articles))


def contents(index: Path) -> dict[str, bytes]:
    kept = (p for p in index.rglob("*") if p.is_file() and p.name != ".lock" and "quarantine" not in p.parts)
    return {p.relative_to(index).as_posix(): p.read_bytes() for p in kept}


def test_a_new_day_and_a_late_article_give_the_bytes_of_a_build_from_all(tmp_path: Path) -> None:
    new = [article("late", LATE, "Copper tariff"), article("new", NEW_DAY, "Harbour")]
    made = build(tmp_path / "grown", corpus())
    untouched = {p: p.stat().st_mtime_ns for p in (made / "index" / "2024-05").iterdir()}
    summary = add(made, new)
    assert (summary.added, summary.already, summary.quarantined) == (2, 0, {})
    assert summary.rewritten == ("2024-06", "2024-09")
    clean = build(tmp_path / "clean", [*corpus(), *new])
    assert contents(made / "index") == contents(clean / "index")
    assert summary.fingerprint == Library.open(clean / "index").fingerprint
    assert {p: p.stat().st_mtime_ns for p in (made / "index" / "2024-05").iterdir()} == untouched
    assert verify_index(made / "index").faults == ()


def test_only_new_articles_are_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(tmp_path / "index", corpus())
    given: list[str] = []
    encode = HashingEncoder.encode

    def noted(self: HashingEncoder, texts: Sequence[str]) -> Vectors:
        given.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(HashingEncoder, "encode", noted)
    add(made, [article("late", LATE, "Copper tariff", text="Body")])
    assert given == ["Copper tariff\nBody"]
    given.clear()
    add(made, corpus()[:5])
    assert given == []


def test_what_is_there_already_is_counted_and_what_differs_is_quarantined_and_never_replaced(tmp_path: Path) -> None:
    made = build(tmp_path / "index", corpus())
    first, second, third = corpus()[:3]
    before = contents(made / "index")
    rows = [
        first,
        second.model_copy(update={"title": "Corrected"}),
        article("twin", LATE).model_copy(update={"url": third.url}),
    ]
    summary = add(made, rows)
    assert (summary.added, summary.already, summary.rewritten) == (0, 1, ())
    assert summary.quarantined == {"changed-article": 1, "duplicate-url": 1}
    assert contents(made / "index") == before
    (file,) = (made / "index" / "quarantine").glob("added-*.jsonl")
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(e["row"], e["id"], e["reason"]) for e in entries] == [
        (2, second.id, "changed-article"),
        (3, "twin", "duplicate-url"),
    ]
    assert "title" in entries[0]["detail"]
    assert third.id in entries[1]["detail"]
    build_from_settings(settings_for(made))
    assert not file.exists()


pool_of_rows = st.lists(
    st.builds(
        lambda i, url, day, title: article(f"a{i}", LATE + dt.timedelta(days=20 * day), title).model_copy(
            update={"url": f"u{url}"}
        ),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(0, 2),
        st.sampled_from(["One", "Two"]),
    ),
    max_size=8,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(pool_of_rows, st.lists(pool_of_rows, min_size=1, max_size=3))
def test_any_rows_added_in_any_portions_give_the_index_of_one_build(
    old: list[Article], portions: list[list[Article]]
) -> None:
    seed = article("seed", LATE)
    with tempfile.TemporaryDirectory() as folder:
        grown = build(Path(folder) / "grown", [seed, *old])
        for number, portion in enumerate(portions):
            add(grown, portion, f"{number}.jsonl")
        clean = build(Path(folder) / "clean", [seed, *old, *itertools.chain.from_iterable(portions)])
        assert contents(grown / "index") == contents(clean / "index")


def test_an_add_killed_at_any_moment_leaves_the_old_index_the_new_one_or_none_and_the_next_add_completes_it(
    tmp_path: Path,
) -> None:
    new = [article("late", LATE, "Copper tariff"), article("new", NEW_DAY, "Harbour")]
    old = build(tmp_path / "old", corpus(30))
    clean = build(tmp_path / "clean", [*corpus(30), *new])
    prints = {Library.open(at / "index").fingerprint for at in (old, clean)}
    closed = 0
    for moment in itertools.count():
        at = shutil.copytree(old, tmp_path / "killed")
        died = killed_at(moment, lambda: add(tmp_path / "killed", new))
        index = at / "index"
        if (index / "manifest.json").exists():
            library = Library.open(index)
            assert library.load()
            assert library.fingerprint in prints
        else:
            closed += 1
            with pytest.raises(DataError, match="index add` was interrupted"):
                Library.open(index)
        again = add(at, new)
        assert again.added + again.already == 2
        assert contents(index) == contents(clean / "index")
        assert not (index / ADDING).exists()
        shutil.rmtree(at)
        if not died:
            break
    assert moment > 20
    assert 0 < closed < moment / 2


def test_an_add_after_a_killed_one_of_other_articles_loses_neither(tmp_path: Path) -> None:
    one, two = article("one", LATE, "Copper"), article("two", NEW_DAY, "Harbour")
    at = build(tmp_path / "index", corpus(30))
    moment = 0
    while (at / "index" / "manifest.json").exists():
        assert killed_at(moment, lambda: add(at, [one]))
        moment += 1
    add(at, [two])
    assert contents(at / "index") == contents(build(tmp_path / "clean", [*corpus(30), one, two]) / "index")


def test_a_build_after_a_killed_add_is_a_build(tmp_path: Path) -> None:
    at = build(tmp_path / "index", corpus(30))
    clean = contents(at / "index")
    moment = 0
    while (at / "index" / "manifest.json").exists():
        assert killed_at(moment, lambda: add(at, [article("one", LATE, "Copper")]))
        moment += 1
    build_from_settings(settings_for(at))
    assert contents(at / "index") == clean


def test_answers_after_an_add_are_those_of_the_built_index(tmp_path: Path) -> None:
    new = corpus(40, seed=8)
    new = [a.model_copy(update={"id": f"x{a.id}", "url": f"{a.url}/x"}) for a in new]
    grown = build(tmp_path / "grown", corpus())
    add(grown, new)
    clean = build(tmp_path / "clean", [*corpus(), *new])
    encoder = HashingEncoder(32)
    ours, theirs = (LocalSearcher(Library.open(at / "index"), encoder) for at in (grown, clean))
    for cutoff in (dt.date(2024, 5, 30), dt.date(2024, 6, 20), dt.date(2024, 8, 1)):
        for query in ("copper tariff", "glacier", "ballot senate"):
            asked = (query, None, cutoff, 7)
            assert asyncio.run(ours.search(*asked)) == asyncio.run(theirs.search(*asked))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("encoder.dimension=16", "encoder"),
        ("encoder.instruction=Find.", r"encoder\.instruction"),
        ("index.text_characters=10", r"index\.text_characters"),
        ("index.kind=exact-bf16", r"index\.kind"),
    ],
)
def test_articles_are_not_added_by_another_rule_than_the_index_was_built_by(
    tmp_path: Path, override: str, said: str
) -> None:
    made = build(tmp_path / "index", corpus())
    before = contents(made / "index")
    with pytest.raises(SettingsError, match=said):
        add_from_settings(settings_for(made, override), write(made / "new.jsonl", [article("a", LATE)]))
    assert contents(made / "index") == before


def test_nothing_is_added_to_what_is_no_index_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished index"):
        add_from_settings(settings_for(tmp_path), write(tmp_path / "new.jsonl", [article("a", LATE)]))
    made = build(tmp_path / "index", corpus())
    (made / "index" / "2024-06" / "vectors.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"vectors\.npy"):
        add(made, [article("late", LATE)])
