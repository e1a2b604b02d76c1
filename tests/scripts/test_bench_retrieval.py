"""The retrieval benchmark and the GPU check, small: what they print is measured and what they compare with is right."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval.half import to_half
from scripts.bench.floor import Floor, best_of, floor_meter, steadiness
from scripts.bench.interleaved import Measured
from scripts.bench.interleaved import Run as MeasuredRun
from scripts.bench.retrieval_data import HALF, VECTORS, make_queries, make_rows, true_rows
from scripts.bench.retrieval_pool import PoolResult
from scripts.bench_retrieval import MethodResult, doubts, machine_of, results

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_the_roofline_is_reading_the_longest_prefix_or_multiplying_all_of_them() -> None:
    slow_memory = Floor(bytes_per_s=4_000, flops_per_s=1e12)
    slow_units = Floor(bytes_per_s=1e12, flops_per_s=2_000)
    assert slow_memory.least_ms([10, 50], 2) == pytest.approx(1e3 * 4 * 2 * 50 / 4_000)
    assert slow_units.least_ms([10, 50], 2) == pytest.approx(1e3 * 2 * 2 * 60 / 2_000)


def test_recall_late_rows_and_ratios_of_a_round_are_counted() -> None:
    floors = (Floor(bytes_per_s=4e3, flops_per_s=1e12), Floor(bytes_per_s=1e3, flops_per_s=1e11))
    runs = {
        "faiss-selector": (
            MeasuredRun(ms=100, cpu_ms=1, found=[[0, 1], [2]]),
            MeasuredRun(ms=900, cpu_ms=1, found=[[0, 1], [2]]),
        ),
        "leaky": (MeasuredRun(ms=10, cpu_ms=1, found=[[0, 7], [2]]), MeasuredRun(ms=30, cpu_ms=3, found=[[0, 7], [2]])),
    }
    baseline, leaky = results(
        Measured(floors=floors, runs=runs, elsewhere=0.0), [[0, 1], [2]], [5, 5], (9, 1), "shared", 2
    )
    assert (baseline.recall, baseline.late, baseline.speedup_vs_faiss_selector) == (1, 0, 1)
    assert (leaky.late, leaky.median_ms, leaky.cpu_ms, leaky.speedup_vs_faiss_selector) == (1, 20, 2, 20)
    assert leaky.recall == pytest.approx(2 / 3)
    assert leaky.roofline == pytest.approx(np.median([5 / 10, 20 / 30]))  # 20 bytes at 4 and at 1 byte a ms
    assert leaky.roofline_of_best == pytest.approx(np.median([5 / 10, 5 / 30]))


def test_the_best_round_is_known_and_how_far_the_usual_one_fell_short() -> None:
    floors = [Floor(bytes_per_s=b, flops_per_s=f) for b, f in ((4.0, 10.0), (1.0, 9.0), (3.0, 20.0))]
    assert best_of(floors) == Floor(bytes_per_s=4.0, flops_per_s=20.0)
    assert steadiness(floors) == 0.5


def test_a_machine_is_measured_over_more_memory_than_its_rows_take() -> None:
    floor = floor_meter(np.ones((100, 8), np.float32), 1 << 22)()
    assert floor.bytes_per_s > 1e8
    assert floor.flops_per_s > 1e8


def test_figures_that_cannot_be_and_figures_of_a_busy_machine_are_doubted() -> None:
    def result(method: str, roofline: float) -> MethodResult:
        return MethodResult(
            method=method, rows=10_000, dim=100, queries=1, cutoffs="random", k=1, median_ms=1, cpu_ms=1,
            speedup_vs_faiss_selector=1, roofline=roofline, roofline_of_best=roofline, recall=1, late=0,
        )  # fmt: skip

    quiet = machine_of(Measured(floors=(Floor(bytes_per_s=1, flops_per_s=1),), runs={}, elsewhere=0.02))
    assert doubts([result("exact", 0.99), result("exact-bf16", 1.3)], quiet, 1 << 18) == []
    assert "exact took 1.01" in doubts([result("exact", 1.01)], quiet, 1 << 18)[0]
    assert "disturbed" in doubts([], quiet.model_copy(update={"elsewhere": 0.3}), 0)[0]
    assert "disturbed" in doubts([], quiet.model_copy(update={"steadiness": 0.8}), 0)[0]
    assert "cache of 32 MiB" in doubts([result("exact", 0.5)], quiet, 32 << 20)[0]


def test_rows_are_of_length_one_and_their_copy_is_their_rounding(tmp_path: Path) -> None:
    make_rows(tmp_path, 60_000, 8, 1)
    vectors, half = np.load(tmp_path / VECTORS), np.load(tmp_path / HALF)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert (half == to_half(vectors)).all()
    assert len(np.unique(vectors[:, 0])) > 59_000


@pytest.mark.parametrize("cutoffs", ["random", "shared", "days8"])
def test_the_truth_is_every_visible_row_sorted(tmp_path: Path, cutoffs: str) -> None:
    make_rows(tmp_path, 1_000, 8, 3)
    highs = make_queries(tmp_path, 1_000, 8, 20, cutoffs, 3)  # type: ignore[arg-type]
    vectors, queries = (
        np.load(tmp_path / VECTORS).astype(np.float64),
        np.load(tmp_path / "queries.npy").astype(np.float64),
    )
    for query, high, found in zip(queries, highs, true_rows(tmp_path, highs, 5), strict=True):
        assert found == np.argsort(-(vectors[:high] @ query), kind="stable")[:5].tolist()
    assert len(set(highs)) == 1 if cutoffs == "shared" else len(set(highs)) > 1
    assert len(set(highs)) <= 8 or cutoffs == "random"


@pytest.mark.e2e
def test_the_benchmark_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    methods = ("exact", "exact-bf16", "faiss-selector", "faiss-grouped")
    chosen = [word for method in methods for word in ("--method", method)]
    common = ["--rows", 3_000, "--dim", 24, "--queries", 6, "--cutoffs", "days8", "--rounds", 2]
    ended = run("scripts/bench_retrieval.py", *common, *chosen, "--pool-seconds", 0.2, "--json", file)
    assert ended.returncode == 0, ended.stderr
    written = json.loads(file.read_text())
    made = [MethodResult.model_validate(result) for result in written["results"]]
    assert [r.method for r in made] == list(methods)
    assert all((r.recall, r.late, r.rows, r.dim, r.queries) == (1, 0, 3_000, 24, 6) for r in made)
    assert all(r.median_ms > 0 and r.roofline > 0 and (r.speedup_vs_faiss_selector or 0) > 0 for r in made)
    assert set(written["half_over_all"]) == {"exact", "exact-bf16"}
    assert written["machine"]["gigabytes_per_s"] > 0
    pool = [PoolResult.model_validate(result) for result in written["pool"]]
    assert [(r.kind, r.callers) for r in pool] == [(k, n) for k in ("exact", "exact-bf16") for n in (1, 8, 32, 128)]
    assert all(r.mean_batch == 1 for r in pool if r.callers == 1)
    assert all(1 <= r.mean_batch <= r.callers and r.queries_per_s > 0 and r.p50_ms <= r.p95_ms for r in pool)
    assert all(r.one_at_a_time_queries_per_s > 0 and r.speedup > 0 for r in pool)
    assert 0 < written["machine"]["steadiness"] <= 1
    assert any("may be served by the processor's cache" in doubt for doubt in written["doubts"])
    refused = run("scripts/bench_retrieval.py", "--method", "wishful")
    assert (refused.returncode, "no method wishful" in refused.stderr) == (2, True)


@pytest.mark.e2e
def test_the_gpu_check_compares_answers_and_says_when_there_is_no_gpu(tmp_path: Path) -> None:
    import torch

    file = tmp_path / "checks.json"
    tried = run("scripts/gpu_check.py", "--device", "cpu", "--rows", 3_000, "--dim", 64, "--json", file)
    assert tried.returncode == 0, tried.stderr
    checks = json.loads(file.read_text())
    assert [(c["kind"], c["queries"]) for c in checks] == [(k, q) for q in (1, 8, 64) for k in ("exact", "exact-bf16")]
    assert all(c["equal"] for c in checks)
    if not torch.cuda.is_available():
        absent = run("scripts/gpu_check.py", "--rows", 1_000, "--dim", 8)
        assert (absent.returncode, "sees no GPU" in absent.stdout) == (2, True)
