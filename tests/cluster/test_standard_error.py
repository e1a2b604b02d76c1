"""The cause that another process printed is found again."""

import subprocess
import sys

CODE = """
import sys
from cluster.standard_error import StandardError
print("OldError: before it was watched", file=sys.stderr, flush=True)
said = StandardError()
{print}
sys.stdout.write(said.last_error())
"""


def last_error(tmp_path, *lines):
    printing = "\n".join(f"print({line!r}, file=sys.stderr, flush=True)" for line in lines)
    with (tmp_path / "err").open("w") as errors:
        code = CODE.replace("{print}", printing)
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=errors, text=True, check=True, timeout=60
        )
    return done.stdout


def test_the_last_telling_error_is_found_and_those_that_point_elsewhere_are_passed_over(tmp_path):
    found = last_error(
        tmp_path,
        "(Worker pid=7) ERROR 11-30 18:08:05 [core.py:1435] ValueError: first",
        "(Worker pid=7) ERROR 11-30 18:08:05 [core.py:1435] torch.OutOfMemoryError: 3 GiB are missing",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    )
    assert found == "OutOfMemoryError: 3 GiB are missing"


def test_an_error_without_words_is_named(tmp_path):
    assert last_error(tmp_path, "    assert a.shape == b.shape", "AssertionError") == "AssertionError"


def test_what_was_said_before_and_what_is_no_error_do_not_count(tmp_path):
    assert last_error(tmp_path, "all is well") == ""
