"""What a reviewer tried to break, rule by rule."""

import asyncio
import gc
import threading
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from stillfresh import ConfigError, LoadFailed, RetryAfter, StoreError, Verdict
from stillfresh.feed import FeedCache, FeedEngine, Topic
from stillfresh.feed.reading import FeedReader
from stillfresh.testing import ManualClock
from tests.kit.feed import (
    NOW,
    PUT_COMMENTS,
    PUT_META,
    PUT_TOPIC,
    Heard,
    Network,
    comment,
    day_of,
    elsewhere,
    full,
    idle,
    row_of,
    said,
    sql,
    topic,
    turns,
    until,
    uuids,
    written_by_another,
)

HALF = '{"topic_uuid": "a", "author": "x", "title": "t", "created_at": 1, '
TOO_DEEP = ["[" * 100_000, '{"x":' * 50_000, HALF + '"x": ' + "[" * 50_000]
"""JSON that is nested deeper than a decoder goes."""
HALF_BROKEN = [
    HALF + '"body": "b", "tags": 1}',
    HALF + '"body": 7}',
    HALF + '"body": "b", "verified": "?"}',
]
"""JSON objects with what an index result keeps in a shape that it must not keep."""


def _full_disk(*_: Any, **__: Any) -> Any:
    raise apsw.FullError("the disk is full")


class TestF12Reviewed:
    @pytest.mark.parametrize("text", TOO_DEEP, ids=range(len(TOO_DEEP)))
    def test_json_nested_too_deep_is_skipped(
        self, path: Path, clock: ManualClock, text: str
    ) -> None:
        """As any other broken row: its neighbours are served, a put mends it."""
        written_by_another(
            path,
            (PUT_TOPIC, ("a", text, "general", int(NOW), 0, int(NOW))),
            (PUT_TOPIC, row_of(topic("b"))),
        )
        with FeedCache.open(path, clock=clock) as cache:
            assert uuids(cache.get_topics_all(7)) == ["b"]
            assert cache.get_topic("a") is None
            cache.put_topic(full("a"))
            assert cache.get_topic("a") == full("a")

    @pytest.mark.parametrize(
        "text", [*TOO_DEEP, *HALF_BROKEN], ids=range(len(TOO_DEEP) + len(HALF_BROKEN))
    )
    async def test_an_index_result_mends_a_row_of_another_shape(
        self, path: Path, clock: ManualClock, network: Network, text: str
    ) -> None:
        """F9 keeps a body, tags and verification; what is none of them is not kept."""
        network.have(full("a"), full("b", 30))
        written_by_another(
            path,
            (PUT_TOPIC, ("a", text, "general", int(NOW - 60), 0, int(NOW))),
            (PUT_TOPIC, row_of(topic("b", 30))),
            (PUT_META, ("index:all:7", int(NOW))),
        )
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            heard = Heard(engine)
            assert uuids((await engine.get_all()).topics) == ["b"]
            await heard.wait()
            assert uuids((await engine.get_all()).topics) == ["b", "a"]
            await engine.close()

    @pytest.mark.parametrize(
        "text",
        [
            '[{"comment_uuid": []}]',
            '[{"comment_uuid": {"a": 1}, "topic_uuid": "a", "author": "x", "created_at": 1}]',
            "[" * 100_000,
            '[{"x":' * 50_000,
        ],
        ids=range(4),
    )
    async def test_comments_of_a_strange_shape_are_refetched(
        self, path: Path, clock: ManualClock, network: Network, text: str
    ) -> None:
        """An id that is a list; an array that is nested too deep."""
        network.talk["a"] = [comment("1")]
        written_by_another(
            path, (PUT_COMMENTS, ("a", text, 1, int(NOW))), (PUT_META, ("comments:a", int(NOW)))
        )
        with FeedCache.open(path, clock=clock) as cache:
            assert cache.get_comments("a") is None
            engine = FeedEngine(cache, network, clock=clock)
            assert said((await engine.get_comments("a")).comments) == ["1"]
            assert said(cache.get_comments("a")) == ["1"]
            await engine.close()


