"""S15: rows of a PostgreSQL store that somebody has damaged: they are misses, and heal."""

import time
from collections.abc import AsyncIterator

import pytest
from psycopg.errors import CheckViolation

from stillfresh import Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Put, PutOutcome, Store
from tests.kit.full_store import PushingStore, pushing_store_for
from tests.kit.servers.postgres import PostgresServer

KIND = "price"
DURATIONS = ["fresh_for", "stale_for", "error_for"]
IMPOSSIBLE = ["NaN", "Infinity", "-Infinity", "-1"]


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_store()


@pytest.fixture
async def store(url: str) -> AsyncIterator[PushingStore]:
    """A store with the copies of three ids."""
    store = pushing_store_for(url, time.time)
    await store.open()
    for id_ in "abc":
        await load(store, id_)
    yield store
    await store.close()


async def leased(store: Store, id_: str, seen: str | None = None) -> Lease:
    grant = (await store.acquire(KIND, [Ask(id_, seen, ("eu",))], 30))[id_]
    assert isinstance(grant, Lease), grant
    return grant


async def load(store: Store, id_: str, value: bytes = b"loaded") -> None:
    lease = await leased(store, id_)
    copy = Copy(lease.token, time.time(), Policy(60, 60, 60), value)
    assert await store.publish(KIND, {id_: (lease, copy)}) == set()


def damage(postgres: PostgresServer, url: str, change: str, where: str = "key = 'a'") -> None:
    schema = url.partition("schema=")[2].partition("&")[0]
    postgres.execute(f"UPDATE {schema}.entry SET {change} WHERE {where}")


async def values_in(store: Store, *ids: str) -> dict[str, object]:
    records = await store.read(KIND, ids)
    return {id_: it.copy.value for id_, it in records.items() if it.copy is not None}


@pytest.mark.parametrize("impossible", IMPOSSIBLE)
@pytest.mark.parametrize("column", DURATIONS)
class TestS15ImpossibleDurations:
    async def test_a_row_with_impossible_durations_is_a_miss_and_heals(
        self, store: PushingStore, url: str, postgres: PostgresServer, column: str, impossible: str
    ) -> None:
        """Alone and in a batch: the others are read, and the next load is stored."""
        damage(postgres, url, f"{column} = '{impossible}'")
        assert await store.read(KIND, ["a"]) == {}
        assert await values_in(store, *"abc") == {"b": b"loaded", "c": b"loaded"}
        await load(store, "a", b"healed")
        assert await values_in(store, *"ab") == {"a": b"healed", "b": b"loaded"}

    async def test_a_row_with_impossible_durations_is_not_listed_and_is_evicted(
        self, store: PushingStore, url: str, postgres: PostgresServer, column: str, impossible: str
    ) -> None:
        """And does not keep others from being listed, counted and evicted."""
        damage(postgres, url, f"{column} = '{impossible}'", "key < 'c'")
        assert [entry.id for entry in await store.entries(limit=1)] == ["c"]
        assert [entry.id for entry in await store.entries(KIND)] == ["c"]
        assert (await store.stats()).copies == 1
        assert await store.evict(time.time()) == 2
        assert await values_in(store, *"abc") == {"c": b"loaded"}

    async def test_a_tag_and_a_deletion_reach_it(
        self, store: PushingStore, url: str, postgres: PostgresServer, column: str, impossible: str
    ) -> None:
        """They do not fail, and nothing comes back by them."""
        damage(postgres, url, f"{column} = '{impossible}'")
        await store.invalidate(KIND, ["a", "b"], soft=True)
        assert {(KIND, "b"), (KIND, "c")} <= set(await store.invalidate_tag("eu"))
        await store.delete(KIND, ["a", "b"])
        assert set(await store.read(KIND, [*"abc"])) == {"c"}


class TestS15DamagedFields:
    async def test_an_error_that_is_no_text_fails_nobody(
        self, store: PushingStore, url: str, postgres: PostgresServer
    ) -> None:
        """It is shown as well as it can be."""
        failure = r"failures = 1, retry_at = 5, error = '\xff6e6f'"
        damage(postgres, url, failure)
        records = await store.read(KIND, ["a", "b"])
        assert records["a"].failure is not None
        assert records["a"].failure.error == "\ufffdno"
        assert records["b"].failure is None

    async def test_an_id_that_is_no_text_is_not_listed(
        self, store: PushingStore, url: str, postgres: PostgresServer
    ) -> None:
        """Nor named by a tag; the others are."""
        damage(postgres, url, r"key = '\x61ff'")
        schema = url.partition("schema=")[2].partition("&")[0]
        postgres.execute(rf"UPDATE {schema}.tag SET key = '\x61ff' WHERE key = 'a'")
        assert [entry.id for entry in await store.entries(limit=2)] == ["b", "c"]
        assert set(await store.invalidate_tag("eu")) == {(KIND, "b"), (KIND, "c")}

    @pytest.mark.parametrize("name", ["", "b", r"\xff"])
    async def test_a_whole_name_counts_beside_a_long_key_only(
        self, store: PushingStore, url: str, postgres: PostgresServer, name: str
    ) -> None:
        """A short key is the name. Listings, tags and notifications say the right one."""
        told = list[tuple[str, str]]()
        async with store.listen(lambda kind, id_, _: told.append((kind, id_))) as channel:
            await channel.beat()
            damage(postgres, url, f"id = '{name}'")
            assert [entry.id for entry in await store.entries(search="a")] == ["a"]
            assert (KIND, "a") in await store.invalidate_tag("eu", soft=True)
            damage(postgres, url, f"id = '{name}'")
            await store.invalidate(KIND, ["a"], soft=True)
            await store.delete(KIND, ["a"])
            damage(postgres, url, f"id = '{name}'")
            await load(store, "a")
            await channel.beat()
        # Twice by the tag, which is gone round twice, and once by each other step.
        assert [id_ for kind, id_ in told if kind == KIND].count("a") == 5

    async def test_a_long_name_that_was_damaged_is_written_again(
        self, store: PushingStore, url: str, postgres: PostgresServer
    ) -> None:
        """Until then it is not listed."""
        long = "long " * 200
        await load(store, long)
        damage(postgres, url, "id = 'other'", "id IS NOT NULL")
        assert [entry.id for entry in await store.entries()] == [*"abc"]
        assert set(await store.read(KIND, [long])) == {long}
        await put(store, long, b"put", "eu")
        assert [entry.id for entry in await store.entries()] == [*"abc", long]
        assert (KIND, long) in await store.invalidate_tag("eu")

    async def test_times_without_end_are_evicted_by_nobody(
        self, store: PushingStore, url: str, postgres: PostgresServer
    ) -> None:
        """Their sum is more than a number can be: that is no error."""
        endless = "fresh_for = 1.7e308, stale_for = 1.7e308, fetched_at = 1.7e308"
        damage(postgres, url, endless)
        assert await store.evict(time.time() + 1_000) == 2
        assert (await store.read(KIND, ["a"])).keys() == {"a"}


