"""F2-F10: a walk through cache and engine, beside a model that fits on a page.

The model knows what upstream has, what was seen of it, and what was written here and when.
"""

import asyncio
import random
import shutil
import tempfile
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from stillfresh import LoadFailed, Verdict
from stillfresh.systems.feed import FeedCache, FeedEngine, Topic
from stillfresh.testing import ManualClock
from tests.kit.engine import turns
from tests.kit.examples import examples
from tests.kit.feed import DAY, NOW, Heard, Network, comment, day_of, full, idle, said, uuids

T = TypeVar("T")
UUIDS = st.sampled_from("abcdef")
NAMES = ("general", "news")
CATEGORIES = st.sampled_from(NAMES)
DAYS = st.sampled_from([1, 7, 30])
FRESH_FOR = 300


def no_dice(engine: FeedEngine) -> None:
    """Cooldowns to the second."""
    life = engine._loads
    life._new_runtime = partial(life._new_runtime, dice=lambda: 0.0)


class Refused(Exception):
    """The network does not want it."""


class FeedMachine(RuleBasedStateMachine):
    """Every step ends with nothing under way, so that the model need not guess."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.home = Path(tempfile.mkdtemp())

    @initialize()
    def open(self) -> None:
        self.clock, self.network = ManualClock(NOW), Network()
        self.cache = FeedCache.open(self.home / "feed.db", clock=self.clock)
        self.engine = FeedEngine(self.cache, self.network, clock=self.clock)
        no_dice(self.engine)
        self.heard = Heard(self.engine)
        self.rows: dict[str, Topic] = {}
        """What the file should have, by uuid."""
        self.meta: dict[str, int] = {}
        self.talk: dict[str, list[str]] = {}
        self.written: dict[str, float] = {}
        self.deleted: dict[str, float] = {}
        self.cooling: dict[str, float] = {}
        self.failures: dict[str, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.loop.run_until_complete(self.engine.close())
            self.cache.close()
        self.loop.close()
        shutil.rmtree(self.home)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def settled() -> T:
            try:
                return await work
            finally:
                await idle(self.engine)

        return self.loop.run_until_complete(asyncio.wait_for(settled(), 30))

    @property
    def now(self) -> float:
        return self.clock()

    def is_fresh(self, key: str) -> bool:
        return key in self.meta and 0 <= self.now - self.meta[key] <= FRESH_FOR

    def is_new(self, notes: dict[str, float], uuid: str) -> bool:
        return uuid in notes and self.now - notes[uuid] < FRESH_FOR

    def listed(self, category: str | None, days: int) -> list[str]:
        found = [
            one
            for one in self.rows.values()
            if not one.deleted
            and one.created_at >= self.now - days * DAY
            and category in {None, one.category_id}
        ]
        return uuids(sorted(found, key=lambda one: (-one.created_at, one.topic_uuid)))

    def forget_lists(self, category: str | None) -> None:
        """None: nobody knows which, so all."""
        for key in list(self.meta):
            kind, _, rest = key.partition(":")
            name = rest.rpartition(":")[0]
            if kind == "index" and (category is None or name in {"all", category}):
                del self.meta[key]

    def put_row(self, new: Topic, *, is_listed: bool = False) -> None:
        old, key = self.rows.get(new.topic_uuid), f"topic:{new.topic_uuid}"
        is_full = old is not None and (old.body is not None or (is_listed and key in self.meta))
        if is_listed and old is None:
            self.meta.pop(key, None)
        if old is not None and new.body is None and is_full:
            new = msgspec.structs.replace(new, body=old.body, tags=old.tags, verified=old.verified)
        self.rows[new.topic_uuid] = new

    def put_listed(self, one: Topic) -> None:
        bare = msgspec.structs.replace(one, body=None, tags=[], verified=False)
        self.put_row(bare, is_listed=True)

    def drop(self, uuid: str) -> None:
        self.rows.pop(uuid, None)
        self.talk.pop(uuid, None)
        self.meta.pop(f"topic:{uuid}", None)
        self.meta.pop(f"comments:{uuid}", None)

    def fetched_list(self, category: str | None, days: int) -> None:
        """What a complete index does to the file."""
        looked_up = {day_of(self.now - back * DAY) for back in range(days)}

        def is_covered(one: Topic) -> bool:
            return day_of(one.created_at) in looked_up and category in {None, one.category_id}

        upstream = {
            uuid: one
            for uuid, one in self.network.topics.items()
            if is_covered(one) and not self.is_new(self.deleted, uuid)
        }
        for uuid, one in upstream.items():
            if not self.is_new(self.written, uuid):
                self.put_listed(one)
        for uuid, one in list(self.rows.items()):
            if is_covered(one) and uuid not in upstream and not self.is_new(self.written, uuid):
                self.drop(uuid)

    def visit(self, key: str) -> str:
        """What a read of this key does: `fresh`, `fetch`, `fail`, or `cool`."""
        if self.is_fresh(key):
            return "fresh"
        if self.now < self.cooling.get(key, 0):
            return "cool"
        if self.network.error is None:
            self.meta[key] = int(self.now)
            self.cooling.pop(key, None)
            self.failures.pop(key, None)
            return "fetch"
        self.cool_down(key)
        return "fail"

    def cool_down(self, key: str) -> None:
        self.failures[key] = self.failures.get(key, 0) + 1
        self.cooling[key] = self.now + min(60, 2 ** (self.failures[key] - 1))

    @rule(uuid=UUIDS, category=CATEGORIES, age=st.integers(0, 9 * DAY), word=st.text(max_size=3))
    def upstream_has(self, uuid: str, category: str, age: int, word: str) -> None:
        old = self.network.topics.get(uuid)
        created_at = old.created_at if old is not None else int(self.now) - age
        new = full(uuid, title=word, category_id=old.category_id if old else category)
        self.network.have(msgspec.structs.replace(new, created_at=created_at))

    @rule(uuid=UUIDS)
    def upstream_loses(self, uuid: str) -> None:
        self.network.topics.pop(uuid, None)
        self.network.talk.pop(uuid, None)

    @rule(uuid=UUIDS, count=st.integers(0, 3))
    def upstream_talks(self, uuid: str, count: int) -> None:
        self.network.talk[uuid] = [comment(f"{uuid}{n}", uuid) for n in range(count)]

    @rule(down=st.booleans())
    def weather(self, down: bool) -> None:
        self.network.error = ConnectionError("down") if down else None

    @rule(seconds=st.sampled_from([1, 59, 61, 299, 301, 5000, DAY]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(category=st.none() | CATEGORIES, days=DAYS)
    def read_list(self, category: str | None, days: int) -> None:
        key = f"index:{category or 'all'}:{days}"
        before = self.listed(category, days)
        is_hit = bool(before) or key in self.meta
        was_fresh = self.is_fresh(key)
        step = self.visit(key)
        reading = (
            self.engine.get_all(days)
            if category is None
            else self.engine.get_category(category, days)
        )
        if step == "fetch":
            self.fetched_list(category, days)
        try:
            feed = self.run(reading)
        except LoadFailed:
            assert not is_hit
            assert step in {"fail", "cool"}
            return
        assert is_hit or step == "fetch"
        assert uuids(feed.topics) == (before if is_hit else self.listed(category, days))
        assert feed.verdict is (Verdict.FRESH if was_fresh or not is_hit else Verdict.STALE)

    @rule(uuid=UUIDS)
    def read_topic(self, uuid: str) -> None:
        key, before = f"topic:{uuid}", self.rows.get(uuid)
        if uuid not in self.rows and self.is_new(self.deleted, uuid):
            assert self.run(self.engine.get_topic(uuid)).topic is None
            return
        is_hit = before is not None or key in self.meta
        step = self.visit(key)
        if step == "fetch":
            upstream, is_mine = self.network.topics.get(uuid), self.is_new(self.written, uuid)
            if upstream is not None and not is_mine:
                self.put_row(upstream)
            elif uuid in self.rows and not is_mine:
                self.drop(uuid)
                self.meta[key] = int(self.now)
        try:
            answer = self.run(self.engine.get_topic(uuid))
        except LoadFailed:
            assert not is_hit
            assert step in {"fail", "cool"}
            return
        assert answer.topic == (before if is_hit else self.rows.get(uuid))

    @rule(uuid=UUIDS)
    def read_comments(self, uuid: str) -> None:
        key, before = f"comments:{uuid}", self.talk.get(uuid)
        if self.is_new(self.deleted, uuid):
            assert said(self.run(self.engine.get_comments(uuid)).comments) == (before or [])
            return
        is_hit = before is not None or key in self.meta
        step = self.visit(key)
        if step == "fetch":
            mine = [
                one for one in self.talk.get(uuid, []) if self.is_new(self.written, f"{uuid}/{one}")
            ]
            upstream = said(self.network.talk.get(uuid, []))
            self.talk[uuid] = upstream + [one for one in mine if one not in upstream]
        try:
            answer = self.run(self.engine.get_comments(uuid))
        except LoadFailed:
            assert not is_hit
            assert step in {"fail", "cool"}
            return
        assert sorted(said(answer.comments)) == sorted(
            (before or []) if is_hit else self.talk[uuid]
        )

    @rule(uuid=UUIDS, category=CATEGORIES, refused=st.booleans(), lags=st.booleans())
    def create(self, uuid: str, category: str, refused: bool, lags: bool) -> None:
        if uuid in self.rows:
            category = self.rows[uuid].category_id
        new = msgspec.structs.replace(
            full(uuid, title="created", category_id=category), created_at=int(self.now)
        )
        self.network.lags, self.network.refusal = lags, Refused() if refused else None
        self.forget_lists(category)
        if refused:
            self.meta.pop(f"topic:{uuid}", None)
        else:
            self.put_row(new)
            self.meta[f"topic:{uuid}"] = int(self.now)
            self.written[uuid] = self.now
            self.deleted.pop(uuid, None)
        try:
            self.run(self.engine.create_topic(new))
            assert not refused
        except Refused:
            assert refused

    @rule(uuid=UUIDS, refused=st.booleans(), lags=st.booleans())
    def delete(self, uuid: str, refused: bool, lags: bool) -> None:
        self.network.lags, self.network.refusal = lags, Refused() if refused else None
        known = self.rows.get(uuid)
        self.forget_lists(None if known is None else known.category_id)
        for key in (f"topic:{uuid}", f"comments:{uuid}"):
            self.meta.pop(key, None)
        if not refused:
            for note in [note for note in self.written if note.partition("/")[0] == uuid]:
                del self.written[note]
            self.drop(uuid)
            self.deleted[uuid] = self.now
        try:
            self.run(self.engine.delete_topic(uuid))
            assert not refused
        except Refused:
            assert refused

    @rule(uuid=UUIDS, number=st.integers(0, 5), refused=st.booleans(), lags=st.booleans())
    def add_comment(self, uuid: str, number: int, refused: bool, lags: bool) -> None:
        name = f"{uuid}{number}"
        if name in self.talk.get(uuid, []) or name in said(self.network.talk.get(uuid, [])):
            return
        self.network.lags, self.network.refusal = lags, Refused() if refused else None
        self.meta.pop(f"comments:{uuid}", None)
        if not refused:
            self.talk.setdefault(uuid, []).append(name)
            self.written[f"{uuid}/{name}"] = self.now
        try:
            self.run(self.engine.add_comment(uuid, comment(name, uuid)))
            assert not refused
        except Refused:
            assert refused

    @rule(uuid=UUIDS)
    def remote_comment(self, uuid: str) -> None:
        count = len(self.heard.events)

        async def tell() -> None:
            await self.engine.on_remote_comment(uuid)

        self.run(tell())
        self.meta.pop(f"comments:{uuid}", None)
        assert [one.cache_key for one in self.heard.events[count:]] == [f"comments:{uuid}"]

    @rule(uuid=UUIDS)
    def invalidate(self, uuid: str) -> None:
        self.cache.invalidate_comments(uuid)
        self.meta.pop(f"comments:{uuid}", None)

    @rule(uuid=UUIDS, category=CATEGORIES, days=DAYS)
    def put_index(self, uuid: str, category: str, days: int) -> None:
        if uuid in self.rows:
            category = self.rows[uuid].category_id
        if self.is_new(self.deleted, uuid):
            return
        new = msgspec.structs.replace(
            full(uuid, body=None, tags=[], verified=False, category_id=category),
            created_at=int(self.now) - 3600,
        )
        self.cache.put_topics([new], f"index:{category}:{days}")
        self.put_row(new, is_listed=True)
        self.written.pop(uuid, None)
        self.meta[f"index:{category}:{days}"] = int(self.now)

    @rule(category=st.none() | CATEGORIES, days=DAYS)
    def put_complete(self, category: str | None, days: int) -> None:
        """As the engine does, with the window that the cache itself shows."""
        key = f"index:{category or 'all'}:{days}"

        def is_shown(one: Topic) -> bool:
            return one.created_at >= self.now - days * DAY and category in {None, one.category_id}

        there = [
            msgspec.structs.replace(one, body=None, tags=[], verified=False)
            for uuid, one in self.network.topics.items()
            if is_shown(one) and not self.is_new(self.deleted, uuid)
        ]
        self.cache.put_topics(there, key, complete=True)
        for one in there:
            self.put_row(one, is_listed=True)
            self.written.pop(one.topic_uuid, None)
        for uuid, old in list(self.rows.items()):
            is_gone = is_shown(old) and uuid not in uuids(there)
            if is_gone and not self.is_new(self.written, uuid):
                self.drop(uuid)
        self.meta[key] = int(self.now)

    @rule(days=st.sampled_from([7, 30]), back=st.integers(0, 6))
    def read_with_a_day_missing(self, days: int, back: int) -> None:
        """F6: what came is stored and answered, without a meta row; nothing is deleted."""
        key, failing = f"index:all:{days}", day_of(self.now - back * DAY)
        is_asked = not self.is_fresh(key) and self.now >= self.cooling.get(key, 0)
        if not is_asked or self.network.error is not None:
            return
        before = self.listed(None, days)
        is_hit = bool(before) or key in self.meta
        looked_up = {day_of(self.now - back * DAY) for back in range(days)} - {failing}
        for uuid, one in self.network.topics.items():
            is_mine = self.is_new(self.deleted, uuid) or self.is_new(self.written, uuid)
            if day_of(one.created_at) in looked_up and not is_mine:
                self.put_listed(one)
        self.cool_down(key)
        self.network.failing_days = {failing}
        feed = self.run(self.engine.get_all(days))
        self.network.failing_days = set()
        assert uuids(feed.topics) == (before if is_hit else self.listed(None, days))
        assert feed.verdict is not Verdict.FRESH

    @precondition(lambda self: hasattr(self, "cache"))
    @rule()
    def reopen(self) -> None:
        """Another process takes over: all there is to know is in the file."""
        self.loop.run_until_complete(self.engine.close())
        self.cache.close()
        self.cache = FeedCache.open(self.home / "feed.db", clock=self.clock)
        self.engine = FeedEngine(self.cache, self.network, clock=self.clock)
        no_dice(self.engine)
        self.heard = Heard(self.engine)

    @invariant()
    def the_file_is_as_the_model_says(self) -> None:
        if not hasattr(self, "cache"):
            return
        for category in (None, *NAMES):
            for days in (1, 7, 30):
                found = (
                    self.cache.get_topics_all(days)
                    if category is None
                    else self.cache.get_topics_by_category(category, days)
                )
                key = f"index:{category or 'all'}:{days}"
                is_hit = key in self.meta or bool(self.listed(category, days))
                assert (None if found is None else uuids(found)) == (
                    self.listed(category, days) if is_hit else None
                )
                assert self.cache.is_stale(key) is not self.is_fresh(key), key
        for uuid in "abcdef":
            assert self.cache.get_topic(uuid) == self.rows.get(uuid)
            found_talk = self.cache.get_comments(uuid)
            if uuid in self.talk:
                assert sorted(said(found_talk)) == sorted(self.talk[uuid])
            else:
                assert not found_talk


FeedMachine.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=30)
TestFeedModel = FeedMachine.TestCase


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_overlaps_the_file_ends_as_upstream(seed: int, path: Path) -> None:
    """F8: reads, writes and refusals at random, the network slow: each reads what they wrote,
    and in the end all is as upstream has it.
    """
    await overlapping(random.Random(seed), path)


async def overlapping(dice: random.Random, path: Path) -> None:
    clock, network = ManualClock(NOW), Dawdling(dice)
    network.have(*[full(uuid, ord(uuid)) for uuid in "abcdef"])
    with FeedCache.open(path, clock=clock) as cache:
        async with FeedEngine(cache, network, clock=clock) as engine:
            writers = [wander(engine, uuid, dice, clock) for uuid in "abcxyz"]
            await asyncio.wait_for(asyncio.gather(*writers), 60)
            await idle(engine)
            for _ in range(2):
                clock.advance(FRESH_FOR + 1)
                await engine.get_all()
                for uuid in "abcxyz":
                    await engine.get_comments(uuid)
                await idle(engine)
            expected = sorted(network.topics.values(), key=lambda one: -one.created_at)
            assert sorted(uuids((await engine.get_all()).topics)) == sorted(uuids(expected))
            for uuid in "abcxyz":
                assert said((await engine.get_comments(uuid)).comments) == said(
                    network.talk.get(uuid, [])
                )
            await idle(engine)


class Dawdling(Network):
    """Takes its time, and now and then refuses a write."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.dice = dice

    async def _slow(self) -> None:
        await turns(self.dice.randrange(30))

    async def _write(self, what: str) -> bool:
        self.asked.append(what)
        await turns(self.dice.randrange(30))
        if self.dice.random() < 0.3:
            raise Refused(what)
        return True


async def wander(engine: FeedEngine, uuid: str, dice: random.Random, clock: ManualClock) -> None:
    """One who writes about one topic, and reads what became of it."""
    is_there: bool | None = None
    for number in range(6):
        await turns(dice.randrange(10))
        clock.advance(dice.choice([0, 0, 1, 20]))
        try:
            match dice.randrange(3):
                case 0:
                    await engine.create_topic(full(uuid, ord(uuid)))
                    is_there = True
                case 1:
                    await engine.delete_topic(uuid)
                    is_there = False
                case _:
                    await engine.add_comment(uuid, comment(f"{uuid}{number}", uuid))
        except Refused:
            is_there = None
        feed = await engine.get_all()
        if is_there is not None:
            assert (uuid in uuids(feed.topics)) is is_there
        await engine.get_comments(uuid)
