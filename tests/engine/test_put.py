"""A value that the caller knows, published under the law: E17."""

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

import pytest

from stillfresh import Cache, ConfigError, Loaded, Origin, Policy, Stored, StoreError, Verdict
from stillfresh.engine.put import EAGER_ATTEMPTS, MOST_ATTEMPTS
from stillfresh.stores.contract import Copy, Put, PutOutcome, PutResult
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
    outcome,
    turns,
    until,
    version,
    wrong,
)
from tests.kit.held_store import SteppedStore, lease_of

FRESH, STALE, EXPIRED = Verdict.FRESH, Verdict.STALE, Verdict.EXPIRED
KNOWN = Price("a", 7)


class TestE17Put:
    async def test_the_read_after_a_put_has_the_value(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """Fresh, without a load; of a key that had a copy and of one that had none."""
        await prices("a")
        await prices.put("a", KNOWN)
        await prices.put("b", Price("b", 8))
        assert [version(await prices.get(key)) for key in "ab"] == [7, 8]
        assert (await prices.get("a")).verdict is FRESH
        assert upstream.calls == [["a"]]

    async def test_put_many_stores_every_value(self, prices: Prices, upstream: Upstream) -> None:
        """More than one step of the store takes, each with its own value."""
        many = {f"k{number}": Price(f"k{number}", number) for number in range(250)}
        await prices.put_many(many)
        answers = await prices.get_many(many)
        assert {key: it.value for key, it in answers.items()} == many
        assert upstream.calls == []

    async def test_a_put_may_have_terms_of_its_own(
        self, prices: Prices, clock: ManualClock, upstream: Upstream
    ) -> None:
        """What is left out is the resource's; a `Loaded` says the same."""
        await prices.put("a", KNOWN, fresh_for="2s", stale_for=1)
        await prices.put("b", Price("b", 7), error_for=100)
        await prices.put_many({"c": Loaded(Price("c", 7), fresh_for=2), "d": Price("d", 7)})
        clock.advance(2)
        verdicts = [(await prices.explain(key)).verdict for key in "abcd"]
        assert verdicts == [STALE, FRESH, STALE, FRESH]
        clock.advance(1)
        assert (await prices.explain("a")).verdict is EXPIRED
        clock.advance(26)
        assert (await prices.explain("b")).verdict is FRESH
        assert upstream.calls == []

    async def test_terms_of_a_value_win_over_those_of_the_call(
        self, prices: Prices, clock: ManualClock
    ) -> None:
        """Of many, one may have its own; what it leaves out is the call's."""
        own = Loaded(Price("a", 7), fresh_for=2)
        await prices.put_many({"a": own, "b": Price("b", 7)}, fresh_for=5, stale_for=1)
        clock.advance(2)
        verdicts = [(await prices.explain(key)).verdict for key in "ab"]
        clock.advance(1)
        verdicts += [(await prices.explain(key)).verdict for key in "ab"]
        assert verdicts == [STALE, FRESH, EXPIRED, FRESH]

    async def test_a_read_that_needs_a_load_waits_for_a_put_under_way(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """E5: the holder is this process, so nobody looks now and then; the sleeper never wakes."""
        putting = await store.holding("put", ours.put("a", KNOWN))
        reading = asyncio.create_task(ours.get("a"))
        await turns()
        store.let_go("put")
        await putting
        answer = await asyncio.wait_for(reading, 60)
        assert (answer.value, answer.verdict) == (KNOWN, FRESH)
        assert upstream.calls == []

    async def test_a_put_is_as_old_as_its_call(
        self, ours: Prices, clock: ManualClock, store: SteppedStore
    ) -> None:
        """`fetched_at` is when the caller knew it, however slow the store is."""
        putting = await store.holding("put", ours.put("a", KNOWN))
        clock.advance(3)
        store.let_go("put")
        await putting
        assert (await ours.get("a")).age == 3

    async def test_jitter_is_drawn_as_for_a_load(self, clock: ManualClock, url: str) -> None:
        """E10: what is put together is not refreshed together."""
        async with Cache(url, clock=clock, dice=lambda: 0.5) as cache:
            prices = declare(cache, Upstream(), jitter=0.5)
            await prices.put("a", KNOWN)
            until = (await prices.explain("a")).fresh_until
            assert until == pytest.approx(clock() + 22.5)

    async def test_a_put_value_goes_through_the_codec_and_back(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """E11: memory gives what any other process would be given."""

        @cache.batched("pair", fresh_for=30)
        async def pairs(ids: list[str]) -> dict[str, tuple[int, int]]:
            return {}

        await pairs.put("a", [1, 2])  # type: ignore[arg-type]
        assert await pairs("a") == (1, 2)

    @pytest.mark.parametrize("value", [object(), 5, "text"])
    async def test_a_bad_value_is_the_callers_error(
        self, prices: Prices, upstream: Upstream, value: Any
    ) -> None:
        """Nothing is stored, nothing cools down, and what was there is served."""
        await prices("a")
        with pytest.raises(ConfigError, match="price 'b': the value cannot be stored: "):
            await prices.put_many({"a": KNOWN, "b": value})
        assert version(await prices.get("a")) == 1
        assert (await prices.explain("b")).failures == 0

    async def test_bad_arguments_are_refused(self, prices: Prices) -> None:
        """E15: with what was given, and what to write instead."""
        with pytest.raises(ConfigError, match="fresh_for"):
            await prices.put("a", KNOWN, fresh_for="soon")
        with pytest.raises(ConfigError, match="key"):
            await prices.put(1, KNOWN)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="key"):
            await prices.put([], KNOWN)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="put_many: takes a mapping"):
            await prices.put_many([("a", KNOWN)])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="ttl"):
            await prices.put("a", KNOWN, ttl=3)  # type: ignore[call-arg]

    async def test_an_unknown_term_is_refused(self, prices: Prices, upstream: Upstream) -> None:
        """By its name, with the terms that there are; nothing is put."""
        for put in (prices.put("a", KNOWN, fresh=5), prices.put_many({"a": KNOWN}, fresh=5)):  # type: ignore[call-arg]
            with pytest.raises(TypeError, match=r"'fresh'.*fresh_for, stale_for, error_for"):
                await put
        assert version(await prices.get("a")) == upstream.version

    async def test_a_functions_handle_can_put(self, cache: Cache) -> None:
        """By its arguments, as a call would name them."""

        @cache.cached("report", fresh_for=30)
        async def report(year: int, region: str = "eu") -> int:
            return year

        await report.of(2026).put(1, fresh_for=5)
        assert await report(2026, region="eu") == 1
        assert await report(2025) == 2025

    async def test_a_put_can_come_from_another_thread(self, cache: Cache, prices: Prices) -> None:
        """As any other call."""
        await asyncio.to_thread(cache.from_thread, prices.put, "a", KNOWN)
        assert version(await prices.get("a")) == 7

    async def test_puts_are_counted(self, cache: Cache, prices: Prices) -> None:
        """E12: by the key; nothing overtook it."""
        await prices.put_many({"a": KNOWN, "b": Price("b", 8)})
        stats = (await cache.stats()).resources["price"]
        assert (stats.puts, stats.superseded, stats.store_errors) == (2, 0, 0)


