"""S11, S13: a schema of version 1, as the last release with it made it, and its rows."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.errors import UndefinedFunction

from stillfresh import Policy, StoreError
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Failure,
    Held,
    Lease,
    Mark,
    Put,
    PutOutcome,
    Record,
)
from stillfresh.stores.postgres import create, describe
from stillfresh.stores.postgres.schema import VERSION, key_of, name_of
from stillfresh.stores.urls import store_for
from stillfresh.stores.versions import packed_version
from tests.kit.full_store import FullStore, full_store_for
from tests.kit.servers.postgres import PostgresServer

OLD_RELEASE = Path(__file__).parents[1] / "kit" / "servers" / "postgres_version_1.sql"
KIND = "price"
LONG = "long " * 200
POLICY = Policy(30, 60, 90)


class OldProcess:
    """A process of the release with version 1: it calls the functions of that release."""

    def __init__(self, connection: psycopg.Connection[tuple[object, ...]], schema: str) -> None:
        self._connection = connection
        self._schema = schema

    def _ask(self, call: str, *given: object) -> list[tuple[object, ...]]:
        statement = f"SELECT * FROM {self._schema}.{call}"
        return self._connection.execute(statement.encode(), given).fetchall()

    def acquire(self, id_: str, *tags: bytes) -> object:
        name = name_of(id_)
        key = key_of(name)
        rows = self._ask(
            "acquire('price', ARRAY[%s::bytea], ARRAY[%s::bytea], ARRAY[NULL], ARRAY[NULL::int8],"
            " ARRAY[false], %s::bytea[], %s::bytea[], 'fedcba9876543210', 30, NULL)",
            key, None if key == name else name, list(tags), [key] * len(tags),
        )  # fmt: skip
        assert rows[0][0] == "lease"
        return rows[0][1]

    def publish(self, id_: str, token: object, fetched_at: float, value: bytes | None) -> None:
        rows = self._ask(
            "publish('price', ARRAY[%s::bytea], ARRAY[%s], ARRAY[%s], ARRAY[%s::float8],"
            " ARRAY[30::float8], ARRAY[60::float8], ARRAY[90::float8], ARRAY[0::int2],"
            " ARRAY[%s::bytea], ARRAY[0::int8], ARRAY[true], ARRAY['late'::bytea],"
            " ARRAY[%s::bytea], false, NULL)",
            key_of(name_of(id_)), token, token, fetched_at, value, key_of(name_of(id_)),
        )  # fmt: skip
        assert len(rows) == 1

    def read(self, id_: str) -> object:
        ((*_, value),) = self._ask("read('price', ARRAY[%s::bytea], '{}')", name_of(id_))
        return value

    def fail(self, id_: str, token: object, retry_at: float) -> None:
        self._ask(
            "release('price', ARRAY[%s::bytea], ARRAY[%s], ARRAY[2::int8], ARRAY[%s::float8],"
            " ARRAY['no'::bytea])",
            key_of(name_of(id_)), token, retry_at,
        )  # fmt: skip

    def invalidate(self, id_: str, mark: Mark) -> None:
        self._ask(
            "invalidate(ARRAY['price'::bytea], ARRAY[%s::bytea], ARRAY[NULL::bytea], %s::int2)",
            name_of(id_), int(mark),
        )  # fmt: skip


class OldStore:
    """A schema of version 1, with rows of every sort."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.schema = f"test_{uuid4().hex}"
        self.url = f"{server.address}?schema={self.schema}&timeout=30s"
        script = OLD_RELEASE.read_text().replace("old_release", self.schema)
        server.execute(f"CREATE SCHEMA {self.schema}", script)
        self.now = time.time()
        self.connection = psycopg.connect(server.address, autocommit=True)
        process = OldProcess(self.connection, self.schema)
        values = {"a": b"value", "absent": None, "empty": b"", LONG: b"x" * 50_000, "soft": b"old"}
        self.tokens = {id_: process.acquire(id_, b"eu") for id_ in (*values, "failed", "held")}
        for id_, value in values.items():
            process.publish(id_, self.tokens[id_], self.now, value)
        assert process.read("a") == b"value"
        process.invalidate("soft", Mark.SOFT)
        process.fail("failed", self.tokens["failed"], self.now + 60)
        self.process = process
        self.copies = {
            id_: Copy(
                str(self.tokens[id_]),
                self.now,
                POLICY,
                value,
                Mark.SOFT if id_ == "soft" else Mark.NONE,
            )
            for id_, value in values.items()
        }


