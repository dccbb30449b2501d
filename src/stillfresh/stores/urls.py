"""From an address to a store: `memory://`, `sqlite:///path`, `redis://…`, `postgresql://…`, …

Each store is imported when it is named. `prices.db` alone is a SQLite file. Behind any address
`?tenant=acme` names a tenant, behind the first two `?max_bytes=2GB` a limit.
"""

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import PurePath
from typing import Any, Final, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, needs, shown, shown_address
from stillfresh.stores.capabilities import HasAddress
from stillfresh.stores.contract import Store
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.tenants import checked_tenant, for_tenant

AnyStore = TypeVar("AnyStore", bound=Store)

ALLOWED: Final = (
    "memory://, sqlite:///path/to/file.db (or the name alone, file.db; sqlite:////path for an "
    "absolute one; ?max_bytes=2GB behind it for a limit), "
    "redis://host:6379/0 (also rediss://, valkey://, valkeys://, redis+cluster://, "
    "redis+sentinel://), postgresql://user@host/database or dynamodb://table?bucket=name"
)
FILE_NAME: Final = re.compile(r"[^:\0?#]+\.(db|sqlite3?)", re.IGNORECASE)
UNBOUNDED: Final = "max_bytes is for memory:// and sqlite:// only;"
REDIS: Final = {
    scheme + several
    for scheme in ("redis", "rediss", "valkey", "valkeys")
    for several in ("", "+cluster", "+sentinel")
}
POSTGRES: Final = {"postgresql", "postgres"}
DYNAMODB_OPTIONS: Final = (
    *("bucket", "tenant", "pk", "s3_prefix", "s3_key"),
    *("region", "endpoint", "s3_endpoint", "max_lease"),
)

METHODS: Final = (
    *("open", "close", "read", "acquire", "publish", "new_generation", "put"),
    *("renew", "release", "invalidate", "invalidate_tag", "delete"),
)
"""Of every store."""
SLASHES: Final = "write sqlite:///file.db (relative) or sqlite:////path/file.db (absolute)"


def store_for(store: str | Store, clock: Clock) -> Store:
    """Return the store that an address names, or the store itself. It is not opened."""
    if not isinstance(store, str):
        return _checked_store(store)
    if FILE_NAME.fullmatch(store):
        store = f"sqlite:///{quote(store)}"
    try:
        parts = urlsplit(store)
    except ValueError as exc:
        raise _refused(store) from exc
    if parts.scheme == "dynamodb":
        from stillfresh.stores.dynamodb import DynamoStore  # noqa: PLC0415 (only when named)

        options: dict[str, Any] = dict(dynamodb_options(store))
        dynamodb_store = DynamoStore(**options, clock=clock)
        dynamodb_store.address = store
        return dynamodb_store
    bare, tenant = split_tenant(store)
    whole_store = _bare(bare, clock)
    if isinstance(whole_store, HasAddress):  # nobody shares memory://
        whole_store.address = bare
    return for_tenant(whole_store, tenant)


def _checked_store(store: object) -> Store:
    """Refuse an object that is no store, and name the methods that a store lacks."""
    if isinstance(store, Store):
        return store
    if isinstance(store, PurePath):
        raise ConfigError(f"store {shown(store)}: an address is text; write {str(store)!r}")
    lacking = [name for name in METHODS if not callable(getattr(store, name, None))]
    if not lacking:  # it has them by `__getattr__`, where `isinstance` does not look since 3.12
        return cast("Store", store)
    if len(lacking) == len(METHODS):
        raise ConfigError(f"store {shown(store)}: neither an address nor a store; write {ALLOWED}")
    raise ConfigError(
        f"store {type(store).__name__}: lacks {', '.join(lacking)}; add what the contract "
        f"stillfresh.stores.contract.Store asks for, and run stillfresh.testing.StoreConformance"
    )


