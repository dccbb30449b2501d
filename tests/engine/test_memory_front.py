"""What memory keeps, what is counted (also for G6), what is explained: E9, E10, E12, E14, E27."""

import asyncio
import gc
import re
import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from stillfresh import Cache, LoadFailed, Origin, Policy, ResourceStats, Verdict, engine
from stillfresh.engine.counts import SAMPLE, Counts
from stillfresh.engine.explain import explain, listed
from stillfresh.engine.rules import age_bucket
from stillfresh.stores.contract import Copy, Failure, Mark, Record, StoredEntry
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    idle,
    outcome,
    turns,
    until,
    version,
)
from tests.kit.held_store import SteppedStore, cache_on, lease_of

FRESH, STALE, EXPIRED, GONE = Verdict
PAGE = Copy("g1", 0, Policy(5, 60, 60), b"page")
HARD = replace(PAGE, mark=Mark.HARD)
SENTENCES = {
    "WAITS": "a read waits for a load",
    "PAUSE": "no load begins for another",
    "SERVED": "a read is served and nothing else happens",
    "RETRIED": "a read is served at once, with the error, and one refresh begins behind it",
    "REFRESHED": "a read is served at once, and one refresh begins behind it",
    "OLD": "10.0 s old, fresh until 5.0 s ago",
    "FAILED": "a read is served at once, with the error",
    "THREE": "The last 3 loads failed (x)",
    "ELSEWHERE": "Another process is loading it, until",
    "FALLBACK": "gets this copy only if that fails",
}


class Counting:
    """A codec that counts."""

    def __init__(self) -> None:
        self.decoded = 0

    def encode(self, value: Price, /) -> bytes:
        return msgspec.msgpack.encode(value)

    def decode(self, data: bytes, /) -> Price:
        self.decoded += 1
        return msgspec.msgpack.decode(data, type=Price)


