"""C2-C5, C7-C9, C11: the coordinator on a real file, against a model that scans everything.

The model knows no plan, no heap and no slices: at every tick it looks at every subscribed id.
"""

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stillfresh import LoadFailed
from stillfresh.engine.rules import stamped
from stillfresh.systems.coordinator import TtlConfig
from stillfresh.testing import ManualClock
from tests.kit.coordinator import START, Site, made
from tests.kit.examples import examples

TTL = 60_000
COOLDOWN = 10_000
BATCH = 3
IDS = [f"a:{number}" for number in range(8)]
KINDS = ("post", "user")
kinds, ids = st.sampled_from(KINDS), st.sampled_from(IDS)


@dataclass
class Model:
    """What one kind must do, naively."""

    counted: bool
    counts: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    queue: dict[str, int] = field(default_factory=dict)
    """Since which step each is queued."""
    unsure: set[str] = field(default_factory=set)
    """Made fresh by another process or by the clock while queued: it may have lost its place."""
    cooldowns: dict[str, tuple[int, int]] = field(default_factory=dict)
    suspects: set[str] = field(default_factory=set)
    """Failed with their whole batch."""

    def is_stale(self, id_: str, now: int, visible: bool) -> bool:
        row = self.rows.get(id_) if visible else None
        return row is None or not 0 <= now - row <= TTL

    def is_cooling(self, id_: str, now: int) -> bool:
        """Not if it is further away than any can be: the clock was set back."""
        return id_ in self.cooldowns and 0 < self.cooldowns[id_][1] - now <= 300_000

    def enqueue(self, id_: str, now: int, step: int, visible: bool) -> None:
        if self.is_stale(id_, now, visible) and not self.is_cooling(id_, now):
            self.queue.setdefault(id_, step)

    def clear(self) -> None:
        self.counts.clear()
        self.queue.clear()
        self.unsure.clear()

    def forget(self, id_: str) -> None:
        self.queue.pop(id_, None)
        self.unsure.discard(id_)


