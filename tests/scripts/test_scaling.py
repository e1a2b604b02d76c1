"""The pictures and tables of docs/scaling.md: computed from files by the page's own formulas."""

import datetime as dt
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from cluster.failures import DataError
from scripts.bench.line_chart import Line, line_chart
from scripts.bench.needs import Corpus, Gpu, Node, Speed
from scripts.bench.retrieval_pool import PoolResult
from scripts.bench_retrieval import Benchmark, Machine, MethodResult
from scripts.bench_scaling import Scaling
from scripts.plot_retrieval import comparison, filled, measured_speed, needs_table, pictures

ROOT = Path(__file__).resolve().parents[2]
PAPER = Corpus(rows=18_826_940, dim=4_096)
SPEED = Speed(read_per_s=10e9, operations_per_s=80e9)


def result(method: str, queries: int, roofline: float, dim: int = 4_096) -> MethodResult:
    return MethodResult(
        method=method,
        rows=60_000,
        dim=dim,
        queries=queries,
        cutoffs="random",
        k=10,
        median_ms=12.5,
        cpu_ms=20,
        speedup_vs_faiss_selector=17.0,
        roofline=roofline,
        roofline_of_best=roofline,
        recall=1,
        late=0,
    )


def benchmark(*results: MethodResult) -> Benchmark:
    machine = Machine(
        processor="x",
        threads=2,
        load=0.1,
        gigabytes_per_s=30,
        gigaflops=200,
        steadiness=0.98,
        elsewhere=0.01,
        measured=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    )
    return Benchmark(results=results, half_over_all={"exact": 0.51}, machine=machine)


def test_a_corpus_takes_rows_times_dimensions_times_bytes() -> None:
    assert PAPER.scanned_bytes("exact") == 4 * 18_826_940 * 4_096
    assert PAPER.scanned_bytes("exact-bf16") * 2 == PAPER.scanned_bytes("exact") == PAPER.disk_bytes("exact")
    assert PAPER.disk_bytes("exact-bf16") == 6 * 18_826_940 * 4_096
    assert PAPER.operations() == 18_826_940 * 4_096


def test_nodes_hold_the_scanned_vectors_and_a_batch_takes_reading_or_multiplying() -> None:
    node = Node(cores=64, memory_gib=512)
    assert (node.count(PAPER, "exact"), node.count(PAPER, "exact-bf16")) == (1, 1)
    assert Node(cores=64, memory_gib=256).count(PAPER, "exact") == 2
    one, many = (node.batch_seconds(PAPER, "exact", SPEED, queries) for queries in (1, 1_000))
    assert one == pytest.approx(4 * PAPER.rows * PAPER.dim / (64 * 10e9))
    assert many == pytest.approx(1_000 * PAPER.operations() / (64 * 80e9))
    assert node.batch_seconds(PAPER, "exact", SPEED, 1_000, nodes=4) == pytest.approx(many / 4)


def test_gpus_hold_the_half_precision_vectors() -> None:
    gpu = Gpu(memory_gib=139, read_per_s=4.8e12, operations_per_s=989e12, share=0.5)
    assert gpu.count(PAPER, "exact-bf16") == 2
    assert gpu.batch_seconds(PAPER, "exact-bf16", 1) == pytest.approx(PAPER.scanned_bytes("exact-bf16") / (2 * 2.4e12))


def test_the_speed_of_a_core_comes_from_the_files_nearest_in_dimension() -> None:
    files = [
        benchmark(result("exact", 64, 0.3, 384), result("exact", 64, 0.5)),
        benchmark(result("exact", 1, 0.8), result("exact", 1, 0.1, 384)),
    ]
    speed = measured_speed(files, "exact", 4_096)
    assert speed == Speed(read_per_s=0.8 * 30e9 / 2, operations_per_s=0.5 * 200e9 / 2)
    with pytest.raises(DataError, match="with one query"):
        measured_speed(files[:1], "exact", 4_096)


