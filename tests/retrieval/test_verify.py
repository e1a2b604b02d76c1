"""`pastcast index verify` and `stats`: whatever is planted is found, by file and row, and nothing else is."""

import datetime as dt
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from corpora import article, corpus

from cluster.failures import DataError
from retrieval.build import build_index
from retrieval.encoder import HashingEncoder
from retrieval.lexical import LENGTHS, LEXICAL_FILES, POSTINGS
from retrieval.library import Library
from retrieval.manifest import IndexKind, Manifest
from retrieval.shard_files import ARTICLES, DAYS, HALF, SHARD, VECTORS, file_hash
from retrieval.stats import index_stats
from retrieval.verify import SHOWN_PER_FILE, verify_index

MONTH = "2024-06"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    build_index(corpus(), HashingEncoder(32), directory, kind=IndexKind(name="exact-bf16"))
    return directory


@pytest.fixture
def index(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "index")


def sign_again(index: Path) -> None:
    """Make all manifests name the bytes that now lie there: what only the content can give away."""
    manifest = Manifest.model_validate_json((index / "manifest.json").read_bytes())
    shards = tuple(
        s.model_copy(update={"files": {name: file_hash(index / s.month / name) for name in s.files}})
        for s in manifest.shards
    )
    for shard in shards:
        (index / shard.month / SHARD).write_text(shard.model_dump_json(indent=1) + "\n")
    (index / "manifest.json").write_bytes(manifest.model_copy(update={"shards": shards}).stored())


def found(index: Path) -> set[tuple[str, int | None]]:
    return {(f.file.relative_to(index).as_posix(), f.row) for f in verify_index(index).faults}


def test_a_sound_index_has_no_fault(pristine: Path) -> None:
    months: list[str] = []
    verdict = verify_index(pristine, months.append)
    assert (verdict.faults, verdict.unnamed) == ((), 0)
    assert (verdict.articles, verdict.shards, verdict.files) == (len(corpus()), 3, 21)
    assert months == ["2024-05", "2024-06", "2024-07"]


@pytest.mark.parametrize("name", [VECTORS, DAYS, ARTICLES, HALF, *LEXICAL_FILES])
@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_changed_or_missing_file_is_named(index: Path, name: str, damage: str) -> None:
    file = index / MONTH / name
    content = file.read_bytes()
    file.unlink()
    if damage == "flipped":
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert (f"{MONTH}/{name}", None) in found(index)


