"""F13, F17, F18: memory in front, one implementation of leases, and what a long list costs:
counted, not timed.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stillfresh import Verdict
from stillfresh.systems.feed import Comment, FeedCache, FeedEngine, Topic
from stillfresh.systems.feed.reading import FeedReader
from stillfresh.systems.feed.rules import JsonRecords
from stillfresh.testing import ManualClock
from tests.kit.feed import (
    NOW,
    PUT_META,
    PUT_TOPIC,
    Heard,
    Network,
    comment,
    elsewhere,
    full,
    idle,
    row_of,
    sql,
    topic,
    uuids,
    written_by_another,
)

LONG = 3_000
OLD_TABLES = """
    CREATE TABLE stillfresh_refreshes(
        cache_key TEXT PRIMARY KEY NOT NULL, generation TEXT, lease_token TEXT,
        lease_expires_at REAL, leased_at REAL, seen_fetched INTEGER, failures INTEGER,
        retry_at REAL, error TEXT, failed_at REAL
    ) WITHOUT ROWID
"""
"""Of the first release; what was noted there is forgotten."""


class Decodes:
    """How many topics were decoded, in all and in the busiest turn of the loop."""

    def __init__(self) -> None:
        self.count = 0

    async def most_in_a_turn(self) -> int:
        """Until it is cancelled."""
        most, before = 0, self.count
        try:
            while True:
                await asyncio.sleep(0)
                most, before = max(most, self.count - before), self.count
        except asyncio.CancelledError:
            return most


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Decodes:
    counted, one = Decodes(), JsonRecords.one

    def spy(records: "JsonRecords[Topic]", text: bytes) -> Topic:
        counted.count += 1
        return one(records, text)

    monkeypatch.setattr(JsonRecords, "one", spy)
    return counted


@pytest.fixture
def long_list(path: Path) -> None:
    """By plain SQL, as another implementation would write it."""
    rows = [(PUT_TOPIC, row_of(topic(f"t{n:05}", n))) for n in range(LONG)]
    written_by_another(path, *rows, (PUT_META, ("index:all:7", int(NOW))))


def memories(cache: FeedCache) -> Iterator[FeedReader]:
    return iter(cache._idle)


class TestF18Growth:
    @pytest.mark.usefixtures("long_list")
    async def test_a_read_after_a_write_decodes_what_changed(
        self, cache: FeedCache, engine: FeedEngine, decodes: Decodes, path: Path
    ) -> None:
        """A list of more than 2,000: by our write, by another process's, as raw JSON as well."""
        assert len((await engine.get_all()).topics) == decodes.count == LONG
        cache.put_topic(full("new", 0))
        assert uuids((await engine.get_all()).topics)[0] == "new"
        assert decodes.count == LONG + 1
        row = row_of(topic("t00007", 7, title="other"))
        elsewhere(path, f"db.execute({PUT_TOPIC!r}, {row!r})")
        assert (await engine.get_all()).topics[8].title == "other"
        assert (await engine.get_all_json()).count(b'"topic_uuid"') == LONG + 1
        assert decodes.count == LONG + 2

    @pytest.mark.usefixtures("long_list")
    async def test_a_long_list_leaves_turns_to_others(
        self, engine: FeedEngine, decodes: Decodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is built in slices, once for all callers that ask meanwhile."""
        monkeypatch.setattr("stillfresh.systems.feed.reading.SLICE", 300_000)
        watching = asyncio.create_task(decodes.most_in_a_turn())
        await asyncio.sleep(0)
        feeds = await asyncio.gather(*(engine.get_all() for _ in range(5)))
        watching.cancel()
        assert [len(feed.topics) for feed in feeds] == [LONG] * 5
        assert decodes.count == LONG
        assert await watching <= 200

    @pytest.mark.usefixtures("long_list")
    async def test_a_caller_that_gives_up_stops_no_other(
        self, engine: FeedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The list is built for those that stay, and for the next caller."""
        monkeypatch.setattr("stillfresh.systems.feed.reading.SLICE", 300_000)
        first, second = (asyncio.create_task(engine.get_all()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert len((await second).topics) == LONG
        assert len((await engine.get_all()).topics) == LONG

    async def test_a_long_day_from_the_network_leaves_turns_to_others(
        self, engine: FeedEngine, network: Network, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is fetched is checked in slices, too."""
        checked = Decodes()

        def spy(topics: list[Topic]) -> list[Topic]:
            checked.count += len(topics)
            return topics

        monkeypatch.setattr("stillfresh.systems.feed.source.checked_topics", spy)
        network.have(*(topic(f"t{n}", 60) for n in range(LONG)))
        watching = asyncio.create_task(checked.most_in_a_turn())
        assert len((await engine.get_all(1)).topics) == LONG
        watching.cancel()
        assert checked.count == LONG
        assert await watching <= 500

    async def test_many_comments_from_the_network_leave_turns_to_others(
        self, engine: FeedEngine, network: Network, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Comments are checked in slices as well."""
        checked = Decodes()

        def spy(uuid: str, comments: list[Comment]) -> list[Comment]:
            checked.count += len(comments)
            return comments

        monkeypatch.setattr("stillfresh.systems.feed.source.checked_comments", spy)
        network.talk["a"] = [comment(str(n)) for n in range(LONG)]
        watching = asyncio.create_task(checked.most_in_a_turn())
        assert len((await engine.get_comments("a")).comments) == LONG
        watching.cancel()
        assert checked.count == LONG
        assert await watching <= 500

    async def test_long_lists_are_built_one_at_a_time(
        self, cache: FeedCache, engine: FeedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each under way has a connection and 64 MB of its own: two do for any number of lists."""
        monkeypatch.setattr("stillfresh.systems.feed.reading.SLICE", 50_000)
        names = [f"c{n}" for n in range(8)]
        for name in names:
            some = [topic(f"{name}-{n:03}", n, category_id=name) for n in range(100)]
            cache.put_topics(some, f"index:{name}:7")
        feeds = await asyncio.gather(*map(engine.get_category, names))
        assert [len(feed.topics) for feed in feeds] == [100] * 8
        assert len(list(memories(cache))) <= 2

    async def test_a_reader_that_waits_for_a_list_waits_for_no_other(
        self, cache: FeedCache, engine: FeedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader of the list that is being built has it before the next one is built."""
        monkeypatch.setattr("stillfresh.systems.feed.reading.SLICE", 50_000)
        names = [f"c{n}" for n in range(5)]
        for name in names:
            some = [topic(f"{name}-{n:03}", n, category_id=name) for n in range(200)]
            cache.put_topics(some, f"index:{name}:7")
        ended: list[str] = []

        async def read(name: str, reader: str) -> None:
            assert len((await engine.get_category(name)).topics) == 200
            ended.append(reader)

        await asyncio.gather(*(read(name, name) for name in names), read("c0", "another"))
        assert set(ended[:2]) == {"c0", "another"}

    @pytest.mark.usefixtures("long_list")
    def test_decoded_topics_in_memory_are_bounded_by_bytes(
        self, cache: FeedCache, decodes: Decodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A list that fits is kept, of one that does not as much as fits; never more."""
        monkeypatch.setattr("stillfresh.systems.feed.reading.MAX_BYTES", 100_000)
        with cache.reading() as reader:
            for days in (7, 0, 7):
                rows = reader.find_at_once(f"index:all:{days}", NOW)
                assert len(rows.value) == LONG
                assert reader.known_bytes <= 100_000
                assert reader.list_bytes <= 100_000
        cache.put_topics([topic("a", 0, category_id="few")], "index:few:7")
        assert uuids(cache.get_topics_by_category("few", 7)) == ["a"]
        before = decodes.count
        cache.put_topic(topic("b", 0, category_id="other"))
        assert uuids(cache.get_topics_by_category("few", 7)) == ["a"]
        assert decodes.count == before

    @pytest.mark.usefixtures("long_list")
    def test_a_list_that_does_not_fit_is_not_gone_through_slice_after_slice(
        self, cache: FeedCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is left of it in memory is not chosen anew each time: that would be a square."""
        looks = 0

        class Seen:
            """A topic that counts how often it is asked for its name."""

            def __init__(self, name: str) -> None:
                self._name = name

            @property
            def topic_uuid(self) -> str:
                nonlocal looks
                looks += 1
                return self._name

        one = JsonRecords.one
        monkeypatch.setattr("stillfresh.systems.feed.reading.MAX_BYTES", 100_000)
        monkeypatch.setattr("stillfresh.systems.feed.reading.SLICE", 50_000)
        monkeypatch.setattr(JsonRecords, "one", lambda *given: Seen(one(*given).topic_uuid))
        for days in (7, 0, 7):
            looks = 0
            assert len(cache.get_topics_all(days) or []) == LONG
            assert looks <= LONG


class TestF17OneLease:
    async def test_the_stores_own_steps_hold_the_lease(
        self, cache: FeedCache, engine: FeedEngine, network: Network, path: Path
    ) -> None:
        """A lease, a failure and a publication are rows of the SQLite store's time table."""
        reading = await network.holding(engine.get_all())
        ((id_, token),) = sql(path, "SELECT id, lease_token FROM stillfresh_feed_times")
        assert (id_, bool(token)) == ("index:all:7", True)
        network.have(topic("a"))
        network.let_go()
        await reading
        row = sql(path, "SELECT generation, lease_token, failures FROM stillfresh_feed_times")
        assert row == [(token, None, None)]

    async def test_a_file_of_the_first_release_opens(
        self, path: Path, clock: ManualClock, network: Network
    ) -> None:
        """Its rows are served, its table of leases is left alone, and it is refreshed."""
        written_by_another(
            path, (PUT_TOPIC, row_of(topic("a"))), (PUT_META, ("index:all:7", int(NOW) - 301))
        )
        sql(path, OLD_TABLES)
        sql(path, "INSERT INTO stillfresh_refreshes(cache_key, lease_token) VALUES ('x', 'y')")
        network.have(topic("a"), topic("b"))
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            heard = Heard(engine)
            assert uuids((await engine.get_all()).topics) == ["a"]
            await heard.wait()
            feed = await engine.get_all()
            assert (uuids(feed.topics), feed.verdict) == (["a", "b"], Verdict.FRESH)
            await engine.close()
        assert sql(path, "SELECT cache_key FROM stillfresh_refreshes") == [("x",)]

    @pytest.mark.parametrize("ahead", [1, 4, 3600])
    async def test_a_time_from_the_future_is_stale(
        self, path: Path, clock: ManualClock, network: Network, ahead: int
    ) -> None:
        """F3: also where the engine would forgive a few seconds; one revalidation, then fresh."""
        written_by_another(
            path, (PUT_TOPIC, row_of(topic("a"))), (PUT_META, ("index:all:7", int(NOW) + ahead))
        )
        network.have(topic("a"), topic("b"))
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            assert (await engine.get_all()).verdict is Verdict.STALE
            await idle(engine)
            feed = await engine.get_all()
            assert (uuids(feed.topics), feed.verdict) == (["a", "b"], Verdict.FRESH)
            assert len(network.lookups) == 7
            await engine.close()


class TestF13Memory:
    """Memory in front, and raw JSON, are as true as the file."""

    async def test_another_processs_write_shows_at_the_next_read(
        self, cache: FeedCache, engine: FeedEngine, path: Path
    ) -> None:
        """Memory in front is kept honest by SQLite's data version: typed, raw, and one topic."""
        cache.put_topics([full("a"), full("b", 30)], "index:all:7")
        for title in ("first", "second"):
            for _ in range(2):
                await engine.get_all()
                await engine.get_all_json()
            row = row_of(full("a", title=title))
            elsewhere(path, f"db.execute({PUT_TOPIC!r}, {row!r})")
            assert title in {found.title for found in (await engine.get_all()).topics}
            assert (await engine.get_all_json()).count(title.encode()) == 1
            found = (await engine.get_topic("a")).topic
            assert found is not None
            assert found.title == title

    @pytest.mark.parametrize("count", [0, 1, 2, 3])
    async def test_json_of_any_number_of_topics_is_an_array(
        self, cache: FeedCache, engine: FeedEngine, count: int
    ) -> None:
        """None, one, several: an array each time, and again from memory."""
        cache.put_topics([full(f"t{n}", n) for n in range(count)], "index:all:7")
        cache.put_topics([], "index:general:7")
        for _ in range(2):
            for data in (await engine.get_all_json(), await engine.get_category_json("general")):
                found = msgspec.json.decode(data)
                assert [row["topic_uuid"] for row in found] == [f"t{n}" for n in range(count)]
