"""F1, F11, F14: the file: its schema, files of others, what is forgotten, how large it is."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from stillfresh import ConfigError, LoadFailed, StoreError, Verdict
from stillfresh.systems.feed import FeedCache, FeedEngine
from stillfresh.systems.feed.rows import evict_slice
from stillfresh.testing import ManualClock
from tests.kit.feed import (
    DAY,
    NOW,
    PUT_COMMENTS,
    PUT_META,
    PUT_TOPIC,
    SEED_SCHEMA,
    Heard,
    Network,
    comment,
    elsewhere,
    full,
    idle,
    json_of,
    row_of,
    sql,
    topic,
    uuids,
    written_by_another,
)
from tests.kit.old_sqlite import OLD_TAGS, OLD_TIMES


def schema(path: Path) -> dict[str, str]:
    """Name to definition, in one spelling; what SQLite makes for itself apart."""
    found = sql(path, "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL")
    return {name: " ".join(text.replace("(", " ( ").split()) for name, text in found}


class TestF1Schema:
    def test_a_new_file_has_exactly_the_designs_tables_and_indexes(
        self, cache: FeedCache, path: Path, tmp_path: Path
    ) -> None:
        """Three tables and four indexes, as written in the design; ours are named stillfresh_…"""
        cache.put_topics([topic("a")], "index:all:7")
        written_by_another(tmp_path / "other.db")
        expected = schema(tmp_path / "other.db")
        assert len(expected) == 7
        found = schema(path)
        ours = {name for name in found if name.startswith("stillfresh_")}
        assert {name: text for name, text in found.items() if name not in ours} == expected

    def test_columns_have_the_designs_types_and_defaults(
        self, cache: FeedCache, path: Path, tmp_path: Path
    ) -> None:
        """As SQLite itself reports them."""
        assert cache.stats().topics == 0
        written_by_another(tmp_path / "other.db")
        for table in ("feed_topics", "feed_comments", "feed_cache_meta"):
            pragma = f"PRAGMA table_info({table})"
            assert sql(path, pragma) == sql(tmp_path / "other.db", pragma)

    def test_rows_are_what_the_design_says(self, path: Path, clock: ManualClock) -> None:
        """Another implementation finds JSON and whole seconds in the columns it knows."""
        clock.advance(0.75)
        with FeedCache.open(path, clock=clock) as cache:
            cache.put_topic(full("a", category_id=" General"))
            cache.put_topics([topic("b", 90)], "index:all:7")
            cache.put_comments("a", [comment("1"), comment("2", parent_comment_uuid="1")])
        rows = sql(path, "SELECT * FROM feed_topics ORDER BY topic_uuid")
        assert [row[0] for row in rows] == ["a", "b"]
        assert rows[0][2:] == ("general", int(NOW) - 60, 0, int(NOW))
        assert msgspec.json.decode(rows[0][1])["body"] == "the body of a"
        assert "body" not in msgspec.json.decode(rows[1][1])
        ((uuid, text, count, cached_at),) = sql(path, "SELECT * FROM feed_comments")
        assert (uuid, count, cached_at) == ("a", 2, int(NOW))
        assert [row["comment_uuid"] for row in msgspec.json.decode(text)] == ["1", "2"]
        meta = sql(path, "SELECT * FROM feed_cache_meta ORDER BY cache_key")
        assert meta == [("comments:a", NOW), ("index:all:7", NOW), ("topic:a", NOW)]
        types = sql(path, "SELECT DISTINCT typeof(topic_json), typeof(cached_at) FROM feed_topics")
        assert types == [("text", "integer")]

    def test_a_file_of_another_implementation_opens_and_serves(
        self, path: Path, clock: ManualClock
    ) -> None:
        """Topics, comments and meta rows written by plain sqlite3 are as good as ours."""
        written_by_another(
            path,
            (PUT_TOPIC, row_of(full("a"))),
            (PUT_TOPIC, row_of(topic("b", 30, category_id="news"))),
            (PUT_COMMENTS, ("a", f"[{json_of(comment('1'))}]", 1, int(NOW))),
            (PUT_META, ("index:all:7", int(NOW) - 10)),
        )
        with FeedCache.open(path, clock=clock) as cache:
            assert cache.get_topics_all(7) == [topic("b", 30, category_id="news"), full("a")]
            assert cache.get_topics_by_category("News", 7) == [topic("b", 30, category_id="news")]
            assert cache.get_topic("a") == full("a")
            assert cache.get_comments("a") == [comment("1")]
            assert not cache.is_stale("index:all:7")
            assert cache.is_stale("index:all:30")

    async def test_the_engine_works_on_a_file_of_another_implementation(
        self, path: Path, clock: ManualClock, network: Network
    ) -> None:
        """Fresh there is fresh here; then it is revalidated as our own."""
        written_by_another(
            path, (PUT_TOPIC, row_of(full("a"))), (PUT_META, ("index:all:7", int(NOW) - 10))
        )
        network.have(full("a"), full("b"))
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            heard = Heard(engine)
            feed = await engine.get_all(days_back=7)
            assert (uuids(feed.topics), feed.verdict, feed.age) == (["a"], Verdict.FRESH, 10.0)
            assert network.lookups == []
            clock.advance(300)
            assert uuids((await engine.get_all(days_back=7)).topics) == ["a"]
            await heard.wait()
            feed = await engine.get_all(days_back=7)
            assert (uuids(feed.topics), feed.verdict) == (["a", "b"], Verdict.FRESH)
            await engine.close()

    def test_fields_of_others_are_kept_on_rewriting(self, path: Path, clock: ManualClock) -> None:
        """Unknown fields of a topic and of a comment survive an index result and a put."""
        written_by_another(
            path,
            (PUT_TOPIC, row_of(full("a"), votes=7, nested={"x": [1, None]})),
            (PUT_COMMENTS, ("a", f"[{json_of(comment('1'), likes=3)}]", 1, int(NOW))),
        )
        with FeedCache.open(path, clock=clock) as cache:
            cache.put_topics([topic("a", title="new title")], "index:all:7")
            cache.put_topic(full("a", title="newer title", body="new body"))
            cache.put_comments("a", [comment("1", body="edited"), comment("2")])
            others = {"votes": 7, "nested": {"x": [1, None]}}
            new = full("a", title="newer title", body="new body", extra=others)
            assert cache.get_topic("a") == new
        ((text,),) = sql(path, "SELECT topic_json FROM feed_topics")
        kept = msgspec.json.decode(text)
        assert (kept["votes"], kept["nested"]) == (7, {"x": [1, None]})
        assert kept["title"] == "newer title"
        ((text,),) = sql(path, "SELECT comments_json FROM feed_comments")
        assert [row.get("likes") for row in msgspec.json.decode(text)] == [3, None]

    def test_another_implementation_may_go_on_writing(self, cache: FeedCache, path: Path) -> None:
        """What plain sqlite3 in another process writes is in the next read."""
        cache.put_topics([topic("a")], "index:all:7")
        assert uuids(cache.get_topics_all(7)) == ["a"]
        elsewhere(path, f"db.execute({PUT_TOPIC!r}, {row_of(topic('b', 10))!r})")
        assert uuids(cache.get_topics_all(7)) == ["b", "a"]
        elsewhere(path, "db.execute('DELETE FROM feed_topics WHERE topic_uuid = ?', ('a',))")
        assert uuids(cache.get_topics_all(7)) == ["b"]
        elsewhere(path, "db.execute('DELETE FROM feed_cache_meta')")
        assert cache.is_stale("index:all:7")

    def test_tables_of_others_beside_ours_are_left_alone(
        self, path: Path, clock: ManualClock
    ) -> None:
        """And lacking indexes are made."""
        written_by_another(
            path,
            ("CREATE TABLE profiles (id)", ()),
            ("INSERT INTO profiles VALUES (1)", ()),
            ("DROP INDEX idx_feed_topics_created", ()),
        )
        with FeedCache.open(path, clock=clock) as cache:
            cache.put_topic(topic("a"))
        assert sql(path, "SELECT id FROM profiles") == [(1,)]
        assert "idx_feed_topics_created" in schema(path)

    def test_the_default_file_is_in_the_users_data_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
    ) -> None:
        """`feed_cache.db`, in a directory that is made if need be."""
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        with FeedCache.open(clock=clock) as cache:
            cache.put_topic(topic("a"))
        assert len(list((tmp_path / "data").rglob("feed_cache.db"))) == 1

    def test_without_xdg_data_home_the_default_file_is_under_the_home(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
    ) -> None:
        """As the desktop's convention has it."""
        monkeypatch.delenv("XDG_DATA_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        FeedCache.open(clock=clock).close()
        assert len(list((tmp_path / ".local" / "share").rglob("feed_cache.db"))) == 1

    def test_a_missing_directory_or_a_directory_as_file_is_a_store_error(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """The design's -1: a missing directory, a directory in its place."""
        with pytest.raises(StoreError, match="there is no directory"):
            FeedCache.open(tmp_path / "none" / "feed.db", clock=clock)
        with pytest.raises(StoreError, match="is a directory"):
            FeedCache.open(tmp_path, clock=clock)

    def test_a_failed_opening_leaves_no_thread(self, tmp_path: Path, clock: ManualClock) -> None:
        """Nothing was opened, so there is nothing to close."""
        before = threading.active_count()
        with pytest.raises(StoreError):
            FeedCache.open(tmp_path / "none" / "feed.db", clock=clock)
        assert threading.active_count() == before

    def test_somebody_elses_database_is_refused_untouched(
        self, path: Path, clock: ManualClock
    ) -> None:
        """A SQLite file without the tables of a feed."""
        written_by_another(path, ("DROP TABLE feed_topics", ()))
        sql(path, "DROP TABLE feed_comments")
        sql(path, "DROP TABLE feed_cache_meta")
        sql(path, "CREATE TABLE mine (id)")
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=r"feed_cache\.db"):
            FeedCache.open(path, clock=clock)
        assert path.read_bytes() == before

    def test_a_table_of_another_shape_is_refused(self, path: Path, clock: ManualClock) -> None:
        """The error names the table and what it lacks."""
        written_by_another(path, ("ALTER TABLE feed_topics DROP COLUMN deleted", ()))
        with pytest.raises(ConfigError, match="feed_topics lacks deleted"):
            FeedCache.open(path, clock=clock)

    @pytest.mark.parametrize("given", ["", ":memory:"])
    def test_a_path_must_name_a_file(self, given: str) -> None:
        """Said at once."""
        with pytest.raises(ConfigError, match="path"):
            FeedCache.open(given)

    def test_the_seed_is_quoted_literally(self) -> None:
        """Three tables and four indexes."""
        assert (SEED_SCHEMA.count("CREATE TABLE"), SEED_SCHEMA.count("CREATE INDEX")) == (3, 4)

    def test_zero_and_one_are_false_and_true(self, path: Path, clock: ManualClock) -> None:
        """As a C implementation may write them."""
        text = '{"topic_uuid": "a", "author": "x", "title": "t", "created_at": 1, '
        text += '"deleted": 0, "verified": 1}'
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

    async def test_the_same_fields_in_another_order_are_no_change(
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


class TestF11Eviction:
    def test_eviction_drops_rows_of_more_than_thirty_days_and_says_how_many(
        self, cache: FeedCache, clock: ManualClock, path: Path
    ) -> None:
        """Topics and comments by `cached_at`, meta rows by `last_fetched`; not at thirty days."""
        cache.put_topic(topic("a"))
        cache.put_comments("a", [comment("1")])
        clock.advance(10)
        cache.put_topics([topic("b")], "index:all:7")
        clock.advance(30 * DAY - 10)
        assert cache.stats().expired == 0
        assert cache.evict_expired() == 0
        clock.advance(1)
        assert cache.stats().expired == 4
        assert cache.evict_expired() == 4
        assert cache.get_topic("a") is None
        assert cache.get_comments("a") is None
        assert sql(path, "SELECT cache_key FROM feed_cache_meta") == [("index:all:7",)]
        assert cache.stats().expired == 0
        clock.advance(10)
        assert cache.evict_expired() == 2
        assert cache.stats().topics == 0

    def test_eviction_goes_by_when_a_row_was_cached_not_created(
        self, cache: FeedCache, clock: ManualClock
    ) -> None:
        """An old topic that is still being fetched stays."""
        cache.put_topic(topic("old", 90 * DAY))
        clock.advance(29 * DAY)
        cache.put_topic(topic("old", 90 * DAY))
        clock.advance(2 * DAY)
        assert cache.evict_expired() == 0
        assert cache.get_topic("old") is not None

    def test_keep_for_is_a_setting(self, path: Path, clock: ManualClock) -> None:
        """`keep_for`, in seconds or words."""
        with FeedCache.open(path, clock=clock, keep_for="1h") as cache:
            cache.put_topic(topic("a"))
            clock.advance(3600)
            assert cache.evict_expired() == 0
            clock.advance(1)
            assert cache.evict_expired() == 2

    def test_opening_a_file_evicts(self, path: Path, clock: ManualClock) -> None:
        """What expired while nobody had it open is gone."""
        written_by_another(
            path,
            (PUT_TOPIC, row_of(topic("old"), NOW - 31 * DAY)),
            (PUT_TOPIC, row_of(topic("new"), NOW - 29 * DAY)),
            (PUT_COMMENTS, ("old", "[]", 0, int(NOW - 31 * DAY))),
            (PUT_META, ("index:all:7", int(NOW - 31 * DAY))),
        )
        with FeedCache.open(path, clock=clock) as cache:
            assert sql(path, "SELECT topic_uuid FROM feed_topics") == [("new",)]
            assert sql(path, "SELECT * FROM feed_comments") == []
            assert sql(path, "SELECT * FROM feed_cache_meta") == []
            assert cache.stats().expired == 0

    def test_eviction_runs_in_slices(
        self, path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No one transaction drops more than a slice, so that others' writes pass between."""
        written_by_another(path)
        fill = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2600) "
        sql(path, f"{fill} INSERT INTO feed_topics SELECT 't' || i, '{{}}', '', i, 0, 0 FROM n")
        sql(path, f"{fill} INSERT INTO feed_comments SELECT 't' || i, '[]', 0, 0 FROM n")
        slices: list[int] = []

        def spy(*given: Any, **named: Any) -> tuple[int, bool]:
            dropped, goes_on = evict_slice(*given, **named)
            slices.append(dropped)
            return dropped, goes_on

        monkeypatch.setattr("stillfresh.systems.feed.cache.evict_slice", spy)
        FeedCache.open(path, clock=clock).close()
        assert sum(slices) == 5200
        assert max(slices) <= 1000
        assert sql(path, "SELECT count(*) FROM feed_topics") == [(0,)]

    async def test_an_open_file_evicts_daily(
        self, cache: FeedCache, clock: ManualClock, path: Path
    ) -> None:
        """Whoever keeps the file open for weeks need not ask for it."""
        cache.put_topic(topic("a"))
        clock.advance(31 * DAY)
        cache.put_topic(topic("b"))
        cache.stats()
        assert sql(path, "SELECT topic_uuid FROM feed_topics") == [("b",)]

    async def test_daily_eviction_goes_on_slice_after_slice(
        self, cache: FeedCache, clock: ManualClock, path: Path
    ) -> None:
        """Nobody has to call once for each slice of what has to go."""
        cache.put_topics([topic(f"t{number}") for number in range(2_600)], "index:all:7")
        clock.advance(31 * DAY)
        cache.put_topic(topic("b"))
        for _ in range(10):
            cache.submit(lambda _: None, urgent=False).result()
        assert sql(path, "SELECT topic_uuid FROM feed_topics") == [("b",)]

    async def test_our_own_tables_do_not_grow_for_ever(
        self, cache: FeedCache, engine: FeedEngine, network: Network, clock: ManualClock, path: Path
    ) -> None:
        """What they note of topics long gone is dropped with them."""
        for number in range(20):
            await engine.create_topic(topic(f"t{number}"))
            await engine.add_comment(f"t{number}", comment("1", f"t{number}"))
            await engine.delete_topic(f"t{number}")
            await engine.get_comments(f"t{number}")
        network.error = ConnectionError("down")
        clock.advance(301)
        for number in range(20):
            with suppress(LoadFailed):
                await engine.get_comments(f"t{number}")
        await idle(engine)
        clock.advance(61 * DAY)
        cache.evict_expired()
        tables = sql(path, "SELECT tbl_name FROM sqlite_schema WHERE name GLOB 'stillfresh_*'")
        assert {name: sql(path, f"SELECT * FROM {name}") for (name,) in tables} == {
            name: [] for (name,) in tables
        }


class TestF14Size:
    def test_a_hundred_topics_and_five_hundred_comments_take_about_what_the_seed_says(
        self, cache: FeedCache, path: Path
    ) -> None:
        """About the design's 1.5 MB, as `stats` says and the file shows."""
        put_design_sized(cache)
        stats = cache.stats()
        assert (stats.topics, stats.comments, stats.expired) == (100, 500, 0)
        assert 1_200_000 < stats.bytes < 2_200_000
        cache.close()
        assert 0.9 < path.stat().st_size / stats.bytes < 1.1

    def test_evicted_room_is_used_again(self, cache: FeedCache, clock: ManualClock) -> None:
        """The file does not grow from one month to the next."""
        put_design_sized(cache)
        first = cache.stats().bytes
        for _ in range(5):
            clock.advance(31 * DAY)
            cache.evict_expired()
            put_design_sized(cache)
        assert cache.stats().bytes < 1.3 * first


def put_design_sized(cache: FeedCache) -> None:
    """5 KB a topic, 2 KB a comment."""
    for number in range(100):
        uuid = f"{number:036d}"
        cache.put_topic(full(uuid, number, body="x" * 4_800))
        cache.put_comments(
            uuid, [comment(f"{uuid}-{each}", uuid, body="y" * 1_800) for each in range(5)]
        )


def test_stats_has_the_contracts_fields(cache: FeedCache) -> None:
    """Topics, comments, expired, bytes."""
    cache.put_topic(topic("a"))
    cache.put_comments("a", [comment("1"), comment("2")])
    stats: Any = cache.stats()
    assert (stats.topics, stats.comments, stats.expired) == (1, 2, 0)
    assert stats.bytes > 0


OLD_WRITES = """
    CREATE TABLE stillfresh_writes(
        topic_uuid TEXT NOT NULL,
        comment_uuid TEXT NOT NULL,
        written_at REAL NOT NULL,
        deleted INTEGER NOT NULL,
        token TEXT NOT NULL,
        PRIMARY KEY (topic_uuid, comment_uuid)
    ) WITHOUT ROWID;
"""


class TestS13FeedLayout:
    """A feed's file whose table of times has no versions and no positions."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "old.db"
        times = OLD_TIMES.format(times="stillfresh_feed_times")
        connection = apsw.Connection(str(path))
        connection.execute(SEED_SCHEMA + OLD_TAGS + times + OLD_WRITES)
        connection.pragma("journal_mode", "wal")
        connection.execute(PUT_TOPIC, row_of(full("a")))
        connection.execute(PUT_META, ("topic:a", int(NOW)))
        connection.execute(PUT_META, ("index:all:7", int(NOW) - DAY))
        connection.close()
        return path

    async def test_rows_of_a_file_without_versions_are_served_and_refreshed(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """F7: what is fresh is not fetched; what is stale is fetched, and published."""
        network.have(full("a", title="new"), full("b"))
        assert (await engine.get_topic("a")).topic == full("a")
        assert network.asked == []
        assert uuids((await engine.get_all()).topics) == ["a"]
        await idle(engine)
        assert set(uuids((await engine.get_all()).topics)) == {"a", "b"}

    async def test_reads_and_writes_leave_the_old_table_of_times_as_it_is(
        self, cache: FeedCache, path: Path
    ) -> None:
        """Reading and writing topics leaves the table of times as it was."""
        cache.put_topic(full("b"))
        assert cache.get_topic("a") == full("a")
        names = [row[1] for row in sql(path, "PRAGMA table_info(stillfresh_feed_times)")]
        assert "version" not in names
