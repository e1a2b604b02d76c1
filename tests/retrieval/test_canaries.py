"""For every event an article after its close whose vector is the query itself: nothing can be nearer. No search returns one too early."""

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.approximate import Approximate, train_lists
from retrieval.days import DayTable
from retrieval.finder import Finder
from retrieval.half import to_half
from retrieval.kinds import certified_finder, exact_finder, rescorer
from retrieval.manifest import Approximation
from retrieval.mask import Vectors
from retrieval.shard import Shard

FIRST = dt.date(2024, 1, 1)
DIMENSION = 16
BATCH = 2_048
K = 3


@dataclass(frozen=True)
class Events:
    """Events of one shard: a query each, the number of its closing day, and the row of its canary, published later."""

    vectors: Vectors
    days: DayTable
    queries: Vectors
    closes: list[int]
    canaries: list[int]


def events_of(count: int, last: int) -> Events:
    """`count` events that close on days 0 to `last` − 1, an article on every day, and a canary from the very next day on."""
    draw = np.random.default_rng(count)
    closes = draw.integers(0, last, count)
    # every other canary is published as early as it can be
    appears = np.where(np.arange(count) % 2, closes + 1, draw.integers(closes + 1, last + 1))
    days = np.concatenate([np.arange(last + 1), appears])
    vectors = draw.standard_normal((len(days), DIMENSION)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[last + 1 :].copy()
    order = np.argsort(days, kind="stable")
    table = DayTable.of_rows([FIRST + dt.timedelta(days=int(day)) for day in days[order]])
    rows = np.argsort(order)[last + 1 :]
    return Events(vectors[order], table, queries, closes.tolist(), rows.tolist())


def exact(events: Events) -> Finder:
    return exact_finder(events.vectors, events.days)


def certified(events: Events) -> Finder:
    return certified_finder(events.vectors, to_half(events.vectors), events.days)


def approximate(events: Events) -> Finder:
    how = Approximation(code="sq", lists=20, probes=3, rescored=2)
    scorer = rescorer(events.vectors, events.days)
    return Approximate(scorer, exact(events), train_lists(events.vectors, how), how)


def batches(events: Events, pairs: int, by_cutoff: bool) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(event, first row that is not visible) of distinct (query, cutoff) pairs: first every event's close, then earlier cutoffs.

    `by_cutoff`: queries with one cutoff stand together, as lists are quickest to search.
    """
    closes = np.array(events.closes)
    event = np.repeat(np.arange(len(closes)), closes + 1)
    back = np.concatenate([np.arange(close + 1) for close in closes])
    high_of = np.array(
        [events.days.visible(None, FIRST + dt.timedelta(days=day))[1] for day in range(closes.max() + 1)]
    )
    order = np.argsort(back, kind="stable")[:pairs]
    cutoff = closes[event] - back
    if by_cutoff:
        order = order[np.argsort(cutoff[order], kind="stable")]
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        yield event[chosen], high_of[cutoff[chosen]]


def early_canaries(shard: Shard, events: Events, pairs: int, by_cutoff: bool = False) -> tuple[int, int, int]:
    """(pairs searched, canaries returned, rows returned after the cutoff)."""
    searched = canaries = late = 0
    canary_of = np.array(events.canaries)
    for asked, highs in batches(events, pairs, by_cutoff):
        answers = shard.search(events.queries[asked], [(0, high) for high in highs.tolist()], K)
        lengths = np.array([len(answer.rows) for answer in answers])
        assert (lengths == np.minimum(K, highs)).all()
        rows = np.fromiter(chain.from_iterable(answer.rows for answer in answers), np.int64)
        searched += len(answers)
        canaries += int((rows == np.repeat(canary_of[asked], lengths)).sum())
        late += int((rows >= np.repeat(highs, lengths)).sum())
    return searched, canaries, late


kinds = pytest.mark.parametrize("finder", [exact, certified, approximate])


@kinds
def test_no_cutoff_before_its_day_shows_a_canary(finder: Callable[[Events], Finder]) -> None:
    events = events_of(1_500, 600)
    shard = Shard(events.vectors, events.days, finder(events))
    assert early_canaries(shard, events, 20_000, finder is approximate) == (20_000, 0, 0)


@kinds
def test_a_canary_is_the_best_answer_from_its_day_on(finder: Callable[[Events], Finder]) -> None:
    events = events_of(1_500, 600)
    shard = Shard(events.vectors, events.days, finder(events))
    ranges = [(0, row + 1) for row in events.canaries]
    assert [a.rows[0] for a in shard.search(events.queries, ranges, 1)] == events.canaries


@pytest.mark.e2e
@pytest.mark.parametrize(("finder", "pairs"), [(exact, 1_000_000), (certified, 150_000), (approximate, 100_000)])
def test_a_million_searches_show_no_canary(finder: Callable[[Events], Finder], pairs: int) -> None:
    events = events_of(1_500, 1_500)
    shard = Shard(events.vectors, events.days, finder(events))
    assert early_canaries(shard, events, pairs, finder is approximate) == (pairs, 0, 0)
