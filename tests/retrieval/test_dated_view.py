import asyncio
import datetime as dt
import unicodedata
from pathlib import Path

import pytest
from corpora import START, WORDS, article, corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.failures import DataError
from retrieval.article import Article, Hit
from retrieval.build import build_index
from retrieval.encoder import HashingEncoder
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.view import BoundaryError, DatedView, NotReturned

JUNE = dt.date(2024, 6, 10)
FIRST = START.date()


@pytest.fixture(scope="module")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> LocalSearcher:
    directory = tmp_path_factory.mktemp("index")
    encoder = HashingEncoder(64)
    build_index(corpus(), encoder, directory)
    return LocalSearcher(Library.open(directory), encoder)


def index(directory: Path, articles: list[Article]) -> LocalSearcher:
    build_index(articles, HashingEncoder(), directory)
    return LocalSearcher(Library.open(directory), HashingEncoder())


def search(view: DatedView, query: str, k: int = 5) -> tuple[Hit, ...]:
    return asyncio.run(view.search(query, k))


def read(view: DatedView, article_id: str) -> Article:
    return asyncio.run(view.read(article_id))


class Scripted:
    """A searcher that returns what it is told: an index with a fault."""

    def __init__(self, hits: tuple[Hit, ...], opened: Article | None = None) -> None:
        self._hits, self._opened = hits, opened
        self.asked: list[object] = []

    async def search(self, query: str, first_day: dt.date | None, cutoff: dt.date, top_k: int) -> tuple[Hit, ...]:
        self.asked.append((query, first_day, cutoff, top_k))
        return self._hits

    async def fetch(self, article_id: str) -> Article | None:
        self.asked.append(article_id)
        return self._opened


def hit(article_id: str, day: dt.date) -> Hit:
    return Hit(article_id=article_id, title="t", url="u", day=day, score=1.0, snippet="s")


@given(
    st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join),
    st.integers(-3, 65),
    st.none() | st.integers(0, 40),
    st.integers(1, 150),
)
@settings(max_examples=80, deadline=None)
def test_no_search_shows_anything_from_outside_the_view(
    searcher: LocalSearcher, query: str, cutoff: int, width: int | None, k: int
) -> None:
    last = FIRST + dt.timedelta(days=cutoff)
    first = None if width is None else last - dt.timedelta(days=width)
    hits = search(DatedView(searcher, last, first), query, k)
    visible = {a.id: a for a in corpus() if a.day <= last and (first is None or first <= a.day)}
    assert {h.article_id for h in hits} <= set(visible)
    assert len(hits) == min(k, len(visible))
    assert all(h.day == visible[h.article_id].day for h in hits)
    assert list(hits) == sorted(hits, key=lambda h: (-h.score, -h.day.toordinal(), h.article_id))


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join), st.integers(0, 55), st.integers(1, 10))
@settings(max_examples=40, deadline=None)
def test_what_was_published_later_changes_nothing_about_an_earlier_view(
    searcher: LocalSearcher, query: str, cutoff: int, later: int
) -> None:
    day = FIRST + dt.timedelta(days=cutoff)
    everything = search(DatedView(searcher, day), query, 200)
    wider = search(DatedView(searcher, day + dt.timedelta(days=later)), query, 200)
    assert [h for h in wider if h.day <= day] == list(everything)


def test_the_nearest_possible_article_is_invisible_until_its_day(tmp_path: Path) -> None:
    query = "reactor ballot glacier"
    canary = article("canary", dt.datetime(2024, 6, 11, 0, 0, tzinfo=dt.UTC), query)
    weak = [article(f"weak{i}", dt.datetime(2024, 6, 10, 23, 59, 59, tzinfo=dt.UTC), f"harbour {i}") for i in range(3)]
    searcher = index(tmp_path, [*weak, canary])
    before = DatedView(searcher, JUNE)
    assert [h.article_id for h in search(before, query, 10)] == ["weak0", "weak1", "weak2"]
    with pytest.raises(NotReturned):
        read(before, "canary")
    assert search(DatedView(searcher, dt.date(2024, 6, 11)), query, 1)[0].article_id == "canary"


def test_the_day_is_the_utc_day_and_not_the_printed_one(tmp_path: Path) -> None:
    evening = dt.datetime(2024, 6, 10, 23, 30, tzinfo=dt.timezone(-dt.timedelta(hours=5)))
    searcher = index(tmp_path, [article("evening", evening)])
    assert search(DatedView(searcher, JUNE), "title") == ()
    assert search(DatedView(searcher, dt.date(2024, 6, 11)), "title")[0].article_id == "evening"


def test_equal_scores_go_to_the_newer_day_then_the_id_across_months(tmp_path: Path) -> None:
    days = {"b": (2024, 5, 30), "a": (2024, 5, 30), "d": (2024, 6, 2), "c": (2024, 6, 2), "e": (2024, 4, 1)}
    articles = [article(name, dt.datetime(*day, 12, tzinfo=dt.UTC)) for name, day in days.items()]
    hits = search(DatedView(index(tmp_path, articles), JUNE), "title")
    assert [h.article_id for h in hits] == ["c", "d", "a", "b", "e"]


