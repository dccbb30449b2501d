"""S2, S8, S11: answers that get lost, a real server that goes away, refuses and fails over."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from stillfresh import Cache, NotOpen, Origin, Policy, Resource, StoreError
from stillfresh.stores.contract import Ask, Copy, Failure, Held, Lease, Mark, Record, Store
from stillfresh.stores.postgres import create, describe, link
from stillfresh.stores.postgres.link import PgLink, connected_to
from stillfresh.stores.postgres.schema import VERSION
from stillfresh.stores.urls import store_for
from tests.kit.engine import until
from tests.kit.full_store import FullStore, full_store_for
from tests.kit.proxies.flaky import FlakyProxy, Loss
from tests.kit.servers.postgres import HOST, PostgresServer, postgres_serving
from tests.kit.servers.valkey import free_port

KIND = "price"
LOSSES: list[Loss] = ["replies", "requests"]
DEADLINE = 30.0


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[FullStore]:
    store = full_store_for(url, time.time)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_store()


def impatient(url: str) -> str:
    """For what is never answered: a machine that is busy answers within the other time-out."""
    return url.replace("timeout=30s", "timeout=700ms")


@pytest.fixture
async def proxy(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FlakyProxy]:
    async with FlakyProxy(HOST, postgres.port) as proxy:
        proxy.hurry(monkeypatch, "postgres.link")
        yield proxy


def schema_of(url: str) -> str:
    return url.partition("schema=")[2].partition("&")[0]


def name_of(url: str) -> str:
    return url.partition("//")[2].partition("@")[0]


def through(proxy: FlakyProxy, url: str) -> str:
    return re.sub(r":\d+/", f":{proxy.port}/", url)


@pytest.fixture
async def store(proxy: FlakyProxy, url: str) -> AsyncIterator[FullStore]:
    """Through the proxy."""
    async with opened(through(proxy, url)) as store:
        yield store


@pytest.fixture
async def other(url: str) -> AsyncIterator[FullStore]:
    """Another machine's, straight to the server."""
    async with opened(url) as store:
        yield store


async def lease_of(store: Store, id_: str = "a", *tags: str) -> Lease:
    record = (await store.read(KIND, [id_])).get(id_, Record())
    seen = record.copy.generation if record.copy is not None else None
    grant = (await store.acquire(KIND, [Ask(id_, seen, tags)], 30))[id_]
    assert isinstance(grant, Lease), grant
    return grant


def copy_by(lease: Lease, value: bytes = b"value") -> Copy:
    return Copy(lease.token, time.time(), Policy(60), value)


async def publishes(store: Store, lease: Lease, value: bytes = b"value") -> bool:
    copies = {lease.id: (lease, copy_by(lease, value))}
    return await store.publish(KIND, copies) == set()


async def copy_in(store: Store, id_: str = "a") -> Copy | None:
    return (await store.read(KIND, [id_])).get(id_, Record()).copy


async def mark_in(store: Store) -> Mark | None:
    copy = await copy_in(store)
    return None if copy is None else copy.mark


