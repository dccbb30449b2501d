"""F6, F7: a feed shown at once, and refreshed behind; what a miss, a failure and a listener see."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stillfresh import Cache, ConfigError, LoadFailed, NotOpen, RetryAfter, Verdict
from stillfresh.systems.feed import FeedCache, FeedCacheUpdated, FeedEngine, Topic
from stillfresh.systems.feed.reading import FeedReader
from stillfresh.systems.feed.store import FeedStore
from stillfresh.testing import ManualClock
from tests.kit.engine import turns, until
from tests.kit.feed import (
    DAY,
    NOW,
    Heard,
    Network,
    Sleeper,
    comment,
    day_of,
    full,
    idle,
    said,
    sql,
    topic,
    uuids,
)

WEEK = [day_of(NOW) - timedelta(days=back) for back in range(7)]


def table(path: Path) -> list[list[tuple[Any, ...]]]:
    """Everything that the design's tables hold."""
    names = ("feed_topics", "feed_comments", "feed_cache_meta")
    return [sql(path, f"SELECT * FROM {name} ORDER BY 1") for name in names]


class TestF6Hit:
    async def test_a_fresh_hit_asks_nobody(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """Topics, verdict, and an age that goes on while you look."""
        cache.put_topics([full("a"), topic("b", 10, category_id="news")], "index:all:7")
        clock.advance(100)
        feed = await engine.get_all(days_back=7)
        assert feed.topics == [topic("b", 10, category_id="news"), full("a")]
        assert (feed.verdict, feed.age) == (Verdict.FRESH, 100.0)
        clock.advance(5)
        assert feed.age == 105.0
        await turns()
        assert (network.lookups, network.asked) == ([], [])

    async def test_a_stale_hit_is_served_before_the_network_answers(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """Then one revalidation, one event, and the next read is fresh."""
        cache.put_topics([topic("a")], "index:all:7")
        network.have(topic("a"), topic("b"))
        network.hold()
        clock.advance(301)
        feed = await engine.get_all(days_back=7)
        assert (uuids(feed.topics), feed.verdict, feed.age) == (["a"], Verdict.STALE, 301.0)
        await until(lambda: len(network.lookups) == 7)
        assert uuids((await engine.get_all()).topics) == ["a"]
        network.let_go()
        assert await heard.wait() == [FeedCacheUpdated("index:all:7", changed=True)]
        feed = await engine.get_all()
        assert (uuids(feed.topics), feed.verdict, feed.age) == (["a", "b"], Verdict.FRESH, 0.0)
        assert len(network.lookups) == 7

    async def test_an_empty_feed_that_was_fetched_is_a_hit(
        self, engine: FeedEngine, network: Network, clock: ManualClock, heard: Heard
    ) -> None:
        """Not a lookup on every visit: fresh for five minutes, then revalidated behind."""
        for _ in range(5):
            feed = await engine.get_all()
            assert (feed.topics, feed.verdict) == ([], Verdict.FRESH)
        assert len(network.lookups) == 7
        network.hold()
        clock.advance(301)
        feed = await engine.get_all()
        assert (feed.topics, feed.verdict) == ([], Verdict.STALE)
        network.let_go()
        assert await heard.wait() == [FeedCacheUpdated("index:all:7", changed=False)]
        assert len(network.lookups) == 14

    async def test_rows_without_a_meta_row_are_a_hit(
        self, cache: FeedCache, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """Stale, from a list of other days: served, then fetched."""
        cache.put_topics([topic("a")], "index:all:30")
        network.have(topic("a"))
        network.hold()
        feed = await engine.get_all(days_back=3)
        assert (uuids(feed.topics), feed.verdict) == (["a"], Verdict.STALE)
        network.let_go()
        assert await heard.wait() == [FeedCacheUpdated("index:all:3", changed=False)]
        assert len(network.lookups) == 3

    async def test_empty_comments_and_absent_topics_are_hits(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """What upstream does not have is known for five minutes."""
        for _ in range(3):
            assert (await engine.get_comments("a")).comments == []
            answer = await engine.get_topic("a")
            assert (answer.topic, answer.verdict) == (None, Verdict.FRESH)
        assert sorted(network.asked) == ["comments a", "topic a"]

    async def test_topics_and_comments_are_served_and_revalidated_too(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """The same flow for each kind of key."""
        cache.put_topic(full("a"))
        cache.put_comments("a", [comment("1")])
        network.have(full("a", title="new"))
        network.talk["a"] = [comment("1"), comment("2")]
        clock.advance(301)
        first, second = await engine.get_topic("a"), await engine.get_comments("a")
        assert (first.topic, first.verdict) == (full("a"), Verdict.STALE)
        assert (said(second.comments), second.verdict, second.age) == (["1"], Verdict.STALE, 301)
        await heard.wait(2)
        assert {event.cache_key for event in heard.events} == {"topic:a", "comments:a"}
        assert (await engine.get_topic("a")).topic == full("a", title="new")
        assert said((await engine.get_comments("a")).comments) == ["1", "2"]

    async def test_a_category_is_fetched_as_one_whatever_its_spelling(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """The network is asked for the normal name; keys and answers are shared."""
        network.have(topic("a", category_id="News"), topic("b"))
        for name in ("News", " news", "NEWS"):
            assert uuids((await engine.get_category(name, days_back=7)).topics) == ["a"]
        assert network.lookups == [(day, "news") for day in WEEK]

    async def test_hits_do_not_wait_for_the_writer(
        self, cache: FeedCache, engine: FeedEngine, clock: ManualClock
    ) -> None:
        """Somebody keeps the file's write lock: reads are answered all the same, also stale."""
        cache.put_topics([topic("a")], "index:all:7")
        await engine.get_all()
        entered, leave = threading.Event(), threading.Event()

        def block(_: object) -> None:
            entered.set()
            leave.wait(60)

        cache.submit(block)
        await until(entered.is_set)
        clock.advance(301)
        try:
            feed = await asyncio.wait_for(engine.get_all(), 30)
            assert (uuids(feed.topics), feed.verdict) == (["a"], Verdict.STALE)
        finally:
            leave.set()
        await idle(engine)

    async def test_json_is_the_same_feed(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """One array in the same order, on a hit and on a miss; with its verdict."""
        network.have(full("a"), topic("b", 10, category_id="news"))
        data = await engine.get_all_json()
        assert data.verdict is Verdict.FRESH
        assert msgspec.json.decode(data, type=list[Any]) == msgspec.json.decode(
            await engine.get_all_json()
        )
        assert [row["topic_uuid"] for row in msgspec.json.decode(data)] == ["b", "a"]
        cache.put_topic(full("a"))
        found = msgspec.json.decode(await engine.get_all_json())
        assert [row["topic_uuid"] for row in found] == ["b", "a"]
        assert found[1]["body"] == "the body of a"


class TestF6Listing:
    async def test_the_keys_that_were_fetched_are_listed(
        self, cache: FeedCache, engine: FeedEngine, clock: ManualClock
    ) -> None:
        """With their times and verdicts, as the entries of any store."""
        await engine.get_all()
        clock.advance(400)
        await engine.get_all(days_back=2)
        async with Cache(FeedStore(cache, clock=clock), clock=clock) as listing:
            entries = await listing.entries()
            assert sorted((each.kind, each.age or 0) for each in entries) == [
                ("feed", 0),
                ("feed", 400),
            ]
            (first, second) = entries
            assert await listing.entries("feed", after=("feed", first.id)) == [second]
            assert await listing.entries(search=second.id) == [second]
            assert await listing.entries("other") == []


class TestF6Miss:
    async def test_a_cold_feed_costs_one_slow_lookup(
        self, engine: FeedEngine, network: Network, cache: FeedCache
    ) -> None:
        """Seven days at once, stored, answered fresh."""
        network.have(full("a"), topic("b", 3 * DAY), topic("c", 6 * DAY))
        reading = await network.holding(engine.get_all(days_back=7))
        assert not reading.done()
        network.let_go()
        feed = await reading
        assert (uuids(feed.topics), feed.verdict, feed.age) == (
            ["a", "b", "c"],
            Verdict.FRESH,
            0.0,
        )
        assert network.lookups == [(day, None) for day in WEEK]
        assert not cache.is_stale("index:all:7")
        assert uuids(cache.get_topics_all(7)) == ["a", "b", "c"]

    async def test_a_hundred_concurrent_misses_share_one_fetch(
        self, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """Of seven lookups side by side; a miss's answer is its own, and needs no event."""
        network.have(topic("a"))
        network.hold()
        reading = [asyncio.create_task(engine.get_all()) for _ in range(100)]
        await until(lambda: network.running == 7)
        await turns()
        network.let_go()
        assert [uuids((await one).topics) for one in reading] == [["a"]] * 100
        assert (len(network.lookups), network.peak) == (7, 7)
        assert heard.events == []

    @pytest.mark.parametrize(("lookups", "peak"), [(1, 1), (3, 3), (7, 7), (100, 30)])
    async def test_lookups_bounds_the_simultaneous_lookups(
        self, cache: FeedCache, network: Network, clock: ManualClock, lookups: int, peak: int
    ) -> None:
        """`lookups` bounds them."""
        engine = FeedEngine(cache, network, clock=clock, lookups=lookups)
        network.hold()
        reading = asyncio.create_task(engine.get_all(days_back=30))
        await until(lambda: network.running == peak)
        await turns()
        assert network.running == peak
        network.let_go()
        await reading
        assert (network.peak, len(network.lookups)) == (peak, 30)
        await engine.close()

    async def test_a_failing_miss_raises_load_failed(
        self, engine: FeedEngine, network: Network, path: Path
    ) -> None:
        """For lists, topics and comments; its cause is upstream's; nothing is stored."""
        network.error = ConnectionError("the network is down")
        for read in (
            engine.get_all,
            lambda: engine.get_topic("a"),
            lambda: engine.get_comments("a"),
        ):
            with pytest.raises(LoadFailed, match="the network is down"):
                await read()
        assert table(path) == [[], [], []]

    async def test_a_failure_never_looks_fresh(
        self, engine: FeedEngine, network: Network, clock: ManualClock, cache: FeedCache
    ) -> None:
        """After the cooldown the network is asked again, and its answer is served."""
        network.error = ConnectionError("down")
        network.have(topic("a"))
        with pytest.raises(LoadFailed):
            await engine.get_all()
        assert cache.is_stale("index:all:7")
        with pytest.raises(LoadFailed):
            await engine.get_all()
        assert len(network.lookups) == 7
        network.error = None
        clock.advance(2)
        assert uuids((await engine.get_all()).topics) == ["a"]

    async def test_when_some_days_failed_the_others_are_answered_and_stored(
        self, engine: FeedEngine, network: Network, clock: ManualClock, path: Path, heard: Heard
    ) -> None:
        """Without a meta row: so it is stale, and asked for again after a pause."""
        network.have(topic("a"), topic("b", DAY), topic("c", 2 * DAY))
        network.failing_days = {WEEK[1]}
        feed = await engine.get_all()
        assert uuids(feed.topics) == ["a", "c"]
        assert feed.verdict is not Verdict.FRESH
        assert sql(path, "SELECT * FROM feed_cache_meta") == []
        assert sorted(sql(path, "SELECT topic_uuid FROM feed_topics")) == [("a",), ("c",)]
        for _ in range(5):
            assert uuids((await engine.get_all()).topics) == ["a", "c"]
            await idle(engine)
        assert len(network.lookups) == 7
        network.failing_days = set()
        clock.advance(2)
        await engine.get_all()
        await heard.wait()
        feed = await engine.get_all()
        assert (uuids(feed.topics), feed.verdict) == (["a", "b", "c"], Verdict.FRESH)

    async def test_days_that_failed_delete_nothing(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """What was known of them goes on being served."""
        cache.put_topics([topic("a"), topic("b", DAY)], "index:all:7")
        network.have(topic("a"))
        network.failing_days = {WEEK[1]}
        clock.advance(301)
        await engine.get_all()
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["a", "b"]
        assert cache.is_stale("index:all:7")

    async def test_when_some_days_failed_and_the_others_are_empty_the_answer_is_empty(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """An empty answer, not an error, and not fresh."""
        network.failing_days = set(WEEK[1:])
        feed = await engine.get_all()
        assert feed.topics == []
        assert feed.verdict is not Verdict.FRESH

    async def test_a_cancelled_caller_cancels_no_other(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """The fetch goes on for the others, and is not begun again."""
        network.have(topic("a"))
        first = await network.holding(engine.get_all())
        others = [asyncio.create_task(engine.get_all()) for _ in range(3)]
        await turns()
        first.cancel()
        await turns()
        network.let_go()
        assert [uuids((await one).topics) for one in others] == [["a"]] * 3
        with pytest.raises(asyncio.CancelledError):
            await first
        assert len(network.lookups) == 7

    async def test_a_fetch_whose_only_caller_left_is_not_wasted(
        self, engine: FeedEngine, network: Network, cache: FeedCache
    ) -> None:
        """It runs to its end and is stored."""
        network.have(topic("a"))
        only = await network.holding(engine.get_all())
        only.cancel()
        await turns()
        network.let_go()
        await idle(engine)
        assert uuids(cache.get_topics_all(7)) == ["a"]
        assert (await engine.get_all()).verdict is Verdict.FRESH
        assert len(network.lookups) == 7

    @pytest.mark.parametrize(
        ("days", "lookups"), [(-5, 1), (0, 1), (1, 1), (2, 2), (30, 30), (31, 30), (10**20, 30)]
    )
    async def test_days_are_clamped_to_one_to_thirty(
        self, engine: FeedEngine, network: Network, cache: FeedCache, days: int, lookups: int
    ) -> None:
        """In the key and in the days that are looked up."""
        await engine.get_all(days_back=days)
        await engine.get_category("news", days_back=days)
        assert len(network.lookups) == 2 * lookups
        assert not cache.is_stale(f"index:all:{lookups}")
        assert not cache.is_stale(f"index:news:{lookups}")

    @pytest.mark.parametrize("bad", [None, "7", 7.0, True])
    async def test_bad_days_are_refused(self, engine: FeedEngine, bad: Any) -> None:
        """Said with what is allowed; nobody is asked."""
        with pytest.raises(ConfigError, match="days_back: must be a whole number"):
            await engine.get_all(days_back=bad)

    async def test_bad_input_is_refused(self, engine: FeedEngine, network: Network) -> None:
        """With errors that name what was wrong."""
        bad: Any
        for bad in (None, "", "all", " ALL ", 5):
            with pytest.raises(ConfigError, match="category"):
                await engine.get_category(bad)
        for bad in (None, "", 5, "\ud800"):
            with pytest.raises(ConfigError, match="uuid"):
                await engine.get_topic(bad)
            with pytest.raises(ConfigError, match="uuid"):
                await engine.get_comments(bad)
            with pytest.raises(ConfigError, match="uuid"):
                await engine.delete_topic(bad)
        for bad in (None, "a", comment("1")):
            with pytest.raises(ConfigError, match="Topic"):
                await engine.create_topic(bad)
        for bad in (None, "a", topic("a")):
            with pytest.raises(ConfigError, match="Comment"):
                await engine.add_comment("a", bad)
        assert (network.lookups, network.asked) == ([], [])

    @pytest.mark.parametrize("lookups", [0, -1, 1.5, True, "7"])
    def test_bad_lookups_are_refused(self, cache: FeedCache, lookups: Any) -> None:
        """A whole number of one or more."""
        with pytest.raises(ConfigError, match="lookups"):
            FeedEngine(cache, Network(), lookups=lookups)


class TestF7Revalidation:
    async def test_at_most_one_revalidation_runs_for_a_key(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """However many look meanwhile: no duplicate revalidations."""
        cache.put_topics([topic("a")], "index:all:7")
        network.have(topic("a"))
        network.hold()
        clock.advance(301)
        await asyncio.gather(*(engine.get_all() for _ in range(50)))
        await until(lambda: network.running == 7)
        for _ in range(50):
            await engine.get_all()
            await turns(3)
        assert len(network.lookups) == 7
        network.let_go()
        assert await heard.wait() == [FeedCacheUpdated("index:all:7", changed=False)]
        await idle(engine)
        assert len(heard.events) == 1

    async def test_two_engines_on_one_file_share_one_revalidation(
        self, cache: FeedCache, network: Network, clock: ManualClock, path: Path
    ) -> None:
        """Through the file: the second sees that the first is at it."""
        cache.put_topics([topic("a")], "index:all:7")
        network.have(topic("a"), topic("b"))
        clock.advance(301)
        with FeedCache.open(path, clock=clock) as second:
            engines = [FeedEngine(each, network, clock=clock) for each in (cache, second)]
            heard = Heard(engines[0])
            network.hold()
            await engines[0].get_all()
            await until(lambda: network.running == 7)
            for _ in range(10):
                assert uuids((await engines[1].get_all()).topics) == ["a"]
                await turns()
            assert len(network.lookups) == 7
            network.let_go()
            await heard.wait()
            feed = await engines[1].get_all()
            assert (uuids(feed.topics), feed.verdict) == (["a", "b"], Verdict.FRESH)
            for engine in engines:
                await engine.close()

    async def test_changed_says_whether_it_is_news(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """The same again: False; a new topic, another title, one gone, one flagged: True."""
        cache.put_topics([topic("a")], "index:all:7")
        states = [
            [topic("a")],
            [topic("a"), topic("b")],
            [topic("a", title="new"), topic("b")],
            [topic("b")],
            [topic("b", deleted=True)],
            [topic("b", deleted=True)],
        ]
        for number, state in enumerate(states, 1):
            network.topics = {each.topic_uuid: each for each in state}
            clock.advance(301)
            await engine.get_all()
            await heard.wait(number)
        assert [event.changed for event in heard.events] == [False, True, True, True, True, False]

    async def test_a_failed_revalidation_touches_nothing(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
        path: Path,
    ) -> None:
        """Not the rows, not the meta row, no event; the old data goes on being served, stale."""
        cache.put_topics([full("a")], "index:all:7")
        cache.put_comments("a", [comment("1")])
        before = table(path)
        network.error = ConnectionError("down")
        clock.advance(301)
        for read in (
            engine.get_all,
            lambda: engine.get_comments("a"),
            lambda: engine.get_topic("a"),
        ):
            await read()
            await idle(engine)
            answer: Any = await read()
            assert answer.verdict is Verdict.STALE
            assert isinstance(answer.error, LoadFailed)
        assert table(path) == before
        assert heard.events == []
        assert cache.is_stale("index:all:7")

    async def test_the_reason_is_told_while_a_retry_is_under_way(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """E31: also by the read that begins the retry, and with the comments of a topic."""
        cache.put_topics([topic("a")], "index:all:7")
        cache.put_comments("a", [comment("1")])
        network.error = ConnectionError("down")
        clock.advance(301)
        for read in (engine.get_all, lambda: engine.get_comments("a")):
            await read()
            await idle(engine)
            clock.advance(2)
            network.hold()
            for _ in range(3):
                answer: Any = await read()
                assert answer.verdict is Verdict.STALE
                assert str(answer.error).endswith("loading failed: ConnectionError: down")
            await until(lambda: network.running > 0)
            network.let_go()
            await idle(engine)
            answer = await read()
            assert "ConnectionError: down" in str(answer.error)

    async def test_a_key_that_failed_cools_down(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """Longer after each failure; another key is not concerned; success ends it."""
        cache.put_topics([topic("a")], "index:all:7")
        cache.put_comments("a", [comment("1")])
        network.error = ConnectionError("down")
        clock.advance(301)
        for _ in range(10):
            await engine.get_all()
            await idle(engine)
        assert len(network.lookups) == 7
        await engine.get_comments("a")
        await idle(engine)
        assert network.asked == ["comments a"]
        clock.advance(1)
        for _ in range(10):
            await engine.get_all()
            await idle(engine)
        assert len(network.lookups) == 14
        clock.advance(1)
        await engine.get_all()
        await idle(engine)
        assert len(network.lookups) == 14
        network.error = None
        clock.advance(60)
        await engine.get_all()
        await heard.wait()
        assert (await engine.get_all()).verdict is Verdict.FRESH
        assert (await engine.get_all()).error is None

    async def test_a_listener_that_reads_again_finds_it_fresh(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """No loop: stored first, told then."""
        cache.put_topics([topic("a")], "index:all:7")
        network.have(topic("a"), topic("b"))
        seen: list[Awaitable[Any]] = []
        engine.on_updated(lambda _: seen.append(asyncio.ensure_future(engine.get_all())))
        clock.advance(301)
        await engine.get_all()
        await heard.wait()
        await until(lambda: bool(seen))
        feed = await seen[0]
        assert (uuids(feed.topics), feed.verdict) == (["a", "b"], Verdict.FRESH)
        await idle(engine)
        assert (len(heard.events), len(network.lookups)) == (1, 7)

    async def test_a_listener_that_raises_is_logged_and_the_others_run(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """In whatever order they were added."""
        cache.put_topics([topic("a")], "index:all:7")
        network.have(topic("a"))
        before = Heard(engine)

        def broken(_: FeedCacheUpdated) -> None:
            raise RuntimeError("a broken listener")

        engine.on_updated(broken)
        after = Heard(engine)
        clock.advance(301)
        with caplog.at_level(logging.ERROR):
            await engine.get_all()
            await before.wait()
            await after.wait()
        assert before.events == after.events
        assert "a broken listener" in caplog.text
        assert (await engine.get_all()).verdict is Verdict.FRESH

    async def test_an_unsubscribed_listener_hears_nothing(
        self, cache: FeedCache, engine: FeedEngine, clock: ManualClock, heard: Heard
    ) -> None:
        """Unsubscribing twice changes nothing."""
        cache.put_topics([topic("a")], "index:all:7")
        other = Heard(engine)
        other.stop()
        other.stop()
        clock.advance(301)
        await engine.get_all()
        await heard.wait()
        assert other.events == []

    async def test_an_index_refresh_keeps_full_topics(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """F9: through the engine, bodies stay, titles change, what is gone upstream goes."""
        cache.put_topic(full("a"))
        cache.put_topics([topic("a"), topic("gone", 3 * DAY), topic("old", 9 * DAY)], "index:all:7")
        network.have(full("a", title="new"))
        clock.advance(301)
        await engine.get_all()
        await heard.wait()
        assert (await engine.get_all()).topics == [full("a", title="new")]
        assert uuids(cache.get_topics_all(0)) == ["a", "old"]

    async def test_a_clock_set_back_asks_again(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """What was fetched in the future is stale, is served, and is revalidated once."""
        cache.put_topics([topic("a", 7200)], "index:all:7")
        network.have(topic("a", 7200))
        clock.advance(-3600)
        feed = await engine.get_all()
        assert (uuids(feed.topics), feed.verdict, feed.age) == (["a"], Verdict.STALE, 0.0)
        await heard.wait()
        assert (await engine.get_all()).verdict is Verdict.FRESH
        assert len(network.lookups) == 7

    async def test_a_lookup_without_end_is_given_up(
        self, cache: FeedCache, network: Network, clock: ManualClock
    ) -> None:
        """After `load_timeout` it has failed, and the key is free again."""
        sleeper = Sleeper()
        engine = FeedEngine(cache, network, clock=clock, load_timeout=4, sleep=sleeper)
        network.hold()
        reading = asyncio.create_task(engine.get_all())
        while not reading.done():
            sleeper.wake()
            await turns(5)
        with pytest.raises(LoadFailed, match="no answer within 4 s"):
            await reading
        assert network.running == 0
        await engine.close()

    async def test_a_list_that_another_process_stores_during_a_read_is_not_fetched_again(
        self,
        engine: FeedEngine,
        network: Network,
        path: Path,
        clock: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A miss asks the store, which knows better by then."""
        looks = 0
        real = FeedReader.find

        def find(memory: FeedReader, *args: Any, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            for found in real(memory, *args, **options):
                if looks == 1:
                    with FeedCache.open(path, clock=clock) as other:
                        other.put_topics([topic("a")], "index:all:7")
                yield found

        monkeypatch.setattr(FeedReader, "find", find)
        feed = await engine.get_all()
        assert (uuids(feed.topics), feed.verdict) == (["a"], Verdict.FRESH)
        assert network.lookups == []

    async def test_one_days_retry_after_is_respected(
        self, cache: FeedCache, clock: ManualClock
    ) -> None:
        """A list of which some days asked for a pause cools down for the longest of them."""

        class Busy(Network):
            async def day_index(self, day: date, category: str | None) -> Sequence[Topic]:
                found = await super().day_index(day, category)
                if day == day_of(NOW):
                    raise RetryAfter(40)
                return found

        network = Busy()
        network.have(topic("b", 86_400))
        engine = FeedEngine(cache, network, clock=clock)
        await engine.get_all()
        clock.advance(39)
        await engine.get_all()
        await idle(engine)
        assert len(network.lookups) == 7
        clock.advance(1)
        await engine.get_all()
        await idle(engine)
        assert len(network.lookups) == 14
        await engine.close()

    async def test_a_clock_set_back_does_not_lengthen_a_cooldown(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """A cooldown is a minute at most, by whatever clock."""
        cache.put_topics([topic("a", 7200)], "index:all:7")
        network.have(topic("a", 7200))
        network.error = ConnectionError("down")
        clock.advance(301)
        await engine.get_all()
        await idle(engine)
        network.error = None
        clock.advance(-3600)
        clock.advance(61)
        await engine.get_all()
        await heard.wait()

    async def test_a_clock_set_back_does_not_lengthen_the_lease_of_a_dead_process(
        self, cache: FeedCache, network: Network, clock: ManualClock, path: Path
    ) -> None:
        """A process died in the middle, then the clock was set back an hour."""
        cache.put_topics([topic("a", 7200)], "index:all:7")
        network.have(topic("a", 7200))
        clock.advance(301)
        dead = FeedEngine(cache, network, clock=clock)
        await network.holding(dead.get_all())
        ((token, end),) = sql(
            path, "SELECT lease_token, lease_expires_at FROM stillfresh_feed_times"
        )
        await dead.close()
        sql(
            path,
            "UPDATE stillfresh_feed_times SET lease_token = ?, lease_expires_at = ?",
            *(token, end),
        )
        network.gate = None
        clock.advance(-3600)
        clock.advance(61)
        engine = FeedEngine(cache, network, clock=clock)
        heard = Heard(engine)
        await engine.get_all()
        await heard.wait()
        await engine.close()


class TestE13Lifecycle:
    async def test_closing_while_loading_leaves_no_task_and_no_thread(
        self, path: Path, clock: ManualClock, network: Network
    ) -> None:
        """The caller is told; the file is released."""
        threads, tasks = threading.active_count(), len(asyncio.all_tasks())
        with FeedCache.open(path, clock=clock) as cache:
            cache.put_comments("a", [comment("1")])
            clock.advance(301)
            engine = FeedEngine(cache, network, clock=clock)
            network.hold()
            reading = asyncio.create_task(engine.get_all())
            await engine.get_comments("a")
            await until(lambda: network.running == 8)
            await engine.close()
            with pytest.raises((LoadFailed, NotOpen)):
                await reading
            assert network.running == 0
            assert len(asyncio.all_tasks()) == tasks
            held = sql(path, "SELECT * FROM stillfresh_feed_times WHERE lease_token IS NOT NULL")
            assert held == []
        assert threading.active_count() == threads

    async def test_everything_after_close_raises_not_open(
        self, engine: FeedEngine, cache: FeedCache
    ) -> None:
        """Reads and writes; the cache itself is still open."""
        await engine.get_all()
        await engine.close()
        await engine.close()
        calls: list[Callable[[], Any]] = [
            engine.get_all,
            engine.get_all_json,
            lambda: engine.get_category("news"),
            lambda: engine.get_category_json("news"),
            lambda: engine.get_topic("a"),
            lambda: engine.get_comments("a"),
            lambda: engine.create_topic(topic("a")),
            lambda: engine.delete_topic("a"),
            lambda: engine.add_comment("a", comment("1")),
            lambda: engine.on_remote_comment("a"),
        ]
        for call in calls:
            with pytest.raises(NotOpen):
                await call()
        cache.put_topic(topic("a"))

    async def test_an_engine_on_a_closed_cache_raises_not_open(
        self, engine: FeedEngine, cache: FeedCache
    ) -> None:
        """Every call says NotOpen, and the engine can still be closed."""
        await engine.get_all()
        cache.close()
        for call in (
            engine.get_all,
            lambda: engine.get_topic("a"),
            lambda: engine.create_topic(topic("a")),
            lambda: engine.on_remote_comment("a"),
        ):
            with pytest.raises(NotOpen):
                await call()
        await engine.close()

    async def test_a_cache_closed_during_a_load_leaves_no_caller_waiting(
        self, engine: FeedEngine, cache: FeedCache, network: Network
    ) -> None:
        """Who waits gets an answer or an error, never nothing; closing is clean."""
        network.have(topic("a"))
        reading = await network.holding(engine.get_all())
        cache.close()
        network.let_go()
        with pytest.raises((NotOpen, LoadFailed)):
            await asyncio.wait_for(reading, 60)
        await engine.close()

    def test_an_engine_may_be_made_before_the_loop(
        self, path: Path, clock: ManualClock, network: Network
    ) -> None:
        """As in the contract's example, and never opened, too."""
        network.have(topic("a"))
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network)

            async def visit() -> list[str]:
                async with engine:
                    return uuids((await engine.get_all(days_back=7)).topics)

            assert asyncio.run(visit()) == ["a"]
            asyncio.run(FeedEngine(cache, network).close())

    async def test_an_engine_evicts_as_the_cache_does(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """F11: an engine on the feed's store keeps the file small, by the same rule."""
        network.have(topic("a"))
        await engine.get_all()
        async with Cache(FeedStore(cache, clock=clock), clock=clock) as evicting:
            clock.advance(30 * DAY)
            assert await evicting.evict() == 0
            clock.advance(1)
            assert await evicting.evict() == 2
        assert cache.stats().topics == 0
