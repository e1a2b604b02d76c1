import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from retrieval.days import DayTable

MAY = dt.date(2024, 5, 1)
offsets = st.lists(st.integers(0, 12), min_size=1, max_size=30).map(sorted)


def day(offset: int) -> dt.date:
    return MAY + dt.timedelta(days=offset)


@given(offsets, st.none() | st.integers(-2, 14), st.integers(-2, 14))
def test_the_visible_rows_are_exactly_those_between_the_two_days(rows: list[int], first: int | None, last: int) -> None:
    table = DayTable.of_rows([day(o) for o in rows])
    low, high = table.visible(None if first is None else day(first), day(last))
    assert 0 <= low <= high <= len(rows)
    expected = [i for i, o in enumerate(rows) if (first is None or first <= o) and o <= last]
    assert list(range(low, high)) == expected


def test_a_cutoff_day_is_inclusive() -> None:
    assert DayTable.of_rows([day(0), day(1), day(1), day(2)]).visible(None, day(1)) == (0, 3)


@given(offsets)
def test_counts_add_up_to_the_rows(rows: list[int]) -> None:
    counts = DayTable.of_rows([day(o) for o in rows]).counts()
    assert counts == {day(o): rows.count(o) for o in set(rows)}


@given(offsets)
def test_every_row_has_its_day_and_no_other_row_has_one(rows: list[int]) -> None:
    made = DayTable.of_rows([day(o) for o in rows])
    assert [made.day_of(row) for row in range(made.rows)] == [day(o) for o in rows]
    for row in (-1, made.rows):
        with pytest.raises(IndexError):
            made.day_of(row)


def test_a_table_reads_back_from_json() -> None:
    table = DayTable.of_rows([day(0), day(3)])
    assert DayTable.model_validate_json(table.model_dump_json()) == table


@pytest.mark.parametrize(
    ("rows", "days", "firsts"),
    [
        (3, [0, 1], [0]),
        (3, [], []),
        (3, [0, 1], [1, 2]),
        (3, [1, 0], [0, 1]),
        (3, [0, 0], [0, 1]),
        (3, [0, 1], [0, 0]),
        (3, [0, 1], [0, 3]),
        (3, [0, 1], [0, -1]),
        (0, [0], [0]),
        (3, [0], [False]),
    ],
)
def test_a_table_that_describes_no_order_cannot_be_made(rows: int, days: list[int], firsts: list[int]) -> None:
    with pytest.raises(ValidationError):
        DayTable(rows=rows, days=tuple(day(d) for d in days), first_rows=tuple(firsts))


def test_rows_whose_days_decrease_have_no_table() -> None:
    with pytest.raises(ValidationError):
        DayTable.of_rows([day(1), day(0)])


@pytest.mark.parametrize("wrong", [None, "2024-05-01", dt.datetime(2024, 5, 1, tzinfo=dt.UTC), 20240501])
def test_only_a_plain_date_is_a_cutoff(wrong: object) -> None:
    with pytest.raises(TypeError, match="cutoff"):
        DayTable.of_rows([day(0)]).visible(None, wrong)


def test_a_datetime_is_no_first_day() -> None:
    with pytest.raises(TypeError, match="first day"):
        DayTable.of_rows([day(0)]).visible(dt.datetime(2024, 5, 1, tzinfo=dt.UTC), day(0))
