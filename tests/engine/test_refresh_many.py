"""E6, E29: what `refresh_many` did with each key: whether the store has the copy, and why not."""

import asyncio

import pytest

from stillfresh import Cache, LoadFailed, Origin, RefreshEnd, Verdict
from tests.kit.engine import Prices, Sleeper, Upstream, until, version, wrong
from tests.kit.held_store import SteppedStore

STORED, SUPERSEDED, UNSTORED, FAILED = RefreshEnd


class TestE6RefreshMany:
    async def test_a_refresh_loads_each_key_at_any_age_and_stores_it(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """One call of the loader for all; a key that is named twice is loaded once."""
        await prices.get_many(["a", "b"])
        upstream.version = 2
        results = await prices.refresh_many(["b", "a", "b"])
        assert upstream.calls[1:] == [["b", "a"]]
        assert {key: (version(it.answer), it.end) for key, it in results.items()} == {
            "b": (2, STORED),
            "a": (2, STORED),
        }
        assert version(await prices.get("a")) == 2

    async def test_a_key_that_the_upstream_lacks_is_stored_as_absent(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        upstream.absent.add("a")
        result = (await prices.refresh_many(["a"]))["a"]
        assert (result.answer.found, result.answer.error, result.end) == (False, None, STORED)

    async def test_a_failed_load_is_returned_and_not_raised(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """The answer has the error with its cause; the copy that was stored before stays."""
        await prices.get("a")
        upstream.error = ValueError("no")
        result = (await prices.refresh_many(["a"]))["a"]
        assert result.end is FAILED
        assert isinstance(result.answer.error, LoadFailed)
        assert result.answer.error.__cause__ is upstream.error
        assert version(await prices.get("a")) == 1

    @pytest.mark.parametrize("how", ["hard", "soft", "tag", "delete"])
    @pytest.mark.parametrize("by", ["this process", "another"])
    async def test_a_copy_that_was_invalidated_during_the_load_is_superseded(
        self,
        here: Cache,
        there: Cache,
        ours: Prices,
        theirs: Prices,
        upstream: Upstream,
        how: str,
        by: str,
    ) -> None:
        """The caller gets the value as STALE, and it is not stored as fresh."""
        refreshing = await upstream.holding(ours.refresh_many(["a"]))
        if by == "another":
            await wrong(there, theirs, how)
        else:
            await wrong(here, ours, how)
        upstream.let_go()
        result = (await refreshing)["a"]
        assert (version(result.answer), result.answer.verdict) == (1, Verdict.STALE)
        assert result.end is SUPERSEDED

    async def test_a_put_during_the_load_supersedes_it(
        self, ours: Prices, theirs: Prices, upstream: Upstream
    ) -> None:
        """The put's value stays."""
        value = (await theirs.get("b")).value
        refreshing = await upstream.holding(ours.refresh_many(["a"]))
        await theirs.put("a", value)
        upstream.let_go()
        assert (await refreshing)["a"].end is SUPERSEDED
        assert (await ours.get("a")).value == value

    @pytest.mark.parametrize("broken", ["acquire", "publish"])
    async def test_a_copy_that_the_store_did_not_confirm_is_unstored(
        self, ours: Prices, store: SteppedStore, broken: str
    ) -> None:
        """The caller asked before the load began, so the value is FRESH for it all the same."""
        store.broken.add(broken)
        result = (await ours.refresh_many(["a"]))["a"]
        assert (version(result.answer), result.answer.verdict) == (1, Verdict.FRESH)
        assert result.end is UNSTORED

    async def test_a_copy_that_another_process_loads_is_stored(
        self, ours: Prices, theirs: Prices, upstream: Upstream, naps: Sleeper
    ) -> None:
        """E5: this process waits for that load."""
        mine = await upstream.holding(ours.get("a"))
        other = asyncio.create_task(theirs.refresh_many(["a"]))
        await until(lambda: bool(naps.asked))
        upstream.let_go()
        await mine
        naps.wake()
        result = (await other)["a"]
        assert (result.answer.origin, result.end) == (Origin.ANOTHER, STORED)

    async def test_inside_bypassed_nothing_is_stored(
        self, cache: Cache, prices: Prices, upstream: Upstream
    ) -> None:
        """E22."""
        with cache.bypassed():
            result = (await prices.refresh_many(["a"]))["a"]
        assert (version(result.answer), result.end) == (1, UNSTORED)
        assert await prices.known(["a"]) == {}
