"""F7, F8, F17, F18: one writer for the file, one lease for all that a load brings, in slices."""

import asyncio
import threading
from pathlib import Path

from stillfresh import Verdict
from stillfresh.systems.feed import FeedCache, FeedEngine
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.feed import (
    DAY,
    NOW,
    PUT_META,
    PUT_TOPIC,
    Heard,
    Network,
    day_of,
    elsewhere,
    idle,
    row_of,
    topic,
    uuids,
    written_by_another,
)


class TestF8PartlyFailed:
    async def test_a_part_never_brings_back_what_another_deleted(
        self, path: Path, clock: ManualClock, network: Network
    ) -> None:
        """Another implementation leaves no note; its deletion of the meta row voids the lease."""
        old = (PUT_META, ("index:all:7", int(NOW) - 301))
        rows = [(PUT_TOPIC, row_of(topic(uuid))) for uuid in "ab"]
        written_by_another(path, old, *rows)
        network.have(topic("a"), topic("b"))
        network.failing_days = {day_of(NOW - DAY)}
        network.hold()
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            heard = Heard(engine)
            await engine.get_all()
            await until(lambda: network.running == 7)
            elsewhere(
                path,
                "db.execute(\"DELETE FROM feed_topics WHERE topic_uuid = 'a'\")\n"
                'db.execute("DELETE FROM feed_cache_meta")',
            )
            del network.topics["a"]
            network.let_go()
            await idle(engine)
            assert uuids(cache.get_topics_all(7)) == ["b"]
            assert len(network.lookups) == 14
            assert [event.changed for event in heard.events] == [False]
            await engine.close()

    async def test_a_part_that_a_write_overtook_is_fetched_once_more(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """The caller of a miss sees both: what upstream has, and what was written meanwhile."""
        network.failing_days = {day_of(NOW - DAY)}
        network.have(topic("a"))
        reading = await network.holding(engine.get_all())
        network.lags = True
        await engine.create_topic(topic("new", 0))
        network.let_go()
        feed = await reading
        assert (uuids(feed.topics), feed.verdict) == (["new", "a"], Verdict.STALE)

    async def test_a_part_is_stored_under_its_lease(
        self, cache: FeedCache, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """A miss is answered with it; behind a reader it is told of."""
        network.failing_days = {day_of(NOW - DAY)}
        network.have(topic("a"))
        feed = await engine.get_all()
        assert (uuids(feed.topics), feed.verdict) == (["a"], Verdict.STALE)
        assert uuids(cache.get_topics_all(7)) == ["a"]
        assert heard.events == []


class TestF7GivenUp:
    async def test_a_first_fetch_whose_caller_gave_up_is_no_revalidation(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        heard: Heard,
        clock: ManualClock,
    ) -> None:
        """It is stored, without an event; the next revalidation has its own."""
        network.have(topic("a"))
        reading = await network.holding(engine.get_all())
        reading.cancel()
        network.let_go()
        await until(lambda: not cache.is_stale("index:all:7"))
        await idle(engine)
        assert heard.events == []
        cache.put_topics([], "index:all:7")
        clock.advance(301)
        await engine.get_all()
        await heard.wait()


class TestF12Once:
    async def test_a_miss_refetches_unreadable_rows_once(
        self, path: Path, clock: ManualClock, network: Network
    ) -> None:
        """A row in that part of the oldest day which is not looked up."""
        broken = ("x", "{", "general", int(NOW) - 7 * DAY + 60, 0, int(NOW))
        written_by_another(path, (PUT_TOPIC, broken))
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            assert (await engine.get_all()).topics == []
            assert (await engine.get_all()).verdict is Verdict.FRESH
            await idle(engine)
            assert len(network.lookups) == 7
            await engine.close()


class TestF17OneWriter:
    async def test_a_closed_cache_leaves_no_thread_of_its_engine(
        self, path: Path, clock: ManualClock, network: Network
    ) -> None:
        """Nor is anything written afterwards; the engine may be closed later."""
        before = threading.active_count()
        cache = FeedCache.open(path, clock=clock)
        engine = FeedEngine(cache, network, clock=clock)
        await engine.get_all(1)
        network.have(topic("a"))
        reading = await network.holding(engine.get_all())
        cache.close()
        assert threading.active_count() == before
        assert not path.with_name(f"{path.name}-wal").exists()
        path.unlink()
        network.let_go()
        await asyncio.wait([reading])
        await engine.close()
        assert not path.exists()
