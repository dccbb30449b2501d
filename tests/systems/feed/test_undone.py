"""F8-F10: writes that meet: each undoes what it did itself, and nothing else."""

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from stillfresh import StillfreshError, StoreError, Verdict
from stillfresh.systems.feed import FeedCache, FeedCacheUpdated, FeedEngine
from stillfresh.systems.feed.engine import MAX_OVERTAKEN
from stillfresh.systems.feed.store import FeedStore
from stillfresh.testing import ManualClock
from tests.kit.engine import turns, until
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
    said,
    topic,
    uuids,
    written_by_another,
)


class Refused(Exception):
    """The network does not want it."""


async def asked(network: Network, times: int) -> None:
    await until(lambda: len(network.asked) == times)


async def act(engine: FeedEngine, what: str, *, new: str = "a", old: str = "a") -> None:
    if what == "create":
        await engine.create_topic(full(new))
    elif what == "delete":
        await engine.delete_topic(old)
    else:
        await engine.add_comment(old, comment("1", old))


class TestF10Undone:
    @pytest.mark.parametrize("what", ["create", "delete", "comment"])
    async def test_a_refused_write_leaves_anothers_alone(
        self, cache: FeedCache, clock: ManualClock, network: Network, what: str
    ) -> None:
        """Two write the same; the second is accepted, then the first refused: it stands."""
        first = Network()
        one = FeedEngine(cache, first, clock=clock)
        two = FeedEngine(cache, network, clock=clock)
        if what == "delete":
            cache.put_topics([full("a")], "index:all:7")
        first.refusal = Refused()
        first.hold_writes()
        pending = asyncio.create_task(act(one, what))
        await until(lambda: bool(first.asked))
        await act(two, what)
        first.let_writes_go()
        with pytest.raises(Refused):
            await pending
        if what == "comment":
            assert said(cache.get_comments("a")) == ["1"]
        else:
            assert (cache.get_topic("a") is None) is (what == "delete")
        await one.close()
        await two.close()

    async def test_undoing_keeps_the_protection_that_was_there(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """Created here, its deletion refused: a lagging index still does not remove it."""
        cache.put_topics([full("old", 90)], "index:all:7")
        await engine.create_topic(full("a"))
        network.refusal = Refused()
        with pytest.raises(Refused):
            await engine.delete_topic("a")
        with pytest.raises(Refused):
            await engine.create_topic(full("a"))
        network.refusal = None
        network.topics.clear()
        network.have(full("old", 90))
        await engine.get_all()
        await idle(engine)
        assert uuids(cache.get_topics_all(7)) == ["a", "old"]

    async def test_a_refused_creation_does_not_bring_back_what_was_deleted(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """Deleted here, created again and refused: a lagging index does not list it."""
        network.have(full("a"), full("b", 90))
        cache.put_topics([full("a"), full("b", 90)], "index:all:7")
        await engine.delete_topic("a")
        network.have(full("a"))
        network.refusal = Refused()
        with pytest.raises(Refused):
            await engine.create_topic(full("a"))
        await engine.get_all()
        await idle(engine)
        assert uuids(cache.get_topics_all(7)) == ["b"]

    async def test_closing_waits_for_a_write(
        self, cache: FeedCache, engine: FeedEngine, network: Network
    ) -> None:
        """A refusal that comes while the engine closes is still undone."""
        network.refusal = Refused()
        writing = await network.holding_writes(engine.create_topic(full("a")))
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        network.let_writes_go()
        with pytest.raises(Refused):
            await writing
        await closing
        assert cache.get_topic("a") is None


class TestF8Meeting:
    async def test_a_put_during_a_lists_revalidation_stands(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """Neither its title nor its deletion is undone, and the list is not marked fresh."""
        network.have(topic("a", title="old"))
        cache.put_topics([topic("a", title="old")], "index:all:7")
        clock.advance(301)
        await network.holding(engine.get_all())
        written = full("a", title="new", deleted=True)
        await asyncio.to_thread(cache.put_topic, written)
        assert cache.is_stale("index:all:7")
        network.let_go()
        await idle(engine)
        assert cache.get_topic("a") == written
        assert uuids(cache.get_topics_all(7)) == []

    async def test_a_topic_that_moves_leaves_its_old_list(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """Created again under another category while the old one's list is fetched."""
        network.have(topic("a", category_id="x"))
        cache.put_topics([topic("a", category_id="x")], "index:x:7")
        clock.advance(301)
        await network.holding(engine.get_category("x"))
        await engine.create_topic(full("a", category_id="y"))
        network.let_go()
        await idle(engine)
        assert uuids(cache.get_topics_by_category("y", 7)) == ["a"]
        assert uuids(cache.get_topics_by_category("x", 7)) == []

    async def test_the_comments_of_a_deleted_topic_stay_away(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """Their fetch was under way; and who asks afterwards gets none."""
        network.talk["a"] = [comment("1")]
        cache.put_topic(full("a"))
        cache.put_comments("a", [comment("1")])
        clock.advance(301)
        await network.holding(engine.get_comments("a"), calls=1)
        await engine.delete_topic("a")
        network.talk["a"] = [comment("1")]
        network.let_go()
        await idle(engine)
        assert (await engine.get_comments("a")).comments == []
        assert cache.get_comments("a") is None

    async def test_a_note_from_the_future_counts_for_nothing(
        self, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """Deleted while the clock was a year ahead: once it is right, upstream is believed."""
        clock.advance("365d")
        await engine.delete_topic("a")
        clock.advance(-365 * 86_400)
        network.have(full("a"))
        assert uuids((await engine.get_all()).topics) == ["a"]
        assert (await engine.get_topic("a")).topic is not None


class TestF7Told:
    async def test_a_reader_of_an_index_row_is_told_of_the_whole_topic(
        self, cache: FeedCache, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """The first fetch of the topic was a miss; meanwhile an index row was served."""
        network.have(full("a"))
        first = await network.holding(engine.get_topic("a"), calls=1)
        await asyncio.to_thread(cache.put_topics, [topic("a")], "index:all:7")
        second = await engine.get_topic("a")
        assert second.verdict is Verdict.STALE
        network.let_go()
        await first
        await heard.wait()
        assert heard.events[-1].cache_key == "topic:a"

    async def test_an_absent_topic_that_is_listed_is_stale(
        self, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """Its row has no body yet; the whole topic follows."""
        assert (await engine.get_topic("a")).topic is None
        network.have(full("a"))
        await engine.get_all()
        answer = await engine.get_topic("a")
        assert answer.verdict is Verdict.STALE
        await heard.wait()
        assert (await engine.get_topic("a")).topic == full("a")

    async def test_a_first_answer_that_was_overtaken_still_owes_its_event(
        self, cache: FeedCache, engine: FeedEngine, network: Network, heard: Heard
    ) -> None:
        """The reader was given what is old by now, so it is told of the fetch that follows."""
        network.talk["a"] = [comment("1")]
        network.hold()
        reading = asyncio.create_task(engine.get_comments("a"))
        for fetch in range(1, MAX_OVERTAKEN + 2):
            await asked(network, fetch)
            await asyncio.to_thread(cache.invalidate_comments, "a")
            network.let_go()
            network.hold()
        answer = await reading
        assert (said(answer.comments), answer.verdict) == (["1"], Verdict.STALE)
        assert heard.events == []
        network.talk["a"] = [comment("1"), comment("2")]
        again = asyncio.create_task(engine.get_comments("a"))
        await asked(network, MAX_OVERTAKEN + 2)
        network.let_go()
        await again
        await idle(engine)
        assert heard.events == [FeedCacheUpdated("comments:a", changed=True)]

    async def test_a_listener_may_be_a_coroutine(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """It reads again, and finds it fresh."""
        network.have(full("a"))
        cache.put_topics([full("a")], "index:all:7")
        found: list[Verdict] = []

        async def read_again(event: FeedCacheUpdated) -> None:
            assert event.cache_key == "index:all:7"
            found.append((await engine.get_all()).verdict)

        engine.on_updated(read_again)
        clock.advance(301)
        await engine.get_all()
        await until(lambda: bool(found))
        assert found == [Verdict.FRESH]


class TestF9Previews:
    async def test_a_preview_in_an_index_does_not_replace_a_body(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock
    ) -> None:
        """A sloppy network: what was read in full stays whole."""
        cache.put_topic(full("a"))
        clock.advance(301)
        network.have(full("a", body="the bo…", tags=[]))
        await engine.get_all()
        await idle(engine)
        assert cache.get_topic("a") == full("a")

    async def test_a_full_topic_without_a_body_keeps_the_rest(
        self, engine: FeedEngine, network: Network, cache: FeedCache
    ) -> None:
        """Tags and verification are not taken from an index, which has none."""
        network.have(full("a", body=None))
        await engine.get_topic("a")
        await engine.get_all()
        await idle(engine)
        found = cache.get_topic("a")
        assert found is not None
        assert (found.tags, found.verified) == (["x", "y"], True)


class TestF12Columns:
    @pytest.mark.parametrize("column", ["category_id", "topic_uuid", "cache_key"])
    async def test_text_that_is_no_utf8_stops_nothing(
        self, path: Path, clock: ManualClock, network: Network, column: str
    ) -> None:
        """Lists are stored, topics written and deleted beside it."""
        written_by_another(
            path,
            (PUT_TOPIC, row_of(full("a"))),
            (PUT_TOPIC, row_of(full("odd", 30))),
            (PUT_META, ("index:all:odd", int(NOW))),
        )
        table = "feed_cache_meta" if column == "cache_key" else "feed_topics"
        where = "cache_key = 'index:all:odd'" if column == "cache_key" else "topic_uuid = 'odd'"
        elsewhere(
            path,
            f"db.execute(\"UPDATE {table} SET {column} = CAST(x'696e6465783a616c6c3aff' AS TEXT) "
            f'WHERE {where}")',
        )
        network.have(full("a"), full("odd", 30), full("c", 90))
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            heard = Heard(engine)
            await engine.get_all()
            await heard.wait()
            assert uuids((await engine.get_all()).topics) == ["odd", "a", "c"]
            await engine.create_topic(full("new", 10))
            await engine.delete_topic("odd")
            await engine.delete_topic("a")
            assert uuids(cache.get_topics_all(7)) == ["new", "c"]
            await engine.close()

    async def test_a_row_that_another_empties_is_not_served(
        self, cache: FeedCache, engine: FeedEngine, path: Path
    ) -> None:
        """Not from memory either, and the JSON stays an array."""
        cache.put_topics([full("a"), full("b", 30)], "index:all:7")
        await engine.get_all()
        elsewhere(path, "db.execute(\"UPDATE feed_topics SET topic_json='' WHERE topic_uuid='a'\")")
        assert uuids(cache.get_topics_all(7)) == ["b"]
        found: Any = json.loads(await engine.get_all_json())
        assert [row["topic_uuid"] for row in found] == ["b"]

    def test_each_of_three_hundred_foreign_spellings_is_found(
        self, path: Path, clock: ManualClock
    ) -> None:
        """However many categories there are, each is found."""
        rows = [row_of(topic(f"t{n}", category_id=f"Cat{n:03}")) for n in range(300)]
        written_by_another(path, *((PUT_TOPIC, row) for row in rows))
        with FeedCache.open(path, clock=clock) as cache:
            assert uuids(cache.get_topics_by_category("cat299", 7)) == ["t299"]

    async def test_closing_the_file_under_a_fetch_logs_no_traceback(
        self, cache: FeedCache, engine: FeedEngine, network: Network, caplog: Any
    ) -> None:
        """Closed under a fetch: who waits is told, and no traceback of ours is logged."""
        reading = await network.holding(engine.get_all())
        cache.close()
        network.let_go()
        with pytest.raises(StillfreshError):
            await reading
        assert "internal error of stillfresh" not in caplog.text

    async def test_damaged_text_of_a_failure_is_a_damaged_file(
        self, path: Path, clock: ManualClock, network: Network
    ) -> None:
        """F12: readers get what upstream has, and the file is set aside."""
        network.have(full("a"))
        network.talk["a"] = [comment("c")]
        with FeedCache.open(path, clock=clock) as cache:
            async with FeedEngine(cache, network, clock=clock) as engine:
                await engine.get_comments("a")
        elsewhere(
            path,
            'db.execute("UPDATE stillfresh_feed_times SET failures = 1, retry_at = 0, '
            "error = CAST(x'80' AS TEXT)\")",
        )
        with FeedCache.open(path, clock=clock) as cache:
            async with FeedEngine(cache, network, clock=clock) as engine:
                comments = (await engine.get_comments("a")).comments
                assert [found.comment_uuid for found in comments] == ["c"]
            cache.put_topic(topic("new"))
            assert cache.get_topic("new") == topic("new")
        assert any("corrupt" in found.name for found in path.parent.iterdir())


@pytest.mark.parametrize("what", ["create", "delete", "comment"])
class TestF10Cancelled:
    @pytest.mark.parametrize("steps", [1, 2, 4, 8])
    async def test_a_cancelled_write_is_whole_or_not_at_all(
        self, cache: FeedCache, engine: FeedEngine, network: Network, what: str, steps: int
    ) -> None:
        """Wherever it was cancelled: what the network was never asked for is not shown here."""
        network.have(topic("old"))
        network.talk["old"] = []
        cache.put_topics([topic("old")], "index:all:7")
        cache.put_comments("old", [])
        task = asyncio.create_task(act(engine, what, new="new", old="old"))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(cache.stats)
        await turns()
        await asyncio.to_thread(cache.stats)
        was_asked = bool(network.asked)
        is_shown = {
            "create": cache.get_topic("new") is not None,
            "delete": cache.get_topic("old") is None,
            "comment": bool(cache.get_comments("old")),
        }[what]
        assert was_asked or not is_shown

    async def test_a_write_cancelled_at_the_network_leaves_its_keys_stale(
        self, cache: FeedCache, engine: FeedEngine, network: Network, what: str
    ) -> None:
        """Nobody knows whether it arrived: the next read asks, and what upstream says is shown."""
        network.have(topic("old"))
        network.talk["old"] = []
        cache.put_topics([topic("old")], "index:all:7")
        cache.put_comments("old", [])
        task = await network.holding_writes(act(engine, what, new="new", old="old"))
        await engine.get_all()
        await engine.get_comments("old")
        await idle(engine)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle(engine)
        key = "comments:old" if what == "comment" else "index:all:7"
        assert cache.is_stale(key)

    async def test_the_networks_error_is_raised_when_undoing_fails_too(
        self, cache: FeedCache, engine: FeedEngine, network: Network, what: str
    ) -> None:
        """Why it was refused matters more than that the file is closed by now."""
        cache.put_topics([topic("old")], "index:all:7")
        network.refusal = PermissionError("not yours")
        task = await network.holding_writes(act(engine, what, new="new", old="old"))
        cache.close()
        network.let_writes_go()
        with pytest.raises(PermissionError):
            await task

    async def test_a_write_that_the_network_accepted_raises_nothing(
        self, cache: FeedCache, engine: FeedEngine, network: Network, what: str
    ) -> None:
        """It was published: who is told of an error would publish it again."""
        cache.put_topics([topic("old")], "index:all:7")
        task = await network.holding_writes(act(engine, what, new="new", old="old"))
        cache.close()
        network.let_writes_go()
        await task


class TestF10GivenUp:
    async def test_a_failed_write_whose_caller_was_cancelled_is_not_logged(
        self, cache: FeedCache, clock: ManualClock
    ) -> None:
        """Found by simulation: whoever had asked for it was cancelled before the disk was full."""
        store = FeedStore(cache, clock=clock)
        complaints: list[dict[str, Any]] = []
        loop, may_fail = asyncio.get_running_loop(), threading.Event()
        loop.set_exception_handler(lambda _, context: complaints.append(context))

        def job(_: object) -> None:
            may_fail.wait(10)
            raise StoreError("the disk is full")

        writing = asyncio.create_task(store.run(job))
        await turns()
        writing.cancel()
        await asyncio.wait([writing])
        del writing
        may_fail.set()
        for _ in range(2):  # until the writer's thread has let go of it
            await store.stats()
            await turns()
        gc.collect()
        assert complaints == []
