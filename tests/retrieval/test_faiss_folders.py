"""FAISS folders of other tools in, ours out; and every way in which a folder could lie about its days."""

import asyncio
import datetime as dt
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import corpus

from cluster.failures import DataError
from retrieval.build import build_index, encoder_identity
from retrieval.chunks import encoded_text
from retrieval.encoder import HashingEncoder, encoder_facts
from retrieval.faiss_folders import INDEX, METADATA, TEXTS, export_faiss, import_faiss
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.manifest import EXACT, IndexKind

ENCODER = HashingEncoder(32)
IDENTITY = encoder_identity(encoder_facts(ENCODER), 1000)
JUNE = "2024-06"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("index")
    build_index(corpus(), ENCODER, directory)
    return directory


@pytest.fixture
def shards(index: Path, tmp_path: Path) -> Path:
    export_faiss(Library.open(index), tmp_path / "shards")
    return tmp_path / "shards"


def searched(directory: Path) -> list[object]:
    searcher = LocalSearcher(Library.open(directory), ENCODER)
    cutoffs = [dt.date(2024, 5, 21) + dt.timedelta(days=7 * i) for i in range(9)]
    return [asyncio.run(searcher.search("harbour ballot tariff", None, cutoff, 9)) for cutoff in cutoffs]


@pytest.mark.parametrize("kind", [EXACT, IndexKind(name="exact-bf16")])
def test_what_is_exported_comes_in_again_as_the_same_index(
    index: Path, shards: Path, tmp_path: Path, kind: IndexKind
) -> None:
    summary = import_faiss(shards, tmp_path / "again", IDENTITY, kind)
    assert (summary.articles, summary.folders, summary.shards, summary.naive_times) == (len(corpus()), 3, 3, 0)
    assert searched(tmp_path / "again") == searched(index)
    if kind == EXACT:
        assert Library.open(tmp_path / "again").fingerprint == Library.open(index).fingerprint


def test_an_exported_folder_is_what_other_tools_read(shards: Path) -> None:
    assert [f.name for f in sorted(shards.iterdir())] == ["2024-05", "2024-06", "2024-07"]
    vectors: Any = faiss.read_index(str(shards / JUNE / INDEX))
    texts = pq.read_table(shards / JUNE / TEXTS)
    offsets = json.loads((shards / JUNE / METADATA).read_text())["day_offsets"]
    assert vectors.metric_type == faiss.METRIC_INNER_PRODUCT
    assert texts.column_names[:7] == [
        "title",
        "text",
        "article_id",
        "url",
        "published_date",
        "summary",
        "text_truncated",
    ]
    by_id = {a.id: a for a in corpus()}
    for day, (low, high) in offsets.items():
        assert set(texts["published_date"][low:high].to_pylist()) == {day}
    for row, article_id in enumerate(texts["article_id"].to_pylist()):
        expected = ENCODER.encode([encoded_text(by_id[article_id], 1000)])[0]
        np.testing.assert_array_equal(vectors.reconstruct(row), expected)


def foreign(folder: Path, days: dict[str, list[str]], dates: Callable[[str], object] = lambda day: day) -> None:
    """As another tool writes it: only the columns of the field, ids in no order, a flat index of either metric."""
    ids = [article_id for names in days.values() for article_id in names]
    folder.mkdir(parents=True)
    flat = faiss.IndexFlatL2(32)
    flat.add(ENCODER.encode(ids))
    faiss.write_index(flat, str(folder / INDEX))
    columns = {
        "title": [f"Title {i}" for i in ids],
        "text": ids,
        "article_id": ids,
        "url": [f"https://news.example/{i}" for i in ids],
        "published_date": [dates(day) for day, names in days.items() for _ in names],
        "summary": [None for _ in ids],
        "text_truncated": [True for _ in ids],
    }
    pq.write_table(pa.table(columns), folder / TEXTS)
    offsets, start = {}, 0
    for day, names in days.items():
        offsets[day] = [start, start + len(names)]
        start += len(names)
    (folder / METADATA).write_text(json.dumps({"day_offsets": offsets}))


