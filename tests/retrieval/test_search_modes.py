"""Lexical and hybrid search over whole indexes: what is counted, what is shown, what is refused."""

import asyncio
import dataclasses
import datetime as dt
import functools
import itertools
import json
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from corpora import START, WORDS, article, corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import SearchSettings, load_settings
from cluster.failures import DataError, SettingsError
from retrieval.article import Article, Hit
from retrieval.build import build_from_settings, build_index
from retrieval.encoder import HashingEncoder, Vectors
from retrieval.faiss_folders import export_faiss, import_faiss
from retrieval.lexical import ANALYSIS, K1, LEXICAL_FILES, POSTINGS, B, LexicalQuery, analyse, no_statistics
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.manifest import EXACT, IndexKind, Manifest
from retrieval.modes import described
from retrieval.scan import Asked, Query, WordCount, WordQuery, answers, check_asked, count_words
from retrieval.shard_files import file_hash
from retrieval.view import DatedView

ENCODER = HashingEncoder(32)
MODES = ("dense", "lexical", "hybrid")
FIRST = START.date()
CUTOFF = FIRST + dt.timedelta(days=31)
LAST = FIRST + dt.timedelta(days=60)
MONTH = "2024-06"


def mode(name: str, candidates: int = 10) -> SearchSettings:
    return SearchSettings.model_validate({"mode": name, "candidates": candidates})


def searcher(directory: Path, name: str, candidates: int = 10) -> LocalSearcher:
    return LocalSearcher(Library.open(directory), ENCODER, 280, mode(name, candidates))


def index(directory: Path, articles: Sequence[Article], name: str) -> LocalSearcher:
    build_index(articles, ENCODER, directory)
    return searcher(directory, name)


def search(
    at: LocalSearcher, query: str, cutoff: dt.date = LAST, first: dt.date | None = None, k: int = 5
) -> tuple[Hit, ...]:
    return asyncio.run(DatedView(at, cutoff, first).search(query, k))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("modes")
    build_index(corpus(), ENCODER, directory)
    return directory


@pytest.fixture(scope="module")
def searchers(built: Path) -> dict[str, LocalSearcher]:
    return {name: searcher(built, name) for name in MODES}


# --- against a slow reference written from the formulas


def by_words(
    articles: Sequence[Article], query: str, first: dt.date | None, cutoff: dt.date
) -> list[tuple[str, float]]:
    """Every visible article that holds a word of the query: (id, BM25 over the visible articles alone), best first."""
    seen = {a.id: a for a in articles if a.day <= cutoff and (first is None or first <= a.day)}
    bags = {i: Counter(analyse(f"{a.title}\n{a.summary}\n{a.text}")) for i, a in seen.items()}
    mean = max(sum(bag.total() for bag in bags.values()) / max(len(bags), 1), 1.0)
    scores = dict.fromkeys(bags, 0.0)
    for term, weight in sorted(Counter(analyse(query)).items()):
        holders = [i for i, bag in bags.items() if term in bag]
        idf = math.log1p((len(bags) - len(holders) + 0.5) / (len(holders) + 0.5))
        for i in holders:
            often, damping = bags[i][term], K1 * (1 - B + B * bags[i].total() / mean)
            scores[i] += weight * idf * often * (K1 + 1) / (often + damping)
    return best_first({i: score for i, score in scores.items() if score}, seen)


def by_vector(
    articles: Sequence[Article], query: str, first: dt.date | None, cutoff: dt.date
) -> list[tuple[str, float]]:
    seen = {a.id: a for a in articles if a.day <= cutoff and (first is None or first <= a.day)}
    if not seen:
        return []
    vectors = ENCODER.encode(["\n".join(p for p in (a.title, a.summary, a.text) if p) for a in seen.values()])
    scores = (vectors.astype("float64") * ENCODER.encode([query])[0]).sum(axis=1)
    return best_first(dict(zip(seen, scores.tolist(), strict=True)), seen)


def fused(rankings: Sequence[Sequence[tuple[str, float]]], articles: Sequence[Article]) -> list[tuple[str, float]]:
    """Forecast-Dojo A.2: the sum of 1/(60 + rank)."""
    earned: dict[str, float] = {}
    for ranking in rankings:
        for rank, (i, _) in enumerate(ranking, 1):
            earned[i] = earned.get(i, 0.0) + 1 / (60 + rank)
    return best_first(earned, {a.id: a for a in articles})


