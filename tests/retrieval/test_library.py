import asyncio
import datetime as dt
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from corpora import article, corpus

from cluster.config import load_settings
from cluster.failures import DataError, SettingsError
from retrieval.article import Article
from retrieval.build import BuildProgress, build_from_settings, build_index
from retrieval.chunks import encoded_text
from retrieval.encoder import HashingEncoder, Vectors
from retrieval.library import Library
from retrieval.local import LocalSearcher
from retrieval.manifest import Manifest
from retrieval.shard_files import ARTICLES, DAYS, SHARD, VECTORS, file_hash

ENCODER = HashingEncoder(32)
MONTH = "2024-06"
JULY = dt.date(2024, 7, 31)


def contents(directory: Path) -> dict[str, bytes]:
    files = (p for p in directory.rglob("*") if p.is_file() and p.name != ".lock")
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    build_index(corpus(), ENCODER, directory)
    return directory


@pytest.fixture
def built(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "index")


def sign_again(directory: Path) -> None:
    """Make the manifest name the bytes that now lie there: what only the content can give away."""
    manifest = Manifest.model_validate_json((directory / "manifest.json").read_bytes())
    shards = tuple(
        s.model_copy(update={"files": {name: file_hash(directory / s.month / name) for name in s.files}})
        for s in manifest.shards
    )
    (directory / "manifest.json").write_bytes(manifest.model_copy(update={"shards": shards}).stored())


def test_every_article_can_be_opened_as_it_was(pristine: Path) -> None:
    searcher = LocalSearcher(Library.open(pristine), ENCODER)
    for one in corpus():
        assert asyncio.run(searcher.fetch(one.id)) == one
    assert asyncio.run(searcher.fetch("absent")) is None


def test_an_index_has_one_shard_per_month_in_order(pristine: Path) -> None:
    library = Library.open(pristine)
    months = sorted({f"{a.day:%Y-%m}" for a in corpus()})
    assert [s.month for s in library.manifest.shards] == months
    assert len(months) == 3
    assert library.rows == len(corpus())
    assert (library.first_day, library.last_day) == (min(a.day for a in corpus()), max(a.day for a in corpus()))


def test_activity_counts_the_articles_of_each_day(pristine: Path) -> None:
    days = [a.day for a in corpus()]
    assert Library.open(pristine).activity() == {d: days.count(d) for d in days}


def test_vectors_lie_aligned_in_a_memory_map(pristine: Path) -> None:
    vectors = np.load(pristine / MONTH / VECTORS, mmap_mode="r")
    assert vectors.ctypes.data % 64 == 0


def test_the_same_articles_in_any_order_give_the_same_bytes(pristine: Path, tmp_path: Path) -> None:
    build_index(reversed(corpus()), ENCODER, tmp_path)
    assert contents(tmp_path) == contents(pristine)


def test_one_changed_word_changes_the_fingerprint(pristine: Path, tmp_path: Path) -> None:
    first, *rest = corpus()
    summary = build_index([first.model_copy(update={"text": first.text + "."}), *rest], ENCODER, tmp_path)
    assert summary.fingerprint != Library.open(pristine).fingerprint
    assert Library.open(tmp_path).fingerprint == summary.fingerprint


class CountingEncoder(HashingEncoder):
    def __init__(self, dimension: int) -> None:
        super().__init__(dimension)
        self.texts = 0

    def encode(self, texts: Sequence[str]) -> Vectors:
        self.texts += len(texts)
        return super().encode(texts)


def test_only_months_that_changed_are_encoded_again(built: Path) -> None:
    encoder = CountingEncoder(32)
    assert build_index(corpus(), encoder, built).kept == 3
    assert encoder.texts == 0
    extra = article("extra", dt.datetime(2024, 6, 3, tzinfo=dt.UTC))
    summary = build_index([*corpus(), extra], encoder, built)
    assert (summary.kept, summary.articles) == (2, len(corpus()) + 1)
    assert encoder.texts == 1 + sum(f"{a.day:%Y-%m}" == MONTH for a in corpus())


def test_another_encoder_or_text_length_builds_everything_again(built: Path) -> None:
    assert build_index(corpus(), HashingEncoder(16), built).kept == 0
    assert build_index(corpus(), HashingEncoder(16), built, text_characters=50).kept == 0


def test_a_damaged_finished_shard_is_built_again(built: Path, pristine: Path) -> None:
    (built / MONTH / DAYS).write_text("{}")
    assert build_index(corpus(), ENCODER, built).kept == 2
    assert contents(built) == contents(pristine)


def test_a_month_without_articles_any_more_disappears(built: Path) -> None:
    build_index([a for a in corpus() if f"{a.day:%Y-%m}" != MONTH], ENCODER, built)
    assert not (built / MONTH).exists()
    assert all(a.day.month != 6 for a in map(_opened(built), [a.id for a in corpus()]) if a is not None)


def _opened(directory: Path) -> Callable[[str], Article | None]:
    searcher = LocalSearcher(Library.open(directory), ENCODER)
    return lambda article_id: asyncio.run(searcher.fetch(article_id))