def test_daily_folders_of_another_tool_become_months_in_order_of_day_and_id(tmp_path: Path) -> None:
    foreign(tmp_path / "in" / "b", {"2024-06-02": ["zebra", "apple"], "2024-06-03": []})
    foreign(tmp_path / "in" / "a", {"2024-06-01": ["mango"]})
    foreign(tmp_path / "in" / "c", {"2024-06-30": ["late"], "2024-07-01": ["new"]})
    summary = import_faiss(tmp_path / "in", tmp_path / "index", IDENTITY, EXACT)
    assert (summary.articles, summary.folders, summary.shards) == (5, 3, 2)
    june = Library.open(tmp_path / "index").load()[JUNE]
    assert [june.article(row).id for row in range(4)] == ["mango", "apple", "zebra", "late"]
    one = june.article(1)
    assert (one.source, one.published) == ("news.example", dt.datetime(2024, 6, 2, tzinfo=dt.UTC))
    searcher = LocalSearcher(Library.open(tmp_path / "index"), ENCODER)
    for word, cutoff, first in (("zebra", 2, "zebra"), ("zebra", 1, "mango")):
        hits = asyncio.run(searcher.search(word, None, dt.date(2024, 6, cutoff), 3))
        assert hits[0].article_id == first
        assert all(hit.day <= dt.date(2024, 6, cutoff) for hit in hits)


@pytest.mark.parametrize(
    ("written", "instant", "naive"),
    [
        ("2024-06-01T23:30:00-02:00", dt.datetime(2024, 6, 2, 1, 30, tzinfo=dt.UTC), 0),
        ("2024-06-02T10:00:00", dt.datetime(2024, 6, 2, 10, tzinfo=dt.UTC), 1),
        (dt.date(2024, 6, 2), dt.datetime(2024, 6, 2, tzinfo=dt.UTC), 0),
        (dt.datetime(2024, 6, 2, 3, tzinfo=dt.UTC), dt.datetime(2024, 6, 2, 3, tzinfo=dt.UTC), 0),
    ],
)
def test_a_published_date_may_be_a_day_or_a_time(
    tmp_path: Path, written: object, instant: dt.datetime, naive: int
) -> None:
    foreign(tmp_path / "in", {"2024-06-02": ["one"]}, lambda _: written)
    assert import_faiss(tmp_path / "in", tmp_path / "index", IDENTITY, EXACT).naive_times == naive
    assert Library.open(tmp_path / "index").load()[JUNE].article(0).published == instant


