"""T5: anything given to a feed engine, or said by its source: refused in a sentence, or it works.

What is refused has changed nothing in the file and was not told to upstream.
"""

import asyncio
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stillfresh.errors import ConfigError, LoadFailed
from stillfresh.systems.feed import Comment, FeedCache, FeedEngine, Topic
from stillfresh.testing import ManualClock
from tests.kit.examples import examples

MODEST = settings(max_examples=examples(15), deadline=None)
NOW = 1_700_000_000.0

ODD_TEXTS = st.sampled_from(["", "\0", "\ud800", "a" * 5_000, "t", "../..", "%"])
TEXTS = st.text(max_size=12) | ODD_TEXTS
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63) - 1, 10**400, int(NOW), 1, 7, 30, 31])
    | st.floats()
    | TEXTS
    | st.binary(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=3,
)


def sometimes(right: Any) -> st.SearchStrategy[Any]:
    """Mostly what it should be, or like it: else nothing gets far."""
    like = ODD_TEXTS if isinstance(right, str) else st.just(right)
    return st.just(right) | st.just(right) | st.just(right) | like | ANYTHING


TOPICS = st.builds(
    Topic,
    sometimes("new"),
    author=sometimes("ann"),
    title=sometimes("t"),
    created_at=sometimes(int(NOW)),
    body=sometimes("b"),
    category_id=sometimes("News"),
    tags=sometimes(["a"]),
    deleted=sometimes(right=False),
    deleted_at=sometimes(None),
    verified=sometimes(right=True),
    extra=sometimes({"signature": "s"}),
)
COMMENTS = st.builds(
    Comment,
    sometimes("c"),
    sometimes("old"),
    author=sometimes("ann"),
    created_at=sometimes(int(NOW)),
    body=sometimes("b"),
    parent_comment_uuid=sometimes(None),
    mentions=sometimes(["a"]),
    verified=sometimes(right=False),
    extra=sometimes({"signature": "s"}),
)


class Source:
    """Knows one topic; says what it is told to."""

    def __init__(self) -> None:
        self.old = Topic("old", author="bob", title="t", created_at=int(NOW), body="b")
        self.said: Any = None
        self.told: list[Any] = []

    async def day_index(self, _day: date, _category: str | None) -> Sequence[Topic]:
        return [self.old] if self.said is None else self.said

    async def topic(self, uuid: str) -> Topic | None:
        if self.said is not None:
            return self.said  # type: ignore[no-any-return]
        return self.old if uuid == "old" else None

    async def comments(self, _uuid: str) -> Sequence[Comment]:
        return [] if self.said is None else self.said

    async def create_topic(self, topic: Topic) -> None:
        self.told.append(topic)

    async def delete_topic(self, uuid: str) -> None:
        self.told.append(uuid)

    async def add_comment(self, topic_uuid: str, comment: Comment) -> None:
        self.told.append((topic_uuid, comment))


class World:
    def __init__(self, cache: FeedCache) -> None:
        self.cache = cache
        self.source = Source()
        self.engine = FeedEngine(cache, self.source)

    def rows(self) -> tuple[Any, ...]:
        found = self.cache.stats()
        return found.topics, found.comments, self.cache.get_topic("old")

    async def tried(self, call: Any, *given: Any) -> bool:
        """True: it worked. Who is refused has changed nothing, here or upstream."""
        before, told = self.rows(), len(self.source.told)
        try:
            await call(*given)
        except ConfigError as exc:
            said = str(exc)
        else:
            return True
        assert 0 < len(said) < 600, said
        assert "\n" not in said
        assert (self.rows(), len(self.source.told)) == (before, told)
        return False


async def lived(use: Any) -> None:
    """And then it works as before."""
    with TemporaryDirectory() as folder:
        clock = ManualClock(start=NOW)
        with FeedCache.open(Path(folder) / "feed.db", clock=clock) as cache:
            world = World(cache)
            async with world.engine as engine:
                assert (await engine.get_topic("old")).topic == world.source.old
                await use(world)
                world.source.said = None
                clock.advance(10_000)
                assert (await engine.get_topic("old")).topic == world.source.old
                last = Topic("last", author="a", title="t", created_at=int(NOW))
                await engine.create_topic(last)
                assert cache.get_topic("last") == last


class TestT5FeedEngine:
    @MODEST
    @given(ANYTHING, ANYTHING, st.booleans())
    def test_any_argument_of_a_feed_read_is_taken_or_refused(
        self, name: Any, days: Any, is_json: bool
    ) -> None:
        """Days, categories and uuids."""

        async def use(world: World) -> None:
            engine = world.engine
            lists = (engine.get_all_json, engine.get_category_json)
            whole, named = lists if is_json else (engine.get_all, engine.get_category)
            assert await world.tried(whole, days) == (type(days) is int)  # taken for 1 to 30
            await world.tried(named, name, days)
            for read in (engine.get_topic, engine.get_comments):
                await world.tried(read, name)
            await world.tried(self._heard, engine, name)

        asyncio.run(lived(use))

    async def _heard(self, engine: FeedEngine, uuid: Any) -> None:
        await engine.on_remote_comment(uuid)

    @MODEST
    @example(Topic("new", "ann", "\ud800", 1), Comment("c", "old", "ann", 1, "\ud800"), "old", "")
    @given(TOPICS | ANYTHING, COMMENTS | ANYTHING, sometimes("old"), ANYTHING)
    def test_any_topic_or_comment_is_written_whole_or_not_at_all(
        self, topic: Any, comment: Any, uuid: Any, gone: Any
    ) -> None:
        """What was written is read as it was, and was told to upstream so."""

        async def use(world: World) -> None:
            engine, source = world.engine, world.source
            if await world.tried(engine.create_topic, topic):
                assert world.cache.get_topic(topic.topic_uuid) == source.told[-1]
                assert source.told[-1].title == topic.title
            if await world.tried(engine.add_comment, uuid, comment):
                assert source.told[-1] == (uuid, comment)
            if gone != "old":
                await world.tried(engine.delete_topic, gone)

        asyncio.run(lived(use))

    @MODEST
    @given(
        TOPICS
        | st.lists(TOPICS | COMMENTS, max_size=2)
        | ANYTHING.filter(lambda it: it is not None)
    )
    def test_any_answer_of_the_feed_source_is_stored_or_fails(self, said: Any) -> None:
        """The topic of before stays, what is not there has failed in a sentence."""

        async def use(world: World) -> None:
            world.source.said = said
            for call in (world.engine.get_topic, world.engine.get_comments):
                await self._asked(call, "unknown")
            await self._asked(world.engine.get_all, 1)
            found = world.cache.get_topic("unknown")
            assert found is None or found.topic_uuid == "unknown"

        asyncio.run(lived(use))

    async def _asked(self, call: Any, what: Any) -> None:
        failed = ""
        try:
            await call(what)
        except LoadFailed as exc:
            failed = str(exc)
        assert len(failed) < 1_000
        assert "\n" not in failed
