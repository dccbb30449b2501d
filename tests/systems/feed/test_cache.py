"""F2-F5, F9: the cache's operations: what is stored, listed, stale, and never impoverished."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stillfresh import ConfigError, NotOpen, StoreError
from stillfresh.systems.feed import (
    FEED_CACHE_EVICT_SECONDS,
    FEED_CACHE_TTL_SECONDS,
    Comment,
    FeedCache,
    Topic,
)
from stillfresh.testing import ManualClock
from tests.kit.feed import (
    DAY,
    NOW,
    comment,
    full,
    said,
    sql,
    topic,
    uuids,
)


def meta(path: Path) -> dict[str, int]:
    return dict(sql(path, "SELECT cache_key, last_fetched FROM feed_cache_meta"))


OPERATIONS: dict[str, Callable[[FeedCache], object]] = {
    "put_topic": lambda cache: cache.put_topic(topic("a")),
    "get_topic": lambda cache: cache.get_topic("a"),
    "delete_topic": lambda cache: cache.delete_topic("a"),
    "put_topics": lambda cache: cache.put_topics([topic("a")], "index:all:7"),
    "get_topics_by_category": lambda cache: cache.get_topics_by_category("general", 7),
    "get_topics_all": lambda cache: cache.get_topics_all(7),
    "put_comments": lambda cache: cache.put_comments("a", [comment("1")]),
    "get_comments": lambda cache: cache.get_comments("a"),
    "invalidate_comments": lambda cache: cache.invalidate_comments("a"),
    "is_stale": lambda cache: cache.is_stale("index:all:7"),
    "evict_expired": lambda cache: cache.evict_expired(),
    "stats": lambda cache: cache.stats(),
    "enter": lambda cache: cache.__enter__(),
}


class TestF2Operations:
    def test_a_topic_is_put_got_and_deleted(self, cache: FeedCache) -> None:
        """What was put is got; what was deleted is gone; deleting nothing is False."""
        assert cache.get_topic("a") is None
        cache.put_topic(full("a"))
        assert cache.get_topic("a") == full("a")
        assert cache.delete_topic("a") is True
        assert cache.get_topic("a") is None
        assert cache.delete_topic("a") is False

    def test_put_topic_writes_its_meta_row(self, cache: FeedCache, path: Path) -> None:
        """`topic:{uuid}`, in the same transaction."""
        assert cache.is_stale("topic:a")
        cache.put_topic(full("a"))
        assert meta(path) == {"topic:a": int(NOW)}
        assert not cache.is_stale("topic:a")

    def test_put_topics_writes_rows_and_the_meta_row(self, cache: FeedCache, path: Path) -> None:
        """Under the key that it was given, also for no topics at all."""
        cache.put_topics([topic("a"), topic("b")], "index:general:7")
        cache.put_topics([], "index:all:7")
        assert meta(path) == {"index:general:7": int(NOW), "index:all:7": int(NOW)}
        assert uuids(cache.get_topics_all(7)) == ["a", "b"]

    def test_put_topics_is_all_or_nothing(self, cache: FeedCache, path: Path) -> None:
        """One that cannot be stored, and none is."""
        wrong: Any = "no topic"
        with pytest.raises(ConfigError, match="Topic"):
            cache.put_topics([topic("a"), wrong], "index:all:7")
        assert cache.get_topics_all(0) is None
        assert meta(path) == {}

    def test_comments_are_put_and_got_in_their_order(self, cache: FeedCache, path: Path) -> None:
        """In their order; never stored is None, stored as none is an empty list."""
        assert cache.get_comments("a") is None
        cache.put_comments("a", [])
        assert cache.get_comments("a") == []
        several = [
            comment("2"),
            comment("1", parent_comment_uuid="2", mentions=["ann"], verified=True),
        ]
        cache.put_comments("a", several)
        assert cache.get_comments("a") == several
        assert meta(path) == {"comments:a": int(NOW)}
        cache.put_comments("a", [comment("3")])
        assert said(cache.get_comments("a")) == ["3"]

    def test_invalidated_comments_are_served_stale(self, cache: FeedCache, path: Path) -> None:
        """The meta row goes, the comments stay."""
        cache.put_comments("a", [comment("1")])
        cache.put_comments("b", [])
        cache.invalidate_comments("a")
        assert said(cache.get_comments("a")) == ["1"]
        assert cache.is_stale("comments:a")
        assert set(meta(path)) == {"comments:b"}
        cache.invalidate_comments("never seen")

    def test_stats_count_topics_and_comments(self, cache: FeedCache) -> None:
        """Comments are the sum of `comment_count`."""
        cache.put_topics([topic("a"), topic("b")], "index:all:7")
        cache.put_comments("a", [comment("1"), comment("2")])
        cache.put_comments("b", [comment("3", "b")])
        stats = cache.stats()
        assert (stats.topics, stats.comments, stats.expired) == (2, 3, 0)

    @pytest.mark.parametrize("name", OPERATIONS)
    def test_everything_after_close_raises_not_open(self, cache: FeedCache, name: str) -> None:
        """The design's -3."""
        cache.put_topic(topic("a"))
        cache.close()
        with pytest.raises(NotOpen, match="closed"):
            OPERATIONS[name](cache)

    def test_closing_twice_changes_nothing(self, path: Path, clock: ManualClock) -> None:
        """And leaves no thread behind."""
        before = threading.active_count()
        with FeedCache.open(path, clock=clock) as cache:
            cache.put_topic(topic("a"))
            cache.close()
        cache.close()
        assert threading.active_count() == before

    def test_written_rows_are_there_after_reopening(self, path: Path, clock: ManualClock) -> None:
        """The file is the cache."""
        with FeedCache.open(str(path), clock=clock) as cache:
            cache.put_topics([full("a")], "index:all:7")
        with FeedCache.open(path, clock=clock) as cache:
            assert cache.get_topics_all(7) == [full("a")]
            assert not cache.is_stale("index:all:7")

    def test_every_field_comes_back(self, cache: FeedCache) -> None:
        """Of topics and comments, in any script."""
        whole = Topic(
            topic_uuid="ü-1",
            author="аня",
            title='quotes " and \\ and \x00',
            created_at=int(NOW),
            body="😀\n" * 100,
            category_id="général",
            tags=["a", "b"],
            deleted=True,
            deleted_at=int(NOW) + 1,
            verified=True,
        )
        cache.put_topic(whole)
        assert cache.get_topic("ü-1") == whole
        said_ = Comment(
            comment_uuid="1",
            topic_uuid="ü-1",
            author="ж",
            created_at=5,
            body="\u2028",
            parent_comment_uuid="0",
            mentions=["x"],
            verified=True,
        )
        cache.put_comments("ü-1", [said_])
        assert cache.get_comments("ü-1") == [said_]

    def test_all_but_the_ids_author_title_and_time_have_defaults(self) -> None:
        """As the contract says."""
        bare = Topic(topic_uuid="a", author="x", title="t", created_at=1)
        assert (bare.body, bare.tags, bare.deleted, bare.deleted_at, bare.verified) == (
            None,
            [],
            False,
            None,
            False,
        )
        Comment(comment_uuid="1", topic_uuid="a", author="x", created_at=1)

    def test_lists_given_as_tags_are_kept(self, cache: FeedCache) -> None:
        """A list in code is what it will be when it comes back."""
        tags = ["x", "y"]
        cache.put_topic(topic("a", tags=tags))
        assert cache.get_topic("a") == topic("a", tags=tags)

    @pytest.mark.parametrize(
        "bad",
        [
            None,
            "text",
            {"topic_uuid": "a"},
            Topic(topic_uuid="a", author="x", title=5, created_at=1),  # type: ignore[arg-type]
            Topic(topic_uuid="a", author="x", title="t", created_at=1.5),  # type: ignore[arg-type]
            Topic(topic_uuid="a", author="x", title="\ud800", created_at=1),
        ],
        ids=range(6),
    )
    def test_a_put_of_anything_but_topics_is_refused(self, cache: FeedCache, bad: Any) -> None:
        """With an error that says so, and nothing stored."""
        with pytest.raises(ConfigError, match="Topic"):
            cache.put_topic(bad)
        with pytest.raises(ConfigError, match="Topic"):
            cache.put_topics([bad], "index:all:7")
        assert cache.stats().topics == 0

    @pytest.mark.parametrize("bad", [None, 7, "", b"a", "\ud800"])
    def test_an_invalid_uuid_is_refused(self, cache: FeedCache, bad: Any) -> None:
        """By every operation that takes one."""
        for operation in (
            cache.get_topic,
            cache.delete_topic,
            cache.get_comments,
            cache.invalidate_comments,
            lambda uuid: cache.put_comments(uuid, []),
        ):
            with pytest.raises(ConfigError, match="uuid"):
                operation(bad)

    @pytest.mark.parametrize("bad", [None, 7, "", "\ud800"])
    def test_an_invalid_cache_key_is_refused(self, cache: FeedCache, bad: Any) -> None:
        """By what takes one."""
        with pytest.raises(ConfigError, match="cache_key"):
            cache.is_stale(bad)
        with pytest.raises(ConfigError, match="cache_key"):
            cache.put_topics([], bad)

    @pytest.mark.parametrize("bad", [None, "7", 7.5, True])
    def test_an_invalid_number_of_days_is_refused(self, cache: FeedCache, bad: Any) -> None:
        """Said with what is allowed."""
        with pytest.raises(ConfigError, match="days_back: must be a whole number"):
            cache.get_topics_all(bad)
        with pytest.raises(ConfigError, match="days_back: must be a whole number"):
            cache.get_topics_by_category("general", bad)

    def test_threads_share_one_cache(self, cache: FeedCache) -> None:
        """Readers see whole results, writers lose nothing."""
        rounds, errors = 60, []

        def work(seed: int) -> None:
            dice = random.Random(seed)
            for number in range(rounds):
                uuid = f"{seed}-{number}"
                cache.put_topic(full(uuid, dice.randrange(1000)))
                cache.put_comments(uuid, [comment("1", uuid)])
                if cache.get_topic(uuid) is None or said(cache.get_comments(uuid)) != ["1"]:
                    errors.append(uuid)
                found = cache.get_topics_all(7) or []
                if uuid not in uuids(found) or found != sorted(
                    found, key=lambda one: (-one.created_at, one.topic_uuid)
                ):
                    errors.append(uuid)
                if number % 10 == 0:
                    cache.delete_topic(uuid)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert errors == []
        assert cache.stats().topics == 8 * rounds * 9 // 10

    def test_threads_that_read_during_a_close_get_a_list_or_not_open(
        self, path: Path, clock: ManualClock
    ) -> None:
        """Each gets its list or NotOpen, and nothing else."""
        cache = FeedCache.open(path, clock=clock)
        cache.put_topics([topic(f"t{n}") for n in range(50)], "index:all:7")
        outcomes: set[object] = set()
        ready = threading.Barrier(5)

        def read() -> None:
            ready.wait()
            try:
                for _ in range(3_000):
                    outcomes.add(len(uuids(cache.get_topics_all(7))))
                    outcomes.add(cache.get_topic("t1") is not None)
            except NotOpen:
                outcomes.add("closed")

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        ready.wait()
        cache.close()
        for thread in threads:
            thread.join()
        assert outcomes <= {50, True, "closed"}


