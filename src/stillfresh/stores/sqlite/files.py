"""The SQLite file and its neighbours: where it may live, the lock beside it, setting it aside.

The database itself is never opened here: closing any descriptor of it drops SQLite's own locks.
"""

import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stillfresh.errors import ConfigError, StoreError
from stillfresh.file_locks import lock_whole_file

NETWORK: Final = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "glusterfs", "fuse.glusterfs", "afs"]
)
MOUNTINFO: Final = Path("/proc/self/mountinfo")
LOCKS: Final = Path("/proc/locks")
LOCK_LIMIT: Final = 5.0
"""Seconds that an opening waits for the lock beside the file."""
PRIVATE: Final = 0o600
"""Only the owner may read a new file, because cached values may be secret."""


def network_filesystem(mountinfo: str, path: Path) -> str | None:
    """The type of the network filesystem that holds `path`, by the text of mountinfo; else None."""
    kind = None
    depth = -1
    for line in mountinfo.splitlines():
        mount, _, device = line.partition(" - ")
        escaped = mount.split()[4]
        point = Path(re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), escaped))
        # The deepest mount holds the path; of two at the same point, the later hides the earlier.
        if path.is_relative_to(point) and len(point.parts) >= depth:
            kind = device.split()[0]
            depth = len(point.parts)
    return kind if kind in NETWORK else None


def check_place(path: Path) -> None:
    """Refuse what can never work, with what to do instead."""
    if not path.parent.is_dir():
        raise StoreError(f"{path}: there is no directory {path.parent}; create it first")
    if path.is_dir():
        raise StoreError(f"{path}: is a directory; give the name of a file")
    kind = network_filesystem(MOUNTINFO.read_text(), path) if MOUNTINFO.exists() else None
    if kind is not None:
        raise ConfigError(
            f"{path}: is on a network filesystem ({kind}), where SQLite's locks and shared memory "
            "do not work between machines; use a local disk, or another store"
        )


def real(path: Path) -> Path:
    """Return the file that a symbolic link leads to."""
    return Path(os.path.realpath(path))


def log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def index_of(path: Path) -> Path:
    """The index of the log, which the processes share."""
    return Path(f"{path}-shm")


def lock_of(path: Path) -> Path:
    return Path(f"{path}.lock")


def has_log(path: Path) -> bool:
    """An empty log replays nothing."""
    try:
        return log_of(path).stat().st_size > 0
    except FileNotFoundError:
        return False


def is_begun(path: Path) -> bool:
    """False if there is no file, or an empty one."""
    return path.exists() and path.stat().st_size > 0


def on_read_only_mount(path: Path) -> bool:
    return bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)


def create_private(path: Path) -> None:
    """Create the file with mode 0600, for any umask; SQLite gives its log the same mode.

    An existing file keeps its mode. If none can be created, SQLite reports why.
    """
    with suppress(OSError):
        create_new(path)


def create_new(path: Path) -> None:
    """FileExistsError if anything has this name, also a link that leads nowhere."""
    try:
        os.mknod(path, PRIVATE)  # without opening it
    except FileExistsError:
        raise
    except OSError:  # macOS allows this to root only, some file systems to nobody
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE))


@contextmanager
def locked(path: Path, limit: float | None = None) -> Iterator[int | None]:
    """Hold the lock between opening a file and setting it aside, across processes.

    Yields the descriptor of the lock file. None where no lock file can be made: nothing can be
    renamed there either. The lock file stays, since two processes could hold a lock whose file was
    removed. Raises StoreError if another process keeps the lock for longer than `limit` seconds.
    """
    lock = lock_of(path)
    if lock.is_symlink():  # it makes a file elsewhere
        raise StoreError(f"{lock}: is a symbolic link, not a lock file of ours; remove it")
    if lock.exists() and path.exists() and lock.samefile(path):  # closing it drops SQLite's locks
        raise StoreError(f"{lock}: is a link to the file itself, not a lock file; remove it")
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(lock, flags, PRIVATE)
    except OSError:
        yield None
        return
    try:
        _lock(descriptor, lock, LOCK_LIMIT if limit is None else min(limit, LOCK_LIMIT))
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, lock: Path, limit: float) -> None:
    until = time.monotonic() + limit
    while True:
        try:
            return lock_whole_file(descriptor)
        except BlockingIOError as exc:
            if time.monotonic() >= until:
                locks = LOCKS.read_text() if LOCKS.exists() else ""
                holder = lock_holder(locks, os.fstat(descriptor))
                raise StoreError(
                    f"{lock}: {holder or 'another process'} has kept this lock for {limit:g} s; "
                    "is it stopped? It must continue or end before the file can be opened"
                ) from exc
            time.sleep(random.uniform(0.001, 0.005))  # noqa: S311 (no secret)


def lock_holder(locks: str, lock: os.stat_result) -> str | None:
    """The process that has this file locked, by the text of /proc/locks; None if not known."""
    place = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    for line in locks.splitlines():
        match line.split():
            case [_, "FLOCK", _, _, process, inode, *_] if inode == place:
                return f"process {process}" if process.isdecimal() and process != "0" else None
    return None


def remove_log(path: Path) -> None:
    for neighbour in (log_of(path), index_of(path)):
        if neighbour.exists():  # on a read-only medium, removing nothing fails, too
            neighbour.unlink()


def set_aside(path: Path) -> Path:
    """Rename the file, its log first: a new file must never meet the old one's log."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = Path(f"{path}.corrupt-{stamp}")
    for suffix in ("-wal", "-shm", ""):
        old = Path(f"{path}{suffix}")
        if old.exists():
            old.rename(f"{aside}{suffix}")
    return aside
