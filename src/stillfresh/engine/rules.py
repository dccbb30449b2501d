"""The engine's decisions: what a read does, what a load stores, and when.

Pure: records and times in, decisions out. `now` and every random number are arguments. Nothing else
may live here: no clock, no store, no asyncio.
"""

from bisect import bisect_right
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from math import floor
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import Struct

from stillfresh.backoff import pause_after
from stillfresh.durations import seconds
from stillfresh.engine.model import Answer, Codec, Loaded, RetryAfter
from stillfresh.errors import LoadFailed, shown
from stillfresh.freshness import Policy, Verdict, is_lease_over, is_over
from stillfresh.stores.contract import Copy, Failure, Mark, Record, policy_of
from stillfresh.stores.versions import NO_VERSION

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NOTHING: Final = Record()
FOR_EVER: Final = float("inf")
"""For callers that do not know `lease_for`: every lease counts until its end."""
AGE_BUCKETS: Final = (
    *(0.1, 0.3, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 14_400, 28_800, 43_200, 86_400, 172_800, 604_800),
)
"""Upper bounds, in seconds, of the histogram of age at serving: the durations that policies use, so
that a bound is at `fresh_for` itself and several are below it."""
FIRST_COOLDOWN: Final = 1.0
LONGEST_COOLDOWN: Final = 60.0
LONGEST_PAUSE: Final = 30.0
"""Seconds; a watched absent key is asked for then, even if others are fresh for longer."""
SHORTEST_ABSENCE: Final = 1.0
"""The least seconds that an absence is remembered, however short `fresh_for` is."""
FRESH: Final = Verdict.FRESH  # a global name is read in a tenth of the time of an enum's member
UNMARKED: Final = Mark.NONE
WORST: Final = {Mark.SOFT: 1, Mark.HARD: 2}
ORDER: Final = (Verdict.FRESH, Verdict.STALE, Verdict.EXPIRED, Verdict.GONE)
PLAIN: Final = (dict, list, str, bytes, int, float, datetime, type(None))
"""Types of which msgpack returns what it was given."""


class Terms(Struct, frozen=True):
    """The times that a resource was declared with."""

    policy: Policy
    absent_for: float
    jitter: float
    absent_stale_for: float = 0.0
    """After `absent_for`: still absent, while it is asked for in the background."""
    first_cooldown: float = FIRST_COOLDOWN
    longest_cooldown: float = LONGEST_COOLDOWN
    """A cooldown doubles from the first to the longest."""


class Serve(Struct, frozen=True):
    """Answer with the copy now; with `refresh`, start a background refresh.

    `failure` is told with an old copy until a load succeeds, also while the next load runs.
    """

    copy: Copy
    verdict: Verdict
    refresh: bool = False
    failure: Failure | None = None


class MustLoad(Struct, frozen=True):
    """Wait for a load; if it fails, serve `fallback`."""

    fallback: Copy | None = None


class Fail(Struct, frozen=True):
    """There is nothing to serve, and the key cools down."""

    failure: Failure


Plan: TypeAlias = Serve | MustLoad | Fail


def verdict_of(copy: Copy, now: float) -> Verdict:
    """By its times, and no better than its invalidation allows."""
    natural = copy.policy.verdict(copy.fetched_at, now)
    if copy.mark is Mark.NONE:
        return natural
    return ORDER[max(ORDER.index(natural), WORST[copy.mark])]


def without_store(verdict: Verdict) -> Verdict:
    """The verdict of a copy about which the store could not be asked: STALE at best.

    Another process may have invalidated it. It is refreshed no earlier for that: if every read of
    an outage began a load, the outage of the store would become one of the upstream.
    """
    return Verdict.STALE if verdict is Verdict.FRESH else verdict


def cooling(failure: Failure | None, now: float) -> Failure | None:
    """The failure, if its cooldown is not over."""
    return failure if failure is not None and not is_over(failure.retry_at, now) else None


