"""C6: what a tick costs with many subscribed; and what `kept_fresh.py` measures."""

import asyncio
import random
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Contender, Figures, Progress, Row, Section, race_on_loop
from benchmarks.kept_fresh import against_tanstack, kept_fresh, tanstack
from benchmarks.tanstack import Missing
from stillfresh.engine.lane import Lane
from stillfresh.systems.coordinator import Database, Kind, TtlConfig, TtlController, TtlCoordinator
from stillfresh.testing import ManualClock

__all__ = ["section"]

TITLE = "TTL coordinator (C6)"
SIZES = (1_000, 10_000, 100_000)
BATCH = 20
TTL_MS = 300_000


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
        peers, told = tanstack(progress)
    except Missing as exc:
        return Section(TITLE, rows, figures, missing=f"TanStack Query: {exc}")
    rows += against_tanstack(figures, peers)
    return Section(TITLE, rows, figures, told)
