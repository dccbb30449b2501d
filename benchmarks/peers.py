"""The peers that `behaviours.py` examines, each as its own documentation says for this job (T6).

Where a library has several ways, the plain one and those that it recommends against stampedes
stand side by side. A lock whose length its user chooses lasts as long as a lease of stillfresh.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import aiocache
import async_lru
import cachebox
import cachetools
import cashews
import diskcache
import moka_py
import theine
from aiocache.lock import OptimisticLock
from dogpile.cache import make_region

from benchmarks.subjects import (
    HOUR,
    KEY,
    LEASE_FOR,
    AsyncLoad,
    Blocking,
    Load,
    Place,
    Shared,
    Subject,
    Tasks,
    Threads,
    Way,
    background_loop,
)

__all__ = ["PEERS"]

PRICE = f"price:{KEY}"


def simple(
    decorator: Callable[[], Any], drop: Callable[[Any], object] | None = None
) -> tuple[Tasks, Threads]:
    """Both ways of a decorator that takes async functions and others; made anew for each use."""

    @asynccontextmanager
    async def tasks(load: AsyncLoad) -> AsyncIterator[Way]:
        async def price(sku: str) -> int:  # noqa: ARG001 (the key)
            return await load()

        cached = decorator()(price)

        async def get() -> int:
            value: int = await cached(KEY)
            return value

        async def dropped() -> None:
            if drop is not None and asyncio.iscoroutine(result := drop(cached)):
                await result

        yield Way(get, None if drop is None else dropped)

    @contextmanager
    def threads(load: Load) -> Iterator[Blocking]:
        cached = decorator()(lambda _sku: load())
        yield Blocking(lambda: cached(KEY), None if drop is None else lambda: drop(cached))

    return tasks, threads


def on_loop(tasks: Callable[[Place], Tasks]) -> Shared:
    """An async library in a script: on a loop of its own."""

    @contextmanager
    def shared(load: Load, place: Place) -> Iterator[Blocking]:
        async def load_in_thread() -> int:
            return await asyncio.to_thread(load)

        with background_loop() as loop:
            ways = tasks(place)(load_in_thread)
            way = asyncio.run_coroutine_threadsafe(ways.__aenter__(), loop).result()

            async def get() -> int:
                return await way.get()

            yield Blocking(lambda: asyncio.run_coroutine_threadsafe(get(), loop).result())
            closing = ways.__aexit__(None, None, None)
            asyncio.run_coroutine_threadsafe(closing, loop).result()

    return shared


def cashews_with(url: str, *, lock: bool = False, locked_for: float | None = None) -> Tasks:
    @asynccontextmanager
    async def tasks(load: AsyncLoad) -> AsyncIterator[Way]:
        nuts = cashews.Cache()
        nuts.setup(url)

        async def price(sku: str) -> int:  # noqa: ARG001 (the key)
            return await load()

        cached: Any = nuts(ttl=HOUR, key="price:{sku}", lock=lock)(price)
        if locked_for is not None:
            cached = nuts.locked(ttl=locked_for, key="price:{sku}")(cached)
        yield Way(lambda: cached(KEY), lambda: nuts.delete(PRICE))
        await nuts.close()

    return tasks


def aiocache_with(decorator: Any, **options: object) -> Tasks:  # noqa: ANN401 (no types)
    return simple(
        lambda: decorator(ttl=HOUR, key_builder=lambda _, sku: f"price:{sku}", **options),
        lambda cached: cached.cache.delete(PRICE),
    )[0]


def aiocache_on_redis(place: Place) -> Tasks:
    server = urlsplit(place.redis)
    return aiocache_with(
        aiocache.cached_stampede,
        lease=place.lease_for,
        cache=aiocache.Cache.REDIS,
        endpoint=server.hostname,
        port=server.port,
    )


@asynccontextmanager
async def aiocache_optimistic(load: AsyncLoad) -> AsyncIterator[Way]:
    cache = aiocache.Cache(aiocache.Cache.MEMORY)

    async def get() -> int:
        found: int | None = await cache.get(PRICE)
        if found is None:
            async with OptimisticLock(cache, PRICE) as lock:
                found = await load()
                await lock.cas(found)
        return found

    yield Way(get, lambda: cache.delete(PRICE))


def cachetools_with(**options: Callable[[], object]) -> Threads:
    def decorator() -> object:
        cache: Any = cachetools.TTLCache(100, HOUR)
        chosen: dict[str, Any] = {name: made() for name, made in options.items()}
        return cachetools.cached(cache, **chosen)

    def drop(cached: Any) -> None:  # noqa: ANN401 (no types)
        with cached.cache_lock:
            cached.cache.pop(cached.cache_key(KEY), None)

    return simple(decorator, drop)[1]


@contextmanager
def moka_get_with(load: Load) -> Iterator[Blocking]:
    cache: Any = moka_py.Moka(100, ttl=HOUR)
    yield Blocking(lambda: cache.get_with(KEY, load), lambda: cache.remove(KEY))


def dogpile_with(backend: str, **arguments: object) -> Threads:
    @contextmanager
    def threads(load: Load) -> Iterator[Blocking]:
        region = make_region().configure(backend, expiration_time=HOUR, arguments=arguments)
        yield Blocking(lambda: region.get_or_create(KEY, load), lambda: region.delete(KEY))

    return threads


def dogpile_on_file(load: Load, place: Place) -> AbstractContextManager[Blocking]:
    return dogpile_with("dogpile.cache.dbm", filename=str(place.folder / "cache.dbm"))(load)


def dogpile_on_redis(load: Load, place: Place) -> AbstractContextManager[Blocking]:
    return dogpile_with(
        "dogpile.cache.redis",
        url=place.redis,
        distributed_lock=True,
        thread_local_lock=False,
        lock_timeout=place.lease_for,
    )(load)


def disk_stampede(disk: diskcache.Cache, load: Load) -> Any:  # noqa: ANN401
    return diskcache.memoize_stampede(disk, expire=HOUR, name="price")(lambda _sku: load())


def disk_barrier(expire: float | None = None) -> Callable[[diskcache.Cache, Load], Any]:
    """Double-checked locking, from diskcache's case study of a landing page."""

    def decorated(disk: diskcache.Cache, load: Load) -> Any:  # noqa: ANN401
        inner = disk.memoize(name="price", expire=HOUR)(lambda _sku: load())
        locked = diskcache.barrier(disk, diskcache.Lock, name="lock", expire=expire)(inner)
        return disk.memoize(name="price", expire=0)(locked)

    return decorated