def failure_error(
    name: str, failure: Failure, now: float, of: type[LoadFailed] = LoadFailed
) -> LoadFailed:
    """The remembered failure of an entry as an error; it says how long the cooldown still lasts.

    `of`: its class, if that is known.
    """
    left = failure.retry_at - now
    pause = f"not tried again for {left:.1f} s, since " if left > 0 else ""
    error = of(f"{name}: {pause}loading failed: {failure.error}")
    error.retry_at = failure.retry_at
    return error


def may_retry(error: LoadFailed, now: float) -> bool:
    """True for a remembered failure whose cooldown is over: the next load may begin, or has."""
    return error.retry_at is not None and is_over(error.retry_at, now)


def without_cause(answer: Answer[V]) -> Answer[V]:
    """The answer for keeping: its error has no `__cause__`, which would hold the load's frames."""
    error = answer.error
    if error is None or error.__cause__ is None:
        return answer
    plain = type(error)(*error.args)
    plain.retry_at = error.retry_at
    return answer.with_error(plain)


def is_held(record: Record, now: float, lease_for: float = FOR_EVER) -> bool:
    """True if a process is loading it, judged with our own `lease_for`."""
    return record.held_until is not None and not is_lease_over(record.held_until, now, lease_for)


def plan_read(
    record: Record,
    now: float,
    lease_for: float = FOR_EVER,
    max_age: float = FOR_EVER,
    *,
    at_least: bool = False,
) -> Plan:
    """FRESH is served, STALE served and refreshed, EXPIRED and GONE wait for a load.

    A copy older than `max_age` counts as EXPIRED. `at_least`: the caller has seen a change, so an
    invalidated copy, which may be older, counts as GONE.
    """
    copy = record.copy
    if at_least and copy is not None and copy.mark is not Mark.NONE:
        copy = None
    pause = cooling(record.failure, now)
    verdict = Verdict.GONE if copy is None else verdict_of(copy, now)
    if copy is None or verdict is Verdict.GONE:
        return MustLoad() if pause is None else Fail(pause)
    if now - copy.fetched_at > max_age:
        verdict = Verdict.EXPIRED
    if verdict is Verdict.FRESH:
        return Serve(copy, verdict)
    if pause is not None:
        return Serve(copy, verdict, failure=pause)
    if verdict is Verdict.STALE:
        is_free = not is_held(record, now, lease_for)
        return Serve(copy, verdict, refresh=is_free, failure=record.failure)
    return MustLoad(fallback=copy)


def plan_wait(
    record: Record,
    seen: str | None,
    now: float,
    lease_for: float = FOR_EVER,
    *,
    at_least: bool = False,
) -> Plan | None:
    """What a caller does that waits for another process's load; None: wait on.

    For callers that waited, a copy that arrived is STALE at worst, unless it was invalidated.
    `at_least` is that of `plan_read`.
    """
    copy = record.copy
    is_new = copy is not None and copy.generation != seen
    if not is_new and is_held(record, now, lease_for):
        return None
    plan = plan_read(record, now, lease_for, at_least=at_least)
    if not isinstance(plan, MustLoad) or copy is None or not is_new:
        return plan
    if copy.mark is Mark.HARD or (at_least and copy.mark is Mark.SOFT):
        return plan
    return Serve(copy, Verdict.STALE, failure=record.failure)


def fresh_until(copy: Copy) -> float:
    """The end of its freshness; an invalidated copy is not fresh."""
    return copy.fetched_at + copy.policy.fresh_for if copy.mark is Mark.NONE else copy.fetched_at


def absent_believed_for(fresh_for: float, absent_for: float | None) -> float:
    """A tenth of `fresh_for` unless declared, and at least a second."""
    return max(SHORTEST_ABSENCE, fresh_for / 10 if absent_for is None else absent_for)


