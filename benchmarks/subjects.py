"""The libraries that `behaviours.py` examines, each as its own documentation says for this job.

A subject caches one value. From a function that loads it, it makes a way to get the value and,
where the library has one, a way to drop it. `tasks` is for coroutines, `threads` for blocking code,
`shared` for blocking code in several processes with one folder between them.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import aiocache
import async_lru
import cachebox
import cachetools
import cashews
import diskcache
import moka_py
import theine
from dogpile.cache import make_region

from benchmarks.sqlite import store_module
from stillfresh import Cache

__all__ = ["SUBJECTS", "Blocking", "Subject", "Way"]

HOUR = 3600
KEY = "sku"

AsyncLoad: TypeAlias = Callable[[], Awaitable[int]]
Load: TypeAlias = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Way:
    """`drop` is None where the library cannot invalidate what it cached."""

    get: Callable[[], Awaitable[int]]
    drop: Callable[[], Awaitable[object]] | None = None


@dataclass(frozen=True, slots=True)
class Blocking:
    """The same without await."""

    get: Callable[[], int]
    drop: Callable[[], object] | None = None


Tasks: TypeAlias = Callable[[AsyncLoad], AbstractAsyncContextManager[Way]]
Threads: TypeAlias = Callable[[Load], AbstractContextManager[Blocking]]
Shared: TypeAlias = Callable[[Load, Path], AbstractContextManager[Blocking]]


@dataclass(frozen=True, slots=True)
class Subject:
    """None where the library has nothing for that."""

    name: str
    used: str
    tasks: Tasks | None = None
    threads: Threads | None = None
    shared: Shared | None = None


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


@contextmanager
def background_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def stillfresh_tasks(load: AsyncLoad) -> AsyncIterator[Way]:
    async with Cache("memory://") as cache:

        @cache.cached("price", fresh_for=HOUR)
        async def price(sku: str) -> int:  # noqa: ARG001 (the key)
            return await load()

        yield Way(lambda: price(KEY), lambda: price.of(KEY).invalidate())


@contextmanager
def stillfresh_blocking(cache: Cache, load: Load) -> Iterator[Blocking]:
    @cache.cached("price", fresh_for=HOUR)
    async def price(sku: str) -> int:  # noqa: ARG001 (the key)
        return await asyncio.to_thread(load)

    handle = price.of(KEY)
    with background_loop() as loop:
        asyncio.run_coroutine_threadsafe(cache.open(), loop).result()
        yield Blocking(
            lambda: cache.from_thread(price, KEY), lambda: cache.from_thread(handle.invalidate)
        )
        asyncio.run_coroutine_threadsafe(cache.close(), loop).result()


def stillfresh_threads(load: Load) -> AbstractContextManager[Blocking]:
    return stillfresh_blocking(Cache("memory://"), load)


def stillfresh_shared(load: Load, folder: Path) -> AbstractContextManager[Blocking]:
    module = store_module()
    if module is None:
        raise AssertionError("no SQLite store in this version")
    return stillfresh_blocking(Cache(module.SqliteStore(str(folder / "cache.db"))), load)


def cashews_with(url: str, *, lock: bool) -> Tasks:
    @asynccontextmanager
    async def tasks(load: AsyncLoad) -> AsyncIterator[Way]:
        nuts = cashews.Cache()
        nuts.setup(url)

        async def price(sku: str) -> int:  # noqa: ARG001 (the key)
            return await load()

        cached: Any = nuts(ttl=HOUR, key="price:{sku}", lock=lock)(price)
        yield Way(lambda: cached(KEY), lambda: nuts.delete(f"price:{KEY}"))
        await nuts.close()

    return tasks


def cashews_shared(load: Load, folder: Path) -> AbstractContextManager[Blocking]:
    """An async library, called from a script: on a loop of its own."""

    @contextmanager
    def blocking() -> Iterator[Blocking]:
        async def load_in_thread() -> int:
            return await asyncio.to_thread(load)

        url = f"disk://?directory={folder}&shards=0"
        with background_loop() as loop:
            ways = cashews_with(url, lock=True)(load_in_thread)
            way = asyncio.run_coroutine_threadsafe(ways.__aenter__(), loop).result()

            async def get() -> int:
                return await way.get()

            yield Blocking(lambda: asyncio.run_coroutine_threadsafe(get(), loop).result())
            closing = ways.__aexit__(None, None, None)
            asyncio.run_coroutine_threadsafe(closing, loop).result()

    return blocking()


def aiocache_with(decorator: Any) -> Tasks:  # noqa: ANN401 (no types)
    return simple(
        lambda: decorator(ttl=HOUR, key_builder=lambda _, sku: f"price:{sku}"),
        lambda cached: cached.cache.delete(f"price:{KEY}"),
    )[0]


def cachetools_with(**options: Callable[[], object]) -> Threads:
    def decorator() -> object:
        cache: Any = cachetools.TTLCache(100, HOUR)
        chosen: dict[str, Any] = {name: made() for name, made in options.items()}
        return cachetools.cached(cache, **chosen)

    def drop(cached: Any) -> None:  # noqa: ANN401 (no types)
        with cached.cache_lock:
            cached.cache.pop(cached.cache_key(KEY), None)

    return simple(decorator, drop)[1]


def dogpile_with(backend: str, **arguments: object) -> Threads:
    @contextmanager
    def threads(load: Load) -> Iterator[Blocking]:
        region = make_region().configure(backend, expiration_time=HOUR, arguments=arguments)
        yield Blocking(lambda: region.get_or_create(KEY, load), lambda: region.delete(KEY))

    return threads


def dogpile_shared(load: Load, folder: Path) -> AbstractContextManager[Blocking]:
    return dogpile_with("dogpile.cache.dbm", filename=str(folder / "cache.dbm"))(load)


def disk_stampede(disk: diskcache.Cache, load: Load) -> Any:  # noqa: ANN401
    return diskcache.memoize_stampede(disk, expire=HOUR, name="price")(lambda _sku: load())


def disk_barrier(disk: diskcache.Cache, load: Load) -> Any:  # noqa: ANN401
    """Double-checked locking, from diskcache's case study of a landing page."""
    inner = disk.memoize(name="price", expire=HOUR)(lambda _sku: load())
    locked = diskcache.barrier(disk, diskcache.Lock, name="lock")(inner)
    return disk.memoize(name="price", expire=0)(locked)


