"""What a cache does for its store without being asked: it drops what nobody can be served (E13)."""

import asyncio
import logging
from typing import Final, NoReturn

from stillfresh.clock import Clock
from stillfresh.errors import StoreError
from stillfresh.stores.contract import Store

EVERY: Final = 3600.0

logger = logging.getLogger(__name__)


async def evict_now_and_then(store: Store, clock: Clock) -> NoReturn:
    """Until it is cancelled; a store that is away is tried again the next time."""
    while True:
        await asyncio.sleep(EVERY)
        try:
            await store.evict(clock())
        except StoreError as exc:
            logger.warning("the store could not evict: %s", exc)
