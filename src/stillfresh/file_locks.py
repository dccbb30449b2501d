"""Locking a whole file against other processes, by what the platform has.

The platform's module is imported when a file is locked, so that `import stillfresh` needs neither.
"""

import sys


def lock_whole_file(descriptor: int) -> None:
    """Lock the file until the descriptor is closed. Raises BlockingIOError if another has it."""
    if sys.platform == "win32":
        import msvcrt  # noqa: PLC0415 (does not exist elsewhere)

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as exc:
            raise BlockingIOError(*exc.args) from exc
    else:
        import fcntl  # noqa: PLC0415 (does not exist on Windows)

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
