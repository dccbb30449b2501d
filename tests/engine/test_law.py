"""Publishing needs a live lease, and invalidating voids it: E6."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from stillfresh import Answer, Cache, LoadFailed, Origin, StoreError, Verdict
from stillfresh.stores.contract import StoredEntry
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    clear,
    declare,
    idle,
    is_live,
    outcome,
    turns,
    version,
    wrong,
)
from tests.kit.held_store import SteppedStore, cache_on

FRESH, STALE, EXPIRED = Verdict.FRESH, Verdict.STALE, Verdict.EXPIRED


def seen(answer: Answer[Price]) -> tuple[int, Verdict]:
    return version(answer), answer.verdict


WAYS = ["hard", "soft", "twice", "tag", "delete"]


class TestE6Invalidate:
    async def test_the_next_reader_waits_for_a_new_copy(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """And everybody after it has that one."""
        await prices("a")
        upstream.version = 2
        await prices.invalidate("a")
        assert [seen(await prices.get("a")) for _ in range(2)] == [(2, FRESH)] * 2
        assert len(upstream.calls) == 2

    async def test_an_invalidation_loads_nothing_by_itself(
        self, prices: Prices, upstream: Upstream, cache: Cache
    ) -> None:
        """What nobody reads is not loaded."""
        await prices("a")
        await prices.invalidate("a")
        await idle(cache)
        assert len(upstream.calls) == 1

    async def test_the_old_copy_is_seen_only_if_loading_fails(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """As EXPIRED, with the error."""
        await prices("a")
        await prices.invalidate("a")
        upstream.error = ConnectionError("down")
        answer = await prices.get("a")
        assert seen(answer) == (1, EXPIRED)
        assert "ConnectionError: down" in str(answer.error)

    async def test_a_soft_invalidation_serves_the_copy_stale_and_refreshes(
        self, prices: Prices, upstream: Upstream, cache: Cache
    ) -> None:
        """Nobody waits."""
        await prices("a")
        upstream.version = 2
        await prices.invalidate("a", soft=True)
        assert seen(await prices.get("a")) == (1, STALE)
        await idle(cache)
        assert seen(await prices.get("a")) == (2, FRESH)

    async def test_a_soft_invalidation_after_a_hard_one_stays_hard(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """The worse mark stays."""
        await prices("a")
        await prices.invalidate("a")
        await prices.invalidate("a", soft=True)
        upstream.version = 2
        assert seen(await prices.get("a")) == (2, FRESH)

    @pytest.mark.parametrize("how", WAYS)
    async def test_an_invalidation_without_a_copy_does_nothing(
        self, cache: Cache, prices: Prices, upstream: Upstream, how: str
    ) -> None:
        """It is no error, and the first read loads once."""
        await wrong(cache, prices, how)
        assert seen(await prices.get("a")) == (1, FRESH)
        assert upstream.calls == [["a"]]

    async def test_an_invalidation_of_many_keys_reaches_no_other(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """Only what is named."""
        await prices.get_many(["a", "b", "c"])
        upstream.version = 2
        await prices.invalidate("a", "b")
        answers = await prices.get_many(["a", "b", "c"])
        assert [version(answers[key]) for key in ("a", "b", "c")] == [2, 2, 1]

    async def test_memory_forgets_an_invalidated_key_at_once(self, prices: Prices) -> None:
        """`peek` as well."""
        await prices("a")
        await prices.invalidate("a")
        assert prices.peek("a") is None

    @pytest.mark.parametrize(
        ("how", "step"),
        [("hard", "invalidate"), ("tag", "invalidate_tag"), ("delete", "delete")],
    )
    async def test_memory_forgets_before_the_store_is_told(
        self, here: Cache, ours: Prices, store: SteppedStore, how: str, step: str
    ) -> None:
        """Nobody is given the old value while the step is under way."""
        await ours("a")
        telling = await store.holding(step, wrong(here, ours, how))
        assert ours.peek("a") is None
        store.let_go(step)
        await telling

    @pytest.mark.parametrize("how", ["hard", "tag", "delete"])
    async def test_an_invalidation_that_could_not_be_delivered_raises(
        self, here: Cache, ours: Prices, store: SteppedStore, how: str
    ) -> None:
        """S5: silence there would be a lie. The error says what is left to do."""
        await ours("a")
        store.broken = {"invalidate", "invalidate_tag", "delete"}
        with pytest.raises(StoreError, match="cannot") as raised:
            await wrong(here, ours, how)
        assert "until the store confirms an invalidation" in "".join(raised.value.__notes__)


class TestE6Overtaken:
    @pytest.mark.parametrize("how", WAYS)
    @pytest.mark.parametrize("had_copy", [False, True])
    @pytest.mark.parametrize("step", ["acquire", "acquire:done", "load", "publish", "publish:done"])
    async def test_an_overtaken_load_publishes_nothing_fresh_and_a_trailing_one_follows(
        self,
        here: Cache,
        ours: Prices,
        store: SteppedStore,
        upstream: Upstream,
        step: str,
        how: str,
        *,
        had_copy: bool,
    ) -> None:
        """At every stage: STALE for who asked before, the trailing load's copy for who came later.

        Where the loader was asked only after the invalidation, the first already has the new one.
        """
        if had_copy:
            await ours("a")
            await ours.invalidate("a")
        upstream.calls.clear()
        if step == "load":
            upstream.hold()
        else:
            store.hold(step)
        before = asyncio.create_task(ours.get("a"))
        await (upstream.asked.wait() if step == "load" else store.reached(step))
        upstream.version = 2
        await wrong(here, ours, how)
        after = asyncio.create_task(ours.get("a"))
        await turns()
        if step == "load":
            upstream.let_go()
        else:
            store.let_go(step)
        asked_late = step.startswith("acquire")
        first = await before
        assert version(first) == (2 if asked_late else 1)
        if not asked_late:
            assert first.verdict is STALE
        late = await after
        if (how, step) == ("soft", "publish:done"):
            assert seen(late) == (1, STALE), "published before it was marked: served, and refreshed"
            return
        assert seen(late) == (2, FRESH)
        await idle(here)
        assert seen(await ours.get("a")) == (2, FRESH)
        assert len(upstream.calls) <= 2
        if not asked_late:
            assert len(upstream.calls) == 2

    async def test_the_trailing_load_follows_with_nobody_waiting(
        self, here: Cache, ours: Prices, upstream: Upstream
    ) -> None:
        """At once, and exactly once."""
        task = await upstream.holding(ours.get("a"))
        await ours.invalidate("a")
        upstream.version = 2
        upstream.let_go()
        assert seen(await task) == (1, STALE)
        await idle(here)
        await turns()
        assert upstream.calls == [["a"], ["a"]]
        assert seen(await ours.get("a")) == (2, FRESH)

    async def test_the_trailing_load_follows_a_soft_invalidation_too(
        self, here: Cache, ours: Prices, upstream: Upstream, store: SteppedStore
    ) -> None:
        """Marked after it was published and before we knew: the refresh is not forgotten."""
        task = await store.holding("publish:done", ours.get("a"))
        upstream.version = 2
        await ours.invalidate("a", soft=True)
        store.let_go("publish:done")
        await task
        await idle(here)
        assert seen(await ours.get("a")) == (2, FRESH)

    async def test_many_callers_that_come_later_share_the_trailing_load(
        self, ours: Prices, upstream: Upstream
    ) -> None:
        """One load for them all; a second invalidation during the first load adds none."""
        upstream.hold()
        early = [asyncio.create_task(ours.get("a")) for _ in range(3)]
        await upstream.asked.wait()
        await ours.invalidate("a")
        late = [asyncio.create_task(ours.get("a")) for _ in range(3)]
        await turns()
        await ours.invalidate("a")
        late += [asyncio.create_task(ours.get("a")) for _ in range(3)]
        await turns()
        upstream.version = 2
        upstream.let_go()
        assert {seen(answer) for answer in await asyncio.gather(*early)} == {(1, STALE)}
        assert {seen(answer) for answer in await asyncio.gather(*late)} == {(2, FRESH)}
        assert len(upstream.calls) == 2

    async def test_the_trailing_load_can_be_overtaken_too(
        self, ours: Prices, upstream: Upstream
    ) -> None:
        """Who asked before it began has its value as STALE, who came later the next one."""
        upstream.hold()
        tasks = [asyncio.create_task(ours.get("a"))]
        for number in (2, 3):
            await upstream.asked.wait()
            await ours.invalidate("a")
            tasks.append(asyncio.create_task(ours.get("a")))
            await turns()
            upstream.version = number
            gate, upstream.gate = upstream.gate, None
            upstream.hold()
            assert gate is not None
            gate.set()
        await upstream.asked.wait()
        upstream.let_go()
        assert [seen(await task) for task in tasks] == [(1, STALE), (2, STALE), (3, FRESH)]

    async def test_a_caller_that_was_told_and_asks_again_joins_the_trailing_load(
        self, upstream: Upstream
    ) -> None:
        """Before it begins, if the store reads on the spot: one that is overtaken answers too."""
        async with Cache("memory://") as cache:
            prices = declare(cache, upstream)

            async def twice() -> list[Answer[Price]]:
                first = await prices.get_many(["a", "b"])
                return [first["a"], await prices.get("a")]

            upstream.hold()
            reading = asyncio.create_task(twice())
            for number in (2, 3):
                await turns()
                upstream.version = number
                await prices.invalidate("a", "b")
                upstream.let_go()
                upstream.hold()
            await turns()
            upstream.let_go()
            assert [seen(it) for it in await reading] == [(1, STALE), (2, STALE)]

    async def test_an_overtaken_load_that_fails_tells_callers_that_asked_before(
        self, ours: Prices, upstream: Upstream
    ) -> None:
        """Who came later has the trailing load, and no cooldown."""
        before = await upstream.holding(outcome(ours.get("a")))
        await ours.invalidate("a")
        after = asyncio.create_task(ours.get("a"))
        await turns()
        upstream.error = ConnectionError("down")
        gate, upstream.gate = upstream.gate, None
        assert gate is not None
        gate.set()
        await before
        upstream.error = None
        assert isinstance(await before, LoadFailed)
        assert version(await after) == 1

    async def test_an_overtaken_load_is_counted(
        self, here: Cache, ours: Prices, upstream: Upstream
    ) -> None:
        """E12: once for each load that was in vain."""
        task = await upstream.holding(ours.get("a"))
        await ours.invalidate("a")
        upstream.let_go()
        await task
        await idle(here)
        assert (await here.stats()).resources["price"].superseded == 1


class TestE6Memory:
    @pytest.mark.parametrize("step", ["read", "read:done"])
    async def test_nothing_enters_from_a_read_that_began_before(
        self,
        store: SteppedStore,
        clock: ManualClock,
        sleeper: Sleeper,
        upstream: Upstream,
        step: str,
    ) -> None:
        """What was read before an invalidation ended is not kept, and not served as fresh."""
        async with (
            cache_on(store, clock, sleeper) as writer,
            cache_on(store, clock, sleeper) as own,
        ):
            await declare(writer, upstream)("a")
            prices = declare(own, upstream, memory_for="1h")
            task = await store.holding(step, prices.get("a"))
            upstream.version = 2
            await prices.invalidate("a")
            store.let_go(step)
            assert seen(await task) == (2, FRESH)
            assert seen(await prices.get("a")) == (2, FRESH)

    async def test_nothing_enters_while_an_invalidation_is_under_way(
        self, here: Cache, upstream: Upstream, store: SteppedStore
    ) -> None:
        """The epoch moves before and after the store's step: memory answers nobody during it."""
        prices = declare(here, upstream, memory_for="1h")
        await prices("a")
        invalidation = await store.holding("invalidate", prices.invalidate("a"))
        assert prices.peek("a") is None
        during = await prices.get("a")
        upstream.version = 2
        store.let_go("invalidate")
        await invalidation
        assert version(during) == 1
        assert seen(await prices.get("a")) == (2, FRESH)

    @pytest.mark.parametrize("how", ["soft", "hard"])
    async def test_a_reader_during_it_gets_an_answer_whatever_the_loader_says(
        self, here: Cache, ours: Prices, store: SteppedStore, how: str
    ) -> None:
        """Served, or refused with the loader's reason; never a hang."""
        await ours("a")
        task = await store.holding("read:done", outcome(ours.get("a")))
        await wrong(here, ours, how)
        store.let_go("read:done")
        assert isinstance(await task, Answer)

    async def test_a_read_during_it_still_has_the_old_copy_if_loading_fails(
        self, ours: Prices, upstream: Upstream, store: SteppedStore
    ) -> None:
        """E2: EXPIRED, with the error, as for any other reader."""
        await ours("a")
        upstream.error = ConnectionError("down")
        task = await store.holding("read:done", outcome(ours.get("a")))
        await ours.invalidate("a")
        store.let_go("read:done")
        answer = await task
        assert isinstance(answer, Answer)
        assert seen(answer) == (1, EXPIRED)


