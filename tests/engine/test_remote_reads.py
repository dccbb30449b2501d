"""E4, E9: a store that is asked over a network is asked once for a turn of the loop."""

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from stillfresh import Cache, NotOpen, Origin, Verdict
from stillfresh.engine.read import Question
from stillfresh.stores.contract import Copy, Generations, Put, Record
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Sleeper, Upstream, declare, outcome, turns, version
from tests.kit.held_store import SteppedStore, cache_on


@pytest.fixture
def store(clock: ManualClock) -> SteppedStore:
    return SteppedStore(MemoryStore(clock=clock))


@pytest.fixture
async def remote(store: SteppedStore, clock: ManualClock, sleeper: Sleeper) -> AsyncIterator[Cache]:
    async with cache_on(store, clock, sleeper) as cache:
        yield cache


@pytest.fixture
def goods(remote: Cache, upstream: Upstream) -> Prices:
    return declare(remote, upstream)


class TestE9Question:
    def test_a_value_is_left_out_only_if_all_who_ask_have_it(self) -> None:
        """Each id is asked for once; callers that know different copies are sent the value."""
        question = Question()
        question.add(["a", "b"], {"a": "g1", "b": "g1"})
        question.add(["b", "a", "c"], {"a": "g1", "b": "g2", "c": "g1"})
        assert list(question.ids) == ["a", "b", "c"]
        assert question.known == {"a": "g1", "c": "g1"}
        question.add(["c", "b"], {"b": "g1"})
        assert question.known == {"a": "g1"}
        question.add(["d"], {})
        question.add(["d"], {"d": "g1"})
        assert question.known == {"a": "g1"}


