"""A store whose answers are waited for so long and no longer (I10): one that hangs is away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from stillfresh.errors import StoreError
from stillfresh.stores.contract import Store

READS: Final = frozenset({"read", "read_lagging"})
WRITES: Final = frozenset({"acquire", "publish", "renew", "release"})
"""Invalidations are not among them: who asks for one waits until it holds."""


class Bounded:
    """Everything that the store has; what visitors wait for ends in time."""

    def __init__(self, store: Store, limits: dict[str, float]) -> None:
        self._store = store
        self._limits = limits

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        found = getattr(self._store, name)
        limit = self._limits.get(name)
        return found if limit is None else _within(found, name, limit)


def _within(
    call: Callable[..., Awaitable[object]], name: str, limit: float
) -> Callable[..., Awaitable[object]]:
    async def within(*args: Any, **options: Any) -> object:  # noqa: ANN401
        try:
            async with asyncio.timeout(limit):
                return await call(*args, **options)
        except TimeoutError as exc:
            raise StoreError(f"{name}: no answer from the store within {limit:g} s") from exc

    return within


def bounded(store: Store, timeout: float, lease_for: float) -> Store:
    """A lease that took longer to be had than it lasts is none: so long for what writes."""
    limits = dict.fromkeys(READS, timeout) | dict.fromkeys(WRITES, max(timeout, lease_for))
    return cast("Store", Bounded(store, limits))
