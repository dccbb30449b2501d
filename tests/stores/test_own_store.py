"""S1: a store that somebody else writes: the example passes the suite, and a cache works on it.

The example is `examples/own_store.py`, which the guide "Writing a store" shows.
"""

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Cache, ConfigError, Verdict
from stillfresh.clock import Clock
from stillfresh.stores import WrappedStore, capabilities_of
from stillfresh.stores.contract import Store
from stillfresh.testing import ContractConformance, ManualClock, StoreConformance
from tests.kit.engine import Price, Prices, Upstream, declare, version

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "own_store.py"
GUIDE = ROOT / "docs" / "guides" / "writing-a-store.md"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("own_store", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


own_store = load_example()


class TestS1OwnStore(ContractConformance):
    """A store with the contract alone."""

    async def new_store(self, clock: Clock) -> Store:
        store: Store = own_store.DictStore(clock)
        return store


class TestS1OwnSweptStore(StoreConformance):
    """A store with one protocol more: the tests of the others are skipped."""

    async def new_store(self, clock: Clock) -> Store:
        store: Store = own_store.SweptStore(clock)
        return store


def test_the_guide_shows_the_example_as_it_is() -> None:
    """A reader copies it from the page."""
    assert f"```python\n# own_store.py\n{EXAMPLE.read_text()}```" in GUIDE.read_text()


class PassesCallsOn:
    """Somebody's own wrapper."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self._inner, name)


@pytest.fixture
async def cache(clock: ManualClock) -> AsyncIterator[Cache]:
    async with Cache(own_store.DictStore(clock), clock=clock) as cache:
        yield cache


@pytest.fixture
def prices(cache: Cache, upstream: Upstream) -> Prices:
    return declare(cache, upstream, tags=lambda sku: [f"shop:{sku}"])


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


class TestS1CacheOnTheContractAlone:
    async def test_reads_puts_and_invalidations_work(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """E2, E6, E17: as on every store."""
        assert version(await prices.get("a")) == 1
        assert (await prices.put("a", Price("a", 7))).stored
        assert version(await prices.get("a")) == 7
        upstream.version = 2
        await prices.invalidate("a")
        assert version(await prices.get("a")) == 2
        assert len(upstream.calls) == 2

    async def test_an_invalidation_by_tag_works(
        self, cache: Cache, prices: Prices, upstream: Upstream
    ) -> None:
        """E8: it reaches the entries that have the tag, and no others."""
        await prices.get_many(["a", "b"])
        upstream.version = 2
        assert await cache.invalidate_tag("shop:a") == [("price", "a")]
        answers = await prices.get_many(["a", "b"])
        assert [version(answers[key]) for key in "ab"] == [2, 1]

    async def test_a_watch_receives_what_is_put(self, prices: Prices) -> None:
        """C14: without listing and without push."""
        with prices.watch("a") as watch:
            await prices.get("a")
            await prices.put("a", Price("a", 7))
            async with asyncio.timeout(10):
                async for update in watch:
                    if version(update.answer) == 7:
                        break
        assert update.answer.verdict is Verdict.FRESH

    async def test_what_needs_more_names_the_missing_protocol(
        self, cache: Cache, prices: Prices
    ) -> None:
        """Beside the name of the store; nothing was changed before the error."""
        await prices.get("a")
        for call, protocol in (
            (cache.entries, "ListsEntries"),
            (cache.invalidate_all, "ListsEntries"),
            (cache.evict, "EvictsEntries"),
        ):
            with pytest.raises(ConfigError, match=f"DictStore cannot .* {protocol}"):
                await call()
        assert version(await prices.get("a")) == 1

    async def test_statistics_are_those_of_the_cache(self, cache: Cache, prices: Prices) -> None:
        """E12: the store's part is None, as if it could not be asked."""
        await prices.get("a")
        stats = await cache.stats()
        assert stats.store is None
        assert stats.resources["price"].loads == 1


class TestS1Capabilities:
    def test_a_store_can_do_what_its_protocols_say(self) -> None:
        """The contract alone is no capability."""
        can = capabilities_of(own_store.DictStore())
        fields = {name: getattr(can, name) for name in can.__struct_fields__}
        assert fields.pop("store_name") == "DictStore"
        assert set(fields.values()) == {None, False}

    def test_a_wrapped_store_can_do_what_the_store_inside_can(self) -> None:
        """Through the wrapper, however many there are."""
        inner = own_store.SweptStore()
        wrapped = WrappedStore(WrappedStore(inner))
        can = capabilities_of(wrapped)
        assert can.eviction is wrapped
        assert can.evicts_hourly
        assert (can.listing, can.statistics, can.inline, can.push, can.process) == (None,) * 5
        assert can.store_name == "SweptStore"

    async def test_a_store_that_passes_each_call_on_is_a_store(self, clock: ManualClock) -> None:
        """By `__getattr__`, on every Python: since 3.12, `isinstance` does not see such methods."""
        passing_on: Any = PassesCallsOn(own_store.DictStore(clock))
        async with Cache(passing_on, clock=clock) as cache:
            prices = declare(cache, Upstream())
            assert (await prices("a")).version == 1
        assert "acquire" in passing_on.asked

    @pytest.mark.parametrize("thing", [7, object(), None])
    def test_an_object_that_is_no_store_is_refused(self, thing: Any) -> None:
        """With what to write instead."""
        with pytest.raises(ConfigError, match="neither an address nor a store"):
            Cache(thing)
