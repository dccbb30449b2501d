"""A value made from the copy at hand, put only if that copy is still the one in the store: E17."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from stillfresh import (
    DELETE,
    LEAVE,
    Amended,
    Answer,
    Cache,
    ConfigError,
    Loaded,
    Policy,
    Resource,
    StoreError,
    Verdict,
)
from stillfresh.engine.put import InTurn
from stillfresh.stores.contract import (
    Copy,
    LateTags,
    Lease,
    Put,
    PutOutcome,
    PutResult,
    Superseded,
)
from stillfresh.stores.memory import MemoryStore
from stillfresh.tasks import Ending
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Sleeper, Upstream, declare, outcome, turns, until, version
from tests.kit.held_store import SteppedStore, cache_on, lease_of
from tests.kit.processes import Process
from tests.kit.servers.aws import Aws
from tests.kit.servers.valkey import Server
from tests.kit.workers.counter import count, counters

FRESH, STALE, EXPIRED = Verdict.FRESH, Verdict.STALE, Verdict.EXPIRED


def newer(answer: Answer[Price] | None) -> Price:
    """One version more."""
    return Price("a", 1 if answer is None else version(answer) + 1)


@pytest.fixture
def store(clock: ManualClock) -> SteppedStore:
    return SteppedStore(MemoryStore(clock=clock))


@pytest.fixture
async def here(store: SteppedStore, clock: ManualClock) -> AsyncIterator[Cache]:
    """On a store whose steps take time; pauses pass at once."""

    async def no_pause(_: float) -> None:
        await asyncio.sleep(0)

    async with Cache(store, clock=clock, sleep=no_pause, dice=lambda: 0.0) as cache:
        yield cache


@pytest.fixture
def goods(here: Cache, upstream: Upstream) -> Resource[str, Price]:
    return declare(here, upstream)


@pytest.fixture
async def elsewhere(
    store: SteppedStore,
    clock: ManualClock,
    sleeper: Sleeper,
    upstream: Upstream,
    goods: Resource[str, Price],
) -> AsyncIterator[Resource[str, Price]]:
    """Another process on the same store."""
    async with cache_on(store.inner, clock, sleeper) as cache:
        yield declare(cache, upstream)


class TestE17Update:
    @pytest.mark.parametrize("there", ["nothing", "a marked copy", "a copy"])
    async def test_a_value_made_before_an_invalidation_is_made_again(
        self, goods: Resource[str, Price], there: str
    ) -> None:
        """E6: `change` may have asked the database before it changed."""
        if there != "nothing":
            await goods("a")
        if there == "a marked copy":
            await goods.invalidate("a")
        database, asked, gate = 7, asyncio.Event(), asyncio.Event()

        async def change(_: Answer[Price] | None) -> Price:
            found = database
            asked.set()
            await gate.wait()
            return Price("a", found)

        updating = asyncio.create_task(goods.update("a", change))
        await asked.wait()
        database = 8
        await goods.invalidate("a")
        gate.set()
        await updating
        assert version(await goods.get("a")) == 8

    async def test_a_value_is_made_again_if_its_own_tag_was_invalidated(
        self, here: Cache, goods: Resource[str, Price], store: SteppedStore
    ) -> None:
        """I26: a tag that came with the value, which the store does not know yet."""
        database = 7

        def change(_: Answer[Price] | None) -> Loaded[Price]:
            return Loaded(Price("a", database), tags=["late"])

        updating = await store.holding("put", goods.update("a", change))
        database = 8
        await here.invalidate_tag("late")
        store.let_go("put")
        await updating
        assert version(await goods.get("a")) == 8

    async def test_a_value_made_before_the_cache_was_opened_again_is_made_again(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """E13: closing does not wait for it longer than `grace`; what comes then is not missed."""
        database, asked, gate = 7, asyncio.Event(), asyncio.Event()

        async def change(_: Answer[Price] | None) -> Price:
            found = database
            asked.set()
            await gate.wait()
            return Price("a", found)

        async with cache_on(store, clock, sleeper, grace=0) as cache:
            goods = declare(cache, upstream)
            updating = asyncio.create_task(goods.update("a", change))
            await asked.wait()
            await cache.close()
            await cache.open()
            database = 8
            await goods.invalidate("a")
            gate.set()
            await until(lambda: sleeper.asked != [] or updating.done())
            sleeper.wake()
            await updating
            assert version(await goods.get("a")) == 8

    @pytest.mark.parametrize("step", ["read:done", "put"])
    async def test_a_caller_that_gave_up_changes_nothing(
        self, goods: Resource[str, Price], store: SteppedStore, step: str
    ) -> None:
        """What it does next, here or elsewhere, comes later."""
        await goods("a")
        updating = await store.holding(step, goods.update("a", newer))
        updating.cancel()
        await asyncio.wait([updating])
        store.let_go(step)
        await turns()
        assert version(await goods.get("a")) == 1
        assert (await goods.explain("a")).held_until is None

    async def test_who_is_cancelled_in_line_holds_up_nobody(self) -> None:
        """As a closing cache does: the one behind has its turn, and nothing is left."""
        line, done = dict[str, Ending](), list[str]()

        async def change(name: str) -> None:
            async with InTurn(line, ["a", name]):
                done.append(name)

        async with InTurn(line, ["a"]):
            second, third = (asyncio.create_task(change(name)) for name in ("b", "c"))
            await turns(3)
            second.cancel()
            await asyncio.wait([second])
        await asyncio.wait_for(third, 5)
        assert (second.cancelled(), done, line) == (True, ["c"], {})

    @pytest.mark.parametrize("step", ["read:done", "put", "put:done"])
    async def test_a_caller_that_gave_up_can_invalidate(
        self, goods: Resource[str, Price], store: SteppedStore, upstream: Upstream, step: str
    ) -> None:
        """S8: nothing is published after it, and the lease is free."""
        await goods("a")
        upstream.version = 5
        updating = await store.holding(step, goods.update("a", newer))
        updating.cancel()
        await asyncio.wait([updating])
        await goods.invalidate("a")
        store.let_go(step)
        await turns()
        assert version(await goods.get("a")) == 5
        assert (await goods.explain("a")).held_until is None

    async def test_an_update_is_made_from_the_copy_at_hand(
        self, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """From nothing, and then from what it made; the next read has it, without a load."""
        answers = [await prices.update("a", newer) for _ in range(3)]
        assert [version(it) for it in answers if it is not None] == [1, 2, 3]
        assert version(await prices.get("a")) == 3
        assert upstream.calls == []

    async def test_a_coroutine_function_may_make_the_update(
        self, prices: Resource[str, Price]
    ) -> None:
        """For a change that has to ask somebody."""

        async def asked(answer: Answer[Price] | None) -> Price:
            await asyncio.sleep(0)
            return newer(answer)

        await prices.of("a").update(asked)
        assert version(await prices.get("a")) == 1

    async def test_an_update_can_leave_the_copy_as_it_is(
        self, goods: Resource[str, Price], store: SteppedStore
    ) -> None:
        """And takes no lease for that, so a load under way is not disturbed."""
        await goods.put("a", Price("a", 7))
        store.calls.clear()
        answer = await goods.update("a", lambda _: LEAVE)
        assert answer is not None
        assert (version(answer), store.calls) == (7, ["read"])
        assert await goods.update("b", lambda _: LEAVE) is None

    async def test_a_copy_that_cannot_be_read_is_no_answer(
        self, goods: Resource[str, Price], store: SteppedStore, clock: ManualClock
    ) -> None:
        """E11: the change is given None."""
        lease, seen = await lease_of(store.inner, "a"), list[object]()
        copy = Copy(lease.token, clock(), Policy(60), b"\xc1")
        assert await store.inner.publish("price", {"a": (lease, copy)}) == set()

        def change(answer: Answer[Price] | None) -> Price:
            seen.append(answer)
            return newer(answer)

        assert await goods.update("a", change) is not None
        assert seen == [None]

    async def test_an_update_can_delete_the_copy(
        self, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """The next change finds nothing, and the next read loads."""
        await prices.put("a", Price("a", 7))
        assert await prices.update("a", lambda _: DELETE) is None
        assert await prices.update("a", lambda _: LEAVE) is None
        assert version(await prices.get("a")) == 1
        assert upstream.calls == [["a"]]

    async def test_a_plain_value_is_as_a_put(
        self, prices: Resource[str, Price], clock: ManualClock
    ) -> None:
        """New, on the resource's terms; a `Loaded` has its own."""
        await prices.put("a", Price("a", 1))
        clock.advance(20)
        await prices.update("a", newer)
        await prices.update("b", lambda answer: Loaded(newer(answer), fresh_for=5, stale_for=0))
        clock.advance(20)
        assert [(await prices.explain(key)).verdict for key in "ab"] == [FRESH, EXPIRED]

    async def test_an_amended_value_keeps_age_and_terms(
        self, prices: Resource[str, Price], clock: ManualClock
    ) -> None:
        """As the counter of a period does."""
        await prices.put("a", Price("a", 1), fresh_for=25, stale_for=0, error_for=1000)
        clock.advance(20)
        amended = await prices.update("a", lambda answer: Amended(newer(answer)))
        assert amended is not None
        assert (version(amended), amended.age, amended.verdict) == (2, 20, FRESH)
        clock.advance(5)
        assert (await prices.explain("a")).verdict is EXPIRED

    async def test_an_amended_value_of_nothing_is_as_a_put(
        self, prices: Resource[str, Price]
    ) -> None:
        """There is no age to keep."""
        answer = await prices.update("a", lambda _: Amended(Price("a", 3)))
        assert answer is not None
        assert (version(answer), answer.verdict, answer.age) == (3, FRESH, 0)

    async def test_an_invalidated_copy_cannot_be_made_fresh_by_amending_it(
        self, prices: Resource[str, Price], clock: ManualClock
    ) -> None:
        """E6: the change is told; what it returns all the same is a value like any other."""
        await prices.put("a", Price("a", 1))
        clock.advance(20)
        await prices.invalidate("a")
        seen: list[Verdict] = []

        def change(answer: Answer[Price] | None) -> Amended[Price]:
            assert answer is not None
            seen.append(answer.verdict)
            return Amended(newer(answer))

        amended = await prices.update("a", change)
        assert amended is not None
        assert (seen, amended.age, amended.verdict) == ([EXPIRED], 0, FRESH)

    async def test_what_the_change_raises_goes_to_its_caller(
        self, goods: Resource[str, Price], store: SteppedStore
    ) -> None:
        """And a value that cannot be stored is the caller's mistake; no lease is left behind."""
        assert isinstance(await outcome(goods.update("a", lambda _: 1 // 0)), ZeroDivisionError)
        assert isinstance(await outcome(goods.update("a", lambda _: "seven")), ConfigError)
        await lease_of(store.inner, "a")

    async def test_a_timeout_of_the_change_itself_is_left_as_it_is(
        self, goods: Resource[str, Price]
    ) -> None:
        """It says nothing about `load_timeout`."""

        async def change(_: Answer[Price] | None) -> Price:
            raise TimeoutError("the upstream took too long")

        assert str(await outcome(goods.update("a", change))) == "the upstream took too long"

    async def test_a_change_that_waits_for_itself_is_ended(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """E3: within `load_timeout`, with an error that says why; then the key works as always."""
        prices = declare(cache, upstream, load_timeout=0.05)

        async def change(answer: Answer[Price] | None) -> Price:
            await prices.put("a", newer(answer))
            return newer(answer)

        async with asyncio.timeout(5):
            error = await outcome(prices.update("a", change))
            assert isinstance(error, TimeoutError)
            assert "longer than 0.05 s (load_timeout); it may not put its own key" in str(error)
            there = await prices.update("a", newer)
        assert there is not None

    async def test_a_store_that_is_away_is_an_error(
        self, goods: Resource[str, Price], store: SteppedStore
    ) -> None:
        """At every step: nobody knows what the copy is, or whether the new one was stored."""
        for step in ("read", "put"):
            store.broken = {step}
            assert isinstance(await outcome(goods.update("a", newer)), StoreError)


class TestE17UpdateLaw:
    @pytest.mark.parametrize("step", ["read:done", "put"])
    @pytest.mark.parametrize("between", ["put", "invalidate", "delete"])
    async def test_a_change_that_comes_during_an_update_is_not_lost(
        self,
        goods: Resource[str, Price],
        elsewhere: Resource[str, Price],
        store: SteppedStore,
        step: str,
        between: str,
    ) -> None:
        """Whenever another process changes the copy, the value is made again from what is there."""
        await goods.put("a", Price("a", 10))
        store.hold(step)
        seen: list[object] = []

        def change(answer: Answer[Price] | None) -> Price:
            seen.append(answer and (version(answer), answer.verdict))
            return newer(answer)

        updating = asyncio.create_task(goods.update("a", change))
        await store.reached(step)
        if between == "put":
            await elsewhere.put("a", Price("a", 20))
        elif between == "invalidate":
            await elsewhere.invalidate("a")
        else:
            await elsewhere.delete("a")
        store.let_go(step)
        await updating
        assert seen[0] == (10, FRESH)
        assert seen[-1] == {"put": (20, FRESH), "invalidate": (10, EXPIRED)}.get(between)

    async def test_an_update_supersedes_a_load_under_way(
        self, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """As by a put: what it loaded is older than the update, which does not wait for it."""
        upstream.hold()
        reading = asyncio.create_task(prices.get("a"))
        await upstream.asked.wait()
        await prices.update("a", lambda _: Price("a", 7))
        upstream.let_go()
        await reading
        assert version(await prices.get("a")) == 7
        assert upstream.calls == [["a"]]

    async def test_an_update_overtakes_another_process_that_loads(
        self, goods: Resource[str, Price], store: SteppedStore
    ) -> None:
        """E35: as by a put, in one step; a dead holder costs nothing."""
        lease = await lease_of(store.inner, "a")
        assert await goods.update("a", newer) is not None
        assert store.count("put") == 1
        assert await store.inner.renew("price", [lease], 5) == {"a"}

    async def test_a_key_that_others_change_all_the_time_is_an_error(
        self,
        goods: Resource[str, Price],
        elsewhere: Resource[str, Price],
        store: SteppedStore,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Said after a bounded number of attempts."""
        monkeypatch.setattr("stillfresh.engine.update.UPDATES", 5)

        async def disturbed(answer: Answer[Price] | None) -> Price:
            await elsewhere.put("a", newer(answer))
            return newer(answer)

        with pytest.raises(StoreError, match="other changes keep coming first; try again"):
            await goods.update("a", disturbed)
        assert store.count("put") == 5


class TestS2Unsure:
    """The answer to a step was lost, and another copy is stored by now."""

    async def test_an_update_whose_answer_was_lost_is_not_made_again(
        self, here: Cache, goods: Resource[str, Price], store: SteppedStore
    ) -> None:
        """It would be applied twice; the caller learns that nobody knows."""
        seen: list[object] = []

        def change(answer: Answer[Price] | None) -> Price:
            seen.append(answer)
            return newer(answer)

        store.broken = {"put"}
        with pytest.raises(StoreError, match="cannot put"):
            await goods.update("a", change)
        assert seen == [None]
        assert here.counts().resources["price"].store_errors == 1

    async def test_an_update_that_was_stored_and_replaced_is_not_made_again(
        self, goods: Resource[str, Price], store: SteppedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S8: its effect is in what replaced it; memory asks the store for that."""
        put_inside = store.inner.put

        async def put(kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
            await put_inside(kind, puts)
            later = {id_: Put(replace(it.copy, generation="later")) for id_, it in puts.items()}
            await put_inside(kind, later)
            return dict.fromkeys(puts, PutResult(PutOutcome.REPLACED))

        monkeypatch.setattr(store.inner, "put", put)
        answer = await goods.update("a", newer)
        assert answer is not None
        assert version(answer) == 1
        assert goods.peek("a") is None

    async def test_a_load_whose_answer_was_lost_counts_as_superseded(
        self,
        here: Cache,
        goods: Resource[str, Price],
        store: SteppedStore,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """For a load it does not matter: something newer is stored."""

        async def publish(
            kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
        ) -> set[str]:
            assert await store.inner.publish(kind, copies, tags) == set()
            for id_, (lease, copy) in copies.items():
                theirs = await lease_of(store.inner, id_, seen=lease.token)
                newest = replace(copy, generation=theirs.token)
                await store.inner.publish(kind, {id_: (theirs, newest)})
            return Superseded(copies, copies)

        monkeypatch.setattr(store, "publish", publish)
        assert version(await goods.get("b")) == 1
        assert here.counts().resources["price"].superseded == 1


class TestE17Counters:
    """Nothing is lost, however many add to one number at once."""

    async def test_no_increment_of_many_tasks_and_caches_is_lost(self, url: str) -> None:
        """Sixteen tasks; on a store that can be shared, in four caches."""
        shared = 1 if url == "memory://" else 4
        async with AsyncExitStack() as stack:
            caches = [await stack.enter_async_context(Cache(url)) for _ in range(shared)]
            numbers = [counters(it) for it in caches]
            await asyncio.gather(*(count(numbers[at % shared], 5) for at in range(16)))
            assert (await numbers[0].get("hits")).value == 80

    async def test_no_increment_is_lost_on_dynamodb(self, aws: Aws) -> None:
        """The same, over HTTP."""
        url = aws.address(aws.new_table())
        async with Cache(url) as here, Cache(url) as there:
            numbers = [counters(here), counters(there)]
            await asyncio.gather(*(count(numbers[at % 2], 2) for at in range(16)))
            assert (await numbers[0].get("hits")).value == 32

    @pytest.mark.parametrize("store", ["sqlite", "redis"])
    async def test_no_increment_of_real_processes_is_lost(
        self, store: str, tmp_path: Path, valkey: Server
    ) -> None:
        """Four processes of four tasks each."""
        url = f"sqlite:///{tmp_path}/cache.db" if store == "sqlite" else valkey.url(timeout="10s")
        with ExitStack() as stack:
            processes = [Process(stack, "counter", url, 4, 5) for _ in range(4)]
            for process in processes:
                process.go()
            assert [process.line() for process in processes] == ["done"] * 4
        async with Cache(url) as cache:
            assert (await counters(cache).get("hits")).value == 80
