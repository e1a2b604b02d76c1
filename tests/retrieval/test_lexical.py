import datetime as dt
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.article import Hit
from retrieval.days import DayTable
from retrieval.fusion import RANK_CONSTANT, fuse
from retrieval.lexical import K1, B, LexicalQuery, Postings, Statistics, analyse, no_statistics

FIRST = dt.date(2026, 3, 1)
WORDS = ("poll", "senate", "vote", "rain", "coast")

corpora = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.sampled_from(WORDS), max_size=8)), min_size=1, max_size=14
).map(lambda rows: sorted(rows, key=lambda r: r[0]))


def made(rows: list[tuple[int, list[str]]]) -> tuple[Postings, DayTable, list[str]]:
    texts = [" ".join(words) for _, words in rows]
    days = DayTable.of_rows([FIRST + dt.timedelta(days=day) for day, _ in rows])
    return Postings.of(texts, days), days, texts


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


def test_saved_postings_answer_as_before(tmp_path: Path):
    postings, days, _ = made([(0, ["poll", "vote"]), (1, ["vote"]), (1, ["Polls:", "polling"])])
    postings.save(tmp_path)
    loaded = Postings.load(tmp_path, days)
    query = LexicalQuery.of("Polls, voted")
    statistics = postings.statistics(query.terms, 0, 3)
    assert loaded.statistics(query.terms, 0, 3) == statistics
    assert loaded.search(query, 0, 3, statistics, 3) == postings.search(query, 0, 3, statistics, 3)


def test_postings_out_of_row_order_are_refused(tmp_path: Path):
    postings, days, _ = made([(0, ["poll"]), (1, ["poll"])])
    postings.save(tmp_path)
    np.save(tmp_path / "rows.npy", np.array([1, 0], np.int32))
    with pytest.raises(ValueError, match="row order"):
        Postings.load(tmp_path, days)


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
