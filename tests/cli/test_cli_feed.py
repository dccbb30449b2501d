"""F16: inspect, explain, invalidate and evict on a feed's file, which its tables tell."""

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from stillfresh.stores.contract import Ask, Failure, Lease
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.systems.feed import Comment, FeedCache, FeedEngine, Topic
from stillfresh.systems.feed.operator_file import FeedView, is_feed
from stillfresh.systems.feed.store import FeedStore
from tests.kit.cli import call, neighbours, said, stillfresh
from tests.kit.feed import SEED_SCHEMA, Network

HOUR = 3600


def a_topic(uuid: str, now: float, category: str = "general") -> Topic:
    return Topic(uuid, "ann", f"about {uuid}", int(now) - 60, body="text", category_id=category)


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    """A fresh list, a stale one, a stale topic, comments, one list that fails, one that loads."""
    path, now = tmp_path / "feed.db", time.time()
    with FeedCache.open(path, clock=lambda: now - HOUR) as cache:
        cache.put_topic(a_topic("a", now))
        cache.put_topics([a_topic("b", now, "news")], "index:news:7")
        cache.put_comments("a", [Comment("c", "a", "bob", int(now)), Comment("d", "a", "zoe", 1)])
    with FeedCache.open(path) as cache:
        cache.put_topics([], "index:all:7")
        asyncio.run(trouble(cache, now))
    return path


async def trouble(cache: FeedCache, now: float) -> None:
    store = FeedStore(cache, clock=cache.clock)
    grants = await store.acquire("feed", [Ask("index:all:30"), Ask("index:zoo:7")], 100)
    broken = grants["index:zoo:7"]
    assert isinstance(broken, Lease)
    failure = Failure(3, now + 600, "TimeoutError: no answer")
    await store.release("feed", [broken], {"index:zoo:7": failure})


def inspected(path: Path, *arguments: str) -> dict[str, Any]:
    return json.loads(said("inspect", str(path), "--json", *arguments))  # type: ignore[no-any-return]


def entries(path: Path) -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in inspected(path)["entries"]}


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


