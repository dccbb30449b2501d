"""T5: stored rows that were tampered with, in files: any column of any table, any byte.

Whatever stands there: a reader is given a right value, an older one or none, and is told of no
mistake of ours; it is never given another key's value; and what is loaded next is stored whole.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from stillfresh import Cache, Policy
from stillfresh.stores import running
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Lease,
    Put,
    PutOutcome,
    PutResult,
    Record,
    Store,
    When,
)
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.stores.versions import packed_version
from stillfresh.systems.coordinator import Database, TtlConfig, TtlController, TtlCoordinator
from stillfresh.systems.feed import FeedCache, FeedEngine, Topic
from stillfresh.testing import ManualClock
from tests.kit.coordinator import START, VIEWER, Nexus, post
from tests.kit.examples import examples
from tests.kit.feed import DAY, NOW, Network, comment, full

MODEST = settings(max_examples=examples(20), deadline=None)
VALUES = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([0, 1, -1, 2**62])
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.sampled_from(["[]", "{}", '{"topic_uuid": "b"}', "null", "[" * 2_000, '["x"]', "\0"])
)


def tables(file: Path) -> list[tuple[str, list[str]]]:
    """Every table, and its columns."""
    connection = apsw.Connection(str(file))
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    own = [str(name) for (name,) in names.fetchall() if not str(name).startswith("sqlite_")]
    found = [(name, columns(connection, name)) for name in own]
    connection.close()
    return found


def columns(connection: apsw.Connection, table: str) -> list[str]:
    return [str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")').fetchall()]


def tamper(file: Path, data: st.DataObject) -> None:
    """Up to three columns, in all rows or in one."""
    choices = [(table, column) for table, names in tables(file) for column in names]
    connection = apsw.Connection(str(file))
    for _ in range(data.draw(st.integers(1, 3))):
        table, column = data.draw(st.sampled_from(choices))
        one = f' WHERE "{column}" = (SELECT max("{column}") FROM "{table}")'
        where = data.draw(st.sampled_from(["", one]))
        with suppress(apsw.ConstraintError, apsw.MismatchError):
            value = data.draw(VALUES)
            connection.execute(f'UPDATE "{table}" SET "{column}" = ?{where}', (value,))
    connection.close()


def bitten(file: Path, data: st.DataObject) -> None:
    """Bytes behind the first page; with another header or schema it is another's file."""
    whole = bytearray(file.read_bytes())
    places = st.integers(4_096, len(whole) - 1)
    for place, byte in data.draw(st.dictionaries(places, st.integers(0, 255), max_size=20)).items():
        whole[place] = byte
    file.write_bytes(whole)


HOW = st.sampled_from([tamper, bitten])
How = Callable[[Path, st.DataObject], None]


class TestT5TamperedStore:
    @MODEST
    @given(st.data(), HOW)
    def test_each_key_of_a_tampered_sqlite_store_has_its_own_value_or_none(
        self, data: st.DataObject, how: How
    ) -> None:
        """Of whatever version; and after an invalidation the newest, which is stored."""
        with TemporaryDirectory() as folder:
            asyncio.run(self._used(Path(folder) / "store.db", lambda file: how(file, data)))

    @pytest.mark.parametrize(
        ("table", "column"),
        [
            ("thing", "id"),
            ("thing_ttl", "id"),
            ("thing_ttl", "generation"),
            ("thing_ttl", "error"),
            ("stillfresh_tags", "id"),
        ],
    )
    async def test_text_that_is_not_utf8_counts_as_damage(
        self, tmp_path: Path, table: str, column: str
    ) -> None:
        """What SQLite itself takes for text, and cannot be."""

        def spoil(file: Path) -> None:
            connection = apsw.Connection(str(file))
            one = f'(SELECT max(id) FROM "{table}")'
            text = f'UPDATE "{table}" SET "{column}" = CAST(x\'80\' AS TEXT) WHERE id = {one}'
            connection.execute(text)
            connection.close()

        await self._used(tmp_path / "store.db", spoil)

    async def _used(self, file: Path, spoil: Callable[[Path], None]) -> None:
        clock, version = ManualClock(NOW), 1

        async def load(ids: list[str]) -> dict[str, tuple[str, int]]:
            return {id_: (id_, version) for id_ in ids if id_ != "none"}

        async def look() -> None:
            async with Cache(f"sqlite:///{file}", clock=clock) as cache:
                things = cache.batched("thing", fresh_for=60, tags=lambda _: ["all"])(load)
                for id_ in ("a", "b", "none"):
                    answer = await things.get(id_)
                    assert not answer.found or answer.value[0] == id_
                    await things.explain(id_)
                await cache.entries()
                await cache.stats()
                await cache.invalidate_tag("all", soft=True)

        await look()
        spoil(file)
        await look()
        version = 2
        async with Cache(f"sqlite:///{file}", clock=clock) as cache:
            things = cache.batched("thing", fresh_for=60, tags=lambda _: ["all"])(load)
            await things.invalidate("a", "b")
            assert (await things.get("a")).value == ("a", 2)
            assert (await things.get("b")).value == ("b", 2)


