"""What processes of a library said last on this process's error output: often the only place where a cause is told."""

import os
import re
from pathlib import Path

_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception))(?:: (.+))?$", re.MULTILINE)
_SAYS_NOTHING = ("Engine core initialization failed", "WorkerProc initialization failed", "See root cause")
_TAIL_BYTES = 256 * 1024


class StandardError:
    """Watches from the moment it is made."""

    def __init__(self) -> None:
        descriptor = Path("/proc/self/fd/2")
        # A terminal or a pipe cannot be read back; a log file of Ray's can.
        self.where = os.readlink(descriptor) if descriptor.is_symlink() else "its error output"
        self._file = Path(self.where) if Path(self.where).is_file() else None
        self._began = self._file.stat().st_size if self._file else 0

    def last_error(self) -> str:
        """The last exception that was printed since, in one line, passing over those that only point to others; empty if none was."""
        if self._file is None:
            return ""
        with self._file.open("rb") as stream:
            stream.seek(max(self._began, self._file.stat().st_size - _TAIL_BYTES))
            said = stream.read().decode(errors="replace")
        found = [f"{kind}: {text}" if text else kind for kind, text in _ERROR.findall(said)]
        telling = [line for line in found if not any(nothing in line for nothing in _SAYS_NOTHING)]
        return telling[-1].strip() if telling else ""