def offsets(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        metadata = json.loads((folder / METADATA).read_text())
        replaced = edit(metadata)
        (folder / METADATA).write_text(json.dumps(metadata if replaced is None else replaced))

    return change


def set_days(**days: object) -> Callable[[Path], None]:
    """Changes days of June by their number."""
    return offsets(lambda m: m["day_offsets"].update({f"2024-06-{day[1:]}": rows for day, rows in days.items()}))


def first_day_later(metadata: dict[str, Any]) -> None:
    table = metadata["day_offsets"]
    first, second, *_ = sorted(table)
    table[first][1] -= 1
    table[second][0] -= 1


def swap_two_rows(folder: Path) -> None:
    texts = pq.read_table(folder / TEXTS)
    order = [texts.num_rows - 1, *range(1, texts.num_rows - 1), 0]
    pq.write_table(texts.take(order), folder / TEXTS)


def lose_a_text(folder: Path) -> None:
    pq.write_table(pq.read_table(folder / TEXTS).slice(1), folder / TEXTS)


def lose_the_dates(folder: Path) -> None:
    pq.write_table(pq.read_table(folder / TEXTS).drop_columns(["published_date"]), folder / TEXTS)


def forget_a_date(folder: Path) -> None:
    texts = pq.read_table(folder / TEXTS).drop_columns(["published"])
    dates = texts["published_date"].to_pylist()
    dates[3] = None
    pq.write_table(texts.set_column(4, "published_date", pa.array(dates)), folder / TEXTS)


def repeat_an_id(folder: Path) -> None:
    texts = pq.read_table(folder / TEXTS)
    ids = texts["article_id"].to_pylist()
    pq.write_table(texts.set_column(2, "article_id", pa.array([ids[1], *ids[1:]])), folder / TEXTS)


def rewrite(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        faiss.write_index(edit(faiss.read_index(str(folder / INDEX))), str(folder / INDEX))

    return change


def scaled(flat: Any) -> Any:
    vectors = flat.reconstruct_n(0, flat.ntotal)
    vectors[5] *= np.float32(1.01)
    other = faiss.IndexFlatIP(flat.d)
    other.add(vectors)
    return other


def other_dimension(flat: Any) -> Any:
    other = faiss.IndexFlatIP(4)
    other.add(np.tile(np.eye(4, dtype=np.float32)[0], (flat.ntotal, 1)))
    return other


def compressed(flat: Any) -> Any:
    other = faiss.IndexScalarQuantizer(flat.d, faiss.ScalarQuantizer.QT_8bit)
    vectors = flat.reconstruct_n(0, flat.ntotal)
    other.train(vectors)
    other.add(vectors)
    return other


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / METADATA).unlink(), "searched whole"),
        (lambda folder: (folder / METADATA).write_text("{"), "not JSON"),
        (offsets(lambda m: m.pop("day_offsets") and None), "searched whole"),
        (offsets(lambda m: []), "searched whole"),
        (offsets(lambda m: m.update(day_offsets={})), "searched whole"),
        (offsets(lambda m: m.update(day_offsets=[0, 5])), "searched whole"),
        (offsets(lambda m: m["day_offsets"].popitem() and None), "day table"),
        (offsets(first_day_later), "files it under"),
        (set_days(_03=[0, "7"]), "whole numbers"),
        (set_days(_03=[0, 1.5]), "whole numbers"),
        (set_days(_03=[1]), "two row numbers"),
        (set_days(_31=[0, 1]), "two row numbers"),
        (set_days(_05=[-3, 2]), "the day before ends"),
        (set_days(_05=[9, 2]), "the day before ends"),
        (set_days(_30=[0, 10**9]), "the day before ends"),
        (offsets(lambda m: m["encoder"].update(fingerprint="other", name="other")), "index.encoder"),
        (swap_two_rows, "files it under"),
        (lose_a_text, "texts|files it under"),
        (lose_the_dates, "no column published_date"),
        (forget_a_date, "no publication date"),
        (repeat_an_id, "ids must be unique"),
        (rewrite(scaled), r"row 5 .*unit length"),
        (rewrite(other_dimension), "dimensions"),
        (rewrite(compressed), "only a flat index"),
        (lambda folder: (folder / INDEX).unlink(), "cannot be read"),
        (lambda folder: (folder / TEXTS).write_bytes(b"no"), "cannot be read"),
    ],
)
def test_a_folder_that_could_show_a_wrong_day_is_refused(
    shards: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(shards / JUNE)
    with pytest.raises(DataError, match=message):
        import_faiss(shards, tmp_path / "again", IDENTITY, EXACT)
    with pytest.raises(DataError, match="no finished index"):
        Library.open(tmp_path / "again")


def test_neither_direction_overwrites_anything(index: Path, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds an index already"):
        import_faiss(shards, index, IDENTITY, EXACT)
    with pytest.raises(DataError, match="exists"):
        export_faiss(Library.open(index), shards)
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(DataError, match="no FAISS shard"):
            import_faiss(nothing, tmp_path / "other", IDENTITY, EXACT)


def test_one_folder_alone_can_be_imported(shards: Path, tmp_path: Path) -> None:
    shutil.rmtree(shards / "2024-05")
    assert import_faiss(shards / JUNE, tmp_path / "again", IDENTITY, EXACT).shards == 1