VERSION = packed_version(7)
DAMAGED = [5, 0.5, "text", "", b"", b"i1", b"x12345678", b"t\xff", b"i" + b"1" * 9]
"""What no version looks like. NULL is no version at all."""


class TestT5TamperedVersions:
    """E35: the columns of layout 2, and the counter of changes."""

    @pytest.mark.parametrize("damage", DAMAGED)
    @pytest.mark.parametrize("healed_by", ["load", "put", "plain put", "add"])
    async def test_a_damaged_version_is_a_miss_and_heals(
        self, tmp_path: Path, damage: object, healed_by: str
    ) -> None:
        """Alone and in a batch; a load without a version does not keep it."""
        file = tmp_path / "store.db"
        async with running(SqliteStore(file, clock=ManualClock(NOW))) as store:
            puts = {id_: new_put(store, VERSION) for id_ in "ab"}
            await store.put("thing", puts)
            alter(file, "UPDATE thing_ttl SET version = ? WHERE id = 'a'", damage)
            assert await store.read("thing", ["a"]) == {"a": Record()}
            known = {"a": puts["a"].copy.generation}
            assert await store.read("thing", ["a"], known) == {"a": Record()}
            found = await store.read("thing", ["a", "b"])
            assert found == {"a": Record(), "b": Record(puts["b"].copy)}
            assert [entry.record.copy is None for entry in await store.entries()] == [True, False]
            if healed_by == "load":
                lease = (await store.acquire("thing", [Ask("a")], 10))["a"]
                assert isinstance(lease, Lease)
                copy = Copy(lease.token, NOW, Policy(60), b"whole")
                assert await store.publish("thing", {"a": (lease, copy)}) == set()
            else:
                when = When.NO_LIVE_COPY if healed_by == "add" else When.ALWAYS
                version = b"" if healed_by == "plain put" else packed_version(1)
                put = new_put(store, version, when)
                result = (await store.put("thing", {"a": put}))["a"]
                assert result.outcome is PutOutcome.STORED
                copy = put.copy
            assert await store.read("thing", ["a"]) == {"a": Record(copy)}

    @pytest.mark.parametrize(
        "damage",
        [
            "DELETE FROM thing",
            "UPDATE thing SET value = 'text'",
            "UPDATE thing SET value = NULL",
            "UPDATE thing_ttl SET absent = 1",
            "UPDATE thing_ttl SET fresh_for = -1",
            "UPDATE thing_ttl SET mark = 'text'",
        ],
    )
    async def test_a_conditional_put_treats_a_damaged_copy_as_absent(
        self, tmp_path: Path, damage: str
    ) -> None:
        """A condition sees what a read sees: nothing to touch, and room to add."""
        file = tmp_path / "store.db"
        async with running(SqliteStore(file, clock=ManualClock(NOW))) as store:
            await store.put("thing", {"a": new_put(store, VERSION)})
            alter(file, damage)
            assert await store.read("thing", ["a"]) == {"a": Record()}
            touch = new_put(store, VERSION, When.LIVE_COPY)
            unread = replace(touch, copy=replace(touch.copy, value=UNREAD), when=When.ALWAYS)
            for put in (touch, unread):
                refused = (await store.put("thing", {"a": put}))["a"]
                assert refused == PutResult(PutOutcome.REFUSED)
            add = new_put(store, packed_version(1), When.NO_LIVE_COPY)
            assert (await store.put("thing", {"a": add}))["a"].outcome is PutOutcome.STORED
            assert await store.read("thing", ["a"]) == {"a": Record(add.copy)}

    @pytest.mark.parametrize("damage", [None, "text", 0.5, -1, 2**63 - 1, b"blob"])
    async def test_a_copy_with_a_damaged_position_is_read(
        self, tmp_path: Path, damage: object
    ) -> None:
        """The copy is read; its next change has a position again."""
        file = tmp_path / "store.db"
        async with running(SqliteStore(file, clock=ManualClock(NOW))) as store:
            put = new_put(store, VERSION)
            first = (await store.put("thing", {"a": put}))["a"].stamp
            alter(file, "UPDATE thing_ttl SET changed = ?", damage)
            assert await store.read("thing", ["a"]) == {"a": Record(put.copy)}
            second = (await store.put("thing", {"a": new_put(store, VERSION)}))["a"].stamp
            assert second == first + 1

    @pytest.mark.parametrize(
        "damage",
        [
            "UPDATE stillfresh_position SET number = 'text'",
            "UPDATE stillfresh_position SET number = x'00'",
            "UPDATE stillfresh_position SET number = 0.5",
            "UPDATE stillfresh_position SET number = -5",
            "UPDATE stillfresh_position SET number = 0",
            "UPDATE stillfresh_position SET number = 9223372036854775807",
            "DELETE FROM stillfresh_position",
            "DROP TABLE stillfresh_position",
        ],
    )
    async def test_a_damaged_counter_begins_again_at_a_greater_number(
        self, tmp_path: Path, damage: str
    ) -> None:
        """E37: no later change seems older; each step goes on."""
        file = tmp_path / "store.db"
        async with running(SqliteStore(file, clock=ManualClock(NOW))) as store:
            stamps = []
            for text in ("SELECT 1", damage, "SELECT 1"):
                alter(file, text)
                put = new_put(store, VERSION)
                stamps.append((await store.put("thing", {"a": put}))["a"].stamp)
                await store.invalidate("thing", ["a"])
            assert all(type(stamp) is int for stamp in stamps)
            assert stamps == sorted(set(stamps))


