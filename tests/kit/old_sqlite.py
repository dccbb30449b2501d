"""Files of layout 1 as the last release with it wrote them, and the statements that it runs."""

from typing import Final

OLD_TAGS: Final = """
    CREATE TABLE stillfresh_tags(
        tag TEXT NOT NULL,
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        PRIMARY KEY (tag, kind, id)
    ) WITHOUT ROWID;
    CREATE INDEX stillfresh_tags_of ON stillfresh_tags(kind, id);
"""
OLD_FILE: Final = (
    OLD_TAGS
    + """
    PRAGMA application_id = 0x5F4E3001;
    PRAGMA user_version = 1;
"""
)
OLD_TIMES: Final = """
    CREATE TABLE IF NOT EXISTS "{times}"(
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
        error TEXT
    ) WITHOUT ROWID;
"""
"""Of a kind, and of a feed."""
OLD_KIND: Final = """
    CREATE TABLE IF NOT EXISTS "{kind}"(id TEXT PRIMARY KEY NOT NULL, value BLOB);
""" + OLD_TIMES.replace("{times}", "{kind}_ttl")
OLD_ROWS: Final = """
    INSERT INTO "{kind}_ttl"(id, last_updated_at, generation, fresh_for, stale_for, error_for, mark,
            absent, lease_token, lease_expires_at, failures, retry_at, error) VALUES
        ('a', 1700000000000, 'generation-a', 30, 60, 90, 0, 0, NULL, NULL, NULL, NULL, NULL),
        ('absent', 1700000000000, 'generation-b', 30, 60, 90, 2, 1, NULL, NULL, NULL, NULL, NULL),
        ('failed', NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, 2, 1700000005000, 'no'),
        ('leased', NULL, NULL, NULL, NULL, NULL, 0, 0, 'token', 1700000010000, NULL, NULL, NULL);
    INSERT INTO "{kind}"(id, value) VALUES ('a', x'76616c7565'), ('absent', NULL);
    INSERT INTO stillfresh_tags(tag, kind, id) VALUES ('eu', '{kind}', 'a');
"""
OLD_LEASE: Final = """
    INSERT INTO post_ttl(id, lease_token, lease_expires_at) VALUES (?, ?, ?)
    ON CONFLICT(id) DO UPDATE
    SET lease_token = excluded.lease_token, lease_expires_at = excluded.lease_expires_at
"""
OLD_PUBLISH: Final = """
    UPDATE post_ttl SET generation = ?, last_updated_at = ?, fresh_for = ?, stale_for = ?,
        error_for = ?, mark = ?, absent = ?, lease_token = NULL, lease_expires_at = NULL,
        failures = NULL, retry_at = NULL, error = NULL
    WHERE id = ? AND lease_token = ? AND lease_expires_at > ?
"""
OLD_WRITE: Final = """
    INSERT INTO post(id, value) VALUES (?, ?) ON CONFLICT(id) DO UPDATE SET value = excluded.value
"""
OLD_INVALIDATE: Final = """
    UPDATE post_ttl SET lease_token = NULL, lease_expires_at = NULL,
        mark = CASE WHEN generation IS NULL THEN mark ELSE max(mark, ?) END
    WHERE id = ?
"""
OLD_READ: Final = (
    "SELECT generation, mark, (SELECT value FROM post p WHERE p.id = t.id) FROM post_ttl t"
)
