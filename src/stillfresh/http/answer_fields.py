"""The fields that tell clients, and other caches, how fresh an answer is.

`Cache-Control` by a route's times, or without a lifetime; `Age` and `Cache-Status`; `Retry-After`
after a failure. Everything here is pure. RFC 9111 §5.1 (Age), §5.2.2 (Cache-Control); RFC 9211
(Cache-Status); RFC 9110 §10.2.3 (Retry-After).
"""

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from stillfresh.engine import HITS, Answer, Origin, RetryAfter
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.http.fields import Raw

TERMS: Final = frozenset({b"cache-control", b"expires", b"pragma", b"cdn-cache-control"})
"""Fields about freshness."""
LIFETIME: Final = re.compile(rb"(?<![\w-])(s-maxage|max-age)(\s*=\s*)\"?\d+\"?", re.IGNORECASE)
RETRY_AFTER: Final = 5.0
"""Seconds for `Retry-After`, if neither a cooldown nor the upstream sets it."""


@lru_cache(maxsize=256)  # one for all pages of a route
def cache_control(fresh_for: float, stale_for: float) -> tuple[bytes, bytes]:
    """Browsers revalidate each time and get 304; caches in between store it as we do."""
    parts = f"public, max-age=0, s-maxage={int(fresh_for)}"
    if stale_for:
        parts += f", stale-while-revalidate={int(stale_for)}"
    return b"cache-control", parts.encode()


def policy_headers(headers: Raw, fresh_for: float, stale_for: float) -> Raw:
    """The fields, with a route's times in place of the app's fields about freshness."""
    others = tuple(field for field in headers if field[0] not in TERMS)
    return (*others, cache_control(fresh_for, stale_for))


def private_headers(headers: Raw) -> Raw:
    """The same for a page of one client: the client may validate it, other caches not keep it."""
    others = tuple(field for field in headers if field[0] not in TERMS)
    return (*others, (b"cache-control", b"private, max-age=0"))


def without_lifetime(headers: Iterable[tuple[bytes, bytes]]) -> Raw:
    """The fields of an unverified response: no cache may treat it as fresh."""
    changed: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        match name.lower():
            case b"cache-control" | b"cdn-cache-control":
                changed.append((name, LIFETIME.sub(rb"\g<1>\g<2>0", value)))
            case b"expires":
                pass
            case _:
                changed.append((name, value))
    return tuple(changed)


def cache_status(before: Sequence[bytes], outcome: str) -> bytes:
    """RFC 9211 §2: the cache nearest to the client comes last."""
    return b", ".join([*before, b"stillfresh; " + outcome.encode()])


def freshness_fields(
    answer: Answer[Any], fresh_for: float, initial_age: float = 0.0
) -> dict[str, str]:
    """`Age` and `Cache-Status` of an answer; `initial_age`: its age when it was requested."""
    status = cache_status([], outcome_of(answer, fresh_for))
    return {"age": f"{int(answer.age + initial_age)}", "cache-status": status.decode()}


def outcome_of(answer: Answer[Any], fresh_for: float) -> str:
    """For `Cache-Status`: a hit or a miss; `collapsed` if another had started the load."""
    outcome = "hit" if answer.origin in HITS else "fwd=miss; stored"
    if answer.origin is Origin.ANOTHER:
        outcome += "; collapsed"
    detail = answer.verdict.value if answer.error is None else "refresh-failed"
    left = fresh_for - answer.age
    ttl = left if answer.verdict is Verdict.FRESH else min(left, 0.0)
    return f"{outcome}; ttl={int(ttl)}; detail={detail}"


def pause_after(error: LoadFailed, now: float) -> int:
    """Whole seconds, at least 1: until the cooldown ends, or as the upstream asked."""
    if error.retry_at is not None:
        return max(1, math.ceil(error.retry_at - now))
    cause = error.__cause__
    pause = cause.seconds if isinstance(cause, RetryAfter) else RETRY_AFTER
    return max(1, math.ceil(pause))
