"""The caches of an app, and the dashboards that it mounts, opened and closed with it."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.routing import Mount

from stillfresh.engine import Cache
from stillfresh.errors import StoreError
from stillfresh.gateway import Dashboard
from stillfresh.integrations.fastapi.errors import is_refusal
from stillfresh.integrations.fastapi.route import check_order
from stillfresh.integrations.routes import check_cache

Own = Callable[[Any], AbstractAsyncContextManager[Any]]

logger = logging.getLogger(__name__)


def lifespan(*caches: Cache, own: Own | None = None) -> Own:
    """Open caches when the app starts, close them at its end: `FastAPI(lifespan=lifespan(cache))`.

    `own` is your own lifespan: it begins before the caches open and ends after they are closed.
    An HTTPException below 500 that a cached function raises reaches its callers as it is.
    """

    for cache in caches:
        check_cache(cache, Cache)
        cache.pass_on(is_refusal)

    @asynccontextmanager
    async def run_caches(app: FastAPI) -> AsyncIterator[Any]:
        check_order(app.routes)
        async with AsyncExitStack() as stack:
            state = None if own is None else await stack.enter_async_context(own(app))
            for cache in caches:
                await _open(cache, stack)
            for mount in app.routes:
                if isinstance(mount, Mount) and isinstance(mount.app, Dashboard):
                    mount.app.open()
                    stack.push_async_callback(mount.app.close)
            yield state

    return run_caches


async def _open(cache: Cache, stack: AsyncExitStack) -> None:
    """Open the cache. If its store is unavailable, the app starts, and its routes work uncached."""
    stack.push_async_callback(cache.close)
    try:
        await cache.open()
    except StoreError as exc:
        logger.warning("the cache's store could not be opened, and is tried again: %s", exc)
