"""E30: the exception of a loader is the `__cause__` of every error that comes of it.

In the process that saw it, also during the cooldown. Elsewhere, its text.
"""

import asyncio
import gc
import traceback
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

from stillfresh import Answer, Cache, LoadFailed, Verdict
from stillfresh.engine import loads
from stillfresh.engine.causes import KEPT_AFTER, MOST_EXCEPTIONS, MOST_KEYS, Causes
from stillfresh.stores.contract import Failure
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    clear,
    declare,
    idle,
    outcome,
    read_with,
    turns,
    until,
)
from tests.kit.held_store import SteppedStore, cache_on


class Down(Exception):
    """An exception that can be referred to weakly."""


class Body:
    """Something large that a loader holds while it runs."""


async def failing(prices: Prices, key: str = "a") -> LoadFailed:
    error = await outcome(prices(key))
    assert isinstance(error, LoadFailed)
    return error


def cause_of(answer: Answer[Any] | None) -> BaseException | None:
    assert answer is not None
    assert answer.error is not None
    return answer.error.__cause__


async def stale(prices: Prices, clock: ManualClock, key: str = "a") -> None:
    await prices(key)
    clock.advance(31)


class TestE30Cause:
    async def test_without_a_copy_every_error_of_the_cooldown_has_the_cause(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """By a call, by `get`, and in the answer of `get_many`; the loader is called once."""
        upstream.error = Down("no route")
        for _ in range(3):
            error = await failing(prices)
            assert error.__cause__ is upstream.error
        told = await outcome(prices.get("a"))
        assert isinstance(told, LoadFailed)
        assert told.__cause__ is upstream.error
        assert "not tried again for 1.0 s, since loading failed: Down: no route" in str(told)
        assert cause_of((await prices.get_many(["a"]))["a"]) is upstream.error
        assert len(upstream.calls) == 1

    async def test_an_old_copy_comes_with_the_cause(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """STALE and EXPIRED, during the cooldown and while the retry runs."""
        await stale(prices, clock)
        upstream.error = Down("no route")
        await prices.get("a")
        await idle(cache)
        assert cause_of(prices.peek("a")) is upstream.error
        assert cause_of(await prices.get("a")) is upstream.error
        assert cause_of((await prices.known(["a"]))["a"]) is upstream.error
        clock.advance(1)
        retry = await upstream.holding(prices.get("a"))
        assert cause_of(await prices.get("a")) is upstream.error
        upstream.let_go()
        assert cause_of(await retry) is upstream.error
        await idle(cache)
        clock.advance(70)
        for _ in range(2):
            answer = await prices.get("a")
            assert answer.verdict is Verdict.EXPIRED
            assert cause_of(answer) is upstream.error

    async def test_the_cause_is_that_of_the_last_failure(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Not that of the one before."""
        upstream.error = Down("first")
        await failing(prices)
        clock.advance(1)
        upstream.error = Down("second")
        await failing(prices)
        assert (await failing(prices)).__cause__ is upstream.error

    async def test_each_key_of_a_batch_has_its_own(self, cache: Cache) -> None:
        """A key mapped to an exception failed alone."""
        errors = {"a": Down("a"), "b": ValueError("b")}

        @cache.batched("price", fresh_for=30)
        async def prices(skus: list[str]) -> Mapping[str, Any]:
            return {sku: errors[sku] for sku in skus}

        for _ in range(2):
            found = await prices.get_many(["a", "b"])
            assert {key: cause_of(answer) for key, answer in found.items()} == errors

    async def test_another_process_tells_its_text(
        self, ours: Prices, theirs: Prices, upstream: Upstream
    ) -> None:
        """It has not seen the exception."""
        upstream.error = Down("no route")
        await failing(ours)
        error = await failing(theirs)
        assert error.__cause__ is None
        assert str(error).endswith("since loading failed: Down: no route")
        assert len(upstream.calls) == 1

    async def test_a_later_failure_of_another_process_is_not_explained_by_ours(
        self, ours: Prices, theirs: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """What this process saw was another exception."""
        upstream.error = Down("ours")
        await failing(ours)
        clock.advance(1)
        upstream.error = Down("theirs")
        await failing(theirs)
        error = await failing(ours)
        assert error.__cause__ is None
        assert str(error).endswith("Down: theirs")

    async def test_the_traceback_is_whole(self, prices: Prices, upstream: Upstream) -> None:
        """Remembering an exception changes nothing of it."""
        upstream.error = Down("no route")
        for _ in range(2):
            cause = (await failing(prices)).__cause__
            assert cause is not None
            frames = traceback.extract_tb(cause.__traceback__)
            assert frames[-1].name == "called"


class TestE30Bounds:
    """An exception holds its traceback, and that the frames of the load."""

    @pytest.fixture
    def held(self) -> list[weakref.ref[Any]]:
        return []

    @pytest.fixture
    def bodies(self, held: list[weakref.ref[Any]], cache: Cache) -> Any:
        """A function that fails, and holds something large when it does."""
        is_down = [True]

        @cache.cached("page", fresh_for=30, stale_for=60, error_for=3600)
        async def page(number: int) -> int:
            body = Body()
            if is_down[0]:
                error = Down(number)
                held.append(weakref.ref(error))
                held.append(weakref.ref(body))
                raise error
            return number

        page.is_down = is_down  # type: ignore[attr-defined]
        return page

    @staticmethod
    async def alive(held: list[weakref.ref[Any]]) -> int:
        """How many are still there, when all tasks of the load have ended."""
        await turns()
        gc.collect()
        return sum(ref() is not None for ref in held)

    async def test_a_remembered_exception_is_alive(self, bodies: Any, held: Any) -> None:
        """Or the tests below would prove nothing."""
        await outcome(bodies(1))
        assert await self.alive(held) == 2

    @pytest.mark.parametrize("how", ["load", "put", "delete", "close", "clear"])
    async def test_the_exception_is_dropped_with_the_failure(
        self, bodies: Any, held: Any, cache: Cache, clock: ManualClock, how: str
    ) -> None:
        """When a load succeeds, a value is put, or the entry goes."""
        await outcome(bodies(1))
        handle = bodies.of(1)
        match how:
            case "load":
                bodies.is_down[0] = False
                clock.advance(1)
                assert await bodies(1) == 1
            case "put":
                await handle.put(1)
            case "delete":
                await handle.delete()
            case "close":
                await cache.close()
            case _:
                await clear(bodies)
        assert await self.alive(held) == 0

    async def test_the_exception_beside_a_stale_copy_is_dropped_too(
        self, bodies: Any, held: Any, cache: Cache, clock: ManualClock
    ) -> None:
        """Nothing in memory refers to it after the next copy has come."""
        bodies.is_down[0] = False
        await bodies(1)
        clock.advance(31)
        bodies.is_down[0] = True
        await bodies.of(1).get()
        await idle(cache)
        await bodies.of(1).get()
        assert await self.alive(held) == 2
        bodies.is_down[0] = False
        clock.advance(1)
        await bodies.of(1).get()
        await idle(cache)
        assert await self.alive(held) == 0

    async def test_the_exception_is_dropped_a_minute_after_the_cooldown(
        self,
        bodies: Any,
        held: Any,
        cache: Cache,
        clock: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Although nobody asks for the key again; memory keeps the text with the old copy."""
        monkeypatch.setattr(loads, "FORGET_EVERY", 0.001)
        bodies.is_down[0] = False
        await bodies(1)
        clock.advance(31)
        bodies.is_down[0] = True
        await bodies.of(1).get()
        await idle(cache)
        await bodies.of(1).get()
        assert await self.alive(held) == 2
        clock.advance(1 + KEPT_AFTER)
        while await self.alive(held):
            await asyncio.sleep(0.001)
        left = bodies.of(1).peek()
        assert left is not None
        assert "Down: 1" in str(left.error)

    async def test_few_exceptions_are_remembered(self, bodies: Any, held: Any) -> None:
        """The last ones; the others are told by their text."""
        for number in range(MOST_EXCEPTIONS + 20):
            await outcome(bodies(number))
        assert await self.alive(held) == 2 * MOST_EXCEPTIONS
        first = await outcome(bodies(0))
        assert isinstance(first, LoadFailed)
        assert (first.__cause__, str(first)[-7:]) == (None, "Down: 0")
        last = await outcome(bodies(MOST_EXCEPTIONS + 19))
        assert isinstance(last, LoadFailed)
        assert isinstance(last.__cause__, Down)

    async def test_one_exception_of_many_keys_is_one(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """A call that failed for 500 keys is remembered for all of them."""
        prices = declare(cache, upstream, max_batch=500)
        upstream.error = Down("no route")
        keys = [f"sku-{number}" for number in range(500)]
        for _ in range(2):
            found = await prices.get_many(keys)
            assert {cause_of(answer) for answer in found.values()} == {upstream.error}
        assert len(upstream.calls) == 1

    async def test_a_callers_own_loader_is_not_remembered(self, cache: Cache) -> None:
        """Its exception may hold a response that was meant for this caller alone."""

        @cache.batched("page", fresh_for=30, max_batch=1)
        async def pages(numbers: list[int]) -> dict[int, int]:
            return {number: number for number in numbers}

        async def mine() -> int:
            raise Down("for my eyes only")

        first = await read_with(pages, 1, mine)
        second = await read_with(pages, 1, mine)
        assert isinstance(first, LoadFailed)
        assert isinstance(second, LoadFailed)
        assert isinstance(first.__cause__, Down)
        assert second.__cause__ is None

    async def test_an_entry_that_leaves_memory_is_told_as_before(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """What memory holds of the copy has nothing to do with the exception."""
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream, max_entries=1)
            await prices.get_many(["a", "b"])
            clock.advance(31)
            upstream.error = Down("no route")
            await prices.get_many(["a", "b"])
            await idle(cache)
            found = await prices.get_many(["a", "b"])
            assert {cause_of(answer) for answer in found.values()} == {upstream.error}


class TestE30Remembered:
    """The bookkeeping alone."""

    def error(self, cause: BaseException | None = None) -> LoadFailed:
        error = LoadFailed("x")
        error.__cause__ = cause
        return error

    def test_only_the_same_failure_is_explained(self) -> None:
        """By its count and its time, which a store may round to milliseconds."""
        known: Causes[str] = Causes()
        failure, error = Failure(2, 10.12345, "x"), self.error(Down())
        known.note("a", failure, error)
        assert known.error_of("a", Failure(2, 10.123, "x")) is error
        assert known.error_of("a", Failure(3, 10.123, "x")) is None
        assert known.error_of("a", Failure(2, 10.2, "x")) is None
        assert known.error_of("b", failure) is None

    def test_the_number_of_keys_with_a_cause_is_bounded(self) -> None:
        """Also if all failed with one exception."""
        known: Causes[str] = Causes()
        cause = Down()
        failure = Failure(1, 10, "x")
        for number in range(MOST_KEYS + 3):
            known.note(f"{number}", failure, self.error(cause))
        assert len(known.seen) == MOST_KEYS
        assert [known.error_of(key, failure) for key in ("0", "1", "2")] == [None] * 3
        assert known.error_of("3", failure) is not None

    def test_a_key_that_fails_again_is_the_newest(self) -> None:
        """The oldest goes first."""
        known: Causes[str] = Causes()
        for number in range(MOST_EXCEPTIONS):
            known.note(f"{number}", Failure(1, 10, "x"), self.error(Down()))
        known.note("0", Failure(2, 10, "x"), self.error(Down()))
        known.note("new", Failure(1, 10, "x"), self.error(Down()))
        assert known.error_of("0", Failure(2, 10, "x")) is not None
        assert known.error_of("1", Failure(1, 10, "x")) is None
        assert len(known.seen) == MOST_EXCEPTIONS

    def test_old_causes_are_forgotten(self) -> None:
        """A minute after the end of its cooldown, however long that was."""
        known: Causes[str] = Causes()
        first = Failure(1, 100, "x")
        second = Failure(1, 3700, "x")
        known.note("a", first, self.error(Down()))
        known.note("b", second, self.error(Down()))
        known.forget_old(159.9)
        assert known.error_of("a", first) is not None
        known.forget_old(160)
        assert known.error_of("a", first) is None
        assert known.error_of("b", second) is not None
        known.forget("b")
        known.forget("b")
        assert len(known.seen) == 0
        known.note("c", Failure(1, 100, "x"), self.error(Down()))
        known.clear()
        assert len(known.seen) == 0


class TestE30Watch:
    async def test_a_watch_is_told_with_the_cause(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """In the answer that is left."""
        failures: list[Answer[Price]] = []
        await stale(prices, clock)
        upstream.error = Down("no route")
        with prices.watch("a", fail=lambda update: failures.append(update.answer)):
            await until(lambda: bool(failures))
        assert cause_of(failures[0]) is upstream.error
