"""What a read does: E2, E4, E7, E8, E11, E14."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stillfresh import (
    Answer,
    Cache,
    Loaded,
    LoadFailed,
    Origin,
    RetryAfter,
    Verdict,
)
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Upstream, declare, idle, outcome, turns, version
from tests.kit.held_store import store_bytes


async def fresh_reads(cache: Cache) -> int:
    return (await cache.stats()).resources["price"].reads[Verdict.FRESH]


class TestE14Nowait:
    async def test_a_hit_needs_no_turn_of_the_loop(
        self, url: str, cache: Cache, prices: Prices, clock: ManualClock
    ) -> None:
        """E14: where the store is read on the spot; what has changed there is not an answer."""
        await prices("a")
        before = await fresh_reads(cache)
        answer = prices.get_nowait("a")
        if url.startswith("redis:"):
            assert answer is None
            return
        assert answer is not None
        assert version(answer) == 1
        assert await fresh_reads(cache) == before + 1
        clock.advance(-5)  # E1: as new, to a clock that is a little behind
        assert prices.get_nowait("a") is answer
        clock.advance(5)
        await prices.invalidate("a")
        assert prices.get_nowait("a") is None
        assert prices.get_nowait("unknown") is None

    async def test_a_file_that_another_process_changed_is_read_again(
        self, clock: ManualClock, upstream: Upstream, tmp_path: Path
    ) -> None:
        """E9: its row is compared at every hit; one from a clock that is far ahead is not new."""
        url = f"sqlite:///{tmp_path}/cache.db"
        async with Cache(url, clock=clock) as here, Cache(url, clock=clock) as there:
            prices = declare(here, upstream)
            await prices("a")
            clock.advance(-5.01)
            assert prices.get_nowait("a") is None
            clock.advance(5.01)
            assert prices.get_nowait("a") is not None
            await declare(there, upstream).invalidate("a")
            assert prices.get_nowait("a") is None

    async def test_a_hit_ends_with_freshness(
        self, url: str, clock: ManualClock, upstream: Upstream
    ) -> None:
        """At its very end, not a moment later."""
        if url.startswith("redis:"):
            return
        async with Cache(url, clock=clock) as cache:
            prices = declare(cache, upstream, fresh_for=0.05, jitter=0)
            await prices("a")
            clock.advance(0.0499)
            assert prices.get_nowait("a") is not None
            clock.advance(0.0001)
            assert prices.get_nowait("a") is None


class TestE2Read:
    async def test_the_first_read_loads_and_the_next_is_served(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """One load; from then on the copy."""
        first, second = await prices.get("a"), await prices.get("a")
        assert (first.value, first.verdict, first.origin) == (
            Price("a", 1),
            Verdict.FRESH,
            Origin.LOADED,
        )
        assert second.value == Price("a", 1)
        assert second.origin in {Origin.MEMORY, Origin.STORE}
        assert upstream.calls == [["a"]]

    async def test_calling_a_resource_gives_the_value(self, prices: Prices) -> None:
        """`await prices(key)`, loaded or not."""
        assert [await prices("a"), await prices("a")] == [Price("a", 1)] * 2

    async def test_a_fresh_copy_is_served_and_nothing_else_happens(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """Up to the last moment of its freshness."""
        await prices("a")
        clock.advance(29.9)
        answer = await prices.get("a")
        await idle(cache)
        assert answer.verdict is Verdict.FRESH
        assert answer.age == pytest.approx(29.9)
        assert len(upstream.calls) == 1

    async def test_stale_is_served_at_once_and_refreshed_once(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """While the refresh runs every reader has the old copy; afterwards the new one."""
        await prices("a")
        clock.advance(30)
        upstream.version = 2
        upstream.hold()
        served = [await prices.get("a") for _ in range(5)]
        assert {(version(answer), answer.verdict) for answer in served} == {(1, Verdict.STALE)}
        await upstream.asked.wait()
        served = [await prices.get("a") for _ in range(5)]
        assert {version(answer) for answer in served} == {1}
        upstream.let_go()
        await idle(cache)
        answer = await prices.get("a")
        assert (version(answer), answer.verdict) == (2, Verdict.FRESH)
        assert len(upstream.calls) == 2

    async def test_an_expired_copy_waits_for_a_load(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """The caller gets the new copy."""
        await prices("a")
        clock.advance(90)
        upstream.version = 2
        assert version(await prices.get("a")) == 2

    async def test_an_expired_copy_is_served_if_the_load_fails(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """With the error on it."""
        await prices("a")
        clock.advance(90)
        upstream.error = ConnectionError("down")
        answer = await prices.get("a")
        assert (version(answer), answer.verdict) == (1, Verdict.EXPIRED)
        assert "ConnectionError: down" in str(answer.error)

    async def test_a_key_that_is_gone_fails_if_the_load_fails(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """LoadFailed, from the cause, naming the resource and the key."""
        await prices("a")
        clock.advance(90 + 3600)
        upstream.error = ConnectionError("down")
        with pytest.raises(LoadFailed, match=r"price 'a': .*ConnectionError: down") as caught:
            await prices.get("a")
        assert caught.value.__cause__ is upstream.error

    async def test_fetched_at_is_when_it_was_asked_for(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Sent, not received: a slow answer is as old as the question."""
        sent = clock()
        task = await upstream.holding(prices.get("a"))
        clock.advance(7)
        upstream.let_go()
        answer = await task
        assert (answer.fetched_at, answer.age) == (sent, 7)

    async def test_refresh_loads_whatever_the_age(self, prices: Prices, upstream: Upstream) -> None:
        """Several keys in one call of the loader; a failure is raised."""
        await prices.get_many(["a", "b"])
        upstream.version = 2
        await prices.refresh("a", "b")
        assert upstream.calls[1:] == [["a", "b"]]
        assert version(await prices.get("b")) == 2
        upstream.error = ValueError("no")
        with pytest.raises(LoadFailed, match="ValueError: no"):
            await prices.refresh("a")
        assert version(await prices.get("a")) == 2

    async def test_delete_forgets_the_copy(self, prices: Prices, upstream: Upstream) -> None:
        """The next read loads."""
        await prices("a")
        await prices.delete("a")
        assert prices.peek("a") is None
        await prices("a")
        assert len(upstream.calls) == 2

    async def test_peek_looks_at_memory_only(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """No await, no refresh; the verdict is that of the moment."""
        assert prices.peek("a") is None
        await prices("a")
        clock.advance(50)
        answer = prices.peek("a")
        assert answer is not None
        assert (version(answer), answer.verdict) == (1, Verdict.STALE)
        clock.advance(1e6)
        assert prices.peek("a") is None
        assert len(upstream.calls) == 1

    async def test_a_handle_is_of_one_entry(self, prices: Prices, upstream: Upstream) -> None:
        """The same entry, by its handle."""
        handle = prices.of("a")
        assert handle.peek() is None
        assert version(await handle.get()) == 1
        assert handle.peek() is not None
        upstream.version = 2
        await handle.refresh()
        assert version(await prices.get("a")) == 2
        await handle.invalidate()
        upstream.version = 3
        assert version(await handle.get()) == 3
        await handle.delete()
        assert prices.peek("a") is None


class TestE4Batches:
    async def test_keys_of_one_turn_are_loaded_in_one_batch(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """Keys asked for in one turn of the loop, by whichever task, go in one call."""
        await asyncio.gather(prices("a"), prices("b"), prices.get("c"), prices.get_many(["d", "a"]))
        assert upstream.calls == [["a", "b", "c", "d"]]

    async def test_a_batch_has_up_to_max_batch_keys(self, cache: Cache, upstream: Upstream) -> None:
        """1,000 missing keys: ceil(1000 / max_batch) calls (E14)."""
        prices = declare(cache, upstream, max_batch=48)
        answers = await prices.get_many(str(number) for number in range(1000))
        assert len(answers) == 1000
        assert len(upstream.calls) == 21
        assert max(map(len, upstream.calls)) == 48
        assert sorted(key for call in upstream.calls for key in call) == sorted(answers)

    async def test_at_most_concurrency_calls_at_once(self, cache: Cache) -> None:
        """The others wait for a place."""
        running, most, three = 0, 0, asyncio.Event()

        @cache.batched("slow", fresh_for=1, max_batch=1, concurrency=3)
        async def slow(keys: list[int]) -> dict[int, int]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 3:
                three.set()
            await three.wait()
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            return dict.fromkeys(keys, 0)

        await slow.get_many(range(10))
        assert most == 3

    async def test_a_load_inside_a_load_takes_no_second_place(self, cache: Cache) -> None:
        """With one place in all, a loader may still use its own resource."""

        @cache.batched("tree", fresh_for=60, max_batch=1, concurrency=1)
        async def tree(keys: list[int]) -> dict[int, int]:
            (key,) = keys
            return {key: 1 if key == 0 else 1 + await tree(key - 1)}

        answers = await asyncio.gather(tree(5), tree(3), tree(4))
        assert list(answers) == [6, 4, 5]

    async def test_a_key_that_the_loader_leaves_out_is_absent(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Kept for a tenth of `fresh_for`; `found` is False, and the call raises KeyError."""
        upstream.absent = {"a"}
        answer = await prices.get("a")
        assert (answer.found, answer.verdict) == (False, Verdict.FRESH)
        assert answer.value is None
        for _ in range(2):
            with pytest.raises(KeyError, match="a"):
                await prices("a")
        assert len(upstream.calls) == 1
        clock.advance(3)
        upstream.absent = set()
        assert await prices("a") == Price("a", 1)

    async def test_absent_for_is_an_option(
        self, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """As long as said, and no longer."""
        prices = declare(cache, upstream, absent_for="10s")
        upstream.absent = {"a"}
        await prices.get("a")
        clock.advance(9.9)
        await prices.get("a")
        assert len(upstream.calls) == 1
        clock.advance(0.1)
        await prices.get("a")
        assert len(upstream.calls) == 2

    async def test_an_exception_in_the_mapping_fails_alone(self, cache: Cache) -> None:
        """The others have their values; get_many has an answer for each."""

        @cache.batched("half", fresh_for=1)
        async def half(keys: list[str]) -> dict[str, int | Exception]:
            return {key: ValueError("bad") if key == "bad" else 1 for key in keys}

        answers = await half.get_many(["good", "bad"])
        assert answers["good"].value == 1
        assert (answers["bad"].found, answers["bad"].verdict) == (False, Verdict.GONE)
        assert "ValueError: bad" in str(answers["bad"].error)

    async def test_none_is_a_cached_value(self, cache: Cache) -> None:
        """Cached as any other."""
        calls = []

        @cache.batched("nothing", fresh_for=60)
        async def nothing(keys: list[str]) -> dict[str, None]:
            calls.append(keys)
            return dict.fromkeys(keys)

        first, second = await nothing.get("a"), await nothing.get("a")
        assert (first.found, first.value, second.found) == (True, None, True)
        assert len(calls) == 1

    @pytest.mark.parametrize(
        ("returned", "said"),
        [
            ([1, 2], "returned list, not a mapping"),
            (None, "returned NoneType, not a mapping"),
            ({"A": 1}, "left it out and answered for 'A'"),
        ],
        ids=["list", "None", "extra"],
    )
    async def test_a_loader_that_answers_rubbish_has_failed(
        self, cache: Cache, returned: Any, said: str
    ) -> None:
        """A clear error that names the resource, and the cache goes on."""

        @cache.batched("odd", fresh_for=1)
        async def odd(keys: list[str]) -> Mapping[str, int]:
            return returned if keys == ["a"] else dict.fromkeys(keys, 1)

        with pytest.raises(LoadFailed, match=f"odd.*{said}"):
            await odd("a")
        assert await odd("b") == 1

    async def test_extra_ids_beside_a_whole_answer_are_ignored(self, cache: Cache) -> None:
        """Nobody asked for them, nobody gets them."""

        @cache.batched("more", fresh_for=60)
        async def more(keys: list[str]) -> Mapping[str, int]:
            return {**dict.fromkeys(keys, 1), "extra": 2}

        assert await more("a") == 1
        assert more.peek("extra") is None

    async def test_a_loader_may_use_up_its_list(self, cache: Cache) -> None:
        """It is its own."""

        @cache.batched("eager", fresh_for=60)
        async def eager(keys: list[str]) -> dict[str, int]:
            found: dict[str, Any] = {}
            while keys:
                found[keys.pop()] = 1
            return found

        assert (await eager.get_many(["a", "b"]))["a"].value == 1


class TestE7Failure:
    async def test_a_failure_leaves_the_copy_alone_and_cools_down(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """During the cooldown STALE is served at once, with the error, and no load begins."""
        await prices("a")
        clock.advance(30)
        upstream.error = ConnectionError("down")
        await prices.get("a")
        await idle(cache)
        for _ in range(5):
            answer = await prices.get("a")
            await idle(cache)
            assert (version(answer), answer.verdict) == (1, Verdict.STALE)
            assert "ConnectionError: down" in str(answer.error)
        assert len(upstream.calls) == 2
        clock.advance(1)
        await prices.get("a")
        await idle(cache)
        assert len(upstream.calls) == 3
        clock.advance(1)
        await prices.get("a")
        await idle(cache)
        assert len(upstream.calls) == 3, "the second pause is two seconds"

    @pytest.mark.parametrize("age", [0, 40, 200], ids=["fresh", "stale", "expired"])
    async def test_a_copy_that_cannot_be_read_is_no_reason_to_ask_during_a_cooldown(
        self, tmp_path: Path, upstream: Upstream, clock: ManualClock, age: float
    ) -> None:
        """Another deployment's type stands in the store, and upstream is down: asked once."""
        url = f"sqlite:///{tmp_path}/shared.db"
        async with Cache(url, clock=clock) as theirs:

            @theirs.batched("price", fresh_for=30, stale_for=60, error_for=3600)
            async def numbers(skus: list[str]) -> Mapping[str, int]:
                return dict.fromkeys(skus, 1)

            await numbers("a")
        clock.advance(age)
        upstream.error = ConnectionError("down")
        async with Cache(url, clock=clock, dice=lambda: 0.0) as ours:
            prices = declare(ours, upstream)
            for _ in range(3):
                assert "ConnectionError: down" in str(await outcome(prices("a")))
            assert len(upstream.calls) == 1
            upstream.error = None
            clock.advance(1)
            assert await prices("a") == Price("a", 1)

    async def test_the_last_failure_is_told(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """With an old copy, too, and also if memory knows an earlier one."""
        await prices("a")
        clock.advance(31)
        upstream.error = ConnectionError("first")
        await prices.get("a")
        await idle(cache)
        assert "first" in str((await prices.get("a")).error)
        upstream.error = ConnectionError("second")
        assert isinstance(await outcome(prices.refresh("a")), LoadFailed)
        assert "second" in str((await prices.get("a")).error)

    async def test_gone_fails_at_once_with_the_remembered_error(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Upstream is asked once."""
        upstream.error = ConnectionError("down")
        for _ in range(3):
            assert isinstance(await outcome(prices("a")), LoadFailed)
        assert len(upstream.calls) == 1
        with pytest.raises(LoadFailed, match=r"not tried again for 1\.0 s.*ConnectionError: down"):
            await prices("a")
        clock.advance(1)
        upstream.error = None
        assert await prices("a") == Price("a", 1)

    async def test_refresh_ignores_a_cooldown(self, prices: Prices, upstream: Upstream) -> None:
        """Now means now; and success ends the cooldown."""
        upstream.error = ConnectionError("down")
        assert isinstance(await outcome(prices("a")), LoadFailed)
        upstream.error = None
        await prices.refresh("a")
        assert await prices("a") == Price("a", 1)

    async def test_a_failure_is_logged_once_for_a_batch(
        self, prices: Prices, upstream: Upstream, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Not once a key."""
        upstream.error = ConnectionError("down")
        with caplog.at_level(logging.WARNING):
            await prices.get_many(["a", "b", "c"])
        assert len(caplog.records) == 1
        assert "3 of 3 failed" in caplog.text

    @pytest.mark.parametrize("raised", [True, False])
    async def test_a_loader_may_ask_for_its_own_pause(
        self, cache: Cache, clock: ManualClock, *, raised: bool
    ) -> None:
        """`RetryAfter`, raised for all or returned for one."""
        calls = []

        @cache.batched("polite", fresh_for=1)
        async def polite(keys: list[str]) -> dict[str, int | Exception]:
            calls.append(keys)
            if raised:
                raise RetryAfter("2m")
            return {key: RetryAfter(120) for key in keys}

        assert isinstance(await outcome(polite("a")), LoadFailed)
        clock.advance(119)
        assert isinstance(await outcome(polite("a")), LoadFailed)
        assert len(calls) == 1
        clock.advance(1)
        assert isinstance(await outcome(polite("a")), LoadFailed)
        assert len(calls) == 2


class TestE8OwnTermsAndTags:
    async def test_a_loader_may_set_an_entrys_own_terms(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """`Loaded(value, fresh_for=…)` for one, the resource's terms for the others."""

        @cache.batched("mixed", fresh_for=10, stale_for=1000)
        async def mixed(keys: list[str]) -> dict[str, int | Loaded[int]]:
            return {key: Loaded(1, fresh_for="1m") if key == "long" else 1 for key in keys}

        await mixed.get_many(["long", "short"])
        clock.advance(10)
        verdicts = [(await mixed.get(key)).verdict for key in ("long", "short")]
        assert verdicts == [Verdict.FRESH, Verdict.STALE]
        clock.advance(50)
        assert (await mixed.get("long")).verdict is Verdict.STALE

    async def test_a_loader_may_set_all_of_an_entrys_terms(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """What it does not say is the resource's."""

        @cache.batched("mixed", fresh_for=10, stale_for=1000)
        async def mixed(keys: list[str]) -> dict[str, int | Loaded[int]]:
            return {key: Loaded(1, fresh_for=10, stale_for=5, error_for=20) for key in keys}

        await mixed.get("one")
        for passed, verdict in ((10, Verdict.STALE), (5, Verdict.EXPIRED), (15, None)):
            clock.advance(passed)
            answer = mixed.peek("one")
            assert (None if answer is None else answer.verdict) == verdict

    async def test_a_tag_tells_whom_it_reached(self, cache: Cache, upstream: Upstream) -> None:
        """By resource and id, as the store has them."""
        prices = declare(cache, upstream, tags=lambda sku: [f"shop:{sku[:2]}"])
        await prices.get_many(["eu-1", "us-1"])
        assert await cache.invalidate_tag("shop:eu") == [("price", "eu-1")]

    async def test_a_tag_reaches_every_entry_that_has_it(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """And no other."""
        prices = declare(cache, upstream, tags=lambda sku: [f"shop:{sku[:2]}"])
        await prices.get_many(["eu-1", "eu-2", "us-1"])
        upstream.version = 2
        await cache.invalidate_tag("shop:eu")
        answers = await prices.get_many(["eu-1", "eu-2", "us-1"])
        assert {key: version(answer) for key, answer in answers.items()} == {
            "eu-1": 2,
            "eu-2": 2,
            "us-1": 1,
        }

    async def test_a_tag_reaches_a_load_under_way(self, cache: Cache, upstream: Upstream) -> None:
        """Tags are recorded before the load starts."""
        prices = declare(cache, upstream, tags=lambda _: ["all"])
        task = await upstream.holding(prices.get("a"))
        await cache.invalidate_tag("all")
        upstream.version = 2
        upstream.let_go()
        assert (await task).verdict is Verdict.STALE
        answer = await prices.get("a")
        assert (version(answer), answer.verdict) == (2, Verdict.FRESH)

    async def test_a_cached_function_has_tags_by_its_arguments(self, cache: Cache) -> None:
        """The same function of the key."""
        calls = []

        @cache.cached("report", fresh_for=60, tags=lambda year, region="eu": [f"y{year}", region])
        async def report(year: int, region: str = "eu") -> int:
            calls.append((year, region))
            return len(calls)

        assert [await report(2025), await report(2026), await report(2026, "us")] == [1, 2, 3]
        await cache.invalidate_tag("y2026")
        assert [await report(2025), await report(2026), await report(2026, "us")] == [1, 4, 5]

    async def test_tags_reach_what_the_store_has_dropped(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Memory knows its own keys, and so their tags."""
        store = MemoryStore(clock=clock)
        async with Cache(store, clock=clock) as cache:
            prices = declare(cache, upstream, tags=lambda _: ["all"], memory_for="1h")
            await prices("a")
            await store.delete("price", ["a"])
            assert (await prices.get("a")).origin is Origin.MEMORY
            upstream.version = 2
            await cache.invalidate_tag("all")
            assert (await prices("a")).version == 2

    async def test_a_function_of_tags_that_fails_stops_nothing(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """An entry that cannot say whether it is tagged counts as tagged."""

        def tags(sku: str) -> list[str]:
            if sku == "bad":
                raise KeyError(sku)
            return ["all"]

        prices = declare(cache, upstream, tags=tags)
        await prices("a")
        upstream.hold()
        bad = asyncio.create_task(outcome(prices("bad")))
        await turns(1)
        upstream.version = 2
        await cache.invalidate_tag("all")
        upstream.let_go()
        await bad
        assert (await prices("a")).version == 2


class TestE11Values:
    async def test_what_comes_back_is_typed(self, cache: Cache, upstream: Upstream) -> None:
        """Through the store as well: a `Price`, not a dict."""
        prices = declare(cache, upstream, max_entries=1)
        await prices("a")
        await prices("b")
        assert prices.peek("a") is None, "memory has room for one"
        assert await prices("a") == Price("a", 1)
        assert upstream.calls == [["a"], ["b"]]

    async def test_what_is_loaded_is_what_is_read_later(self, cache: Cache) -> None:
        """The first caller gets what all others will: through the codec and back."""

        @cache.batched("untyped", fresh_for=60)
        async def untyped(keys: list[str]) -> dict[str, Any]:
            return dict.fromkeys(keys, (1, 2))

        assert await untyped("a") == [1, 2]

    async def test_a_stored_value_of_another_shape_is_a_miss(
        self,
        url: str,
        clock: ManualClock,
        upstream: Upstream,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """An older release wrote it: loaded again, no crash; explained, and logged once."""
        async with Cache(url, clock=clock) as cache:
            prices = declare(cache, upstream)
            await store_bytes(cache, "price", "a", msgspec.msgpack.encode(["another"]))
            assert "no copy" in str(await prices.explain("a"))
            assert await prices("a") == Price("a", 1)
            assert await prices("a") == Price("a", 1)
        assert upstream.calls == [["a"]]
        (said,) = (record.getMessage() for record in caplog.records)
        assert said.startswith("price: a stored value does not fit the declared type")

    async def test_a_value_that_cannot_be_encoded_fails(self, cache: Cache) -> None:
        """Fails with the resource and the key; the others are kept."""

        @cache.batched("odd", fresh_for=60)
        async def odd(keys: list[str]) -> dict[str, Any]:
            return {key: object() if key == "bad" else 1 for key in keys}

        answers = await odd.get_many(["good", "bad"])
        assert answers["good"].value == 1
        assert "odd 'bad': the value cannot be stored: TypeError" in str(answers["bad"].error)

    async def test_a_value_that_is_not_what_was_declared(self, cache: Cache) -> None:
        """Said at once, not by the next process that reads it."""

        @cache.batched("wrong", fresh_for=60)
        async def wrong(keys: list[str]) -> dict[str, int]:
            return dict.fromkeys(keys, "text")  # type: ignore[arg-type]

        with pytest.raises(LoadFailed, match=r"wrong 'a'.*Expected `int`"):
            await wrong("a")

    async def test_a_codec_of_your_own_is_used(self, cache: Cache) -> None:
        """For values that msgspec does not know."""

        class Upper:
            def encode(self, value: str, /) -> bytes:
                return value.encode()

            def decode(self, data: bytes, /) -> str:
                return data.decode().upper()

        @cache.cached("shout", fresh_for=60, codec=Upper())
        async def shout(text: str) -> str:
            return text

        assert await shout("hello") == "HELLO"


async def test_an_answer_can_be_read_by_people() -> None:
    """Its repr says what, how fresh, and from where."""
    answer = Answer(
        5, found=True, verdict=Verdict.STALE, fetched_at=0, origin=Origin.STORE, clock=lambda: 31
    )
    assert repr(answer) == "<Answer 5 stale age=31s from store>"
