"""From a URL to a store: `memory://`, `sqlite:///path`. Each store is imported when it is named."""

from urllib.parse import unquote, urlsplit

from stillfresh.clock import Clock
from stillfresh.errors import ConfigError
from stillfresh.stores.contract import Store
from stillfresh.stores.memory import MemoryStore

__all__ = ["store_for"]

ALLOWED = "memory:// or sqlite:///path/to/file.db (sqlite:////path for an absolute one)"


def store_for(url: str, clock: Clock) -> Store:
    """Nothing is opened yet."""
    parts = urlsplit(url)
    match parts.scheme:
        case "memory" if not parts.netloc and parts.path in {"", "/"}:
            return MemoryStore(clock=clock)
        case "sqlite" if not parts.netloc and len(parts.path) > 1:
            from stillfresh.stores.sqlite import SqliteStore  # noqa: PLC0415 (only when named)

            return SqliteStore(unquote(parts.path[1:]), clock=clock)
        case _:
            raise ConfigError(f"store {url!r}: not a store's address; write {ALLOWED}")
