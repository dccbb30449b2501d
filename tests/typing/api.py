"""M12, E15, W1: how the public API looks to a type checker. Checked by `mypy --strict`, never run.

A line that must be refused carries an ignore; strict mode fails if it is not needed.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import assert_type

from stillfresh import (
    Answer,
    Cache,
    CacheStats,
    Clock,
    Duration,
    Explanation,
    Handle,
    Loaded,
    Policy,
    Resource,
    Sweeper,
    SyncCache,
    SyncHandle,
    SyncResource,
    TtlCache,
    TtlStats,
    Update,
    Verdict,
    Watch,
)
from stillfresh.events import Events, Unsubscribe
from stillfresh.gateway.live import Connection, Hub, HubUpdate
from stillfresh.systems.coordinator import (
    CoordinatorsManager,
    Database,
    Kind,
    NexusClient,
    TtlConfig,
    TtlController,
    TtlCoordinator,
    TtlSnapshot,
)
from stillfresh.systems.waiting import (
    GameId,
    Navigation,
    RefetchRequest,
    Screen,
    Snapshot,
    State,
    WaitingCache,
)
from stillfresh.testing import Explored, ManualClock, explore

MISSING = object()

cache = TtlCache[str, int](ttl="1h")
assert_type(cache, TtlCache[str, int])
assert_type(cache.get("a"), int | None)
assert_type(cache.get("a", 0), int)
assert_type(cache.get("a", "none"), int | str)
assert_type(cache.get("a", None), int | None)
assert_type(cache.remove("a"), int | None)
assert_type(cache.remove("a", MISSING), int | object)
assert_type("a" in cache, bool)
assert_type(list(cache), list[str])
assert_type(dict(cache.items()), dict[str, int])
assert_type(len(cache), int)
assert_type(cache.cleanup_expired(limit=5), int)
assert_type(cache.stats(), TtlStats)
assert_type(cache.stats().expired_held, int)
assert_type(cache.stats().hits, int | None)

cache.insert(1, 1)  # type: ignore[arg-type]
cache.insert("a", "1")  # type: ignore[arg-type]
cache.get(1)  # type: ignore[call-overload]
TtlCache[list[str], int](60)  # type: ignore[type-var]
TtlCache[str, int]()  # type: ignore[call-arg]
TtlCache[str, int](60, 5)  # type: ignore[call-arg]
TtlCache[str, int](b"60")  # type: ignore[arg-type]

annotated: TtlCache[str, list[int]] = TtlCache(timedelta(minutes=5), max_entries=10)
manual = TtlCache[int, int](60, clock=ManualClock())


def told(key: str, value: int, reason: str) -> None:
    """An `on_evict` may be less particular about the reason."""


assert_type(TtlCache(60, on_evict=told), TtlCache[str, int])


class WsState:
    async def cleanup_expired(self) -> int:
        return 0


class Unnumbered:
    def cleanup_expired(self) -> str:
        return "many"


async def swept(*caches: TtlCache[str, int]) -> None:
    async with Sweeper(*caches, annotated, WsState(), Sweeper(every=1), every="5m") as sweeper:
        assert_type(sweeper, Sweeper)
        assert_type(sweeper.cleanup_expired(), int)
        assert_type(await sweeper.tick(), int)
    Sweeper(object(), every=1)  # type: ignore[arg-type]
    Sweeper(Unnumbered(), every=1)  # type: ignore[arg-type]
    Sweeper(*caches)  # type: ignore[call-arg]


def verdicts(policy: Policy, times: Iterable[float], clock: Clock) -> list[Verdict]:
    return [policy.verdict(fetched_at, clock()) for fetched_at in times]


def policies(fresh_for: Duration) -> Policy:
    policy = Policy(fresh_for, stale_for="1h", error_for=timedelta(days=1))
    assert_type(policy.fresh_for, float)
    policy.fresh_for = 5  # type: ignore[misc]
    return policy


def listeners(events: Events[int]) -> Unsubscribe:
    events.subscribe(lambda text: text.upper())  # type: ignore[attr-defined]
    events.emit("1")  # type: ignore[arg-type]
    return events.subscribe(print)


engine = Cache("memory://")


@engine.batched("price", fresh_for="30s", stale_for="1h", max_batch=50)
async def prices(skus: list[str]) -> Mapping[str, float]:
    return dict.fromkeys(skus, 1.0)


@engine.batched("count", fresh_for=5)
async def counts(ids: list[int]) -> dict[int, int | Loaded[int] | Exception]:
    return {one: Loaded(1, fresh_for="1m") if one else ValueError() for one in ids}


@engine.cached("report", fresh_for="5m")
async def report(year: int, region: str = "eu", *, deep: bool = False) -> list[str]:
    return [f"{year} {region} {deep}"]


@engine.cached("own_terms", fresh_for="5m")
async def own_terms(year: int) -> bytes | Loaded[bytes]:
    return Loaded(bytes(year), fresh_for="1m")


class Shop:
    @engine.cached("stock", fresh_for="5m", ignore=("self",), version="2")
    async def stock(self, sku: str, *, deep: bool = False) -> int:
        return len(sku)

    @engine.cached("offer", fresh_for="5m", key=lambda self, sku: (id(self), sku))
    async def offer(self, sku: str) -> Loaded[int]:
        return Loaded(len(sku), fresh_for=5)

    @staticmethod
    @engine.cached("rate", fresh_for="5m")
    async def rate(currency: str) -> float:
        return float(len(currency))


async def methods(shop: Shop) -> None:
    assert_type(await shop.stock("sku-1", deep=True), int)
    assert_type(await shop.stock.get("sku-1"), Answer[int])
    assert_type(shop.stock.of("sku-1"), Handle[int])
    assert_type(await Shop.stock(shop, "sku-1"), int)
    assert_type(await shop.offer("sku-1"), int)
    assert_type(await Shop.rate("eur"), float)
    await shop.stock(1)  # type: ignore[arg-type]
    await shop.stock("sku-1", "deep")  # type: ignore[call-arg, arg-type]
    await Shop.stock("sku-1")  # type: ignore[call-arg, arg-type]
    shop.stock.of()  # type: ignore[call-arg]


async def blocks() -> None:
    with engine.bypassed():
        assert_type(await prices("sku-1"), float)
    async with engine.override("memory://"):
        assert_type(await prices("sku-1"), float)
    with engine.override("memory://"):
        pass


async def engines() -> None:
    assert_type(prices, Resource[str, float])
    assert_type(await prices("sku-1"), float)
    assert_type(await prices.get("sku-1"), Answer[float])
    assert_type((await prices.get("sku-1")).value, float)
    assert_type((await prices.get("sku-1")).verdict, Verdict)
    assert_type(await prices.get_many(["sku-1"]), dict[str, Answer[float]])
    assert_type(prices.peek("sku-1"), Answer[float] | None)
    assert_type(prices.of("sku-1"), Handle[float])
    assert_type(await prices.of("sku-1").get(), Answer[float])
    assert_type(await prices.explain("sku-1"), Explanation)
    assert_type(await prices.get("sku-1", max_age="10s"), Answer[float])
    assert_type(await prices.get_many(["sku-1"], max_age=10), dict[str, Answer[float]])
    assert_type(await report.of(2026).get(max_age=timedelta(seconds=1)), Answer[list[str]])
    await prices.put("sku-1", 1.5, fresh_for="10s", stale_for=timedelta(seconds=5))
    await prices.put("sku-1", Loaded(1.5, fresh_for=10))
    await prices.put_many({"sku-1": 1.5, "sku-2": Loaded(1.5, fresh_for=10)}, error_for=60)
    await prices.put("sku-1", "dear")  # type: ignore[arg-type]
    await prices.put(1, 1.5)  # type: ignore[arg-type]
    await prices.put("sku-1", 1.5, ttl=3)  # type: ignore[call-arg]
    await prices.put_many({1: 1.5})  # type: ignore[dict-item]
    await report.of(2026).put(["a"], fresh_for=5)
    await report.of(2026).put("a")  # type: ignore[arg-type]
    await prices(1)  # type: ignore[arg-type]
    await prices.get_many([1])  # type: ignore[list-item]
    await prices.invalidate(1)  # type: ignore[arg-type]
    prices.peek(1)  # type: ignore[arg-type]

    assert_type(counts, Resource[int, int])
    assert_type(await counts(1), int)

    assert_type(await report(2026), list[str])
    assert_type(await report(2026, region="us", deep=True), list[str])
    assert_type(await report.get(2026, "us"), Answer[list[str]])
    assert_type(report.of(2026), Handle[list[str]])
    await report()  # type: ignore[call-arg]
    await report("2026")  # type: ignore[arg-type]
    await report(2026, nation="eu")  # type: ignore[call-arg]
    report.of(2026, "eu", extra=1)  # type: ignore[call-arg]
    assert_type(await own_terms.get(1), Answer[bytes])
    assert_type(await own_terms(1), bytes)

    async with engine as opened:
        assert_type(opened, Cache)
        assert_type(await opened.stats(), CacheStats)
        assert_type(opened.from_thread(prices, "sku-1"), float)
        assert_type(opened.from_thread(report.get, 2026, deep=True), Answer[list[str]])
        opened.from_thread(prices.put, "sku-1", 1.5, fresh_for=3)
        opened.from_thread(report, "2026")  # type: ignore[arg-type]


async def fetched() -> list[str]:
    return ["a"]


async def navigated() -> None:
    waiting = WaitingCache(fetched)
    waiting.start()
    waiting.opened("a", my_turn=True)
    waiting.your_turn(1, version=2)
    waiting.game_state("a", my_turn=False, version=3)
    await waiting.settled()
    assert_type(waiting.state, State)
    assert_type(waiting.state.pool, tuple[GameId, ...])
    assert_type(waiting.state.snapshot, Snapshot | None)
    assert_type(waiting.state.screen, Screen | None)
    assert_type(waiting.state.in_flight, RefetchRequest | None)
    assert_type(waiting.navigation(current="a"), Navigation)
    assert_type(waiting.on_changed(print), Unsubscribe)
    waiting.your_turn(None)  # type: ignore[arg-type]
    waiting.your_turn("a", version="2")  # type: ignore[arg-type]
    WaitingCache(lambda: ["a"])  # type: ignore[arg-type, return-value]
    assert_type(explore(0, lambda at: [("on", at + 1)], {}, depth=3), Explored)


async def watching() -> None:
    with prices.watch("sku-1", ["sku-2"]) as watch:
        assert_type(watch, Watch[str, float])
        async for update in watch:
            assert_type(update, Update[str, float])
            assert_type(update.answer.value, float)
            assert_type(update.answer.unverified, bool)
        watch.add("sku-3")
        watch.add(3)  # type: ignore[arg-type]
    assert_type(counts.watch(1, [2]), Watch[int, int])
    prices.watch(1)  # type: ignore[arg-type]
    prices.watch("a", tell=lambda update: update.answer.value + 1)
    with report.of(2026).watch() as one:
        async for new in one:
            assert_type(new.answer, Answer[list[str]])


class PlainCoordinator:
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def set_route(self, route: str) -> None: ...


async def coordinating(kind: Kind) -> None:
    nexus = NexusClient("http://127.0.0.1:8080", timeout="5s")
    controller = TtlController(nexus=nexus, database=Database("app.db"), kinds=[kind])
    config = TtlConfig.from_env({})
    async with controller, TtlCoordinator(controller, config, follow_reposts=True) as ttl:
        ttl.subscribe_post(composite_post_id="author:post")
        ttl.subscribe_user(pubky="ann")
        ttl.subscribe(kind.name, "sku-1")
        assert_type(ttl.snapshot(), TtlSnapshot)
        CoordinatorsManager(ttl, PlainCoordinator())
        CoordinatorsManager("ttl")  # type: ignore[arg-type]
        off: Unsubscribe = ttl.on_updated(lambda kind, ids: print(kind.upper(), ids[0].upper()))
        off()
    TtlController(nexus=object(), database=Database("app.db"))  # type: ignore[arg-type]


async def connected(hub: Hub) -> None:
    with hub.connect("ann") as connection:
        assert_type(connection, Connection)
        async for update in connection:
            assert_type(update, HubUpdate)


threads = SyncCache("memory://")


@threads.batched("price", fresh_for="30s", max_batch=50, version="2")
def plain_prices(skus: list[str]) -> dict[str, float | Loaded[float]]:
    return dict.fromkeys(skus, 1.0)


@threads.cached("report", fresh_for="5m", ignore=("deep",))
def plain_report(year: int, region: str = "eu", *, deep: bool = False) -> list[str]:
    return [f"{year} {region} {deep}"]


@engine.cached("plain", fresh_for="5m")
def def_loader(year: int) -> Loaded[bytes]:
    return Loaded(bytes(year), tags=["year"])


@engine.batched("plain_many", fresh_for="5m")
def def_loaders(years: list[int]) -> dict[int, bytes]:
    return {year: bytes(year) for year in years}


def no_loop() -> None:
    assert_type(plain_prices, SyncResource[str, float])
    assert_type(plain_prices("sku-1"), float)
    assert_type(plain_prices.get("sku-1", max_age="10s"), Answer[float])
    assert_type(plain_prices.get_many(["sku-1"]), dict[str, Answer[float]])
    assert_type(plain_prices.peek("sku-1"), Answer[float] | None)
    assert_type(plain_prices.of("sku-1"), SyncHandle[float])
    assert_type(plain_report(2026, region="us", deep=True), list[str])
    assert_type(plain_report.get(2026), Answer[list[str]])
    assert_type(plain_report.of(2026).explain(), Explanation)
    assert_type(threads.stats(), CacheStats)
    plain_prices(5)  # type: ignore[arg-type]
    plain_prices.put("sku-1", "cheap")  # type: ignore[arg-type]
    plain_report("2026")  # type: ignore[arg-type]
    plain_report(2026, depth=1)  # type: ignore[call-arg]
    plain_prices.watch("sku-1")  # type: ignore[attr-defined]
    threads.cached("no_terms")  # type: ignore[call-arg]
    with threads as same, same.bypassed(), same.override("memory://"):
        assert_type(same, SyncCache)


async def def_in_async() -> None:
    assert_type(await def_loader(2026), bytes)
    assert_type(await def_loaders.get(2026), Answer[bytes])