@pytest.mark.parametrize("wrong", [None, "2024-06-10", dt.datetime(2024, 6, 10, tzinfo=dt.UTC), 0])
def test_no_cutoff_no_view(searcher: LocalSearcher, wrong: dt.date) -> None:
    with pytest.raises(TypeError, match="cutoff"):
        DatedView(searcher, wrong)


def test_a_first_day_must_be_a_day_that_is_not_after_the_cutoff(searcher: LocalSearcher) -> None:
    with pytest.raises(TypeError, match="first day"):
        DatedView(searcher, JUNE, dt.datetime(2024, 6, 1, tzinfo=dt.UTC))
    with pytest.raises(ValueError, match="after the cutoff"):
        DatedView(searcher, JUNE, dt.date(2024, 6, 11))


def test_the_cutoff_cannot_be_moved(searcher: LocalSearcher) -> None:
    view = DatedView(searcher, JUNE)
    with pytest.raises(AttributeError):
        view.cutoff = dt.date(2025, 1, 1)
    assert view.cutoff == JUNE


@pytest.mark.parametrize("k", [0, -1, 1001])
def test_a_top_k_out_of_bounds_is_refused(searcher: LocalSearcher, k: int) -> None:
    with pytest.raises(ValueError, match="top k"):
        search(DatedView(searcher, JUNE), "harbour", k)


def test_an_article_from_after_the_cutoff_is_an_error_and_none_of_the_hits_is_returned() -> None:
    view = DatedView(Scripted((hit("fine", JUNE), hit("future", dt.date(2024, 6, 11)))), JUNE)
    with pytest.raises(BoundaryError, match="future"):
        search(view, "anything")
    with pytest.raises(NotReturned):
        read(view, "fine")


def test_a_view_asks_for_its_own_days_and_opens_only_what_it_may_read() -> None:
    searcher = Scripted((hit("a", JUNE),), article("a", dt.datetime(2024, 6, 10, tzinfo=dt.UTC)))
    view = DatedView(searcher, JUNE, FIRST)
    search(view, "harbour", 3)
    with pytest.raises(NotReturned):
        read(view, "b")
    read(view, "a")
    assert searcher.asked == [("harbour", FIRST, JUNE, 3), "a"]


def test_an_article_from_before_the_first_day_or_one_too_many_is_an_error() -> None:
    early = Scripted((hit("early", dt.date(2024, 5, 31)),))
    with pytest.raises(BoundaryError, match="early"):
        search(DatedView(early, JUNE, dt.date(2024, 6, 1)), "anything")
    with pytest.raises(BoundaryError, match="1 were asked"):
        search(DatedView(Scripted((hit("a", JUNE), hit("b", JUNE))), JUNE), "anything", 1)


def test_what_a_search_returned_can_be_read_and_nothing_else(searcher: LocalSearcher) -> None:
    view, other = DatedView(searcher, JUNE), DatedView(searcher, JUNE)
    first = search(view, "tariff senate", 1)[0].article_id
    search(view, "monsoon", 1)
    assert read(view, first) == next(a for a in corpus() if a.id == first)
    with pytest.raises(NotReturned, match=first):
        read(other, first)


def test_an_id_must_be_the_same_character_for_character(tmp_path: Path) -> None:
    stored = unicodedata.normalize("NFC", "Café-1")
    searcher = index(tmp_path, [article(stored, dt.datetime(2024, 6, 1, tzinfo=dt.UTC))])
    view = DatedView(searcher, JUNE)
    assert search(view, "title")[0].article_id == stored
    assert read(view, stored).id == stored
    variants = [stored.lower(), f" {stored}", f"{stored} ", f"{stored}\n", unicodedata.normalize("NFD", stored)]
    for variant in [*variants, stored.replace("-", "‐"), f"{stored}\u200b", f"[{stored}]", "", "*", "\ud800"]:
        with pytest.raises(NotReturned):
            read(view, variant)


def test_an_opened_article_is_checked_again() -> None:
    late = article("a", dt.datetime(2024, 6, 11, tzinfo=dt.UTC))
    swapped = article("b", dt.datetime(2024, 6, 10, tzinfo=dt.UTC))
    for opened in (late, swapped):
        view = DatedView(Scripted((hit("a", JUNE),), opened), JUNE)
        search(view, "anything")
        with pytest.raises(BoundaryError):
            read(view, "a")


def test_a_returned_article_that_cannot_be_opened_is_named() -> None:
    view = DatedView(Scripted((hit("lost", JUNE),)), JUNE)
    search(view, "anything")
    with pytest.raises(DataError, match="lost"):
        read(view, "lost")


def test_a_query_that_is_no_text_is_still_answered(searcher: LocalSearcher) -> None:
    view = DatedView(searcher, JUNE)
    assert len(search(view, "\ud800 harbour")) == len(search(view, "")) == 5