def best_first(scores: dict[str, float], seen: dict[str, Article]) -> list[tuple[str, float]]:
    return sorted(scores.items(), key=lambda s: (-round(s[1], 10), -seen[s[0]].day.toordinal(), s[0]))


def reference(
    name: str, articles: Sequence[Article], query: str, first: dt.date | None, cutoff: dt.date, k: int, candidates: int
) -> list[tuple[str, float]]:
    if name == "hybrid":
        depth = max(k, candidates)
        rankings = [rank(articles, query, first, cutoff)[:depth] for rank in (by_vector, by_words)]
        return fused(rankings, articles)[:k]
    return (by_words if name == "lexical" else by_vector)(articles, query, first, cutoff)[:k]


queries = st.lists(st.sampled_from([*WORDS, "Harbours", "unheard", "..."]), max_size=5).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MODES),
    queries,
    st.integers(-3, 65),
    st.none() | st.integers(0, 40),
    st.integers(1, 150),
    st.sampled_from([1, 3, 10, 40]),
)
def test_every_mode_answers_as_its_formula_over_the_visible_articles_alone(
    built: Path, name: str, query: str, cutoff: int, width: int | None, k: int, candidates: int
) -> None:
    last = FIRST + dt.timedelta(days=cutoff)
    first = None if width is None else last - dt.timedelta(days=width)
    hits = search(opened(built, name, candidates), query, last, first, k)
    expected = reference(name, corpus(), query, first, last, k, candidates)
    assert [h.article_id for h in hits] == [i for i, _ in expected]
    assert [h.score for h in hits] == pytest.approx([score for _, score in expected], abs=1e-9)
    days = {a.id: a.day for a in corpus()}
    assert all(h.day == days[h.article_id] <= last and (first is None or first <= h.day) for h in hits)


opened = functools.cache(searcher)


texts = st.lists(st.sampled_from([*WORDS[:5], "flood"]), max_size=6).map(" ".join)
dated = st.lists(st.tuples(st.integers(0, 20), texts), min_size=1, max_size=12)


def made(rows: Sequence[tuple[int, str]], prefix: str = "a") -> list[Article]:
    return [
        article(f"{prefix}{i:02}", START + dt.timedelta(days=day), text or "-", text)
        for i, (day, text) in enumerate(rows)
    ]


@settings(max_examples=15, deadline=None)
@given(dated, dated, texts, st.integers(0, 20), st.none() | st.integers(0, 20), st.integers(1, 12))
def test_what_is_published_later_or_before_the_first_day_moves_no_answer_of_any_mode(
    rows: list[tuple[int, str]],
    others: list[tuple[int, str]],
    query: str,
    cutoff: int,
    width: int | None,
    k: int,
) -> None:
    low = -100 if width is None else cutoff - width
    last = FIRST + dt.timedelta(days=cutoff)
    first = None if width is None else last - dt.timedelta(days=width)
    alone = [row for row in rows if low <= row[0] <= cutoff]
    unseen = [row for row in others if not low <= row[0] <= cutoff]
    with tempfile.TemporaryDirectory() as folder:
        build_index(made([*alone, (cutoff + 1, "last")]), ENCODER, Path(folder) / "alone")
        build_index([*made(alone), *made([*unseen, (cutoff + 1, "last")], "b")], ENCODER, Path(folder) / "more")
        for name in MODES:
            answers = [search(searcher(Path(folder) / f, name), query, last, first, k) for f in ("alone", "more")]
            assert answers[0] == answers[1]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODES), queries, st.integers(0, 55), st.integers(1, 10))
def test_what_is_visible_stays_visible_later(
    searchers: dict[str, LocalSearcher], name: str, query: str, cutoff: int, later: int
) -> None:
    day = FIRST + dt.timedelta(days=cutoff)
    early = search(searchers[name], query, day, k=200)
    late = search(searchers[name], query, day + dt.timedelta(days=later), k=200)
    assert {h.article_id for h in early} == {h.article_id for h in late if h.day <= day}


