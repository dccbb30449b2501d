"""From a URL to a store: `memory://`, `sqlite:///path`, `redis://host`; imported when named."""

import time
from urllib.parse import unquote, urlsplit

from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, shown
from stillfresh.stores.contract import Store
from stillfresh.stores.memory import MemoryStore

__all__ = ["store_for"]

ALLOWED = (
    "memory://, sqlite:///path/to/file.db (sqlite:////path for an absolute one) "
    "or redis://host:6379/0 (also rediss://, valkey://, valkeys://)"
)
REDIS = {"redis", "rediss", "valkey", "valkeys"}


def store_for(store: str | Store, clock: Clock) -> Store:
    """A store as it is, or the one that an address names. Nothing is opened yet."""
    if not isinstance(store, str):
        if not callable(getattr(store, "acquire", None)):
            raise ConfigError(
                f"store {shown(store)}: neither an address nor a store; write {ALLOWED}"
            )
        return store
    return _named(store, clock)


def _named(url: str, clock: Clock) -> Store:
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise ConfigError(f"store {url!r}: not a store's address; write {ALLOWED}") from exc
    if parts.scheme in REDIS:
        return _redis(url, clock)
    if parts.query or parts.fragment:
        raise ConfigError(f"store {url!r}: takes no options behind ? or #; write {ALLOWED}")
    match parts.scheme:
        case "memory" if not parts.netloc and parts.path in {"", "/"}:
            return MemoryStore(clock=clock)
        case "sqlite" if not parts.netloc and len(parts.path) > 1:
            from stillfresh.stores.sqlite import SqliteStore  # noqa: PLC0415 (only when named)

            return SqliteStore(unquote(parts.path[1:]), clock=clock)
        case _:
            raise ConfigError(f"store {url!r}: not a store's address; write {ALLOWED}")


def _redis(url: str, clock: Clock) -> Store:
    """A cache on the machine's clock leaves leases to the server's, which is one for all."""
    try:
        from stillfresh.stores.redis.address import store_at  # noqa: PLC0415 (only when named)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "redis":
            raise
        raise ConfigError(
            'a Redis store needs the library "redis": pip install "stillfresh[redis]"'
        ) from exc
    return store_at(url, None if clock is time.time else clock)
