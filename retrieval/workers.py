"""Workers: the threads that share a scan, one for each core that this process was given.

Each thread takes whole blocks and multiplies them alone: while a scan runs, BLAS pools of the process are limited to one thread, since
pools that wait for each other cost more than they add. One scan at a time per process.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import ThreadpoolController

Result = TypeVar("Result")


class Workers:
    """A fixed number of threads."""

    def __init__(self, threads: int) -> None:
        """`threads`: at least one."""
        if threads < 1:
            raise ValueError(f"a scan needs at least one thread, not {threads}")
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="scan")
        self._pools: ThreadpoolController | None = None
        self._one_scan = threading.Lock()
        self._torch_ready = False

    def run(self, work: Callable[[], None]) -> None:
        """Runs `work` on every thread at once and returns when all have. Raises the first thread's error."""
        with self._one_scan:
            if self._pools is None:
                self._pools = ThreadpoolController()  # looks for the libraries once; by now they are loaded
            with self._pools.limit(limits=1, user_api="blas"):
                futures = [self._executor.submit(work) for _ in range(self.threads)]
                errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def each(self, work: Callable[[int], Result], count: int) -> list[Result]:
        """[work(0), …, work(count − 1)]. Raises the first error."""
        if self.threads == 1 or count < 2:
            return [work(i) for i in range(count)]
        return list(self._executor.map(work, range(count)))

    def use_torch(self) -> None:
        """Makes torch compute within each of these threads, and leaves its threads elsewhere as they are."""
        with self._one_scan:
            if self._torch_ready:
                return
            import torch

            everywhere = torch.get_num_threads()
            together = threading.Barrier(self.threads)

            def alone() -> None:
                torch.set_num_threads(1)
                torch.get_num_threads()  # a thread adopts the number when it first asks
                together.wait()

            for future in [self._executor.submit(alone) for _ in range(self.threads)]:
                future.result()
            torch.set_num_threads(everywhere)
            self._torch_ready = True


def granted_cores() -> int:
    """Threads that this process may compute with: OMP_NUM_THREADS, which Ray sets to an actor's cores, else all it may run on."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdigit() and int(stated) > 0 else len(os.sched_getaffinity(0))


_of_process: dict[int, Workers] = {}
_making = threading.Lock()


def process_workers() -> Workers:
    """The workers of this process, made when first asked for; a forked child gets its own."""
    with _making:
        if os.getpid() not in _of_process:
            _of_process.clear()
            _of_process[os.getpid()] = Workers(granted_cores())
        return _of_process[os.getpid()]