@pytest.mark.parametrize("name", ["lexical", "hybrid"])
def test_a_word_that_becomes_frequent_only_after_the_cutoff_does_not_move_the_ranking_before_it(
    tmp_path: Path, name: str
) -> None:
    rare = [
        article("a-rain", START, "Rain in the valley", "rain"),
        article("b-poll", START, "A poll", "poll poll valley"),
        article("coast", START + dt.timedelta(days=14), "The coast", "coast poll"),
    ]
    flood = [article(f"flood{i:03}", START + dt.timedelta(days=15 + i % 30), "Rain", "rain " * 4) for i in range(200)]
    query, cutoff = "rain poll", FIRST + dt.timedelta(days=14)
    before = index(tmp_path / "before", rare, name)
    after = index(tmp_path / "after", [*rare, *flood], name)
    seen = search(before, query, cutoff, k=3)
    assert search(after, query, cutoff, k=3) == seen
    assert seen[0].article_id == "a-rain"
    # with a weight from the whole corpus `rain` would be the commonest word, and fall behind
    lexical = searcher(tmp_path / "after", "lexical")
    late = [h.article_id for h in search(lexical, query, LAST, k=203) if not h.article_id.startswith("flood")]
    assert late[0] == "b-poll"


def test_fused_scores_are_sums_of_reciprocal_ranks_of_ten_candidates_each(searchers: dict[str, LocalSearcher]) -> None:
    query, k = "tariff senate", 3
    dense, lexical = (search(searchers[name], query, k=10) for name in ("dense", "lexical"))
    earned: Counter[str] = Counter()
    for ranking in (dense, lexical):
        earned.update({h.article_id: 1 / (60 + rank) for rank, h in enumerate(ranking, 1)})
    hits = search(searchers["hybrid"], query, k=k)
    assert {h.article_id: h.score for h in hits} == pytest.approx({h.article_id: earned[h.article_id] for h in hits})
    assert min(h.score for h in hits) >= sorted(earned.values())[-k]


def test_hybrid_answers_do_not_depend_on_how_vectors_are_scanned(built: Path, tmp_path: Path) -> None:
    build_index(corpus(), ENCODER, tmp_path, kind=IndexKind(name="exact-bf16"))
    half, exact = searcher(tmp_path, "hybrid"), searcher(built, "hybrid")
    for words in itertools.pairwise(WORDS):
        assert search(half, " ".join(words), CUTOFF, k=7) == search(exact, " ".join(words), CUTOFF, k=7) != ()


# --- guards


def test_fewer_lexical_matches_than_asked_for_are_not_filled_up(tmp_path: Path) -> None:
    rows = [(0, "poll"), (1, "rain"), (40, "poll")]
    lexical = index(tmp_path, made(rows), "lexical")
    assert [h.article_id for h in search(lexical, "poll", FIRST + dt.timedelta(days=2))] == ["a00"]
    assert [h.article_id for h in search(lexical, "poll", k=1000)] == ["a02", "a00"]
    assert search(lexical, "poll", FIRST + dt.timedelta(days=39), FIRST + dt.timedelta(days=1)) == ()
    assert search(lexical, "unheard") == ()


@pytest.mark.parametrize("query", ["", " \n", "... !? —", "\ud800", "\x00", "x" * 100])
def test_a_query_without_a_known_word_matches_nothing_by_words_and_is_ranked_by_vectors_alone(
    searchers: dict[str, LocalSearcher], query: str
) -> None:
    assert search(searchers["lexical"], query) == ()
    found = [search(searchers[name], query) for name in ("dense", "hybrid")]
    assert [h.article_id for h in found[0]] == [h.article_id for h in found[1]]
    assert len(found[0]) == 5


@pytest.mark.parametrize("name", MODES)
def test_lone_surrogates_and_very_long_queries_are_answered(searchers: dict[str, LocalSearcher], name: str) -> None:
    assert search(searchers[name], "\ud800harbour \udfff ballot")
    long = " ".join(f"{WORDS[i % 12]} word{i}" for i in range(5_000))
    assert len(search(searchers[name], long, k=50)) == 50


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("k", [0, -1, 1001, True])
def test_a_top_k_out_of_bounds_is_refused_also_where_nothing_is_visible(
    searchers: dict[str, LocalSearcher], name: str, k: int
) -> None:
    for cutoff in (LAST, dt.date(2000, 1, 1)):
        with pytest.raises(ValueError, match="top k"):
            asyncio.run(searchers[name].search("harbour", None, cutoff, k))


@pytest.mark.parametrize("name", MODES)
def test_an_empty_range_shows_nothing(searchers: dict[str, LocalSearcher], name: str) -> None:
    before, after = FIRST - dt.timedelta(days=1), LAST + dt.timedelta(days=1)
    assert search(searchers[name], "harbour", before) == ()
    assert search(searchers[name], "harbour", after + dt.timedelta(days=9), after) == ()
    assert asyncio.run(searchers[name].search("harbour", LAST, FIRST, 5)) == (), "crossed days"