@pytest.fixture
def old(postgres: PostgresServer) -> Iterator[OldStore]:
    store = OldStore(postgres)
    yield store
    store.connection.close()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[FullStore]:
    store = full_store_for(url, time.time)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


class TestS11FromVersion1:
    async def test_a_new_release_says_what_to_run(self, old: OldStore) -> None:
        """It does not change the tables by itself: the role of an application may not."""
        expected = f"has version 1, and this release .* needs {VERSION}; run `stillfresh table"
        with pytest.raises(StoreError, match=expected):
            await store_for(old.url, time.time).open()
        state = await describe(old.url)
        assert state.version == 1

    @pytest.mark.parametrize("unlogged", [None, True])
    async def test_entries_of_an_old_schema_are_served(
        self, old: OldStore, unlogged: bool | None
    ) -> None:
        """Copies, marks, leases, failures, tags of keys and of values, long ids."""
        state = await create(old.url, unlogged=unlogged)
        assert (state.version, state.is_unlogged, state.pushes) == (VERSION, bool(unlogged), True)
        async with opened(old.url) as store:
            records = await store.read(KIND, [*old.copies, "failed", "held"])
            assert records["failed"] == Record(failure=Failure(2, old.now + 60, "no"))
            held_until = records["held"].held_until
            assert held_until is not None
            assert isinstance((await store.acquire(KIND, [Ask("held")], 30))["held"], Held)
            assert {id_: records[id_].copy for id_ in old.copies} == old.copies
            assert len(await store.entries()) == len(old.copies) + 2
            tagged = {(KIND, id_) for id_ in old.copies}
            assert set(await store.invalidate_tag("late", soft=True)) == tagged
            reached = await store.invalidate_tag("eu", soft=True)
            assert tagged | {(KIND, "failed"), (KIND, "held")} == set(reached)

    async def test_an_old_schema_takes_puts_loads_and_deletions(self, old: OldStore) -> None:
        """S13: with versions; what was there has none."""
        await create(old.url)
        async with opened(old.url) as store:
            copy = Copy(
                store.new_generation(), time.time(), POLICY, b"put", version=packed_version(7)
            )
            assert (await store.put(KIND, {"a": Put(copy)}))["a"].outcome is PutOutcome.STORED
            assert (await store.read(KIND, ["a"]))["a"].copy == copy
            grant = (await store.acquire(KIND, [Ask("empty", str(old.tokens["empty"]))], 30))[
                "empty"
            ]
            assert isinstance(grant, Lease)
            loaded = Copy(grant.token, time.time(), POLICY, b"loaded")
            assert await store.publish(KIND, {"empty": (grant, loaded)}) == set()
            await store.delete(KIND, ["absent", LONG])
            assert set(await store.read(KIND, [*old.copies])) == {"a", "empty", "soft"}

    async def test_a_process_of_the_old_release_changes_nothing_more(self, old: OldStore) -> None:
        """Its connections are open still: every step fails, and it loads without the store."""
        await create(old.url)
        async with opened(old.url) as store:
            before = await store.read(KIND, [*old.copies, "held"])
            with pytest.raises(UndefinedFunction):
                old.process.publish("held", old.tokens["held"], old.now, b"by the old release")
            with pytest.raises(UndefinedFunction):
                old.process.invalidate("a", Mark.HARD)
            with pytest.raises(UndefinedFunction):
                old.process.acquire("new")
            with pytest.raises(UndefinedFunction):
                old.process.read("a")
            assert await store.read(KIND, [*old.copies, "held", "new"]) == before

    async def test_a_second_time_changes_nothing(self, old: OldStore) -> None:
        """Stamps go on, and the life is the same."""
        await create(old.url)
        number = f"SELECT number, {old.schema}.last_stamp() FROM {old.schema}.life"
        async with opened(old.url) as store:
            await store.delete(KIND, ["a"])
            before = old.server.execute(number)
            await create(old.url)
            assert old.server.execute(number) == before
            await store.delete(KIND, ["a"])

    async def test_rows_that_were_damaged_do_not_stop_it(self, old: OldStore) -> None:
        """S15: they are misses, as before the update or after it."""
        old.server.execute(f"UPDATE {old.schema}.entry SET fresh_for = 'NaN' WHERE key = 'a'")
        await create(old.url)
        async with opened(old.url) as store:
            assert set(await store.read(KIND, ["a", "empty"])) == {"empty"}
