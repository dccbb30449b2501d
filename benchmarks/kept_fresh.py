"""C6: 10,000 ids kept fresh: by a watch, by a timer each, by the coordinator, by TanStack Query.

All are measured in the same way: CPU of the whole process with its garbage collector, from the
first request until each id was refreshed once, by the same HTTP client: once by hand, once by a
client that users have. TanStack Query runs in Node, where npm can install it.
"""

import asyncio
import gc
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeAlias

import httpx2

from benchmarks import tried
from benchmarks.harness import Figures, Progress, Row
from benchmarks.tanstack import Polled, installed, polled
from benchmarks.upstream import CONNECTIONS, Upstream, server
from stillfresh import Cache
from stillfresh.systems.coordinator import Database, Kind, TtlConfig, TtlController, TtlCoordinator

__all__ = ["against_tanstack", "kept_fresh", "tanstack"]

WATCHED = 10_000
BATCH = 20
STEP = 100
"""Ids that come on screen in one turn of the loop."""
FRESH_FOR = 3.0
ROUNDS = 3
CLIENT = "watch, by httpx2"
COORDINATED = "the coordinator, to a file"
FLOOR = "the requests alone"
PEER = "TanStack Query"
PEER_CLIENT = "TanStack Query, by node:http"

Keep: TypeAlias = Callable[[Upstream], Awaitable[None]]


@dataclass
class Cost:
    """What keeping the ids fresh took, from the first load until each was refreshed once."""

    requests: int
    cpu: float
    stall: float
    """The longest turn of the loop, in ms of CPU: others on the machine do not count."""


async def measured(keep: Keep, port: int) -> Cost:
    """Once for what it costs, once more with a task that looks how long each turn took."""
    requests, cpu = await cost(keep, port)
    forget()
    async with Upstream(port, 2 * WATCHED, looks=True) as upstream:
        await keep(upstream)
    return Cost(requests, cpu, upstream.longest_turn * 1000)


def forget() -> None:
    """What a run makes is collected meanwhile, and counted; what there was before is not."""
    gc.collect()
    gc.freeze()


async def cost(keep: Keep, port: int) -> tuple[int, float]:
    forget()
    async with Upstream(port, 2 * WATCHED) as upstream:
        await keep(upstream)
    return upstream.requests, upstream.ended - upstream.began


async def cost_with_client(port: int) -> tuple[int, float]:
    forget()
    limits = httpx2.Limits(max_connections=CONNECTIONS)
    async with httpx2.AsyncClient(limits=limits) as client:
        upstream = Upstream(port, 2 * WATCHED, client=client)
        await watched(upstream)
    return upstream.requests, upstream.ended - upstream.began


async def requested(upstream: Upstream) -> None:
    """The floor: the same requests, and every value kept in a dict."""
    ids = [f"sku-{number}" for number in range(WATCHED)]
    values: dict[str, int] = {}
    places = asyncio.Semaphore(4)

    async def one(some: list[str]) -> None:
        async with places:
            values.update(await upstream.fetch(some))

    for _ in range(2):
        await asyncio.gather(*(one(ids[at : at + BATCH]) for at in range(0, WATCHED, BATCH)))


async def coordinated(upstream: Upstream) -> None:
    """The coordinator, which writes each view and its row to a file: TanStack keeps no file."""
    with tempfile.TemporaryDirectory() as folder:
        kind = Kind("price", fetch=upstream.fetch, fresh_for=FRESH_FOR, max_batch=BATCH)
        config = TtlConfig(max_batches_per_tick=WATCHED, batch_interval_ms=100)
        async with (
            TtlController(database=Database(f"{folder}/app.db"), kinds=[kind]) as controller,
            TtlCoordinator(controller, config) as ttl,
        ):
            ttl.sign_in("viewer")
            ttl.set_visible(True)
            for start in range(0, WATCHED, STEP):
                for number in range(start, start + STEP):
                    ttl.subscribe("price", f"sku-{number}")
                await asyncio.sleep(0)
            await upstream.done.wait()


async def watched(upstream: Upstream) -> None:
    """`resource.watch` on one lane."""
    async with Cache("memory://") as cache:

        @cache.batched("price", fresh_for=FRESH_FOR, stale_for="1m", max_batch=BATCH)
        async def prices(ids: list[str]) -> dict[str, int]:
            return await upstream.fetch(ids)

        with prices.watch(tell=lambda _: None) as watch:
            for start in range(0, WATCHED, STEP):
                watch.add(*(f"sku-{number}" for number in range(start, start + STEP)))
                await asyncio.sleep(0)
            await upstream.done.wait()


