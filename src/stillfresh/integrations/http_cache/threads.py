"""Calls of a SyncCache from any thread, also from one that runs an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from stillfresh.sync import SyncCache

P = ParamSpec("P")
T = TypeVar("T")


def from_any_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it here; from a thread that runs an event loop (a notebook), in another thread.

    A sync client holds that loop with or without a cache.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*args, **kwargs)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, partial(function, *args, **kwargs)).result()


def in_thread(
    cache: SyncCache,
    function: Callable[P, Coroutine[Any, Any, T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Run a coroutine function on the cache's own loop."""
    return from_any_thread(cache.run, function, *args, **kwargs)
