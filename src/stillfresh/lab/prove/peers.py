"""Other caches under the same proof, each as its documentation says to use it.

Libraries use the same Redis, and their locks last as long as a lease of stillfresh. nginx needs no
store (`nginx`).
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

from stillfresh.errors import ConfigError
from stillfresh.lab.prove.nginx import NGINX, NginxShelf, checked_nginx
from stillfresh.lab.prove.shelf import PeerShelf
from stillfresh.lab.prove.witness import Log, MovedClock

if TYPE_CHECKING:
    from stillfresh.lab.prove.worker import ProofJob


class RedisPeerShelf(PeerShelf):
    """Reads through a function that the library has decorated."""

    def __init__(self, job: "ProofJob", log: Log, clock: MovedClock) -> None:
        super().__init__(job, log, clock)
        self._count_troubles()

    def _count_troubles(self) -> None:
        """Count commands that the server did not answer: most peers tell nobody."""
        library: Any = import_module("redis.asyncio")
        execute = library.Redis.execute_command

        async def execute_and_count(client: object, *command: object, **options: object) -> object:
            try:
                return await execute(client, *command, **options)
            except (library.ConnectionError, library.TimeoutError, OSError):
                self.troubles += 1
                raise

        library.Redis.execute_command = execute_and_count


class CashewsShelf(RedisPeerShelf):
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


class AiocacheShelf(RedisPeerShelf):
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
    NGINX: NginxShelf,
}
"""Other caches by name, as `--peer` takes it."""


def peer_place(url: str) -> tuple[str, str]:
    """A Redis address without what is ours behind `?`, and the namespace that was there."""
    parts = urlsplit(url)
    return urlunsplit(("redis", *parts[1:3], "", "")), parts.query.rpartition("tenant=")[2]


def checked_peer(name: str, address: str) -> str:
    """Check that the library or program is installed, and that it can use the store."""
    if name == NGINX:
        checked_nginx()
        return name
    if urlsplit(address).scheme not in {"redis", "valkey"}:
        raise ConfigError(
            f"--peer {name}: runs on one Redis or Valkey server; name redis://host:6379/0"
        )
    try:
        import_module(name)
    except ImportError as exc:
        raise ConfigError(
            f"--peer {name}: the library is not installed ({exc}); run pip install {name}"
        ) from exc
    return name
