"""Whose a SQLite file is, and how a new one begins: what differs from one kind of file to another.

The store's files (S4) and the coordinator's (C2) say by their header whose they are; a feed
cache's (F1) by their tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from stillfresh.errors import ConfigError
from stillfresh.stores.sqlite.schema import APPLICATION_ID, BEGIN_FILE, VERSION

OURS: Final = {
    APPLICATION_ID: "a cache's store",
    0x5F4E3002: "a coordinator's file",
    0x5F4E3003: "a games file",
}
"""What the header of a file of stillfresh says that it is."""


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file."""

    application_id: int
    begin: str
    """The SQL that makes an empty file one of this kind."""
    is_begun: Callable[[apsw.Connection, Path], bool]
    """False for a file that `begin` has still to be run on; ConfigError for somebody else's."""
    former_id: int | None = None
    """Of files of an earlier release, which `is_begun` makes files of this kind."""


def not_ours(path: Path, application: int) -> ConfigError:
    """The error for a file that cannot be opened as the kind that was asked for."""
    if (what := OURS.get(application)) is not None:
        return ConfigError(
            f"{path}: is {what} of stillfresh, which cannot be opened as any other; "
            "name another file"
        )
    return ConfigError(
        f"{path}: is another application's SQLite file (application_id {application}); "
        "give stillfresh a file of its own"
    )


def by_header(application_id: int, version: int, begin: str) -> Format:
    """A kind of file whose header says whose it is; an empty one is begun, any other refused."""

    def is_begun(connection: apsw.Connection, path: Path) -> bool:
        found, its_version = (
            connection.pragma(name) for name in ("application_id", "user_version")
        )
        if found != application_id:
            tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
            if (found, its_version, tables) != (0, 0, 0):
                raise not_ours(path, found)
            return False
        if its_version != version:
            raise ConfigError(
                f"{path}: is of schema version {its_version}, this release of stillfresh knows "
                f"{version}; use another file, or delete this one: it is a cache"
            )
        return True

    return Format(application_id, begin, is_begun)


STORE: Final = by_header(APPLICATION_ID, VERSION, BEGIN_FILE)
