"""The tables of a feed's file: the seed's own, literally, ours beside them, and whose file it is.

Times are seconds, whole ones in the seed's tables.
"""

import re
from pathlib import Path
from typing import Final

import apsw

from stillfresh.errors import ConfigError
from stillfresh.stores.sqlite import TAGS, TIMES, Format, LeaseTable, not_ours


def _name(text: str) -> str:
    return text.split()[5].partition("(")[0]


def _put(table: str, columns: str) -> str:
    """Insert or overwrite; columns that others have added stay. JSON comes as bytes."""
    names = columns.split()
    values = ", ".join("CAST(? AS TEXT)" if name in BYTES else "?" for name in names)
    changes = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
    return (
        f"INSERT INTO {table}({', '.join(names)}) VALUES ({values}) "  # noqa: S608 (own names)
        f"ON CONFLICT({names[0]}) DO UPDATE SET {changes}"
    )


BYTES: Final = {"topic_json", "comments_json", "category_id"}
SEED: Final = (
    """CREATE TABLE IF NOT EXISTS feed_topics (
    topic_uuid   TEXT PRIMARY KEY,
    topic_json   TEXT NOT NULL,
    category_id  TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    deleted      INTEGER DEFAULT 0,
    cached_at    INTEGER NOT NULL
)""",
    """CREATE INDEX IF NOT EXISTS idx_feed_topics_category
    ON feed_topics(category_id, created_at DESC)""",
    "CREATE INDEX IF NOT EXISTS idx_feed_topics_created  ON feed_topics(created_at DESC)",
    "CREATE INDEX IF NOT EXISTS idx_feed_topics_cached   ON feed_topics(cached_at)",
    """CREATE TABLE IF NOT EXISTS feed_comments (
    topic_uuid    TEXT PRIMARY KEY,
    comments_json TEXT NOT NULL,
    comment_count INTEGER DEFAULT 0,
    cached_at     INTEGER NOT NULL
)""",
    "CREATE INDEX IF NOT EXISTS idx_feed_comments_cached ON feed_comments(cached_at)",
    """CREATE TABLE IF NOT EXISTS feed_cache_meta (
    cache_key    TEXT PRIMARY KEY,
    last_fetched INTEGER NOT NULL
)""",
)
TIMES_TABLE: Final = "stillfresh_feed_times"
LEASES: Final = LeaseTable(TIMES_TABLE, keeps_ends=True)
"""The end of a lease stays: it shows when a failure was noted, if the clock is set back later."""
OWN: Final = (
    # The SQLite store's own: who refreshes a key, and how the last attempt ended.
    *TAGS,
    TIMES.format(times=TIMES_TABLE),
    # What was written or deleted here, and which upstream may not show yet.
    """CREATE TABLE IF NOT EXISTS stillfresh_writes(
    topic_uuid TEXT NOT NULL,
    comment_uuid TEXT NOT NULL,
    written_at REAL NOT NULL,
    deleted INTEGER NOT NULL,
    token TEXT NOT NULL,
    PRIMARY KEY (topic_uuid, comment_uuid)
) WITHOUT ROWID""",
)
TABLES: Final = {
    _name(text): set(re.findall(r"^ +(\w+)", text, re.MULTILINE))
    for text in SEED
    if "TABLE" in text
}
"""The seed's, and their columns."""