def edit(index: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    file = index / MONTH / ARTICLES
    table = change(pa.ipc.open_file(pa.BufferReader(file.read_bytes())).read_all())
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    sign_again(index)


def with_column(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def test_a_row_of_another_day_than_it_is_filed_under_is_named_even_if_the_hashes_fit(index: Path) -> None:
    def later(table: pa.Table) -> pa.Table:
        published = table["published"].to_pylist()
        published[7] += dt.timedelta(days=1)
        return with_column(table, "published", published)

    edit(index, later)
    assert {(f"{MONTH}/{ARTICLES}", 7), (f"{MONTH}/{DAYS}", 7)} <= found(index)


def test_rows_out_of_order_are_named_even_if_the_hashes_fit(index: Path) -> None:
    edit(index, lambda table: table.take([1, 0, *range(2, table.num_rows)]))
    assert (f"{MONTH}/{ARTICLES}", 1) in found(index)


def test_a_day_table_that_lies_is_named_by_its_row_even_if_the_hashes_fit(index: Path) -> None:
    file = index / MONTH / DAYS
    table = json.loads(file.read_text())
    row = table["first_rows"][5]
    table["first_rows"][5] += 1
    if table["first_rows"][5] == table["first_rows"][6]:
        del table["first_rows"][5], table["days"][5]
    file.write_text(json.dumps(table))
    sign_again(index)
    assert (f"{MONTH}/{DAYS}", row) in found(index)


def test_an_id_in_two_months_is_named_although_each_month_is_sound(tmp_path: Path) -> None:
    june, july = (article("one", dt.datetime(2024, month, 3, tzinfo=dt.UTC)) for month in (6, 7))
    other = article("two", dt.datetime(2024, 7, 2, tzinfo=dt.UTC))
    build_index([june], HashingEncoder(8), tmp_path / "index")
    build_index([july, other], HashingEncoder(8), tmp_path / "july")
    shutil.move(tmp_path / "july" / "2024-07", tmp_path / "index" / "2024-07")
    june_manifest = Library.open(tmp_path / "index").manifest
    july_manifest = Library.open(tmp_path / "july").manifest
    both = june_manifest.model_copy(update={"shards": (*june_manifest.shards, *july_manifest.shards)})
    (tmp_path / "index" / "manifest.json").write_bytes(both.stored())
    Library.open(tmp_path / "index").load()
    faults = verify_index(tmp_path / "index").faults
    twins = [f for f in faults if "'one'" in f.what]
    assert [(f.file.parent.name, f.row) for f in twins] == [("2024-07", 1)]
    assert "2024-06 row 0" in twins[0].what


def test_vectors_that_are_not_of_unit_length_and_their_false_copies_are_named_even_if_the_hashes_fit(
    index: Path,
) -> None:
    vectors = np.load(index / MONTH / VECTORS)
    vectors[3] *= 2
    vectors[5, 0] = np.nan
    np.save(index / MONTH / VECTORS, vectors)
    sign_again(index)
    faults = found(index)
    assert {(f"{MONTH}/{VECTORS}", 3), (f"{MONTH}/{VECTORS}", 5)} <= faults
    assert {row for file, row in faults if file == f"{MONTH}/{HALF}"} == {3, 5}


def test_faulty_rows_beyond_the_first_are_counted(index: Path) -> None:
    vectors = np.load(index / MONTH / VECTORS) * np.float32(2)
    np.save(index / MONTH / VECTORS, vectors)
    sign_again(index)
    verdict = verify_index(index)
    named = [f for f in verdict.faults if f.file.name == VECTORS and f.row is not None]
    assert len(named) == SHOWN_PER_FILE
    assert verdict.unnamed >= len(vectors) - SHOWN_PER_FILE


def test_a_file_that_nobody_names_and_a_manifest_that_was_edited_are_found(index: Path) -> None:
    (index / MONTH / "vectors.old.npy").write_bytes(b"")
    stored = json.loads((index / "manifest.json").read_text())
    (index / "manifest.json").write_text(json.dumps(stored))
    assert {(f"{MONTH}/vectors.old.npy", None), ("manifest.json", None)} <= found(index)


def test_postings_that_are_not_those_of_the_words_are_found_even_if_the_hashes_fit(index: Path) -> None:
    postings, lengths = np.load(index / MONTH / POSTINGS), np.load(index / MONTH / LENGTHS)
    postings[1, 4] += 1
    lengths[2] += 1
    np.save(index / MONTH / POSTINGS, postings)
    np.save(index / MONTH / LENGTHS, lengths)
    sign_again(index)
    assert found(index) == {(f"{MONTH}/{POSTINGS}", None), (f"{MONTH}/{LENGTHS}", None)}


def test_articles_other_than_those_it_was_made_from_are_found_even_if_the_hashes_fit(index: Path) -> None:
    edit(index, lambda table: with_column(table, "title", ["Rewritten", *table["title"].to_pylist()[1:]]))
    assert (f"{MONTH}/{ARTICLES}", None) in found(index)


def test_without_a_manifest_there_is_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished index"):
        verify_index(tmp_path)


def test_stats_count_months_days_date_sources_and_rows_without_a_date(index: Path) -> None:
    stats = index_stats(index)
    days = [a.day for a in corpus()]
    assert [(m.month, m.articles, m.days) for m in stats.months] == [
        (month, sum(f"{d:%Y-%m}" == month for d in days), len({d for d in days if f"{d:%Y-%m}" == month}))
        for month in sorted({f"{d:%Y-%m}" for d in days})
    ]
    assert stats.date_sources == {"published": len(days)}
    assert (stats.quarantined, stats.without_date, stats.share_without_date) == ({}, 0, 0.0)


def test_stats_take_the_share_without_a_date_of_all_rows(tmp_path: Path) -> None:
    articles = [
        a.model_copy(update={"date_source": source})
        for a, source in zip(corpus(3), ("crawled", "modified", "crawled"), strict=True)
    ]
    build_index(articles, HashingEncoder(8), tmp_path)
    (tmp_path / "quarantine").mkdir()
    for name, reasons in (("articles", ["no-date", "duplicate-id"]), ("added-0123456789ab", ["unparsable-time"])):
        lines = "".join(json.dumps({"reason": reason}) + "\n" for reason in reasons)
        (tmp_path / "quarantine" / f"{name}.jsonl").write_text(lines)
    stats = index_stats(tmp_path)
    assert stats.date_sources == {"crawled": 2, "modified": 1}
    assert stats.quarantined == {"duplicate-id": 1, "no-date": 1, "unparsable-time": 1}
    assert (stats.without_date, stats.share_without_date) == (2, 2 / 6)
    (tmp_path / "quarantine" / "articles.jsonl").write_text("[]\n")
    with pytest.raises(DataError, match=r"articles\.jsonl:1"):
        index_stats(tmp_path)
