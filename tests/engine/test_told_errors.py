"""E31: the error of a failed load is told with the old copy until a load succeeds."""

import asyncio
from collections.abc import Mapping

import pytest

from stillfresh import Answer, Cache, LoadFailed, Verdict
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    idle,
    outcome,
    version,
)
from tests.kit.held_store import SteppedStore, cache_on

DOWN = "ConnectionError: down"


async def stale_after_a_failure(
    prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
) -> None:
    """The copy is stale, its refresh has failed, and the key cools down for one second."""
    await prices("a")
    clock.advance(31)
    upstream.error = ConnectionError("down")
    await prices.get("a")
    await idle(cache)


def told(answer: Answer[Price]) -> tuple[Verdict, bool]:
    return answer.verdict, answer.error is not None and DOWN in str(answer.error)


STALE_WITH_ERROR = (Verdict.STALE, True)


class TestE31TheErrorStays:
    async def test_the_error_is_told_while_a_retry_is_under_way(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """By the read that begins the retry, and by every read until the retry has ended."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        assert told(await prices.get("a")) == STALE_WITH_ERROR
        clock.advance(1)
        first = await (await upstream.holding(prices.get("a")))
        assert told(first) == STALE_WITH_ERROR
        assert [told(await prices.get("a")) for _ in range(3)] == [STALE_WITH_ERROR] * 3
        assert told((await prices.get_many(["a"]))["a"]) == STALE_WITH_ERROR
        assert told((await prices.known(["a"]))["a"]) == STALE_WITH_ERROR
        upstream.let_go()
        await idle(cache)
        assert told(await prices.get("a")) == STALE_WITH_ERROR
        assert len(upstream.calls) == 3

    async def test_every_read_of_an_outage_tells_the_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """In a minute with five retries, none of the reads leaves it out."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        answers = []
        for _ in range(100):
            answers.append(told(await prices.get("a")))
            await idle(cache)
            clock.advance(0.5)
        assert answers == [STALE_WITH_ERROR] * 100
        assert len(upstream.calls) == 7

    async def test_the_error_of_a_retry_says_no_pause(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """`retry_at` has passed, and the text does not promise a pause that is over."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        cooling = (await prices.get("a")).error
        assert cooling is not None
        assert "not tried again for 1.0 s" in str(cooling)
        clock.advance(3)
        retried = (await prices.get("a")).error
        assert retried is not None
        assert str(retried) == f"price 'a': loading failed: {DOWN}"
        assert retried.retry_at == pytest.approx(clock() - 2)

    async def test_a_load_that_succeeds_ends_the_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """Also when the new copy is stale again."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        upstream.error = None
        clock.advance(1)
        assert told(await prices.get("a")) == STALE_WITH_ERROR
        await idle(cache)
        answer = await prices.get("a")
        assert (answer.verdict, answer.error) == (Verdict.FRESH, None)
        clock.advance(31)
        answer = await prices.get("a")
        assert (answer.verdict, answer.error) == (Verdict.STALE, None)

    async def test_a_put_ends_the_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """The value is known now, whoever loaded it."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        await prices.put("a", Price("a", 2))
        clock.advance(31)
        answer = await prices.get("a")
        assert (version(answer), answer.verdict, answer.error) == (2, Verdict.STALE, None)

    async def test_deleting_the_entry_ends_the_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """Nothing is left that the error could be told with: the next read loads."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        await prices.delete("a")
        upstream.error = None
        answer = await prices.get("a")
        assert (answer.verdict, answer.error) == (Verdict.FRESH, None)

    @pytest.mark.parametrize("soft", [True, False], ids=["soft", "hard"])
    async def test_an_invalidation_does_not_end_the_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache, *, soft: bool
    ) -> None:
        """It says that the copy is wrong, not that the upstream works again."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        await prices.invalidate("a", soft=soft)
        verdict = Verdict.STALE if soft else Verdict.EXPIRED
        assert told(await prices.get("a")) == (verdict, True)
        clock.advance(1)
        assert told(await prices.get("a")) == (verdict, True)
        await idle(cache)
        assert told(await prices.get("a")) == (verdict, True)

    async def test_a_fresh_copy_has_no_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """A `refresh()` that failed is told to its caller, and to nobody else while it is fresh."""
        await prices("a")
        upstream.error = ConnectionError("down")
        assert isinstance(await outcome(prices.refresh("a")), LoadFailed)
        assert (await prices.get("a")).error is None
        clock.advance(31)
        assert told(await prices.get("a")) == STALE_WITH_ERROR
        await idle(cache)


class TestE31OtherPlaces:
    async def test_another_process_tells_the_error_too(
        self, ours: Prices, theirs: Prices, here: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """While this one cools down, while it tries again, and after that."""
        await stale_after_a_failure(ours, upstream, clock, here)
        assert told(await theirs.get("a")) == STALE_WITH_ERROR
        clock.advance(1)
        retry = await upstream.holding(ours.get("a"))
        assert told(await theirs.get("a")) == STALE_WITH_ERROR
        upstream.let_go()
        await retry
        await idle(here)
        assert told(await theirs.get("a")) == STALE_WITH_ERROR
        assert len(upstream.calls) == 3

    async def test_peek_tells_the_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """As soon as the refresh has failed, during the retry, and with an expired copy."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        seen = [prices.peek("a")]
        await prices.get("a")
        seen.append(prices.peek("a"))
        clock.advance(1)
        seen.append(prices.peek("a"))
        retry = await upstream.holding(prices.get("a"))
        seen.append(prices.peek("a"))
        upstream.let_go()
        await retry
        await idle(cache)
        seen.append(prices.peek("a"))
        assert [told(it) for it in seen if it is not None] == [STALE_WITH_ERROR] * 5
        clock.advance(100)
        retry = await upstream.holding(prices.get("a"))
        waiting = prices.peek("a")
        assert waiting is not None
        assert told(waiting) == (Verdict.EXPIRED, True)
        upstream.let_go()
        await retry

    async def test_peek_forgets_the_error_with_a_new_copy(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """Loaded or put."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        upstream.error = None
        await prices.refresh("a")
        clock.advance(31)
        old = prices.peek("a")
        assert old is not None
        assert (old.verdict, old.error) == (Verdict.STALE, None)

    async def test_a_store_that_goes_away_does_not_silence_it(
        self, store: SteppedStore, here: Cache, ours: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Memory tells what the store said last, or what this process saw itself."""
        await stale_after_a_failure(ours, upstream, clock, here)
        store.broken = {"read", "acquire", "publish", "release"}
        answer = await ours.get("a")
        assert (told(answer), answer.unverified) == (STALE_WITH_ERROR, True)
        await idle(here)
        clock.advance(1)
        assert told(await ours.get("a")) == STALE_WITH_ERROR
        await idle(here)
        store.broken = set()
        assert told(await ours.get("a")) == STALE_WITH_ERROR
        await idle(here)

    async def test_memory_for_does_not_silence_the_error(
        self,
        store: SteppedStore,
        upstream: Upstream,
        clock: ManualClock,
        sleeper: Sleeper,
    ) -> None:
        """Memory answers alone, during the cooldown and after it."""
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream, memory_for="10s")
            await stale_after_a_failure(prices, upstream, clock, cache)
            for _ in range(20):
                assert told(await prices.get("a")) == STALE_WITH_ERROR
                await idle(cache)
                clock.advance(0.5)

    async def test_looking_at_a_copy_does_not_silence_the_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """The page cache and the routes look at the copy before they load."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        clock.advance(1)
        looked = await prices.get_stored("a")
        assert looked is not None
        assert told(looked) == STALE_WITH_ERROR

    async def test_explain_says_that_a_read_gets_the_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """And that a refresh begins, since the cooldown is over."""
        await stale_after_a_failure(prices, upstream, clock, cache)
        clock.advance(1)
        text = str(await prices.explain("a"))
        assert "a read is served at once, with the error, and one refresh begins behind it" in text
        assert f"The last load failed ({DOWN})." in text

    async def test_a_watch_is_told_of_the_copy_with_its_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, sleeper: Sleeper, cache: Cache
    ) -> None:
        """Each failure comes with what is left, and `known` says the same in between."""
        failures: list[Answer[Price]] = []
        await stale_after_a_failure(prices, upstream, clock, cache)
        with prices.watch("a", fail=lambda update: failures.append(update.answer)):
            for count in range(1, 4):
                # Who sleeps may also be the guard of a load, so one wake may not be enough.
                while len(failures) < count:
                    if sleeper.sleeping > 0:
                        clock.advance(1)
                        sleeper.wake()
                    await asyncio.sleep(0.001)
                assert told((await prices.known(["a"]))["a"]) == STALE_WITH_ERROR
        assert {told(it) for it in failures} == {STALE_WITH_ERROR}


class TestE31Functions:
    async def test_a_cached_function_tells_the_error(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """As a resource of many keys does."""
        error: list[Exception] = []

        @cache.cached("report", fresh_for=30, stale_for=60)
        async def report(year: int) -> Mapping[str, int]:
            if error:
                raise error[0]
            return {"year": year}

        await report(2026)
        clock.advance(31)
        error.append(ConnectionError("down"))
        await report.of(2026).get()
        await idle(cache)
        clock.advance(1)
        answer = await report.of(2026).get()
        assert (answer.verdict, DOWN in str(answer.error)) == (Verdict.STALE, True)
        await idle(cache)
