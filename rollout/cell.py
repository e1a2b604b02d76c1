"""The program that runs inside the Python tool's cell, as a script of a fresh interpreter.

It limits itself, gives up root, sets the clock where no library does, says one byte to show that the cell works, and
only then runs the code that it read from standard input: like the REPL it echoes a bare last expression. It imports
nothing heavy and nothing of ours, because nothing of ours is there.
"""

import ast
import linecache
import os
import resource
import sys
import traceback
from types import ModuleType, TracebackType
from typing import Any

READY = b"\x06"
"""The first byte of standard output: everything before the code itself went well."""
_SOURCE = "<cell>"


def confine(limits: dict[str, int], uid: int | None) -> None:
    """Resource limits (by name, as in `resource`) for this process and its children; then root is given up for good."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))
    if uid is not None:
        # libfaketime's shared start of the clock was made by root; the code's own children must be able to open it.
        for name in os.listdir("/dev/shm"):
            os.chmod(f"/dev/shm/{name}", 0o666)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def set_clock(start: float) -> None:
    """Python's own clocks begin at `start` (seconds since the epoch) and move on; C libraries are not reached this way.

    `import datetime` gives replacements to the code itself only: compiled modules check the size of the true classes.
    """
    import builtins
    import datetime
    import time

    true_time, true_localtime, true_asctime, true_clock = time.time, time.localtime, time.asctime, time.clock_gettime
    true_gmtime, true_strftime = time.gmtime, time.strftime
    true_date, true_datetime = datetime.date, datetime.datetime
    shift = start - true_time()

    def now() -> float:
        return true_time() + shift

    def localtime(seconds: float | None = None) -> time.struct_time:
        return true_localtime(now() if seconds is None else seconds)

    def clock_gettime(clock: int) -> float:
        return now() if clock == time.CLOCK_REALTIME else true_clock(clock)

    for name, replacement in {
        "time": now,
        "time_ns": lambda: int(now() * 1e9),
        "localtime": localtime,
        "gmtime": lambda seconds=None: true_gmtime(now() if seconds is None else seconds),
        "ctime": lambda seconds=None: true_asctime(localtime(seconds)),
        "asctime": lambda fields=None: true_asctime(localtime() if fields is None else fields),
        "strftime": lambda form, fields=None: true_strftime(form, localtime() if fields is None else fields),
        "clock_gettime": clock_gettime,
        "clock_gettime_ns": lambda clock: int(clock_gettime(clock) * 1e9),
    }.items():
        setattr(time, name, replacement)

    class SameInstances(type):
        """Values of the true classes are instances of the replacements."""

        def __instancecheck__(cls, value: object) -> bool:
            true = {"date": true_date, "datetime": true_datetime}.get(cls.__name__) if cls in replacements else None
            return isinstance(value, true) if true is not None else super().__instancecheck__(value)

    class Date(true_date, metaclass=SameInstances):  # type: ignore[misc, valid-type]
        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(now())

    class Datetime(true_datetime, metaclass=SameInstances):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return cls.fromtimestamp(now(), tz)

        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(now())

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(now(), datetime.UTC).replace(tzinfo=None)

    replacements: tuple[type, ...] = (Date, Datetime)
    shown = ModuleType("datetime", datetime.__doc__)
    shown.__dict__.update(datetime.__dict__)
    for name, kind in (("date", Date), ("datetime", Datetime)):
        kind.__name__ = kind.__qualname__ = name
        kind.__module__ = "datetime"
        setattr(shown, name, kind)
    true_import = builtins.__import__

    def import_module(name: str, where: dict[str, Any] | None = None, *rest: Any, **named: Any) -> ModuleType:
        if name == "datetime" and where is not None and where.get("__name__") == "__main__":
            return shown
        return true_import(name, where, *rest, **named)

    builtins.__dict__["__import__"] = import_module


def mend_sleep() -> None:
    """libfaketime breaks the absolute sleep behind `time.sleep`; a relative wait is not affected."""
    import select
    import time

    def sleep(seconds: float) -> None:
        select.select((), (), (), seconds)

    time.__dict__["sleep"] = sleep


def hide_build_day() -> None:
    """`sys.version` names the day the interpreter was built, which lies after most forecast dates."""
    number, _, rest = sys.version.partition(" (")
    sys.version = f"{number} (main) {rest[rest.find('[') :]}"


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback from the code's own first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename != _SOURCE:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def run(source: str) -> None:
    """Runs the code as a fresh `__main__` and echoes its last statement if that is an expression other than None."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    linecache.cache[_SOURCE] = (len(source), None, source.splitlines(keepends=True), _SOURCE)
    tree = ast.parse(source, _SOURCE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _SOURCE, "exec"), module.__dict__)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _SOURCE, "eval"), module.__dict__)
        if value is not None:
            print(repr(value))


def main() -> None:
    """One cell. Argument: a literal `{"packages": path, "limits": by name, "uid": or None, "clock": start or None}`.

    No start: libfaketime has set the clock.
    """
    settings = ast.literal_eval(sys.argv[1])
    source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    sys.argv[:] = [""]
    # The interpreter's own site-packages may hold other versions; the promised packages are the only ones.
    sys.path[:] = [path for path in sys.path if not path.endswith(("site-packages", "dist-packages"))]
    sys.path.append(settings["packages"])
    hide_build_day()
    if settings["clock"] is None:
        mend_sleep()
    else:
        set_clock(settings["clock"])
    confine(settings["limits"], settings["uid"])
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.excepthook = show_error
    os.write(1, READY)
    run(source)


if __name__ == "__main__":
    main()