class TestF2Reviewed:
    @pytest.mark.parametrize(
        "options", [{"fresh_for": -1}, {"keep_for": 0}, {"fresh_for": "soon"}, {"clock": 5}]
    )
    def test_bad_settings_are_refused_before_a_file_is_made(
        self, path: Path, options: dict[str, Any]
    ) -> None:
        """The error names the setting."""
        with pytest.raises(ConfigError, match=next(iter(options))):
            FeedCache.open(path, **options)
        assert not path.exists()

    def test_a_refused_opening_leaves_no_thread(self, path: Path) -> None:
        """Nothing was opened, so there is nothing to close."""
        before = threading.active_count()
        with pytest.raises(ConfigError):
            FeedCache.open(path, keep_for=-1)
        assert threading.active_count() == before

    def test_bytes_are_no_text(self, cache: FeedCache) -> None:
        """A body of bytes is refused, not stored as base64."""
        body: Any = b"\xff"
        with pytest.raises(ConfigError, match="Topic"):
            cache.put_topic(topic("a", body=body))

    @pytest.mark.parametrize("moment", [2**63, -(2**63) - 1, 2**80])
    def test_a_time_that_no_file_can_hold_is_refused(self, cache: FeedCache, moment: int) -> None:
        """ConfigError, as for any other topic that cannot be stored."""
        with pytest.raises(ConfigError, match=r"created_at|Topic"):
            cache.put_topic(Topic(topic_uuid="a", author="x", title="t", created_at=moment))
        with pytest.raises(ConfigError, match=r"created_at|Topic"):
            cache.put_topics(
                [Topic(topic_uuid="a", author="x", title="t", created_at=moment)], "index:all:7"
            )

    @pytest.mark.parametrize("days", [10**9, 10**18, 10**30, 10**400, -(10**400)], ids=range(5))
    def test_any_whole_number_of_days_will_do(self, cache: FeedCache, days: int) -> None:
        """More days than there were."""
        cache.put_topic(topic("a"))
        assert uuids(cache.get_topics_all(days)) == ["a"]

    @pytest.mark.parametrize("uuid", ["", "\ud800"])
    def test_a_topic_without_a_sound_uuid_is_refused(self, cache: FeedCache, uuid: str) -> None:
        """It could be put, and never be asked for."""
        with pytest.raises(ConfigError, match="uuid"):
            cache.put_topic(topic(uuid))
        with pytest.raises(ConfigError, match="uuid"):
            cache.put_topics([topic(uuid)], "index:all:7")

    def test_a_category_of_broken_text_is_refused(self, cache: FeedCache) -> None:
        """A lone surrogate is in no file."""
        with pytest.raises(ConfigError, match="category"):
            cache.get_topics_by_category("\ud800", 7)

    @pytest.mark.parametrize("given", [7, None.__class__, b"x", "a\0b"])
    def test_a_path_that_is_none_is_refused(self, given: Any) -> None:
        """ConfigError, which says what was given."""
        with pytest.raises(ConfigError, match="path"):
            FeedCache.open(given)

    def test_a_data_directory_that_cannot_be_made_is_a_store_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The design's -1."""
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
        with pytest.raises(StoreError, match="file"):
            FeedCache.open()

    def test_a_deleted_topic_that_is_put_again_is_there(self, cache: FeedCache) -> None:
        """`put_topics` is a write of its own, not a revalidation that began too early."""
        cache.put_topic(topic("a"))
        cache.delete_topic("a")
        cache.put_topics([topic("a")], "index:all:7")
        assert cache.get_topic("a") == topic("a")


class TestF1Reviewed:
    def test_zero_and_one_are_false_and_true(self, path: Path, clock: ManualClock) -> None:
        """As a C implementation may write them."""
        text = HALF + '"deleted": 0, "verified": 1}'
        written_by_another(path, (PUT_TOPIC, ("a", text, "general", int(NOW), 0, int(NOW))))
        with FeedCache.open(path, clock=clock) as cache:
            (found,) = cache.get_topics_all(7) or []
            assert (found.deleted, found.verified) == (False, True)

    def test_rows_of_others_match_their_category_in_any_spelling(
        self, path: Path, clock: ManualClock
    ) -> None:
        """Another implementation may have stored "General" as it was given."""
        written_by_another(path, (PUT_TOPIC, row_of(topic("a", category_id="General"))))
        with FeedCache.open(path, clock=clock) as cache:
            assert uuids(cache.get_topics_by_category("general", 7)) == ["a"]
            assert uuids(cache.get_topics_by_category("General", 7)) == ["a"]

    async def test_the_same_in_another_order_is_no_change(
        self, path: Path, clock: ManualClock, network: Network
    ) -> None:
        """A row of another implementation that says what upstream says: changed is False."""
        network.have(full("a"))
        written_by_another(path, (PUT_TOPIC, row_of(full("a"))))
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            heard = Heard(engine)
            await engine.get_all()
            (event,) = await heard.wait()
            assert not event.changed
            await engine.close()


class TestF13Reviewed:
    """F13: memory in front, and raw JSON, are as true as the file."""

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
    async def test_json_of_any_number_of_topics(
        self, cache: FeedCache, engine: FeedEngine, count: int
    ) -> None:
        """None, one, several: an array each time, and again from memory."""
        cache.put_topics([full(f"t{n}", n) for n in range(count)], "index:all:7")
        cache.put_topics([], "index:general:7")
        for _ in range(2):
            for data in (await engine.get_all_json(), await engine.get_category_json("general")):
                found = msgspec.json.decode(data)
                assert [row["topic_uuid"] for row in found] == [f"t{n}" for n in range(count)]


