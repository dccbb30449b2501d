"""C6: what a tick costs with many subscribed, and 10,000 watched ids against a timer for each.

The same ids are polled by TanStack Query, in Node, where npm can install it.
"""

import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias

from benchmarks import tried
from benchmarks.harness import Contender, Figures, Progress, Row, Section, race_on_loop
from benchmarks.tanstack import Missing, Polled, installed, polled
from stillfresh import Cache
from stillfresh.coordinator import Database, Kind, TtlConfig, TtlController, TtlCoordinator
from stillfresh.engine.lane import Lane
from stillfresh.testing import ManualClock

__all__ = ["section"]

TITLE = "TTL coordinator (C6)"
SIZES = (1_000, 10_000, 100_000)
WATCHED = 10_000
BATCH = 20
TTL_MS = 300_000
STEP = 100
"""Ids that come on screen in one turn of the loop."""
FRESH_FOR = 3.0
CONNECTIONS = 8


Keep: TypeAlias = Callable[["Upstream"], Awaitable[None]]


async def nothing(ids: list[str]) -> dict[str, int]:
    return dict.fromkeys(ids, 1)


async def ticks(folder: Path, size: int) -> Figures:
    """Nanoseconds for a tick with nothing due; for a scan over the rows; and for peeking a lane."""
    clock = ManualClock(time.time())
    kind = Kind("price", fetch=nothing, fresh_for=TTL_MS / 1000, max_batch=1000)
    database = Database(folder / f"{size}.db")
    async with TtlController(database=database, kinds=[kind], clock=clock) as controller:
        config = TtlConfig(max_batches_per_tick=size, batch_interval_ms=10**9)
        async with TtlCoordinator(controller, config) as ttl:
            ttl.set_visible(True)
            ids = [f"author-{number}:post-{number}" for number in range(size)]
            for id_ in ids:
                ttl.subscribe("price", id_)
            ttl.sign_in("viewer")
            await ttl.tick()
            await ttl.tick()
            track = ttl._tracks["price"]
            lane, now = track.lane, track.clock()
            rows = dict.fromkeys(ids, now)
            names: dict[str, object] = {
                "tick": ttl.tick,
                "lane": lane,
                "scan": lambda now: [id_ for id_ in ids if now - rows[id_] > TTL_MS / 1000],
                "now": now,
            }
            return await race_on_loop(
                [
                    Contender("a tick, none due", "await tick()", names, range(20)),
                    Contender("the lane alone", "lane.due(now, 500)", names, range(1000)),
                    Contender("a scan over all", "scan(now)", names, range(1)),
                ],
                rounds=21,
            )


def subscriptions(size: int) -> Figures:
    """Nanoseconds for one id: into a lane of `size` and out of it."""
    lane: Lane[str] = Lane(cooldown=10_000, longest_cooldown=300_000)
    for number in range(size):
        lane.subscribe(f"a:{number}", counted=False)
        lane.looked_up(f"a:{number}", 1_000_000 + number // BATCH, 0)
    ids = [f"b:{number}" for number in range(1_000)]
    random.Random(1).shuffle(ids)

    def come_and_go(id_: str) -> None:
        lane.subscribe(id_, counted=False)
        lane.looked_up(id_, 2_000_000, 0)
        lane.unsubscribe(id_)

    names: dict[str, object] = {"come_and_go": come_and_go}
    contenders = [
        Contender(
            "subscribe, plan, unsubscribe",
            "come_and_go(key)",
            names,
            ids,
        )
    ]
    return asyncio.run(race_on_loop(contenders, rounds=21))


@dataclass
class Cost:
    """What keeping the ids fresh took, from the first load until each was refreshed once."""

    requests: int
    cpu: float
    stall: float
    """The longest turn of the loop, in ms of CPU: others on the machine do not count."""


class Upstream:
    """Requests over HTTP to a server in a process of its own, on a few connections."""

    def __init__(self, port: int, *, looks: bool = False) -> None:
        self.requests = self.refreshed = 0
        self.done = asyncio.Event()
        self.began = self.ended = self.longest_turn = 0.0
        self._looks = looks
        self._looking: asyncio.Task[None] | None = None
        self._port = port
        self._idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.Queue()
        )

    async def __aenter__(self) -> "Upstream":
        for _ in range(CONNECTIONS):
            self._idle.put_nowait(await asyncio.open_connection("127.0.0.1", self._port))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        while not self._idle.empty():
            _reader, writer = self._idle.get_nowait()
            writer.close()
            await writer.wait_closed()

    async def _look(self) -> None:
        """From the first request until all are refreshed: opening and closing are apart."""
        while not self.done.is_set():
            began = time.thread_time()
            await asyncio.sleep(0)
            self.longest_turn = max(self.longest_turn, time.thread_time() - began)

    async def fetch(self, ids: list[str]) -> dict[str, int]:
        if not self.began:
            self.began = time.process_time()
            self._looking = asyncio.create_task(self._look()) if self._looks else None
        reader, writer = connection = await self._idle.get()
        try:
            body = json.dumps({"ids": ids}).encode()
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.rpartition(b"content-length: ")[2].split()[0])
            answer: dict[str, int] = json.loads(await reader.readexactly(length))
        finally:
            self._idle.put_nowait(connection)
        self._count(len(ids))
        return answer

    def _count(self, ids: int) -> None:
        """Until all are refreshed: what is still under way then counts for nobody."""
        if self.done.is_set():
            return
        self.requests += 1
        self.refreshed += ids
        if self.refreshed >= 2 * WATCHED:
            self.ended = time.process_time()
            self.done.set()


