"""F6, F7: what a source may answer instead of topics and comments: a failure, never a crash."""

import asyncio
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from stillfresh import LoadFailed, Verdict
from stillfresh.systems.feed import FeedCache, FeedEngine, Topic
from stillfresh.testing import ManualClock
from tests.kit.feed import (
    NOW,
    Heard,
    Network,
    day_of,
    full,
    idle,
    sql,
    topic,
    uuids,
)

RUBBISH: list[Any] = [
    None,
    7,
    "text",
    [None],
    ["a"],
    [{"topic_uuid": "a"}],
    [topic("a", title=5)],
    [topic("a", tags=7)],
    [topic("a", title="\ud800")],
    [Topic(topic_uuid="a", author="x", title="t", created_at=2**70)],
    [Topic(topic_uuid="a", author="x", title="t", created_at=-(2**70))],
    [Topic(topic_uuid="", author="x", title="t", created_at=int(NOW))],
]


class Rubbish(Network):
    """Answers what it is told to."""

    answer: Any = None
    everywhere = True

    async def day_index(self, day: date, category: str | None) -> Any:
        found = await super().day_index(day, category)
        return self.answer if self.everywhere or day == day_of(NOW) else found

    async def topic(self, uuid: str) -> Any:
        await super().topic(uuid)
        return self.answer[0] if isinstance(self.answer, list) else self.answer

    async def comments(self, uuid: str) -> Any:
        await super().comments(uuid)
        return self.answer


class TestF6Rubbish:
    @pytest.mark.parametrize("answer", RUBBISH, ids=range(len(RUBBISH)))
    async def test_rubbish_is_a_failure(
        self, cache: FeedCache, clock: ManualClock, path: Path, answer: Any, heard: Heard
    ) -> None:
        """A miss raises LoadFailed that says so; nothing is stored; the key cools down."""
        network = Rubbish()
        network.answer = answer
        engine = FeedEngine(cache, network, clock=clock)
        for _ in range(3):
            with pytest.raises(LoadFailed) as caught:
                await engine.get_all()
            assert "internal error of stillfresh" not in str(caught.value)
        assert len(network.lookups) == 7
        assert sql(path, "SELECT * FROM feed_topics") == []
        assert sql(path, "SELECT * FROM feed_cache_meta") == []
        await engine.close()
        assert heard.events == []

    @pytest.mark.parametrize("answer", RUBBISH, ids=range(len(RUBBISH)))
    async def test_rubbish_behind_a_hit_touches_nothing(
        self, cache: FeedCache, clock: ManualClock, path: Path, answer: Any
    ) -> None:
        """F7: as any other failure; the next revalidation waits for the cooldown."""
        network = Rubbish()
        network.answer = answer
        cache.put_topics([full("b")], "index:all:7")
        before = sql(path, "SELECT * FROM feed_topics"), sql(path, "SELECT * FROM feed_cache_meta")
        clock.advance(301)
        engine = FeedEngine(cache, network, clock=clock)
        for _ in range(3):
            feed = await engine.get_all()
            assert (uuids(feed.topics), feed.verdict) == (["b"], Verdict.STALE)
            await idle(engine)
        assert len(network.lookups) == 7
        after = sql(path, "SELECT * FROM feed_topics"), sql(path, "SELECT * FROM feed_cache_meta")
        assert after == before
        await engine.close()

    @pytest.mark.parametrize("answer", RUBBISH, ids=range(len(RUBBISH)))
    async def test_rubbish_for_one_day_is_that_days_failure(
        self, cache: FeedCache, clock: ManualClock, path: Path, answer: Any
    ) -> None:
        """What the other days brought is stored and answered, without a meta row."""
        network = Rubbish()
        network.answer, network.everywhere = answer, False
        network.have(topic("b", 86_400))
        engine = FeedEngine(cache, network, clock=clock)
        assert uuids((await engine.get_all()).topics) == ["b"]
        assert uuids(cache.get_topics_all(7)) == ["b"]
        assert sql(path, "SELECT * FROM feed_cache_meta") == []
        await engine.close()

    @pytest.mark.parametrize("answer", RUBBISH[1:], ids=range(1, len(RUBBISH)))
    async def test_rubbish_for_a_topic_or_comments_is_a_failure(
        self, cache: FeedCache, clock: ManualClock, path: Path, answer: Any
    ) -> None:
        """LoadFailed, cooling down; nothing stored."""
        network = Rubbish()
        network.answer = answer
        engine = FeedEngine(cache, network, clock=clock)
        for read in (engine.get_comments, engine.get_topic):
            if answer == [None] and read == engine.get_topic:
                continue
            for _ in range(2):
                with pytest.raises(LoadFailed) as caught:
                    await read("a")
                assert "internal error of stillfresh" not in str(caught.value)
        assert len(network.asked) <= 2
        assert sql(path, "SELECT * FROM feed_topics") == []
        assert sql(path, "SELECT * FROM feed_comments") == []
        await engine.close()

    async def test_a_topic_in_the_wrong_day_or_category_is_not_listed_there(
        self, cache: FeedCache, clock: ManualClock
    ) -> None:
        """A sloppy network: a list shows its own category and days, whatever came."""
        network = Rubbish()
        network.answer = [topic("a", category_id="news"), topic("b", 40 * 86_400), topic("c")]
        engine = FeedEngine(cache, network, clock=clock)
        assert uuids((await engine.get_category("general")).topics) == ["c"]
        assert uuids((await engine.get_all(7)).topics) == ["a", "c"]
        await engine.close()

    async def test_a_day_that_cancels_itself_is_a_failure(
        self, cache: FeedCache, clock: ManualClock
    ) -> None:
        """A source that raises CancelledError cancels nobody here."""

        class Cancelling(Network):
            async def day_index(self, day: date, category: str | None) -> Sequence[Topic]:
                found = await super().day_index(day, category)
                if day == day_of(NOW):
                    raise asyncio.CancelledError
                return found

        network = Cancelling()
        network.have(topic("b", 2 * 86_400))
        engine = FeedEngine(cache, network, clock=clock)
        assert uuids((await engine.get_all()).topics) == ["b"]
        with pytest.raises(LoadFailed):
            await engine.get_all(1)
        await engine.close()
