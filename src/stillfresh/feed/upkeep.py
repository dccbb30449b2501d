"""Forgetting what is too old, and counting what is there (F11, F14). Steps on the connection."""

from typing import Final

import apsw

from stillfresh.feed.model import FeedStats

SLICE: Final = 500
"""Rows that one step of an eviction drops, so that others' writes pass between them."""

_EVICT: Final = (
    """DELETE FROM feed_topics WHERE topic_uuid IN
        (SELECT topic_uuid FROM feed_topics WHERE cached_at < ? LIMIT ?)""",
    """DELETE FROM feed_comments WHERE topic_uuid IN
        (SELECT topic_uuid FROM feed_comments WHERE cached_at < ? LIMIT ?)""",
    """DELETE FROM feed_cache_meta WHERE cache_key IN
        (SELECT cache_key FROM feed_cache_meta WHERE last_fetched < ? LIMIT ?)""",
)
_EVICT_OWN: Final = (
    "DELETE FROM stillfresh_writes WHERE written_at < ?",
    """DELETE FROM stillfresh_refreshes
        WHERE max(coalesce(lease_expires_at, 0), coalesce(retry_at, 0)) < ?
            AND cache_key NOT IN (SELECT cache_key FROM feed_cache_meta)""",
)
_COUNT: Final = """
    SELECT (SELECT count(*) FROM feed_topics), (SELECT sum(comment_count) FROM feed_comments),
        (SELECT count(*) FROM feed_topics WHERE cached_at < ?1)
        + (SELECT count(*) FROM feed_comments WHERE cached_at < ?1)
        + (SELECT count(*) FROM feed_cache_meta WHERE last_fetched < ?1),
        (SELECT page_count FROM pragma_page_count()) * (SELECT page_size FROM pragma_page_size())
"""


def evict_slice(connection: apsw.Connection, *, before: float, written_before: float) -> int:
    """How many rows were dropped; when fewer than SLICE, nothing is left to drop."""
    dropped = 0
    for sql in _EVICT:
        connection.execute(sql, (before, SLICE - dropped))
        dropped += connection.changes()
    if dropped < SLICE:
        for sql in _EVICT_OWN:
            connection.execute(sql, (written_before,))
    return dropped


def count(connection: apsw.Connection, *, before: float, skipped: int) -> FeedStats:
    topics, comments, expired, size = connection.execute(_COUNT, (before,)).get
    return FeedStats(topics, comments or 0, expired, size, skipped)