class TestF8Reviewed:
    async def test_another_implementation_invalidates_during_a_revalidation(
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
        network.hold()
        await engine.get_all()
        await until(lambda: network.running == 7)
        elsewhere(path, "db.execute('DELETE FROM feed_cache_meta')")
        network.have(topic("b"))
        network.let_go()
        await heard.wait()
        await idle(engine)
        assert uuids((await engine.get_all()).topics) == ["a", "b"]
        assert len(network.lookups) == 14

    async def test_a_miss_overtaken_by_a_delete(
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

    async def test_nor_if_the_disk_is_full_by_then(
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
        for step in ("publish", "acquire", "release"):
            monkeypatch.setattr(f"stillfresh.stores.sqlite.steps.KindTables.{step}", _full_disk)
        network.let_go()
        assert said((await second).comments) == ["1"]
        await first

    @pytest.mark.parametrize("is_under_way", [False, True])
    async def test_nor_from_memory_once_the_disk_has_room_again(
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
            patch.setattr("stillfresh.stores.sqlite.steps.KindTables.acquire", _full_disk)
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


class TestF6Reviewed:
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
            assert "stillfresh itself failed" not in str(caught.value)
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
    async def test_rubbish_for_a_topic_or_comments(
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
                assert "stillfresh itself failed" not in str(caught.value)
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


async def written(engine: FeedEngine, what: str) -> None:
    if what == "create":
        await engine.create_topic(topic("new"))
    elif what == "delete":
        await engine.delete_topic("old")
    else:
        await engine.add_comment("old", comment("new", "old"))


class TestF10Cancelled:
    @pytest.mark.parametrize("steps", [1, 2, 4, 8])
    @pytest.mark.parametrize("what", ["create", "delete", "comment"])
    async def test_a_cancelled_write_is_whole_or_not_at_all(
        self, cache: FeedCache, engine: FeedEngine, network: Network, what: str, steps: int
    ) -> None:
        """Wherever it was cancelled: what the network was never asked for is not shown here."""
        network.have(topic("old"))
        network.talk["old"] = []
        cache.put_topics([topic("old")], "index:all:7")
        cache.put_comments("old", [])
        task = asyncio.create_task(written(engine, what))
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

    @pytest.mark.parametrize("what", ["create", "delete", "comment"])
    async def test_a_write_cancelled_at_the_network_leaves_its_keys_stale(
        self, cache: FeedCache, engine: FeedEngine, network: Network, what: str
    ) -> None:
        """Nobody knows whether it arrived: the next read asks, and what upstream says is shown."""
        network.have(topic("old"))
        network.talk["old"] = []
        cache.put_topics([topic("old")], "index:all:7")
        cache.put_comments("old", [])
        task = await network.holding_writes(written(engine, what))
        await engine.get_all()
        await engine.get_comments("old")
        await idle(engine)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await idle(engine)
        key = "comments:old" if what == "comment" else "index:all:7"
        assert cache.is_stale(key)

    @pytest.mark.parametrize("what", ["create", "delete", "comment"])
    async def test_the_networks_error_is_raised_when_undoing_fails_too(
        self, cache: FeedCache, engine: FeedEngine, network: Network, what: str
    ) -> None:
        """Why it was refused matters more than that the file is closed by now."""
        cache.put_topics([topic("old")], "index:all:7")
        network.refusal = PermissionError("not yours")
        task = await network.holding_writes(written(engine, what))
        cache.close()
        network.let_writes_go()
        with pytest.raises(PermissionError):
            await task

    @pytest.mark.parametrize("what", ["create", "delete", "comment"])
    async def test_a_write_that_the_network_took_raises_nothing(
        self, cache: FeedCache, engine: FeedEngine, network: Network, what: str
    ) -> None:
        """It was published: who is told of an error would publish it again."""
        cache.put_topics([topic("old")], "index:all:7")
        task = await network.holding_writes(written(engine, what))
        cache.close()
        network.let_writes_go()
        await task


class TestF7Reviewed:
    async def test_what_another_process_stores_during_a_look_is_not_fetched_again(
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

    async def test_a_clock_set_back_does_not_lengthen_a_dead_ones_lease(
        self, cache: FeedCache, network: Network, clock: ManualClock, path: Path
    ) -> None:
        """A process died in the middle, then the clock was set back an hour."""
        cache.put_topics([topic("a", 7200)], "index:all:7")
        network.have(topic("a", 7200))
        clock.advance(301)
        dead = FeedEngine(cache, network, clock=clock)
        network.hold()
        await dead.get_all()
        await until(lambda: network.running == 7)
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


class TestF10GivenUp:
    async def test_a_write_that_fails_for_nobody_is_not_complained_of(
        self, engine: FeedEngine
    ) -> None:
        """Found by simulation: whoever had asked for it was cancelled before the disk was full."""
        complaints: list[dict[str, Any]] = []
        loop, may_fail = asyncio.get_running_loop(), threading.Event()
        loop.set_exception_handler(lambda _, context: complaints.append(context))

        def job(_: object) -> None:
            may_fail.wait(10)
            raise StoreError("the disk is full")

        await engine._engine.open()
        writing = asyncio.create_task(engine._run(job))
        await turns()
        writing.cancel()
        await asyncio.wait([writing])
        del writing
        may_fail.set()
        for _ in range(2):  # until the writer's thread has let go of it
            await engine._store.stats()
            await turns()
        gc.collect()
        assert complaints == []