class TestE6Live:
    async def test_a_load_is_live_until_its_key_is_invalidated(
        self, here: Cache, ours: Prices, theirs: Prices, upstream: Upstream, store: SteppedStore
    ) -> None:
        """By whatever process; the store is asked, and one that is away says nothing."""
        assert not await is_live(ours, "a")
        loading = await upstream.holding(ours.get_many(["a", "b"]))
        assert [await is_live(ours, key) for key in "abc"] == [True, True, False]
        store.broken = {"renew"}
        assert not await is_live(ours, "a")
        store.broken = set()
        await ours.invalidate("a")
        assert [await is_live(ours, key) for key in "ab"] == [False, True]
        await theirs.invalidate("b")
        assert not await is_live(ours, "b")
        upstream.let_go()
        await loading
        await idle(here)
        assert not await is_live(ours, "a")


class TestE6AnotherProcess:
    async def test_a_load_overtaken_by_another_process_is_stale_to_its_callers(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """The store's fence tells: STALE for who asked before, the trailing load for the others."""
        async with (
            cache_on(store, clock, sleeper) as here,
            cache_on(store, clock, sleeper) as there,
        ):
            prices, theirs = declare(here, upstream), declare(there, upstream)
            before = await upstream.holding(prices.get("a"))
            await theirs.invalidate("a")
            upstream.version = 2
            after = asyncio.create_task(prices.get("a"))
            await turns()
            upstream.let_go()
            assert seen(await before) == (1, STALE)
            assert seen(await after) == (2, FRESH)

    async def test_a_caller_that_asks_after_their_invalidation_gets_nothing_older(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Published, then invalidated by another process, before our answer has arrived."""
        other = store.inner
        async with cache_on(store, clock, sleeper) as here:
            prices = declare(here, upstream)
            before = await store.holding("publish:done", prices.get("a"))
            upstream.version = 2
            await other.invalidate("price", ["a"])
            after = asyncio.create_task(prices.get("a"))
            await turns()
            store.let_go("publish:done")
            await before
            assert seen(await after) == (2, FRESH)

    async def test_a_caller_that_asks_after_their_invalidation_is_not_told_the_copy_before_it(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """The denied lease came with a copy; since then it was invalidated."""
        async with (
            cache_on(store, clock, sleeper) as here,
            cache_on(store.inner, clock, sleeper) as there,
        ):
            prices, theirs = declare(here, upstream), declare(there, upstream)
            store.hold("acquire", "acquire:done")
            before = asyncio.create_task(prices.get("a"))
            await store.reached("acquire")
            await theirs("a")
            store.let_go("acquire")
            await store.reached("acquire:done")
            upstream.version = 2
            await theirs.invalidate("a")
            after = asyncio.create_task(prices.get("a"))
            await turns()
            store.let_go("acquire:done")
            await before
            assert seen(await after) == (2, FRESH)

    @pytest.mark.parametrize("how", WAYS)
    async def test_a_fallback_in_memory_does_not_vouch_for_the_copy_before_an_invalidation(
        self,
        here: Cache,
        ours: Prices,
        theirs: Prices,
        store: SteppedStore,
        upstream: Upstream,
        how: str,
    ) -> None:
        """E17: a read left the same copy there, marked, while the denied lease was on its way."""
        before = await store.holding("acquire", ours.get("a"))
        await theirs("a")
        store.hold("acquire:done")
        store.let_go("acquire")
        await store.reached("acquire:done")
        upstream.version = 2
        await wrong(here, ours, how)
        after = asyncio.create_task(ours.get("a"))
        await turns()
        store.let_go("acquire:done")
        await before
        assert seen(await after) == ((1, STALE) if how == "soft" else (2, FRESH))
        await idle(here)
        assert seen(await before) == (2, FRESH)
        assert seen(await ours.get("a")) == (2, FRESH)


class Unlisted(SteppedStore):
    """As DynamoDB: an entry that has only a lease is not listed."""

    async def walk(self, kind: str | None) -> AsyncIterator[list[StoredEntry]]:
        async for page in super().walk(kind):
            yield [entry for entry in page if entry.record.copy is not None]


class TestE6Everything:
    @pytest.mark.parametrize("how", ["clear", "all"])
    @pytest.mark.parametrize("what", ["load", "put"])
    async def test_invalidating_everything_reaches_what_the_store_does_not_list(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream, what: str, how: str
    ) -> None:
        """A load of this process that is about to publish, or a put on its way to the store."""
        store = Unlisted(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            work = prices.get("a") if what == "load" else prices.put("a", Price("a", 1))
            step = "publish" if what == "load" else "put"
            before: asyncio.Task[Any] = await store.holding(step, work)
            upstream.version = 2
            await (clear(prices) if how == "clear" else cache.invalidate_all())
            store.let_go(step)
            await before
            await idle(cache)
            assert seen(await prices.get("a")) == (2, FRESH)

    async def test_clear_forgets_what_only_memory_has(
        self, ours: Prices, store: SteppedStore
    ) -> None:
        """The store could not keep it."""
        store.broken = {"publish"}
        await ours.get("a")
        assert ours.peek("a") is not None
        await clear(ours)
        assert ours.peek("a") is None


class TestE6Deleted:
    async def test_a_caller_that_asks_after_a_deletion_is_not_told_what_was_published_before_it(
        self, store: SteppedStore, ours: Prices, upstream: Upstream
    ) -> None:
        """Published, then deleted by another process, before our answer has arrived."""
        before = await store.holding("publish:done", ours.get("a"))
        upstream.version = 2
        await store.inner.delete("price", ["a"])
        after = asyncio.create_task(ours.get("a"))
        await turns()
        store.let_go("publish:done")
        await before
        assert (await after).value == Price("a", 2)

    async def test_a_process_that_only_lost_the_lease_does_not_load_for_ever(
        self, here: Cache, clock: ManualClock
    ) -> None:
        """A load that always takes longer than its lease: a few rounds, then it is left."""
        calls = 0

        @here.batched("slow", fresh_for=60, lease_for=1)
        async def slow(keys: list[str]) -> dict[str, int]:
            nonlocal calls
            calls += 1
            clock.advance(5)
            return dict.fromkeys(keys, calls)

        assert (await slow.get("a")).verdict is Verdict.STALE
        await turns(500)
        assert calls <= 4


class Walk:
    """A seeded walk through reads, invalidations, loads and time on one or two caches."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = ManualClock(1_700_000_000.0)
        self.sleeper = Sleeper()
        self.upstream = Upstream()
        self.store = SteppedStore(MemoryStore(clock=self.clock))
        self.wrong_before = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.checked = 0

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)

    async def read(self, prices: Prices) -> None:
        """The check: FRESH is never older than what had been said when this reader asked."""
        least = self.wrong_before
        answer = await outcome(prices.get("a"))
        if isinstance(answer, Answer) and answer.verdict is FRESH:
            self.checked += 1
            assert answer.value.version >= least
        else:
            assert isinstance(answer, Answer | LoadFailed)

    async def invalidate(self, cache: Cache, prices: Prices) -> None:
        changed = self.upstream.version
        await wrong(cache, prices, self.dice.choice(WAYS[:1] + WAYS[2:]))
        self.wrong_before = max(self.wrong_before, changed)

    def step(self, cache: Cache, prices: Prices) -> None:
        match self.dice.choice(
            ["read"] * 6
            + ["invalidate", "change", "hold", "go", "go", "fail", "mend", "mend", "time", "wake"]
        ):
            case "read":
                self.spawn(self.read(prices))
            case "invalidate":
                self.upstream.version += 1
                self.spawn(self.invalidate(cache, prices))
            case "change":
                self.upstream.version += 1
            case "hold" if self.upstream.gate is None:
                self.upstream.hold()
            case "go" if self.upstream.gate is not None:
                self.upstream.let_go()
            case "fail":
                self.upstream.error = ConnectionError("down")
            case "mend":
                self.upstream.error = None
            case "time":
                self.clock.advance(self.dice.choice([0.05, 1, 40, 100, 5000]))
            case "wake":
                self.sleeper.wake()

    async def end(self) -> None:
        self.upstream.error = None
        if self.upstream.gate is not None:
            self.upstream.let_go()
        while pending := [task for task in self.tasks if not task.done()]:
            self.clock.advance(1)
            self.sleeper.wake()
            await turns(20)
            await asyncio.wait(pending, timeout=0)
        for task in self.tasks:
            task.result()


class TestE6Walk:
    @pytest.mark.parametrize("seed", range(30))
    @pytest.mark.parametrize("private", [True, False])
    async def test_nobody_is_served_as_fresh_what_was_wrong_when_they_asked(
        self, seed: int, *, private: bool
    ) -> None:
        """Whatever the order of reads, changes, loads, failures and time."""
        walk = Walk(seed)
        cache = (
            Cache("memory://", clock=walk.clock, sleep=walk.sleeper)
            if private
            else cache_on(walk.store, walk.clock, walk.sleeper)
        )
        async with cache:
            prices = declare(cache, walk.upstream, tags=lambda _: ["all"], jitter=0.2)
            for _ in range(250):
                walk.step(cache, prices)
                await turns(walk.dice.randrange(6))
            await walk.end()
        assert walk.checked > 0


def test_origins_are_words() -> None:
    """What an answer prints is what a log can be searched for."""
    assert [str(origin) for origin in Origin] == ["memory", "store", "loaded", "another"]