def absent_policy(terms: Terms, took: float) -> Policy:
    """An absence counts from the arrival of the answer, so the load time is added.

    It is stored with the absent copy, so that all processes agree.
    """
    return Policy(terms.absent_for + max(0.0, took), terms.absent_stale_for)


def absent_pause(terms: Terms) -> float:
    """A watcher asks for an absent key no more often than for one that exists."""
    return max(terms.absent_for, min(terms.policy.fresh_for, LONGEST_PAUSE))


def refresh_at(record: Record, now: float, pause: float = 0.0) -> float:
    """When a watcher wants a new copy: at the end of freshness, or of the cooldown.

    `pause`: for a watcher that knows already that the key is absent.
    """
    copy = record.copy
    failure = record.failure
    is_absent = copy is not None and copy.value is None and copy.mark is Mark.NONE
    if copy is not None and is_absent and 0 <= now - copy.fetched_at < pause:
        return copy.fetched_at + pause
    if copy is not None and verdict_of(copy, now) is Verdict.FRESH:
        return fresh_until(copy)
    return failure.retry_at if failure is not None else float("-inf")


def refresh_times(
    records: Mapping[K, Record], now: float, terms: Terms, absent: Container[K]
) -> dict[K, float]:
    """When to refresh each key, for a watcher that knows these keys to be absent."""
    pause = absent_pause(terms)
    return {
        key: refresh_at(record, now, pause if key in absent else 0.0)
        for key, record in records.items()
    }


def watched_until(copy: Copy, terms: Terms) -> float:
    """When to refresh a copy that just arrived, for a watcher.

    A copy that is never fresh, by its own times, is refreshed as often as the others.
    """
    pause = absent_pause(terms) if copy.value is None else 0.0
    if not copy.policy.fresh_for and copy.mark is Mark.NONE:
        pause = terms.policy.fresh_for
    return max(fresh_until(copy), copy.fetched_at + pause)


def unchanged_until(copy: Copy, now: float) -> float:
    """Until when the verdict does not change."""
    terms = copy.policy
    age = now - copy.fetched_at
    end = float("inf")
    for after in (0.0, terms.stale_for, terms.error_for):
        if age < terms.fresh_for + after < end:
            end = terms.fresh_for + after
    return copy.fetched_at + end


class Outlook(Struct, frozen=True):
    """The verdict at `now` of copies with the same time and terms."""

    policy: Policy
    fetched_at: float
    mark: Mark
    now: float
    verdict: Verdict
    at_arrival: Verdict
    """The verdict for callers that waited for it: STALE at worst."""
    until: float
    """Until when this stays the same."""


def outlook_of(copy: Copy, now: float) -> Outlook:
    policy = copy.policy
    fetched_at = copy.fetched_at
    if copy.mark is UNMARKED and 0.0 <= now - fetched_at < policy.fresh_for:  # most copies
        end = fetched_at + policy.fresh_for
        return Outlook(policy, fetched_at, UNMARKED, now, FRESH, FRESH, end)
    verdict = verdict_of(copy, now)
    return Outlook(
        policy=copy.policy,
        fetched_at=copy.fetched_at,
        mark=copy.mark,
        now=now,
        verdict=verdict,
        at_arrival=verdict if verdict is Verdict.FRESH else Verdict.STALE,
        until=unchanged_until(copy, now),
    )


def age_bucket(age: float, bounds: Sequence[float] = AGE_BUCKETS) -> int:
    """The histogram bucket of an age."""
    return bisect_right(bounds, age)


def stamped(now: float) -> float:
    """When a load was sent, in whole milliseconds, as every store keeps it.

    The half of a microsecond is for a time that is a whole one, but for a float's last digit.
    """
    return floor(now * 1000 + 0.0005) / 1000


def jittered(policy: Policy, jitter: float, dice: float) -> Policy:
    """Drawn once, never longer than declared, stored with the copy so that all agree."""
    fresh_for = policy.fresh_for * (1 - jitter * dice)
    return Policy(fresh_for, policy.stale_for, policy.error_for)


