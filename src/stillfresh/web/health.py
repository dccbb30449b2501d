"""`/metrics`, `/healthz`, `/readyz` (G7): cheap enough to be asked every second."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from stillfresh.engine import Cache, CacheStats, prometheus_text
from stillfresh.errors import StillfreshError
from stillfresh.isr import PageCache
from stillfresh.web.replies import Reply, json_reply

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
READY_WITHIN: Final = 2.0
"""Seconds that a store has to answer."""
NOBODY: Final = "stillfresh:ready"
"""An id that nothing is kept under."""


class Health:
    """Of these caches, by name; `live` tells who is connected, `pages` what was not cached."""

    def __init__(
        self,
        caches: Mapping[str, Cache],
        live: Callable[[], dict[str, Any]],
        pages: PageCache | None = None,
    ) -> None:
        self._caches = caches
        self._live = live
        self._pages = pages

    async def healthz(self) -> Reply:
        """Alive: it answers."""
        return json_reply({"status": "alive"}, cache_control="no-store")

    async def readyz(self) -> Reply:
        """Ready: every store answers, and in time."""
        found = await asyncio.gather(*map(_reached, self._caches.values()))
        stores = dict(zip(self._caches, found, strict=True))
        is_ready = set(found) == {"reachable"}
        told = {"status": "ready" if is_ready else "not ready", "stores": stores}
        return json_reply(told, 200 if is_ready else 503, cache_control="no-store")

    async def metrics(self) -> Reply:
        """Of every resource; nothing is asked of the stores."""
        cores = [it for cache in self._caches.values() for it in cache.cores.items()]
        counts = CacheStats({kind: core.stats() for kind, core in cores}, None)
        bypassed = {} if self._pages is None else self._pages.bypassed()
        lines = (*_connected(self._live()), *_passed(bypassed))
        text = prometheus_text(counts) + "".join(f"{it}\n" for it in lines)
        return Reply(200, text.encode(), TEXT, {"cache-control": "no-store"})


async def _reached(cache: Cache) -> str:
    try:
        async with asyncio.timeout(READY_WITHIN):
            store = (await cache.runtime()).store
            await store.read(next(iter(cache.cores), "ready"), [NOBODY])
    except (StillfreshError, TimeoutError):
        return "unreachable"
    return "reachable"


def _connected(live: dict[str, Any]) -> Iterator[str]:
    yield "# HELP stillfresh_connections Viewers that are connected."
    yield "# TYPE stillfresh_connections gauge"
    yield f"stillfresh_connections {live['connections']}"
    yield "# HELP stillfresh_subscriptions Ids that viewers look at, each viewer's counted."
    yield "# TYPE stillfresh_subscriptions gauge"
    for kind, count in live["subscriptions"].items():
        yield f'stillfresh_subscriptions{{resource="{kind}"}} {count}'


def _passed(bypassed: Mapping[str, int]) -> Iterator[str]:
    yield "# HELP stillfresh_bypassed_total Requests that passed through uncached, by reason (I28)."
    yield "# TYPE stillfresh_bypassed_total counter"
    for reason, count in bypassed.items():
        yield f'stillfresh_bypassed_total{{reason="{reason}"}} {count}'
