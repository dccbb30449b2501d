"""M1-M7, M9: together, against a plain list of insertions; and M5 against eight threads."""

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stillfresh import TtlCache
from stillfresh.testing import ManualClock
from stillfresh.ttl_cache import TtlEntry
from tests.kit.examples import examples

TTL = 10
KEYS = st.integers(0, 5)


def walked(cache: TtlCache[Any, Any], way: str) -> "list[TtlEntry[Any, Any]]":
    """All entries in the ring, from its beginning or from its end."""
    found, entry = [], getattr(cache._ring, way)
    while entry is not cache._ring:
        found.append(entry)
        entry = getattr(entry, way)
    return found


class TtlCacheModel(RuleBasedStateMachine):
    """The model keeps (key, value, inserted_at), oldest first, filtered on every question."""

    limit: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(start=0.1)
        self.told: list[tuple[int, int, str]] = []
        self.cache = TtlCache[int, int](
            TTL,
            max_entries=self.limit,
            clock=self.now,
            on_evict=lambda *args: self.told.append(args),
            count_reads=True,
        )
        self.entries: list[tuple[int, int, float]] = []
        self.ended: list[tuple[int, int]] = []
        self.value = self.removed = self.replaced = self.hits = self.misses = 0

    def live(self) -> dict[int, int]:
        now = self.clock()
        return {key: value for key, value, at in self.entries if now < at + TTL}

    def take(self, key: int) -> int | None:
        """Out of the model; the value if it was live, else it counts as ended."""
        found = next((entry for entry in self.entries if entry[0] == key), None)
        if found is None:
            return None
        live = self.live()
        self.entries.remove(found)
        if key in live:
            return live[key]
        self.ended.append(found[:2])
        return None

    @rule(key=KEYS)
    def insert(self, key: int) -> None:
        self.value += 1
        self.replaced += self.take(key) is not None
        self.cache.insert(key, self.value)
        self.entries.append((key, self.value, self.clock()))
        while self.limit is not None and len(self.entries) > self.limit:
            gone = self.entries.pop(0)
            self.ended.append(gone[:2])

    @rule(key=KEYS)
    def get(self, key: int) -> None:
        expected = self.live().get(key)
        self.hits += expected is not None
        self.misses += expected is None
        assert self.cache.get(key) == expected

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        expected = self.take(key)
        self.removed += expected is not None
        assert self.cache.remove(key) == expected

    @rule(limit=st.none() | st.integers(1, 3))
    def cleanup(self, limit: int | None) -> None:
        before = len(self.told)
        dropped = self.cache.cleanup_expired(limit)
        assert dropped == len(self.told) - before
        assert limit is None or dropped <= limit
        expired = sum(1 for entry in self.entries if entry[0] not in self.live())
        assert dropped <= expired
        if limit is None:
            for key, _, _ in list(self.entries):
                if key not in self.live():
                    self.take(key)

    def now(self) -> float:
        """The time of the clock that the model has now."""
        return self.clock()

    @rule(seconds=st.sampled_from([0.5, 1, 3, 7, TTL]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def wait_until_exactly_expired(self, data: st.DataObject) -> None:
        _, _, at = data.draw(st.sampled_from(self.entries))
        if at + TTL > self.clock():
            self.clock = ManualClock(at + TTL)

    @invariant()
    def looks_the_same_from_everywhere(self) -> None:
        live = self.live()
        assert dict(self.cache.items()) == live
        assert set(self.cache) == set(live)
        assert len(self.cache) == len(live)
        assert all((key in self.cache) == (key in live) for key in range(6))

    @invariant()
    def everything_inserted_is_accounted_for(self) -> None:
        stats = self.cache.stats()
        held = stats.size + stats.expired_held
        assert stats.inserted == self.value
        assert held + self.removed + self.replaced + stats.expired + stats.evicted == self.value
        assert len(self.told) == stats.expired + stats.evicted
        assert len({value for _, value, _ in self.told}) == len(self.told)
        assert (stats.hits, stats.misses) == (self.hits, self.misses)
        assert self.limit is None or held <= self.limit

    @invariant()
    def the_order_is_whole(self) -> None:
        """Walked forwards and backwards the links visit every entry once, oldest first."""
        forwards, backwards = walked(self.cache, "newer"), walked(self.cache, "older")
        assert forwards == backwards[::-1]
        assert sorted(map(id, forwards)) == sorted(map(id, self.cache._data.values()))
        ends = list(map(float, forwards))
        assert ends == sorted(ends)


class SmallTtlCacheModel(TtlCacheModel):
    limit = 3


TestUnlimited = TtlCacheModel.TestCase
TestUnlimited.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestLimited = SmallTtlCacheModel.TestCase
TestLimited.settings = settings(max_examples=examples(60), stateful_step_count=40)


def test_m5_eight_threads_leave_the_cache_whole() -> None:
    """M5, M7: a storm of inserts, reads, removes and sweeps; afterwards everything adds up."""
    told: list[object] = []
    cache = TtlCache[int, int](ttl=0.002, max_entries=50, on_evict=lambda *args: told.append(args))

    def storm(seed: int) -> int:
        dice, removed = random.Random(seed), 0
        actions: list[Callable[[int], object]] = [
            lambda key: cache.insert(key, key),
            cache.get,
            lambda _: cache.cleanup_expired(limit=3),
            lambda _: len(cache),
            lambda _: list(cache.items()),
        ]
        for _ in range(3_000):
            key = dice.randrange(100)
            if dice.random() < 0.2:
                removed += cache.remove(key) is not None
            else:
                value = dice.choice(actions)(key)
                assert value is None or not isinstance(value, int) or value <= 100
        return removed

    with ThreadPoolExecutor(8) as pool:
        futures: list[Future[int]] = [pool.submit(storm, seed) for seed in range(8)]
        removed = sum(future.result() for future in futures)
    stats = cache.stats()
    assert len(told) == stats.expired + stats.evicted
    held = stats.size + stats.expired_held
    replaced = stats.inserted - removed - stats.expired - stats.evicted - held
    assert 0 <= replaced < stats.inserted
    for key in range(100):
        cache.remove(key)
    assert (len(cache), list(cache)) == (0, [])
