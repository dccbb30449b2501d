"""What `behaviours.py` examines: a library that caches one value, and stillfresh as the first.

From a function that loads the value, a subject makes a way to get it and, where the library has
one, a way to drop it. `tasks` is for coroutines, `threads` for blocking code, `shared` for
blocking code in several processes with a place between them. The others are in `peers.py`.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from stillfresh import Cache

__all__ = [
    "HOUR",
    "KEY",
    "LEASE_FOR",
    "OURS",
    "Blocking",
    "Place",
    "Subject",
    "Way",
    "background_loop",
]

HOUR = 3600
KEY = "sku"
LEASE_FOR = 5.0
"""Seconds: the default; what a lock may last where a peer lets its user say so."""

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


@dataclass(frozen=True, slots=True)
class Place:
    """What processes have in common: a folder, and for some a server."""

    folder: Path
    redis: str = ""
    """Its URL, without a database."""
    lease_for: float = LEASE_FOR

    def of(self, turn: str) -> "Place":
        """One that nobody has used yet."""
        folder = self.folder / turn
        folder.mkdir(exist_ok=True)
        return replace(self, folder=folder, redis=self.redis and f"{self.redis}/{turn}")


Tasks: TypeAlias = Callable[[AsyncLoad], AbstractAsyncContextManager[Way]]
Threads: TypeAlias = Callable[[Load], AbstractContextManager[Blocking]]
Shared: TypeAlias = Callable[[Load, Place], AbstractContextManager[Blocking]]


@dataclass(frozen=True, slots=True)
class Subject:
    """None where the library has nothing for that."""

    name: str
    used: str
    tasks: Tasks | None = None
    threads: Threads | None = None
    shared: Shared | None = None
    on_redis: bool = False
    """Its processes share a server, not a folder."""


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
async def in_tasks(load: AsyncLoad) -> AsyncIterator[Way]:
    async with Cache("memory://") as cache:

        @cache.cached("price", fresh_for=HOUR)
        async def price(sku: str) -> int:  # noqa: ARG001 (the key)
            return await load()

        yield Way(lambda: price(KEY), lambda: price.of(KEY).invalidate())


@contextmanager
def blocking(load: Load, url: str, lease_for: float = LEASE_FOR) -> Iterator[Blocking]:
    cache = Cache(url)

    @cache.cached("price", fresh_for=HOUR, lease_for=lease_for)
    async def price(sku: str) -> int:  # noqa: ARG001 (the key)
        return await asyncio.to_thread(load)

    handle = price.of(KEY)
    with background_loop() as loop:
        asyncio.run_coroutine_threadsafe(cache.open(), loop).result()
        yield Blocking(
            lambda: cache.from_thread(price, KEY), lambda: cache.from_thread(handle.invalidate)
        )
        asyncio.run_coroutine_threadsafe(cache.close(), loop).result()


def on_sqlite(load: Load, place: Place) -> AbstractContextManager[Blocking]:
    return blocking(load, f"sqlite:///{place.folder}/cache.db", place.lease_for)


def on_redis(load: Load, place: Place) -> AbstractContextManager[Blocking]:
    return blocking(load, place.redis, place.lease_for)


OURS = [
    Subject(
        "**stillfresh**",
        "`@cache.cached`, `from_thread`, `invalidate`; between processes on SQLite",
        in_tasks,
        lambda load: blocking(load, "memory://"),
        on_sqlite,
    ),
    Subject("**stillfresh**, Redis", "the same on `redis://`", shared=on_redis, on_redis=True),
]
