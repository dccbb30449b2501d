"""A feed that opens in a millisecond, in front of a network that takes 0.3 s for every lookup.

Run it: `python examples/feed.py`. It takes about two seconds; the minutes between are skipped.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from stillfresh.systems.feed import Comment, Feed, FeedCache, FeedCacheUpdated, FeedEngine, Topic
from stillfresh.testing import ManualClock

Sleep = Callable[[float], Awaitable[object]]
NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)


class Network:
    """A pretended DHT: slow to look up, and sometimes not there at all."""

    def __init__(self, sleep: Sleep) -> None:
        self._sleep = sleep
        self._topics: dict[str, Topic] = {}
        self._comments: dict[str, list[Comment]] = {}
        self.lookups = 0
        self.is_down = False
        self.asked = asyncio.Event()

    def print_edition(self, number: int) -> None:
        for morning in (NOON - timedelta(days=back, hours=1) for back in range(7)):
            title = f"News of {morning:%d %B}, edition {number}"
            topic = Topic(f"{morning:%F}", "ann", title, int(morning.timestamp()))
            self._topics[topic.topic_uuid] = topic

    async def _travel(self) -> None:
        self.lookups += 1
        self.asked.set()
        await self._sleep(0.3)
        if self.is_down:
            raise ConnectionError("the network is down")

    async def day_index(self, day: date, category: str | None) -> list[Topic]:
        await self._travel()
        return [
            topic
            for topic in self._topics.values()
            if datetime.fromtimestamp(topic.created_at, UTC).date() == day
            and category in {None, topic.category_id}
        ]

    async def topic(self, uuid: str) -> Topic | None:
        await self._travel()
        return self._topics.get(uuid)

    async def comments(self, uuid: str) -> list[Comment]:
        await self._travel()
        return self._comments.get(uuid, [])

    async def create_topic(self, topic: Topic) -> None:
        await self._travel()
        self._topics[topic.topic_uuid] = topic

    async def delete_topic(self, uuid: str) -> None:
        await self._travel()
        self._topics.pop(uuid, None)

    async def add_comment(self, topic_uuid: str, comment: Comment) -> None:
        await self._travel()
        self._comments.setdefault(topic_uuid, []).append(comment)


async def show(title: str, engine: FeedEngine) -> Feed:
    began = time.perf_counter()
    feed = await engine.get_all(days_back=7)
    took = (time.perf_counter() - began) * 1000
    newest = feed.topics[0].title
    print(f"{title:40} {newest}  {feed.verdict:5} age {feed.age:4.0f} s  in {took:6.1f} ms")
    return feed


async def open_it(engine: FeedEngine, network: Network) -> None:
    network.print_edition(1)
    feed = await show("the first open: nothing is here yet", engine)
    print(f"  {len(feed.topics)} topics, {network.lookups} lookups side by side, not in a row")
    await show("the second open", engine)


async def come_back(engine: FeedEngine, network: Network, clock: ManualClock) -> None:
    updated = asyncio.Event()

    def tell(event: FeedCacheUpdated) -> None:
        print(f"  {event}")
        updated.set()

    unsubscribe = engine.on_updated(tell)
    network.print_edition(2)
    clock.advance("10m")
    await show("ten minutes later: stale, shown at once", engine)
    await updated.wait()
    await show("and updated behind that read", engine)
    unsubscribe()


async def lose_it(engine: FeedEngine, network: Network, clock: ManualClock, sleep: Sleep) -> None:
    network.is_down = True
    clock.advance("10m")
    feed = await show("the network is gone: shown all the same", engine)
    while feed.error is None:
        await sleep(0.05)
        feed = await engine.get_all(days_back=7)
    print(f"  why it is not newer: {feed.error}")
    network.is_down = False


async def comment_on_it(engine: FeedEngine, network: Network, clock: ManualClock) -> None:
    topic_uuid = f"{NOON:%F}"
    comment = Comment("c1", topic_uuid, "bob", int(clock()), body="Well said!")
    network.asked.clear()
    publishing = asyncio.create_task(engine.add_comment(topic_uuid, comment))
    await network.asked.wait()
    shown = (await engine.get_comments(topic_uuid)).comments
    print(f"a comment: {shown[0].body!r} is shown, published: {publishing.done()}")
    await publishing
    print(f"  and a lookup later, published: {publishing.done()}")


async def main(sleep: Sleep = asyncio.sleep) -> None:
    clock = ManualClock(NOON.timestamp())
    network = Network(sleep)
    with (
        tempfile.TemporaryDirectory() as directory,
        FeedCache.open(Path(directory) / "feed_cache.db", clock=clock) as cache,
    ):
        async with FeedEngine(cache, network) as engine:
            await open_it(engine, network)
            await come_back(engine, network, clock)
            await lose_it(engine, network, clock, sleep)
            await comment_on_it(engine, network, clock)


if __name__ == "__main__":
    logging.getLogger("stillfresh").setLevel(logging.ERROR)  # the feed itself says what failed
    asyncio.run(main())
