"""The threads of a scan: one for each core that was given, torch and BLAS kept within them, and left as they were elsewhere."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from threadpoolctl import threadpool_info

from retrieval.workers import Workers, granted_cores, process_workers


def blas_threads() -> set[int]:
    """Of the library that NumPy multiplies with."""
    return {
        pool["num_threads"]
        for pool in threadpool_info()
        if pool["user_api"] == "blas" and "numpy" in Path(pool["filepath"]).parent.name
    }


def test_work_runs_on_every_thread_with_blas_kept_to_one_and_given_back() -> None:
    workers = Workers(3)
    together, seen, inside = threading.Barrier(3), set(), set()
    before = blas_threads()
    assert len(before) == 1

    def work() -> None:
        together.wait(timeout=30)
        seen.add(threading.current_thread().name)
        inside.update(blas_threads())

    workers.run(work)
    assert len(seen) == 3
    assert inside == {1}
    assert blas_threads() == before


def test_an_error_of_one_thread_is_raised_and_the_next_scan_runs() -> None:
    workers = Workers(2)

    def fail() -> None:
        raise ZeroDivisionError("in a thread")

    with pytest.raises(ZeroDivisionError, match="in a thread"):
        workers.run(fail)
    before = blas_threads()
    workers.run(lambda: None)
    assert blas_threads() == before
    assert workers.each(lambda i: i * i, 4) == [0, 1, 4, 9]


def test_torch_computes_alone_in_each_thread_and_as_before_elsewhere() -> None:
    workers = Workers(2)
    before = torch.get_num_threads()
    workers.use_torch()
    inside: list[int] = []
    workers.run(lambda: inside.append(torch.get_num_threads()))
    assert inside == [1, 1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("stated", "expected"), [("3", 3), ("1", 1)])
def test_the_cores_of_a_ray_actor_are_those_it_was_given(
    monkeypatch: pytest.MonkeyPatch, stated: str, expected: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert granted_cores() == expected


@pytest.mark.parametrize("stated", ["", "0", "many"])
def test_without_a_number_a_process_takes_the_cores_it_may_run_on(monkeypatch: pytest.MonkeyPatch, stated: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert granted_cores() == len(os.sched_getaffinity(0))


def test_a_process_has_one_set_of_workers_and_a_forked_child_its_own() -> None:
    assert process_workers() is process_workers()
    script = """
import os
from retrieval.workers import process_workers
process_workers().run(lambda: None)
child = os.fork()
if child == 0:
    process_workers().run(lambda: None)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout.strip() == "7", ran.stderr


def test_no_workers_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Workers(0)
