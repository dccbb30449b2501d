"""The numbers of a gateway: at one moment, for its dashboard (G6), and `/metrics` (G7).

Counting costs a pass over what memory holds, so it is done at most twice a second, however many
look; the stores are asked less often, and least those that are paid by the request. Of the last
minutes a few numbers are kept, for an operator that opens the page when something has happened.
`/metrics`, `/healthz` and `/readyz` are cheap enough to be asked every second.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, NoReturn

from stillfresh.clock import Clock
from stillfresh.engine import Cache, CacheStats, ResourceStats, prometheus_text
from stillfresh.engine.rules import AGE_BUCKETS
from stillfresh.errors import StillfreshError
from stillfresh.freshness import Verdict
from stillfresh.isr import PageCache
from stillfresh.web.replies import Reply, json_reply

COUNTED_EVERY: Final = 0.5
ASKED_EVERY: Final = 5.0
PAID_EVERY: Final = 300.0
"""Seconds between two questions to a store whose answers cost money."""
SHARE: Final = 50
"""A store that took a second to answer is asked again after so many."""
ANSWERS_WITHIN: Final = 2.0
NOTED_EVERY: Final = 5.0
KEPT: Final = 60
"""Notes of the last minutes: five of them."""
NOTED: Final = ("loads", "failed", "store_errors")
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
READY_WITHIN: Final = 2.0
"""Seconds that a store has to answer."""
NOBODY: Final = "stillfresh:ready"
"""An id that nothing is kept under."""


class Numbers:
    """`caches` by name; `live` counts viewers, `pages` the requests that were not cached."""

    def __init__(
        self,
        caches: Mapping[str, Cache],
        live: Callable[[], dict[str, Any]],
        *,
        pages: PageCache | None = None,
        clock: Clock = time.time,
        ticks: Clock = time.monotonic,
    ) -> None:
        self._caches = caches
        self._live = live
        self._pages = pages
        self._clock = clock
        self._ticks = ticks
        self._started_at = clock()
        self._gauges = {name: Gauge(cache, ticks) for name, cache in caches.items()}
        self._counted: tuple[float, list[dict[str, Any]]] | None = None
        self._notes: deque[dict[str, Any]] = deque(maxlen=KEPT)

    async def snapshot(self) -> dict[str, Any]:
        """Totals since the start; who looks makes rates of them."""
        looked = await asyncio.gather(*(gauge.look() for gauge in self._gauges.values()))
        return {
            "at": self._clock(),
            "started_at": self._started_at,
            "age_buckets": AGE_BUCKETS,
            "resources": await self._resources(),
            "stores": dict(zip(self._gauges, looked, strict=True)),
            "live": self._live(),
            "bypassed": _bypassed(self._pages),
        }

    def history(self) -> list[dict[str, Any]]:
        """A few totals of the last five minutes, the oldest first."""
        return list(self._notes)

    async def note_now_and_then(self) -> NoReturn:
        while True:
            await self.note()
            await asyncio.sleep(NOTED_EVERY)

    async def note(self) -> None:
        rows, reads = await self._count(), Counter[str]()
        for row in rows:
            reads.update(row["reads"])
        ages = [sum(them) for them in zip(*(row["ages"] for row in rows), strict=True)]
        sums = {name: sum(row[name] for row in rows) for name in NOTED}
        kinds = {
            f"{row['cache']} {row['kind']}": {
                "reads": sum(row["reads"].values()),
                "loads": row["loads"],
                "ages": row["ages"],
            }
            for row in rows
        }
        noted = {"reads": dict(reads), "ages": ages, "bypassed": _bypassed(self._pages)}
        self._notes.append({"at": self._clock(), "kinds": kinds, **noted, **sums})

    async def _resources(self) -> list[dict[str, Any]]:
        now = self._ticks()
        if self._counted is None or not 0 <= now - self._counted[0] < COUNTED_EVERY:
            self._counted = now, await self._count()
        return self._counted[1]

    async def _count(self) -> list[dict[str, Any]]:
        return [
            {
                "cache": name,
                "kind": kind,
                **_plain(await core.stats()),
                # None where every copy has terms of its own, as pages have.
                "fresh_for": core.spec.terms.policy.fresh_for or None,
            }
            for name, cache in self._caches.items()
            for kind, core in tuple(cache.cores.items())
        ]


class Gauge:
    """How large one store is; the last answer stands until the next is due."""

    def __init__(self, cache: Cache, ticks: Clock) -> None:
        self._cache = cache
        self._ticks = ticks
        self._is_asking = False
        self._due = float("-inf")
        self._last: dict[str, Any] = {"error": "not asked yet"}

    async def look(self) -> dict[str, Any]:
        if not self._is_asking and self._ticks() >= self._due:
            self._is_asking = True
            try:
                await self._ask()
            finally:
                self._is_asking = False
        return self._last

    async def _ask(self) -> None:
        """One that is away is asked again soon, however long that took."""
        began = self._ticks()
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                stats = await (await self._cache.runtime()).store.stats()
        except TimeoutError:
            self._note({"error": f"no answer within {ANSWERS_WITHIN:g} s"}, ASKED_EVERY)
        except StillfreshError as exc:
            self._note({"error": str(exc)}, ASKED_EVERY)
        else:
            pause = ASKED_EVERY if stats.costs is None else PAID_EVERY
            told = {"copies": stats.copies, "leases": stats.leases, "bytes": stats.bytes}
            told["is_paid"] = stats.costs is not None
            self._note(told, max(pause, SHARE * (self._ticks() - began)))

    def _note(self, told: dict[str, Any], pause: float) -> None:
        self._last = told
        self._due = self._ticks() + pause


def _plain(stats: ResourceStats) -> dict[str, Any]:
    by_origin = {str(it): _texts(reads) for it, reads in stats.reads_by_origin.items()}
    return {**asdict(stats), "reads": _texts(stats.reads), "reads_by_origin": by_origin}


def _texts(reads: Mapping[Verdict, int]) -> dict[str, int]:
    return {str(verdict): count for verdict, count in reads.items()}


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
        counts = CacheStats({kind: await core.stats() for kind, core in cores}, None)
        lines = (*_connected(self._live()), *_passed(_bypassed(self._pages)))
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


def _bypassed(pages: PageCache | None) -> dict[str, int]:
    return {} if pages is None else pages.bypassed()
