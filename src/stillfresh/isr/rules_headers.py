"""Which header fields go where (I12, I14): hop by hop, end to end, and those that a cache adds.

Pure. RFC 9110 §7.6.1 (Connection), RFC 9111 §5.1 (Age), RFC 9211 (Cache-Status).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from stillfresh.isr.rules_fields import Raw, members, values
from stillfresh.isr.rules_freshness import Terms

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
IN_304: Final = frozenset(
    {
        b"age",
        b"cache-control",
        b"cache-status",
        b"cdn-cache-control",
        b"content-location",
        b"date",
        b"etag",
        b"expires",
        b"last-modified",
        b"vary",
        b"via",
    }
)
"""RFC 9110 §15.4.5: about the page, not about its body."""
NOT_LISTED: Final = frozenset(
    {
        b"age",
        b"cache-control",
        b"cdn-cache-control",
        b"content-encoding",
        b"content-length",
        b"date",
        b"expires",
        b"host",
        b"set-cookie",
        b"vary",
    }
)
"""A Connection header that names these would change what others keep; it is not obeyed in that."""


def end_to_end(headers: Raw) -> Raw:
    """Without what concerns one connection only, by name or by the Connection header's list."""
    listed = {it.lower() for it in members(values(headers, b"connection"))} - NOT_LISTED
    dropped = HOP_BY_HOP | listed
    return tuple(it for it in headers if it[0] not in dropped)


@lru_cache(maxsize=256)  # one text for all pages of a route
def cache_control(terms: Terms) -> bytes:
    """I14: browsers ask each time, and are told 304; caches between keep it as we do."""
    parts = f"public, max-age=0, s-maxage={int(terms.fresh_for)}"
    if terms.stale_for:
        parts += f", stale-while-revalidate={int(terms.stale_for)}"
    return parts.encode()


def policy_headers(headers: Raw, terms: Terms) -> Raw:
    """A route's own duration, in the place of what the app said of freshness."""
    said = {b"cache-control", b"expires", b"pragma", b"cdn-cache-control"}
    kept = tuple(it for it in headers if it[0] not in said)
    return (*kept, (b"cache-control", cache_control(terms)))


def cache_status(before: Sequence[bytes], what: str) -> bytes:
    """RFC 9211 §2: the cache nearest to the client comes last."""
    return b", ".join([*before, b"stillfresh; " + what.encode()])


def not_modified_headers(headers: Raw) -> Raw:
    return tuple(it for it in headers if it[0] in IN_304)
