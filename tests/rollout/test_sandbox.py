import asyncio
import contextlib
import datetime as dt
import os
import time
from pathlib import Path

import pytest

from cluster.config import PythonSettings
from cluster.failures import InfrastructureError, SettingsError
from rollout import sandbox as module
from rollout.enclosure import Enclosure, find_runtime
from rollout.sandbox import CellResult, Sandbox, choose_enclosure

DAY = dt.date(2024, 6, 1)


def _bubblewrap_works() -> bool:
    try:
        choose_enclosure("bubblewrap")
    except SettingsError:
        return False
    return True


needs_bubblewrap = pytest.mark.skipif(
    not _bubblewrap_works(), reason="bubblewrap is not installed or not permitted here"
)
needs_faketime = pytest.mark.skipif(find_runtime().faketime is None, reason="libfaketime is not installed")


def cell(code: str, **settings: object) -> CellResult:
    sandbox = Sandbox(PythonSettings.model_validate({"isolation": "bubblewrap", "timeout_s": 20} | settings))
    return asyncio.run(sandbox.run(code, DAY))


def weak(code: str, **settings: object) -> CellResult:
    return cell(code, isolation="process", **settings)


def printed(code: str) -> str:
    result = cell(code)
    assert (result.error, result.exit_status) == ("", 0)
    return result.stdout.strip()


@needs_bubblewrap
@needs_faketime
def test_every_clock_says_the_forecast_date():
    code = """
import datetime, time, subprocess, sys, numpy, pandas
print(datetime.datetime.now(), datetime.date.today(), time.strftime("%Y-%m-%d", time.gmtime(time.time())))
print(pandas.Timestamp.now(), pandas.Timestamp.now("UTC"), numpy.datetime64("now"))
print(subprocess.run([sys.executable, "-c", "import time; print(time.ctime())"], env={}, capture_output=True, text=True).stdout)
"""
    shown = printed(code)
    assert shown.count("2024-06-01") == 6
    assert "Sat Jun  1 12:00" in shown
    assert str(dt.datetime.now(dt.UTC).year) not in shown


@needs_bubblewrap
@needs_faketime
def test_the_clock_starts_at_noon_and_moves_on():
    code = (
        "import time, datetime\na = time.time(); time.sleep(0.05); print(time.time() > a, datetime.datetime.now().hour)"
    )
    assert printed(code) == "True 12"


@needs_bubblewrap
def test_there_is_no_network():
    code = """
import socket
for address in (("127.0.0.1", 22), ("1.1.1.1", 53), ("8.8.8.8", 443)):
    try:
        socket.create_connection(address, timeout=1)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
print([name for _, name in socket.if_nameindex()])
"""
    shown = printed(code)
    assert "connected" not in shown
    assert "['lo']" in shown


@needs_bubblewrap
def test_no_file_of_ours_can_be_read():
    ours = [
        str(Path.cwd()),
        str(Path(__file__)),
        "/etc/passwd",
        "/etc/hostname",
        "/proc/self/environ",
        "/root",
        "/home",
        "/sys",
    ]
    ours += ["/var", "/work", "/python/lib/python3.11/site-packages/pip"]
    code = f"import os\nprint([p for p in {ours!r} if os.path.exists(p)], sorted(os.listdir('/')))"
    shown = printed(code)
    assert shown.startswith("[] ")
    assert not {"root", "home", "proc", "work", "var", "sys"} & set(shown.split("'"))


@needs_bubblewrap
def test_only_the_promised_packages_can_be_imported():
    code = """
import importlib.util
print([n for n in ("numpy", "pandas", "scipy") if importlib.util.find_spec(n) is None])
print([n for n in ("torch", "ray", "rollout", "pip", "pydantic", "requests") if importlib.util.find_spec(n)])
"""
    assert printed(code).split("\n") == ["[]", "[]"]


@needs_bubblewrap
def test_nothing_can_be_written_but_scratch():
    code = """
import os
open("/tmp/x", "w").write("x")
for path in ("/x", "/python/x", "/packages/x", "/packages/numpy/x", "/etc/faketimerc", "/cell.py", "/python/bin/python3", "/dev/x"):
    try:
        open(path, "a")
        print("wrote", path)
    except OSError:
        pass
"""
    assert printed(code) == ""


@needs_bubblewrap
def test_the_code_has_no_capability_and_is_not_our_user():
    assert (
        printed("import os\ntry:\n    os.setuid(0); os.chroot('/tmp'); print('root')\nexcept OSError:\n    pass") == ""
    )
    if os.geteuid() == 0:
        assert int(printed("import os; os.getuid()")) >= 60_000


@needs_bubblewrap
def test_our_environment_is_invisible(monkeypatch):
    monkeypatch.setenv("PASTCAST_SECRET", "s3cret")
    assert "s3cret" not in printed("import os; dict(os.environ)")


