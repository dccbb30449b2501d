"""How long a response may be served by its own fields, judged once, when it comes.

Its lifetime, the age that it has already, and the times after its lifetime in which it may be
served stale. Everything here is pure. RFC 9111 §4.2 (lifetime and age), §5.2.2 (directives); RFC
5861 (stale-while-revalidate, stale-if-error); RFC 9213 (CDN-Cache-Control).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stillfresh.freshness import Policy
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
BY_GUESS: Final = frozenset({200, 203, 204, 300, 301, 308, 404, 405, 410, 414, 501})
"""RFC 9110 §15.1: statuses that may be stored without stated freshness."""
LONGEST_GUESS: Final = 86_400.0
FOR_SHARED_CACHES: Final = frozenset({"s-maxage", "proxy-revalidate"})
NEVER_STALE: Final = frozenset({"no-cache", "must-revalidate", "proxy-revalidate"})
"""§5.2.2.2, §5.2.2.4, §5.2.2.8: a response that has one of them is never served stale."""
IN_SECONDS: Final = frozenset({"max-age", "s-maxage", "stale-while-revalidate", "stale-if-error"})


@dataclass(frozen=True, slots=True)
class ResponseTimes:
    """How long a response may be served, counted from when it was requested."""

    terms: Policy
    """All three are 0 or more, also for a response that came stale."""
    stale_by: float = 0.0
    """Seconds past its lifetime when it came; 0 if it came fresh."""


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
    headers: Raw,
    fetched_at: float,
    *,
    is_targeted: bool = False,
    is_shared: bool = True,
    stale_for: float = 0.0,
    error_for: float = 0.0,
) -> ResponseTimes | None:
    """The times of a response that states its freshness; None if it states none.

    `stale_for`, `error_for`: the cache's own, for a response that neither states nor forbids them.
    """
    known = controls(headers, is_targeted=is_targeted, is_shared=is_shared)
    lifetime = _lifetime(headers, known, fetched_at, is_targeted=is_targeted)
    if lifetime is None:
        return None
    left = lifetime - initial_age(headers, fetched_at)
    return _times(left, known, stale_for, error_for)


def guessed(
    status: int,
    headers: Raw,
    fetched_at: float,
    *,
    is_shared: bool = True,
    stale_for: float = 0.0,
    error_for: float = 0.0,
) -> ResponseTimes | None:
    """The same by a guess (§4.2.2); None if that is not allowed.

    The lifetime is a tenth of the time since its last change, and at most a day.
    """
    known = controls(headers, is_shared=is_shared)
    modified = date_of(headers, b"last-modified")
    if modified is None or (status not in BY_GUESS and "public" not in known):
        return None
    date = date_of(headers, b"date")
    lifetime = ((fetched_at if date is None else date) - modified) / 10
    left = min(max(0.0, lifetime), LONGEST_GUESS) - initial_age(headers, fetched_at)
    return _times(left, known, stale_for, error_for)


def _times(
    left: float, known: Mapping[str, str], stale_for: float, error_for: float
) -> ResponseTimes:
    """RFC 5861 §3 and §4: the other times count from the end of its lifetime.

    `left`: how much of its lifetime was left when it came; negative if that was over.
    """
    stale_by = max(0.0, -left)
    if not NEVER_STALE.isdisjoint(known):
        return ResponseTimes(Policy(max(0.0, left)), stale_by)
    stated_stale = number(known, "stale-while-revalidate")
    stated_error = number(known, "stale-if-error")
    stale_for = stale_for if stated_stale is None else stated_stale
    error_for = error_for if stated_error is None else stated_error
    terms = Policy(max(0.0, left), max(0.0, stale_for - stale_by), max(0.0, error_for - stale_by))
    return ResponseTimes(terms, stale_by)


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
