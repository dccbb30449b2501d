"""F3-F6, F9, F19: the pure rules, over many cases."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stillfresh import ConfigError, LoadFailed, Verdict
from stillfresh.engine.rules import verdict_of
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Failure, Record
from stillfresh.systems.feed import Comment, Topic
from stillfresh.systems.feed.model import (
    CommentsAnswer,
    Feed,
    FeedJson,
    Freshness,
    Index,
    TopicAnswer,
    canonical,
    category_of,
    checked_days,
    checked_uuid,
    comments_key,
    index_of,
    named_category,
    spelled,
    subject,
    topic_key,
    whole_days,
)
from stillfresh.systems.feed.rules import (
    DEEPEST,
    LARGEST,
    Fetched,
    JsonRecords,
    KeyState,
    buckets,
    checked_comments,
    checked_topic,
    checked_topics,
    comment_rows,
    covered,
    decoded_json,
    is_news,
    is_shallow,
    is_stale,
    json_object,
    listed,
    merged,
    record_of,
    topic_of,
    window,
    with_comment,
    without_comment,
)
from tests.kit.feed import DAY, NOW, comment, full, topic

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
CATEGORIES = NAMES.map(category_of).filter(lambda name: name not in {"", "all"})
DAYS = st.integers(1, 30)
MOMENTS = st.floats(1e9, 4e9)


class TestF3Rules:
    @given(st.integers(0, 4_000_000_000), st.floats(0, 1e6), MOMENTS)
    def test_staleness_is_as_the_contract_says(
        self, last_fetched: int, fresh_for: float, now: float
    ) -> None:
        """No meta row, or longer ago than that, or in the future."""
        expected = now - last_fetched > fresh_for or last_fetched > now
        assert is_stale(last_fetched, fresh_for, now) is expected
        assert is_stale(None, fresh_for, now)


class TestF19Rules:
    @given(
        age=st.integers(-400, 400) | st.floats(-400, 400),
        fresh_for=st.sampled_from([0.0, 1.0, 300.0]),
    )
    def test_the_engine_never_calls_fresh_what_the_feed_calls_stale(
        self, age: float, fresh_for: float
    ) -> None:
        """F3 is judged once; a time from the future is told to the engine by a mark."""
        now = NOW + age
        state = KeyState(int(NOW))
        copy = state.record(Policy(fresh_for, 1e6), now).copy
        assert copy is not None
        if state.is_stale(fresh_for, now):
            assert verdict_of(copy, now) is not Verdict.FRESH
        elif now - NOW < fresh_for:
            assert verdict_of(copy, now) is Verdict.FRESH

    def test_a_failure_from_before_a_clock_was_set_back_does_not_count(self) -> None:
        """The end of its lease is later than that of any lease can be."""
        state = KeyState(failures=2, retry_at=1000 * (NOW + 60), error="x", lease_end=1000 * NOW)
        assert state.failure(NOW) == Failure(2, NOW + 60, "x")
        assert state.record(Policy(300), NOW) == Record(failure=Failure(2, NOW + 60, "x"))
        assert state.failure(NOW - 3600) is None
        assert state.record(Policy(300), NOW - 3600) == Record()

    @pytest.mark.parametrize("value", ["soon", b"\xff", None])
    def test_a_state_of_wrong_types_is_no_failure_and_no_lease(self, value: object) -> None:
        """Another program may write anything into any column."""
        state = KeyState(None, value, value, value, value, 1, value)
        assert state.record(Policy(300), NOW) == Record()
        state = KeyState(int(NOW), 1, value, "x", value, 1, value)
        copy = state.record(Policy(300), NOW).copy
        assert copy is not None
        assert copy.generation.startswith(f"{int(NOW)}:")


class TestF4Rules:
    @given(st.integers(-5, 1000), MOMENTS, MOMENTS)
    def test_the_window_of_a_list_is_as_the_contract_says(
        self, days: int, now: float, created_at: float
    ) -> None:
        """`created_at >= now - days_back * 86400`; all for none."""
        expected = days <= 0 or created_at >= now - days * DAY
        assert (created_at in window(days, now)) is expected

    @given(st.integers())
    def test_the_engine_clamps_days_to_one_to_thirty(self, days: int) -> None:
        """To 1-30, and leaves alone what lies between."""
        clamped = checked_days(days)
        assert 1 <= clamped <= 30
        assert clamped == days or not 1 <= days <= 30
        assert checked_days(clamped) == clamped

    def test_a_fetch_that_could_not_be_stored_is_listed_as_if_it_had_been(self) -> None:
        """F6: newest first, ties by uuid; nothing deleted, older than asked for, or of another."""
        topics = (
            topic("old", 7 * DAY + 1),
            topic("b", 60),
            topic("a", 60),
            topic("gone", deleted=True),
            topic("elsewhere", category_id="Sports"),
            topic("new", 1, category_id=" General"),
        )
        fetched = Fetched(topics)
        assert [it.topic_uuid for it in listed(fetched, Index("general", 7), NOW)] == [
            "new",
            "a",
            "b",
        ]
        everything = listed(fetched, Index(None, 8), NOW)
        assert [it.topic_uuid for it in everything] == ["new", "a", "b", "elsewhere", "old"]


class TestF5Rules:
    @given(NAMES)
    def test_normalising_twice_is_normalising_once(self, name: str) -> None:
        """So it may be done at every door."""
        assert category_of(category_of(name)) == category_of(name)
        assert category_of(f" {name}\t") == category_of(name)

    @given(CATEGORIES, DAYS)
    @example("a:b", 7)
    @example("a:7", 7)
    @example("index", 1)
    @example(":", 1)
    def test_a_key_names_its_list(self, category: str, days: int) -> None:
        """And no other: to the key and back."""
        index = Index(category, days)
        assert index_of(index.key) == index
        assert canonical(index.key) == index.key

    @pytest.mark.parametrize("days", ["", "x", "-1", "1.5", "٣", "²", "7 ", "1" * 10])
    def test_days_are_plain_digits(self, days: str) -> None:
        """Anything else names no list, and is stored under the name that it has."""
        assert index_of(f"index:a:{days}") is None

    @given(CATEGORIES, CATEGORIES, DAYS)
    @example("a:b", "a", 7)
    @example("a", "a:b", 7)
    @example("a:7", "a", 7)
    @example("a%", "ab", 7)
    @example("a_", "ab", 7)
    def test_a_category_matches_its_own_keys_alone(self, one: str, other: str, days: int) -> None:
        """`a` never matches `a:b`; `%` and `_` are letters."""
        found, whole = index_of(Index(one, days).key), index_of(Index(None, days).key)
        assert found is not None
        assert whole is not None
        assert (found.category == other) is (one == other)
        assert whole.category is None

    @given(NAMES, NAMES)
    def test_spellings_of_one_category_have_one_key(self, one: str, other: str) -> None:
        """And two categories have two."""
        first, second = canonical(f"index:{one}:7"), canonical(f"index:{other}:7")
        if category_of(one) and category_of(other):
            assert (first == second) is (category_of(one) == category_of(other))

    @given(st.sampled_from(["all", "ALL", " all", "", "  "]))
    def test_all_and_nothing_are_no_categories(self, name: str) -> None:
        """Refused at the door."""
        with pytest.raises(ConfigError, match="category"):
            named_category(name)

    def test_keys_name_what_they_are_about(self) -> None:
        """A topic, or the comments on it."""
        assert (topic_key("a:b"), comments_key("a")) == ("topic:a:b", "comments:a")
        assert subject(topic_key("a:b")) == "a:b"
        assert index_of("topic:a:7") is None
        assert index_of("index::7") is None
        assert index_of("index:a:999999999") == Index("a", 999_999_999)
        assert spelled(b" G\xff ") == "g\ufffd"

    @pytest.mark.parametrize("bad", ["", None, 5, b"a", "\ud800"])
    def test_a_key_and_a_uuid_are_text(self, bad: object) -> None:
        """That is not empty, and that can be stored; the error names the argument."""
        with pytest.raises(ConfigError, match="cache_key"):
            canonical(bad)
        with pytest.raises(ConfigError, match="topic"):
            checked_uuid(bad, "topic")
        assert checked_uuid("a") == "a"

    def test_days_are_whole_and_can_be_counted(self) -> None:
        """None at all means all there are."""
        assert [whole_days(it) for it in (-5, 0, 7, 10**9)] == [0, 0, 7, 10**9 - 1]
        for bad in (1.5, "7", True, None):
            with pytest.raises(ConfigError, match="days_back"):
                whole_days(bad)


class TestF15Records:
    def test_records_of_others_keep_their_fields(self) -> None:
        """One or many, in any order; a record that lacks a field is an error."""
        reader = JsonRecords(Topic, strict=True)
        plain = topic("a")
        text = msgspec.json.encode(json_object(plain))
        other = msgspec.json.encode(json_object(plain) | {"votes": 5})
        assert reader.one(text) == plain
        assert reader.one(other).extra == {"votes": 5}
        again = reader.one(text)
        assert again == plain
        assert msgspec.json.encode(again) == text
        both = reader.all(b"[" + other + b"," + text + b"]")
        assert [it.extra for it in both] == [{"votes": 5}, {}]
        assert reader.all(b"[" + text + b"]") == [plain]
        assert reader.all(b"[]") == []
        for bad in (b"{}", b"[1]", b"5"):
            with pytest.raises(msgspec.ValidationError):
                reader.one(bad)

    def test_records_are_read_strictly_or_not(self) -> None:
        """As the reader was made: a number written as text."""
        text = msgspec.json.encode(json_object(topic("a")) | {"created_at": "5"})
        assert JsonRecords(Topic, strict=False).one(text).created_at == 5
        with pytest.raises(msgspec.ValidationError):
            JsonRecords(Topic, strict=True).one(text)
        row = json_object(topic("a")) | {"created_at": "5"}
        assert record_of(row, Topic, strict=False).created_at == 5
        with pytest.raises(msgspec.ValidationError):
            record_of(row, Topic)

    def test_a_field_that_python_cannot_hold_is_left_out(self) -> None:
        """The others are read, of one object or of several."""
        assert decoded_json(b'{"a": 1, "b": 2}') == {"a": 1, "b": 2}
        assert decoded_json(b'{"a": 1, "b": 1e999}') == {"a": 1}
        assert decoded_json(b'[{"a": 1, "b": 1e999}]') == [{"a": 1}]
        with pytest.raises(UnicodeDecodeError):
            decoded_json(b'{"a": "\xff", "b": 1e999}')

    def test_fields_of_others_deeper_than_the_limit_are_left_out(self) -> None:
        """Lists and objects alike; deeper fields of others are left out."""
        value: object = 1
        for level in range(DEEPEST + 1):
            assert is_shallow(value), level
            value = [value] if level % 2 else {"a": value}
        assert not is_shallow(value)
        found = record_of(json_object(topic("a")) | {"deep": value, "flat": [1]}, Topic)
        assert found.extra == {"flat": [1]}

    def test_records_are_checked_before_they_are_stored(self) -> None:
        """Types, texts and numbers; the error names the record."""
        assert checked_topic(topic("a", category_id=" News")).category_id == "news"
        assert [it.topic_uuid for it in checked_topics([topic("a"), topic("b")])] == ["a", "b"]
        for bad, words in (
            (5, "expected a Topic, not 5"),
            (comment("a"), "expected a Topic"),
            (Topic("a", 5, "t", 1), "Topic with the uuid 'a'"),  # type: ignore[arg-type]
            (Topic("a", "\ud800", "t", 1), "Topic with the uuid 'a'"),
            (Topic("", "me", "t", 1), "uuid"),
            (Topic("a", "me", "t", LARGEST), "created_at is too large"),
            (Topic("a", "me", "t", -LARGEST - 1), "created_at is too large"),
            (Topic("a", "me", "t", 1, extra={"title": "x"}), "title is a field of its own"),
        ):
            with pytest.raises(ConfigError, match=words):
                checked_topic(bad)
        for at in (LARGEST - 1, -LARGEST):
            assert checked_topic(Topic("a", "me", "t", at)).created_at == at
        for several in (5, "text", b"text"):
            with pytest.raises(ConfigError, match="expected several Topics"):
                checked_topics(several)  # type: ignore[arg-type]

    def test_extra_fields_are_as_json_returns_them(self) -> None:
        """Also those of a subclass; too deep ones are refused."""

        class Voted(Topic, frozen=True):
            votes: int = 0

        voted = Voted("a", "me", "t", 1, votes=5, extra={"pair": (1, 2)})
        assert checked_topic(voted).extra == {"votes": 5, "pair": [1, 2]}
        deep: list[object] = []
        for _ in range(DEEPEST):
            deep = [deep]
        with pytest.raises(ConfigError, match=f"{DEEPEST} levels deep at most"):
            checked_topic(Topic("a", "me", "t", 1, extra={"deep": deep}))

    def test_comments_are_on_their_topic(self) -> None:
        """Others are refused, by name."""
        mine = Comment("c", "a", "me", 1)
        assert checked_comments("a", [mine]) == [mine]
        with pytest.raises(ConfigError, match="comment 'c': is on topic 'a', not on 'b'"):
            checked_comments("b", [mine])
        with pytest.raises(ConfigError, match="uuid"):
            checked_comments("a", [Comment("", "a", "me", 1)])

    def test_an_answer_is_shown_in_short(self) -> None:
        """With what it holds, how fresh and how old it is."""
        error = LoadFailed("no")
        freshness = Freshness(Verdict.STALE, NOW, lambda: NOW + 5, error)
        answers = (
            Feed([], freshness),
            TopicAnswer(None, freshness),
            CommentsAnswer([], freshness),
            FeedJson(b"[]", freshness),
        )
        shown = ["<Feed [] stale age=5s>", "<TopicAnswer None stale age=5s>"]
        shown += ["<CommentsAnswer [] stale age=5s>", "b'[]'"]
        assert [repr(it) for it in answers] == shown
        assert {it.fetched_at for it in answers} == {NOW}
        assert {it.age for it in answers} == {5}
        assert {it.error for it in answers} == {error}

    def test_equal_records_are_equal(self) -> None:
        """No extra fields, given or not, are the same; a topic is no comment."""
        one, none_given = topic("a"), topic("a")
        assert one == none_given
        assert one == msgspec.structs.replace(one, extra={})
        assert one != msgspec.structs.replace(one, extra={"a": 1})
        assert one != topic("a", title="other")
        assert one != comment("a")


class TestF6Rules:
    @given(DAYS, MOMENTS)
    def test_each_day_is_looked_up_once_today_first(self, days: int, now: float) -> None:
        """Today first, by UTC, each once; what they cover ends with today."""
        found = buckets(days, now)
        today = datetime.fromtimestamp(now, UTC).date()
        assert found == [today - timedelta(days=back) for back in range(days)]
        speaks_for = covered(found)
        assert now in speaks_for
        assert speaks_for.until - speaks_for.since == days * DAY
        assert now + DAY not in speaks_for

    @given(DAYS, MOMENTS, st.floats(-40 * DAY, 2 * DAY))
    def test_a_moment_is_covered_if_its_day_was_looked_up(
        self, days: int, now: float, offset: float
    ) -> None:
        """F9: only then may its absence mean that it is gone."""
        found, moment = buckets(days, now), now + offset
        day = datetime.fromtimestamp(moment, UTC).date()
        assert (moment in covered(found)) is (day in found)


BODIES = st.none() | st.text(max_size=5)
TAGS = st.lists(st.text(max_size=3), max_size=3)
OTHERS = st.dictionaries(st.sampled_from(["votes", "x", "y z"]), st.integers() | st.none())


class TestF9Rules:
    @given(BODIES, TAGS, st.booleans(), BODIES, TAGS, st.booleans(), OTHERS)
    def test_a_merged_row_is_never_poorer(
        self,
        old_body: str | None,
        old_tags: list[str],
        old_verified: bool,
        body: str | None,
        tags: list[str],
        verified: bool,
        others: dict[str, object],
    ) -> None:
        """A body that was there is there; fields of others stay; what the new one knows stands."""
        old = topic("a", body=old_body, tags=old_tags, verified=old_verified)
        new = topic("a", 30, title="new", body=body, tags=tags, verified=verified)
        before = msgspec.to_builtins(old) | others
        row = merged(before, new)
        found = msgspec.convert(row, type=type(new))
        keeps = body is None and old_body is not None
        assert found.body == (old_body if keeps else body)
        assert found.tags == (old_tags if keeps else tags)
        assert found.verified is (old_verified if keeps else verified)
        assert (found.title, found.created_at) == ("new", int(NOW) - 30)
        assert others.items() <= row.items()
        assert merged(row, new) == row

    def test_an_index_replaces_no_full_body(self) -> None:
        """It may carry a preview; a row that was full stays so even without a body."""
        before = json_object(full("a", body="whole", tags=["x"])) | {"votes": 5}
        preview = topic("a", body="prev", tags=[], title="new", extra={"votes": None})
        kept = merged(before, preview, is_index=True)
        assert (kept["body"], kept["tags"], kept["title"], kept["votes"]) == (
            "whole",
            ["x"],
            "new",
            5,
        )
        taken = merged(before, preview)
        assert (taken["body"], taken["votes"]) == ("prev", None)
        empty = json_object(topic("a", tags=["x"]))
        assert merged(empty, preview, is_index=True)["tags"] == []
        full_row = merged(empty, preview, is_index=True, is_full=True)
        assert full_row["tags"] == ["x"]
        assert "body" not in full_row

    def test_a_row_of_another_shape_is_no_topic(self) -> None:
        """F12: and what follows it is news; the order of fields is not."""
        row = json_object(topic("a"))
        assert topic_of(None) is topic_of({"topic_uuid": 5}) is None
        assert is_news(None, row)
        assert is_news({"topic_uuid": 5}, row)
        assert not is_news(dict(reversed(row.items())), row)
        assert is_news(row, row | {"title": "new"})

    def test_a_row_without_another_is_the_topic(self) -> None:
        """With its category normalised."""
        row = merged(None, full("a", category_id=" News"))
        assert msgspec.convert(row, type=type(full("a"))) == full("a", category_id="news")

    @given(
        st.lists(st.sampled_from("abcd"), unique=True),
        st.lists(st.sampled_from("abcde"), unique=True),
    )
    def test_stored_comments_are_upstreams_and_then_local_ones(
        self, old: list[str], new: list[str]
    ) -> None:
        """In upstream's order, with fields of others; then those kept that it lacks."""
        before = [msgspec.to_builtins(comment(uuid)) | {"likes": uuid} for uuid in old]
        rows = comment_rows(before, [comment(uuid) for uuid in new], local=["a", "zz"])
        expected = new + (["a"] if "a" in old and "a" not in new else [])
        assert [row["comment_uuid"] for row in rows] == expected
        assert all(
            row.get("likes") == uuid
            for row, uuid in zip(rows, expected, strict=True)
            if uuid in old
        )

    @given(st.lists(st.sampled_from("abcd"), unique=True), st.sampled_from("abcx"))
    def test_taking_a_comment_back_undoes_it(self, there: list[str], uuid: str) -> None:
        """Whatever was there is there again, an earlier version too."""
        before = [msgspec.to_builtins(comment(one)) for one in there]
        after = with_comment(before, comment(uuid, body="new"))
        assert next(row for row in after if row["comment_uuid"] == uuid)["body"] == "new"
        undone = without_comment(after, uuid, before)
        assert sorted(undone, key=str) == sorted(before, key=str)