async def timers(upstream: Upstream) -> None:
    """One asyncio timer for each id, which is what polling each item by itself is."""
    loop = asyncio.get_running_loop()
    handles: dict[str, asyncio.TimerHandle] = {}
    values: dict[str, object] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def refresh(id_: str) -> None:
        values[id_] = await upstream.fetch([id_])
        handles[id_] = loop.call_later(FRESH_FOR, begin, id_)

    def begin(id_: str) -> None:
        task = loop.create_task(refresh(id_))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for start in range(0, WATCHED, STEP):
        for number in range(start, start + STEP):
            begin(f"sku-{number}")
        await asyncio.sleep(0)
    await upstream.done.wait()
    while True:  # a task that ends plans the next one
        for handle in handles.values():
            handle.cancel()
        if not tasks:
            return
        await asyncio.wait(tasks)


def kept_fresh(progress: Progress, figures: dict[str, Figures]) -> list[Row]:
    ours, theirs = [], []
    more: dict[str, list[float]] = {CLIENT: [], COORDINATED: [], FLOOR: []}
    with server() as port:
        for number in range(ROUNDS):
            progress(f"keeping {WATCHED:,} ids fresh, round {number + 1}")
            ours.append(asyncio.run(measured(watched, port)))
            theirs.append(asyncio.run(measured(timers, port)))
            more[CLIENT].append(asyncio.run(cost_with_client(port))[1])
            more[COORDINATED].append(asyncio.run(cost(coordinated, port))[1])
            more[FLOOR].append(asyncio.run(cost(requested, port))[1])
    gc.unfreeze()
    mine, other = summed(ours), summed(theirs)
    figures[f"{WATCHED:,} watched ids, requests"] = {
        "watch": mine.requests,
        "a timer each": other.requests,
    }
    figures[f"{WATCHED:,} watched ids, CPU s"] = {
        "watch": mine.cpu,
        "a timer each": other.cpu,
        **{name: median(taken) for name, taken in more.items()},
    }
    figures[f"{WATCHED:,} watched ids, longest stall, ms"] = {
        "watch": mine.stall,
        "a timer each": other.stall,
    }
    what = f"{WATCHED:,} ids kept fresh"
    return [
        Row("C6", f"{what}: requests, against a timer each", mine.requests / other.requests, 0.05),
        Row("C6", f"{what}: CPU, against a timer each", mine.cpu / other.cpu),
        Row("C6", f"{what}: longest stall of the loop", mine.stall, 5, unit="ms"),
    ]


def tanstack(progress: Progress) -> tuple[dict[str, Polled], str]:
    """The same ids from the same server, by either client; and which version."""
    with tempfile.TemporaryDirectory() as name, server() as port:
        told = installed(Path(name))

        def once(**how: bool) -> Polled:
            about = {"ids": WATCHED, "step": STEP, "freshFor": FRESH_FOR * 1000}
            return polled(Path(name), port=port, connections=CONNECTIONS, **about, **how)

        found = {}
        for which, bare in ((PEER, True), (PEER_CLIENT, False)):
            progress(f"{WATCHED:,} ids polled by {which}")
            rounds = [once(bare=bare) for _ in range(ROUNDS)]
            found[which] = sorted(rounds, key=lambda it: it.cpu)[ROUNDS // 2]
        looked = once(bare=True, looks=True)
    found[PEER] = replace(found[PEER], stall=looked.stall)
    return found, (
        f"{told} in Node, a `QueryObserver` with `refetchInterval` for each id, on as many "
        f"connections to the same server, the median of {ROUNDS} processes. CPU is that of the "
        "whole process from the first request until each id was refreshed once, with its garbage "
        "collector, and there with its compiler. Its stall is by the wall clock, ours by CPU."
    )


def against_tanstack(figures: dict[str, Figures], peers: dict[str, Polled]) -> list[Row]:
    cpu = figures[f"{WATCHED:,} watched ids, CPU s"]
    cpu |= {name: peer.cpu for name, peer in peers.items()}
    peer, requests = peers[PEER], figures[f"{WATCHED:,} watched ids, requests"]
    requests[PEER] = peer.requests
    figures[f"{WATCHED:,} watched ids, longest stall, ms"][PEER] = peer.stall
    what, target = f"{WATCHED:,} ids kept fresh", 0.1
    usual = f"{what}: CPU, against TanStack Query, with httpx2 and `node:http`"
    stored = f"{what}: CPU of the coordinator, which writes a file, against TanStack Query"
    return [
        Row(
            "C6",
            f"{what}: requests, against TanStack Query",
            requests["watch"] / requests[PEER],
            0.05,
        ),
        Row(
            "C6",
            f"{what}: CPU, against TanStack Query, both with a bare client",
            cpu["watch"] / cpu[PEER],
            target,
            tried=tried.WATCHED_CPU,
        ),
        Row("C6", usual, cpu[CLIENT] / cpu[PEER_CLIENT], target, tried=tried.WATCHED_CPU),
        Row("C6", stored, cpu[COORDINATED] / cpu[PEER]),
        Row("C6", f"{what}: CPU of the requests alone, of the watch", cpu[FLOOR] / cpu["watch"]),
    ]


def summed(costs: list[Cost]) -> Cost:
    return Cost(
        round(median(cost.requests for cost in costs)),
        median(cost.cpu for cost in costs),
        median(cost.stall for cost in costs),
    )
