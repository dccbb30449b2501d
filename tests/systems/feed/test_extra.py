"""F15: fields that `Topic` and `Comment` do not name are carried, and come back as `.extra`."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError, StoreError
from stillfresh.systems.feed import Comment, FeedCache, FeedEngine, Topic
from stillfresh.systems.feed.http import HttpFeedSource
from stillfresh.systems.feed.rules import DEEPEST, NAMED, JsonRecords
from stillfresh.systems.feed.store import FeedStore
from stillfresh.testing import ManualClock
from tests.kit.feed import (
    NOW,
    PUT_COMMENTS,
    PUT_TOPIC,
    Heard,
    Network,
    comment,
    full,
    json_of,
    row_of,
    sql,
    topic,
)
from tests.kit.servers.feed import FeedServer

SIGNED = {"signature": "c2ln", "client": {"name": "dna", "versions": [1, 2.5, None]}, "none": None}
ODD = {"extra": 1, "stillfresh:extra": [2], "": 3, "ключ": 4, "big": 2**70, "long": "x" * 100_000}


class Signed(Topic, frozen=True):
    """A client's own topic."""

    signature: str = ""
    hops: int = 0


class SignedComment(Comment, frozen=True):
    signature: str = ""


def stored(path: Path, uuid: str = "a") -> dict[str, Any]:
    """The topic's row."""
    ((text,),) = sql(path, "SELECT topic_json FROM feed_topics WHERE topic_uuid = ?", uuid)
    return json.loads(text)  # type: ignore[no-any-return]


def stored_comments(path: Path, uuid: str = "a") -> list[dict[str, Any]]:
    ((text,),) = sql(path, "SELECT comments_json FROM feed_comments WHERE topic_uuid = ?", uuid)
    return json.loads(text)  # type: ignore[no-any-return]


def others(row: dict[str, Any], kind: type[Topic | Comment] = Topic) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in NAMED[kind]}


def nested(count: int) -> Any:
    """So many lists, each in the one before."""
    value: Any = []
    for _ in range(count - 1):
        value = [value]
    return value


def the_topics(data: bytes) -> list[dict[str, Any]]:
    return json.loads(data)  # type: ignore[no-any-return]