def own_policy(terms: Terms, loaded: Loaded[Any]) -> Policy:
    """Times that the loader does not give are the resource's."""
    policy = terms.policy
    stale_for = policy.stale_for if loaded.stale_for is None else loaded.stale_for
    error_for = policy.error_for if loaded.error_for is None else loaded.error_for
    fresh_for = policy.fresh_for if loaded.fresh_for is None else loaded.fresh_for
    return policy_of(fresh_for, stale_for, error_for)


def copy_and_value(
    value: object,
    terms: Terms,
    codec: Codec[V],
    identity: tuple[str, float],
    dice: Callable[[], float],
) -> tuple[Copy, V]:
    """A copy of the value, and the value through the codec and back, so that all see the same.

    `identity`: its generation, and when it was asked for. What the codec raises goes to the caller.
    """
    policy = terms.policy
    generation, sent = identity
    version = NO_VERSION
    if isinstance(value, Loaded):
        version = value.version_form
        policy = own_policy(terms, value)
        value = value.value
    if terms.jitter:
        policy = jittered(policy, terms.jitter, dice())
    data = codec.encode(value)  # type: ignore[arg-type]  # an annotation is a promise
    if type(data) is bytes:  # the pages' codec returns bytes of its own kind, with a head
        data = bytes(memoryview(data))  # msgspec leaves up to half as much room behind its bytes
    return Copy(generation, sent, policy, data, UNMARKED, version), codec.decode(data)


def odd_part(value: object) -> object | None:
    """The value, or the first one inside, that msgpack returns as another type; or None."""
    if isinstance(value, Loaded):
        value = value.value
    if not isinstance(value, PLAIN):
        return value
    inside: object = None
    if isinstance(value, list) and value:
        inside = value[0]
    elif isinstance(value, dict) and value:
        inside = next(iter(value.values()))
    return None if isinstance(inside, PLAIN) else inside


def failed(
    before: Failure | None,
    error: str,
    now: float,
    dice: float,
    pause: float | None = None,
    *,
    first: float = FIRST_COOLDOWN,
    longest: float = LONGEST_COOLDOWN,
) -> Failure:
    """1 s, doubling to 1 min, jittered down by up to a tenth; or the pause the loader asked."""
    count = 1 if before is None else before.count + 1
    if pause is None:
        pause = pause_after(count, first=first, longest=max(first, longest)) * (1 - 0.1 * dice)
    return Failure(count, now + pause, error)


class Absent(Enum):
    """The upstream answered that it does not have the key."""

    ABSENT = 0


ABSENT: Final = Absent.ABSENT


def results_of(kind: str, keys: Sequence[K], answer: object) -> dict[K, object]:
    """An id missing from the mapping is absent; one mapped to an exception failed alone.

    If ids are missing and there are ids that nobody asked for, the missing ones failed: the loader
    names its keys in another way.
    """
    if type(answer) is not dict and not isinstance(answer, Mapping):
        error = LoadFailed(
            f"{kind}: the loader returned {type(answer).__name__}, not a mapping from key to value"
        )
        return dict.fromkeys(keys, error)
    results: dict[K, object] = {}
    missing: list[K] = []
    for key in keys:
        result = answer.get(key, ABSENT)
        results[key] = result
        if result is ABSENT:
            missing.append(key)
    if missing and len(answer) > len(keys) - len(missing):
        extra = next(key for key in answer if key not in results)
        for key in missing:
            results[key] = LoadFailed(
                f"{kind} {key!r}: the loader left it out and answered for {shown(extra)}, "
                f"which nobody asked for"
            )
    return results


def pause_of(error: object) -> float | None:
    """The pause in seconds that a loader asked for, if it did."""
    try:
        return seconds(error.seconds) if isinstance(error, RetryAfter) else None
    except Exception:  # noqa: BLE001 (a user's exception may be anything)
        return None
