"""Why a request passed uncached (I28): the words in `Cache-Status: …; detail=` and in the counters.

Pure data. The list is closed, so that counters by reason stay few.
"""

from enum import StrEnum

__all__ = ["Reason"]


class Reason(StrEnum):
    """One word for each cause; docs/isr.md has the same list."""

    AUTHORIZATION = "authorization"
    """The request carries credentials, and the response does not allow sharing."""
    BODY = "body"
    """The GET request has a body."""
    BUSY = "busy"
    """Another request loads the page, and took longer than `wait`."""
    CHANGED = "changed"
    """The page was changed through its own URL, and the store does not know it yet."""
    CONDITION = "condition"
    """`If-Match` or `If-Unmodified-Since`: only the site can judge these."""
    COOKIE = "cookie"
    """The request carries a cookie, and the response does not say `public` or `s-maxage`."""
    FAILED = "failed"
    """The last load failed; each visitor asks for itself until the page is loaded again."""
    FULL = "full"
    """All places are taken: hosts, queries, variants, error pages, or loads at a time."""
    HEADERS = "headers"
    """Header fields that are too long, too many or malformed, in the request or the response."""
    HOST = "host"
    """The host is not allowed, or not well-formed."""
    METHOD = "method"
    NO_FRESHNESS = "no-freshness"
    """Neither the response nor a route says how long the page is fresh."""
    NO_STORE = "no-store"
    """The request says `no-store`."""
    PATH = "path"
    """A path or query that servers may read in different ways."""
    PRIVATE = "private"
    """`Cache-Control: private` or `no-store` in the response."""
    RANGE = "range"
    """A part of a page that is not stored."""
    ROUTE = "route"
    """No route names this path."""
    SET_COOKIE = "set-cookie"
    SIZE = "size"
    """The body is longer than `max_body`."""
    STATUS = "status"
    """The response's status is never stored."""
    STORE = "store"
    """The store is away."""
    STREAM = "stream"
    """An event stream."""
    VARY = "vary"
    """`Vary: *`, or by a field whose value cannot be part of a key."""
