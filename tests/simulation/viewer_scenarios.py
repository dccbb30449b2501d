"""T1: what is watched: the hub and its connections, the coordinator and its ticks."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import ceil

from stillfresh.errors import LoadFailed, StillfreshError
from stillfresh.gateway.live import Connection, Hub
from stillfresh.gateway.live.resources import viewer_key
from stillfresh.systems.coordinator import Database, Kind, TtlConfig, TtlController, TtlCoordinator
from stillfresh.testing import Observed, Process, Promise, Version, World

IDS = ("a", "b", "c", "d", "e")
WATCHED = ("a", "b", "c")
SHORT = 3.0
"""Seconds of freshness, shorter than some cooldowns."""
IN_TIME = 3.0
"""Seconds in which a watched key is asked for, however often the store has to be asked again."""
HOUR = 3600.0
FRESH_FOR = 8.0
QUIET = 60.0
"""Seconds after which every fault is over."""
LONGEST = 35.0
"""A clock that was set is noticed within 30 s, and a load takes a few."""


@cache
def own_key(viewer_id: str, id_: str) -> str:
    return viewer_key(viewer_id, id_)


class Viewer:
    """What one connection was told to hold, and whether it does."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.held: Counter[tuple[str, str]] = Counter()
        self.is_visible = True

    def keys(self, kind: str) -> list[str]:
        """Of what is held: a view of one's own is nobody else's."""
        if kind == "shared":
            return [id_ for held, id_ in self.held if held == kind]
        viewer = str(self.connection.viewer_id)
        return [own_key(viewer, id_) for held, id_ in self.held if held == kind]

    def step(self, world: World) -> None:
        kind, id_ = world.dice.choice(["shared", "own"]), world.dice.choice(IDS)
        match world.dice.randrange(8):
            case 0 | 1 | 2:
                self.connection.subscribe(kind, id_)
                self.held[kind, id_] = 1 if kind == "shared" else self.held[kind, id_] + 1
            case 3 | 4:
                self.connection.unsubscribe(kind, id_)
                self.held -= Counter([(kind, id_)])
            case 5 | 6:
                self.is_visible = not self.is_visible
                self.connection.set_visible(self.is_visible)
            case _ if world.dice.random() < 0.3:
                self.connection.reset()
                self.held.clear()


def watched(hub: Hub, viewers: list[Viewer], kind: str) -> str | None:
    """C14: what the visible viewers hold is watched, once, and each of them is told of it."""
    expected: dict[str, int] = {}
    for viewer in viewers:
        if viewer.is_visible:
            for key in viewer.keys(kind):
                expected[key] = expected.get(key, 0) + 1
    told = {key: len(it.viewers) for key, it in hub._viewed[kind].items() if it.viewers}
    if told != expected:
        return f"{kind}: the viewers hold {expected}, told are {told}"
    lane = hub.resource(kind).core.watcher.lane.subscribed
    if lane != dict.fromkeys(expected, 1):
        return f"{kind}: the viewers hold {expected}, the lane has {lane}"
    return None


def counts(hub: Hub, viewers: list[Viewer]) -> str | None:
    for viewer in viewers:
        if viewer.connection.subscribed != dict(viewer.held):
            return f"a viewer holds {dict(viewer.held)}, not {viewer.connection.subscribed}"
    return watched(hub, viewers, "shared") or watched(hub, viewers, "own")


def alive(process: Process, check: Callable[[], str | None]) -> Callable[[], str | None]:
    return lambda: check() if process.is_alive else None