def alter(file: Path, text: str, *values: object) -> None:
    connection = apsw.Connection(str(file))
    connection.execute(text, values)
    connection.close()


def new_put(store: Store, version: bytes, when: When = When.ALWAYS) -> Put:
    copy = Copy(store.new_generation(), NOW, Policy(60), b"value", version=version)
    return Put(copy, when=when)


class TestT5TamperedFeed:
    @MODEST
    @given(st.data(), HOW)
    def test_each_topic_of_a_tampered_feed_is_itself_or_is_fetched(
        self, data: st.DataObject, how: How
    ) -> None:
        """Nothing that is no topic is listed; and what is written then is read."""
        with TemporaryDirectory() as folder:
            asyncio.run(self._used(Path(folder) / "feed.db", lambda file: how(file, data)))

    async def _used(self, file: Path, spoil: Callable[[Path], None]) -> None:
        clock, network = ManualClock(NOW), Network()
        network.have(full("a"), full("b", DAY))
        network.talk["a"] = [comment("c")]

        async def look() -> None:
            with FeedCache.open(file, clock=clock) as cache:
                async with FeedEngine(cache, network) as engine:
                    feed = (await engine.get_all()).topics
                    assert all(isinstance(it, Topic) for it in feed)
                    json.loads(await engine.get_all_json())
                    found = (await engine.get_topic("a")).topic
                    assert found is None or found.topic_uuid == "a"
                    talk = (await engine.get_comments("a")).comments
                    assert all(it.topic_uuid == "a" for it in talk)
                cache.stats()

        await look()
        spoil(file)
        await look()
        with FeedCache.open(file, clock=clock) as cache:
            cache.put_topic(full("a", title="new"))
            cache.put_comments("a", [comment("d")])
            assert (cache.get_topic("a") or full("b")).title == "new"
            assert [it.comment_uuid for it in cache.get_comments("a") or []] == ["d"]


class TestT5TamperedCoordinator:
    @MODEST
    @given(st.data(), HOW)
    def test_each_view_of_a_tampered_coordinator_is_its_own_or_is_fetched(
        self, data: st.DataObject, how: How
    ) -> None:
        """A view that cannot be read is none; a tick asks for it."""
        with TemporaryDirectory() as folder:
            asyncio.run(self._used(Path(folder) / "views.db", lambda file: how(file, data)))

    async def _used(self, file: Path, spoil: Callable[[Path], None]) -> None:
        clock, nexus = ManualClock(START), Nexus()

        async def look(version: int | None) -> None:
            controller = TtlController(nexus=nexus, database=Database(file), clock=clock)
            async with controller, TtlCoordinator(controller, TtlConfig()) as ttl:
                ttl.sign_in(VIEWER)
                ttl.set_visible(True)
                for id_ in ("a:1", "a:2"):
                    ttl.subscribe_post(composite_post_id=id_)
                await ttl.tick()
                for id_ in ("a:1", "a:2"):
                    view = await controller.get("post", id_)
                    assert version is None or view == post(id_, version)

        await look(1)
        spoil(file)
        for _ in range(3):  # a tick that meets a broken page has the file set aside
            await look(None)
            clock.advance("1h")
        nexus.version = 2
        clock.advance("400d")
        await look(2)