@needs_bubblewrap
def test_a_run_keeps_nothing_for_the_next():
    assert printed("x = 1; open('/tmp/kept', 'w').write('x')") == "1"
    assert printed("import os; ('x' in globals(), os.listdir('/tmp'))") == "(False, [])"


@pytest.mark.parametrize("run", [pytest.param(cell, marks=needs_bubblewrap), weak])
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", "2\n"),
        ("x = 5\nx * 2", "10\n"),
        ("None", ""),
        ("print('a')\n'b'", "a\n'b'\n"),
        ("", ""),
        ("# only a comment", ""),
        ("'ünï ☃ 𝄞'", "'ünï ☃ 𝄞'\n"),
        ("print('\\ud800')", "\\ud800\n"),
        ("print('a\\0b')", "a\0b\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nA(1)", "A(x=1)\n"),
        ("import pickle\nclass A: pass\nlen(pickle.dumps(A())) > 0", "True\n"),
        ("input() if False else __name__", "'__main__'\n"),
    ],
)
def test_output_is_what_was_printed_and_the_last_bare_expression(run, code, shown):
    result = run(code)
    assert (result.stdout, result.error, result.exit_status) == (shown, "", 0)


@pytest.mark.parametrize("run", [pytest.param(cell, marks=needs_bubblewrap), weak])
@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("1/0", 1, "ZeroDivisionError: division by zero"),
        ("def f(:", 1, "SyntaxError: invalid syntax"),
        ("a\0b", 1, "null bytes"),
        ("'\ud800'", 1, "surrogates not allowed"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('bye')", 1, "bye"),
        ("input()", 1, "EOFError"),
        ("def f(): f()\nf()", 1, "RecursionError"),
        ("(" * 100_000, 1, "too many nested parentheses"),
    ],
)
def test_errors_are_results_with_status_and_text(run, code, status, error):
    result = run(code)
    assert result.exit_status == status
    assert error in result.error
    assert not result.timed_out


@pytest.mark.parametrize("run", [pytest.param(cell, marks=needs_bubblewrap), weak])
def test_a_traceback_shows_the_code_and_no_path_of_ours(run):
    result = run("import numpy as np\ndef f():\n    return np.linalg.inv(np.zeros((2, 2)))\nf()")
    assert 'File "<cell>", line 3, in f\n    return np.linalg.inv' in result.error
    assert '"/packages/numpy/linalg/' in result.error
    for path in (str(Path.cwd()), str(Path.home()), "cell.py", "sandbox"):
        assert path not in result.error


@pytest.mark.parametrize("run", [pytest.param(cell, marks=needs_bubblewrap), weak])
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import os, time\nprint('begun', flush=True)\nos.fork()\ntime.sleep(60)",
    ],
)
def test_time_out_kills_the_whole_group(run, code):
    result = run(code, timeout_s=1)
    assert result.timed_out
    assert result.exit_status == 137
    assert ("begun" in result.stdout) == ("begun" in code)


def _running(marker: str) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(path.read_bytes())
    return [line for line in found if marker.encode() in line.split(b"\0")]


def _endless(marker: str) -> str:
    return f"os.execv('/python/bin/python3', ['/python/bin/python3', '-c', 'while 1: pass', '{marker}'])"


@needs_bubblewrap
def test_a_signal_is_an_exit_status():
    assert cell("import os; os.kill(os.getpid(), 11)").exit_status == 139


@needs_bubblewrap
def test_a_child_in_its_own_session_dies_with_the_cell():
    marker = f"stray-{os.getpid()}"
    code = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    {_endless(marker)}\ntime.sleep(1)"
    seen = []

    async def watch() -> CellResult:
        task = asyncio.create_task(Sandbox(PythonSettings(isolation="bubblewrap")).run(code, DAY))
        while not task.done():
            seen.extend(_running(marker))
            await asyncio.sleep(0.1)
        return await task

    assert asyncio.run(watch()).exit_status == 0
    assert seen
    assert not _running(marker)


@pytest.mark.parametrize("run", [pytest.param(cell, marks=needs_bubblewrap), weak])
def test_memory_is_limited(run):
    result = run("x = bytearray(600 * 2**20)", memory_mib=512)
    assert result.exit_status == 1
    assert "MemoryError" in result.error


@needs_bubblewrap
def test_a_fork_bomb_runs_into_the_limit():
    result = cell("import os\nwhile True:\n    os.fork()", timeout_s=5)
    assert "Resource temporarily unavailable" in result.error


@needs_bubblewrap
def test_files_and_scratch_are_limited():
    assert "File too large" in cell("with open('/tmp/x', 'wb') as f:\n    f.write(bytes(2**26))").error
    result = cell("for i in range(9):\n    open(f'/tmp/{i}', 'wb').write(bytes(16 * 2**20))")
    assert "No space left on device" in result.error


