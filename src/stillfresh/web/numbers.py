"""The numbers of a gateway at one moment, for its dashboard (G6).

Counting costs a pass over what memory holds, so it is done at most twice a second, however many
look; the stores are asked less often, and least those that are paid by the request. Of the last
minutes a few numbers are kept, for who opens the page when something has happened.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, NoReturn

from stillfresh.clock import Clock
from stillfresh.engine import Cache, ResourceStats
from stillfresh.engine.rules import AGE_BUCKETS, Terms
from stillfresh.errors import StillfreshError
from stillfresh.freshness import Verdict
from stillfresh.isr import PageCache

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

    def _bypassed(self) -> dict[str, int]:
        return {} if self._pages is None else self._pages.bypassed()

    async def snapshot(self) -> dict[str, Any]:
        """Totals since the start; who looks makes rates of them."""
        looked = await asyncio.gather(*(gauge.look() for gauge in self._gauges.values()))
        return {
            "at": self._clock(),
            "started_at": self._started_at,
            "age_buckets": AGE_BUCKETS,
            "resources": self._resources(),
            "stores": dict(zip(self._gauges, looked, strict=True)),
            "live": self._live(),
            "bypassed": self._bypassed(),
        }

    def history(self) -> list[dict[str, Any]]:
        """A few totals of the last five minutes, the oldest first."""
        return list(self._notes)

    async def note_now_and_then(self) -> NoReturn:
        """Until it is cancelled."""
        while True:
            self.note()
            await asyncio.sleep(NOTED_EVERY)

    def note(self) -> None:
        rows, reads = self._count(), Counter[str]()
        for row in rows:
            reads.update(row["reads"])
        ages = [sum(them) for them in zip(*(row["ages"] for row in rows), strict=True)]
        sums = {name: sum(row[name] for row in rows) for name in NOTED}
        kinds = {f"{row['cache']} {row['kind']}": _noted(row) for row in rows}
        noted = {"reads": dict(reads), "ages": ages, "bypassed": self._bypassed()}
        self._notes.append({"at": self._clock(), "kinds": kinds, **noted, **sums})

    def _resources(self) -> list[dict[str, Any]]:
        now = self._ticks()
        if self._counted is None or not 0 <= now - self._counted[0] < COUNTED_EVERY:
            self._counted = now, self._count()
        return self._counted[1]

    def _count(self) -> list[dict[str, Any]]:
        return [
            {"cache": name, "kind": kind, **_plain(core.stats()), **_policy(core.spec.terms)}
            for name, cache in self._caches.items()
            for kind, core in cache.cores.items()
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


def _noted(row: dict[str, Any]) -> dict[str, Any]:
    """Of one kind, what its row is made of."""
    return {"reads": sum(row["reads"].values()), "loads": row["loads"], "ages": row["ages"]}


def _policy(terms: Terms) -> dict[str, Any]:
    """None where every copy has terms of its own, as pages have."""
    return {"fresh_for": terms.policy.fresh_for or None}


def _plain(stats: ResourceStats) -> dict[str, Any]:
    by_origin = {str(it): _texts(reads) for it, reads in stats.reads_by_origin.items()}
    return {**asdict(stats), "reads": _texts(stats.reads), "reads_by_origin": by_origin}


def _texts(reads: Mapping[Verdict, int]) -> dict[str, int]:
    return {str(verdict): count for verdict, count in reads.items()}
