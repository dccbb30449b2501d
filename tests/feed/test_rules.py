"""F3-F6, F9: the pure rules, over many cases."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stillfresh import ConfigError
from stillfresh.feed.model import (
    Index,
    canonical,
    category_of,
    checked_days,
    index_of,
    named_category,
)
from stillfresh.feed.rules import (
    Fetched,
    buckets,
    comment_rows,
    covered,
    is_stale,
    listed,
    merged,
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
    def test_stale_is_the_contracts_sentence(
        self, last_fetched: int, fresh_for: float, now: float
    ) -> None:
        """No meta row, or longer ago than that, or in the future."""
        expected = now - last_fetched > fresh_for or last_fetched > now
        assert is_stale(last_fetched, fresh_for, now) is expected
        assert is_stale(None, fresh_for, now)


class TestF4Rules:
    @given(st.integers(-5, 1000), MOMENTS, MOMENTS)
    def test_the_window_is_the_contracts_sentence(
        self, days: int, now: float, created_at: float
    ) -> None:
        """`created_at >= now - days_back * 86400`; all for none."""
        expected = days <= 0 or created_at >= now - days * DAY
        assert (created_at in window(days, now)) is expected

    @given(st.integers())
    def test_the_engine_clamps(self, days: int) -> None:
        """To 1-30, and leaves alone what lies between."""
        clamped = checked_days(days)
        assert 1 <= clamped <= 30
        assert clamped == days or not 1 <= days <= 30
        assert checked_days(clamped) == clamped

    def test_what_could_not_be_stored_is_listed_as_it_would_have_been(self) -> None:
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


class TestF6Rules:
    @given(DAYS, MOMENTS)
    def test_one_bucket_a_day(self, days: int, now: float) -> None:
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

    def test_a_row_without_another_is_the_topic(self) -> None:
        """With its category normalised."""
        row = merged(None, full("a", category_id=" News"))
        assert msgspec.convert(row, type=type(full("a"))) == full("a", category_id="news")

    @given(
        st.lists(st.sampled_from("abcd"), unique=True),
        st.lists(st.sampled_from("abcde"), unique=True),
    )
    def test_comments_are_upstreams_and_what_is_kept(self, old: list[str], new: list[str]) -> None:
        """In upstream's order, with fields of others; then those kept that it lacks."""
        before = [msgspec.to_builtins(comment(uuid)) | {"likes": uuid} for uuid in old]
        rows = comment_rows(before, [comment(uuid) for uuid in new], kept=["a", "zz"])
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