async def of_a_hub(world: World) -> None:
    """C14: many viewers over one store; what they look at is kept fresh, and nothing else."""

    async def app(process: Process) -> None:
        async def shared(ids: list[str]) -> dict[str, object]:
            return dict(await process.load("shared", ids))

        async def own(ids: list[str], viewer_id: str) -> dict[str, object]:
            return dict.fromkeys(ids, viewer_id)

        hub = Hub(
            process.cache(),
            kinds=[
                Kind("shared", fetch=shared, fresh_for=FRESH_FOR, max_batch=2),
                Kind("own", fetch=own, fresh_for=FRESH_FOR, counted=True, per_viewer=True),
            ],
        )
        viewers = [Viewer(hub.connect(name)) for name in ("ann", "bob")]
        world.always(Promise.COUNTS, alive(process, lambda: counts(hub, viewers)))
        for _ in world.steps(20):
            await asyncio.sleep(world.dice.choice([0, 0.1, 1.0, 4.0]))
            world.dice.choice(viewers).step(world)
            if world.dice.random() < 0.02:
                held = world.dice.choice(viewers)
                with suppress(LoadFailed):
                    await held.connection.get("shared", world.dice.choice(IDS))
        await kept_fresh(process, viewers)
        for viewer in viewers:
            viewer.connection.close()
            viewer.held.clear()

    world.launch(app, 2)


async def kept_fresh(process: Process, viewers: list[Viewer]) -> None:
    """When all is well again: what is watched was loaded by somebody, not long ago."""
    process.failure_rate = 0.0
    world = process.world
    await asyncio.sleep(max(0.0, QUIET - world.time()) + 2 * FRESH_FOR + LONGEST)
    seen = {id_ for it in viewers if it.is_visible for kind, id_ in it.held if kind == "shared"}
    for id_ in sorted(seen):
        since = world.time() - world.ledger.loaded_at["shared", id_]
        if since > FRESH_FOR + LONGEST:
            world.broken(Promise.ASKED, f"{id_} is watched, and was asked for {since:.1f} s ago")


async def of_a_watch(world: World) -> None:
    """E24: keys are watched while others refresh, invalidate and fail to load them."""

    async def app(process: Process) -> None:
        inline, pushes = world.dice.choice([(False, False), (True, False), (False, True)])
        cache = process.cache(inline=inline, pushes=pushes)

        @cache.batched("thing", fresh_for=SHORT, stale_for=HOUR, max_batch=2, lease_for=3)
        async def thing(ids: list[str]) -> dict[str, Version | Exception]:
            return await process.load("thing", ids)

        observed = process.observe("thing", thing)
        with thing.watch(*WATCHED):
            for _ in world.steps(15):
                await asyncio.sleep(world.dice.choice([0, 0.1, 1.0, 4.0]))
                await disturbed(observed, world.dice.choice(WATCHED))
            await asyncio.sleep(max(0.0, QUIET - world.time()) + LONGEST)
            for _ in world.steps(3):
                await recovered(process, observed, world.dice.choice(WATCHED))

    world.launch(app, 1)


async def disturbed(resource: Observed, key: str) -> None:
    match resource.process.world.dice.randrange(4):
        case 0:
            await resource.change(key)
        case 1:
            await resource.refresh(key)
        case _:
            await resource.get(key)


async def recovered(process: Process, resource: Observed, key: str) -> None:
    """Loads fail for a while, so that the key cools down. Then somebody refreshes it, and perhaps
    invalidates it. It is asked for again when its new time comes, not that of the cooldown."""
    world, asked = process.world, process.world.ledger.loaded_at
    faults = world.weather.faults
    process.failure_rate = 1.0
    await asyncio.sleep(world.dice.choice([10.0, 20.0, 40.0]))
    process.failure_rate = 0.0
    await resource.refresh(key)
    before = asked["thing", key]
    if world.dice.random() < 0.3:
        before = world.time()
        await resource.change(key)
    await asyncio.sleep(max(0.0, before + SHORT - world.time()) + IN_TIME)
    if asked["thing", key] <= before and world.weather.faults == faults:
        world.broken(Promise.ASKED, f"{key} is watched and stale, and nobody asked in {IN_TIME} s")


