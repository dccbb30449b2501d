"""Whose a SQLite file is, and how a new one begins: what differs from one kind of file to another.

The store's files (S4) say by their application id whose they are; a feed cache's (F1) by their
tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from stillfresh.errors import ConfigError
from stillfresh.stores.sqlite.schema import APPLICATION_ID, BEGIN_FILE, VERSION

__all__ = ["STORE", "Format", "not_ours"]


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file."""

    application_id: int
    begin: str
    """The SQL that makes an empty file one of this kind."""
    is_begun: Callable[[apsw.Connection, Path], bool]
    """False for a file that `begin` has still to be run on; ConfigError for somebody else's."""


def not_ours(path: Path, application: int) -> ConfigError:
    return ConfigError(
        f"{path}: is another application's SQLite file (application_id {application}); "
        "give stillfresh a file of its own"
    )


def _is_store(connection: apsw.Connection, path: Path) -> bool:
    application, version = (connection.pragma(name) for name in ("application_id", "user_version"))
    if application != APPLICATION_ID:
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
        if (application, version, tables) != (0, 0, 0):
            raise not_ours(path, application)
        return False
    if version != VERSION:
        raise ConfigError(
            f"{path}: is of schema version {version}, this release of stillfresh knows {VERSION}; "
            "use another file, or delete this one: it is a cache"
        )
    return True


STORE: Final = Format(APPLICATION_ID, BEGIN_FILE, _is_store)
