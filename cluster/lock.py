"""File locks between processes: whoever holds one is alone, also on another machine where the file system carries locks.

A file system without locks is said to be one: it must not look as if somebody else held the lock, nor as if nobody did.
"""

import fcntl
from typing import IO

from cluster.failures import SettingsError


def try_lock(handle: IO[bytes], shared: bool = False) -> bool:
    """Lock an open file without waiting, until it is closed; False if another process holds it.

    `shared` needs a file open for reading, an exclusive lock one open for writing. Raises SettingsError where the file system
    has no locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN, or EACCES on NFS
        return False
    except OSError as error:
        raise SettingsError(
            f"{handle.name} cannot be locked ({error}): its file system has no locks, so two processes could write one run; "
            "put run.directory on another one, and use run.mirror to keep the run"
        ) from error
    return True
