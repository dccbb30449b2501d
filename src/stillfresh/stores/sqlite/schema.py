"""The SQLite file's schema: its tables, the SQL of every step, and what a row means.

For every kind there is a table of copies (`post`) and a small one of times and leases (`post_ttl`);
tags are in one table for all. Times are milliseconds, terms are seconds. Text and mapping only:
nothing here runs SQL.

In the table of tags two kinds are not kinds: `post+` has the tags that came with a copy of `post`,
and `!` has, as its id, the epoch in which the tag was invalidated last.

Layout 2 has two more columns in the times of a kind: `version`, the copy's version, and
`changed`, the position of its last change among all changes of the file. A table of layout 1 is
read as it is, and gets the columns with the first write to it. The header says 1 for both, because
a release that knows only layout 1 may go on using the file: its steps are those without a version.
"""

import copy
import re
from functools import cache, cached_property, lru_cache
from math import ceil, floor
from typing import Any, Final, TypeAlias

from stillfresh.errors import ConfigError
from stillfresh.stores.contract import UNREAD, Copy, Failure, Mark, Record, Unread, policy_of
from stillfresh.stores.versions import NO_VERSION, unpacked_version

Row: TypeAlias = tuple[Any, ...]
"""One row of times, as SQLite returns it."""

APPLICATION_ID: Final = 0x5F4E3001
VERSION: Final = 1

