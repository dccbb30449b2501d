"""A stored response at the moment of a request: its age, its freshness, and whether they will do.

Pages and clients decide by it. Everything here is pure. RFC 9111 §4.2.3 (age), §5.2.1 (what a
request accepts); RFC 9211 §2.2 (why the site is asked).
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from stillfresh.engine import Answer
from stillfresh.freshness import Verdict
from stillfresh.http.fields import Raw, directives, members, number, values
from stillfresh.http.freshness import FOR_EVER


class HeadTimes(Protocol):
    """The times in the head of a stored response, counted from when it was requested."""

    @property
    def initial_age(self) -> float: ...
    @property
    def fresh_for(self) -> float: ...
    @property
    def stale_by(self) -> float: ...


class HasHead(Protocol):
    """A stored page, or a stored response of a client's cache."""

    @property
    def head(self) -> HeadTimes: ...


R = TypeVar("R", bound=HasHead)


def age_at(answer: Answer[R], now: float) -> float:
    """RFC 9111 §4.2.3: the time since it was requested, and its age then."""
    return max(0.0, now - answer.fetched_at) + answer.value.head.initial_age


def ttl_at(answer: Answer[R], now: float) -> float:
    """Its lifetime, less its age by now; an invalidated response has nothing left.

    `fresh_for` alone is not enough: it is 0 for any response that came stale, however old it was.
    """
    head = answer.value.head
    left = head.fresh_for - head.stale_by - (now - answer.fetched_at)
    return left if answer.verdict is Verdict.FRESH else min(left, 0.0)


def why_asked(stored: Answer[R] | None, now: float, *, absent: str) -> str:
    """RFC 9211 §2.2: why the stored response did not do; `absent`: the word if there is none."""
    if stored is None:
        return absent
    return "request" if ttl_at(stored, now) > 0 else "stale"


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
