"""What the Python tool's cell is made of: the command line that starts one, and the files that it may see.

Pure apart from `find_runtime`, which looks at this interpreter once per process. A bubblewrap cell sees the
interpreter, the standard library, numpy, pandas, scipy and what these load, under paths that say nothing about this
machine; no other file, no network, no process of ours.
"""

import datetime as dt
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal

from cluster.record import Record

PACKAGES = ("numpy", "pandas", "scipy", "dateutil", "six", "tzdata")
"""What a cell can import besides the standard library: the three that the prompts promise and what they need."""
_FAKETIME = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/lib64/faketime", "/usr/local/lib/faketime")
_SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")
_SCRATCH_BYTES = 64 * 2**20
_SHARED_MEMORY_BYTES = 16 * 2**20
_ENVIRONMENT = {
    "PATH": "/python/bin",
    "HOME": "/tmp",
    "TZ": "UTC",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # The order of a set is part of what a run reproduces.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
}
# -s -P -B and an environment of ours are what -I means, except that the hash seed is obeyed.
_FLAGS = ("-s", "-P", "-B")

Kind = Literal["bubblewrap", "namespaces", "process"]


class Enclosure(Record):
    """How strong the walls are."""

    kind: Kind
    drop_root: bool = False
    """bubblewrap as root: the code runs as an unused user without capabilities, else in a user namespace."""


class Runtime(Record):
    """The parts of this interpreter that a cell needs, as absolute paths on this machine."""

    executable: str
    stdlib: str
    stdlib_below_prefix: str
    packages: tuple[str, ...]
    libraries: tuple[str, ...]
    """Shared libraries outside of the packages, the loader included."""
    faketime: str | None

    @property
    def site(self) -> str:
        """The folder of the packages."""
        return str(Path(self.packages[0]).parent)


class Launch(Record):
    """One cell's command line."""

    command: tuple[str, ...]
    environment: dict[str, str]
    files: tuple[tuple[str, bytes], ...] = ()
    """(placeholder in the command, content) of files that are handed over as descriptors."""
    packages: str
    """Where the cell finds its packages."""


def noon(today: dt.date) -> dt.datetime:
    """The moment at which a cell's clock starts: noon UTC of the forecast date."""
    return dt.datetime.combine(today, dt.time(12), dt.UTC)


def launch(enclosure: Enclosure, runtime: Runtime, cell: Path, today: dt.date, scratch: str) -> Launch:
    """The command that starts the cell's program; its one argument is still to be appended."""
    if enclosure.kind == "bubblewrap":
        return _bubblewrap(enclosure, runtime, cell, today)
    environment = _ENVIRONMENT | {"PATH": os.path.dirname(runtime.executable), "HOME": scratch, "TMPDIR": scratch}
    if runtime.faketime is not None:
        environment |= {"LD_PRELOAD": runtime.faketime, "FAKETIME": _faketime(today)}
    walls: tuple[str, ...] = ()
    if enclosure.kind == "namespaces":
        walls = ("unshare", "--net", "--pid", "--fork", "--kill-child")
        if os.geteuid() != 0:
            walls += ("--user", "--map-current-user")
    program = (runtime.executable, *_FLAGS, str(cell))
    return Launch(
        command=(*map(_found, walls[:1]), *walls[1:], *program), environment=environment, packages=runtime.site
    )