# In and out as bytes: text that is no UTF-8 would raise before it can be replaced.
SELECT_TOPIC: Final = """
    SELECT topic_uuid, CAST(topic_json AS BLOB), CAST(category_id AS BLOB), created_at, deleted,
        cached_at
    FROM feed_topics WHERE topic_uuid = ?
"""
SELECT_COMMENTS: Final = """
    SELECT topic_uuid, CAST(comments_json AS BLOB), comment_count, cached_at
    FROM feed_comments WHERE topic_uuid = ?
"""
PUT_TOPIC: Final = _put(
    "feed_topics", "topic_uuid topic_json category_id created_at deleted cached_at"
)
PUT_COMMENTS: Final = _put("feed_comments", "topic_uuid comments_json comment_count cached_at")
PUT_META: Final = _put("feed_cache_meta", "cache_key last_fetched")
DROP_TOPIC: Final = "DELETE FROM feed_topics WHERE topic_uuid = ?"
DROP_COMMENTS: Final = "DELETE FROM feed_comments WHERE topic_uuid = ?"
DROP_META: Final = "DELETE FROM feed_cache_meta WHERE cache_key = ?"
DROP_TIMES: Final = "DELETE FROM stillfresh_feed_times WHERE id = ?"
# Other implementations know no leases. A lease remembers the meta row's time, and is void if that
# has changed, or is gone. Here `last_updated_at` is that time, in seconds, as the meta row has it;
# the other times of this table are in milliseconds, as in a store's file.
REMEMBER_META: Final = """
    UPDATE stillfresh_feed_times
    SET last_updated_at = (SELECT last_fetched FROM feed_cache_meta WHERE cache_key = id)
    WHERE id = ?
"""
HAS_REMEMBERED_META: Final = """
    SELECT t.last_updated_at IS m.last_fetched
    FROM stillfresh_feed_times t LEFT JOIN feed_cache_meta m ON m.cache_key = t.id WHERE t.id = ?
"""
SET_GENERATION: Final = "UPDATE stillfresh_feed_times SET generation = ? WHERE id = ?"
SELECT_LISTS: Final = """
    SELECT CAST(cache_key AS BLOB) FROM feed_cache_meta
    WHERE cache_key >= 'index:' AND cache_key < 'index;'
    UNION SELECT CAST(id AS BLOB) FROM stillfresh_feed_times WHERE id >= 'index:' AND id < 'index;'
"""
LEAVE_NOTE: Final = """
    INSERT OR REPLACE INTO stillfresh_writes(topic_uuid, comment_uuid, written_at, deleted, token)
    VALUES (?, ?, ?, ?, ?)
"""
SELECT_NOTES: Final = """
    SELECT topic_uuid, comment_uuid, written_at, deleted, token FROM stillfresh_writes
    WHERE topic_uuid = ?1 AND (?2 IS NULL OR comment_uuid = ?2)
"""
TAKE_NOTE_OFF: Final = """
    DELETE FROM stillfresh_writes WHERE topic_uuid = ?1 AND (?2 IS NULL OR comment_uuid = ?2)
"""
SELECT_NOTED: Final = """
    SELECT topic_uuid, comment_uuid, deleted FROM stillfresh_writes
    WHERE written_at > ? AND written_at <= ?
"""
SELECT_META: Final = "SELECT CAST(last_fetched AS INTEGER) FROM feed_cache_meta WHERE cache_key = ?"
SELECT_COVERED: Final = """
    SELECT rowid, coalesce(CAST(topic_uuid AS BLOB), x''), coalesce(CAST(category_id AS BLOB), x'')
    FROM feed_topics WHERE created_at >= ? AND created_at < ?
"""
SELECT_KEYS: Final = """
    SELECT cache_key AS id FROM feed_cache_meta WHERE cache_key >= ?1 AND typeof(cache_key) = 'text'
    UNION SELECT id FROM stillfresh_feed_times WHERE id >= ?1 AND typeof(id) = 'text'
    ORDER BY id LIMIT ?2
"""
COUNT_KEYS: Final = """
    SELECT (SELECT count(*) FROM feed_cache_meta), (SELECT count(*) FROM stillfresh_feed_times
        WHERE lease_token IS NOT NULL AND lease_expires_at > ?)
"""
EVICT_ROWS: Final = (
    """DELETE FROM feed_topics WHERE topic_uuid IN
        (SELECT topic_uuid FROM feed_topics WHERE cached_at < ? LIMIT ?)""",
    """DELETE FROM feed_comments WHERE topic_uuid IN
        (SELECT topic_uuid FROM feed_comments WHERE cached_at < ? LIMIT ?)""",
    """DELETE FROM feed_cache_meta WHERE cache_key IN
        (SELECT cache_key FROM feed_cache_meta WHERE last_fetched < ? LIMIT ?)""",
)
EVICT_NOTES: Final = "DELETE FROM stillfresh_writes WHERE written_at < ?"
EVICT_TIMES: Final = """
    DELETE FROM stillfresh_feed_times
    WHERE max(coalesce(lease_expires_at, 0), coalesce(retry_at, 0)) < ?
        AND id NOT IN (SELECT cache_key FROM feed_cache_meta)
"""


def _is_feed(connection: apsw.Connection, path: Path) -> bool:
    """By its tables: files of other implementations of the same design carry no mark."""
    if application := connection.pragma("application_id"):
        raise not_ours(path, application)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    if names and not names & TABLES.keys():
        raise ConfigError(
            f"{path}: is a SQLite file without the tables of a feed cache; name another file"
        )
    for table in names & TABLES.keys():
        columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if missing := TABLES[table] - columns:
            raise ConfigError(
                f"{path}: its table {table} lacks {', '.join(sorted(missing))}; "
                "it is not a file of a feed cache; name another file"
            )
    return names >= {_name(text) for text in (*SEED, *OWN)}


FEED: Final = Format((0,), ";\n".join((*SEED, *OWN)), _is_feed)


def add_missing_tables(connection: apsw.Connection) -> None:
    """A file that cannot be written may lack tables of ours: empty temporary ones stand in."""
    tables = [text for text in OWN if "TABLE" in text]
    missing = [text for text in tables if not connection.table_exists("main", _name(text))]
    if not missing:
        return
    connection.execute("PRAGMA query_only = 0")
    for text in missing:
        connection.execute(text.replace("CREATE TABLE", "CREATE TEMP TABLE"))
    connection.execute("PRAGMA query_only = 1")
