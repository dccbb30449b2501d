"""Fixtures for pytest: an empty cache for each test, in an application of any framework.

Each function returns a fixture that every test of its module or conftest.py uses. Inside, the cache
is on an empty store, and the test fails if its code changed a value that callers share. pytest and
the frameworks are imported when a function is called.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from stillfresh.engine import Cache
from stillfresh.errors import ConfigError, shown
from stillfresh.sync import SyncCache
from stillfresh.testing.values import unchanged_values

if TYPE_CHECKING:
    from flask import Flask

    from stillfresh.integrations.flask import Fresh

EMPTY: Final = "memory://"


def cache_fixture(*caches: Cache | SyncCache) -> Any:  # noqa: ANN401 (a fixture of pytest's)
    """Return a fixture that empties the cache for each test: `empty = cache_fixture(shop.cache)`.

    It is for functions, and for FastAPI with its `TestClient`. For tests that are `async def`
    themselves, write `async_cache_fixture`.
    """
    for cache in caches:
        if not isinstance(cache, Cache | SyncCache):
            raise ConfigError(f"cache_fixture: give it a Cache or a SyncCache, not {shown(cache)}")
    return _fixture(lambda: caches)


def async_cache_fixture(*caches: Cache) -> Any:  # noqa: ANN401
    """Do the same for `async def` tests. Needs pytest-asyncio in mode "auto"."""

    async def empty_caches() -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for cache in caches:
                await stack.enter_async_context(cache.override(EMPTY))
            with unchanged_values(*caches):
                yield

    return import_module("pytest").fixture(autouse=True)(empty_caches)


def flask_fixture(fresh: "Fresh", app: "Flask | None" = None) -> Any:  # noqa: ANN401
    """Return a fixture that empties Flask's cache: `flask_fixture(shop.fresh)`."""

    def caches() -> list[SyncCache]:
        if app is None:
            return [fresh.cache]
        with app.app_context():
            return [fresh.cache]

    return _fixture(caches)


def django_fixture(*aliases: str) -> Any:  # noqa: ANN401
    """Return a fixture that empties Django's caches: those of `aliases`, or all of ours."""

    def django_caches() -> list[SyncCache]:
        settings = import_module("django.conf").settings
        backends = import_module("django.core.cache").caches
        backend_type = import_module("stillfresh.integrations.django").StillfreshCache
        named = [backends[alias] for alias in aliases or settings.CACHES]
        own = [backend for backend in named if isinstance(backend, backend_type)]
        if not own or (aliases and len(own) < len(aliases)):
            raise ConfigError(
                f"django_fixture: an alias of {list(aliases or settings.CACHES)} in CACHES must "
                f"have the BACKEND 'stillfresh.integrations.django.StillfreshCache'"
            )
        return list(dict.fromkeys(backend.cache for backend in own))

    return _fixture(django_caches)


def _fixture(caches: Callable[[], Iterable[Cache | SyncCache]]) -> Any:  # noqa: ANN401
    def empty_caches() -> Iterator[None]:
        with _emptied(list(caches())):
            yield

    return import_module("pytest").fixture(autouse=True)(empty_caches)


@contextmanager
def _emptied(caches: list[Cache | SyncCache]) -> Iterator[None]:
    with ExitStack() as stack:
        for cache in caches:
            stack.enter_context(cache.override(EMPTY))
        with unchanged_values(*caches):
            yield
