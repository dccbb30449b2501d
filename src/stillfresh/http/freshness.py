"""How long a response is fresh by its own fields, and what a request accepts.

Also the fields for an answer of the engine over HTTP. Everything here is pure. RFC 9111 §4.2
(lifetime and age), §5.2.1 (request directives), §5.2.2 (response directives); RFC 5861
(stale-while-revalidate, stale-if-error); RFC 9211 (Cache-Status); RFC 9213 (CDN-Cache-Control).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from stillfresh.engine import HITS, Answer, Origin, RetryAfter
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Policy, Verdict
from stillfresh.http.fields import (
    Raw,
    date_of,
    dictionary,
    directives,
    http_date,
    members,
    number,
    values,
)

FOR_EVER: Final = float("inf")
RETRY_AFTER: Final = 5.0
"""Seconds for `Retry-After`, if neither a cooldown nor the upstream sets it."""
BY_GUESS: Final = frozenset({200, 203, 204, 300, 301, 308, 404, 405, 410, 414, 501})
"""RFC 9110 §15.1: statuses that may be stored without stated freshness."""
LONGEST_GUESS: Final = 86_400.0
LIFETIME: Final = re.compile(rb"(?<![\w-])(s-maxage|max-age)(\s*=\s*)\"?\d+\"?", re.IGNORECASE)
FOR_SHARED_CACHES: Final = frozenset({"s-maxage", "proxy-revalidate"})
IN_SECONDS: Final = frozenset({"max-age", "s-maxage", "stale-while-revalidate", "stale-if-error"})


def targeted(headers: Raw) -> dict[str, str]:
    """RFC 9213 §2.1: the directives for caches like this one; none if they cannot be read."""
    known = dictionary(values(headers, b"cdn-cache-control"))
    seconds = (known[name].removeprefix("-") for name in IN_SECONDS & known.keys())
    return known if all(text.isdigit() for text in seconds) else {}


def controls(headers: Raw, *, is_targeted: bool = False, is_shared: bool = True) -> dict[str, str]:
    """The directives that apply; `is_targeted`: those of CDN-Cache-Control (RFC 9213 §2.2).

    A private cache ignores those for shared caches (§5.2.2.8, §5.2.2.10).
    """
    known = targeted(headers) if is_targeted else directives(values(headers, b"cache-control"))
    if is_shared:
        return known
    return {name: value for name, value in known.items() if name not in FOR_SHARED_CACHES}


def stated(
    headers: Raw, fetched_at: float, *, is_targeted: bool = False, is_shared: bool = True
) -> Policy | None:
    """The freshness that the response states; None if it states none."""
    known = controls(headers, is_targeted=is_targeted, is_shared=is_shared)
    lifetime = _lifetime(headers, known, fetched_at, is_targeted=is_targeted)
    return None if lifetime is None else _terms(lifetime, headers, known, fetched_at)


def guessed(
    status: int, headers: Raw, fetched_at: float, *, is_shared: bool = True
) -> Policy | None:
    """§4.2.2: a tenth of the time since its last change, at most a day; None if not allowed."""
    known = controls(headers, is_shared=is_shared)
    modified = date_of(headers, b"last-modified")
    if modified is None or (status not in BY_GUESS and "public" not in known):
        return None
    date = date_of(headers, b"date")
    lifetime = ((fetched_at if date is None else date) - modified) / 10
    return _terms(min(max(0.0, lifetime), LONGEST_GUESS), headers, known, fetched_at)


def _terms(lifetime: float, headers: Raw, known: Mapping[str, str], fetched_at: float) -> Policy:
    """Its times; the age that it already has is subtracted."""
    stale_for, error_for = _after(known)
    fresh_for = lifetime - initial_age(headers, fetched_at)
    if fresh_for < 0:  # these count from the end of freshness, which is in the past
        stale_for = max(0.0, stale_for + fresh_for)
        error_for = max(0.0, error_for + fresh_for)
    return Policy(max(0.0, fresh_for), stale_for, error_for)


def _lifetime(
    headers: Raw, known: Mapping[str, str], fetched_at: float, *, is_targeted: bool
) -> float | None:
    """§4.2.1: s-maxage, else max-age, else Expires minus Date; 0 with no-cache (§5.2.2.4)."""
    if "no-cache" in known:
        return 0.0
    for name in ("s-maxage", "max-age"):
        if (lifetime := number(known, name)) is not None:
            return lifetime
    return None if is_targeted else _until_expires(headers, fetched_at)


def longest_lifetime(headers: Raw) -> float:
    """The longest time for which any cache or browser could think it fresh."""
    fields = (
        directives(values(headers, name)) for name in (b"cache-control", b"cdn-cache-control")
    )
    # Others may read a number with a space before it, which we do not.
    texts = [known.get(name, "").strip() for known in fields for name in ("max-age", "s-maxage")]
    ages = [number({"age": text}, "age") or 0.0 for text in texts]
    return max(*ages, _until_expires(headers, FOR_EVER) or 0.0)


def _until_expires(headers: Raw, fetched_at: float) -> float | None:
    """§5.3: an `Expires` that cannot be read, or several that differ, mean: not fresh."""
    if not (expires := values(headers, b"expires")):
        return None
    until = http_date(expires[0])
    if until is None or len(set(expires)) > 1:
        return 0.0
    date = date_of(headers, b"date")
    return max(0.0, until - (fetched_at if date is None else date))


def _after(known: Mapping[str, str]) -> tuple[float, float]:
    """RFC 5861 §3 and §4; RFC 9111 §5.2.2.2: must-revalidate forbids both."""
    if known.keys() & {"no-cache", "must-revalidate", "proxy-revalidate"}:
        return 0.0, 0.0
    stale_for = number(known, "stale-while-revalidate") or 0.0
    return stale_for, number(known, "stale-if-error") or 0.0


def initial_age(headers: Raw, fetched_at: float) -> float:
    """§4.2.3: its age when it was requested, by its Age or its Date.

    A `Date` has whole seconds. The fraction of ours is left out of the difference: otherwise a
    response that says max-age=1 would live for a part of a second.
    """
    ages = members(values(headers, b"age"))
    age = number({"age": ages[0].decode("latin-1")}, "age") if ages else None
    date = date_of(headers, b"date")
    apparent = 0.0 if date is None else math.floor(fetched_at) - date
    return max(0.0, age or 0.0, apparent)


@dataclass(frozen=True, slots=True)
class Wish:
    """§5.2.1: which stored responses a request accepts."""

    max_age: float | None = None
    min_fresh: float = 0.0
    max_stale: float = 0.0
    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False


def wish_of(headers: Raw) -> Wish:
    """Pragma counts if there is no Cache-Control (§5.4)."""
    if not (lines := values(headers, b"cache-control")):
        pragmas = members(values(headers, b"pragma"))
        return Wish(no_cache=b"no-cache" in (pragma.lower() for pragma in pragmas))
    known = directives(lines)
    max_stale = FOR_EVER if known.get("max-stale") == "" else number(known, "max-stale")
    return Wish(
        max_age=number(known, "max-age"),
        min_fresh=number(known, "min-fresh") or 0.0,
        max_stale=max_stale or 0.0,
        no_cache="no-cache" in known,
        no_store="no-store" in known,
        only_if_cached="only-if-cached" in known,
    )


def is_good_enough(wish: Wish, *, age: float, ttl: float, may_be_stale: bool) -> bool:
    """`ttl`: its remaining freshness; `may_be_stale`: it may be served stale to any request."""
    if wish.no_cache or (wish.max_age is not None and age > wish.max_age + wish.max_stale):
        return False
    if wish.min_fresh and ttl < wish.min_fresh:
        return False
    return may_be_stale or -ttl <= wish.max_stale


@lru_cache(maxsize=256)  # one for all pages of a route
def cache_control(fresh_for: float, stale_for: float) -> tuple[bytes, bytes]:
    """Browsers revalidate each time and get 304; caches in between store it as we do."""
    parts = f"public, max-age=0, s-maxage={int(fresh_for)}"
    if stale_for:
        parts += f", stale-while-revalidate={int(stale_for)}"
    return b"cache-control", parts.encode()


TERMS: Final = frozenset({b"cache-control", b"expires", b"pragma", b"cdn-cache-control"})
"""Fields about freshness."""


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


def freshness_fields(answer: Answer[Any], fresh_for: float) -> dict[str, str]:
    """`Age` and `Cache-Status` of an answer."""
    status = cache_status([], outcome_of(answer, fresh_for))
    return {"age": f"{int(answer.age)}", "cache-status": status.decode()}


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