def diskcache_with(decorate: Callable[[diskcache.Cache, Load], Any]) -> tuple[Threads, Shared]:
    @contextmanager
    def shared(load: Load, place: Place | None) -> Iterator[Blocking]:
        with diskcache.Cache(None if place is None else str(place.folder)) as disk:
            cached = decorate(disk, load)
            yield Blocking(lambda: cached(KEY), lambda: disk.delete(cached.__cache_key__(KEY)))

    return lambda load: shared(load, None), shared


def in_one_process() -> list[Subject]:
    lru, _ = simple(
        lambda: async_lru.alru_cache(ttl=HOUR), lambda cached: cached.cache_invalidate(KEY)
    )
    box = simple(
        lambda: cachebox.cached(cachebox.TTLCache(100, HOUR)),
        lambda cached: cached.cache.pop(KEY, None),
    )
    moka = simple(
        lambda: moka_py.cached(100, ttl=HOUR, wait_concurrent=True),
        lambda cached: cached.cache_clear(),
    )
    return [
        Subject("async-lru", "`@alru_cache`, `cache_invalidate`", lru),
        Subject("cachebox", "`@cached(TTLCache(…))`, its lock by default, `cache.pop`", *box),
        Subject(
            "cachetools, lock",
            "`@cached(TTLCache(…), lock=Lock())`, `cache.pop` under the lock",
            threads=cachetools_with(lock=threading.Lock),
        ),
        Subject(
            "cachetools, condition",
            "`@cached(TTLCache(…), condition=Condition())`, its way against stampedes",
            threads=cachetools_with(condition=threading.Condition),
        ),
        Subject("moka-py", "`@cached(wait_concurrent=True)`, `cache_clear`", *moka),
        Subject("moka-py, `get_with`", "`Moka.get_with`, `remove`", threads=moka_get_with),
        Subject(
            "theine",
            "`@Memoize`, which cannot invalidate",
            *simple(lambda: theine.Memoize(100, timedelta(hours=1))),
        ),
    ]


def of_aiocache() -> list[Subject]:
    return [
        Subject("aiocache", "`@cached`, `cache.delete`", aiocache_with(aiocache.cached)),
        Subject(
            "aiocache, stampede",
            "`@cached_stampede`, which is its `RedLock`; between processes on Redis, `lease=5`",
            aiocache_with(aiocache.cached_stampede),
            shared=on_loop(aiocache_on_redis),
            on_redis=True,
        ),
        Subject(
            "aiocache, optimistic",
            "`OptimisticLock` and `cas`, which by its documentation finds no conflict where there "
            "was no value",
            aiocache_optimistic,
        ),
    ]


def of_cashews() -> list[Subject]:
    return [
        Subject(
            "cashews",
            "`@cache` on `mem://`, protected by default, `cache.delete`",
            cashews_with("mem://"),
        ),
        Subject(
            "cashews, lock",
            "`@cache(lock=True)`, whose lock lasts as long as a value; between processes on Redis",
            cashews_with("mem://", lock=True),
            shared=on_loop(lambda place: cashews_with(place.redis, lock=True)),
            on_redis=True,
        ),
        Subject(
            "cashews, locked",
            '`@cache.locked(ttl="5s")` around `@cache`; between processes on Redis',
            cashews_with("mem://", locked_for=LEASE_FOR),
            shared=on_loop(lambda place: cashews_with(place.redis, locked_for=place.lease_for)),
            on_redis=True,
        ),
    ]


def of_diskcache() -> list[Subject]:
    stampede = diskcache_with(disk_stampede)
    barrier = diskcache_with(disk_barrier())
    expiring = diskcache_with(disk_barrier(LEASE_FOR))
    return [
        Subject(
            "diskcache, stampede",
            "`memoize_stampede`, which is for values that are about to expire, `cache.delete`",
            threads=stampede[0],
            shared=stampede[1],
        ),
        Subject(
            "diskcache, barrier",
            "`memoize` around `barrier(cache, Lock)` around `memoize`, as in its case study",
            threads=barrier[0],
            shared=barrier[1],
        ),
        Subject(
            "diskcache, barrier that expires",
            "the same with `barrier(cache, Lock, expire=5)`",
            threads=expiring[0],
            shared=expiring[1],
        ),
    ]


def of_dogpile() -> list[Subject]:
    return [
        Subject(
            "dogpile.cache",
            "`region.get_or_create`, `region.delete`, in memory; between processes on `dbm`",
            threads=dogpile_with("dogpile.cache.memory"),
            shared=dogpile_on_file,
        ),
        Subject(
            "dogpile.cache, Redis",
            "the same on `redis` with `distributed_lock=True`, `thread_local_lock=False`, "
            "`lock_timeout=5`",
            shared=dogpile_on_redis,
            on_redis=True,
        ),
    ]


PEERS = [*of_aiocache(), *in_one_process(), *of_cashews(), *of_diskcache(), *of_dogpile()]