class TestE4RemoteReads:
    async def test_reads_of_one_turn_ask_the_store_once(
        self, goods: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """By whichever task, of whichever keys: one read, one round of leases, one publication."""
        answers = await asyncio.gather(*(goods(key) for key in "abca"), goods.get_many(["d", "a"]))
        assert len(answers) == 5
        assert [store.count(step) for step in ("read", "acquire", "publish")] == [1, 1, 1]
        assert upstream.calls == [["a", "b", "c", "d"]]

    async def test_reads_of_another_turn_ask_the_store_again(
        self, goods: Prices, store: SteppedStore
    ) -> None:
        """E9: without `memory_for` each read asks; what was asked before it came is not enough."""
        first = await store.holding("read", goods("a"))
        second = asyncio.create_task(goods("a"))
        await turns()
        assert store.count("read") == 2
        store.let_go("read")
        assert version(await goods.get("a")) == 1
        await asyncio.gather(first, second)

    async def test_a_failure_that_no_caller_waits_for_is_not_reported(
        self, goods: Prices, store: SteppedStore
    ) -> None:
        """All callers were cancelled before the store refused."""
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: complaints.append(it))
        await goods("b")
        store.broken = {"read"}
        reading = await store.holding("read", goods.get("a"))
        reading.cancel()
        await asyncio.wait([reading])
        del reading
        store.let_go("read")
        await turns()
        gc.collect()
        assert complaints == []

    async def test_a_caller_that_stops_waiting_takes_nobody_along(
        self, goods: Prices, store: SteppedStore
    ) -> None:
        """Not even the one who asked first."""
        store.hold("read")
        tasks = [asyncio.create_task(goods(key)) for key in "ab"]
        await store.reached("read")
        tasks[0].cancel()
        await turns()
        store.let_go("read")
        assert await tasks[1] == Price("b", 1)
        assert tasks[0].cancelled()

    async def test_a_store_that_fails_fails_for_all_callers_of_the_turn(
        self, goods: Prices, store: SteppedStore
    ) -> None:
        """S5: each falls back to memory or the loader."""
        store.broken = {"read"}
        answers = await asyncio.gather(*(goods(key) for key in "ab"))
        assert answers == [Price("a", 1), Price("b", 1)]
        assert store.count("read") == 1

    async def test_the_value_is_left_out_only_if_all_have_it(
        self, goods: Prices, store: SteppedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One of two tasks lost its entry in between: it is sent the value."""
        known: list[Mapping[str, str] | None] = []
        read = store.read

        async def noted(
            kind: str, ids: Sequence[str], has: Generations = None, lag: float = 0.0
        ) -> dict[str, Record]:
            known.append(has)
            return await read(kind, ids, has, lag)

        monkeypatch.setattr(store, "read", noted)
        await goods("a")

        async def after_a_drop() -> Price:
            goods.core.memory.drop("a")
            return await goods("a")

        one, other = await asyncio.gather(goods("a"), goods("a"))
        assert one == other == Price("a", 1)
        one, other = await asyncio.gather(goods("a"), after_a_drop())
        assert one == other == Price("a", 1)
        assert [len(has or ()) for has in known] == [0, 1, 0]

    async def test_a_copy_that_the_store_still_has_keeps_its_answer(
        self, goods: Prices, store: SteppedStore, clock: ManualClock
    ) -> None:
        """E9, S14: it is asked for, and neither decoded nor judged a second time."""
        first = await goods.get("a")
        clock.advance(1)
        second = await goods.get("a")
        third = await goods.get("a")
        assert version(first) == version(second) == 1
        assert second is third
        assert second.origin is Origin.STORE
        assert store.count("read") == 3
        assert (await goods.stats()).reads_by_origin[Origin.STORE][Verdict.FRESH] == 2

    @pytest.mark.parametrize("change", ["put", "invalidate", "delete", "age"])
    async def test_another_copy_is_not_asked_for_twice(
        self, change: str, goods: Prices, store: SteppedStore, clock: ManualClock
    ) -> None:
        """What the first question brought is enough to serve, or to load."""
        await goods.get("a")
        copy = goods.core.memory.entries["a"].copy
        if change == "put":
            value = goods.core.spec.codec.encode(Price("a", 9))
            new = Copy("0" * 32, clock(), copy.policy, value)
            await store.inner.put("price", {"a": Put(new, ())})
        elif change == "age":
            clock.advance(copy.policy.fresh_for)
        else:
            await getattr(store.inner, change)("price", ["a"])
        before = store.count("read")
        answer = await goods.get("a")
        assert version(answer) == (9 if change == "put" else 1)
        is_loaded = change in {"invalidate", "delete"}
        assert answer.origin is (Origin.LOADED if is_loaded else Origin.STORE)
        assert answer.verdict is (Verdict.STALE if change == "age" else Verdict.FRESH)
        assert store.count("read") == before + 1

    async def test_a_store_that_fails_is_not_asked_again_for_a_copy_in_memory(
        self, goods: Prices, store: SteppedStore
    ) -> None:
        """E29: memory answers, STALE at best."""
        await goods.get("a")
        store.broken = {"read"}
        answer = await goods.get("a")
        assert (answer.verdict, answer.unverified) == (Verdict.STALE, True)
        assert store.count("read") == 2
        assert (await goods.stats()).store_errors == 1

    async def test_closing_ends_the_waiting_for_the_store(
        self, goods: Prices, remote: Cache, store: SteppedStore
    ) -> None:
        """They are told that the cache is closed; nobody is cancelled for it."""
        await goods("a")
        store.hold("read")
        waiting = [asyncio.create_task(outcome(goods.get(key))) for key in "ab"]
        await store.reached("read")
        await remote.close()
        assert [type(each) for each in await asyncio.gather(*waiting)] == [NotOpen, NotOpen]


class TestE6RemoteReads:
    async def test_an_invalidation_holds_for_a_read_that_the_store_fails_to_answer(
        self, goods: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """What memory had when the read began is not brought back for who comes later."""
        await goods("a")
        early = await store.holding("read", goods.get("a"))
        gate = store.gates.pop("read")
        upstream.version = 2
        await goods.invalidate("a")
        behind = await upstream.holding(goods.get("a"))
        store.broken = {"read"}
        gate.set()
        await turns()
        late = asyncio.create_task(goods.get("a"))
        await turns()
        upstream.let_go()
        answers = await asyncio.gather(early, behind, late)
        assert version(answers[2]) == 2


class TestE9RemoteReads:
    async def test_memory_for_counts_from_the_question(
        self, remote: Cache, store: SteppedStore, upstream: Upstream, clock: ManualClock
    ) -> None:
        """What others invalidate while a publication is answered slowly is missed no longer."""
        goods = declare(remote, upstream, memory_for=20)
        loading = await store.holding("publish:done", goods("a"))
        upstream.version = 2
        await store.inner.invalidate("price", ["a"])
        clock.advance(12)
        store.let_go("publish:done")
        assert await loading == Price("a", 1)
        clock.advance(12)
        assert version(await goods.get("a")) == 2

    async def test_memory_for_counts_from_the_question_for_what_another_process_published(
        self, remote: Cache, store: SteppedStore, upstream: Upstream, clock: ManualClock
    ) -> None:
        """The lease was denied with the copy there is, and the answer took long."""
        goods = declare(remote, upstream, memory_for=20)
        store.hold("acquire", "acquire:done")
        asking = asyncio.create_task(goods("a"))
        await store.reached("acquire")
        async with Cache(store.inner, clock=clock) as other:
            await declare(other, upstream)("a")
            store.let_go("acquire")
            await store.reached("acquire:done")
            upstream.version = 2
            await store.inner.invalidate("price", ["a"])
            clock.advance(12)
            store.let_go("acquire:done")
            assert await asking == Price("a", 1)
            clock.advance(12)
            assert version(await goods.get("a")) == 2
