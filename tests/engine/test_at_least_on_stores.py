"""E37: a read with a token is no older than its change, on every store that processes share."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from stillfresh import Cache, merge_tokens
from tests.kit.engine import Price, Prices, Upstream, declare, version
from tests.sync.conftest import place

address = pytest.fixture(params=["sqlite", "redis", "postgres", "dynamodb"])(place)

Change = Callable[[Cache, Prices, int], Awaitable[str]]


async def put(_: Cache, prices: Prices, number: int) -> str:
    return (await prices.put("a", Price("a", number))).token


async def put_many(_: Cache, prices: Prices, number: int) -> str:
    stored = await prices.put_many({key: Price(key, number) for key in "ab"})
    return merge_tokens(*(each.token for each in stored.values()))


async def invalidate(_: Cache, prices: Prices, __: int) -> str:
    return await prices.invalidate("a", "b")


async def invalidate_softly(_: Cache, prices: Prices, __: int) -> str:
    return await prices.invalidate("a", "b", soft=True)


async def invalidate_tag(cache: Cache, _: Prices, __: int) -> str:
    return (await cache.invalidate_tag("shop")).token


async def delete(_: Cache, prices: Prices, __: int) -> str:
    return await prices.delete("a", "b")


async def change_and_put(_: Cache, prices: Prices, number: int) -> str:
    async with prices.changing("a") as change:
        await change.put(Price("a", number))
    return change.token


async def change_without_put(_: Cache, prices: Prices, __: int) -> str:
    async with prices.changing("a") as change:
        pass
    return change.token


CHANGES: list[Change] = [
    put,
    invalidate,
    put_many,
    invalidate_softly,
    change_and_put,
    invalidate_tag,
    change_without_put,
    delete,
]


@pytest_asyncio.fixture
async def processes(address: str) -> AsyncIterator[tuple[Cache, Cache]]:
    async with Cache(address) as one, Cache(address) as two:
        yield one, two


async def test_reads_with_tokens_see_each_kind_of_change_of_another_process(
    processes: tuple[Cache, Cache],
) -> None:
    """Of one key and of many, although memory may lag ten minutes behind (E37)."""
    upstream = Upstream()
    here, there = processes
    mine, others = (
        declare(cache, upstream, memory_for="10m", fresh_for="1h", tags=lambda _: ["shop"])
        for cache in processes
    )
    for change in CHANGES:
        await others.get_many(["a", "b"])
        upstream.version += 1
        token = await change(here, mine, upstream.version)
        answer = await others.get("a", at_least=token)
        assert version(answer) == upstream.version, change.__name__
        upstream.version += 1
        token = await change(here, mine, upstream.version)
        answers = await others.get_many(["a", "b"], at_least=token)
        assert version(answers["a"]) == upstream.version, change.__name__
        with there.at_least(token):
            assert (await others("a")).version == upstream.version, change.__name__


async def test_a_value_of_one_cache_is_made_of_new_parts_of_another_cache_of_its_process(
    address: str,
) -> None:
    """E37, E29: another process invalidates both; the memory of the parts lags meanwhile."""
    stock = {"a": 1}

    def declared(data: Cache, pages: Cache) -> Callable[[str], Awaitable[str]]:
        @data.cached("part", fresh_for="1h", memory_for="10m", tags=["stock"])
        async def part(sku: str) -> int:
            return stock[sku]

        @pages.cached("page", fresh_for="1h", memory_for="10m", tags=["stock"])
        async def page(sku: str) -> str:
            return f"{await part(sku)} left"

        return page

    async with Cache(address) as data, Cache(address) as pages, Cache(address) as other:
        page = declared(data, pages)
        their_page = declared(other, other)
        assert await page("a") == "1 left"
        stock["a"] = 2
        token = (await other.invalidate_tag("stock")).token
        with pages.at_least(token):
            assert await page("a") == "2 left"
        assert await their_page("a") == "2 left"
