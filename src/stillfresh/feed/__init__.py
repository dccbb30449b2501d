"""Feed Cache (seed 001): serve stale from SQLite now, revalidate in the background.

`FeedCache` is the file, `FeedEngine` what a screen asks; the source over HTTP is in
`stillfresh.feed.http`, which needs `stillfresh[web]`.
"""

from stillfresh.feed.cache import FeedCache
from stillfresh.feed.engine import FeedEngine
from stillfresh.feed.model import (
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
from stillfresh.feed.source import FeedSource

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