@pytest.mark.parametrize("name", MODES)
def test_more_than_there_is_gives_what_there_is(searchers: dict[str, LocalSearcher], name: str) -> None:
    hits = search(searchers[name], " ".join(WORDS), k=1000)
    assert len(hits) == len({h.article_id for h in hits}) == len(corpus())


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("wrong", [None, "2024-06-10", dt.datetime(2024, 6, 10, tzinfo=dt.UTC)])
def test_a_search_without_a_plain_cutoff_is_refused(
    searchers: dict[str, LocalSearcher], name: str, wrong: dt.date
) -> None:
    with pytest.raises(TypeError, match="cutoff"):
        asyncio.run(searchers[name].search("harbour", None, wrong, 3))


@pytest.mark.parametrize("name", MODES)
def test_the_best_possible_article_is_invisible_until_its_day(tmp_path: Path, name: str) -> None:
    query = "reactor ballot glacier"
    canary = article("canary", dt.datetime(2024, 6, 11, 0, 0, tzinfo=dt.UTC), query, query)
    weak = [article(f"weak{i}", dt.datetime(2024, 6, 10, 23, 59, 59, tzinfo=dt.UTC), f"ballot {i}") for i in range(3)]
    at = index(tmp_path, [*weak, canary], name)
    assert {h.article_id for h in search(at, query, dt.date(2024, 6, 10))} == {"weak0", "weak1", "weak2"}
    assert search(at, query, dt.date(2024, 6, 11))[0].article_id == "canary"


# --- the index


def test_lexical_search_needs_no_encoder(built: Path, searchers: dict[str, LocalSearcher]) -> None:
    bare = LocalSearcher(Library.open(built), None, search=mode("lexical"))
    assert search(bare, "tariff senate") == search(searchers["lexical"], "tariff senate") != ()
    for name in ("dense", "hybrid"):
        with pytest.raises(SettingsError, match=f"search.mode {name}.*encoder"):
            LocalSearcher(Library.open(built), None, search=mode(name))


def test_an_index_without_postings_serves_dense_search_alone_and_says_what_to_do(tmp_path: Path) -> None:
    build_index(corpus(), ENCODER, tmp_path, lexical=False)
    assert not any((tmp_path / MONTH / name).exists() for name in LEXICAL_FILES)
    library = Library.open(tmp_path)
    assert library.manifest.lexical is None
    assert search(searcher(tmp_path, "dense"), "harbour")
    for name in ("lexical", "hybrid"):
        with pytest.raises(SettingsError, match=rf"search\.mode {name} needs; set index\.lexical: true.*index build"):
            searcher(tmp_path, name)


def test_postings_are_added_to_an_index_without_encoding_anything_again(built: Path, tmp_path: Path) -> None:
    class Deaf(HashingEncoder):
        def encode(self, texts: object) -> Vectors:
            raise AssertionError("nothing is to be encoded again")

    build_index(corpus(), ENCODER, tmp_path, lexical=False)
    assert build_index(corpus(), Deaf(32), tmp_path).kept == 0
    assert build_index(corpus(), Deaf(32), tmp_path).kept == 3
    assert Library.open(tmp_path).fingerprint == Library.open(built).fingerprint
    assert build_index(corpus(), Deaf(32), tmp_path, lexical=False).kept == 0
    assert not (tmp_path / MONTH / POSTINGS).exists()