def test_the_tables_hold_every_method_and_kind() -> None:
    shown = comparison([benchmark(result("exact", 64, 0.31))])
    assert "| 60,000 × 4,096 | 64 | random | exact | 12.5 | 17.0 | 0.31 | 1.000 | 0 |" in shown
    assert "exact 0.51" in shown
    assert "Ray pool" not in shown
    file = benchmark(result("exact", 64, 0.31))
    pool = PoolResult(
        kind="exact-bf16",
        callers=32,
        queries_per_s=321.4,
        p50_ms=90,
        p95_ms=120,
        mean_batch=15,
        one_at_a_time_queries_per_s=60,
        one_at_a_time_p50_ms=500,
        speedup=5.36,
    )
    shown = comparison([file.model_copy(update={"pool": (pool,)})])
    assert "| 60,000 × 4,096 | exact-bf16 | 32 | 321 | 5.4 | 90.0 | 120.0 | 15.0 |" in shown
    gpu = Gpu(memory_gib=139, read_per_s=4.8e12, operations_per_s=989e12, share=0.5)
    rows = needs_table(PAPER, Node(cores=64, memory_gib=512), gpu, {"exact": SPEED}).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| exact", "| exact-bf16", "| approximate"]
    assert rows[0].split(" | ")[1:6] == ["308", "308", "1", "0.48", "66"]


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    page = "before\n<!-- a -->\nold\n<!-- /a -->\nafter\n"
    assert filled(page, {"a": "new"}) == "before\n<!-- a -->\nnew\n<!-- /a -->\nafter\n"
    assert filled(filled(page, {"a": "x"}), {"a": "new"}) == filled(page, {"a": "new"})
    for broken in ("no markers", "<!-- a -->\nnever closed"):
        with pytest.raises(DataError, match="no part named a"):
            filled(broken, {"a": "new"})


def test_the_page_has_every_part() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert "paper" in filled(page, {"measured": "", "needs": "", "pictures": ""})


def test_a_chart_is_a_picture_of_every_point_and_refuses_what_has_no_logarithm() -> None:
    lines = [
        Line(label="a < b", points=((1e4, 1.0), (1e5, 9.0), (2e6, 250.0))),
        Line(label="c", points=((1e4, 1.1), (2e6, 251.0))),
    ]
    drawing = ET.fromstring(line_chart(lines, "Cost", "rows", "ms"))
    space = "{http://www.w3.org/2000/svg}"
    dots = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in drawing.iter(f"{space}circle")]
    assert len(dots) == 5
    assert all(0 < x < 760 and 0 < y < 420 for x, y in dots)
    assert dots[0][0] < dots[1][0] < dots[2][0]
    assert dots[0][1] > dots[1][1] > dots[2][1]
    names = {t.text: float(t.get("y", "")) for t in drawing.iter(f"{space}text") if t.text in ("a < b", "c")}
    assert abs(names["a < b"] - names["c"]) >= 15.9
    ET.fromstring(line_chart([Line(label="one", points=((5.0, 5.0),))], "One", "x", "y"))
    for points in ((), ((0.0, 1.0),)):
        with pytest.raises(ValueError, match="above zero"):
            line_chart([Line(label="none", points=points)], "None", "x", "y")


@pytest.mark.e2e
def test_what_scaling_measures_becomes_pictures(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    sizes = ["--rows", "1000", "--shards", "3", "--shard-rows", "1500"]
    command = [sys.executable, "-m", "scripts.bench_scaling", *sizes, "--dim", "16", "--rounds", "1"]
    subprocess.run([*command, "--json", str(file)], cwd=ROOT, check=True, capture_output=True, timeout=300)
    scaling = Scaling.model_validate(json.loads(file.read_text()))
    assert len(scaling.results) == 4
    assert [(s.method, s.shards) for s in scaling.shards] == [("exact", 3), ("exact-bf16", 3)]
    assert all(r.recall == 1 and r.late == 0 and r.own_mib > 0 and r.mapped_mib > 0 for r in scaling.results)
    for picture in pictures(scaling).values():
        ET.fromstring(picture)