class TestF2Doors:
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

    def test_a_body_of_bytes_is_refused(self, cache: FeedCache) -> None:
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
    def test_any_whole_number_of_days_is_accepted(self, cache: FeedCache, days: int) -> None:
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
    def test_an_invalid_path_is_refused(self, given: Any) -> None:
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


class TestF3Stale:
    @pytest.mark.parametrize(
        ("passed", "stale"), [(0, False), (299, False), (300, False), (301, True), (300.5, True)]
    )
    def test_a_key_is_stale_after_three_hundred_seconds(
        self, cache: FeedCache, clock: ManualClock, passed: float, stale: bool
    ) -> None:
        """Not at 300, but beyond."""
        cache.put_topics([], "index:all:7")
        clock.advance(passed)
        assert cache.is_stale("index:all:7") is stale

    def test_a_key_without_a_meta_row_is_stale(self, cache: FeedCache) -> None:
        """Never fetched is stale, whatever rows there are."""
        cache.put_topics([topic("a")], "index:all:7")
        assert cache.is_stale("index:all:8")
        assert cache.is_stale("topic:a")
        assert cache.is_stale("nonsense")

    def test_a_key_fetched_in_the_future_is_stale(
        self, cache: FeedCache, clock: ManualClock
    ) -> None:
        """A clock that was set back makes all of it stale; a new fetch mends it."""
        cache.put_topics([topic("a")], "index:all:7")
        clock.advance(-1)
        assert cache.is_stale("index:all:7")
        assert uuids(cache.get_topics_all(7)) == ["a"]
        cache.put_topics([topic("a")], "index:all:7")
        assert not cache.is_stale("index:all:7")

    def test_fresh_for_is_a_setting(self, path: Path, clock: ManualClock) -> None:
        """`fresh_for`."""
        with FeedCache.open(path, clock=clock, fresh_for="1m") as cache:
            cache.put_topic(topic("a"))
            clock.advance(60)
            assert not cache.is_stale("topic:a")
            clock.advance(1)
            assert cache.is_stale("topic:a")