def test_progress_reaches_the_total_and_never_goes_back(tmp_path: Path) -> None:
    seen: list[BuildProgress] = []
    build_index(corpus(600), ENCODER, tmp_path, seen.append)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert (seen[-1].done, seen[-1].total) == (600, 600)


def test_two_articles_with_one_id_are_refused(tmp_path: Path) -> None:
    twin = article("n001", dt.datetime(2024, 8, 1, tzinfo=dt.UTC))
    with pytest.raises(DataError, match="n001"):
        build_index([*corpus(), twin], ENCODER, tmp_path)


def test_no_articles_make_no_index(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no articles"):
        build_index([], ENCODER, tmp_path)


def test_a_text_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    broken = article("broken", dt.datetime(2024, 6, 1, tzinfo=dt.UTC), text="\ud800")
    with pytest.raises(DataError, match="broken"):
        build_index([broken], ENCODER, tmp_path)
    with pytest.raises(DataError, match="no finished index"):
        Library.open(tmp_path)


def test_an_encoder_that_does_not_give_unit_vectors_is_refused(tmp_path: Path) -> None:
    class Long(HashingEncoder):
        def encode(self, texts: Sequence[str]) -> Vectors:
            return super().encode(texts) * np.float32(2)

    class Lost(HashingEncoder):
        def encode(self, texts: Sequence[str]) -> Vectors:
            return super().encode(texts) * np.float32("nan")

    for encoder in (Long(8), Lost(8)):
        with pytest.raises(DataError, match="unit length"):
            build_index(corpus(), encoder, tmp_path)


def test_the_first_characters_of_title_summary_and_text_are_encoded() -> None:
    one = article("a", dt.datetime(2024, 6, 1, tzinfo=dt.UTC), title="Title", summary="", text="Body")
    assert encoded_text(one, 100) == "Title\nBody"
    assert encoded_text(one, 7) == "Title\nB"


# --- what must not load


def test_a_folder_without_a_manifest_is_no_index(built: Path) -> None:
    (built / "manifest.json").unlink()
    with pytest.raises(DataError, match="pastcast index build"):
        Library.open(built)


@pytest.mark.parametrize("text", ["", "{}", '{"format": "pastcast-index-9"}', "\xff"])
def test_a_manifest_of_another_kind_is_refused(built: Path, text: str) -> None:
    (built / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="manifest"):
        Library.open(built)


@pytest.mark.parametrize("name", [VECTORS, DAYS, ARTICLES])
@pytest.mark.parametrize("damage", ["gone", "longer", "flipped"])
def test_a_shard_whose_files_changed_does_not_load(built: Path, name: str, damage: str) -> None:
    file = built / MONTH / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        file.write_bytes(content + b" " if damage == "longer" else flipped)
    library = Library.open(built)
    with pytest.raises(DataError, match=name):
        library.load()
    assert set(library.load(["2024-05"])) == {"2024-05"}


def test_activity_is_not_counted_from_a_changed_day_table(built: Path) -> None:
    (built / MONTH / DAYS).write_text("{}")
    with pytest.raises(DataError, match=DAYS):
        Library.open(built).activity()


def test_a_manifest_that_vouches_for_no_day_table_does_not_load(built: Path) -> None:
    stored = json.loads((built / "manifest.json").read_text())
    del stored["shards"][1]["files"][DAYS]
    (built / "manifest.json").write_text(json.dumps(stored))
    with pytest.raises(DataError, match=DAYS):
        Library.open(built).load()


def edit_days(built: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    file = built / MONTH / DAYS
    stored = json.loads(file.read_text())
    edit(stored)
    file.write_text(json.dumps(stored))


def one_row_late(stored: dict[str, Any]) -> None:
    stored["first_rows"][5] += 1


def one_day_early(stored: dict[str, Any]) -> None:
    stored["days"] = [(dt.date.fromisoformat(d) - dt.timedelta(days=1)).isoformat() for d in stored["days"]]


def a_day_less(stored: dict[str, Any]) -> None:
    del stored["days"][3], stored["first_rows"][3]


def no_days(stored: dict[str, Any]) -> None:
    stored["days"], stored["first_rows"] = [], []


def fewer_rows(stored: dict[str, Any]) -> None:
    stored["rows"] -= 1


@pytest.mark.parametrize("edit", [one_row_late, one_day_early, a_day_less, no_days, fewer_rows])
def test_a_day_table_that_lies_does_not_load_even_if_the_hashes_fit(
    built: Path, edit: Callable[[dict[str, Any]], None]
) -> None:
    edit_days(built, edit)
    sign_again(built)
    with pytest.raises(DataError, match="not servable"):
        Library.open(built).load()


def edit_articles(built: Path, edit: Callable[[pa.Table], pa.Table]) -> None:
    file = built / MONTH / ARTICLES
    table = edit(pa.ipc.open_file(pa.BufferReader(file.read_bytes())).read_all())
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)


def swap_neighbours_of_one_day(table: pa.Table) -> pa.Table:
    days = table["day"].to_pylist()
    row = next(i for i in range(len(days) - 1) if days[i] == days[i + 1])
    order = list(range(len(days)))
    order[row], order[row + 1] = row + 1, row
    return table.take(order)


def reverse(table: pa.Table) -> pa.Table:
    return table.take(list(reversed(range(table.num_rows))))


def repeat_an_id(table: pa.Table) -> pa.Table:
    days, ids = table["day"].to_pylist(), table["id"].to_pylist()
    row = next(i for i in range(len(days) - 1) if days[i] == days[i + 1])
    ids[row + 1] = ids[row]
    return table.set_column(0, table.schema.field("id"), pa.array(ids, pa.large_string()))


def publish_later(table: pa.Table) -> pa.Table:
    published = table["published"].to_pylist()
    published[0] += dt.timedelta(days=1)
    field = table.schema.field("published")
    return table.set_column(2, field, pa.array(published, field.type))


def forget_a_day(table: pa.Table) -> pa.Table:
    days = table["day"].to_pylist()
    days[-1] = None
    return table.set_column(1, table.schema.field("day"), pa.array(days, pa.date32()))


def drop_the_days(table: pa.Table) -> pa.Table:
    return table.drop_columns(["day"])


def drop_a_row(table: pa.Table) -> pa.Table:
    return table.slice(1)


@pytest.mark.parametrize(
    "edit", [swap_neighbours_of_one_day, reverse, repeat_an_id, publish_later, forget_a_day, drop_the_days, drop_a_row]
)
def test_rows_that_break_the_order_do_not_load_even_if_the_hashes_fit(
    built: Path, edit: Callable[[pa.Table], pa.Table]
) -> None:
    edit_articles(built, edit)
    sign_again(built)
    with pytest.raises(DataError, match="not servable"):
        Library.open(built).load()


def test_vectors_of_another_shape_do_not_load_even_if_the_hashes_fit(built: Path) -> None:
    file = built / MONTH / VECTORS
    vectors = np.load(file)
    for wrong in (vectors[1:], vectors[:, 1:].copy(), vectors.astype(np.float64), vectors * np.float32("nan")):
        np.save(file, wrong)
        sign_again(built)
        with pytest.raises(DataError, match="not servable"):
            Library.open(built).load()


def test_an_index_is_not_searched_with_another_encoder(pristine: Path) -> None:
    with pytest.raises(SettingsError, match="hashing"):
        LocalSearcher(Library.open(pristine), HashingEncoder(64))


# --- what a killed build leaves


def test_a_build_killed_at_any_moment_leaves_no_wrong_index_and_the_next_one_completes_it(tmp_path: Path) -> None:
    older = [a for a in corpus() if a.day < dt.date(2024, 7, 1)] + [
        article("old", dt.datetime(2024, 4, 3, tzinfo=dt.UTC))
    ]
    newer = [a if a.id != "n010" else a.model_copy(update={"title": "Corrected"}) for a in corpus()]
    old_print = build_index(older, ENCODER, tmp_path / "older").fingerprint
    build_index(newer, ENCODER, tmp_path / "clean")
    (tmp_path / "articles.pickle").write_bytes(pickle.dumps(newer))
    script = Path(__file__).with_name("killed_builds.py")
    command = [sys.executable, str(script), str(tmp_path / "articles.pickle"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    deaths = int(ran.stdout)
    assert deaths > 20
    clean = contents(tmp_path / "clean")
    finished = 0
    for moment in range(deaths):
        directory = tmp_path / str(moment)
        if (directory / "manifest.json").exists():
            library = Library.open(directory)
            assert library.load()
            assert library.fingerprint in {old_print, Library.open(tmp_path / "clean").fingerprint}
            finished += library.fingerprint != old_print
        build_index(newer, ENCODER, directory)
        assert contents(directory) == clean
    assert finished <= 2
    assert contents(tmp_path / str(deaths)) == clean


def test_a_second_build_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    class Nested(HashingEncoder):
        def encode(self, texts: Sequence[str]) -> Vectors:
            with pytest.raises(DataError, match="another build"):
                build_index(corpus(), ENCODER, tmp_path)
            return super().encode(texts)

    assert build_index(corpus(), Nested(8), tmp_path).shards == 3


def test_an_index_is_built_from_settings_and_bad_rows_are_counted(tmp_path: Path) -> None:
    rows = [a.model_dump(mode="json", exclude={"day"}) for a in corpus()]
    rows.append({**rows[0], "id": "undated", "url": "https://example.org/undated", "published": "soon"})
    (tmp_path / "articles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = load_settings(
        overrides=[
            f"articles.path={tmp_path / 'articles.jsonl'}",
            f"index.directory={tmp_path / 'index'}",
            "index.encoder=hashing",
        ]
    )
    summary = build_from_settings(settings)
    assert summary.articles == len(corpus())
    assert sum(summary.quarantined.values()) == 1
    assert Library.open(tmp_path / "index").rows == len(corpus())
    assert SHARD in {p.name for p in (tmp_path / "index" / MONTH).iterdir()}