async def measured(keep: Keep, port: int) -> Cost:
    """Once for what it costs, once more with a task that looks how long each turn took."""
    async with Upstream(port) as upstream:
        await keep(upstream)
        requests, cpu = upstream.requests, upstream.ended - upstream.began
    async with Upstream(port, looks=True) as upstream:
        await keep(upstream)
    return Cost(requests, cpu, upstream.longest_turn * 1000)


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
    for handle in handles.values():
        handle.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for handle in handles.values():
        handle.cancel()


SERVER = """
import asyncio, json

async def handle(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = int(head.rpartition(b"content-length: ")[2].split()[0])
            ids = json.loads(await reader.readexactly(length))["ids"]
            body = json.dumps(dict.fromkeys(ids, 1)).encode()
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()

async def main():
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextmanager
def server() -> Iterator[int]:
    """Its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # noqa: S101 (it is a pipe)
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def section(progress: Progress) -> Section:
    rows: list[Row] = []
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            progress(f"a tick with {size:,} subscribed")
            found = asyncio.run(ticks(Path(folder), size))
            figures[f"{size:,} subscribed, none due, ns"] = found
            share = found["a tick, none due"] / found["a scan over all"]
            target = 0.05 if size == SIZES[-1] else None
            what = f"an idle tick with {size:,} subscribed, against a scan over them"
            rows.append(Row("C6", what, share, target))
    progress("subscribing and unsubscribing")
    each = {f"{size:,} subscribed": subscriptions(size) for size in SIZES}
    figures["subscribe, plan and unsubscribe one id, ns"] = {
        name: next(iter(found.values())) for name, found in each.items()
    }
    costs = list(figures["subscribe, plan and unsubscribe one id, ns"].values())
    rows.append(
        Row("C6", "the same id with 100,000 subscribed, against 1,000", costs[-1] / costs[0])
    )
    rows += kept_fresh(progress, figures)
    try:
        peer, told = tanstack(progress)
    except Missing as exc:
        return Section(TITLE, rows, figures, missing=f"TanStack Query: {exc}")
    rows += against_tanstack(figures, peer)
    return Section(TITLE, rows, figures, told)


def kept_fresh(progress: Progress, figures: dict[str, Figures]) -> list[Row]:
    ours, theirs = [], []
    gc.collect()
    gc.disable()
    with server() as port:
        for number in range(3):
            progress(f"keeping {WATCHED:,} ids fresh, round {number + 1}")
            ours.append(asyncio.run(measured(watched, port)))
            theirs.append(asyncio.run(measured(timers, port)))
            gc.collect()
    gc.enable()
    mine, other = summed(ours), summed(theirs)
    figures[f"{WATCHED:,} watched ids, requests"] = {
        "watch": mine.requests,
        "a timer each": other.requests,
    }
    figures[f"{WATCHED:,} watched ids, CPU s"] = {"watch": mine.cpu, "a timer each": other.cpu}
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


def tanstack(progress: Progress) -> tuple[Polled, str]:
    """The same ids from the same server; and which version."""
    progress(f"{WATCHED:,} ids polled by TanStack Query")
    with tempfile.TemporaryDirectory() as name, server() as port:
        told = installed(Path(name))
        about = {"ids": WATCHED, "step": STEP, "freshFor": FRESH_FOR * 1000}
        found = polled(Path(name), port=port, connections=CONNECTIONS, **about)
    return found, (
        f"{told} in Node, a `QueryObserver` with `refetchInterval` for each id, on as many "
        "connections to the same server, once; its stall is by the wall clock, ours by CPU."
    )


def against_tanstack(figures: dict[str, Figures], peer: Polled) -> list[Row]:
    ratios = {}
    for name, value in (("requests", peer.requests), ("CPU s", peer.cpu)):
        found = figures[f"{WATCHED:,} watched ids, {name}"]
        found["TanStack Query"] = value
        ratios[name] = found["watch"] / value
    figures[f"{WATCHED:,} watched ids, longest stall, ms"]["TanStack Query"] = peer.stall
    what = f"{WATCHED:,} ids kept fresh"
    return [
        Row("C6", f"{what}: requests, against TanStack Query", ratios["requests"], 0.05),
        Row(
            "C6",
            f"{what}: CPU, against TanStack Query",
            ratios["CPU s"],
            0.1,
            tried=tried.WATCHED_CPU,
        ),
    ]


def summed(costs: list[Cost]) -> Cost:
    return Cost(
        round(median(cost.requests for cost in costs)),
        median(cost.cpu for cost in costs),
        median(cost.stall for cost in costs),
    )