@pytest.mark.parametrize("loss", LOSSES)
class TestS2LostAnswer:
    """An answer that got lost is settled by asking again, never guessed."""

    async def test_every_step_whose_answer_was_lost_is_done_once(
        self, store: Store, other: Store, proxy: FlakyProxy, loss: Loss
    ) -> None:
        """A lease is known to be ours, a publication to be done; a failure is noted once."""
        proxy.lose(loss, to=b".acquire(", times=1)
        lease = await lease_of(store, "a", "eu")
        assert isinstance((await other.acquire(KIND, [Ask("a")], 30))["a"], Held)
        proxy.lose(loss, to=b".renew(", times=1)
        assert await store.renew(KIND, [lease], 30) == set()
        voided = await lease_of(store, "b")
        await other.invalidate(KIND, ["b"])
        proxy.lose(loss, to=b".publish(", times=1)
        copies = {it.id: (it, copy_by(it)) for it in (lease, voided)}
        assert await store.publish(KIND, copies) == {"b"}
        proxy.lose(loss, to=b".invalidate(", times=1)
        await store.invalidate(KIND, ["a"], soft=True)
        assert await mark_in(other) is Mark.SOFT
        proxy.lose(loss, to=b".invalidate_tag(", times=1)
        assert await store.invalidate_tag("eu") == [(KIND, "a")]
        assert await mark_in(other) is Mark.HARD
        failure = Failure(1, time.time() + 5, "TimeoutError")
        failed = await lease_of(store, "c")
        proxy.lose(loss, to=b".release(", times=1)
        await store.release(KIND, [failed], {"c": failure})
        proxy.lose(loss, to=b".delete(", times=1)
        await store.delete(KIND, ["a"])
        assert proxy.lost == 7
        assert await other.read(KIND, ["a", "c"]) == {"c": Record(None, None, failure)}

    async def test_an_outcome_that_cannot_be_known_is_an_error(
        self, store: Store, proxy: FlakyProxy, loss: Loss
    ) -> None:
        """Nothing is claimed: neither that it was done, nor that it was not."""
        lease = await lease_of(store)
        proxy.lose(loss, to=b"SELECT")
        with pytest.raises(StoreError, match="unavailable"):
            await store.publish(KIND, {"a": (lease, copy_by(lease))})
        with pytest.raises(StoreError, match="unavailable"):
            await store.invalidate(KIND, ["a"])


class TestS2Silence:
    async def test_a_silent_server_is_an_error_after_the_time_out(
        self, other: Store, proxy: FlakyProxy, url: str
    ) -> None:
        """What was done and not answered is asked again; what is never answered is an error."""
        async with opened(through(proxy, url)) as store:
            proxy.lose("silently", to=b".acquire(", times=1)
            lease = await lease_of(store)
            assert isinstance((await other.acquire(KIND, [Ask("a")], 30))["a"], Held)
            proxy.lose("silently", to=b".publish(", times=1)
            assert await publishes(store, lease)
            proxy.lose("silently")
            with pytest.raises(StoreError, match="unavailable"):
                await store.invalidate(KIND, ["a"])


class TestS8LateStatements:
    async def test_a_resent_acquire_never_revives_a_voided_lease(
        self, store: Store, other: Store, proxy: FlakyProxy, postgres: PostgresServer
    ) -> None:
        """The first is done after the invalidation, and grants a token that nobody has."""
        proxy.lose("late", to=b".acquire(", times=1)
        lease = await lease_of(store)
        (late,) = proxy.held
        for _ in range(2):
            await other.invalidate(KIND, ["a"])
            await postgres.deliver(late)
            assert not await publishes(store, lease)
            assert await store.renew(KIND, [lease], 30) == {"a"}
        assert await copy_in(other) is None

    async def test_a_statement_whose_client_left_goes_on(
        self, other: Store, postgres: PostgresServer, url: str
    ) -> None:
        """It waited for a lock, its client gave up; done at last, it undoes nothing."""
        lease = await lease_of(other)
        schema = schema_of(url)
        async with opened(impatient(url)) as store:
            with psycopg.connect(postgres.address) as holder:
                holder.execute(f"SELECT 1 FROM {schema}.entry FOR UPDATE".encode())
                with pytest.raises(StoreError, match="unavailable"):
                    await store.publish(KIND, {"a": (lease, copy_by(lease, b"late"))})
        deadline = time.monotonic() + DEADLINE
        while await copy_in(other) is None:  # it was sent twice: both waited
            assert time.monotonic() < deadline
        await other.invalidate(KIND, ["a"])
        assert await publishes(other, await lease_of(other), b"new")
        assert not await publishes(other, lease)

    async def test_a_publication_that_was_overwritten_is_not_taken_for_ours(
        self, other: Store, proxy: FlakyProxy, url: str
    ) -> None:
        """Its answer got lost and another published meanwhile: superseded, and theirs stands."""
        async with opened(through(proxy, url)) as store:
            lease = await lease_of(store)
            proxy.lose("silently", to=b".publish(", times=1, waits=True)
            publication = asyncio.create_task(publishes(store, lease))
            async with asyncio.timeout(DEADLINE):
                while await copy_in(other) is None:
                    await asyncio.sleep(0)
            assert await publishes(other, await lease_of(other), b"theirs")
            proxy.cut()
            assert not await publication
        copy = await copy_in(other)
        assert copy is not None
        assert copy.value == b"theirs"

    async def test_a_cancelled_step_leaves_nothing_for_the_next_one(
        self, store: Store, other: Store
    ) -> None:
        """An answer that nobody waited for is never taken for another's."""
        for id_ in "ab":
            assert await publishes(other, await lease_of(other, id_), id_.encode())
        for turns in range(12):
            read = asyncio.create_task(store.read(KIND, ["a"]))
            for _ in range(turns):
                await asyncio.sleep(0)
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)
            copy = await copy_in(store, "b")
            assert copy is not None
            assert copy.value == b"b"


