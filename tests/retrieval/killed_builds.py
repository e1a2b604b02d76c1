"""Run by a test: builds the index of `sys.argv[1]` again and again, each killed at a later moment than the one before.

Directory n (`sys.argv[2]/n`) starts as a copy of an older index, and its build dies by SIGKILL at its n-th call that makes
something durable or visible (fsync, rename, unlink, rmdir). Ends when a build survives, and prints how many died.
"""

import itertools
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from retrieval.build import build_index
from retrieval.encoder import HashingEncoder


def killed_at(moment: int, work: Callable[[], Any]) -> bool:
    """Whether `work`, in a child, died by SIGKILL at its n-th call that makes something durable or visible."""
    child = os.fork()
    if child == 0:
        calls = itertools.count()

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(calls) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        for name in ("fsync", "rename", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main(articles_file: Path, out: Path) -> None:
    articles = pickle.loads(articles_file.read_bytes())
    for moment in itertools.count():
        directory = out / str(moment)
        shutil.copytree(out / "older", directory)
        if not killed_at(moment, partial(build_index, articles, HashingEncoder(32), directory)):
            print(moment)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