class TestF15Extra:
    @pytest.mark.parametrize("extra", [SIGNED, ODD], ids=["usual", "odd"])
    def test_a_topic_keeps_its_extras(
        self, cache: FeedCache, path: Path, extra: dict[str, Any]
    ) -> None:
        """In `topic_json` they stand beside the named fields; readers get them as `.extra`."""
        new = full("a", extra=extra)
        cache.put_topic(new)
        assert others(stored(path)) == extra
        assert cache.get_topic("a") == new
        assert [found.extra for found in cache.get_topics_all(7) or ()] == [extra]

    def test_a_list_keeps_its_extras(self, cache: FeedCache, path: Path) -> None:
        """Of each topic its own, whether or not its neighbours have any."""
        new = [topic("a", 1, extra=SIGNED), topic("b", 2), topic("c", 3, extra=ODD)]
        cache.put_topics(new, "index:all:7")
        assert [others(stored(path, uuid)) for uuid in "abc"] == [SIGNED, {}, ODD]
        assert cache.get_topics_all(7) == new

    def test_comments_keep_their_extras(self, cache: FeedCache, path: Path) -> None:
        """The same in `comments_json`."""
        new = [comment("1", extra=SIGNED), comment("2"), comment("3", extra=ODD)]
        cache.put_comments("a", new)
        found = [others(row, Comment) for row in stored_comments(path)]
        assert found == [SIGNED, {}, ODD]
        assert cache.get_comments("a") == new

    def test_a_subclass_keeps_its_own_fields(self, cache: FeedCache, path: Path) -> None:
        """They are stored as fields, beside extras, and come back as `.extra`."""
        one = Signed("a", "ann", "t", int(NOW), signature="s", extra={"likes": 1})
        cache.put_topic(one)
        cache.put_topics([Signed("b", "ann", "t", int(NOW), hops=2)], "index:all:7")
        cache.put_comments("a", [SignedComment("1", "a", "bob", int(NOW), signature="z")])
        assert others(stored(path)) == {"signature": "s", "hops": 0, "likes": 1}
        found = cache.get_topic("b")
        assert found is not None
        assert found.extra == {"signature": "", "hops": 2}
        assert [said.extra for said in cache.get_comments("a") or ()] == [{"signature": "z"}]

    async def test_extras_of_a_source_reach_the_reader(
        self, engine: FeedEngine, cache: FeedCache, network: Network
    ) -> None:
        """From the network to the reader, in a list, a topic, its comments, and the raw JSON."""
        network.have(Signed("a", "ann", "t", int(NOW), signature="s", extra=ODD))
        network.talk["a"] = [comment("1", extra=SIGNED)]
        own = {"signature": "s", "hops": 0} | ODD
        assert [found.extra for found in (await engine.get_all()).topics] == [own]
        assert [others(row) for row in the_topics(await engine.get_all_json())] == [own]
        whole = (await engine.get_topic("a")).topic
        assert whole is not None
        assert whole.extra == own
        assert [said.extra for said in (await engine.get_comments("a")).comments] == [SIGNED]
        assert cache.get_topic("a") == whole

    async def test_a_fetch_that_could_not_be_stored_is_answered_with_its_extras(
        self, engine: FeedEngine, network: Network, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also as raw JSON, where the fields stand side by side as in a row."""

        async def full_disk(*_: object) -> set[str]:
            raise StoreError("the disk is full")

        network.have(topic("a", extra=SIGNED))
        monkeypatch.setattr(FeedStore, "publish", full_disk)
        assert [others(row) for row in the_topics(await engine.get_all_json())] == [SIGNED]
        assert [found.extra for found in (await engine.get_all()).topics] == [SIGNED]

    async def test_writes_carry_extras_to_the_source(
        self, engine: FeedEngine, network: Network
    ) -> None:
        """A topic or a comment that is written here reaches the network with its extras."""
        await engine.create_topic(Signed("a", "ann", "t", int(NOW), signature="s"))
        await engine.add_comment("a", comment("1", extra=SIGNED))
        assert network.topics["a"].extra == {"signature": "s", "hops": 0}
        assert network.talk["a"][0].extra == SIGNED
        assert [said.extra for said in (await engine.get_comments("a")).comments] == [SIGNED]

    def test_an_index_never_drops_the_extras_of_a_full_row(self, cache: FeedCache) -> None:
        """F9: extras of a full row stay; an index updates those it has, but never by null."""
        cache.put_topic(full("a", extra={"signature": "s", "likes": 1, "kept": 0}))
        index = topic("a", extra={"likes": 2, "signature": None, "new": None})
        cache.put_topics([index], "index:all:7")
        found = cache.get_topic("a")
        assert found is not None
        assert found.extra == {"signature": "s", "likes": 2, "kept": 0, "new": None}
        cache.put_topic(full("a", extra={"signature": None}))
        whole = cache.get_topic("a")
        assert whole is not None
        assert whole.extra == found.extra | {"signature": None}

    def test_a_comment_written_again_keeps_fields_of_others(
        self, cache: FeedCache, path: Path
    ) -> None:
        """What the new version names is replaced; what it does not is kept."""
        cache.put_comments("a", [comment("1", extra={"likes": 1, "pinned": True})])
        cache.put_comments("a", [comment("1", body="edited", extra={"likes": 2})])
        (row,) = stored_comments(path)
        assert (row["body"], others(row, Comment)) == ("edited", {"likes": 2, "pinned": True})

    async def test_an_extra_is_news(
        self, engine: FeedEngine, network: Network, heard: Heard, clock: ManualClock
    ) -> None:
        """A revalidation that brings nothing but another extra says that something changed."""
        for likes, changed in ((1, None), (1, False), (2, True)):
            network.have(topic("a", extra={"likes": likes, "by": ["x", {"n": 2**70}]}))
            await engine.get_all()
            if changed is not None:
                assert (await heard.wait())[-1].changed is changed
                heard.events.clear()
            clock.advance(301)

    def test_a_record_without_extras_is_its_named_fields(self) -> None:
        """Encoded by `msgspec` it is as it was; none given and an empty dict are the same."""
        plain = topic("a")
        assert set(msgspec.to_builtins(plain)) == NAMED[Topic]
        assert plain.extra == {}
        assert plain == topic("a", extra={})
        assert (plain != topic("a", extra={})) is False
        assert plain != topic("a", extra={"x": 1})
        signed = topic("a", extra={"x": 1})
        assert msgspec.structs.replace(signed, title="new").extra == {"x": 1}
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(signed), type=Topic) == signed


class TestF15Hostile:
    @pytest.mark.parametrize(
        ("extra", "reason"),
        [
            ({"author": "another"}, "author is a field of its own"),
            ({1: "x"}, "Expected `str`"),
            ({"x": {None: 1}}, "key"),
            ({"x": nested(DEEPEST + 1)}, f"{DEEPEST} levels"),
            ({"x": nested(50_000)}, "recursion|levels"),
            ({"x": "\ud800"}, "surrogate"),
            ({"x": object()}, "object"),
            ("text", "Expected `object`"),
        ],
    )
    def test_an_extra_that_no_row_can_hold_is_refused(
        self, cache: FeedCache, extra: Any, reason: str
    ) -> None:
        """A ConfigError names the record and the reason; nothing was stored."""
        with pytest.raises(ConfigError, match=reason) as caught:
            cache.put_topic(topic("a", extra=extra))
        assert len(str(caught.value)) < 600
        with pytest.raises(ConfigError, match=reason):
            cache.put_comments("a", [comment("1", extra=extra)])
        assert (cache.get_topic("a"), cache.get_comments("a")) == (None, None)

    def test_an_extra_named_like_a_field_of_the_subclass_is_refused(self, cache: FeedCache) -> None:
        """An extra with the name of its own field is refused, too."""
        with pytest.raises(ConfigError, match="signature is a field of its own"):
            cache.put_topic(Signed("a", "ann", "t", int(NOW), extra={"signature": "x"}))

    def test_extras_come_back_as_json_has_them(self, cache: FeedCache) -> None:
        """Tuples are lists, numbers that name fields are text, bytes are Base64."""
        extra: Any = {"x": (1, {2: b"abc"}), "nan": float("nan")}
        cache.put_topic(topic("a", extra=extra))
        found = cache.get_topic("a")
        assert found is not None
        assert found.extra == {"x": [1, {"2": "YWJj"}], "nan": None}
        assert found.extra == (cache.get_topics_all(7) or [])[0].extra

    @pytest.mark.parametrize(
        "value", ["1e400", "[" * 300 + "]" * 300], ids=["a number out of range", "too deep"]
    )
    def test_only_the_field_that_python_cannot_hold_is_lost(
        self, cache: FeedCache, path: Path, value: str
    ) -> None:
        """The rest of the row is read, and survives an index result."""
        uuid, text, *rest = row_of(full("a"), likes=1)
        text = f'{str(text)[:-1]}, "odd": {value}}}'
        sql(path, PUT_TOPIC, uuid, text, *rest)
        said = f'{json_of(comment("1"))[:-1]}, "odd": {value}}}'
        sql(path, PUT_COMMENTS, "a", f"[{said}]", 1, int(NOW))
        assert cache.get_topic("a") == full("a", extra={"likes": 1})
        assert [found.extra for found in cache.get_comments("a") or ()] == [{}]
        cache.put_topics([topic("a", title="new")], "index:all:7")
        assert cache.get_topic("a") == full("a", title="new", extra={"likes": 1})

    def test_a_long_value_is_carried_whole(self, cache: FeedCache) -> None:
        """A field of others has no limit of its own, as a body has none."""
        extra = {"blob": "x" * 3_000_000, "many": {str(number): number for number in range(10_000)}}
        cache.put_topic(topic("a", extra=extra))
        found = cache.get_topic("a")
        assert found is not None
        assert found.extra == extra


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner),
    max_leaves=8,
)  # fmt: skip
EXTRAS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5).filter(
        lambda name: name not in NAMED[Topic]
    ),
    JSON,
    max_size=4,
)


class TestF15Records:
    @given(st.lists(EXTRAS, max_size=5), st.randoms(use_true_random=False))
    def test_any_object_is_read_with_all_its_fields(
        self, extras: list[dict[str, Any]], dice: Any
    ) -> None:
        """One by one and as an array, whatever the order of the fields and of the records."""
        one, many = JsonRecords(Topic, strict=True), JsonRecords(Topic, strict=True)
        expected = [full(str(place), extra=extra) for place, extra in enumerate(extras)]
        rows = []
        for place, extra in enumerate(extras):
            fields = list((msgspec.to_builtins(full(str(place))) | extra).items())
            dice.shuffle(fields)
            rows.append(dict(fields))
        texts = [json.dumps(row).encode() for row in rows]
        assert [one.one(text) for text in texts] == expected
        for _ in range(2):
            assert many.all(json.dumps(rows).encode()) == expected


class TestF15Http:
    async def test_extras_are_carried_over_http(self, clock: ManualClock, path: Path) -> None:
        """Both ways: the fields stand side by side in every JSON object."""
        async with FeedServer() as server, HttpFeedSource(server.url) as source:
            server.put("a", NOW, body="text", **ODD)
            server.comments["a"] = [msgspec.to_builtins(comment("1")) | SIGNED]
            with FeedCache.open(path, clock=clock) as cache:
                async with FeedEngine(cache, source) as engine:
                    assert [found.extra for found in (await engine.get_all()).topics] == [ODD]
                    whole = (await engine.get_topic("a")).topic
                    assert whole is not None
                    assert whole.extra == ODD
                    (said,) = (await engine.get_comments("a")).comments
                    assert said.extra == SIGNED
                    await engine.create_topic(Signed("b", "ann", "t", int(NOW), signature="s"))
                    await engine.add_comment("b", comment("2", "b", extra=SIGNED))
            assert server.topics["b"]["signature"] == "s"
            assert others(server.comments["b"][0], Comment) == SIGNED
            assert others(server.topics["b"]) == {"signature": "s", "hops": 0}