class TestF4Lists:
    """F4: what a list holds, and in which order."""

    def test_lists_are_newest_first_and_ties_by_uuid(self, cache: FeedCache) -> None:
        """In any order of writing."""
        for uuid, age in (("b", 50), ("d", 10), ("a", 50), ("e", 90), ("c", 50)):
            cache.put_topic(topic(uuid, age))
        assert uuids(cache.get_topics_all(7)) == ["d", "a", "b", "c", "e"]
        assert uuids(cache.get_topics_by_category("general", 7)) == ["d", "a", "b", "c", "e"]

    def test_ties_are_broken_among_every_run_of_equals(self, cache: FeedCache) -> None:
        """Not only the first."""
        given = [(f"{letter}{age}", age) for age in (5, 6, 7) for letter in "zyx"]
        random.Random(3).shuffle(given)
        cache.put_topics([topic(uuid, age) for uuid, age in given], "index:all:7")
        assert uuids(cache.get_topics_all(7)) == [
            f"{letter}{age}" for age in (5, 6, 7) for letter in "xyz"
        ]

    def test_deleted_topics_are_left_out(self, cache: FeedCache) -> None:
        """`get_topic` still has them."""
        cache.put_topics([topic("a"), topic("b", deleted=True)], "index:all:7")
        assert uuids(cache.get_topics_all(7)) == ["a"]
        assert uuids(cache.get_topics_by_category("general", 0)) == ["a"]
        assert cache.get_topic("b") == topic("b", deleted=True)

    def test_the_window_includes_its_first_second(
        self, cache: FeedCache, clock: ManualClock
    ) -> None:
        """`created_at >= now - days_back * 86400`."""
        cache.put_topics([topic("in", 7 * DAY), topic("out", 7 * DAY + 1)], "index:all:7")
        assert uuids(cache.get_topics_all(7)) == ["in"]
        assert uuids(cache.get_topics_all(8)) == ["in", "out"]
        clock.advance(1)
        assert uuids(cache.get_topics_all(7)) == []
        clock.advance(-1)
        assert uuids(cache.get_topics_all(7)) == ["in"]

    @pytest.mark.parametrize("days", [0, -1, -100])
    def test_zero_or_fewer_days_list_all_topics(self, cache: FeedCache, days: int) -> None:
        """However old."""
        cache.put_topics([topic("a"), topic("old", 1000 * DAY)], "index:all:7")
        assert uuids(cache.get_topics_all(days)) == ["a", "old"]
        assert uuids(cache.get_topics_by_category("general", days)) == ["a", "old"]

    def test_the_cache_does_not_clamp_the_number_of_days(self, cache: FeedCache) -> None:
        """The cache does not clamp."""
        cache.put_topics([topic("old", 1000 * DAY)], "index:all:7")
        assert uuids(cache.get_topics_all(100_000)) == ["old"]

    def test_a_topic_of_the_future_is_listed(self, cache: FeedCache) -> None:
        """An author's clock may be ahead."""
        cache.put_topics([topic("a"), topic("ahead", -3600)], "index:all:7")
        assert uuids(cache.get_topics_all(7)) == ["ahead", "a"]

    def test_a_topic_ages_out_of_a_list_that_is_in_memory(
        self, cache: FeedCache, clock: ManualClock
    ) -> None:
        """The same list read again and again, with nothing written meanwhile."""
        cache.put_topics([topic("a", 6 * DAY), topic("b", 0)], "index:all:7")
        for _ in range(3):
            assert uuids(cache.get_topics_all(7)) == ["b", "a"]
        clock.advance(DAY)
        assert uuids(cache.get_topics_all(7)) == ["b", "a"]
        clock.advance(1)
        assert uuids(cache.get_topics_all(7)) == ["b"]

    def test_changing_a_returned_list_changes_no_other(self, cache: FeedCache) -> None:
        """Memory in front hands out no list of its own."""
        cache.put_topics([topic("a")], "index:all:7")
        found = cache.get_topics_all(7)
        assert found is not None
        found.clear()
        assert uuids(cache.get_topics_all(7)) == ["a"]

    def test_memory_in_front_never_serves_an_old_list(
        self, cache: FeedCache, path: Path, clock: ManualClock
    ) -> None:
        """Another connection's write is in the next read: put, delete, comments, meta."""
        with FeedCache.open(path, clock=clock) as other:
            for number in range(20):
                other.put_topics([topic(f"t{number}", number)], "index:all:7")
                assert len(uuids(cache.get_topics_all(7))) == number + 1
                cache.put_comments("t0", [comment(str(number), "t0")])
                assert said(other.get_comments("t0")) == [str(number)]
            other.delete_topic("t3")
            assert "t3" not in uuids(cache.get_topics_all(7))
            assert cache.is_stale("index:all:7")
            sql(path, "UPDATE feed_topics SET deleted = 1 WHERE topic_uuid = 't4'")
            assert "t4" not in uuids(cache.get_topics_all(7))

    def test_lists_larger_than_memory_are_right(self, cache: FeedCache) -> None:
        """Large and small lists in turn are all right."""
        cache.put_topics([topic(f"t{n:05d}", n) for n in range(3_000)], "index:all:7")
        cache.put_topics([topic("x", 5, category_id="small")], "index:small:7")
        for _ in range(3):
            assert len(uuids(cache.get_topics_all(7))) == 3_001
            assert uuids(cache.get_topics_by_category("small", 7)) == ["x"]
            assert len(uuids(cache.get_topics_by_category("general", 7))) == 3_000


