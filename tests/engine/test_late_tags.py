"""Tags that only the load can tell: I26, E8."""

import asyncio
from collections.abc import Mapping

import pytest

from stillfresh import Amended, Cache, ConfigError, Loaded, StoreError, SyncCache, Verdict
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Upstream, version
from tests.kit.held_store import SteppedStore

FRESH, STALE, EXPIRED = Verdict.FRESH, Verdict.STALE, Verdict.EXPIRED


class Brands:
    """Which brand a price is of is known when it is loaded."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.tags: tuple[str, ...] | None = ("brand:x",)

    def on(self, cache: Cache) -> Prices:
        @cache.batched("price", fresh_for=30, stale_for=60, error_for=3600)
        async def prices(skus: list[str]) -> Mapping[str, Price | Loaded[Price]]:
            found = await self.upstream(skus)
            return {sku: Loaded(price, tags=self.tags) for sku, price in found.items()}

        return prices


@pytest.fixture
def brands(upstream: Upstream) -> Brands:
    return Brands(upstream)


class TestI26LateTags:
    async def test_an_invalidation_of_a_late_tag_reaches_the_copy(
        self, cache: Cache, brands: Brands
    ) -> None:
        """On every store; terms that are not given are the resource's."""
        prices = brands.on(cache)
        await prices("a")
        brands.upstream.version = 2
        assert (await prices.get("a")).verdict is FRESH
        assert await cache.invalidate_tag("brand:x") == [("price", "a")]
        assert version(await prices.get("a")) == 2

    async def test_an_invalidation_of_a_late_tag_supersedes_a_load_under_way(
        self, cache: Cache, brands: Brands
    ) -> None:
        """Its caller is told the value as STALE; who asks later gets the next load's."""
        prices, upstream = brands.on(cache), brands.upstream
        upstream.hold()
        early = asyncio.create_task(prices.get("a"))
        await upstream.asked.wait()
        upstream.version = 2
        assert await cache.invalidate_tag("brand:x") == []
        late = asyncio.create_task(prices.get("a"))
        upstream.let_go()
        assert (version(await early), (await early).verdict) == (1, STALE)
        assert (version(await late), (await late).verdict) == (2, FRESH)
        assert (await cache.stats()).resources["price"].superseded == 1

    async def test_an_invalidation_of_a_late_tag_supersedes_the_load_of_another_process(
        self, here: Cache, there: Cache, brands: Brands
    ) -> None:
        """The law, for tags: it can never publish the old value as fresh."""
        ours, theirs, upstream = brands.on(here), brands.on(there), brands.upstream
        upstream.hold()
        loading = asyncio.create_task(ours.get("a"))
        await upstream.asked.wait()
        upstream.version = 2
        await there.invalidate_tag("brand:x")
        upstream.let_go()
        assert (await loading).verdict is STALE
        assert version(await ours.get("a")) == version(await theirs.get("a")) == 2

    async def test_late_tags_of_another_process_reach_what_memory_has(
        self, here: Cache, there: Cache, brands: Brands
    ) -> None:
        """A copy that was read from the store; its tags were not read with it."""
        ours, theirs = brands.on(here), brands.on(there)
        await theirs("a")
        await ours("a")
        brands.upstream.version = 2
        await here.invalidate_tag("brand:x")
        assert [version(await ours.get("a")), version(await theirs.get("a"))] == [2, 2]

    async def test_late_tags_of_the_copy_before_reach_it_while_the_next_loads(
        self, cache: Cache, brands: Brands, clock: ManualClock
    ) -> None:
        """And no longer when that one has come with others."""
        prices, upstream = brands.on(cache), brands.upstream
        await prices("a")
        clock.advance(31)
        upstream.hold()
        assert (await prices.get("a")).verdict is STALE
        await upstream.asked.wait()
        brands.tags = ("brand:y",)
        assert await cache.invalidate_tag("brand:x") == [("price", "a")]
        upstream.let_go()
        assert (await prices.get("a")).verdict is FRESH
        assert await cache.invalidate_tag("brand:x") == []
        assert (await prices.get("a")).verdict is FRESH
        assert await cache.invalidate_tag("brand:y") == [("price", "a")]

    async def test_late_tags_stay_where_a_value_says_nothing_of_them(
        self, cache: Cache, brands: Brands
    ) -> None:
        """A load without tags, and a change of the value that is there."""
        prices, brands_tag = brands.on(cache), brands.tags
        await prices("a")
        brands.tags = None
        await prices.refresh("a")
        await prices.update("a", lambda it: Amended(Price("a", it.value.version + 7)) if it else 0)
        assert version(await prices.get("a")) == 8
        assert brands_tag is not None
        assert await cache.invalidate_tag(brands_tag[0]) == [("price", "a")]

    async def test_a_put_may_bring_late_tags(self, cache: Cache, brands: Brands) -> None:
        """E17: with the value that the caller knows, and terms beside it."""
        prices = brands.on(cache)
        await prices.put("a", Loaded(Price("a", 5), tags=["brand:z"]), fresh_for=5)
        assert version(await prices.get("a")) == 5
        assert await cache.invalidate_tag("brand:z") == [("price", "a")]
        assert version(await prices.get("a")) == 1

    async def test_a_late_tag_supersedes_a_load_that_began_while_the_store_was_away(
        self, here: Cache, store: SteppedStore, brands: Brands
    ) -> None:
        """S5: a load without a lease, whose tag is invalidated when the store is back."""
        ours, upstream = brands.on(here), brands.upstream
        store.broken = {"acquire"}
        upstream.hold()
        loading = asyncio.create_task(ours.get("a"))
        await upstream.asked.wait()
        store.broken = set()
        upstream.version = 2
        await here.invalidate_tag("brand:x")
        upstream.let_go()
        assert (await loading).verdict is STALE
        assert version(await ours.get("a")) == 2

    async def test_late_tags_of_a_value_that_was_not_stored_are_known(
        self, here: Cache, store: SteppedStore, brands: Brands
    ) -> None:
        """S5: memory shows a value for a moment that the store does not have."""
        ours = brands.on(here)
        store.broken = {"publish"}
        assert (await ours.get("a")).verdict is FRESH
        store.broken = {"read"}
        assert (await ours.get("a")).unverified
        brands.upstream.version = 2
        await here.invalidate_tag("brand:x")
        assert version(await ours.get("a")) == 2

    async def test_an_invalidation_of_a_late_tag_that_cannot_be_delivered_raises(
        self, here: Cache, store: SteppedStore, brands: Brands
    ) -> None:
        """As any invalidation that the store does not confirm."""
        await brands.on(here)("a")
        store.broken = {"invalidate_tag"}
        with pytest.raises(StoreError):
            await here.invalidate_tag("brand:x")

    @pytest.mark.parametrize("tags", [5, [5], ["\ud800"], ["x" * 200_000]])
    def test_late_tags_that_are_no_tags_are_refused(self, tags: object) -> None:
        """Where they are written."""
        with pytest.raises(ConfigError, match="tag"):
            Loaded(1, tags=tags)  # type: ignore[arg-type]

    def test_a_def_function_may_bring_late_tags(self) -> None:
        """E20: the same for `def` functions."""
        version = 1
        with SyncCache("memory://") as cache:

            @cache.cached("report", fresh_for=60)
            def report(year: int) -> int | Loaded[int]:
                return Loaded(version, tags=[f"year:{year}"])

            assert report(2026) == 1
            version = 2
            assert (report(2026), len(cache.invalidate_tag("year:2026"))) == (1, 1)
            assert report(2026) == 2
