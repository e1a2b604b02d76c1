import datetime as dt
import math
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrieval.lexical
import retrieval.postings_writer
from retrieval.article import Hit
from retrieval.days import DayTable
from retrieval.fusion import RANK_CONSTANT, fuse
from retrieval.lexical import (
    K1,
    LEXICAL_FILES,
    LONGEST_TERM,
    POSTINGS,
    B,
    LexicalQuery,
    Postings,
    Statistics,
    analyse,
    no_statistics,
)
from retrieval.postings_writer import write_postings

FIRST = dt.date(2026, 3, 1)
WORDS = ("poll", "senate", "vote", "rain", "coast")

corpora = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.sampled_from(WORDS), max_size=8)), min_size=1, max_size=14
).map(lambda rows: sorted(rows, key=lambda r: r[0]))


def made(rows: list[tuple[int, list[str]]]) -> tuple[Postings, DayTable, list[str]]:
    texts = [" ".join(words) for _, words in rows]
    days = DayTable.of_rows([FIRST + dt.timedelta(days=day) for day, _ in rows])
    with tempfile.TemporaryDirectory() as folder:
        write_postings(Path(folder), texts)
        return Postings.load(Path(folder), days), days, texts


def reference(texts: list[str], days: list[int], query: str, low: int, high: int, k: int) -> list[tuple[int, float]]:
    """BM25 by its definition, over the visible rows alone."""
    bags = {row: Counter(analyse(texts[row])) for row in range(low, high)}
    mean = max(sum(b.total() for b in bags.values()) / max(len(bags), 1), 1.0)
    scored = []
    for row, bag in bags.items():
        score = 0.0
        for term, weight in sorted(Counter(analyse(query)).items()):
            if term in bag:
                n = sum(term in b for b in bags.values())
                idf = math.log1p((len(bags) - n + 0.5) / (n + 0.5))
                score += weight * idf * bag[term] * (K1 + 1) / (bag[term] + K1 * (1 - B + B * bag.total() / mean))
        if score:
            scored.append((row, score))
    return sorted(scored, key=lambda r: (-round(r[1], 9), -days[r[0]], r[0]))[:k]


@settings(deadline=None)
@given(corpora, st.lists(st.sampled_from(WORDS), max_size=4), st.data(), st.integers(1, 6))
def test_a_masked_search_equals_bm25_over_the_visible_rows_alone(rows, words, data, k):
    postings, _, texts = made(rows)
    high = data.draw(st.integers(0, len(rows)))
    low = data.draw(st.integers(0, high))
    query = LexicalQuery.of(" ".join(words))
    statistics = postings.statistics(query.terms, low, high)
    found = postings.search(query, low, high, statistics, k)
    expected = reference(texts, [day for day, _ in rows], " ".join(words), low, high, k)
    assert [s for _, s in expected] == pytest.approx(list(found.scores))
    assert all(low <= row < high for row in found.rows)
    assert list(found.rows) == [row for row, _ in expected]


@settings(deadline=None)
@given(corpora, corpora, st.lists(st.sampled_from(WORDS), min_size=1, max_size=4), st.integers(1, 6))
def test_what_is_written_after_the_cutoff_moves_nothing_before_it(rows, later, words, k):
    alone, _, _ = made(rows)
    followed, _, _ = made(rows + [(day + 5, text) for day, text in later])
    query = LexicalQuery.of(" ".join(words))
    high = len(rows)
    before, after = (p.statistics(query.terms, 0, high) for p in (alone, followed))
    assert before == after
    assert alone.search(query, 0, high, before, k) == followed.search(query, 0, high, after, k)


def test_a_word_that_becomes_frequent_only_later_keeps_its_weight_before():
    early = [(0, ["rain", "coast"]), (0, ["poll", "coast"]), (1, ["coast", "vote"])]
    flood = [(3, ["rain", "rain", "rain"])] * 50
    alone, _, _ = made(early)
    followed, _, _ = made(early + flood)
    query = LexicalQuery.of("rain poll")
    seen = followed.search(query, 0, 3, followed.statistics(query.terms, 0, 3), 3)
    assert seen == alone.search(query, 0, 3, alone.statistics(query.terms, 0, 3), 3)
    # with the whole corpus' statistics the ranking would tell: the word of the flood loses its weight
    leaking = followed.search(query, 0, 3, followed.statistics(query.terms, 0, len(followed)), 3)
    assert leaking != seen


@settings(deadline=None)
@given(corpora, st.lists(st.sampled_from(WORDS), min_size=1, max_size=4), st.data())
def test_statistics_of_months_add_up_to_those_of_the_whole(rows, words, data):
    cut = data.draw(st.integers(0, len(rows)))
    whole, _, _ = made(rows)
    terms = LexicalQuery.of(" ".join(words)).terms
    parts = no_statistics(terms)
    for part in (rows[:cut], rows[cut:]):
        if part:
            postings, _, _ = made(part)
            parts += postings.statistics(terms, 0, len(part))
    assert parts == whole.statistics(terms, 0, len(rows))