class TestF5Keys:
    @pytest.mark.parametrize("name", ["General", " general", "general", "GENERAL\t", "\ngeneral "])
    def test_spellings_of_a_category_are_one(self, cache: FeedCache, name: str) -> None:
        """In topics, in questions, in keys: category names match."""
        cache.put_topics([topic("a", category_id=name)], f"index:{name}:7")
        for asked in ("general", " General ", "GENERAL"):
            assert uuids(cache.get_topics_by_category(asked, 7)) == ["a"]
            assert not cache.is_stale(f"index:{asked}:7")

    def test_keys_are_as_the_contract_writes_them(self, cache: FeedCache, path: Path) -> None:
        """Literally."""
        cache.put_topics([], "index:all:7")
        cache.put_topics([], "index:General:30")
        cache.put_topic(topic("A-1"))
        cache.put_comments("A-1", [])
        assert set(meta(path)) == {
            "index:all:7",
            "index:general:30",
            "topic:A-1",
            "comments:A-1",
        }

    def test_keys_of_any_length_are_kept_apart(self, cache: FeedCache) -> None:
        """No key is truncated: two long ones that begin alike are two."""
        long = "c" * 5_000
        cache.put_topics([topic("a", category_id=f"{long}1")], f"index:{long}1:7")
        cache.put_topic(topic(f"{long}1"))
        assert not cache.is_stale(f"index:{long}1:7")
        assert cache.is_stale(f"index:{long}2:7")
        assert cache.is_stale(f"index:{long}:7")
        assert not cache.is_stale(f"topic:{long}1")
        assert cache.get_topic(f"{long}2") is None
        assert cache.get_topics_by_category(f"{long}2", 7) is None
        assert uuids(cache.get_topics_by_category(f"{long}1", 7)) == ["a"]

    @pytest.mark.parametrize("name", ["all", "ALL", " all "])
    def test_all_is_no_category(self, cache: FeedCache, name: str) -> None:
        """Asked for as one, it is refused with what to call instead."""
        with pytest.raises(ConfigError, match="get_topics_all"):
            cache.get_topics_by_category(name, 7)

    @pytest.mark.parametrize("bad", [None, 7, "", "  "])
    def test_an_invalid_category_is_refused(self, cache: FeedCache, bad: Any) -> None:
        """Said with what is allowed."""
        with pytest.raises(ConfigError, match="category"):
            cache.get_topics_by_category(bad, 7)

    def test_a_category_matches_exactly(self, cache: FeedCache, path: Path) -> None:
        """Deleting from `a` takes the meta rows of `a` and of all, whatever their days."""
        near = ["a:b", "a%", "a_", "%", "_", "aa", "b", "a:7", "a:7:8", "index:a", "a*", "a?"]
        mine = ["index:a:1", "index:a:7", "index:a:30", "index:all:7", "index:all:1"]
        others = [f"index:{name}:{days}" for name in near for days in (1, 7)]
        cache.put_topic(topic("x", category_id="a"))
        for key in (*mine, *others):
            cache.put_topics([], key)
        cache.delete_topic("x")
        assert set(meta(path)) == set(others)

    @pytest.mark.parametrize("name", ["a%", "a_", "a:b", "%", "_", "'", '"', "a;b", "a\x00b"])
    def test_wildcards_in_a_category_are_plain_letters(
        self, cache: FeedCache, path: Path, name: str
    ) -> None:
        """Nothing but its own keys goes."""
        cache.put_topic(topic("x", category_id=name))
        cache.put_topic(topic("y", category_id="ab"))
        for key in (f"index:{name}:7", "index:ab:7", "index:a:7", "index:axb:7"):
            cache.put_topics([], key)
        assert uuids(cache.get_topics_by_category(name, 7)) == ["x"]
        cache.delete_topic("x")
        assert set(meta(path)) == {"index:ab:7", "index:a:7", "index:axb:7", "topic:y"}


