"""M12: how the public API looks to a type checker. Checked by `mypy --strict`, never run.

A line that must be refused carries an ignore; strict mode fails if it is not needed.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import assert_type

from stillfresh import Clock, Duration, Policy, Sweeper, TtlCache, TtlStats, Verdict
from stillfresh.events import Events, Unsubscribe
from stillfresh.testing import ManualClock

MISSING = object()

cache = TtlCache[str, int](ttl="1h")
assert_type(cache, TtlCache[str, int])
assert_type(cache.get("a"), int | None)
assert_type(cache.get("a", 0), int)
assert_type(cache.get("a", "none"), int | str)
assert_type(cache.get("a", None), int | None)
assert_type(cache.remove("a"), int | None)
assert_type(cache.remove("a", MISSING), int | object)
assert_type("a" in cache, bool)
assert_type(list(cache), list[str])
assert_type(dict(cache.items()), dict[str, int])
assert_type(len(cache), int)
assert_type(cache.cleanup_expired(limit=5), int)
assert_type(cache.stats(), TtlStats)
assert_type(cache.stats().hits, int | None)

cache.insert(1, 1)  # type: ignore[arg-type]
cache.insert("a", "1")  # type: ignore[arg-type]
cache.get(1)  # type: ignore[call-overload]
TtlCache[list[str], int](60)  # type: ignore[type-var]
TtlCache[str, int]()  # type: ignore[call-arg]
TtlCache[str, int](60, 5)  # type: ignore[call-arg]
TtlCache[str, int](b"60")  # type: ignore[arg-type]

annotated: TtlCache[str, list[int]] = TtlCache(timedelta(minutes=5), max_entries=10)
manual = TtlCache[int, int](60, clock=ManualClock())


def told(key: str, value: int, reason: str) -> None:
    """An `on_evict` may be less particular about the reason."""


assert_type(TtlCache(60, on_evict=told), TtlCache[str, int])


async def swept(*caches: TtlCache[str, int]) -> None:
    async with Sweeper(*caches, annotated, every="5m") as sweeper:
        assert_type(sweeper, Sweeper)
        assert_type(sweeper.cleanup_expired(), int)
        assert_type(await sweeper.tick(), int)
    Sweeper(object(), every=1)  # type: ignore[arg-type]
    Sweeper(*caches)  # type: ignore[call-arg]


def verdicts(policy: Policy, times: Iterable[float], clock: Clock) -> list[Verdict]:
    return [policy.verdict(fetched_at, clock()) for fetched_at in times]


def policies(fresh_for: Duration) -> Policy:
    policy = Policy(fresh_for, stale_for="1h", error_for=timedelta(days=1))
    assert_type(policy.fresh_for, float)
    policy.fresh_for = 5  # type: ignore[misc]
    return policy


def listeners(events: Events[int]) -> Unsubscribe:
    events.subscribe(lambda text: text.upper())  # type: ignore[attr-defined]
    events.emit("1")  # type: ignore[arg-type]
    return events.subscribe(print)
