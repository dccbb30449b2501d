from typing import assert_type

from stillfresh import Answer, Cache, Handle, Loaded, Resource, SyncCache

cache = Cache("memory://")
sync = SyncCache("memory://")


@cache.cached("report", fresh_for="5m")
async def report(year: int, region: str = "eu") -> dict[str, int]:
    return {region: year}


@cache.cached("slow", fresh_for="5m")
def slow(year: int) -> int | Loaded[int]:  # a def: it runs in a thread
    return Loaded(year, fresh_for="1m")


@cache.batched("price", fresh_for="30s")
async def prices(skus: list[str]) -> dict[str, float]:
    return dict.fromkeys(skus, 1.5)


@sync.cached("name", fresh_for="5m", key=lambda user: user)
def name(user: int) -> str:
    return str(user)


class Shop:
    @cache.cached("stock", fresh_for="5m", ignore=("self",))
    async def stock(self, sku: str) -> int:
        return len(sku)


async def use(shop: Shop) -> None:
    assert_type(await report(2026), dict[str, int])
    assert_type(await report.get(2026, region="us"), Answer[dict[str, int]])
    assert_type(report.of(2026), Handle[dict[str, int]])
    assert_type(await slow(2026), int)
    assert_type(prices, Resource[str, float])
    assert_type(await prices("tea"), float)
    assert_type(await prices.get_many(["tea"]), dict[str, Answer[float]])
    assert_type(await shop.stock("tea"), int)
    async with prices.changing("tea") as change:
        await change.put(2.5)


def use_sync() -> None:
    assert_type(name(7), str)
    assert_type(name.get(7), Answer[str])