class TestF9IndexRows:
    def test_an_index_result_keeps_body_tags_and_verification(self, cache: FeedCache) -> None:
        """An index refresh does not overwrite a full topic; what it knows, it updates."""
        cache.put_topic(full("a", category_id="old"))
        cache.put_topics(
            [topic("a", 50, title="new", author="zoe", category_id="new")], "index:all:7"
        )
        assert cache.get_topic("a") == full("a", 50, title="new", author="zoe", category_id="new")
        assert cache.get_topics_all(7) == [cache.get_topic("a")]
        assert uuids(cache.get_topics_by_category("new", 7)) == ["a"]
        assert cache.get_topics_by_category("old", 7) is None

    def test_an_index_result_can_delete(self, cache: FeedCache) -> None:
        """Deleted upstream is something that an index knows."""
        cache.put_topic(full("a"))
        cache.put_topics([topic("a", deleted=True, deleted_at=int(NOW))], "index:all:7")
        assert cache.get_topics_all(7) == []
        kept = cache.get_topic("a")
        assert kept is not None
        assert (kept.deleted, kept.deleted_at, kept.body) == (True, int(NOW), "the body of a")

    def test_a_full_topic_replaces_all(self, cache: FeedCache) -> None:
        """Its tags too, when there are none any more."""
        cache.put_topic(full("a"))
        cache.put_topic(topic("a", body="short"))
        assert cache.get_topic("a") == topic("a", body="short")
        cache.put_topics([topic("a")], "index:all:7")
        assert cache.get_topic("a") == topic("a", body="short")

    def test_an_empty_body_is_a_body(self, cache: FeedCache) -> None:
        """Absent is None, and only None."""
        cache.put_topic(full("a", body=""))
        cache.put_topics([topic("a")], "index:all:7")
        assert cache.get_topic("a") == full("a", body="")

    def test_without_complete_nothing_is_deleted(self, cache: FeedCache) -> None:
        """A result that is a part of the window proves nothing of the rest."""
        cache.put_topics([topic("a"), topic("b")], "index:all:7")
        cache.put_topics([topic("a")], "index:all:7")
        assert uuids(cache.get_topics_all(7)) == ["a", "b"]

    def test_a_complete_result_deletes_what_upstream_no_longer_has(self, cache: FeedCache) -> None:
        """Topics gone upstream do not stay for ever; with them their comments and meta rows."""
        cache.put_topics([topic("a"), topic("gone")], "index:all:7")
        cache.put_comments("gone", [comment("1", "gone")])
        cache.put_topics([topic("a")], "index:all:7", complete=True)
        assert uuids(cache.get_topics_all(0)) == ["a"]
        assert cache.get_topic("gone") is None
        assert cache.get_comments("gone") is None
        assert cache.is_stale("comments:gone")

    def test_a_complete_result_deletes_only_in_its_window(self, cache: FeedCache) -> None:
        """What is older than its days, or of another category, is not its business."""
        cache.put_topics(
            [topic("old", 8 * DAY), topic("news", category_id="news"), topic("gone")],
            "index:all:30",
        )
        cache.put_topics([], "index:general:7", complete=True)
        assert uuids(cache.get_topics_all(0)) == ["news", "old"]
        cache.put_topics([], "index:all:7", complete=True)
        assert uuids(cache.get_topics_all(0)) == ["old"]
        cache.put_topics([], "index:all:30", complete=True)
        assert cache.get_topics_all(30) == []
        assert cache.get_topics_all(0) is None

    def test_a_complete_result_keeps_topics_written_here_a_moment_ago(
        self, cache: FeedCache, clock: ManualClock
    ) -> None:
        """The network lags: less than `fresh_for` ago is kept, then it goes."""
        cache.put_topic(full("mine"))
        clock.advance(299)
        cache.put_topics([], "index:all:7", complete=True)
        assert uuids(cache.get_topics_all(7)) == ["mine"]
        clock.advance(1)
        cache.put_topics([], "index:all:7", complete=True)
        assert cache.get_topics_all(7) == []

    def test_a_complete_result_of_no_list_is_refused(self, cache: FeedCache) -> None:
        """Only an index has a window."""
        with pytest.raises(ConfigError, match="complete"):
            cache.put_topics([topic("a")], "topic:a", complete=True)