@pytest.mark.parametrize("run", [pytest.param(cell, marks=needs_bubblewrap), weak])
def test_endless_output_is_stopped_and_bounded(run):
    result = run("while True: print('x' * 1000)", output_characters=500)
    assert result.flooded
    assert len(result.stdout) == 500
    assert result.cut > 10_000


@pytest.mark.parametrize("run", [pytest.param(cell, marks=needs_bubblewrap), weak])
def test_long_output_keeps_its_beginning_and_an_error_its_end(run):
    result = run("print('a' * 30 + 'é' * 30)\nraise ValueError('m' * 300 + 'end')", output_characters=40)
    assert result.stdout == "a" * 30 + "é" * 10
    assert result.error.endswith("mend\n")
    assert len(result.error) == 40
    assert result.cut > 21


@needs_bubblewrap
def test_cells_run_side_by_side_and_apart():
    async def both() -> list[CellResult]:
        sandbox = Sandbox(PythonSettings(isolation="bubblewrap", parallel=3))
        return await asyncio.gather(*(sandbox.run(f"import time; time.sleep(0.1); {i}", DAY) for i in range(6)))

    assert [r.stdout for r in asyncio.run(both())] == [f"{i}\n" for i in range(6)]


@needs_bubblewrap
def test_a_cancelled_run_leaves_no_process():
    marker = f"cancelled-{os.getpid()}"

    async def cancel() -> None:
        task = asyncio.create_task(
            Sandbox(PythonSettings(isolation="bubblewrap")).run(f"import os\n{_endless(marker)}", DAY)
        )
        while not _running(marker):
            assert not task.done()
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not _running(marker)


def test_what_code_leaves_in_the_background_ends_with_its_cell_also_without_walls():
    marker = f"background-{os.getpid()}"
    code = f"""
import subprocess, sys
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", "{marker}"], **quiet)
print("done")
"""
    result = module._Run(Enclosure(kind="process"), find_runtime(), PythonSettings(timeout_s=20), code, DAY).complete()
    assert (result.stdout, result.exit_status) == ("done\n", 0)
    # Killed it is by now; the kernel takes a moment to be done with it.
    patience = time.monotonic() + 10
    while _running(marker):
        assert time.monotonic() < patience, "it runs on"
        time.sleep(0.05)


@needs_bubblewrap
def test_the_user_namespace_walls_hold_too():
    if module._fault(Enclosure(kind="bubblewrap")) is not None:
        pytest.skip("user namespaces are not permitted here")
    run = module._Run(Enclosure(kind="bubblewrap"), find_runtime(), PythonSettings(), _ESCAPES, DAY)
    assert run.complete().stdout == "2024-06-01\n"


_ESCAPES = """
import datetime, os, socket
for path in ("/x", "/dev/x", "/etc/faketimerc", "/cell.py"):
    try:
        open(path, "a")
        print("wrote", path)
    except OSError:
        pass
try:
    socket.create_connection(("1.1.1.1", 53), timeout=1)
    print("connected")
except OSError:
    pass
print(datetime.date.today())
"""


def test_without_libfaketime_pythons_own_clocks_still_say_the_day():
    runtime = find_runtime().model_copy(update={"faketime": None})
    code = """
import datetime, time
from datetime import datetime as moment, date, timezone
print(datetime.datetime.now(), datetime.datetime.utcnow(), moment.now(timezone.utc), date.today(), time.strftime("%Y-%m-%d"))
print(time.gmtime().tm_year, time.ctime(), isinstance(moment(2020, 1, 1) + datetime.timedelta(1), moment))
import pandas
print(pandas.Timestamp(moment(2020, 1, 2)).year, isinstance(pandas.Timestamp(0), datetime.datetime))
"""
    result = module._Run(Enclosure(kind="process"), runtime, PythonSettings(), code, DAY).complete()
    assert result.error == ""
    assert result.stdout.count("2024-06-01") == 5
    assert "2024 Sat Jun  1 12:00" in result.stdout
    assert result.stdout.count("True") == 2


def test_the_weaker_walls_are_named(caplog):
    sandbox = Sandbox(PythonSettings(isolation="process"))
    assert sandbox.isolation in ("namespaces", "process")
    assert "read and write every file" in sandbox.describe()
    assert "read and write every file" in caplog.text
    with pytest.raises(SettingsError, match="install bubblewrap"):
        _unavailable()


def _unavailable() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        choose_enclosure.__wrapped__("bubblewrap")


def test_a_cell_that_does_not_start_is_infrastructure():
    runtime = find_runtime().model_copy(update={"executable": "/bin/false"})
    with pytest.raises(InfrastructureError, match="did not start"):
        module._Run(Enclosure(kind="process"), runtime, PythonSettings(), "1", DAY).complete()