class TestS15DamagedFence:
    @pytest.mark.parametrize("stamp", [2**63 - 1, -(2**63), -1])
    async def test_a_stamp_that_was_never_given_out_stops_nothing(
        self, store: PushingStore, url: str, postgres: PostgresServer, stamp: int
    ) -> None:
        """S13: puts, invalidations, tags and deletions are done; so are those of other ids."""
        damage(postgres, url, f"changed = {stamp}")
        assert len(await store.read(KIND, [*"abc"])) == 3
        await put(store, "a", b"put")
        assert await values_in(store, "a") == {"a": b"put"}
        for change in (
            lambda: store.invalidate(KIND, ["a"]),
            lambda: store.invalidate_tag("eu"),
            lambda: store.delete(KIND, ["a"]),
        ):
            damage(postgres, url, f"changed = {stamp}")
            await change()
        assert set(await store.read(KIND, [*"abc"])) == {"b", "c"}
        await put(store, "b", b"put")

    @pytest.mark.parametrize("moment", ["NaN", "Infinity", "-Infinity", "1e308"])
    async def test_a_time_of_a_change_that_cannot_be_is_no_reason_to_stay(
        self, store: PushingStore, url: str, postgres: PostgresServer, moment: str
    ) -> None:
        """S13: the empty row that it keeps goes as others do."""
        await store.delete(KIND, [*"abc"])
        damage(postgres, url, f"changed_at = '{moment}'", "true")
        await store.evict(time.time())
        damage(postgres, url, "changed_at = changed_at - 61", "true")
        await store.evict(time.time())
        schema = url.partition("schema=")[2].partition("&")[0]
        assert postgres.execute(f"SELECT count(*) FROM {schema}.entry") == [(0,)]

    async def test_a_stamp_of_a_tag_that_was_never_given_out_stops_nothing(
        self, store: PushingStore, url: str, postgres: PostgresServer
    ) -> None:
        """I26: neither a put with the tag nor a load."""
        await store.invalidate_tag("eu")
        schema = url.partition("schema=")[2].partition("&")[0]
        postgres.execute(f"UPDATE {schema}.epoch SET epoch = {2**63 - 1}")
        await put(store, "a", b"put", "eu")
        lease = await leased(store, "new")
        copy = Copy(lease.token, time.time(), Policy(60), b"loaded")
        assert await store.publish(KIND, {"new": (lease, copy)}, {"new": ("eu",)}) == set()

    @pytest.mark.parametrize("sql", ["DELETE FROM {}.life", "SELECT setval('{}.stamps', 1)"])
    async def test_a_counter_that_was_set_back_costs_one_more_attempt(
        self, store: PushingStore, url: str, postgres: PostgresServer, sql: str
    ) -> None:
        """S13: what this process had heard is void."""
        await put(store, "a", b"before")
        postgres.execute(sql.format(url.partition("schema=")[2].partition("&")[0]))
        copy = Copy(store.new_generation(), time.time(), Policy(60), b"after")
        assert (await store.put(KIND, {"a": Put(copy)}))["a"].outcome is PutOutcome.AGAIN
        assert (await store.put(KIND, {"a": Put(copy)}))["a"].outcome is PutOutcome.STORED

    @pytest.mark.parametrize("form", [r"\x", r"\xff", r"\x69", r"\x6900"])
    def test_a_version_of_another_form_is_refused(
        self, url: str, postgres: PostgresServer, form: str
    ) -> None:
        """E35: it could be compared with no other."""
        schema = url.partition("schema=")[2].partition("&")[0]
        with pytest.raises(CheckViolation):
            postgres.execute(
                f"INSERT INTO {schema}.entry (kind, key, version) VALUES ('k', 'a', '{form}')"
            )


async def put(store: Store, id_: str, value: bytes, *tags: str) -> None:
    """At the second attempt at the latest."""
    copy = Copy(store.new_generation(), time.time(), Policy(60), value)
    result = (await store.put(KIND, {id_: Put(copy, tags)}))[id_]
    if result.outcome is PutOutcome.AGAIN:
        result = (await store.put(KIND, {id_: Put(copy, tags)}))[id_]
    assert result.outcome is PutOutcome.STORED