TAGS: Final = (
    """CREATE TABLE IF NOT EXISTS stillfresh_tags(
        tag TEXT NOT NULL,
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        PRIMARY KEY (tag, kind, id)
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS stillfresh_tags_of ON stillfresh_tags(kind, id)",
)
"""The SQL of the table of tags."""
BEGIN_FILE: Final = f"""
    {";".join(TAGS)};
    PRAGMA application_id = {APPLICATION_ID};
    PRAGMA user_version = {VERSION};
"""
"""The SQL that makes an empty file a store's file."""
INSERT_TAG: Final = "INSERT OR IGNORE INTO stillfresh_tags(tag, kind, id) VALUES (?, ?, ?)"
DELETE_TAGS_OF_KIND: Final = "DELETE FROM stillfresh_tags WHERE kind = ? AND id = ?"
"""For `post`, the tags of the last lease; for `post+`, those that came with the copy."""
DELETE_TAGS: Final = "DELETE FROM stillfresh_tags WHERE kind IN (?1, ?1 || '+') AND id = ?2"
"""Both."""
SELECT_TAG: Final = """
    SELECT kind, id FROM stillfresh_tags WHERE tag = ? AND (kind, id) > (?, ?) AND kind <> '!'
    ORDER BY kind, id LIMIT ?
"""
EPOCH: Final = "SELECT CAST(max(id) AS INTEGER) FROM stillfresh_tags WHERE kind = '!'"
FORGET_EPOCHS: Final = "DELETE FROM stillfresh_tags WHERE kind = '!' AND (tag = ? OR id <= ?)"
IS_PAST: Final = "SELECT 1 FROM stillfresh_tags WHERE tag = ? AND kind = '!' AND id > ?"
CREATE_POSITION: Final = """
    CREATE TABLE IF NOT EXISTS stillfresh_position(
        one INTEGER PRIMARY KEY CHECK (one = 1),
        number INTEGER NOT NULL
    )
"""
"""The SQL of the file's counter of changes: one row."""
SELECT_POSITION: Final = "SELECT number FROM stillfresh_position WHERE one = 1"
UPDATE_POSITION: Final = "UPDATE stillfresh_position SET number = ? WHERE one = 1"
BEGIN_POSITION: Final = "INSERT OR REPLACE INTO stillfresh_position(one, number) VALUES (1, ?)"
MOST_POSITIONS: Final = 1 << 62
"""Nothing counts that far: such a number was not written by us."""
HAS_TABLE: Final = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?"
KINDS: Final = """
    SELECT substr(name, 1, length(name) - 4) FROM sqlite_schema
    WHERE type = 'table' AND name GLOB '*_ttl' ORDER BY name
"""
HELD: Final = "stillfresh_held"
"""The bytes of the copies of each kind, in a file that was opened with a limit."""
CREATE_HELD: Final = """
    CREATE TABLE IF NOT EXISTS stillfresh_held(
        kind TEXT PRIMARY KEY NOT NULL,
        bytes INTEGER NOT NULL,
        evicted INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID
"""
SELECT_HELD: Final = """
    SELECT coalesce(sum(bytes), 0), coalesce(sum(evicted), 0) FROM stillfresh_held
"""

_KIND: Final = re.compile(r"(?!sqlite_|stillfresh_)[a-z][a-z0-9_]*(?<!_ttl)")
_MARKS: Final = tuple(Mark)
STORED: Final = frozenset({bytes, type(None)})

TIMES: Final = """
    CREATE TABLE IF NOT EXISTS {times}(
        id TEXT PRIMARY KEY NOT NULL,
        last_updated_at INTEGER,
        generation TEXT,
        fresh_for REAL,
        stale_for REAL,
        error_for REAL,
        mark INTEGER NOT NULL DEFAULT 0,
        absent INTEGER NOT NULL DEFAULT 0,
        lease_token TEXT,
        lease_expires_at INTEGER,
        failures INTEGER,
        retry_at INTEGER,
        error TEXT,
        version BLOB,
        changed INTEGER
    ) WITHOUT ROWID
"""
"""The SQL of a kind's table of times and leases."""
LAYOUT_2: Final = {"version": "BLOB", "changed": "INTEGER"}
"""The columns that times of layout 1 lack."""
VERSION_READ: Final = "t.version"
"""The only column of layout 2 that a read names."""
GRANT: Final = """
    INSERT INTO {times}(id, lease_token, lease_expires_at) VALUES (?, ?, ?)
    ON CONFLICT(id) DO UPDATE
    SET lease_token = excluded.lease_token, lease_expires_at = excluded.lease_expires_at
"""
"""The SQL that grants a lease, whatever there was before."""
# One statement for times and value, so that they cannot disagree.
_RECORD: Final = """
    SELECT t.generation, t.last_updated_at, t.fresh_for, t.stale_for, t.error_for, t.mark,
        t.lease_expires_at, t.failures, t.retry_at, t.error, t.absent,
        CASE WHEN t.generation IS %s THEN NULL
             ELSE (SELECT value FROM {copies} WHERE id = t.id) END, t.version
"""
GENERATION_AT: Final = 0
ABSENT_AT: Final = 10
VALUE_AT: Final = 11
ID_AT: Final = 13
"""Where columns stand in a row. `record_of` takes those before the id, as `_RECORD` names them.
A read of several ids has the id behind them."""
BEHIND_ID_AT: Final = 14
"""In a read of many ids, the generation that the caller knows; in a listing, the value's length."""
_LENGTH: Final = ", t.id, (SELECT octet_length(value) FROM {copies} WHERE id = t.id)"


class Statements:
    """The SQL of one kind: one text for each step, so that each is prepared once.

    The texts of an instance name its tables. Statements about leases alone are in `leases.py`.
    """

    create = (
        "CREATE TABLE IF NOT EXISTS {copies}(id TEXT PRIMARY KEY NOT NULL, value BLOB);" + TIMES
    )
    point = _RECORD % "?1" + "FROM {times} t WHERE t.id = ?2"
    many_of = (
        "WITH asked(id, known) AS (VALUES {asked})"
        + _RECORD % "asked.known"
        + ", t.id, asked.known FROM asked CROSS JOIN {times} t ON t.id = asked.id"
    )
    stored = """
        SELECT t.generation, t.last_updated_at, t.fresh_for, t.stale_for, t.error_for, t.mark,
            NULL, NULL, NULL, NULL, t.absent,
            CASE (SELECT typeof(value) FROM {copies} WHERE id = t.id)
                WHEN 'blob' THEN x'' WHEN 'null' THEN NULL ELSE 0 END,
            t.version
        FROM {times} t WHERE t.id = ?
    """
    """The row for a put: of the value only whether it is one, an absence, or damaged."""
    stored_version = """
        SELECT t.version FROM {times} t
        WHERE t.id = ? AND t.version IS NOT NULL AND t.generation IS NOT NULL
    """
    """For a put that cannot be refused: it takes a fifth of the time of `stored`."""
    lease_free = GRANT + "WHERE lease_expires_at IS NULL AND failures IS NULL AND generation IS ?"
    """Changes a row only if the lease can be granted without another look at it."""
    publish = """
        UPDATE {times} SET generation = ?, last_updated_at = ?, fresh_for = ?, stale_for = ?,
            error_for = ?, mark = ?, absent = coalesce(?, absent),
            version = coalesce(?, version), changed = ?,
            lease_token = NULL, lease_expires_at = NULL,
            failures = NULL, retry_at = NULL, error = NULL
        WHERE id = ? AND lease_token = ? AND lease_expires_at > ?
    """
    put = """
        INSERT INTO {times}(generation, last_updated_at, fresh_for, stale_for, error_for, mark,
            absent, version, changed, id)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT(id) DO UPDATE SET generation = excluded.generation,
            last_updated_at = excluded.last_updated_at, fresh_for = excluded.fresh_for,
            stale_for = excluded.stale_for, error_for = excluded.error_for, mark = excluded.mark,
            absent = excluded.absent, version = excluded.version, changed = excluded.changed,
            lease_token = NULL, lease_expires_at = NULL,
            failures = NULL, retry_at = NULL, error = NULL
    """
    write_value = """
        INSERT INTO {copies}(id, value) VALUES (?, ?)
        ON CONFLICT(id) DO UPDATE SET value = excluded.value
    """
    invalidate = """
        UPDATE {times} SET lease_token = NULL, lease_expires_at = NULL, changed = ?,
            mark = CASE WHEN generation IS NULL THEN mark ELSE max(mark, ?) END
        WHERE id = ?
    """
    delete_times = "DELETE FROM {times} WHERE id = ?"
    delete_copy = "DELETE FROM {copies} WHERE id = ?"
    slice = """
        SELECT id, max(coalesce(lease_expires_at, 0),
            CASE WHEN generation IS NULL THEN coalesce(retry_at, 0)
                 ELSE last_updated_at + 1000.0 * (fresh_for + max(stale_for, error_for)) END) < ?
        FROM {times} WHERE id >= ? ORDER BY id LIMIT ?
    """
    count = """
        SELECT count(generation), count(*) FILTER (WHERE lease_expires_at > ?), count(*), max(id)
        FROM (SELECT id, generation, lease_expires_at FROM {times}
              WHERE id >= ? ORDER BY id LIMIT ?)
    """
    # Where the next ids end, and the listed ones; the length without the value.
    stretch = "SELECT max(id) FROM (SELECT id FROM {times} WHERE id >= ? ORDER BY id LIMIT ?)"
    listed = (
        _RECORD % "t.generation"
        + _LENGTH
        + "FROM {times} t WHERE t.id >= ? AND t.id <= ? AND instr(t.id, ?) ORDER BY t.id LIMIT ?"
    )

    def __init__(self, copies: str, times: str) -> None:
        self.times_name = times
        self.times_table = times.strip('"')
        for name in dir(type(self)):
            text = getattr(type(self), name)
            if isinstance(text, str) and not name.startswith("_"):
                statement = text.format(copies=copies, times=times, asked="{asked}")
                setattr(self, name, statement)

    @cached_property
    def layout_1(self) -> "Statements":
        """The same, with reads that work on a table that has no versions yet."""
        older = copy.copy(self)
        for name in ("point", "many_of", "listed"):
            setattr(older, name, getattr(self, name).replace(VERSION_READ, "NULL"))
        return older

    def many(self, count: int) -> str:
        """For pairs of (id, known generation); both come back as the last columns."""
        return _many(self.many_of, count)


@cache
def statements(kind: str) -> Statements:
    """The SQL of a kind. Refuses a kind whose tables would be those of others."""
    if not _KIND.fullmatch(kind):
        raise ConfigError(
            f"kind: must be [a-z][a-z0-9_]*, not end in _ttl, and not begin with sqlite_ or "
            f"stillfresh_, since it names tables: not {kind!r}"
        )
    return Statements(f'"{kind}"', f'"{kind}_ttl"')


@lru_cache(maxsize=256)
def _many(text: str, count: int) -> str:
    return text.format(asked=", ".join(["(?, ?)"] * count))


def lacks_versions(exc: Exception) -> bool:
    """True if a read failed because its table is of layout 1."""
    return str(exc).endswith(f"no such column: {VERSION_READ}")


def record_of(row: Row, known: str | None) -> Record:
    """Return the record of a row, without its value if its generation is known.

    A row that another program wrote, and that cannot be read, counts as none.
    """
    try:
        generation = row[GENERATION_AT]
        if generation is not None and generation == known:
            return _known_record(row)
        return _record(row, row[VALUE_AT])
    except (IndexError, OverflowError, TypeError, ValueError):
        return Record()


@lru_cache(maxsize=8192)
def _known_record(row: Row) -> Record:
    """Cached: a hot row is the same again and again, and its Record costs half a read."""
    return _record(row, None if row[ABSENT_AT] else UNREAD)


def _record(row: Row, value: bytes | Unread | None) -> Record:
    (
        generation,
        at,
        fresh_for,
        stale_for,
        error_for,
        mark,
        lease_expires_at,
        failures,
        retry_at,
        error,
        absent,
        stored,
        version,
    ) = row
    stored_copy = failure = None
    if generation is not None:
        is_whole = type(generation) is str and type(stored) in STORED
        if not is_whole or (value is None) != bool(absent):
            raise TypeError
        if version is None:
            version = NO_VERSION
        elif not is_version(version):
            raise TypeError
        policy = policy_of(fresh_for, stale_for, error_for)
        stored_copy = Copy(generation, at / 1000, policy, value, _MARKS[mark], version)
    if failures is not None:
        failure = Failure(int(failures), retry_at / 1000, str(error))
    held_until = None if lease_expires_at is None else lease_expires_at / 1000
    return Record(stored_copy, held_until, failure)


def at_least(seconds: float) -> int:
    """Return an end in milliseconds, rounded up, so that it is never too early.

    Rounded first: 0.1 + 0.2 is slightly more than 0.3, and must not add a millisecond.
    """
    return ceil(round(seconds * 1000, 3))


def at_most(seconds: float) -> int:
    """Return seconds as whole milliseconds, rounded down."""
    return floor(round(seconds * 1000, 3))


def is_version(form: object) -> bool:
    """False for what another program wrote in its place."""
    return isinstance(form, bytes) and unpacked_version(form) is not None
