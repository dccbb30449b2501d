"""`/metrics`, `/healthz`, `/readyz` (G7)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from stillfresh.engine import CacheStats, prometheus_text
from stillfresh.errors import StillfreshError
from stillfresh.web.replies import Reply, json_reply

__all__ = ["Health"]

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
READY_WITHIN: Final = 2.0
"""Seconds that the store has to answer."""

Stats = Callable[[], Awaitable[CacheStats]]


class Health:
    """`caches` by name; `gauges` are the gateway's own numbers."""

    def __init__(self, caches: Mapping[str, Stats], gauges: Callable[[], dict[str, int]]) -> None:
        self._caches = caches
        self._gauges = gauges

    async def healthz(self) -> Reply:
        return json_reply({"status": "alive"}, cache_control="no-store")

    async def readyz(self) -> Reply:
        """Ready: every store answers, and in time."""
        found = await asyncio.gather(*(self._asked(stats) for stats in self._caches.values()))
        stores = dict(zip(self._caches, found, strict=True))
        is_ready = all(said == "reachable" for said in found)
        told = {"status": "ready" if is_ready else "not ready", "stores": stores}
        return json_reply(told, 200 if is_ready else 503, cache_control="no-store")

    async def _asked(self, stats: Stats) -> str:
        try:
            async with asyncio.timeout(READY_WITHIN):
                answered = await stats()
        except (StillfreshError, TimeoutError):
            return "unreachable"
        return "reachable" if answered.store is not None else "unreachable"

    async def metrics(self) -> Reply:
        every = await asyncio.gather(*(stats() for stats in self._caches.values()))
        resources = {name: one for stats in every for name, one in stats.resources.items()}
        text = prometheus_text(CacheStats(resources, None))
        for name, value in self._gauges().items():
            text += f"# TYPE stillfresh_{name} gauge\nstillfresh_{name} {value}\n"
        return Reply(200, text.encode(), TEXT, {"cache-control": "no-store"})