def _bubblewrap(enclosure: Enclosure, runtime: Runtime, cell: Path, today: dt.date) -> Launch:
    stdlib = f"/python/{runtime.stdlib_below_prefix}"
    binds = [
        (runtime.executable, "/python/bin/python3"),
        (runtime.stdlib, stdlib),
        *((path, f"/packages/{Path(path).name}") for path in runtime.packages),
        *((path, _library_place(path, runtime.libraries)) for path in runtime.libraries),
    ]
    files = [("cell", "/cell.py", cell.read_bytes())]
    if runtime.faketime is not None:
        binds.append((runtime.faketime, runtime.faketime))
        # Files, not variables, so that a process that the code starts with an empty environment stands at τ as well.
        files.append(("preload", "/etc/ld.so.preload", runtime.faketime.encode() + b"\n"))
        files.append(("clock", "/etc/faketimerc", _faketime(today).encode() + b"\n"))
    devices = ("/dev/null", "/dev/zero", "/dev/urandom")
    command = [_found("bwrap"), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--hostname", "cell", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--cap-drop", "ALL"]
    if enclosure.drop_root:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    # bubblewrap makes missing parents for its own user only, and the code may run as another.
    for folder in _parents([place for _, place in binds] + [place for _, place, _ in files] + list(devices)):
        command += ["--perms", "0755", "--dir", folder]
    for path, place in binds:
        command += ["--ro-bind", path, place]
    for hidden in ("site-packages", "dist-packages"):
        if os.path.isdir(os.path.join(runtime.stdlib, hidden)):
            command += ["--tmpfs", f"{stdlib}/{hidden}", "--remount-ro", f"{stdlib}/{hidden}"]
    for device in devices:
        command += ["--dev-bind", device, device]
    for name, place, _ in files:
        command += ["--perms", "0444", "--file", f"{{{name}}}", place]
    command += ["--perms", "1777", "--size", str(_SCRATCH_BYTES), "--tmpfs", "/tmp"]
    command += ["--perms", "1777", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    return Launch(
        command=(*command, "/python/bin/python3", *_FLAGS, "/cell.py"),
        environment={},
        files=tuple((f"{{{name}}}", content) for name, _, content in files),
        packages="/packages",
    )


def _faketime(today: dt.date) -> str:
    return f"@{noon(today):%Y-%m-%d %H:%M:%S}"


def _library_place(path: str, libraries: Sequence[str]) -> str:
    """Where a library lies in the cell: system libraries at home, others (libpython) beside the C library."""
    if path.startswith(_SYSTEM):
        return path
    libc = next((p for p in libraries if Path(p).name.startswith("libc.so")), "/usr/lib/libc.so.6")
    return str(PurePosixPath(libc).parent / PurePosixPath(path).name)


def _parents(places: Sequence[str]) -> list[str]:
    """All folders above these places, the outer ones first."""
    return sorted({str(parent) for place in places for parent in PurePosixPath(place).parents} - {"/"})


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise FileNotFoundError(f"{program} is not installed")
    return path


@cache
def find_runtime() -> Runtime:
    """The runtime of this interpreter. Raises FileNotFoundError when one of its parts is missing."""
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    stdlib = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix})
    packages = tuple(path for name in PACKAGES for path in _package(name))
    faketime = next((p for pattern in _FAKETIME for p in glob.glob(f"{pattern}/libfaketime.so.1")), None)
    return Runtime(
        executable=executable,
        stdlib=stdlib,
        stdlib_below_prefix=os.path.relpath(stdlib, sys.base_prefix),
        packages=packages,
        libraries=tuple(sorted(_libraries(executable, stdlib, packages, faketime))),
        faketime=faketime,
    )


def _package(name: str) -> Iterator[str]:
    """The path of a package or module and of the libraries that its wheel brought along."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        if name in PACKAGES[:3]:
            raise FileNotFoundError(f"{name} is not installed; the Python tool needs {', '.join(PACKAGES[:3])}")
        return
    path = Path(spec.origin)
    if path.name == "__init__.py":
        path = path.parent
    yield str(path)
    if (bundled := path.parent / f"{name}.libs").is_dir():
        yield str(bundled)


def _libraries(executable: str, stdlib: str, packages: Sequence[str], faketime: str | None) -> set[str]:
    """Shared libraries that the loader (ldd) resolves for all compiled modules, outside of the packages."""
    # _tkinter and nis would bring a window system and a directory service.
    modules = [p for p in glob.glob(f"{stdlib}/lib-dynload/*.so") if not Path(p).name.startswith(("_tkinter", "nis"))]
    modules += [path for package in packages for path in glob.glob(f"{package}/**/*.so*", recursive=True)]
    files = [executable, *modules, *([faketime] if faketime is not None else [])]
    listed = subprocess.run([_found("ldd"), *files], capture_output=True, text=True, check=False).stdout
    found = set()
    for line in listed.splitlines():
        path = line.split("=>")[-1].strip().split(" (0x")[0]
        if line.startswith(("\t", " ")) and path.startswith("/") and not path.startswith(tuple(packages)):
            normal = os.path.normpath(path)
            if not normal.startswith(tuple(packages)):
                found.add(normal)
    return found