class TestS11Connections:
    async def test_an_away_server_is_asked_now_and_then_only(
        self, proxy: FlakyProxy, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It swallows everything: one reader in a while waits for it, the others not at all."""
        async with opened(through(proxy, url)) as store:
            await store.read(KIND, ["a"])
            proxy.lose("silently")
            before = proxy.requests
            for _ in range(200):
                with pytest.raises(StoreError, match="is unavailable: Timeout"):
                    await store.read(KIND, ["a"])
            assert proxy.requests - before <= 5
            assert caplog.text.count("the PostgreSQL server is unavailable") == 1
            proxy.heal()
            await store.invalidate(KIND, ["a"])  # urgent: it does not wait for a pause to end
            assert await store.read(KIND, ["a"]) == {}
        assert "the PostgreSQL server answers again" in caplog.text

    async def test_broken_connections_are_all_left_at_once(
        self, store: Store, proxy: FlakyProxy
    ) -> None:
        """Ten that idled through a restart do not cost ten failures: not even one."""
        await asyncio.gather(*(store.read(KIND, ["a"]) for _ in range(10)))
        proxy.cut()
        assert await store.read(KIND, ["a"]) == {}

    async def test_prepared_statements_that_are_gone_are_prepared_no_more(
        self, postgres: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A pooler that hides itself leads to a connection without them: done all the same."""
        monkeypatch.setattr(link, "PREPARED_AFTER", 0)
        async with opened(f"{url}&max_connections=1") as store:
            await lease_of(store)
            prepared = "SELECT count(*) FROM pg_prepared_statements"
            assert (await store._opened().run(prepared))[0][0] > 1  # type: ignore[attr-defined]
            await store._opened().run("DO 'BEGIN DEALLOCATE ALL; END'")  # type: ignore[attr-defined]
            assert isinstance((await store.acquire(KIND, [Ask("a")], 30))["a"], Held)
            assert await store._opened().run(prepared) == [(0,)]  # type: ignore[attr-defined]

    async def test_connections_that_lose_their_statements_at_once_fail_no_step(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor does one that was in use when the first loss was noticed."""
        monkeypatch.setattr(link, "PREPARED_AFTER", 0)
        async with opened(url) as store:
            pg_link: PgLink = store._opened()  # type: ignore[attr-defined]
            for _ in range(2):
                await asyncio.gather(*(store.read(KIND, ["a"]) for _ in range(3)))
            connections = tuple(pg_link._idle)
            assert len(connections) == 3
            for connection in connections:
                await connection.socket.drive(connection.session.rows("DISCARD ALL"))
            in_use = pg_link._idle.pop()
            reads = [store.read(KIND, ["a"]) for _ in pg_link._idle]
            assert await asyncio.gather(*reads) == [{}, {}]
            await pg_link.drop_idle()
            pg_link._idle.append(in_use)
            assert await store.read(KIND, ["a"]) == {}

    async def test_no_more_connections_than_allowed(
        self, postgres: PostgresServer, url: str
    ) -> None:
        """The others wait for a place; not for ever, if those who have one wait as well."""
        schema = schema_of(url)
        limits = f"&max_connections=2&application_name={schema}"
        async with opened(url + limits) as store:
            await asyncio.gather(*(store.read(KIND, [str(it)]) for it in range(50)))
            asked = f"SELECT count(*) FROM pg_stat_activity WHERE application_name='{schema}'"
            assert postgres.execute(asked) == [(2,)]
            lease = await lease_of(store)
        async with opened(impatient(url) + limits) as store:
            with psycopg.connect(postgres.address) as holder:
                holder.execute(f"SELECT 1 FROM {schema}.entry FOR UPDATE".encode())
                steps = [store.renew(KIND, [lease], 30) for _ in range(3)]
                ends = await asyncio.gather(*steps, return_exceptions=True)
            said = [str(end) for end in ends if isinstance(end, StoreError)]
            assert len(said) == 3
        full = PgLink([postgres.address], schema, most=1, timeout=0.01)
        async with full._permits:
            with pytest.raises(StoreError, match=r"all 1 connections .* busy for 0.01 s; raise"):
                await full.run("SELECT 1")

    async def test_a_long_answer_may_take_its_time_as_long_as_it_goes_on(
        self, other: Store, url: str, postgres: PostgresServer
    ) -> None:
        """The time-out is for the next of it: on a slow network a second, and no failure."""
        assert await publishes(other, await lease_of(other), bytes(200_000))
        ended = asyncio.Event()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while some := await reader.read(10_000):
                    writer.write(some)
                    await writer.drain()
                    await asyncio.sleep(0.05 if len(some) == 10_000 else 0)
            writer.close()

        async def serve(near: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
            far, server = await asyncio.open_connection(HOST, postgres.port)
            await asyncio.gather(relay(near, server), relay(far, client))
            ended.set()

        async with await asyncio.start_server(serve, HOST, 0) as slow:
            port = slow.sockets[0].getsockname()[1]
            async with opened(impatient(re.sub(r":\d+/", f":{port}/", url))) as store:
                began = time.monotonic()
                copy = await copy_in(store)
                assert time.monotonic() - began > 0.7
            await ended.wait()
        assert copy is not None
        assert copy.value == bytes(200_000)

    async def test_a_tag_reaches_what_is_made_of_an_entry_before_its_statement_is_committed(
        self, postgres: PostgresServer, url: str
    ) -> None:
        """E8, E37: others see the entry as it was, and the statement does not see their lease."""
        schema = schema_of(url)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        named = f"{url}&application_name={schema}"
        async with opened(named) as store, opened(url) as other:
            assert await publishes(other, await lease_of(other, "part", "eu"))
            with psycopg.connect(postgres.address) as holder:
                holder.execute(f"SELECT 1 FROM {schema}.entry FOR UPDATE".encode())
                invalidating = asyncio.create_task(store.invalidate_tag("eu"))
                asked = f"{waits} AND application_name = '{schema}'"
                await until(lambda: postgres.execute(asked) == [(1,)])
                part = await copy_in(other, "part")
                assert part is not None
                assert part.mark is Mark.NONE
                assert await publishes(other, await lease_of(other, "whole", "eu"))
            assert sorted(await invalidating) == [(KIND, "part"), (KIND, "whole")]
            whole = await copy_in(other, "whole")
            assert whole is not None
            assert whole.mark is Mark.HARD

    async def test_a_tag_of_thousands(self, postgres: PostgresServer, url: str) -> None:
        """In slices, none of which looks at more of the tag than its own part (E28)."""
        schema = schema_of(url)
        numbers = "convert_to(to_char(n, 'FM00000'), 'UTF8') FROM generate_series(1, 20000) n"
        postgres.execute(
            f"INSERT INTO {schema}.entry (kind, key, token, held_until)"
            f" SELECT 'price', {numbers.replace(' FROM', ', $$token$$, 2e9 FROM')}",
            f"INSERT INTO {schema}.tag (tag, kind, key, late)"
            f" SELECT 'eu', 'price', {numbers.replace(' FROM', ', n % 2 = 0 FROM')}",
            f"ANALYZE {schema}.entry, {schema}.tag",
        )
        async with opened(url) as store:
            reached = await store.invalidate_tag("eu")
        assert reached == [(KIND, f"{number:05}") for number in range(1, 20_001)]
        assert postgres.execute(f"SELECT count(*) FROM {schema}.tag") == [(0,)]

    def test_many_tags_take_few_locks(self, postgres: PostgresServer, url: str) -> None:
        """I26: a server has room for a few thousand locks, which all its clients share."""
        lock = f"{schema_of(url)}.lock_of(tag::text::bytea)"
        locks = f"SELECT count(DISTINCT {lock}) FROM generate_series(1, 2000) tag"
        assert postgres.execute(locks) == [(32,)]

    @pytest.mark.parametrize(
        "step", ["read('{}', 'k', ARRAY['9'::bytea])", "tagged('t', '', '', 5)"]
    )
    def test_no_plan_reads_what_is_merely_held(
        self, postgres: PostgresServer, url: str, step: str
    ) -> None:
        """E28: of a table that has grown since the server last looked at it, and guesses."""
        schema = schema_of(url)

        def grown(first: int, last: int) -> list[str]:
            ids = f"SELECT 'k'::bytea, it::text::bytea FROM generate_series({first}, {last}) it"
            tags = f"SELECT 't', kind, key FROM ({ids}) s (kind, key)"
            return [
                f"INSERT INTO {schema}.entry (kind, key) {ids}",
                f"INSERT INTO {schema}.tag {tags}",
            ]

        postgres.execute(*grown(1, 9), f"ANALYZE {schema}.entry", *grown(10, 3_000))
        read = f"""SELECT sum(idx_tup_fetch + seq_tup_read) FROM pg_stat_xact_user_tables
            WHERE schemaname = '{schema}'"""
        kept = "SET LOCAL plan_cache_mode = force_generic_plan"  # as after some calls
        ((rows,),) = postgres.execute("BEGIN", kept, f"SELECT * FROM {schema}.{step}", read)
        assert rows <= 50

    def test_no_step_is_compiled(self, postgres: PostgresServer, url: str) -> None:
        """E27: a server with LLVM would compile plans at each call: 25 ms for a lease, not 1 ms.

        Up to version 17 it does where a plan is forbidden and there is no other.
        """
        found = (
            "SELECT proname FROM pg_proc WHERE pronamespace = $1::regnamespace AND proconfig @> "
        )
        slow = f"{found} '{{enable_seqscan=off}}' AND NOT proconfig @> '{{jit=off}}'"
        assert postgres.execute(slow.replace("$1", f"'{schema_of(url)}'")) == [("read",)]
        read = f"EXPLAIN SELECT {schema_of(url)}.last_stamp()"
        assert "Scan" not in str(postgres.execute(read))

    async def test_the_host_that_answers_is_tried_first_by_all(
        self, postgres: PostgresServer
    ) -> None:
        """S11: also of several that connect at once, after the first host is lost."""
        at = f"host={HOST} user=postgres dbname=postgres port="
        hosts = [f"{at}{free_port()}", f"{at}{postgres.port}"]
        for connection in await asyncio.gather(*(connected_to(hosts, DEADLINE) for _ in "12")):
            await connection.close()
        assert hosts[0] == f"{at}{postgres.port}"

    async def test_a_closed_store_says_that_it_is_closed(self, url: str) -> None:
        async with opened(url) as store:
            pass
        with pytest.raises(NotOpen):
            await store.read(KIND, ["a"])


def role(server: PostgresServer, url: str, *settings: str) -> str:
    """The address for another role, with the rights that the docs name."""
    page = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
    grants = re.findall(r"GRANT .*? TO app;", page)
    assert len(grants) == 3
    schema = schema_of(url)
    name = f"role_{uuid4().hex}"
    rights = [
        grant.replace("SCHEMA stillfresh", f"SCHEMA {schema}").replace("app", name)
        for grant in grants
    ]
    server.execute(f"CREATE ROLE {name} LOGIN", *rights)
    for setting in settings:
        server.execute(f"ALTER ROLE {name} {setting}")
    return url.replace("postgres@", f"{name}@")


class TestS11Refused:
    async def test_the_rights_that_the_docs_name_are_enough(
        self, postgres: PostgresServer, url: str
    ) -> None:
        """Every step; without them, the error names them, and it works when they are given."""
        app = role(postgres, url)
        async with opened(app) as store:
            lease = await lease_of(store, "a", "eu")
            assert await store.renew(KIND, [lease], 30) == set()
            assert await publishes(store, lease)
            await store.release(KIND, [await lease_of(store, "a", "eu")])
            assert await store.invalidate_tag("eu") == [(KIND, "a")]
            assert len(await store.entries()) == 1
            assert (await store.stats()).copies == 1
            assert await store.evict(time.time() + 1e6) == 1
            await store.delete(KIND, ["a"])
            schema, name = schema_of(app), name_of(app)
            postgres.execute(f"REVOKE UPDATE ON {schema}.entry FROM {name}")
            with pytest.raises(StoreError, match="lacks rights; docs"):
                await store.invalidate(KIND, ["a"])
            postgres.execute(f"GRANT UPDATE ON {schema}.entry TO {name}")
            await store.invalidate(KIND, ["a"])

    async def test_another_isolation_would_break_the_law(
        self, postgres: PostgresServer, url: str
    ) -> None:
        """A statement that waited for an invalidation would not see it: refused, with the remedy.

        A publication with the tag that is being invalidated would be stored as fresh.
        """
        app = role(postgres, url, "SET default_transaction_isolation = 'repeatable read'")
        with pytest.raises(StoreError, match=f"'repeatable read'; run ALTER ROLE {name_of(app)}"):
            await store_for(app, time.time).open()
        postgres.execute(f"ALTER ROLE {name_of(app)} RESET default_transaction_isolation")
        async with opened(app):
            pass

    async def test_a_refused_value_is_not_shown_in_the_error(self, url: str) -> None:
        """The server would show the row, with the value, to all who read the log."""
        async with opened(url) as store:
            lease = await lease_of(store)
            copy = Copy(lease.token, float("nan"), Policy(60), b"of one person")
            with pytest.raises(StoreError, match="CheckViolation") as caught:
                await store.publish(KIND, {"a": (lease, copy)})
        assert b"of one person".hex() not in str(caught.value)
        assert lease.token not in str(caught.value)

    async def test_a_limit_of_connections(self, postgres: PostgresServer, url: str) -> None:
        """It counts as an unavailable server; when a connection is free, it works again."""
        app = role(postgres, url, "CONNECTION LIMIT 1")
        async with opened(app) as store:
            await store.read(KIND, ["a"])
            async with opened(app) as second:
                with pytest.raises(StoreError, match="limit of connections is reached; lower"):
                    await second.invalidate(KIND, ["a"])
                await store.close()
                asked = f"SELECT count(*) FROM pg_stat_activity WHERE usename='{name_of(app)}'"
                await until(lambda: postgres.execute(asked) == [(0,)])
                await second.invalidate(KIND, ["a"])

    async def test_a_statement_time_out(
        self, postgres: PostgresServer, other: Store, url: str
    ) -> None:
        """The server ends what takes too long: said, undone, and no reason not to ask again."""
        app = role(postgres, url, "SET statement_timeout = '1s'")
        schema = schema_of(url)
        lease = await lease_of(other)
        async with opened(app) as store:
            with psycopg.connect(postgres.address) as holder:
                holder.execute(f"SELECT 1 FROM {schema}.entry FOR UPDATE".encode())
                with pytest.raises(StoreError, match="statement_timeout of the role") as caught:
                    await publishes(store, lease)
            assert "SELECT" not in str(caught.value)
            assert await publishes(store, lease)

    async def test_a_deadlock_is_repeated(self, postgres: PostgresServer, url: str) -> None:
        """The server undid our step in favour of another transaction: it is done after it."""
        schema = schema_of(url)
        row = f"SELECT 1 FROM {schema}.entry WHERE key = %s FOR UPDATE".encode()
        app = role(postgres, url, "SET deadlock_timeout = '500ms'")
        async with (
            opened(app) as store,
            await psycopg.AsyncConnection.connect(postgres.address) as one,
        ):
            await lease_of(store, "a")
            await lease_of(store, "b")
            await one.execute(row, (b"b",))
            step = asyncio.create_task(store.invalidate(KIND, ["a", "b"]))
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            await one.execute("SET LOCAL deadlock_timeout = '30s'")
            await until(lambda: postgres.execute(waiting) == [(1,)])
            await one.execute(row, (b"a",))  # waits until the server has undone our step
            await one.rollback()
            await step
            assert await store.read(KIND, ["a", "b"]) == {}

    async def test_a_read_only_server(self, postgres: PostgresServer, url: str) -> None:
        """Reads go on; a change says what to do, and works when it is let."""
        app = role(postgres, url, "SET default_transaction_read_only = on")
        name = name_of(app)
        async with opened(app) as store:
            assert await store.read(KIND, ["a"]) == {}
            with pytest.raises(StoreError, match=r"read-only.*target_session_attrs=read-write"):
                await store.invalidate(KIND, ["a"])
            postgres.execute(f"ALTER ROLE {name} SET default_transaction_read_only = off")
            await store.invalidate(KIND, ["a"])

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ("postgres@", r'role "nobody.*" does not exist'),
            ("/postgres?", r'database "none.*" does not exist'),
        ],
    )
    async def test_a_door_that_stays_shut_is_told_at_once(
        self, url: str, wrong: str, says: str
    ) -> None:
        """Not when the first value is stored."""
        bad = url.replace(wrong, {"postgres@": "nobody_here@", "/postgres?": "/none?"}[wrong])
        with pytest.raises(StoreError, match=says):
            await store_for(bad, time.time).open()


class TestS11Schema:
    async def test_a_missing_schema_is_reported(self, postgres: PostgresServer, url: str) -> None:
        """At open, and while it runs; made again, it works again."""
        schema = schema_of(url)
        async with opened(url) as store:
            await store.invalidate(KIND, ["a"])
            postgres.execute(f"DROP SCHEMA {schema} CASCADE")
            with pytest.raises(StoreError, match=f"no schema {schema}; .*table create"):
                await store.invalidate(KIND, ["a"])
            with pytest.raises(StoreError, match="table create"):
                await store_for(url, time.time).open()
            await create(url)
            await store.invalidate(KIND, ["a"])

    async def test_an_emptied_schema_is_reported(self, postgres: PostgresServer, url: str) -> None:
        """By somebody who emptied all tables: an error of the store, that reads fall back from."""
        postgres.execute(f"TRUNCATE {schema_of(url)}.setting")
        with pytest.raises(StoreError, match=r"\.setting is empty; drop the schema and run"):
            await store_for(url, time.time).open()

    async def test_an_older_one_is_migrated_and_keeps_what_it_has(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As the next release would: who runs it names the command; the old one asks to update."""
        async with opened(url) as store:
            assert await publishes(store, await lease_of(store, "a", "eu"))
        with monkeypatch.context() as patch:
            for module in ("admin", "link"):
                patch.setattr(f"stillfresh.stores.postgres.{module}.VERSION", VERSION + 1)
            column = f"ALTER TABLE {schema_of(url)}.entry ADD COLUMN new text"
            patch.setattr("stillfresh.stores.postgres.admin.tables", lambda *_, **__: column)
            with pytest.raises(StoreError, match=f"version {VERSION}.*`stillfresh table create`"):
                await store_for(url, time.time).open()
            assert (await create(url)).version == VERSION + 1
            async with opened(url) as store:
                assert await store.invalidate_tag("eu") == [(KIND, "a")]
        with pytest.raises(StoreError, match=f"version {VERSION + 1}.*; update stillfresh"):
            await store_for(url, time.time).open()
        with pytest.raises(StoreError, match=f"version {VERSION + 1}.*newer.*; update stillfresh"):
            await create(url)

    async def test_making_it_again_changes_what_is_said(self, url: str) -> None:
        """Unlogged and logged again, by two at once: nothing is lost."""
        async with opened(url) as store:
            assert await publishes(store, await lease_of(store, "a", "eu"))
            await asyncio.gather(create(url, unlogged=True), create(url))
            assert (await describe(url)).is_unlogged
            await create(url, unlogged=False)
            assert await store.invalidate_tag("eu") == [(KIND, "a")]


def declared(cache: Cache, loads: list[str]) -> Resource[str, int]:
    @cache.batched(KIND, fresh_for=60, stale_for=60)
    async def prices(skus: list[str]) -> dict[str, int]:
        loads.extend(skus)
        return dict.fromkeys(skus, len(loads))

    return prices


@pytest.fixture(scope="module")
def mortal() -> Iterator[PostgresServer]:
    """A server that these tests may kill."""
    with postgres_serving("synchronous_commit=on") as server:
        yield server


class TestS11Away:
    async def test_the_cache_goes_on_without_it_and_comes_back_by_itself(
        self, mortal: PostgresServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Killed, then paused: loaders answer, an invalidation raises, `stats` says so."""
        loads: list[str] = []
        cache = Cache(mortal.new_store(timeout="2s"))
        prices = declared(cache, loads)
        async with cache:
            assert await prices("a") == 1
            for end, begin in ((mortal.stop, mortal.start), (mortal.pause, mortal.go_on)):
                await prices.refresh("a")
                before = len(loads)
                end()
                try:
                    began = time.monotonic()
                    asked = (prices.get(f"new-{before}-{it}") for it in range(20))
                    answers = await asyncio.gather(*asked)
                    assert time.monotonic() - began < 20  # one by one, 80
                    assert {it.origin for it in answers} == {Origin.LOADED}
                    with pytest.raises(StoreError, match="unavailable"):
                        await prices.invalidate("a")
                    assert (await cache.stats()).resources[KIND].store_errors > 0
                finally:
                    begin()
                assert len(loads) > before
                await prices.invalidate("a")
                assert (await prices.get("a")).origin is Origin.LOADED
                assert (await prices.get("a")).origin is not Origin.LOADED
        assert caplog.text.count("the PostgreSQL server answers again") >= 1

    async def test_a_store_opens_without_a_server(self, caplog: pytest.LogCaptureFixture) -> None:
        """It begins without one, and says so."""
        with caplog.at_level(logging.WARNING):
            async with opened(f"postgresql://postgres@{HOST}:{free_port()}/postgres") as store:
                assert "the PostgreSQL server is unavailable" in caplog.text
                with pytest.raises(StoreError, match="unavailable"):
                    await store.read(KIND, ["a"])

    async def test_a_standby_takes_over(self, mortal: PostgresServer) -> None:
        """Both hosts in the address: the one that takes writes is found, before and after.

        The standby had not heard of what was done last: a lease and a publication are lost, and so
        is an invalidation. Nothing that was leased there can publish.
        """
        url = mortal.new_store(timeout="5s")
        standby = PostgresServer()
        try:
            copying = ("--no-sync", "--checkpoint=fast", "--write-recovery-conf")
            standby.run(
                "pg_basebackup", f"--dbname={mortal.address}", "-D", str(standby.data), *copying
            )
            standby.start()
            both = url.replace(
                f"{HOST}:{mortal.port}", f"{HOST}:{standby.port},{HOST}:{mortal.port}"
            )
            async with opened(f"{both}&target_session_attrs=read-write") as store:
                assert await publishes(store, await lease_of(store))
                position = mortal.execute("SELECT pg_current_wal_lsn()")[0][0]
                replayed = f"SELECT pg_last_wal_replay_lsn() >= '{position}'"
                await until(lambda: standby.execute(replayed) == [(True,)])
                standby.execute("ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
                hears = "SELECT count(*) FROM pg_stat_wal_receiver"
                await until(lambda: standby.execute(hears) == [(0,)])
                await store.invalidate(KIND, ["a"])
                lease = await lease_of(store)
                mortal.stop()
                async with opened(url.replace(str(mortal.port), str(standby.port))) as straight:
                    with pytest.raises(StoreError, match="read-only"):
                        await straight.invalidate(KIND, ["a"])
                standby.execute("SELECT pg_promote()")
                published, deadline = None, time.monotonic() + DEADLINE
                while published is None:
                    assert time.monotonic() < deadline
                    with suppress(StoreError):
                        published = await publishes(store, lease)
                assert not published
                assert await mark_in(store) is Mark.NONE  # docs/stores.md: a failover
                assert await publishes(store, await lease_of(store))
        finally:
            standby.remove()
            mortal.start()
