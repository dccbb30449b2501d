"""The file and its neighbours: where it may live, the lock beside it, setting it aside (S4).

The database itself is never opened here: closing any descriptor of it drops SQLite's own locks.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeAlias

from stillfresh.errors import ConfigError, StoreError

__all__ = [
    "Identity",
    "check_place",
    "identity_of",
    "locked",
    "network_filesystem",
    "on_read_only_mount",
    "set_aside",
]

Identity: TypeAlias = tuple[int, int]
"""Device and inode: the same path may name another file by now."""

NETWORK: Final = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "glusterfs", "afs"} | {
    "fuse.glusterfs"
}
MOUNTINFO: Final = Path("/proc/self/mountinfo")


def network_filesystem(mountinfo: str, path: Path) -> str | None:
    """The type of the network filesystem that holds `path`, by the text of mountinfo; else None."""
    found, length = None, -1
    for line in mountinfo.splitlines():
        mount, _, rest = line.partition(" - ")
        point = Path(_unescaped(mount.split()[4]))
        # Of two mounts on one point the later hides the earlier.
        if path.is_relative_to(point) and len(point.parts) >= length:
            found, length = rest.split()[0], len(point.parts)
    return found if found in NETWORK else None


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


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


def identity_of(path: Path) -> Identity | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def on_read_only_mount(path: Path) -> bool:
    return bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Between processes: who opens the file and who sets it aside never meet.

    False where no lock file can be made: nothing can be renamed there either. The lock file
    stays, since two could hold a lock whose file was removed in between.
    """
    try:
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> Path:
    """Rename the file, its log first: a new file must never meet the old one's log."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = Path(f"{path}.corrupt-{stamp}")
    for suffix in ("-wal", "-shm", ""):
        if (old := Path(f"{path}{suffix}")).exists():
            old.rename(f"{aside}{suffix}")
    return aside