def note_reads(
    store: type[MemoryStore | SqliteStore], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The ids that are read on the spot from now on."""
    asked: list[str] = []
    read_now = store.read_now

    def noted(
        self: Any, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        asked.extend(ids)
        return read_now(self, kind, ids, known)

    monkeypatch.setattr(store, "read_now", noted)
    return asked


async def stats(cache: Cache) -> ResourceStats:
    return (await cache.stats()).resources["price"]


def reads(counts: ResourceStats) -> tuple[int, ...]:
    """FRESH, STALE, EXPIRED, GONE."""
    return tuple(counts.reads[verdict] for verdict in Verdict)


class Large:
    """A value that can be referred to weakly."""


class TestE9Memory:
    async def test_memory_holds_no_more_than_max_entries(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """Whatever is asked for, and what is invalidated in between."""
        prices = declare(cache, upstream, max_entries=10)
        for number in range(100):
            await prices.get(str(number % 37))
            if number % 3 == 0:
                await prices.invalidate(str(number % 7))
            assert (await stats(cache)).entries <= 10
        await prices.get_many(str(number) for number in range(200, 250))
        assert (await stats(cache)).entries == 10

    async def test_memory_keeps_entries_that_are_read(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """A walk over many keys does not push out the few that are in use."""
        prices = declare(cache, upstream, max_entries=10)
        hot = ["h1", "h2", "h3"]
        await prices.get_many(hot)
        for number in range(200):
            await prices.get(str(number))
            for key in hot:
                await prices.get(key)
        assert all(prices.peek(key) for key in hot)

    async def test_memory_keeps_entries_that_are_read_in_front_of_a_shared_store(
        self, here: Cache, upstream: Upstream
    ) -> None:
        """There every read asks the store, and counts as a read all the same."""
        codec = Counting()
        prices = declare(here, upstream, max_entries=10, codec=codec)
        hot = ["h1", "h2", "h3"]
        await prices.get_many(hot)
        for number in range(50):
            await prices.get(str(number))
            for key in hot:
                await prices.get(key)
        assert codec.decoded == len(upstream.calls) + len(hot) - 1, "once for each key"

    async def test_a_fresh_hit_does_not_ask_a_private_store(
        self, upstream: Upstream, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody else can have changed it."""
        asked = note_reads(MemoryStore, monkeypatch)
        async with Cache("memory://", clock=clock) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            asked.clear()
            answers = []
            for _ in range(5):
                clock.advance(0.01)
                answers.append(await prices.get("a"))
            assert len({id(answer) for answer in answers}) == 1, "the one prebuilt answer"
            assert asked == []
            clock.advance(30)
            assert (await prices.get("a")).verdict is STALE
            assert asked == ["a"]

    async def test_every_read_asks_a_shared_store(
        self, here: Cache, upstream: Upstream, store: SteppedStore
    ) -> None:
        """So that another process's invalidation is seen by the very next read."""
        prices = declare(here, upstream)
        await prices("a")
        before = store.count("read")
        for _ in range(3):
            assert (await prices.get("a")).origin is Origin.STORE
        assert store.count("read") == before + 3
        await store.inner.invalidate("price", ["a"])
        upstream.version = 2
        assert version(await prices.get("a")) == 2

    async def test_at_the_end_of_its_freshness_it_is_stale(
        self, prices: Prices, clock: ManualClock, url: str
    ) -> None:
        """To who peeks as well: ends are exclusive. `peek` cannot ask Redis (E29)."""
        await prices("a")
        before = Verdict.STALE if url.startswith("redis") else Verdict.FRESH
        for passed, verdict in ((29, before), (1, Verdict.STALE)):
            clock.advance(passed)
            found = prices.peek("a")
            assert found is not None
            assert found.verdict is verdict
            await prices.get("a")

    async def test_many_keys_are_answered_by_memory_for_that_long(
        self, here: Cache, upstream: Upstream, store: SteppedStore, clock: ManualClock
    ) -> None:
        """The store is asked for none of them; later for all, in one step."""
        prices = declare(here, upstream, memory_for="1s")
        await prices.get_many(["a", "b"])
        asked = store.count("read")
        found = await prices.get_many(["a", "b"])
        assert (len(found), store.count("read")) == (2, asked)
        clock.advance(1)
        await prices.get_many(["a", "b"])
        assert store.count("read") == asked + 1

    async def test_memory_for_allows_that_much_lag_and_no_more(
        self, here: Cache, upstream: Upstream, store: SteppedStore, clock: ManualClock
    ) -> None:
        """Counted from when the store was last asked."""
        prices = declare(here, upstream, memory_for="1s")
        await prices("a")
        reads = store.count("read")
        await store.inner.invalidate("price", ["a"])
        upstream.version = 2
        clock.advance(0.09)
        answer = await prices.get("a")
        assert (version(answer), answer.origin, store.count("read")) == (1, Origin.MEMORY, reads)
        clock.advance(0.92)
        assert version(await prices.get("a")) == 2

    async def test_memory_alone_answers_until_its_time(
        self, here: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """With the one prebuilt answer, which counts as a read; then the store is asked."""
        prices = declare(here, upstream, memory_for="1s")
        await prices("a")
        answer = prices.get_nowait("a")
        assert answer is not None
        clock.advance(0.09)
        assert prices.get_nowait("a") is answer
        assert (await stats(here)).hits == 2
        assert prices.get_nowait("unknown") is None
        clock.advance(0.91)
        assert prices.get_nowait("a") is None

    async def test_memory_for_begins_anew_whenever_a_file_was_asked(
        self,
        upstream: Upstream,
        clock: ManualClock,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A file is read on the spot, once in that time; what others did is seen after it."""
        url = f"sqlite:///{tmp_path / 'a.db'}"
        asked = note_reads(SqliteStore, monkeypatch)
        async with Cache(url, clock=clock) as here, Cache(url, clock=clock) as there:
            prices = declare(here, upstream, memory_for="1s")
            clock.advance(100)
            await prices("a")
            clock.advance(10)  # within one bucket of the ages from here on
            asked.clear()
            for _ in range(32):
                await prices.get("a")
                clock.advance(0.125)
            assert len(asked) == 4
            await declare(there, upstream).invalidate("a")
            upstream.version = 2
            assert version(await prices.get("a")) == 2

    async def test_memory_for_never_lasts_longer_than_freshness(
        self, here: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Lag is no excuse for serving STALE as FRESH."""
        prices = declare(here, upstream, memory_for="1h")
        await prices("a")
        clock.advance(30)
        assert (await prices.get("a")).verdict is STALE

    async def test_a_generation_is_decoded_once(
        self, here: Cache, upstream: Upstream, store: SteppedStore, clock: ManualClock
    ) -> None:
        """The row is read each time; memory saves the decoding while it is the same."""
        codec, theirs = Counting(), Counting()
        prices = declare(here, upstream, codec=codec)
        for _ in range(5):
            await prices.get("a")
        assert codec.decoded == 1, "of what the loader said"
        async with cache_on(SteppedStore(store.inner), clock, Sleeper()) as other:
            goods = declare(other, upstream, codec=theirs)
            for _ in range(5):
                await goods.get("a")
            assert theirs.decoded == 1
            await prices.refresh("a")
            for _ in range(5):
                await goods.get("a")
            assert theirs.decoded == 2

    async def test_an_expired_copy_is_decoded_once(
        self, store: SteppedStore, upstream: Upstream, clock: ManualClock, here: Cache
    ) -> None:
        """However many wait for the load that it is the fallback of."""
        await declare(here, upstream)("a")
        codec = Counting()
        async with cache_on(SteppedStore(store.inner), clock, Sleeper()) as other:
            goods = declare(other, upstream, codec=codec)
            clock.advance(90)
            upstream.error = ConnectionError("down")
            await asyncio.gather(*(goods.get("a") for _ in range(5)))
            assert codec.decoded == 1

    async def test_what_memory_drops_during_a_read_is_not_loaded_again(
        self, here: Cache, upstream: Upstream, store: SteppedStore
    ) -> None:
        """The store has it, fresh: nothing else happens (E2)."""
        prices = declare(here, upstream, max_entries=1)
        await prices("a")
        task = await store.holding("read:done", prices.get("a"))
        gate = store.gates.pop("read:done")
        await prices("b")
        gate.set()
        await task
        assert upstream.calls == [["a"], ["b"]]

    async def test_a_copy_that_somebody_waits_with_is_served_although_memory_dropped_it(
        self, here: Cache, upstream: Upstream, store: SteppedStore, clock: ManualClock
    ) -> None:
        """E2, S5: the store is away, so memory has the only copy; a second caller loads nothing."""
        prices = declare(here, upstream, max_entries=1)
        await prices("a")
        clock.advance(100)
        store.broken = {"read", "acquire"}
        first = await upstream.holding(prices.get("a"))
        gate = upstream.gate
        upstream.gate = None
        assert gate is not None
        await prices("b")
        assert prices.peek("a") is None, "memory has room for one"
        second = asyncio.create_task(outcome(prices.get("a")))
        await turns()
        upstream.error = ConnectionError("down")
        gate.set()
        answer = await first
        assert (version(answer), answer.verdict) == (1, EXPIRED)
        assert isinstance(answer.error, LoadFailed)
        await second
        assert upstream.calls == [["a"], ["a"], ["b"]]

    async def test_memory_drops_what_a_function_has_dropped(self, cache: Cache) -> None:
        """The short way by arguments never outlives an invalidation."""
        calls: list[int] = []

        @cache.cached("square", fresh_for=60, max_entries=2)
        async def square(of: int) -> int:
            calls.append(of)
            return of * of + len(calls) * 1000

        for _ in range(3):
            assert await square(2) == 1004
        await square.of(2).invalidate()
        assert await square(2) == 2004
        for of in (3, 4, 5, 3, 4, 5):
            assert await square(of) == await square(of)
        assert (await cache.stats()).resources["square"].entries <= 2

    async def test_memory_lets_go_of_what_was_invalidated(self, here: Cache) -> None:
        """The value is freed at once, although its copy is still stored."""
        alive: weakref.WeakSet[Large] = weakref.WeakSet()

        class Noting:
            def encode(self, _: Large, /) -> bytes:
                return b"large"

            def decode(self, _: bytes, /) -> Large:
                value = Large()
                alive.add(value)
                return value

        @here.batched("large", fresh_for=60, memory_for="1h", codec=Noting())
        async def larges(keys: list[str]) -> dict[str, Large]:
            return {key: Large() for key in keys}

        await larges("a")
        await turns()
        assert len(alive) == 1
        await larges.invalidate("a")
        await turns()
        gc.collect()
        assert not alive


class TestE10Jitter:
    async def test_jitter_is_stored_with_the_entry(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Two processes agree about when it ends, whatever their own dice say."""
        store = MemoryStore(clock=clock)
        first = Cache(store, clock=clock, sleep=Sleeper(), dice=lambda: 0.5)
        second = Cache(store, clock=clock, sleep=Sleeper(), dice=lambda: 0.0)
        ours, theirs = (declare(cache, upstream, jitter=0.4) for cache in (first, second))
        await ours("a")
        clock.advance(23.9)
        assert [(await one.get("a")).verdict for one in (ours, theirs)] == [FRESH, FRESH]
        clock.advance(0.2)
        assert [(await one.get("a")).verdict for one in (theirs, ours)] == [STALE, STALE]
        await first.close()
        await second.close()

    async def test_what_was_loaded_together_is_not_refreshed_together(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Each key throws its own dice."""
        dice = iter([0.0, 0.25, 0.5, 0.75] + [0.0] * 50)
        async with Cache("memory://", clock=clock, dice=lambda: next(dice)) as cache:
            prices = declare(cache, upstream, jitter=0.4)
            await prices.get_many(["a", "b", "c", "d"])
            ends = [(await prices.explain(key)).fresh_until for key in ("a", "b", "c", "d")]
        assert ends == pytest.approx([clock() + left for left in (30, 27, 24, 21)])


class TestE12Stats:
    async def test_reads_are_counted_by_verdict_and_by_age(
        self, prices: Prices, cache: Cache, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Every answer once, by what it was when it was served; sixteen hits by the first one."""
        for _ in range(1 + SAMPLE):
            await prices.get("a")
        clock.advance(0.2)
        for _ in range(SAMPLE):
            await prices("a")
        clock.advance(40)
        upstream.hold()
        for _ in range(2):
            await prices.get("a")
        counts = await stats(cache)
        assert reads(counts) == (33, 2, 0, 0)
        assert [counts.ages[age_bucket(age)] for age in (0, 0.2, 40.2)] == [17, 16, 2]
        assert sum(counts.ages) == 35
        upstream.let_go()
        await idle(cache)

    async def test_every_answer_counts_with_its_own_age(
        self, here: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Also if it is not the age of the one before; a failure has none."""
        prices = declare(here, upstream)
        await prices.put("old", Price("old", 1))
        clock.advance(7)
        await prices.put("new", Price("new", 1))
        upstream.error = ConnectionError("down")
        await prices.get_many(["old", "new", "failed"])
        counts = await stats(here)
        assert reads(counts) == (2, 0, 0, 1)
        assert counts.reads_by_origin[Origin.LOADED][GONE] == 1
        assert (counts.ages[age_bucket(7)], counts.ages[0], sum(counts.ages)) == (1, 1, 2)
        assert counts.age_sum == 7

    async def test_copies_that_are_read_together_are_judged_apart(
        self, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """By the times, the terms and the mark of each."""
        prices = declare(cache, upstream, jitter=0)
        await prices.put("old", Price("old", 1), fresh_for=10)
        clock.advance(6)
        await prices.put_many({key: Price(key, 1) for key in ("short", "marked", "whole")})
        await prices.put("short", Price("short", 1), fresh_for=3)
        await prices.invalidate("marked", soft=True)
        clock.advance(4)
        upstream.hold()
        answers = await prices.get_many(["whole", "old", "short", "marked"])
        verdicts = {key: answer.verdict for key, answer in answers.items()}
        assert verdicts == {"whole": FRESH, "old": STALE, "short": STALE, "marked": STALE}
        upstream.let_go()
        await idle(cache)

    async def test_a_hit_makes_nothing_new(self, upstream: Upstream, clock: ManualClock) -> None:
        """The answer stands on the entry, and so does its count."""
        async with Cache("memory://", clock=clock) as cache:
            prices = declare(cache, upstream)
            await prices.get("a")
            first = await prices.get("a")
            before = sys.getallocatedblocks()
            for _ in range(1_000):
                assert await prices.get("a") is first
            assert sys.getallocatedblocks() - before < 500
            assert reads(await stats(cache)) == (1_002, 0, 0, 0)

    async def test_hits_are_counted_by_the_age_that_they_had(
        self, prices: Prices, cache: Cache, clock: ManualClock
    ) -> None:
        """Sixteen hits by the age of the first; they all had it here."""
        ages = (0, 0.05, 0.15, 0.25, 0.35, 0.95, 1.5, 2.5, 3.5, 9.5, 10.5, 29.5)
        await prices.get("a")
        expected = Counter([age_bucket(0)])
        for age in ages:
            clock.advance(age - (clock() - 1_700_000_000.0))
            for _ in range(SAMPLE):
                await prices.get("a")
                expected[age_bucket(age)] += 1
        counts = await stats(cache)
        assert {bucket: n for bucket, n in enumerate(counts.ages) if n} == expected
        assert reads(counts) == (1 + 12 * SAMPLE, 0, 0, 0)
        assert counts.age_quantile(0.5) == 1
        assert counts.age_quantile(1) == 30

    async def test_stats_say_what_is_queued_and_what_is_watched(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """Keys beyond the places wait their turn; keys that are watched count once."""
        prices = declare(cache, upstream, max_batch=2, concurrency=1)
        upstream.hold()
        asking = asyncio.ensure_future(prices.get_many(["a", "b", "c"]))
        await upstream.asked.wait()
        counts = await stats(cache)
        assert (counts.loading, counts.queued, counts.max_batch) == (3, 1, 2)
        upstream.let_go()
        await asking
        with prices.watch("a", "b"), prices.watch("a"):
            assert (await stats(cache)).watched == 2
        counts = await stats(cache)
        assert (counts.loading, counts.queued, counts.watched) == (0, 0, 0)

    async def test_stats_say_what_fails_and_until_when(
        self, prices: Prices, cache: Cache, clock: ManualClock, upstream: Upstream
    ) -> None:
        """From the failure to the next success: the pause that ends first, the last error."""
        upstream.error = RuntimeError("boom")
        for sku in ("a", "b"):
            with pytest.raises(LoadFailed):
                await prices(sku)
            clock.advance(0.25)
        counts = await stats(cache)
        assert (counts.failing, counts.error) == (2, "RuntimeError: boom")
        assert counts.retry_at is not None
        assert 0 < counts.retry_at - clock() < 1
        clock.advance(5)
        assert (await stats(cache)).failing == 2, "nobody has asked again"
        assert (await stats(cache)).retry_at is None, "and might"
        upstream.error = None
        await prices("a")
        await prices.delete("b")
        counts = await stats(cache)
        assert (counts.failing, counts.retry_at, counts.error) == (0, None, None)

    async def test_a_failure_is_forgotten_with_its_key(
        self, prices: Prices, cache: Cache, upstream: Upstream
    ) -> None:
        """Deleted, put or loaded: it fails no longer."""
        upstream.error = RuntimeError("boom")
        await prices.get_many(list("abcd"))
        assert (await stats(cache)).failing == 4
        await prices.delete("a")
        await prices.put("b", Price("b", 2))
        upstream.error = None
        await prices.refresh("c")
        assert (await stats(cache)).failing == 1

    async def test_an_old_failure_is_forgotten(
        self, prices: Prices, cache: Cache, clock: ManualClock, upstream: Upstream
    ) -> None:
        """What nobody asked for again, for a minute after it might have been, fails no more."""
        upstream.error = RuntimeError("boom")
        with pytest.raises(LoadFailed):
            await prices("a")
        clock.advance(62)
        assert (await stats(cache)).failing == 0

    async def test_failures_that_are_remembered_are_few(self) -> None:
        """Of a flood the latest thousand are counted."""
        counts = Counts()
        for number in range(3_000):
            counts.failed_with(f"{number}", Failure(1, 10.0, f"error {number}"))
        told = counts.stats(0.0, entries=0, bytes=0, loading=0, queued=0, watched=0, max_batch=1)
        assert (told.failing, told.retry_at, told.error) == (1_000, 10.0, "error 2999")

    async def test_the_first_cooldown_that_ends_is_told(self) -> None:
        """Not one that is over."""
        counts = Counts()
        for id_, retry_at in (("a", 30.0), ("b", 20.0), ("c", 10.0)):
            counts.failed_with(id_, Failure(1, retry_at, "x"))
        told = counts.stats(10.0, entries=0, bytes=0, loading=0, queued=0, watched=0, max_batch=1)
        assert (told.failing, told.retry_at) == (3, 20)

    async def test_asking_for_stats_changes_nothing(self, prices: Prices, cache: Cache) -> None:
        """Twice the same; and hits go on being counted."""
        await prices("a")
        await prices("a")
        assert reads(await stats(cache)) == reads(await stats(cache)) == (2, 0, 0, 0)
        await prices("a")
        assert reads(await stats(cache)) == (3, 0, 0, 0)

    @pytest.mark.parametrize("how", ["invalidate", "delete", "refresh"])
    async def test_hits_of_an_entry_that_goes_are_not_lost(
        self, prices: Prices, cache: Cache, how: str
    ) -> None:
        """Folded before it is dropped or replaced."""
        await prices("a")
        await prices("a")
        await getattr(prices, how)("a")
        assert (await stats(cache)).reads[FRESH] >= 2

    async def test_reads_are_counted_by_origin_and_verdict(
        self, prices: Prices, cache: Cache, clock: ManualClock, upstream: Upstream, url: str
    ) -> None:
        """A miss, a joined load, hits of every kind and a failure: a hit ratio is one division."""
        near = Origin.MEMORY if url == "memory://" else Origin.STORE
        await asyncio.gather(prices.get("a"), prices.get("a"))
        for _ in range(3):
            await prices("a")
        await prices.get_many(["a", "b"])
        clock.advance(30)
        await prices("a")
        await idle(cache)
        upstream.error = ConnectionError("down")
        await outcome(prices("c"))
        counts = await stats(cache)
        assert {
            (origin, verdict): count
            for origin, by_verdict in counts.reads_by_origin.items()
            for verdict, count in by_verdict.items()
            if count
        } == {
            (Origin.LOADED, FRESH): 2,
            (Origin.ANOTHER, FRESH): 1,
            (near, FRESH): 4,
            (near, STALE): 1,
            (Origin.LOADED, Verdict.GONE): 1,
        }
        assert reads(counts) == (7, 1, 0, 1)
        assert counts.hits == 5
        assert counts.hits / sum(counts.reads.values()) == pytest.approx(5 / 9)

    async def test_a_read_within_memory_for_counts_as_memory(
        self, here: Cache, upstream: Upstream, store: SteppedStore
    ) -> None:
        """Within it memory answers by itself; an answer that the store confirmed is the store's."""
        prices = declare(here, upstream, memory_for=1)
        for _ in range(3):
            await prices("a")
        assert (await stats(here)).reads_by_origin[Origin.MEMORY][FRESH] == 2
        assert store.count("read") == 1

    async def test_peek_is_no_read(self, prices: Prices, cache: Cache) -> None:
        """Counted nowhere."""
        await prices("a")
        for _ in range(3):
            prices.peek("a")
        assert reads(await stats(cache)) == (1, 0, 0, 0)

    async def test_coalesced_reads_batches_and_loads_are_counted(
        self, prices: Prices, cache: Cache, upstream: Upstream
    ) -> None:
        """Who joined; how many calls, keys, and the largest; who was absent."""
        upstream.absent = {"c"}
        await asyncio.gather(*(prices.get("a") for _ in range(5)))
        await prices.get_many(["b", "c", "d"])
        counts = await stats(cache)
        assert (counts.coalesced, counts.loads, counts.loaded) == (4, 2, 4)
        assert (counts.largest_batch, counts.absent) == (3, 1)
        assert (counts.leases_won, counts.leases_denied) == (4, 0)
        assert (counts.loading, counts.entries) == (0, 4)

    async def test_failures_are_counted(
        self, prices: Prices, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """By key; a read that could not be answered is GONE, one from the old copy EXPIRED."""
        await prices("a")
        clock.advance(90)
        upstream.error = ConnectionError("down")
        await prices.get_many(["a", "b"])
        await outcome(prices.get("b"))
        counts = await stats(cache)
        assert (counts.failed, reads(counts)) == (2, (1, 0, 1, 2))

    async def test_an_expired_answer_has_an_age_too(
        self, prices: Prices, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """The oldest that anybody was served is what the histogram is for."""
        await prices("a")
        clock.advance(90)
        upstream.error = ConnectionError("down")
        assert (await prices.get("a")).verdict is EXPIRED
        assert sum((await stats(cache)).ages) == 2

    async def test_everybody_who_waited_for_another_process_is_counted(
        self, here: Cache, upstream: Upstream, store: SteppedStore, sleeper: Sleeper
    ) -> None:
        """Three answers, three reads."""
        prices = declare(here, upstream)
        async with cache_on(store.inner, ManualClock(1_700_000_000.0), Sleeper()) as other:
            theirs = declare(other, upstream)
            holder = await upstream.holding(theirs.get("a"))
            tasks = [asyncio.create_task(prices.get("a")) for _ in range(3)]
            await until(lambda: sleeper.sleeping > 0)
            upstream.let_go()
            await holder
            sleeper.wake()
            await asyncio.gather(*tasks)
            assert reads(await stats(here)) == (3, 0, 0, 0)

    async def test_a_refresh_is_no_read(self, prices: Prices, cache: Cache) -> None:
        """Nobody was served."""
        await prices.refresh("a")
        assert reads(await stats(cache)) == (0, 0, 0, 0)

    async def test_get_many_answers_in_the_order_of_the_question(self, prices: Prices) -> None:
        """E2: what memory had is not put in front."""
        await prices("c")
        assert list(await prices.get_many(["a", "b", "c"])) == ["a", "b", "c"]


class TestE14LoaderCalls:
    @pytest.mark.parametrize("max_batch", [1, 7, 100, 1000])
    async def test_missing_keys_need_as_few_loader_calls_as_can_be(
        self, cache: Cache, upstream: Upstream, max_batch: int
    ) -> None:
        """1,000 missing keys: ceil(1000 / max_batch)."""
        prices = declare(cache, upstream, max_batch=max_batch)
        await prices.get_many(str(number) for number in range(1000))
        assert len(upstream.calls) == -(-1000 // max_batch)


class TestE27ColdKeys:
    async def test_a_cold_key_takes_few_steps(self) -> None:
        """At most eleven calls inside the engine for each of 1,000 keys: a call is what costs."""
        calls = Counter[str]()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                calls[str(Path(frame.f_code.co_filename).parent)] += 1

        async with Cache("memory://") as cache:

            @cache.batched("price", fresh_for=30)
            async def prices(skus: list[str]) -> dict[str, int]:
                return dict.fromkeys(skus, 1)

            sys.setprofile(note)
            try:
                await prices.get_many(str(number) for number in range(1000))
            finally:
                sys.setprofile(None)
        assert calls[str(Path(engine.__file__).parent)] <= 11_000


class TestE12Entries:
    async def test_entries_judges_what_is_in_the_store(
        self, prices: Prices, cache: Cache, clock: ManualClock
    ) -> None:
        """Verdict, times and marks of each, page by page."""
        for id_ in ("a", "b", "c"):
            await prices(id_)
            clock.advance(20)
        await prices.invalidate("c")
        first, *rest = await cache.entries()
        assert [(each.id, each.verdict, each.age) for each in (first, *rest)] == [
            ("a", STALE, 60),
            ("b", STALE, 40),
            ("c", EXPIRED, 20),
        ]
        assert (first.kind, first.fresh_until) == ("price", clock() - 30)
        assert first.size
        assert [each.invalidated for each in (first, *rest)] == [False, False, True]
        assert await cache.entries("price", after=("price", "a"), limit=1) == rest[:1]
        assert [each.id for each in await cache.entries(search="b")] == ["b"]

    async def test_an_entry_that_failed_to_load_says_why(
        self, prices: Prices, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """It has no copy: it is GONE, and cools down."""
        upstream.error = ConnectionError("refused")
        with pytest.raises(LoadFailed):
            await prices("a")
        (entry,) = await cache.entries()
        assert (entry.verdict, entry.age, entry.failures) == (GONE, None, 1)
        assert (entry.error, entry.retry_at) == ("ConnectionError: refused", clock() + 1)


class TestE12Explain:
    @pytest.mark.parametrize(
        ("age", "verdict", "says"),
        [
            (10, FRESH, "^price 'a': a fresh copy, 10.0 s old, fresh for 20.0 s more; .* nothing"),
            (30, STALE, "a stale copy, 30.0 s old, fresh until 0.0 s ago; .* one refresh begins"),
            (40, STALE, "a stale copy, 40.0 s old, fresh until 10.0 s ago; .* one refresh begins"),
            (100, EXPIRED, "an? expired copy, 100.0 s old.*gets this copy only if that fails"),
            (5000, GONE, "a gone copy, 5000.0 s old.*waits for a load, and fails if that fails."),
        ],
    )  # fmt: skip
    async def test_explain_judges_by_age(
        self, prices: Prices, clock: ManualClock, age: float, verdict: Verdict, says: str
    ) -> None:
        """What there is, and what a read would do."""
        fetched = clock()
        await prices("a")
        clock.advance(age)
        told = await prices.explain("a")
        assert (told.verdict, told.age, told.fresh_until) == (verdict, age, fetched + 30)
        assert (told.resource, told.key, told.in_memory) == ("price", "a", True)
        assert re.search(says, str(told))

    async def test_explain_says_that_nothing_is_known(self, prices: Prices) -> None:
        """There never was a copy."""
        told = await prices.explain("a")
        assert str(told).startswith("price 'a': there is no copy; a read waits for a load")
        assert (told.verdict, told.age, told.fresh_until) == (GONE, None, None)

    async def test_explain_says_that_a_key_is_absent(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """Upstream has no such thing."""
        upstream.absent = {"a"}
        await prices.get("a")
        assert "known to be absent, 0.0 s old, fresh for 3.0 s more" in str(
            await prices.explain("a")
        )

    async def test_explain_says_that_a_key_cools_down(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """How often it failed, why, and when the next try is."""
        upstream.error = ConnectionError("down")
        await outcome(prices.get("a"))
        told = await prices.explain("a")
        assert (
            "The last load failed (ConnectionError: down); no load begins for another 1.0 s."
            in str(told)
        )
        assert (told.failures, told.error) == (1, "ConnectionError: down")

    async def test_explain_says_that_a_key_is_being_loaded(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """By this process."""
        task = await upstream.holding(prices.get("a"))
        told = await prices.explain("a")
        assert "It is being loaded by this process." in str(told)
        assert told.loading_here
        upstream.let_go()
        await task
        assert not (await prices.explain("a")).loading_here

    async def test_explain_says_that_another_process_loads(
        self, here: Cache, upstream: Upstream, store: SteppedStore
    ) -> None:
        """By another one, and until when it holds the lease."""
        prices = declare(here, upstream)
        await here.open()
        await lease_of(store.inner, "a", lasts=4)
        told = await prices.explain("a")
        assert "Another process is loading it, until 4.0 s from now." in str(told)
        assert not told.loading_here

    @pytest.mark.parametrize("soft", [True, False])
    async def test_explain_says_that_a_copy_was_invalidated(
        self, prices: Prices, *, soft: bool
    ) -> None:
        """What it would be otherwise does not matter."""
        await prices("a")
        await prices.invalidate("a", soft=soft)
        told = await prices.explain("a")
        assert (told.verdict, told.invalidated) == (STALE if soft else EXPIRED, True)
        assert "copy, 0.0 s old, invalidated" in str(told)

    @pytest.mark.parametrize(
        ("copy", "failure", "says"),
        [
            (None, None, "there is no copy; a read waits for a load, and fails if that fails."),
            (PAGE, None, "a stale copy, 10.0 s old, fresh until 5.0 s ago; a read is served"),
            (replace(PAGE, value=None), None, "not shared, .* a response of its own"),
            (replace(PAGE, mark=Mark.SOFT), None, "invalidated; a read is served"),
            (HARD, None, "invalidated; it must be validated before .* fails if it fails"),
            (HARD, Failure(2, 30, "x"), "so a read fails at once. The last 2 loads failed .x.; no"),
            (replace(HARD, fetched_at=-99), None, "a gone copy.* and fails if that"),
        ],
    )  # fmt: skip
    def test_explain_of_a_page_says_whether_it_must_be_validated(
        self, copy: Copy | None, failure: Failure | None, says: str
    ) -> None:
        """RFC 9111 §4.4: one that was invalidated is validated first, however old it is."""
        record = Record(copy, failure=failure)
        told = explain("page", "/a", record, 10, loading_here=False, in_memory=False)
        assert re.search(says, str(told))
        other = str(explain("price", "/a", record, 10, loading_here=False, in_memory=False))
        assert "must be validated" not in other
        assert "not shared" not in other

    @pytest.mark.parametrize(
        ("record", "text"),
        [
            (Record(), "there is no copy; WAITS, and fails if that fails."),
            (
                Record(failure=Failure(1, 12.5, "x")),
                "there is no copy; a read fails at once. The last load failed (x); PAUSE 2.5 s.",
            ),
            (
                Record(replace(PAGE, fetched_at=7)),
                "a fresh copy, 3.0 s old, fresh for 2.0 s more; SERVED.",
            ),
            (
                Record(replace(PAGE, fetched_at=5)),
                "a stale copy, 5.0 s old, fresh until 0.0 s ago; REFRESHED.",
            ),
            (
                Record(PAGE, 12.0),
                "a stale copy, OLD; REFRESHED. ELSEWHERE 2.0 s from now.",
            ),
            (Record(PAGE, 10.0), "a stale copy, OLD; REFRESHED."),
            (
                Record(HARD),
                "an expired copy, 10.0 s old, invalidated; WAITS, and FALLBACK.",
            ),
            (Record(PAGE, failure=Failure(3, 10.0, "x")), "a stale copy, OLD; RETRIED. THREE."),
            (
                Record(PAGE, failure=Failure(3, 10.5, "x")),
                "a stale copy, OLD; FAILED. THREE; PAUSE 0.5 s.",
            ),
            (
                Record(replace(PAGE, value=None, fetched_at=7)),
                "known to be absent, 3.0 s old, fresh for 2.0 s more; SERVED.",
            ),
        ],
    )
    def test_an_explanation_is_a_sentence_or_two(self, record: Record, text: str) -> None:
        """What there is, what a read does, who loads it, and what failed."""
        for short, long in SENTENCES.items():
            text = text.replace(short, long)
        told = explain("price", "a", record, 10, loading_here=False, in_memory=True)
        assert str(told) == f"price 'a': {text}"
        assert (told.resource, told.key, told.in_memory) == ("price", "a", True)
        here = explain("price", "a", record, 10, loading_here=True, in_memory=False)
        assert "It is being loaded by this process." in str(here)
        assert "Another process" not in str(here)
        assert (here.loading_here, here.in_memory) == (True, False)

    def test_a_listing_says_the_same_in_figures(self) -> None:
        """Of a copy, of an absence, of a load, and of a failure."""
        absent, marked = replace(PAGE, value=None), replace(PAGE, mark=Mark.SOFT)
        held, failed = Record(held_until=12.0), Record(failure=Failure(2, 30.0, "x"))
        records = [Record(PAGE), Record(absent), Record(marked), held, failed]
        entries = [StoredEntry("price", str(at), it, 9) for at, it in enumerate(records)]
        found = listed(entries, 10)
        assert [(it.kind, it.id, it.size) for it in found] == [
            ("price", str(at), 9) for at in range(5)
        ]
        assert [it.verdict.value for it in found] == ["stale", "stale", "stale", "gone", "gone"]
        assert [(it.age, it.fetched_at) for it in found[1:4]] == [(10, 0), (10, 0), (None, None)]
        assert [it.fresh_until for it in found] == [5, 5, 0, None, None]
        assert [it.absent for it in found] == [False, True, False, False, False]
        assert [it.invalidated for it in found] == [False, False, True, False, False]
        assert [it.held_until for it in found] == [None, None, None, 12.0, None]
        assert [(it.failures, it.retry_at, it.error) for it in found[3:]] == [
            (0, None, None),
            (2, 30.0, "x"),
        ]

    async def test_explain_changes_nothing(self, prices: Prices, upstream: Upstream) -> None:
        """No load, no count."""
        await prices.explain("a")
        await turns()
        assert upstream.calls == []