def test_the_setting_decides_whether_postings_are_built(tmp_path: Path) -> None:
    rows = [a.model_dump(mode="json", exclude={"day"}) for a in corpus()]
    (tmp_path / "articles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [f"articles.path={tmp_path / 'articles.jsonl'}", "index.encoder=hashing"]
    for wanted, found in (("true", ANALYSIS), ("false", None)):
        chosen = [*common, f"index.directory={tmp_path / wanted}", f"index.lexical={wanted}"]
        build_from_settings(load_settings(overrides=chosen))
        assert Library.open(tmp_path / wanted).manifest.lexical == found


def test_postings_of_another_analysis_are_refused(built: Path) -> None:
    library = Library.open(built)
    shards = tuple(s.model_copy(update={"lexical": "english-1, tantivy 0.1"}) for s in library.manifest.shards)
    other = Library(built, library.manifest.model_copy(update={"shards": shards}))
    with pytest.raises(SettingsError, match=r"made by english-1, tantivy 0\.1.*index build"):
        other.require_mode(mode("hybrid"))
    mixed = Library(built, library.manifest.model_copy(update={"shards": (shards[0], *library.manifest.shards[1:])}))
    with pytest.raises(SettingsError, match="without postings"):
        mixed.require_mode(mode("lexical"))


@pytest.mark.parametrize("name", LEXICAL_FILES)
@pytest.mark.parametrize("damage", ["gone", "flipped", "not named"])
def test_a_shard_whose_postings_changed_does_not_load(tmp_path: Path, name: str, damage: str) -> None:
    build_index(corpus(), ENCODER, tmp_path)
    file = tmp_path / MONTH / name
    if damage == "gone":
        file.unlink()
    elif damage == "flipped":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
    else:
        stored = json.loads((tmp_path / "manifest.json").read_text())
        del stored["shards"][1]["files"][name]
        (tmp_path / "manifest.json").write_text(json.dumps(stored))
    with pytest.raises(DataError, match=name):
        Library.open(tmp_path).load()


@pytest.mark.parametrize("name", LEXICAL_FILES)
def test_postings_of_another_month_do_not_load_even_if_the_hashes_fit(tmp_path: Path, name: str) -> None:
    build_index(corpus(), ENCODER, tmp_path)
    (tmp_path / MONTH / name).write_bytes((tmp_path / "2024-05" / name).read_bytes())
    library = Library.open(tmp_path)
    shards = tuple(
        s.model_copy(update={"files": {n: file_hash(tmp_path / s.month / n) for n in s.files}})
        for s in library.manifest.shards
    )
    with pytest.raises(DataError, match="not servable"):
        Library(tmp_path, Manifest(**{**dict(library.manifest), "shards": shards})).load()


def test_shards_from_elsewhere_get_postings_of_their_texts(built: Path, tmp_path: Path) -> None:
    identity = Library.open(built).manifest.encoder
    export_faiss(Library.open(built), tmp_path / "shards")
    import_faiss(tmp_path / "shards", tmp_path / "again", identity, EXACT)
    assert search(searcher(tmp_path / "again", "hybrid"), "copper") == search(searcher(built, "hybrid"), "copper")
    import_faiss(tmp_path / "shards", tmp_path / "bare", identity, EXACT, lexical=False)
    assert Library.open(tmp_path / "bare").manifest.lexical is None


def test_a_report_says_how_a_run_searches(built: Path) -> None:
    manifest = Library.open(built).manifest
    assert described(manifest, mode("dense")) == "exact"
    assert described(manifest, mode("lexical")) == "lexical: BM25 of what is visible"
    assert described(manifest, mode("hybrid", 15)) == (
        "hybrid: exact and BM25 of what is visible, the best 15 of each fused by reciprocal rank"
    )


# --- what a holder of shards is asked


def test_a_mixed_batch_is_answered_in_its_order_and_as_one_by_one(built: Path) -> None:
    shards = Library.open(built).load()
    words = LexicalQuery.of("tariff senate")
    count = WordCount(words, None, CUTOFF)
    by_word = WordQuery(words, count_words(shards, count), None, CUTOFF, 3)
    vectors = [Query(v, None, CUTOFF, 3) for v in ENCODER.encode(["harbour", "copper ballot"])]
    batch: list[Asked] = [vectors[0], by_word, count, vectors[1], count]
    told = answers(shards, batch, 280)
    assert told == [answers(shards, [asked], 280)[0] for asked in batch]
    assert (told[2], told[0] != told[3]) == (by_word.statistics, True)


def test_what_cannot_be_searched_is_refused_before_it_is_queued() -> None:
    words = LexicalQuery.of("tariff")
    none = no_statistics(words.terms)
    vector = ENCODER.encode(["tariff"])[0]
    for right in (
        Query(vector, None, CUTOFF, 1),
        WordQuery(words, none, None, CUTOFF, 1),
        WordCount(words, None, CUTOFF),
    ):
        check_asked(right, 32)
        with pytest.raises(TypeError, match="cutoff"):
            check_asked(dataclasses.replace(right, cutoff=START), 32)
    for k in (0, 1001):
        with pytest.raises(ValueError, match="top k"):
            check_asked(WordQuery(words, none, None, CUTOFF, k), 32)
        with pytest.raises(ValueError, match="top k"):
            check_asked(Query(vector, None, CUTOFF, k), 32)
    with pytest.raises(ValueError, match="32"):
        check_asked(Query(vector[1:], None, CUTOFF, 1), 32)
