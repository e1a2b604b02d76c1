"""Foreign rows: nothing that stands in a file ends a load, and nothing vanishes uncounted."""

import datetime as dt
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import FieldMapping
from cluster.failures import DataError, SettingsError
from retrieval.corpus.rows import BadRow, at_path, identity, load_rows, mapped_values, read_rows
from retrieval.corpus.times import TimeReader


def test_lines_that_cannot_be_read_are_quarantined_with_their_line_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"id": "a"}\n\nnot json\n\xff\xfe{}\n[1]\n'
        + b"[" * 100_000
        + b'\n{"id": "b"}\n{"id": "\\uD800"}\n{"id": "\\ud83d\\ude00"}'
    )
    records, counts = load_rows(file, "jsonl", lambda row, n: (n, row["id"]), tmp_path / "quarantine", "rows")
    assert records == ((1, "a"), (7, "b"), (9, "\N{GRINNING FACE}"))
    assert counts == {"not-json": 2, "not-utf8": 2, "not-an-object": 1}
    written = [json.loads(line) for line in (tmp_path / "quarantine" / "rows.jsonl").read_text().splitlines()]
    assert [(w["row"], w["reason"]) for w in written] == [
        (3, "not-json"),
        (4, "not-utf8"),
        (5, "not-an-object"),
        (6, "not-json"),
        (8, "not-utf8"),
    ]


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_whatever_bytes_a_file_holds_every_line_is_a_row_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    file.write_bytes(b"\n".join(lines))
    seen = list(read_rows(file, "jsonl"))
    assert all(isinstance(row, dict | BadRow) for _, row in seen)
    assert len(seen) == sum(bool(line.strip()) for line in file.read_bytes().split(b"\n"))


def test_a_refused_row_is_written_with_its_id_and_a_later_load_replaces_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": 7}\n')

    def refuse(row: dict[str, object], number: int) -> None:
        raise BadRow("odd", f"row {number} is odd")

    assert load_rows(file, "jsonl", refuse, tmp_path, "q") == ((), {"odd": 1})
    assert json.loads((tmp_path / "q.jsonl").read_text())["id"] == "7"
    load_rows(file, "jsonl", lambda row, n: row, tmp_path, "q")
    assert not (tmp_path / "q.jsonl").exists()


def test_parquet_rows_come_as_values_and_a_broken_file_is_a_data_error(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    when = dt.datetime(2024, 1, 2, 3, tzinfo=dt.UTC)
    pq.write_table(pa.table({"id": ["a", "b"], "meta": [{"t": when}, {"t": None}]}), file)
    rows = list(read_rows(file, "parquet"))
    assert [n for n, _ in rows] == [1, 2]
    assert at_path(rows[0][1], "meta.t") == when
    file.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"rows\.parquet"):
        list(read_rows(file, "parquet"))
    with pytest.raises(DataError, match="check the path"):
        list(read_rows(tmp_path / "absent", "jsonl"))


def test_a_mapping_takes_dotted_paths_constants_and_nothing_from_nowhere() -> None:
    row = {"a": {"b": [{"c": 1}]}, "x.y": 2, "null": None}
    mapping = FieldMapping(
        fields={"one": "a.b.0.c", "two": "x.y", "none": "null", "far": "a.q.r", "over": "a.b.5"},
        constants={"fixed": 3, "one": 9},
    )
    assert mapped_values(row, mapping) == {"one": 1, "two": 2, "fixed": 3}


def test_an_id_made_from_a_url_is_the_same_everywhere() -> None:
    assert identity({"url": "https://example.com/1"}) == identity({"url": "https://example.com/1", "id": None})
    assert identity({"url": "https://example.com/1"}) == "f2f9784142e4d11e"
    with pytest.raises(BadRow, match="missing-field"):
        identity({})


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("2024-07-01T11:52:25Z", "2024-07-01T11:52:25+00:00"),
        ("2022-1-26T14:32:06+02:00", "2022-01-26T12:32:06+00:00"),
        ("20200414T00:38:07Z", "2020-04-14T00:38:07+00:00"),
        ("2020-12-05T23:15:0Z", "2020-12-05T23:15:00+00:00"),
        ("2021-12-05 20:37:01+00", "2021-12-05T20:37:01+00:00"),
        ("2021-12-05 20:37:01.1234567-0530", "2021-12-06T02:07:01.123456+00:00"),
        (1_700_000_000, "2023-11-14T22:13:20+00:00"),
        (1_700_000_000_000, "2023-11-14T22:13:20+00:00"),
    ],
)
def test_a_time_with_an_offset_is_read_and_not_counted(raw: object, expected: str) -> None:
    times = TimeReader("America/New_York")
    assert times.read(raw).isoformat() == expected
    assert times.naive_times == 0


def test_a_naive_time_is_taken_in_the_zone_and_counted() -> None:
    times = TimeReader("America/New_York")
    assert times.read("2024-07-15 22:20:00").isoformat() == "2024-07-16T02:20:00+00:00"
    assert times.read(dt.date(2024, 1, 1)).isoformat() == "2024-01-01T05:00:00+00:00"
    assert times.naive_times == 2


@pytest.mark.parametrize(
    "raw",
    ["1988", "", "yesterday", "2024-13-01", "2024-02-30", "2024-115", "2024-01-01T25:00", "٢٠٢٤-01-01"],
)
def test_a_text_that_names_no_full_day_is_refused(raw: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        TimeReader("UTC").read(raw)


@pytest.mark.parametrize("raw", [True, 2024, float("nan"), None, [], 1e300, "0001-01-01T00:00:00+14:00"])
def test_a_value_that_is_no_instant_is_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        TimeReader("UTC").read(raw)


@pytest.mark.parametrize("raw", ["2016-12-31T23:59:60Z", "2016-12-31T18:59:60.5-05:00", "2017-01-01T05:29:60+0530"])
def test_a_leap_second_belongs_to_the_day_that_it_ends(raw: str) -> None:
    assert TimeReader("UTC").read(raw).isoformat() == "2016-12-31T23:59:59.999999+00:00"


@pytest.mark.parametrize(
    "raw", ["2016-12-31T23:58:60Z", "2016-12-31T12:00:60Z", "2016-12-31T23:59:60+01:00", "2016-12-31T23:59:61Z"]
)
def test_a_second_60_within_a_day_is_refused(raw: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        TimeReader("UTC").read(raw)


def test_the_latest_that_a_day_can_mean_is_its_end_in_its_zone() -> None:
    times = TimeReader("America/New_York")
    assert times.read_latest("2024-01-01").isoformat() == "2024-01-02T04:59:59.999999+00:00"
    assert times.read_latest(dt.date(2024, 1, 1)) == times.read_latest("20240101")
    assert times.read_latest("2024-01-01T00:00Z").isoformat() == "2024-01-01T00:00:00+00:00"
    with pytest.raises(ValueError, match="is not a time"):
        times.read_latest("9999-12-31")


def test_an_unknown_zone_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="Mars"):
        TimeReader("Mars/Olympus")