@asynccontextmanager
async def running(store: AnyStore) -> AsyncIterator[AnyStore]:
    """Open the store for a block."""
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def _refused(url: str, why: str = f"not a store's address; write {ALLOWED}") -> ConfigError:
    return ConfigError(f"store {shown_address(url)}: {why}")


def split_tenant(url: str) -> tuple[str, str | None]:
    """Return an address without its `tenant=`, and the tenant."""
    before, mark, fragment = url.partition("#")
    place, _, query = before.partition("?")
    options = query.split("&") if query else []
    others = [option for option in options if option.partition("=")[0] != "tenant"]
    pairs = parse_qsl(query, keep_blank_values=True)
    tenants = [value for name, value in pairs if name == "tenant"]
    if len(tenants) > 1:
        raise _refused(url, "names a tenant more than once; name one")
    bare = place + ("?" if others else "") + "&".join(others) + mark + fragment
    tenant = checked_tenant(tenants[0]) if tenants else None
    return bare, tenant


def _bare(url: str, clock: Clock) -> Store:
    """The store that an address without a tenant names."""
    parts = urlsplit(url)
    options = parse_qsl(parts.query, keep_blank_values=True)
    if parts.scheme in REDIS:
        if "max_bytes" in dict(options):
            raise _refused(url, f"{UNBOUNDED} set maxmemory and maxmemory-policy of the server")
        return _extra("redis", url, clock)
    if parts.scheme in POSTGRES:
        if "max_bytes" in dict(options):
            raise _refused(url, f"{UNBOUNDED} run cache.evict(), or give copies shorter terms")
        return _extra("postgres", url, clock)
    if parts.fragment or options[1:] or [name for name, _ in options] not in ([], ["max_bytes"]):
        raise _refused(url, f"its options are ?max_bytes=2GB and ?tenant=NAME; write {ALLOWED}")
    max_bytes = options[0][1] if options else None
    if parts.scheme == "sqlite":
        return _sqlite(url, unquote(parts.path[1:]), max_bytes, clock)
    if parts.scheme == "memory" and not parts.netloc and parts.path in {"", "/"}:
        return MemoryStore(clock=clock, max_bytes=max_bytes)
    raise _refused(url)


def _sqlite(url: str, path: str, max_bytes: str | None, clock: Clock) -> Store:
    """Refuse `sqlite:/a.db`, which could mean a relative or an absolute path."""
    from stillfresh.stores.sqlite import SqliteStore  # noqa: PLC0415 (only when named)

    if not url.lower().startswith("sqlite:///"):
        raise _refused(url, SLASHES)
    if not path or "\0" in path:
        raise _refused(url)
    return SqliteStore(path, clock=clock, max_bytes=max_bytes)


def _extra(package: str, url: str, clock: Clock) -> Store:
    """A store whose client library is an extra.

    Unless a test gives another clock, its leases use the server's clock, which is one for all.
    """
    with needs(package, f"a {urlsplit(url).scheme}:// store"):
        address = import_module(f"stillfresh.stores.{package}.address")
    store: Store = address.store_at(url, None if clock is time.time else clock)
    return store


def dynamodb_options(url: str) -> dict[str, str]:
    """Return the options of a `dynamodb://` address. Raises ConfigError for an unknown one."""
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    if "max_bytes" in options:
        raise _refused(url, f"{UNBOUNDED} give the bucket a lifecycle rule, and run cache.evict()")
    if len(options) < len(pairs) or not options.keys() <= set(DYNAMODB_OPTIONS):
        raise _refused(url, f"takes each once, behind ?: {', '.join(DYNAMODB_OPTIONS)}")
    is_plain = parts.path in {"", "/"} and not parts.fragment and "@" not in parts.netloc
    if parts.scheme != "dynamodb" or not is_plain or not options.get("bucket"):
        raise _refused(url, "write dynamodb://table?bucket=name[&tenant=…]")
    return {"table": unquote(parts.netloc), **options}