class Coordinators(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = ManualClock(START)
        self.models = {"post": Model(counted=False), "user": Model(counted=True)}
        self.viewer: str | None = None
        self.owner: str | None = None
        self.visible = self.started = False
        self.route: str | None = None
        self.steps = 0
        self.site: Site = self.run(self.make())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def make(self) -> Site:
        config = TtlConfig(
            post_ttl_ms=TTL,
            user_ttl_ms=TTL,
            cooldown_ms=COOLDOWN,
            post_max_batch_size=BATCH,
            user_max_batch_size=BATCH,
            batch_interval_ms=10**9,
        )
        site = made(Path(self.folder.name), self.clock, config)
        await site.controller.prepare()
        return site

    def teardown(self) -> None:
        async def end() -> None:
            await self.site.ttl.stop()
            await self.site.controller.close()

        self.run(end())
        self.loop.close()
        self.folder.cleanup()

    @property
    def now(self) -> int:
        return round(stamped(self.clock()) * 1000)

    @property
    def sees_rows(self) -> bool:
        return self.viewer is not None and self.owner in {None, self.viewer}

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """On the loop, as an application does."""

        async def called() -> None:
            getattr(self.site.ttl, method)(*args, **kwargs)

        self.steps += 1
        self.run(called())

    @initialize()
    def begin(self) -> None:
        self.go("home")
        self.start()
        self.sign_in("ann")
        self.show(visible=True)

    @rule(what=st.sampled_from(["stop", "out", "out and in", "ann", "bob", "home", "profile"]))
    def leave(self, what: str) -> None:
        """One rule for all that clears the screen, so that there is something to be cleared."""
        match what:
            case "stop":
                self.stop()
                self.start()
            case "out":
                self.sign_out()
            case "out and in":
                self.sign_out()
                self.sign_in("ann")
            case "ann" | "bob":
                self.sign_in(what)
            case route:
                self.go(route)

    def start(self) -> None:
        self.call("start")
        self.started = True
        self.tick()

    def stop(self) -> None:
        self.run(self.site.ttl.stop())
        self.started = False
        for model in self.models.values():
            model.clear()

    def sign_in(self, viewer: str) -> None:
        self.call("sign_in", viewer)
        if viewer != self.viewer and self.viewer is not None:
            for model in self.models.values():
                model.clear()
        self.viewer = viewer
        self.tick()

    def sign_out(self) -> None:
        self.call("sign_out")
        if self.viewer is not None:
            self.viewer = None
            for model in self.models.values():
                model.clear()

    @rule(visible=st.booleans())
    def show(self, visible: bool) -> None:
        self.call("set_visible", visible)
        self.visible = visible
        self.tick()

    def go(self, route: str) -> None:
        self.call("set_route", route)
        if self.route not in {None, route}:
            for model in self.models.values():
                model.clear()
        self.route = route

    @rule(kind=kinds, id_=ids)
    def subscribe(self, kind: str, id_: str) -> None:
        self.call("subscribe", kind, id_)
        model = self.models[kind]
        count = model.counts.get(id_, 0)
        model.counts[id_] = count + 1 if model.counted else 1
        if not count and self.viewer is not None:
            model.enqueue(id_, self.now, self.steps, self.sees_rows)

    @rule(kind=kinds, many=st.lists(ids, min_size=3, unique=True))
    def scroll(self, kind: str, many: list[str]) -> None:
        for id_ in many:
            self.subscribe(kind, id_)

    @rule(kind=kinds, id_=ids)
    def unsubscribe(self, kind: str, id_: str) -> None:
        self.call("unsubscribe", kind, id_)
        model = self.models[kind]
        count = model.counts.pop(id_, 0)
        if count > 1:
            model.counts[id_] = count - 1
        else:
            model.forget(id_)

    @rule(kind=kinds, many=st.lists(ids, min_size=3, unique=True))
    def scroll_away(self, kind: str, many: list[str]) -> None:
        self.scroll(kind, many[1:])
        for id_ in many:
            self.unsubscribe(kind, id_)

    @rule(by=st.sampled_from([-TTL, -1, 1, COOLDOWN - 1, COOLDOWN, TTL - 1, TTL, 5 * TTL]))
    def passes(self, by: int) -> None:
        self.clock.advance(by / 1000)

    @rule(by=st.sampled_from([1, COOLDOWN, TTL, TTL + 1, 2 * TTL]))
    def passes_and_ticks(self, by: int) -> None:
        self.clock.advance(by / 1000)
        self.tick()

    @rule(kind=kinds, by=st.sampled_from([TTL, TTL + 1]))
    def refreshed_together(self, kind: str, by: int) -> None:
        """All are fresh, wait for one moment, and it comes, or nearly."""
        self.changes(set(), set())
        self.scroll(kind, IDS)
        for _ in range(3):
            self.tick()
        self.passes_and_ticks(by)

    @rule(failing=st.sets(ids, max_size=3), absent=st.sets(ids, max_size=2))
    def changes(self, failing: set[str], absent: set[str]) -> None:
        self.site.nexus.failing, self.site.nexus.absent = failing, absent

    @rule(kind=kinds, id_=ids, age=st.sampled_from([-5, 0, TTL, TTL + 1]))
    def another_process_writes(self, kind: str, id_: str, age: int) -> None:
        row = self.now - age
        self.write(lambda: self.site.write_row(kind, id_, row))
        model = self.models[kind]
        model.rows[id_] = row
        if id_ in model.queue:
            model.unsure.add(id_)

    @rule(kind=kinds, id_=ids)
    def another_process_deletes(self, kind: str, id_: str) -> None:
        self.write(lambda: self.site.write(f"DELETE FROM {kind}_ttl WHERE id = ?", id_))
        self.models[kind].rows.pop(id_, None)

    def write(self, job: Callable[[], None]) -> None:
        async def written() -> None:
            job()

        self.serve()
        self.run(written())

    def serve(self) -> None:
        """As every tick does: the file is the viewer's who is here."""
        if self.viewer is None:
            # The tables are there once anybody was.
            return
        self.run(self.site.controller.prepare())
        if self.owner not in {None, self.viewer}:
            for model in self.models.values():
                model.rows.clear()
        self.owner = self.viewer

    @precondition(lambda self: self.viewer is not None)
    @rule(kind=kinds, id_=ids)
    def touch(self, kind: str, id_: str) -> None:
        self.serve()
        self.run(self.site.controller.touch(kind, id_))
        self.refreshed(kind, id_)

    @precondition(lambda self: self.viewer is not None)
    @rule(kind=kinds, id_=ids)
    def force(self, kind: str, id_: str) -> None:
        self.serve()
        with suppress(LoadFailed):
            self.run(self.site.controller.force_refresh(kind, [id_]))
        if id_ not in self.site.nexus.failing:
            self.refreshed(kind, id_)
            return
        model = self.models[kind]
        self.cool(model, id_)
        if id_ in model.queue:
            model.unsure.add(id_)

    def refreshed(self, kind: str, id_: str) -> None:
        """By hand: the queue forgets it."""
        model = self.models[kind]
        model.rows[id_] = self.now
        model.forget(id_)
        model.cooldowns.pop(id_, None)
        model.suspects.discard(id_)

    @rule()
    def tick(self) -> None:
        nexus = self.site.nexus
        nexus.posts.clear()
        nexus.users.clear()
        self.steps += 1
        self.run(self.site.ttl.tick())
        is_open = self.started and self.viewer is not None and self.visible
        asked = {"post": nexus.posts, "user": nexus.users}
        if not is_open:
            assert asked == {"post": [], "user": []}
            return
        self.serve()
        for kind in KINDS:
            self.check_batch(self.models[kind], asked[kind])

    def check_batch(self, model: Model, batches: list[list[str]]) -> None:
        """C5: as many as there are, up to a batch; the longest queued; then what became of it.

        C9: what failed with its batch is never beside what did not, and may be fewer.
        """
        model.suspects -= {
            id_ for id_ in model.suspects if model.cooldowns[id_][1] - self.now > 300_000
        }
        for id_ in model.counts:
            model.enqueue(id_, self.now, self.steps, self.sees_rows)
        stale = [
            id_
            for id_ in model.queue
            if model.is_stale(id_, self.now, self.sees_rows) and not model.is_cooling(id_, self.now)
        ]
        model.unsure |= model.queue.keys() - set(stale)
        batch = batches[0] if batches else []
        assert len(batches) <= 1
        assert bool(batch) == bool(stale)
        assert set(batch) <= set(stale)
        # One that another process refreshed meanwhile, if that was seen, is no suspect any more.
        certain = model.suspects - model.unsure
        is_clean = certain.isdisjoint(batch)
        assert is_clean or model.suspects.issuperset(batch)
        least = min(BATCH, len([id_ for id_ in stale if id_ not in model.suspects]))
        stale = [id_ for id_ in stale if (id_ not in certain) == is_clean]
        assert len(batch) <= BATCH
        assert not is_clean or len(batch) >= least
        left = [model.queue[id_] for id_ in stale if id_ not in {*batch, *model.unsure}]
        taken = [model.queue[id_] for id_ in batch if id_ not in model.unsure]
        assert not left or not taken or max(taken) <= min(left)
        for id_ in batch:
            model.forget(id_)
            self.land(model, id_, failed=bool(self.site.nexus.failing & set(batch)))

    def land(self, model: Model, id_: str, *, failed: bool) -> None:
        if failed:
            self.cool(model, id_)
            model.suspects.add(id_)
        else:
            model.cooldowns.pop(id_, None)
            model.suspects.discard(id_)
            model.rows[id_] = self.now

    def cool(self, model: Model, id_: str) -> None:
        failures = model.cooldowns.get(id_, (0, 0))[0] + 1
        pause = min(COOLDOWN * 2 ** (failures - 1), 300_000)
        model.cooldowns[id_] = failures, self.now + pause

    @invariant()
    def the_state_is_the_models(self) -> None:
        """C3, C4, C9: what is subscribed, what may be queued, what is cooling."""
        state = self.site.ttl.snapshot()
        for kind, model in self.models.items():
            assert state.subscribed[kind] == model.counts
            assert set(state.queued[kind]) <= model.counts.keys()
            assert state.in_flight[kind] == ()
            cooling = {
                id_: until
                for id_, (_, until) in model.cooldowns.items()
                if model.is_cooling(id_, self.now)
            }
            found = {id_: round(until * 1000) for id_, until in state.cooling[kind].items()}
            assert found == cooling
            if self.viewer is None:
                assert state.queued[kind] == ()

    @invariant()
    def the_file_is_the_models(self) -> None:
        """C2: every row is as the model has it."""
        if self.owner is not None:
            for kind, model in self.models.items():
                assert self.site.rows(f"{kind}_ttl") == model.rows


class TestC5AgainstAModel(Coordinators.TestCase):  # type: ignore[misc, valid-type]
    """Any sequence of calls, times and failures."""

    settings = settings(max_examples=examples(30), stateful_step_count=30)