class TestE17Stored:
    def test_what_became_of_a_put_is_compared_without_its_token(self) -> None:
        """And is equal to nothing else."""
        assert Stored(stored=True, token="a") == Stored(stored=True, token="b")  # noqa: S106 (no secret)
        assert Stored(stored=True) != Stored(stored=False)
        assert (Stored(stored=True) == "stored") is False


class TestE17Law:
    @pytest.mark.parametrize("is_cold", [True, False])
    async def test_a_load_in_flight_is_superseded(
        self, prices: Prices, upstream: Upstream, cache: Cache, *, is_cold: bool
    ) -> None:
        """It began before the put: its value is nobody's fresh answer."""
        if not is_cold:
            await prices("a")
        loading = await upstream.holding(prices.refresh("a"))
        await prices.put("a", KNOWN)
        assert version(await prices.get("a")) == 7
        upstream.let_go()
        await loading
        await idle(cache)
        assert (version(await prices.get("a")), len(upstream.calls)) == (7, 1 if is_cold else 2)

    async def test_a_load_of_another_process_is_superseded(
        self, ours: Prices, theirs: Prices, upstream: Upstream
    ) -> None:
        """And its readers are given the value."""
        loading = await upstream.holding(theirs.get("a"))
        await ours.put("a", KNOWN)
        upstream.let_go()
        assert (await loading).verdict is STALE
        assert [version(await it.get("a")) for it in (ours, theirs)] == [7, 7]
        assert len(upstream.calls) == 1

    @pytest.mark.parametrize("soft", [False, True])
    async def test_an_invalidation_of_this_process_wins_over_a_put_that_began_before(
        self, ours: Prices, store: SteppedStore, *, soft: bool
    ) -> None:
        """The value may be wrong by then: it is not stored, and nothing older stays fresh."""
        await ours.put("a", Price("a", 6))
        putting = await store.holding("put", ours.put("a", KNOWN))
        await ours.invalidate("a", soft=soft)
        store.let_go("put")
        assert await putting == Stored(stored=False)
        assert (await ours.explain("a")).verdict is EXPIRED
        assert ours.peek("a") is None

    async def test_a_put_that_arrives_after_another_processs_invalidation_is_stored(
        self, ours: Prices, theirs: Prices, store: SteppedStore
    ) -> None:
        """E35: the two ran at once, and the put arrived last; `version=` is the remedy."""
        await ours.put("a", Price("a", 6))
        putting = await store.holding("put", ours.put("a", KNOWN))
        await theirs.invalidate("a")
        store.let_go("put")
        assert await putting == Stored(stored=True)
        assert [version(await it.get("a")) for it in (ours, theirs)] == [7, 7]

    @pytest.mark.parametrize("how", ["hard", "tag", "delete"])
    @pytest.mark.parametrize("gives_up", [False, True])
    async def test_an_invalidation_after_the_call_wins(
        self,
        here: Cache,
        ours: Prices,
        store: SteppedStore,
        upstream: Upstream,
        how: str,
        *,
        gives_up: bool,
    ) -> None:
        """S8: also if the put had no lease yet to be voided, and if its caller has given up."""
        await ours("a")
        upstream.version = 2
        putting = await store.holding("put", ours.put("a", KNOWN))
        if gives_up:
            putting.cancel()
            await asyncio.wait([putting])
        await wrong(here, ours, how)
        store.let_go("put")
        await asyncio.wait([putting])
        await turns()
        assert (version(await ours.get("a")), (await ours.explain("a")).verdict) == (2, FRESH)
        assert (await here.stats()).resources["price"].superseded == (0 if gives_up else 1)

    @pytest.mark.parametrize("is_mended", [True, False])
    async def test_an_invalidation_that_failed_leaves_nothing_old_fresh(
        self, ours: Prices, store: SteppedStore, upstream: Upstream, *, is_mended: bool
    ) -> None:
        """The put behind another one does not know whether it was done: it does it, or says so."""
        await ours("a")
        upstream.version = 2
        first = await store.holding("put", ours.put("a", Price("a", 6)))
        putting = asyncio.create_task(ours.put("a", KNOWN))
        await turns()
        store.broken = {"invalidate"}
        with pytest.raises(StoreError):
            await ours.invalidate("a")
        store.broken = set() if is_mended else store.broken
        store.let_go("put")
        await first
        assert isinstance(await outcome(putting), StoreError) is not is_mended
        store.broken = set()
        if is_mended:
            assert version(await ours.get("a")) == 2

    async def test_a_put_of_a_new_key_that_is_invalidated_leaves_no_lease(
        self, ours: Prices, store: SteppedStore
    ) -> None:
        """It may not be stored any more, and other processes need not wait for anything."""
        putting = await store.holding("put", ours.put("a", KNOWN))
        await ours.invalidate("a")
        store.let_go("put")
        await putting
        assert (await ours.explain("a")).held_until is None

    async def test_servers_that_do_not_answer_are_not_asked_again(
        self, ours: Prices, store: SteppedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S9: ids whose server is away get no result; the put says why it failed."""
        asked = list[str]()

        async def put(_: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
            asked.extend(puts)
            return {}

        monkeypatch.setattr(store.inner, "put", put)
        with pytest.raises(StoreError, match="the servers that hold 1 keys do not answer"):
            await ours.put("a", KNOWN)
        assert asked == ["a"]

    @pytest.mark.parametrize("how", ["a late tag", "clear", "all"])
    async def test_tags_clear_and_invalidate_all_win_over_a_put_that_began_before(
        self, here: Cache, ours: Prices, store: SteppedStore, upstream: Upstream, how: str
    ) -> None:
        """I26: tags that only the value has; and everything at once. It waits for its step."""
        upstream.version = 2
        many = dict.fromkeys(map(str, range(100)), KNOWN) | {"a": Loaded(KNOWN, tags=["late"])}
        putting = await store.holding("put", ours.put_many(many))
        match how:
            case "a late tag":
                await here.invalidate_tag("late")
            case "clear":
                await clear(ours)
            case _:
                await here.invalidate_all()
        store.let_go("put")
        await putting
        assert version(await ours.get("a")) == 2

    async def test_clear_wins_over_a_put_that_waits_meanwhile(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """As every invalidation does, until it has ended; the put waits for another one."""
        await ours("b")
        upstream.version = 2
        clearing = await store.holding("delete", clear(ours))
        first = await store.holding("put", ours.put("a", KNOWN))
        putting = asyncio.create_task(ours.put("a", KNOWN))
        await turns()
        store.let_go("delete")
        await clearing
        store.let_go("put")
        await first
        assert await putting == Stored(stored=False)
        assert version(await ours.get("a")) == 2

    async def test_a_put_that_waits_as_clear_begins_is_not_published_meanwhile(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """The walk may be past its place by then."""
        upstream.version = 2
        await lease_of(store.inner, "z")
        many = dict.fromkeys([*map(str, range(100)), "a"], KNOWN)
        putting = await store.holding("put", ours.put_many(many))
        clearing = await store.holding("delete", clear(ours))
        store.let_go("delete")
        store.hold("delete")
        await until(lambda: store.count("delete") == 2)
        store.let_go("put")
        await putting
        store.let_go("delete")
        await clearing
        assert version(await ours.get("a")) == 2

    async def test_e28_a_tag_need_not_look_at_every_key_of_a_large_put(
        self, here: Cache, store: SteppedStore
    ) -> None:
        """Of those that wait for their step, the values say their tags themselves."""
        asked = list[str]()

        def tags(sku: str) -> list[str]:
            asked.append(sku)
            return ["shop"]

        @here.batched("good", fresh_for=60, tags=tags)
        async def goods(skus: list[str]) -> dict[str, int]:
            return dict.fromkeys(skus, 1)

        many = {f"k{number}": 2 for number in range(1_000)}
        putting = await store.holding("put", goods.put_many(many))
        asked.clear()
        await here.invalidate_tag("other")
        assert len(asked) <= 200
        await here.invalidate_tag("shop")
        store.let_go("put")
        await putting
        assert {it.value for it in (await goods.get_many(many)).values()} == {1}

    async def test_put_many_leaves_out_keys_that_are_invalidated_meanwhile(
        self, ours: Prices, store: SteppedStore
    ) -> None:
        """It waits for an earlier step of the same call, and must not be published after it."""
        many = {f"k{number}": Price(f"k{number}", 7) for number in range(250)}
        putting = await store.holding("put", ours.put_many(many))
        await ours.invalidate("k1", "k249")
        store.let_go("put")
        await putting
        answers = await ours.get_many(many)
        assert [key for key, it in answers.items() if version(it) != 7] == ["k1", "k249"]

    @pytest.mark.parametrize("step", ["put", "put:done"])
    async def test_memory_answers_nobody_while_a_put_is_under_way(
        self, here: Cache, upstream: Upstream, store: SteppedStore, step: str
    ) -> None:
        """E6: the old value may be wrong by now, and the new one is not confirmed."""
        prices = declare(here, upstream, memory_for="1h")
        await prices("a")
        putting = await store.holding(step, prices.put("a", KNOWN))
        assert prices.peek("a") is None
        store.let_go(step)
        await putting
        assert prices.peek("a") is not None

    async def test_an_invalidation_before_the_answer_to_a_put_empties_memory(
        self, ours: Prices, store: SteppedStore
    ) -> None:
        """E6: nothing enters memory from a step that began before it."""
        putting = await store.holding("put:done", ours.put("a", KNOWN))
        await ours.invalidate("a")
        store.let_go("put:done")
        await putting
        assert ours.peek("a") is None
        assert (await ours.explain("a")).verdict is EXPIRED

    @pytest.mark.parametrize("is_earlier", [True, False])
    async def test_a_read_that_was_under_way_leaves_memory_alone(
        self, ours: Prices, store: SteppedStore, *, is_earlier: bool
    ) -> None:
        """E6: it found the older copy, before the put was called or while it was on its way."""
        await ours("a")
        store.hold("read:done", "put")
        for work in (ours.get("a"), ours.put("a", KNOWN))[:: 1 if is_earlier else -1]:
            asyncio.create_task(work)  # noqa: RUF006 (both have ended below)
            await turns()
        store.let_go("put")
        await until(lambda: ours.peek("a") is not None)
        store.let_go("read:done")
        await turns()
        found = ours.peek("a")
        assert found is not None
        assert version(found) == 7

    @pytest.mark.parametrize("step", ["put", "put:done"])
    async def test_a_read_that_waits_during_a_put_loads_nothing(
        self, ours: Prices, store: SteppedStore, sleeper: Sleeper, upstream: Upstream, step: str
    ) -> None:
        """It is given the value; a load would only bring the same, or overwrite an edit."""
        putting = await store.holding(step, ours.put("a", KNOWN))
        reading = asyncio.create_task(ours.get("a"))
        await turns()
        store.let_go(step)
        await putting
        await turns()
        sleeper.wake()
        assert (version(await reading), upstream.calls) == (7, [])

    async def test_the_put_that_arrives_last_wins(
        self, here: Cache, ours: Prices, theirs: Prices, store: SteppedStore
    ) -> None:
        """E35: both were stored, one after the other, and all other keys of the first."""
        many = {"a": KNOWN, "b": Price("b", 7), "c": Price("c", 7)}
        putting = await store.holding("put", ours.put_many(many))
        copy = Copy("theirs", 0.0, Policy(60), b"theirs")
        await store.inner.put("price", {"a": Put(copy)})
        store.let_go("put")
        assert set((await putting).values()) == {Stored(stored=True)}
        assert [version(await it.get("a")) for it in (ours, theirs)] == [7, 7]
        assert [version(await theirs.get(key)) for key in "bc"] == [7, 7]
        stats = (await here.stats()).resources["price"]
        assert (stats.puts, stats.superseded) == (3, 0)

    async def test_a_put_is_put_again_as_often_as_the_store_asks(
        self, ours: Prices, theirs: Prices, store: SteppedStore, sleeper: Sleeper
    ) -> None:
        """S8: other changes keep arriving first; the put is stored in the end, under one id."""
        generations = list[str]()
        inner = store.inner.put

        async def put(kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
            generations.extend(it.copy.generation for it in puts.values())
            if len(generations) < EAGER_ATTEMPTS:
                return dict.fromkeys(puts, PutResult(PutOutcome.AGAIN))
            return await inner(kind, puts)

        store.inner.put = put  # type: ignore[method-assign]
        assert await ours.put("a", KNOWN) == Stored(stored=True)
        assert len(generations) == EAGER_ATTEMPTS
        assert len(set(generations)) == 1
        assert version(await theirs.get("a")) == 7

    async def test_a_put_gives_up_on_a_key_that_others_change_all_the_time(
        self, clock: ManualClock, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bounded, with pauses that grow, and said."""
        store = MemoryStore(clock=clock)
        pauses = list[float]()

        async def no_pause(seconds: float) -> None:
            pauses.append(seconds)

        async def put(_: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
            return dict.fromkeys(puts, PutResult(PutOutcome.AGAIN))

        monkeypatch.setattr(store, "put", put)
        async with Cache(store, clock=clock, sleep=no_pause, dice=lambda: 1.0) as cache:
            prices = declare(cache, upstream)
            with pytest.raises(StoreError, match="other processes keep changing 1 keys; try again"):
                await prices.put("a", KNOWN)
        assert len(pauses) == MOST_ATTEMPTS - EAGER_ATTEMPTS + 1
        assert pauses == sorted(pauses)
        assert pauses[-1] <= 0.02

    async def test_a_put_forgets_the_failure_of_its_key(
        self, prices: Prices, cache: Cache, upstream: Upstream
    ) -> None:
        """E7: the cooldown ends, here and in the store."""
        upstream.error = ConnectionError("down")
        await outcome(prices.get("a"))
        assert (await cache.stats()).resources["price"].failing == 1
        await prices.put("a", KNOWN)
        assert (await prices.explain("a")).failures == 0
        assert (await cache.stats()).resources["price"].failing == 0

    async def test_the_tags_of_a_put_reach_it(self, here: Cache, ours: Prices) -> None:
        """E8: recorded with the lease."""
        await ours.put("a", KNOWN)
        assert await here.invalidate_tag("shop:a") == [("price", "a")]
        assert (await ours.explain("a")).verdict is EXPIRED


class TestE17StoreAway:
    async def test_a_put_raises_while_the_store_is_away(
        self, here: Cache, ours: Prices, store: SteppedStore
    ) -> None:
        """S5: silence would be a lie; and nobody has to wait for anything."""
        await ours("a")
        store.broken = {"put"}
        with pytest.raises(StoreError, match="cannot put"):
            await ours.put("a", KNOWN)
        assert (await here.stats()).resources["price"].store_errors == 1
        store.broken = set()
        assert (await ours.explain("a")).held_until is None
        assert version(await ours.get("a")) == 1

    @pytest.mark.parametrize("step", ["put", "put:done"])
    async def test_a_caller_that_gives_up_takes_its_put_along(
        self, ours: Prices, theirs: Prices, store: SteppedStore, upstream: Upstream, step: str
    ) -> None:
        """S8: nothing of it is sent later; memory says what the store says."""
        putting = await store.holding(step, ours.put("a", KNOWN))
        putting.cancel()
        await asyncio.wait([putting])
        assert putting.cancelled()
        store.let_go(step)
        await turns()
        expected = 7 if step == "put:done" else upstream.version
        assert [version(await it.get("a")) for it in (ours, theirs)] == [expected, expected]

    @pytest.mark.parametrize("way", ["put", "update"])
    async def test_a_failure_that_no_caller_waits_for_is_not_reported(
        self, ours: Prices, store: SteppedStore, way: str
    ) -> None:
        """The caller was cancelled before the store refused."""
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: complaints.append(it))
        await ours.put("b", Price("b", 1))
        store.broken = {"put"}
        work = ours.put("a", KNOWN) if way == "put" else ours.update("a", lambda _: KNOWN)
        putting = await store.holding("put", work)
        putting.cancel()
        await asyncio.wait([putting])
        del putting, work
        store.let_go("put")
        await turns()
        gc.collect()
        assert complaints == []

    async def test_a_put_is_finished_when_the_cache_closes(
        self, here: Cache, ours: Prices, store: SteppedStore
    ) -> None:
        """E13: as a publication is."""
        putting = await store.holding("put", ours.put("a", KNOWN))
        closing = asyncio.create_task(here.close())
        await turns()
        store.let_go("put")
        await asyncio.gather(putting, closing)
        assert ours.peek("a") is None


class TestE17Watched:
    async def test_watchers_are_told_of_a_put(self, prices: Prices) -> None:
        """As after a load."""
        told: list[tuple[int, Origin]] = []
        await prices("a")
        with prices.watch("a", tell=lambda it: told.append((version(it.answer), it.answer.origin))):
            await prices.put("a", KNOWN)
            assert told == [(7, Origin.LOADED)]

    async def test_of_many_puts_at_once_the_last_is_told_last(
        self, ours: Prices, store: SteppedStore
    ) -> None:
        """In one process they take effect in the order of the calls, whatever the store does."""
        told: list[int] = []
        await ours("a")
        with ours.watch("a", tell=lambda it: told.append(version(it.answer))):
            first = await store.holding("put:done", ours.put("a", KNOWN))
            others = [ours.put("a", Price("a", 8)), ours.put_many({"b": KNOWN, "a": KNOWN})]
            rest = asyncio.gather(*others, ours.put("a", Price("a", 9)))
            await turns()
            store.let_go("put:done")
            await asyncio.gather(first, rest)
            assert (told, version(await ours.get("a"))) == ([7, 8, 7, 9], 9)

    @pytest.mark.parametrize("given_up", [1, 2])
    async def test_a_put_waits_for_the_one_before_it_although_others_between_them_gave_up(
        self, ours: Prices, store: SteppedStore, given_up: int
    ) -> None:
        """Else the earlier one could arrive at the store last, and win."""
        first = await store.holding("put", ours.put("a", KNOWN))
        first_gate = store.gates.pop("put")
        between = [asyncio.create_task(ours.put("a", Price("a", 8))) for _ in range(given_up)]
        last = asyncio.create_task(ours.put("a", Price("a", 9)))
        await turns()
        for putting in between:
            putting.cancel()
        await turns()
        assert not last.done()
        first_gate.set()
        assert (await first).stored
        assert (await last).stored
        assert version(await ours.get("a")) == 9

    async def test_a_put_plans_the_next_refresh_anew(
        self, ours: Prices, clock: ManualClock, upstream: Upstream, sleeper: Sleeper
    ) -> None:
        """E24: the next one is due at the end of the put's own freshness."""
        with ours.watch("a"):
            await until(lambda: len(upstream.calls) == 1)
            await turns()
            clock.advance(20)
            await ours.put("a", KNOWN, fresh_for=12)
            await turns()
            assert sleeper.asked[-1] == pytest.approx(12)


class TestE35Begun:
    async def test_a_put_begins_when_its_coroutine_first_runs(self, prices: Prices) -> None:
        """An invalidation before that comes before the put, although that was called earlier."""
        await prices("a")
        putting = prices.put("a", KNOWN)
        await prices.invalidate("a")
        assert (await putting).stored
        assert version(await prices.get("a")) == 7

    async def test_a_put_that_began_during_an_invalidation_is_not_stored(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """The invalidation had not ended when the put began, so it counts as the later one."""
        await ours("a")
        upstream.version = 2
        invalidating = await store.holding("invalidate", ours.invalidate("a"))
        putting = await store.holding("put", ours.put("a", KNOWN))
        store.let_go("invalidate")
        await invalidating
        store.let_go("put")
        assert await putting == Stored(stored=False)
        assert version(await ours.get("a")) == 2