class TestF16Inspect:
    def test_inspect_shows_the_contents_of_a_feed(self, feed: Path) -> None:
        """Keys by verdict, topics and comments, each key with what is the matter with it."""
        text = said("inspect", str(feed))
        found = lines(text)
        assert ["copies", "4"] in found
        assert ["leases", "1"] in found
        assert ["topics", "2"] in found
        assert ["comments", "2"] in found
        assert ["feed", "1", "4", "0", "1", "0", "B"] in found
        assert "failed 3 times: TimeoutError: no answer" in text
        by_address = lines(said("inspect", f"sqlite:///{feed}", "--limit", "0"))
        assert by_address[1:] == found[1 : len(by_address)]

    def test_inspect_json_judges_feed_keys_by_five_minutes(self, feed: Path) -> None:
        """Each key's verdict and times; a key that has rows and no meta row is stale."""
        found = entries(feed)
        verdicts = {id_: entry["verdict"] for id_, entry in found.items()}
        assert verdicts == {
            "comments:a": "stale",
            "index:all:30": "stale",
            "index:all:7": "fresh",
            "index:news:7": "stale",
            "index:zoo:7": "gone",
            "topic:a": "stale",
        }
        fresh = found["index:all:7"]
        assert fresh["fresh_until"] - fresh["fetched_at"] == 300
        assert (fresh["invalidated"], fresh["absent"]) == (False, False)
        assert found["index:all:30"]["held_until"] is not None
        document = inspected(feed, "--search", "index:", "--limit", "1")
        assert (document["topics"], document["comments"], document["counted"]) == (2, 2, 4)
        assert inspected(feed, "--kind", "price")["entries"] == []

    def test_inspect_and_explain_change_nothing_in_a_feed(self, feed: Path) -> None:
        """Not a byte is changed, and nothing is left beside the file."""
        before = neighbours(feed)
        said("inspect", str(feed))
        said("explain", str(feed), "feed", "index:all:7")
        said("explain", str(feed), "feed", "topic:a")
        assert neighbours(feed) == before

    def test_inspect_reads_a_feed_of_another_implementation(self, tmp_path: Path) -> None:
        """Without our tables and without a log: it is read, and stays as it is."""
        path, now = tmp_path / "theirs.db", int(time.time())
        connection = sqlite3.connect(path)
        connection.executescript(SEED_SCHEMA)
        connection.execute("INSERT INTO feed_cache_meta VALUES ('index:all:7', ?)", (now,))
        connection.commit()
        connection.close()
        before = neighbours(path)
        assert {id_: entry["verdict"] for id_, entry in entries(path).items()} == {
            "index:all:7": "fresh"
        }
        assert "a fresh copy" in said("explain", str(path), "feed", "index:all:7")
        assert neighbours(path) == before

    async def test_inspect_does_not_disturb_a_process_that_has_the_feed_open(
        self, tmp_path: Path
    ) -> None:
        """What it has just written is seen, and it goes on writing."""
        path = tmp_path / "feed.db"
        with FeedCache.open(path) as cache:
            cache.put_topics([], "index:all:7")
            found = await asyncio.to_thread(stillfresh, "inspect", str(path), "--json")
            assert [one["id"] for one in json.loads(found.stdout)["entries"]] == ["index:all:7"]
            cache.put_topics([], "index:all:8")
            assert not cache.is_stale("index:all:8")

    def test_inspect_of_a_corrupt_feed_is_an_error_and_leaves_it(self, feed: Path) -> None:
        """And is not set aside."""
        feed.write_bytes(feed.read_bytes()[:4096] + b"\x00" * 8192)
        before = feed.read_bytes()
        result = call("inspect", str(feed))
        said = result.stderr.replace(str(feed), "")
        assert (result.exit_code, "corrupt" in said or "malformed" in said) == (1, True)
        assert feed.read_bytes() == before
        assert not [name for name in neighbours(feed) if "corrupt" in name]

    def test_a_feed_is_recognised_by_its_tables(self, feed: Path, tmp_path: Path) -> None:
        """Not by its name; a store, a text, a directory and nothing at all are no feeds."""
        store = SqliteStore(tmp_path / "site.db")
        asyncio.run(store.open())
        asyncio.run(store.close())
        text = tmp_path / "text"
        text.write_text("text")
        assert is_feed(str(feed))
        others = [tmp_path / "site.db", text, tmp_path, tmp_path / "nothing"]
        assert not any(is_feed(str(path)) for path in others)


class TestF16Explain:
    def test_explain_says_what_a_read_of_a_feed_key_would_do(self, feed: Path) -> None:
        """Fresh, stale, failing, absent, unknown, invalidated: in words that are true of a feed."""
        told = said("explain", str(feed), "feed", "index:all:7")
        assert told.startswith("feed 'index:all:7': a fresh copy,")
        assert "a read is served and nothing else happens" in told
        assert "for ever" not in told
        told = said("explain", str(feed), "feed", "index:News:7")
        assert "a stale copy, 36" in told
        assert "one refresh begins behind it" in told
        assert "invalidated" not in told
        told = said("explain", str(feed), "feed", "index:zoo:7")
        assert "3 loads failed (TimeoutError: no answer)" in told
        found = json.loads(said("explain", str(feed), "feed", "topic:b", "--json"))
        assert (found["verdict"], found["invalidated"], found["fresh_for"]) == ("stale", True, 300)

    def test_explain_names_a_topic_known_to_be_absent(self, feed: Path) -> None:
        """It was fetched, and there is no row."""

        async def fetched() -> None:
            with FeedCache.open(feed) as cache:
                async with FeedEngine(cache, Network()) as engine:
                    assert (await engine.get_topic("none")).topic is None

        asyncio.run(fetched())
        assert "known to be absent" in said("explain", str(feed), "feed", "topic:none")
        assert entries(feed)["topic:none"]["absent"]

    def test_explain_says_that_an_unreadable_row_is_loaded_again(self, feed: Path) -> None:
        """A read would wait for a load."""
        connection = sqlite3.connect(feed)
        connection.execute("UPDATE feed_topics SET topic_json = '{' WHERE topic_uuid = 'a'")
        connection.commit()
        connection.close()
        assert "a read waits for a load" in said("explain", str(feed), "feed", "topic:a")

    def test_explain_hints_at_unknown_kinds_and_ids_of_a_feed(self, feed: Path) -> None:
        """On stderr; the answer is an answer."""
        result = call("explain", str(feed), "feed", "topic:zz")
        assert (result.exit_code, "no such id" in result.stderr) == (0, True)
        result = call("explain", str(feed), "price", "index:all:7")
        assert "no kind price; it has: feed" in result.stderr


