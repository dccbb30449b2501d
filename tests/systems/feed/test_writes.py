"""F8, F10: writes show at once, invalidate what they concern, and no revalidation undoes them."""

import asyncio
from pathlib import Path
from typing import Never

import pytest

from stillfresh import StoreError, Verdict
from stillfresh.systems.feed import FeedCache, FeedCacheUpdated, FeedEngine
from stillfresh.systems.feed.store import FeedStore
from stillfresh.testing import ManualClock
from tests.kit.engine import turns, until
from tests.kit.feed import Heard, Network, comment, elsewhere, full, idle, said, sql, topic, uuids


class Refused(Exception):
    """The network does not want it."""


def meta(path: Path) -> set[str]:
    return {key for (key,) in sql(path, "SELECT cache_key FROM feed_cache_meta")}


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """From now on no lease is given or released and nothing is published; reads go on."""

    async def full_disk(*_: object, **__: object) -> Never:
        raise StoreError("the disk is full")

    patch.setattr(FeedStore, "run", full_disk)


class TestF8NoLostWrites:
    async def test_a_delete_during_a_revalidation_is_never_undone(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """The answer that began before it marks nothing fresh; one more revalidation follows."""
        cache.put_topics([topic("a"), topic("b")], "index:all:7")
        network.have(topic("a"), topic("b"))
        clock.advance(301)
        await network.holding(engine.get_all())
        await engine.delete_topic("a")
        assert uuids((await engine.get_all()).topics) == ["b"]
        network.let_go()
        await heard.wait()
        feed = await engine.get_all()
        assert (uuids(feed.topics), feed.verdict) == (["b"], Verdict.FRESH)
        await idle(engine)
        assert len(network.lookups) == 14
        assert cache.get_topic("a") is None

    async def test_each_of_two_deletes_in_a_row_is_kept(
        self, cache: FeedCache, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """The second comes during the first one's revalidation, which began without a meta row."""
        network.have(topic("a"), topic("b"), topic("c"))
        cache.put_topics(network.topics.values(), "index:all:7")
        await engine.delete_topic("a")
        network.hold()
        assert uuids((await engine.get_all()).topics) == ["b", "c"]
        await until(lambda: network.running == 7)
        await engine.delete_topic("b")
        network.topics["d"] = topic("d")
        network.let_go()
        await heard.wait()
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["c", "d"]
        assert len(network.lookups) == 14
        assert len(heard.events) == 1

    async def test_a_delete_is_not_undone_while_the_network_lags(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """Upstream shows the deleted topic for a while yet: the next index does not bring it."""
        cache.put_topics([topic("a"), topic("b")], "index:all:7")
        network.have(topic("a"), topic("b"))
        network.lags = True
        await engine.delete_topic("a")
        assert uuids((await engine.get_all()).topics) == ["b"]
        await heard.wait()
        assert uuids((await engine.get_all()).topics) == ["b"]
        assert (await engine.get_topic("a")).topic is None
        await idle(engine)
        assert cache.get_topic("a") is None
        clock.advance(301)
        await engine.get_all()
        await heard.wait(2)
        assert uuids((await engine.get_all()).topics) == ["a", "b"]

    async def test_a_create_during_a_revalidation_is_kept(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """A complete index that was asked for before cannot take it away, nor mark it fresh."""
        cache.put_topics([topic("a")], "index:all:7")
        network.have(topic("a"))
        clock.advance(301)
        await network.holding(engine.get_all())
        await engine.create_topic(full("new", 10))
        network.let_go()
        await heard.wait()
        feed = await engine.get_all()
        assert (uuids(feed.topics), feed.verdict) == (["new", "a"], Verdict.FRESH)
        assert len(network.lookups) == 14

    async def test_comments_invalidated_during_a_revalidation_are_fetched_again(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """By the cache, by a comment, by a remote comment: asked for once more each time."""
        for number, invalidate in enumerate(("cache", "comment", "remote")):
            cache.put_comments("a", [comment("1")])
            network.talk["a"] = [comment("1")]
            clock.advance(301)
            network.hold()
            asked, events = len(network.asked), len(heard.events)
            await engine.get_comments("a")
            await until(lambda: network.running == 1)
            network.talk["a"] = [comment("1"), comment(f"new{number}")]
            if invalidate == "cache":
                await asyncio.to_thread(cache.invalidate_comments, "a")
            elif invalidate == "comment":
                await engine.add_comment("a", comment("mine"))
            else:
                await engine.on_remote_comment("a")
                events += 1
            assert cache.is_stale("comments:a")
            network.let_go()
            await heard.wait(events + 1)
            await idle(engine)
            answer = await engine.get_comments("a")
            assert f"new{number}" in said(answer.comments)
            assert answer.verdict is Verdict.FRESH
            reads = [each for each in network.asked[asked:] if each == "comments a"]
            assert len(reads) == 2
            network.talk["a"] = []
            clock.advance(301)
            await engine.get_comments("a")
            await idle(engine)

    async def test_a_topic_deleted_during_its_own_revalidation_stays_deleted(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """Neither the topic nor its comments come back."""
        cache.put_topic(full("a"))
        cache.put_comments("a", [comment("1")])
        network.have(full("a"))
        network.talk["a"] = [comment("1")]
        clock.advance(301)
        network.hold()
        await engine.get_topic("a")
        await engine.get_comments("a")
        await until(lambda: network.running == 2)
        await engine.delete_topic("a")
        network.let_go()
        await idle(engine)
        assert cache.get_topic("a") is None
        assert not cache.get_comments("a")
        assert (await engine.get_topic("a")).topic is None

    async def test_a_delete_by_the_cache_during_a_revalidation_is_never_undone(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """The cache's own operations count as writes, from whatever thread or connection."""
        cache.put_topics([topic("a"), topic("b")], "index:all:7")
        network.have(topic("a"), topic("b"))
        clock.advance(301)
        await network.holding(engine.get_all())
        await asyncio.to_thread(cache.delete_topic, "a")
        network.let_go()
        await heard.wait()
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["b"]
        assert len(network.lookups) == 14

    async def test_a_put_during_a_revalidation_is_not_overwritten(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """A full topic written while an older answer is on its way stays as written."""
        cache.put_topic(full("a", title="old"))
        network.have(full("a", title="old"))
        clock.advance(301)
        await network.holding(engine.get_topic("a"), calls=1)
        network.have(full("a", title="written"))
        await asyncio.to_thread(cache.put_topic, full("a", title="written"))
        network.let_go()
        await idle(engine)
        assert (await engine.get_topic("a")).topic == full("a", title="written")

    async def test_an_invalidation_by_another_implementation_voids_a_revalidation(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
        path: Path,
    ) -> None:
        """It knows no leases: that its meta row went is enough."""
        cache.put_topics([topic("a")], "index:all:7")
        network.have(topic("a"))
        clock.advance(301)
        await network.holding(engine.get_all())
        elsewhere(path, "db.execute('DELETE FROM feed_cache_meta')")
        network.have(topic("b"))
        network.let_go()
        await heard.wait()
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["a", "b"]
        assert len(network.lookups) == 14

    async def test_a_miss_overtaken_by_a_delete_does_not_show_the_topic(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """Who waits for a cold feed is not shown what was deleted meanwhile."""
        network.have(topic("a"), topic("b"))
        reading = await network.holding(engine.get_all())
        await engine.delete_topic("a")
        network.let_go()
        assert uuids((await reading).topics) == ["b"]
        await idle(engine)
        assert uuids(cache.get_topics_all(7)) == ["b"]

    async def test_a_read_after_a_delete_joins_no_fetch_from_before(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """F10: a write shows in the very next read, also when a cold feed is on its way."""
        network.have(topic("a"), topic("b"))
        first = await network.holding(engine.get_all())
        await engine.delete_topic("a")
        second = asyncio.create_task(engine.get_all())
        await turns()
        network.let_go()
        assert uuids((await second).topics) == ["b"]
        await first
        await idle(engine)

    async def test_a_read_after_an_invalidation_joins_no_fetch_from_before_on_a_full_disk(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What cannot be published is not taken for fresh by one who has lost the lease."""

        first = await network.holding(engine.get_comments("a"), calls=1)
        network.talk["a"] = [comment("1")]
        await engine.on_remote_comment("a")
        second = asyncio.create_task(engine.get_comments("a"))
        await turns()
        fill_disk(monkeypatch)
        network.let_go()
        assert said((await second).comments) == ["1"]
        await first

    async def test_a_read_after_an_invalidation_joins_no_fetch_from_before_if_another_has_the_lease(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Found by simulation: a lease was there, but it was the other one's."""
        elsewhere = Network()
        elsewhere.talk = network.talk
        first = await network.holding(engine.get_comments("a"), calls=1)
        async with FeedEngine(cache, elsewhere) as other:
            network.talk["a"] = [comment("1")]
            await other.on_remote_comment("a")
            second = asyncio.create_task(engine.get_comments("a"))
            third = await elsewhere.holding(other.get_comments("a"), calls=1)
            fill_disk(monkeypatch)
            network.let_go()
            assert said((await second).comments) == ["1"]
            elsewhere.let_go()
            await asyncio.gather(first, third)

    @pytest.mark.parametrize("is_under_way", [False, True])
    async def test_an_unstored_fetch_in_memory_is_overtaken_by_an_invalidation(
        self,
        engine: FeedEngine,
        network: Network,
        monkeypatch: pytest.MonkeyPatch,
        is_under_way: bool,
    ) -> None:
        """What could not be stored, and what was asked for without a lease, is overtaken too."""

        network.talk["a"] = [comment("1")]
        network.hold()
        with monkeypatch.context() as patch:
            fill_disk(patch)
            first = asyncio.create_task(engine.get_comments("a"))
            await until(lambda: network.running == 1)
        if not is_under_way:
            network.let_go()
            assert said((await first).comments) == ["1"]
        network.talk["a"] = [comment("1"), comment("2")]
        await engine.on_remote_comment("a")
        second = asyncio.create_task(engine.get_comments("a"))
        await turns()
        if is_under_way:
            network.let_go()
        assert said((await second).comments) == ["1", "2"]
        await first

    async def test_closing_waits_for_a_remote_comment(
        self, cache: FeedCache, engine: FeedEngine
    ) -> None:
        """The invalidation is done, though nobody awaited it."""
        cache.put_comments("a", [comment("1")])
        engine.on_remote_comment("a")
        await engine.close()
        assert cache.is_stale("comments:a")

    async def test_a_read_after_a_remote_comment_joins_no_fetch_from_before(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """What was asked for before the invalidation is not told to who comes after as fresh."""
        network.talk["a"] = [comment("1")]
        first = await network.holding(engine.get_comments("a"), calls=1)
        network.talk["a"] = [comment("1"), comment("2")]
        await engine.on_remote_comment("a")
        second = asyncio.create_task(engine.get_comments("a"))
        await turns()
        network.let_go()
        answer = await second
        assert (said(answer.comments), answer.verdict) in (
            (["1", "2"], Verdict.FRESH),
            (["1"], Verdict.STALE),
        )
        early = await first
        assert (said(early.comments), early.verdict) != (["1"], Verdict.FRESH)
        await idle(engine)


class TestF10Writes:
    async def test_a_created_topic_shows_in_the_very_next_read(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """Before the network has answered: in the lists, and by itself."""
        await engine.get_all()
        await engine.get_category("general")
        creating = await network.holding_writes(
            engine.create_topic(full("new", category_id="General"))
        )
        network.hold()
        assert uuids((await engine.get_all()).topics) == ["new"]
        assert uuids((await engine.get_category("general")).topics) == ["new"]
        answer = await engine.get_topic("new")
        assert answer.topic is not None
        assert answer.topic.body == "the body of new"
        network.let_writes_go()
        network.let_go()
        await creating
        assert uuids((await engine.get_all()).topics) == ["new"]
        await idle(engine)

    async def test_a_created_topic_invalidates_its_category_and_all(
        self, cache: FeedCache, engine: FeedEngine, path: Path
    ) -> None:
        """Whatever their days, and nothing else."""
        others = {"index:newsroom:7", "index:ne:7", "index:news:x:7", "topic:x", "comments:x"}
        for key in (*others, "index:news:1", "index:news:30", "index:all:1", "index:all:7"):
            cache.put_topics([], key)
        await engine.create_topic(topic("a", category_id=" News"))
        assert meta(path) - {"topic:a"} == others

    async def test_a_created_topic_is_kept_while_the_network_lags(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """A complete index without it does not take it for gone, for as long as data is fresh."""
        network.lags = True
        await engine.create_topic(topic("a"))
        await engine.get_all()
        await heard.wait()
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["a"]
        assert cache.get_topic("a") is not None
        clock.advance(301)
        await engine.get_all()
        await heard.wait(2)
        assert (await engine.get_all()).topics == []

    async def test_a_deleted_topic_goes_with_all_that_is_its_own(
        self, cache: FeedCache, engine: FeedEngine, network: Network, path: Path
    ) -> None:
        """The row, its comments, their meta rows, and those of its lists."""
        network.have(full("a", category_id="news"), topic("b"))
        for key in ("index:all:7", "index:all:30", "index:news:7", "index:general:7"):
            cache.put_topics([topic("a", category_id="news"), topic("b")], key)
        cache.put_topic(full("a", category_id="news"))
        cache.put_comments("a", [comment("1")])
        deleting = await network.holding_writes(engine.delete_topic("a"))
        network.hold()
        assert uuids((await engine.get_all()).topics) == ["b"]
        assert (await engine.get_topic("a")).topic is None
        network.let_writes_go()
        await deleting
        assert cache.get_topic("a") is None
        assert cache.get_comments("a") is None
        assert meta(path) == {"index:general:7"}
        network.let_go()
        await idle(engine)
        assert "topic a" not in network.asked

    async def test_a_topic_that_is_not_here_can_be_deleted(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """Nobody knows its category here: every list may have had it."""
        network.have(topic("a", category_id="news"))
        cache.put_topics([], "index:all:7")
        cache.put_topics([], "index:news:7")
        await engine.delete_topic("a")
        assert "a" not in network.topics
        assert cache.is_stale("index:all:7")
        assert cache.is_stale("index:news:7")

    async def test_a_comment_shows_in_the_very_next_read(
        self, cache: FeedCache, engine: FeedEngine, network: Network, path: Path
    ) -> None:
        """After what there was, and where there was nothing; the comments are stale."""
        cache.put_comments("a", [comment("1")])
        network.talk["a"] = [comment("1")]
        network.hold()
        for count, uuid in enumerate(("a", "b"), 1):
            network.hold_writes()
            adding = asyncio.create_task(engine.add_comment(uuid, comment("new", uuid)))
            while network.asked.count("comment new") < count:
                await turns(1)
            answer = await engine.get_comments(uuid)
            assert said(answer.comments)[-1] == "new"
            assert answer.verdict is Verdict.STALE
            network.let_writes_go()
            await adding
        assert said(cache.get_comments("a")) == ["1", "new"]
        assert meta(path) == set()
        network.let_go()
        await idle(engine)
        assert said((await engine.get_comments("a")).comments) == ["1", "new"]
        assert sql(path, "SELECT comment_count FROM feed_comments WHERE topic_uuid = 'a'") == [(2,)]

    async def test_a_comment_is_kept_while_the_network_lags(
        self, engine: FeedEngine, network: Network, clock: ManualClock, heard: Heard
    ) -> None:
        """As a topic is: then upstream's word stands."""
        network.lags = True
        network.talk["a"] = [comment("1")]
        await engine.get_comments("a")
        await engine.add_comment("a", comment("new"))
        await engine.get_comments("a")
        await heard.wait()
        await idle(engine)
        assert said((await engine.get_comments("a")).comments) == ["1", "new"]
        clock.advance(301)
        await engine.get_comments("a")
        await heard.wait(2)
        assert said((await engine.get_comments("a")).comments) == ["1"]

    @pytest.mark.parametrize("what", ["comment", "create", "delete"])
    async def test_a_write_that_upstream_accepts_late_shows_in_the_very_next_read(
        self, engine: FeedEngine, network: Network, clock: ManualClock, what: str
    ) -> None:
        """A refresh that ran while upstream took longer than `fresh_for` undoes nothing."""
        network.have(topic("a"))
        network.talk["a"] = [comment("1")]
        network.hold_writes()
        writing = asyncio.create_task(
            {
                "comment": lambda: engine.add_comment("a", comment("new")),
                "create": lambda: engine.create_topic(topic("new")),
                "delete": lambda: engine.delete_topic("a"),
            }[what]()
        )
        await until(lambda: any(asked.startswith(what) for asked in network.asked[:1]))

        async def seen() -> tuple[list[str], list[str]]:
            talk = said((await engine.get_comments("a")).comments)
            return sorted(uuids((await engine.get_all()).topics)), talk

        clock.advance(301)
        await seen()
        await idle(engine)
        assert await seen() == (["a"], ["1"])
        network.lags = True
        network.let_writes_go()
        await writing
        shown = {
            "comment": (["a"], ["1", "new"]),
            "create": (["a", "new"], ["1"]),
            "delete": ([], []),
        }
        assert await seen() == shown[what]
        await idle(engine)
        assert await seen() == shown[what]

    async def test_a_remote_comment_invalidates_and_tells(
        self, cache: FeedCache, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """The event is fired; who then reads is served the old ones, and soon the new."""
        cache.put_comments("a", [comment("1")])
        network.talk["a"] = [comment("1"), comment("2")]
        await engine.on_remote_comment("a")
        assert [event.cache_key for event in heard.events] == ["comments:a"]
        assert cache.is_stale("comments:a")
        assert said((await engine.get_comments("a")).comments) == ["1"]
        await heard.wait(2)
        assert said((await engine.get_comments("a")).comments) == ["1", "2"]

    async def test_a_remote_comment_need_not_be_awaited(
        self, cache: FeedCache, engine: FeedEngine, heard: Heard
    ) -> None:
        """A listener of the network calls it and goes on."""
        cache.put_comments("a", [comment("1")])
        engine.on_remote_comment("a")
        assert await heard.wait() == [FeedCacheUpdated("comments:a", changed=True)]
        assert cache.is_stale("comments:a")


class TestF10Refused:
    async def test_a_refused_topic_is_taken_back(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """The error is raised as it is; what stood there before stands there again."""
        network.refusal = Refused("no")
        cache.put_topics([topic("b")], "index:all:7")
        with pytest.raises(Refused):
            await engine.create_topic(topic("a"))
        assert uuids(cache.get_topics_all(7)) == ["b"]
        assert cache.get_topic("a") is None
        cache.put_topic(full("b"))
        with pytest.raises(Refused):
            await engine.create_topic(full("b", title="taken over"))
        assert cache.get_topic("b") == full("b")

    async def test_a_refused_deletion_is_undone(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """The topic and its comments are back, and can be refreshed again."""
        network.have(full("a", title="newer"))
        network.refusal = Refused("no")
        cache.put_topic(full("a"))
        cache.put_topics([topic("a")], "index:all:7")
        cache.put_comments("a", [comment("1")])
        with pytest.raises(Refused):
            await engine.delete_topic("a")
        assert cache.get_topic("a") == full("a")
        assert said(cache.get_comments("a")) == ["1"]
        assert uuids((await engine.get_all()).topics) == ["a"]
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["a"]
        assert cache.get_topic("a") == full("a", title="newer")

    async def test_a_refused_comment_is_taken_back(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """Where there were others, none, and none ever."""
        network.refusal = Refused("no")
        cache.put_comments("a", [comment("1")])
        cache.put_comments("b", [])
        for uuid, expected in (("a", [comment("1")]), ("b", []), ("c", None)):
            with pytest.raises(Refused):
                await engine.add_comment(uuid, comment("new", uuid))
            assert cache.get_comments(uuid) == expected
        with pytest.raises(Refused):
            await engine.add_comment("a", comment("1", body="edited"))
        assert cache.get_comments("a") == [comment("1")]

    async def test_a_refused_topic_goes_and_what_a_revalidation_brought_stays(
        self, cache: FeedCache, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """What the revalidation brought stays; the list is stale, as it was fetched with it."""
        cache.put_topics([topic("b")], "index:all:7")
        network.have(topic("b"), topic("c"))
        network.refusal = Refused("no")
        creating = await network.holding_writes(engine.create_topic(topic("a")))
        await engine.get_all()
        await heard.wait()
        assert uuids((await engine.get_all()).topics) == ["a", "b", "c"]
        network.let_writes_go()
        with pytest.raises(Refused):
            await creating
        assert uuids(cache.get_topics_all(7)) == ["b", "c"]
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["b", "c"]
        await idle(engine)

    async def test_a_refused_deletion_is_undone_after_a_revalidation(
        self, cache: FeedCache, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """It was kept away while the deletion was under way, and is back after."""
        network.have(full("a"), topic("b"))
        cache.put_topic(full("a"))
        cache.put_topics([topic("a"), topic("b")], "index:all:7")
        network.refusal = Refused("no")
        deleting = await network.holding_writes(engine.delete_topic("a"))
        await engine.get_all()
        await heard.wait()
        assert uuids((await engine.get_all()).topics) == ["b"]
        network.let_writes_go()
        with pytest.raises(Refused):
            await deleting
        assert cache.get_topic("a") == full("a")
        assert uuids((await engine.get_all()).topics) == ["a", "b"]
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["a", "b"]

    async def test_a_refused_comment_goes_alone_after_a_revalidation(
        self, cache: FeedCache, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """Only the refused one goes."""
        cache.put_comments("a", [comment("1")])
        network.talk["a"] = [comment("1"), comment("2")]
        network.refusal = Refused("no")
        adding = await network.holding_writes(engine.add_comment("a", comment("new")))
        await engine.get_comments("a")
        await heard.wait()
        assert said((await engine.get_comments("a")).comments) == ["1", "2", "new"]
        network.let_writes_go()
        with pytest.raises(Refused):
            await adding
        assert said(cache.get_comments("a")) == ["1", "2"]
        assert cache.is_stale("comments:a")

    async def test_a_running_revalidation_does_not_bring_back_a_refused_topic(
        self,
        cache: FeedCache,
        engine: FeedEngine,
        network: Network,
        clock: ManualClock,
        heard: Heard,
    ) -> None:
        """Begun before, ended after: it neither brings it back nor marks anything fresh."""
        cache.put_topics([topic("b")], "index:all:7")
        network.have(topic("b"))
        clock.advance(301)
        await network.holding(engine.get_all())
        network.refusal = Refused("no")
        with pytest.raises(Refused):
            await engine.create_topic(topic("a"))
        network.let_go()
        await heard.wait()
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["b"]
        assert len(network.lookups) == 14

    async def test_a_refusal_undoes_only_its_own_of_two_writes_at_once(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """One comment is refused, the other stays."""
        cache.put_comments("a", [comment("1")])
        network.hold_writes()
        adding = [
            asyncio.create_task(engine.add_comment("a", comment(uuid))) for uuid in ("x", "y")
        ]
        await until(lambda: {"comment x", "comment y"} <= set(network.asked))
        adding[0].cancel()
        network.refusal = None
        network.let_writes_go()
        await adding[1]
        await turns()
        assert "y" in said(cache.get_comments("a"))
