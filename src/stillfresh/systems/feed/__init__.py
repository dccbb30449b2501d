"""Feed Cache: serve stale from SQLite now, revalidate in the background.

`FeedCache` is the file, `FeedEngine` what a screen asks; the source over HTTP is in
`stillfresh.systems.feed.http`, which needs `stillfresh[web]`.

The way of a read: `engine` looks for stored rows (`loop_reads`, `reading`), and answers with them.
If they are stale, it has the key fetched (`source`) by a cache whose store is the same file
(`store`). That store publishes what was fetched as rows (`rows`), and the listeners are called.
"""

from stillfresh.systems.feed.cache import FeedCache
from stillfresh.systems.feed.engine import FeedEngine
from stillfresh.systems.feed.model import (
    FEED_CACHE_EVICT_SECONDS,
    FEED_CACHE_TTL_SECONDS,
    Comment,
    CommentsAnswer,
    Feed,
    FeedCacheUpdated,
    FeedJson,
    FeedStats,
    Topic,
    TopicAnswer,
)
from stillfresh.systems.feed.source import FeedSource

__all__ = [
    "FEED_CACHE_EVICT_SECONDS",
    "FEED_CACHE_TTL_SECONDS",
    "Comment",
    "CommentsAnswer",
    "Feed",
    "FeedCache",
    "FeedCacheUpdated",
    "FeedEngine",
    "FeedJson",
    "FeedSource",
    "FeedStats",
    "Topic",
    "TopicAnswer",
]
