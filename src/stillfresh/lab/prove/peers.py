"""Other libraries under the same proof, each as its documentation says to use it on Redis.

A value names its load and when that began; what the library returns is what a reader was served.
Their locks last as long as a lease of stillfresh.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

from stillfresh.errors import ConfigError, LoadFailed, StoreError, error_text
from stillfresh.lab.prove.witness import LoadNames, Log, MovedClock, Seen

if TYPE_CHECKING:
    from stillfresh.lab.prove.worker import ProofJob


class PeerShelf:
    """Reads through a function that the library has decorated."""

    get: Callable[[str], Awaitable[str]]
    drop: Callable[[str], Awaitable[object]]

    def __init__(self, job: "ProofJob", log: Log, clock: MovedClock) -> None:
        self.job = job
        self._log = log
        self._clock = clock
        self._names = LoadNames(job.seed, log, clock)
        self._troubles = 0
        self._count_troubles()

    def _count_troubles(self) -> None:
        """Count commands that the server did not answer: most peers tell nobody."""
        library: Any = import_module("redis.asyncio")
        execute = library.Redis.execute_command

        async def execute_and_count(client: object, *command: object, **options: object) -> object:
            try:
                return await execute(client, *command, **options)
            except (library.ConnectionError, library.TimeoutError, OSError):
                self._troubles += 1
                raise

        library.Redis.execute_command = execute_and_count

    close: Callable[[], Awaitable[object]]

    async def open(self) -> None:
        """Do nothing: the library connects when it is used."""

    async def load(self, key: str) -> str:
        wall = self._clock()
        names = await self._names.load({key: "its own"})
        self._log.tell(Seen("published", time.monotonic(), time.monotonic(), key=key))
        return f"{wall} {names[key]}"

    async def read(self, keys: list[str]) -> list[Seen]:
        return [await self._read_key(key) for key in keys]

    async def _read_key(self, key: str) -> Seen:
        troubles = self._troubles
        wall = self._clock()
        began = time.monotonic()
        try:
            value = await self.get(key)
            fetched_at, _, load = value.partition(" ")
        except Exception as exc:
            raise LoadFailed(error_text(exc)) from exc
        ended = time.monotonic()
        blind = self._troubles != troubles
        return Seen(
            "served",
            began,
            ended,
            key=key,
            load=load,
            wall=wall,
            # The library does not say how fresh its answer is: if it could not ask the server,
            # nothing is claimed of it.
            verdict="unknown" if blind else "fresh",
            fetched_at=float(fetched_at),
            blind=blind,
        )

    async def invalidate(self, key: str) -> None:
        began = time.monotonic()
        self._log.tell(Seen("invalidating", began, key=key))
        try:
            await self.drop(key)
        except Exception as exc:
            raise StoreError(error_text(exc)) from exc
        self._log.tell(Seen("invalidated", began, time.monotonic(), key=key))


class CashewsShelf(PeerShelf):
    """`lock=True`, which its documentation names against many loads at once."""

    def __init__(self, job: "ProofJob", log: Log, clock: MovedClock) -> None:
        super().__init__(job, log, clock)
        place, name = peer_place(job.stage.url)
        self._cache: Any = import_module("cashews").Cache()
        self._cache.setup(place, pickle_type="json")

        async def price(sku: str) -> str:
            return await self.load(sku)

        self.get = self._cache(ttl=job.stage.fresh_for, key=f"{name}:{{sku}}", lock=True)(price)
        self.drop = lambda sku: self._cache.delete(f"{name}:{sku}")
        self.close = self._cache.close


class AiocacheShelf(PeerShelf):
    """`cached_stampede`, its decorator against many loads at once."""

    def __init__(self, job: "ProofJob", log: Log, clock: MovedClock) -> None:
        super().__init__(job, log, clock)
        place, name = peer_place(job.stage.url)
        parts = urlsplit(place)
        library = import_module("aiocache")

        async def price(sku: str) -> str:
            return await self.load(sku)

        cached: Any = library.cached_stampede(
            lease=1,
            ttl=job.stage.fresh_for,
            key_builder=lambda _, sku: f"{name}:{sku}",
            cache=library.Cache.REDIS,
            endpoint=parts.hostname,
            port=parts.port or 6379,
            password=parts.password,
            db=int(parts.path.strip("/") or 0),
        )(price)
        self.get = cached
        self.drop = lambda sku: cached.cache.delete(f"{name}:{sku}")
        self.close = cached.cache.close


PEERS: Final[Mapping[str, Callable[["ProofJob", Log, MovedClock], PeerShelf]]] = {
    "cashews": CashewsShelf,
    "aiocache": AiocacheShelf,
}
"""Other libraries by name, as `--peer` takes it."""


def peer_place(url: str) -> tuple[str, str]:
    """A Redis address without what is ours behind `?`, and the namespace that was there."""
    parts = urlsplit(url)
    return urlunsplit(("redis", *parts[1:3], "", "")), parts.query.rpartition("tenant=")[2]


def checked_peer(name: str, address: str) -> str:
    """Check that the library is installed, and that it can use the store."""
    if urlsplit(address).scheme not in {"redis", "valkey"}:
        raise ConfigError("--peer: runs on one Redis or Valkey server; name redis://host:6379/0")
    try:
        import_module(name)
    except ImportError as exc:
        raise ConfigError(
            f"--peer {name}: the library is not installed ({exc}); run pip install {name}"
        ) from exc
    return name