def diskcache_with(decorate: Callable[[diskcache.Cache, Load], Any]) -> tuple[Threads, Shared]:
    @contextmanager
    def shared(load: Load, folder: Path | None) -> Iterator[Blocking]:
        with diskcache.Cache(None if folder is None else str(folder)) as disk:
            cached = decorate(disk, load)
            yield Blocking(lambda: cached(KEY), lambda: disk.delete(cached.__cache_key__(KEY)))

    return lambda load: shared(load, None), shared


def subjects() -> list[Subject]:
    box = simple(
        lambda: cachebox.cached(cachebox.TTLCache(100, HOUR)),
        lambda cached: cached.cache.pop(KEY, None),
    )
    moka = simple(
        lambda: moka_py.cached(100, ttl=HOUR, wait_concurrent=True),
        lambda cached: cached.cache_clear(),
    )
    lru, _ = simple(
        lambda: async_lru.alru_cache(ttl=HOUR),
        lambda cached: cached.cache_invalidate(KEY),
    )
    wheel = simple(lambda: theine.Memoize(100, timedelta(hours=1)))
    nuts, locked_nuts = (cashews_with("mem://", lock=lock) for lock in (False, True))
    stampede, barrier = diskcache_with(disk_stampede), diskcache_with(disk_barrier)
    on_disk = stillfresh_shared if store_module() is not None else None
    return [
        Subject(
            "**stillfresh**",
            "`@cache.cached`, `from_thread`, `invalidate`; between processes on SQLite",
            stillfresh_tasks,
            stillfresh_threads,
            on_disk,
        ),
        Subject("aiocache", "`@cached`, `cache.delete`", aiocache_with(aiocache.cached)),
        Subject(
            "aiocache, stampede", "`@cached_stampede`", aiocache_with(aiocache.cached_stampede)
        ),
        Subject("async-lru", "`@alru_cache`, `cache_invalidate`", lru),
        Subject("cachebox", "`@cached(TTLCache(…))`, its lock by default, `cache.pop`", *box),
        Subject(
            "cachetools, lock",
            "`@cached(TTLCache(…), lock=Lock())`, `cache.pop` under the lock",
            threads=cachetools_with(lock=threading.Lock),
        ),
        Subject(
            "cachetools, condition",
            "`@cached(TTLCache(…), condition=Condition())`",
            threads=cachetools_with(condition=threading.Condition),
        ),
        Subject("cashews", "`@cache` on `mem://`, protected by default, `cache.delete`", nuts),
        Subject(
            "cashews, lock",
            "`@cache(lock=True)`, whose lock lasts as long as a value, on `mem://`; between "
            "processes on `disk://`",
            locked_nuts,
            shared=cashews_shared,
        ),
        Subject(
            "diskcache, stampede",
            "`memoize_stampede`, `cache.delete`",
            threads=stampede[0],
            shared=stampede[1],
        ),
        Subject(
            "diskcache, barrier",
            "`memoize` around `barrier(cache, Lock)`, without its `expire`, around `memoize`",
            threads=barrier[0],
            shared=barrier[1],
        ),
        Subject(
            "dogpile.cache",
            "`region.get_or_create`, `region.delete`, in memory; between processes on `dbm`",
            threads=dogpile_with("dogpile.cache.memory"),
            shared=dogpile_shared,
        ),
        Subject("moka-py", "`@cached(wait_concurrent=True)`, `cache_clear`", *moka),
        Subject("theine", "`@Memoize`, which cannot invalidate", *wheel),
    ]


SUBJECTS = subjects()