class TestF16Miss:
    def test_a_list_that_was_never_fetched_is_not_an_empty_one(self, cache: FeedCache) -> None:
        """None: neither rows nor a meta row (F6); an empty list: it was fetched, and is empty."""
        assert cache.get_topics_all(7) is None
        assert cache.get_topics_by_category("general", 7) is None
        cache.put_topics([], "index:all:7")
        assert cache.get_topics_all(7) == []
        assert cache.get_topics_all(30) is None
        cache.put_topics([], "index: General:7")
        assert cache.get_topics_by_category("GENERAL", 7) == []
        assert cache.get_topics_by_category("news", 7) is None

    def test_rows_are_a_hit_without_a_meta_row(self, cache: FeedCache, clock: ManualClock) -> None:
        """Whatever brought them, in every list that shows them, and only while one shows them."""
        cache.put_topic(full("a", 2 * DAY))
        assert uuids(cache.get_topics_all(7)) == ["a"]
        assert uuids(cache.get_topics_by_category("general", 30)) == ["a"]
        assert cache.get_topics_all(1) is None
        clock.advance(6 * DAY)
        assert cache.get_topics_all(7) is None

    def test_an_invalidated_empty_list_is_a_miss(self, cache: FeedCache) -> None:
        """Its meta row is gone, and rows there are none."""
        cache.put_topics([topic("a")], "index:all:7")
        cache.delete_topic("a")
        assert cache.get_topics_all(7) is None

    def test_a_file_that_cannot_be_read_is_a_miss(
        self, cache: FeedCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As for every other read."""

        def broken(*_: object) -> None:
            raise StoreError("a broken disk")

        cache.put_topics([topic("a")], "index:all:7")
        monkeypatch.setattr(cache, "reading", broken)
        assert cache.get_topics_all(7) is None
        assert cache.get_topics_by_category("general", 7) is None

    def test_the_seeds_numbers_are_exported(self, path: Path, clock: ManualClock) -> None:
        """By the seed's names, and they are the defaults in use."""
        assert (FEED_CACHE_TTL_SECONDS, FEED_CACHE_EVICT_SECONDS) == (300, 2_592_000)
        with FeedCache.open(path, clock=clock) as cache:
            assert cache.fresh_for == FEED_CACHE_TTL_SECONDS
            assert cache.keep_for == FEED_CACHE_EVICT_SECONDS
