"""The numbers of a gateway: at one moment, for its dashboard, and `/metrics`.

Counting takes a pass over the entries in memory, so it is done at most twice a second, for any
number of operators. The stores are asked less often, and least those that charge for requests.
Some numbers of the last minutes are kept, for an operator that opens the page after an incident.
`/metrics`, `/healthz` and `/readyz` are cheap enough to be asked every second.

With several workers, each writes its numbers to shared memory, every second and whenever it is
asked, and reports the sum of all workers. So counts never go down, whichever worker answers.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeAlias

import msgspec

from stillfresh.clock import Clock
from stillfresh.engine import (
    Cache,
    CacheStats,
    Lag,
    Timing,
    labelled,
    metric_lines,
    prometheus_text,
)
from stillfresh.engine.rules import AGE_BUCKETS
from stillfresh.errors import StillfreshError
from stillfresh.gateway.response_counts import PARTS, Responses
from stillfresh.gateway.rules_totals import Resources, Totals, added, summed
from stillfresh.pages import PageCache
from stillfresh.pages.upstream import Upstream
from stillfresh.stores import capabilities_of

if TYPE_CHECKING:
    from stillfresh.gateway.server import Worker

COUNTED_EVERY: Final = 0.5
ASKED_EVERY: Final = 5.0
PAID_EVERY: Final = 300.0
"""Seconds between two requests to a store that charges for them."""
SHARE: Final = 50
"""A store that took a second to answer is asked again after so many seconds."""
ANSWERS_WITHIN: Final = 2.0
WRITTEN_EVERY: Final = 1.0
"""Seconds; counts since then are lost if a worker is killed."""
NOTED_EVERY: Final = 5
"""One of so many is kept."""
KEPT: Final = 60
"""Notes that are kept: those of five minutes."""
NOTED: Final = ("hits", "loads", "failed", "store_errors")
READY_WITHIN: Final = 2.0
"""Seconds for a store to answer."""
METRICS: Final = (
    ("connections", "gauge", "Viewers that are connected."),
    ("max_connections", "gauge", "Viewers that may be connected, in all workers together."),
    ("subscriptions", "gauge", "Ids that viewers look at, each viewer's counted."),
    (
        "bypassed_total",
        "counter",
        "Requests that passed through or were refused, by reason.",
    ),
    ("site_connections", "gauge", "Connections to the site that are in use."),
    ("max_site_connections", "gauge", "Connections to the site that may be in use at once."),
    ("site_addresses", "gauge", "Workers that send requests to this address of the site."),
    ("http_responses_total", "counter", "HTTP responses, by part of the gateway and status."),
    ("http_response_bytes_total", "counter", "Bytes of the bodies of those responses."),
)
NOBODY: Final = "stillfresh:ready"
"""An id that no entry has."""


Reached: TypeAlias = Literal["reachable", "unreachable"]


class Numbers:
    """Counts what a gateway does, and reports it for all its workers.

    `caches` by name; `live` counts viewers, `pages` the requests that passed uncached.
    """

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
        self.site: Upstream | None = None
        """The site behind, if the gateway asks it over HTTP: its connections are counted."""
        self.responses = {part: Responses() for part in PARTS}
        self._gauges = {name: Gauge(cache, ticks) for name, cache in caches.items()}
        self._counting = asyncio.Lock()  # an older count must not replace a newer one
        self._counted: Resources = {}
        self._count_due = -math.inf
        self._notes: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._worker: Worker | None = None
        self._before: Totals | None = None

    def share(self, worker: "Worker") -> None:
        """From now on report the numbers of all workers, also of earlier ones in this place."""
        self._worker = worker
        self._before = summed([(worker.shared_numbers.read(worker.place), False)])

    async def snapshot(self) -> dict[str, Any]:
        """Totals since the start; the page computes rates from them."""
        looked = await asyncio.gather(*(gauge.look() for gauge in self._gauges.values()))
        if (now := self._ticks()) >= self._count_due:
            await self.write()
            self._count_due = now + COUNTED_EVERY
        totals = self._totals(self._own())
        return {
            "at": self._clock(),
            "started_at": totals.started_at,
            "workers": self._workers(),
            "age_buckets": AGE_BUCKETS,
            "time_buckets": Timing.bounds,
            "resources": self._rows(totals),
            "stores": self._stores(looked),
            "live": totals.live,
            "bypassed": totals.bypassed,
            "site_connections": {
                use: {"in_use": totals.site_connections.get(use, 0), "most": most}
                for use, most in totals.max_site_connections.items()
            },
        }

    def _stores(self, looked: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """By the names of their caches; a store that an earlier cache uses too is marked."""
        stores: dict[str, dict[str, Any]] = {}
        seen: set[str | None] = set()
        for (name, gauge), figures in zip(self._gauges.items(), looked, strict=True):
            is_repeated = gauge.address in seen
            stores[name] = {**figures, "is_repeated": True} if is_repeated else figures
            seen |= {gauge.address} - {None}
        return stores

    async def reached(self) -> dict[str, Reached]:
        """Which stores answer in time."""
        states = await asyncio.gather(*map(_reach_store, self._caches.values()))
        return dict(zip(self._caches, states, strict=True))

    def lags(self) -> dict[str, Lag]:
        """How far the outbox consumers of this process are behind."""
        return {name: lag() for cache in self._caches.values() for name, lag in cache.lags.items()}

    async def metrics(self) -> str:
        """All resources, for Prometheus; the stores are not asked."""
        totals = self._totals(await self.write())
        kinds = {
            kind: stats for kinds in totals.resources.values() for kind, stats in kinds.items()
        }
        samples = (
            {"": totals.live["connections"]},
            {"": totals.live["max_connections"]},
            labelled("resource", totals.live["subscriptions"]),
            labelled("reason", totals.bypassed),
            labelled("use", totals.site_connections),
            labelled("use", totals.max_site_connections),
            labelled("address", totals.site_addresses),
            _by_status(totals.responses),
            labelled("part", totals.sent),
        )
        own = (
            metric_lines(*metric, values) for metric, values in zip(METRICS, samples, strict=True)
        )
        stats = CacheStats(kinds, None, self.lags(), totals.store_seconds)
        return prometheus_text(stats) + "".join(f"{line}\n" for lines in own for line in lines)

    def history(self) -> list[dict[str, Any]]:
        """A few totals of the last five minutes, the oldest first."""
        return list(self._notes)

    async def note_now_and_then(self) -> NoReturn:
        while True:
            await self.note()
            for _ in range(NOTED_EVERY):
                await asyncio.sleep(WRITTEN_EVERY)
                if self._worker is not None:
                    await self.write()

    async def note(self) -> None:
        totals = self._totals(await self.write())
        rows = self._rows(totals)
        reads = Counter[str]()
        for row in rows:
            reads.update(row["reads"])
        ages = [sum(bucket) for bucket in zip(*(row["ages"] for row in rows), strict=True)]
        times = (row["load_seconds"]["counts"] for row in rows)
        load_seconds = {"counts": [sum(bucket) for bucket in zip(*times, strict=True)]}
        sums = {name: sum(row[name] for row in rows) for name in NOTED}
        kinds = {
            f"{row['cache']} {row['kind']}": {
                "reads": sum(row["reads"].values()),
                "loads": row["loads"],
                "ages": row["ages"],
                "objective_met": row["objective_met"],
                "objective_missed": row["objective_missed"],
            }
            for row in rows
        }
        noted = {"reads": dict(reads), "ages": ages, "load_seconds": load_seconds, **sums}
        bypassed = totals.bypassed
        self._notes.append({"at": self._clock(), "kinds": kinds, "bypassed": bypassed, **noted})

    async def write(self) -> Totals:
        """Count now, and share the result with the other workers."""
        async with self._counting:
            self._counted = await self._count()
            return self._own()

    def _own(self) -> Totals:
        bypassed = {} if self._pages is None else self._pages.bypassed()
        groups = () if self.site is None else self.site.places.groups()
        addresses = {} if self.site is None else self.site.addresses.states()
        own = Totals(
            self._started_at,
            self._counted,
            self._live(),
            bypassed,
            {part: responses.statuses() for part, responses in self.responses.items()},
            {part: responses.sent() for part, responses in self.responses.items()},
            reduce(added, [cache.store_seconds() for cache in self._caches.values()]),
            {group.use: group.in_use for group in groups},
            {group.use: group.most for group in groups},
            {address: int(is_asked) for address, is_asked in addresses.items()},
        )
        if self._worker is not None:
            own = added(self._before, own)
            self._worker.shared_numbers.write(self._worker.place, msgspec.json.encode(own))
        return own

    def _totals(self, own: Totals) -> Totals:
        if self._worker is None:
            return own
        return summed(self._worker.shared_numbers.read_all()) or own

    def _workers(self) -> dict[str, int] | None:
        """How many workers there should be, and how many live; None: there is only this process."""
        if self._worker is None:
            return None
        lives = [is_alive for _, is_alive in self._worker.shared_numbers.read_all()]
        return {"all": len(lives), "alive": sum(lives)}

    def _rows(self, totals: Totals) -> list[dict[str, Any]]:
        rows = []
        for name, kinds in totals.resources.items():
            for kind, stats in kinds.items():
                row = {"cache": name, "kind": kind, **asdict(stats)}
                row |= {"reads": stats.reads, "hits": stats.hits}
                # None if every copy has its own times, as pages have.
                fresh_for = self._caches[name].resources[kind].policy.fresh_for or None
                if stats.truth is not None:
                    row["truth"]["nines"] = stats.truth.nines
                rows.append({**row, "fresh_for": fresh_for})
        return rows

    async def _count(self) -> Resources:
        return {
            name: {kind: await resource.stats() for kind, resource in [*cache.resources.items()]}
            for name, cache in self._caches.items()
        }


class Gauge:
    """The size of one store; the last answer counts until the next is due."""

    def __init__(self, cache: Cache, ticks: Clock) -> None:
        self._cache = cache
        self._ticks = ticks
        self._due = -math.inf
        self._last: dict[str, Any] = {"error": "not asked yet"}
        self.address: str | None = None

    async def look(self) -> dict[str, Any]:
        if self._ticks() >= self._due:
            self._due = math.inf  # nobody else asks meanwhile
            pause = ASKED_EVERY
            try:
                pause = await self._ask()
            finally:
                self._due = self._ticks() + pause
        return self._last

    async def _ask(self) -> float:
        """Ask, and return the pause before the next; after a failure it is short."""
        began = self._ticks()
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                can = capabilities_of(await self._cache.store())
                self.address = can.address
                stats = await can.require_statistics().stats()
        except TimeoutError:
            self._last = {"error": f"no answer within {ANSWERS_WITHIN:g} s"}
            return ASKED_EVERY
        except StillfreshError as exc:
            self._last = {"error": str(exc)}
            return ASKED_EVERY
        is_paid = stats.costs is not None
        figures = {"copies": stats.copies, "leases": stats.leases, "bytes": stats.bytes}
        bounds = {"held": stats.held, "evicted": stats.evicted}
        figures |= {name: number for name, number in bounds.items() if number is not None}
        self._last = {**figures, "is_paid": is_paid}
        pause = PAID_EVERY if is_paid else ASKED_EVERY
        return max(pause, SHARE * (self._ticks() - began))


async def _reach_store(cache: Cache) -> Reached:
    try:
        async with asyncio.timeout(READY_WITHIN):
            store = await cache.store()
            await store.read(next(iter(cache.resources), "ready"), [NOBODY])
    except (StillfreshError, TimeoutError):
        return "unreachable"
    return "reachable"


def _by_status(parts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {
        f'part="{part}",status="{status}"': number
        for part, statuses in parts.items()
        for status, number in sorted(statuses.items())
    }