class Ticks:
    """C6: within ceil(queue / max_batch) + 1 ticks what is stale and not cooling is asked for.

    One that failed with its whole batch is tried apart from the others (C9): a tick more for each,
    also for one that fails while others wait.
    """

    def __init__(self, process: Process, ttl: TtlCoordinator, controller: TtlController) -> None:
        self._process = process
        self._ttl = ttl
        self._controller = controller
        self._last: float | None = None
        self._ticks = 0
        self._due: dict[str, tuple[int, int, set[str]]] = {}
        """Of each stale id: since which tick, the bound without suspects, the suspects since."""

    def asked(self, ids: list[str]) -> None:
        for id_ in ids:
            self._due.pop(id_, None)

    def check(self) -> str | None:
        ttl = self._ttl
        if ttl._last_tick == self._last or ttl._ticking is None:
            return None
        self._last = ttl._last_tick
        self._ticks += 1
        due = self._stale()
        suspects = {id_ for id_ in due if ttl._tracks["thing"].lane._is_suspect(id_)}
        kind = self._controller.kinds["thing"]
        bound = ceil(len(due) / kind.max_batch) + 1
        self._due = {id_: self._due.get(id_, (self._ticks, bound, set())) for id_ in due}
        for id_, (since, least, suspects_since) in self._due.items():
            suspects_since.update(suspects)
            most = least + len(suspects_since)
            if self._ticks - since > most:
                return f"{id_} is stale for {self._ticks - since} ticks, {most} are allowed"
        return None

    def _stale(self) -> list[str]:
        snapshot = self._ttl.snapshot()
        now = self._process.clock()
        ids = list(snapshot.subscribed["thing"])
        times = self._controller.tracks["thing"].times(ids)
        flying, cooling = snapshot.in_flight["thing"], snapshot.cooling["thing"]
        return [
            id_ for id_ in ids if id_ not in flying and id_ not in cooling and times[id_] <= now
        ]


async def of_a_coordinator(world: World) -> None:
    """C1-C13: two screens of one file; what is on screen is asked for, in batches, in time."""

    async def app(process: Process) -> None:
        async def fetch(ids: list[str]) -> dict[str, object]:
            ticks.asked(ids)
            return dict(await process.load("thing", ids, leased=False))

        controller = TtlController(
            database=Database(world.folder / "app.db"),
            kinds=[Kind("thing", fetch=fetch, fresh_for=6, max_batch=2, counted=True)],
            clock=process.clock,
            fetch_timeout=5,
        )
        ttl = TtlCoordinator(controller, TtlConfig(batch_interval_ms=1000, cooldown_ms=2000))
        ticks = Ticks(process, ttl, controller)
        held: Counter[str] = Counter()

        def matches() -> str | None:
            actual = ttl._tracks["thing"].lane.subscribed
            return None if actual == dict(held) else f"held are {dict(held)}, known {actual}"

        world.always(Promise.COUNTS, alive(process, matches))
        world.always(Promise.ASKED, alive(process, ticks.check))
        process.at_close(controller.close)
        async with ttl:
            ttl.sign_in("ann")
            ttl.set_visible(True)
            for _ in world.steps(30):
                await asyncio.sleep(world.dice.choice([0, 0.1, 1.0, 3.0]))
                await scroll(world, ttl, controller, held)
            held.clear()
        if left := ttl.snapshot().in_flight["thing"]:
            world.broken(Promise.ALIVE, f"in flight after stop: {left}")

    world.launch(app, 2)


async def scroll(
    world: World, ttl: TtlCoordinator, controller: TtlController, held: Counter[str]
) -> None:
    id_ = world.dice.choice(IDS)
    match world.dice.randrange(14):
        case 0 | 1 | 2 | 3 | 4:
            ttl.subscribe("thing", id_)
            held[id_] += 1
        case 5 | 6 | 7:
            ttl.unsubscribe("thing", id_)
            held[id_] -= 1
            if held[id_] <= 0:
                del held[id_]
        case 8:
            ttl.set_visible(world.dice.random() < 0.7)
        case 9:
            with suppress(StillfreshError):
                await controller.force_refresh("thing", [id_])
        case 10:
            with suppress(StillfreshError):
                await controller.touch("thing", id_, {"edited": True})
        case 11 if world.dice.random() < 0.3:
            ttl.reset()
            held.clear()
        case 13 if world.dice.random() < 0.3:
            held.clear()
            await ttl.stop()
            ttl.start()
        case 12 if world.dice.random() < 0.3:
            ttl.sign_out()
            held.clear()
            ttl.sign_in("ann")
        case _:
            pass