def test_fewer_matches_than_asked_for_are_not_filled_up():
    postings, _, _ = made([(0, ["poll"]), (0, ["rain"]), (1, ["rain"])])
    query = LexicalQuery.of("poll")
    assert postings.search(query, 0, 3, postings.statistics(query.terms, 0, 3), 3).rows == (0,)
    nothing = LexicalQuery.of("unheard")
    assert postings.search(nothing, 0, 3, postings.statistics(nothing.terms, 0, 3), 3).rows == ()
    empty = LexicalQuery.of("... !?")
    assert postings.search(empty, 0, 3, postings.statistics(empty.terms, 0, 3), 3).rows == ()


@pytest.mark.parametrize(("low", "high"), [(-1, 2), (2, 1), (0, 4), (0, -1)])
def test_a_range_outside_the_month_is_refused(low, high):
    postings, _, _ = made([(0, ["poll"])] * 3)
    query = LexicalQuery.of("poll")
    with pytest.raises(ValueError, match="row range"):
        postings.statistics(query.terms, low, high)
    with pytest.raises(ValueError, match="row range"):
        postings.search(query, low, high, Statistics(documents=1, length=1, frequencies=(1,)), 1)


def test_statistics_of_fewer_articles_than_are_searched_are_refused():
    postings, _, _ = made([(0, ["poll"])] * 3)
    query = LexicalQuery.of("poll")
    with pytest.raises(ValueError, match="statistics of 2 articles"):
        postings.search(query, 0, 3, postings.statistics(query.terms, 0, 2), 1)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([*WORDS, "Élan", "\x00", "élan", "日本"]), max_size=9), max_size=20), st.data()
)
def test_postings_are_the_same_bytes_however_many_articles_are_taken_at_once(words, data):
    written = []
    texts = [" ".join(w) for w in words]
    for size in (4096, data.draw(st.integers(1, 7))):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(retrieval.postings_writer, "_CHUNK", size)
            write_postings(Path(folder), texts)
            written.append({f.name: f.read_bytes() for f in Path(folder).iterdir()})
    assert written[0] == written[1]
    assert set(written[0]) == set(LEXICAL_FILES)


def test_a_month_without_a_single_word_has_empty_postings():
    postings, _, _ = made([(0, []), (0, ["..."]), (1, ["!?"])])
    query = LexicalQuery.of("poll")
    statistics = postings.statistics(query.terms, 0, 3)
    assert statistics == Statistics(documents=3, length=0, frequencies=(0,))
    assert postings.search(query, 0, 3, statistics, 3).rows == ()


DAYS = DayTable.of_rows([FIRST, FIRST, FIRST + dt.timedelta(days=1)])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rows": [1, 0, 2, 2]}, "row order"),
        ({"rows": [0, 0, 2, 2]}, "row order"),
        ({"rows": [0, 1, 3, 2]}, "outside"),
        ({"rows": [-1, 1, 2, 2]}, "outside"),
        ({"terms": ["b", "a"]}, "alphabetical"),
        ({"terms": ["a", "a"]}, "alphabetical"),
        ({"starts": [0, 4, 4]}, "no postings"),
        ({"starts": [0, 5, 4]}, "before they begin"),
        ({"starts": [0, 3, 5]}, "starts"),
        ({"lengths": [1, 1]}, "day table"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2, 3, 1 << 20])
def test_postings_that_do_not_fit_together_are_refused(monkeypatch, wrong, says, at_once):
    monkeypatch.setattr(retrieval.lexical, "_CHECKED", at_once)
    right = {"terms": ["a", "b"], "starts": [0, 3, 4], "rows": [0, 1, 2, 2], "counts": [1] * 4, "lengths": [1, 1, 2]}

    def parts(terms, starts, rows, counts, lengths):
        numbers = (np.array(rows, np.int32), np.array(counts, np.int32), np.array(lengths, np.int32))
        return pa.array(terms, pa.large_string()), np.array(starts, np.int64), *numbers, DAYS

    assert len(Postings(*parts(**right))) == 3
    with pytest.raises(ValueError, match=says):
        Postings(*parts(**{**right, **wrong}))


def test_the_files_of_postings_are_mapped_and_never_writable(tmp_path: Path):
    write_postings(tmp_path, ["poll vote", "vote", "rain"])
    loaded = Postings.load(tmp_path, DAYS)
    assert len(loaded) == 3
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[1] for line in maps if line.endswith(POSTINGS) and str(tmp_path) in line]
    assert mapped == ["r--s"]


def test_words_meet_without_case_accents_and_endings():
    assert analyse("Votes, VOTED — naïve café") == analyse("vote voting naive cafe")


def hit(article_id: str, day: int = 0, score: float = 1.0) -> Hit:
    return Hit(article_id=article_id, title="", url="", day=FIRST + dt.timedelta(days=day), score=score, snippet="")


def test_fusion_adds_reciprocal_ranks_and_breaks_ties_by_day_then_id():
    dense = [hit("a", 0, 0.9), hit("b", 0, 0.8), hit("c", 1, 0.7)]
    lexical = [hit("d", 2, 31.0), hit("b", 0, 12.0)]
    fused = fuse([dense, lexical], 10)
    assert [h.article_id for h in fused] == ["b", "d", "a", "c"]
    assert fused[0].score == pytest.approx(2 / (RANK_CONSTANT + 2))
    assert fuse([dense, lexical], 1) == fused[:1]


def test_only_words_beyond_the_longest_are_left_out():
    assert analyse(f"{'x' * LONGEST_TERM} {'y' * (LONGEST_TERM + 1)} {'é' * 20}") == ["x" * LONGEST_TERM, "e" * 20]