class TestF16Invalidate:
    def test_invalidate_makes_a_feed_key_stale_by_its_id(self, feed: Path) -> None:
        """The key is stale at the next read, in any spelling; rows are served on, as ever."""
        assert said("invalidate", str(feed), "feed", "index:all:7") == "1 entry invalidated\n"
        assert said("invalidate", str(feed), "feed", "index:NEWS:7") == "1 entry invalidated\n"
        with FeedCache.open(feed) as cache:
            assert cache.is_stale("index:all:7")
            assert cache.get_topic("a") is not None
        assert "index:news:7" not in entries(feed)

    def test_invalidate_all_makes_a_whole_feed_stale(self, feed: Path) -> None:
        """`--kind feed --all`; another kind is not there."""
        assert said("invalidate", str(feed), "--kind", "feed", "--all") == "6 entries invalidated\n"
        left = entries(feed).values()
        assert all(entry["invalidated"] or entry["fetched_at"] is None for entry in left)
        result = call("invalidate", str(feed), "price", "index:all:7")
        assert result.stdout == "0 entries invalidated\n"
        assert "it has" in result.stderr

    async def test_invalidate_voids_a_running_fetch_of_a_feed(self, tmp_path: Path) -> None:
        """The law, for an operator in another process."""
        network = Network()
        with FeedCache.open(tmp_path / "feed.db") as cache:
            async with FeedEngine(cache, network) as engine:
                network.hold()
                reading = asyncio.create_task(engine.get_all())
                while network.running < 7:
                    await asyncio.sleep(0)
                arguments = ("invalidate", f"{tmp_path}/feed.db", "feed", "index:all:7")
                done = await asyncio.to_thread(stillfresh, *arguments)
                assert (done.returncode, done.stderr) == (0, "")
                network.let_go()
                await reading
                assert len(network.lookups) == 14

    def test_invalidate_evicts_nothing_of_a_feed(self, tmp_path: Path) -> None:
        """The program that it belongs to may keep rows for longer than thirty days."""
        path, long_ago = tmp_path / "feed.db", time.time() - 40 * 86_400
        with FeedCache.open(path, clock=lambda: long_ago, keep_for="365d") as cache:
            cache.put_topic(a_topic("old", long_ago))
        said("invalidate", str(path), "feed", "topic:old")
        assert inspected(path)["topics"] == 1


class TestF16Evict:
    def test_evict_drops_feed_rows_older_than_thirty_days(self, feed: Path) -> None:
        """And says how many rows; the rest stays."""
        long_ago = time.time() - 31 * 86_400
        with FeedCache.open(feed, clock=lambda: long_ago) as cache:
            cache.put_topic(a_topic("old", long_ago))
        assert said("evict", str(feed)) == "2 entries evicted\n"
        assert json.loads(said("evict", str(feed), "--json")) == {"evicted": 0}
        assert inspected(feed)["topics"] == 2


class TestF16View:
    async def test_the_view_of_a_feed_lists_every_key_once(self, feed: Path) -> None:
        """Page by page, every key once."""
        view = FeedView(feed)
        await view.open()
        names: list[tuple[str, str]] = []
        while page := await view.entries(None, "", names[-1] if names else None, 2):
            names += [(entry.kind, entry.id) for entry in page]
        assert names == sorted(("feed", key) for key in entries_of(feed))
        assert await view.entries("feed", "", ("zoo", ""), 2) == []
        assert await view.entries("feed", "", ("a", ""), 1) != []
        await view.close()


def entries_of(path: Path) -> set[str]:
    connection = sqlite3.connect(path)
    rows = connection.execute(
        "SELECT cache_key FROM feed_cache_meta UNION SELECT id FROM stillfresh_feed_times"
    ).fetchall()
    connection.close()
    return {key for (key,) in rows}
