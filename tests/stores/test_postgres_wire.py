"""S11, S14: what goes to a PostgreSQL server and comes back, and the short forms of steps."""

import asyncio
import socket
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.waiting import Wait

from stillfresh import Policy
from stillfresh.stores.contract import UNREAD, Ask, Copy, Lease, Put, PutOutcome, Record, When
from stillfresh.stores.postgres import PostgresStore, link
from stillfresh.stores.postgres.link import PgLink
from stillfresh.stores.postgres.session import MOST_PREPARED, LoopSocket, PgSession, Talk
from stillfresh.stores.postgres.wire import parameters_of
from stillfresh.stores.urls import store_for
from stillfresh.stores.versions import packed_version
from stillfresh.testing import ManualClock
from tests.kit.engine import turns
from tests.kit.servers.postgres import PostgresServer

KIND = "price"
LONG = "x" * 600

ROUND_TRIPS: list[tuple[str, Any]] = [
    ("bool", True),
    ("bool", False),
    ("int2", -3),
    ("int4", 70_000),
    ("int8", -(1 << 62)),
    ("oid", 5),
    ("float8", 0.1),
    ("float8", float("-inf")),
    ("float8", 1e-300),
    ("text", 'é \\ " {}'),
    ("text", ""),
    ("varchar", "a"),
    ("name", "a"),
    ("bytea", b"\x00\xff"),
    ("bytea", b""),
    ("bytea[]", [b"\x00", None, b""]),
    ("bytea[]", [None]),
    ("bytea[]", []),
    ("text[]", ["a,b", None, 'NULL"', ""]),
    ("text[]", [None, None]),
    ("text", None),
]


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_store()


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    store = store_for(url, time.time)
    assert isinstance(store, PostgresStore)
    await store.open()
    yield store
    await store.close()


def link_of(store: PostgresStore) -> PgLink:
    return store._opened()


def new_put(store: PostgresStore, value: bytes | None = b"put", **options: Any) -> Put:
    version = packed_version(options.pop("version", None))
    copy = Copy(store.new_generation(), time.time(), Policy(60), value, version=version)
    return Put(copy, **options)


class TestS11Wire:
    @pytest.mark.parametrize("prepared_after", [None, 0])
    async def test_every_type_comes_back_as_it_was_sent(
        self, url: str, monkeypatch: pytest.MonkeyPatch, prepared_after: int | None
    ) -> None:
        """Prepared or not; the server finds the types of parameters by itself."""
        monkeypatch.setattr(link, "PREPARED_AFTER", prepared_after)
        store = store_for(url, time.time)
        assert isinstance(store, PostgresStore)
        await store.open()
        for type_, value in ROUND_TRIPS:
            for _ in range(2):
                rows = await link_of(store).run(f"SELECT $1::{type_}, 1", (value,))
                assert rows == [(value, 1)], type_
        await store.close()

    @pytest.mark.parametrize("type_", ["int2", "int8", "float8", "bool"])
    async def test_arrays_of_numbers_arrive(self, store: PostgresStore, type_: str) -> None:
        """As the functions take them, with nulls."""
        values = [True, None, False] if type_ == "bool" else [1, None, 3]
        texts = "SELECT array_to_string($1::{type_}[], ',', 'none')".replace("{type_}", type_)
        ((text,),) = await link_of(store).run(texts, (values,))
        assert text == ("t,none,f" if type_ == "bool" else "1,none,3")

    async def test_a_type_that_no_step_returns_is_an_error(self, store: PostgresStore) -> None:
        """It is not taken for something else; the connection stays usable."""
        with pytest.raises(TypeError, match="type 1700 is no type that a step returns"):
            await link_of(store).run("SELECT 1.5::numeric")
        with pytest.raises(TypeError, match="dict is no type that a statement takes"):
            parameters_of([{}])
        assert await link_of(store).run("SELECT 1") == [(1,)]

    def test_a_connection_prepares_a_limited_number_of_statements(self) -> None:
        """Others run as they are; it remembers a limited number of texts, too."""
        session = PgSession(None)  # type: ignore[arg-type]
        assert not session._shall_prepare("SELECT 0")
        session.prepare_after = 1
        for number in range(2 * MOST_PREPARED):
            assert not session._shall_prepare(f"SELECT {number}")
        assert len(session._runs) == MOST_PREPARED
        assert session._shall_prepare("SELECT 0")
        session._names = {str(number): b"" for number in range(MOST_PREPARED)}
        assert not session._shall_prepare("SELECT 1")


class Statements:
    """Which statements a store has run."""

    def __init__(self, store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._texts: list[str] = []
        run = store._opened().run

        async def note(statement: str, *args: Any, **options: Any) -> list[Any]:
            self._texts.append(statement)
            return await run(statement, *args, **options)

        monkeypatch.setattr(store._opened(), "run", note)

    def take(self) -> list[str]:
        """`short` or `function` for each, since the last time."""
        kinds = ["short" if text.startswith("/*") else "function" for text in self._texts]
        self._texts.clear()
        return kinds


def note_waits(postgres: PostgresServer, schema: str) -> None:
    """From now on, note whether each change of an entry waits for the disk, in a table `waits`."""
    postgres.execute(
        f"""CREATE FUNCTION {schema}.noted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO {schema}.waits VALUES (current_setting('synchronous_commit'));
            RETURN NULL; END $$""",
        f"CREATE TABLE {schema}.waits (setting text)",
        f"""CREATE CONSTRAINT TRIGGER noted AFTER INSERT OR UPDATE ON {schema}.entry
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.noted()""",
    )


class TestS14ShortForms:
    async def test_a_plain_put_read_and_deletion_are_one_short_statement_each(
        self, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """New or not; a missing key too."""
        statements = Statements(store, monkeypatch)
        for _ in range(2):
            put = new_put(store)
            result = (await store.put(KIND, {"a": put}))["a"]
            assert result.outcome is PutOutcome.STORED
            assert result.stamp > 0
            assert (await store.read(KIND, ["a"]))["a"].copy == put.copy
            await store.delete(KIND, ["a"])
            assert await store.read(KIND, ["a"]) == {}
            await store.delete(KIND, ["none"])
        assert set(statements.take()) == {"short"}

    @pytest.mark.parametrize(
        "options",
        [{"tags": ("eu",)}, {"late": ("eu",)}, {"version": 3}, {"when": When.NO_LIVE_COPY}],
    )
    async def test_a_put_that_is_not_plain_is_done_by_the_function(
        self, store: PostgresStore, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
    ) -> None:
        """Tags need locks, versions and conditions a comparison."""
        statements = Statements(store, monkeypatch)
        result = (await store.put(KIND, {"a": new_put(store, **options)}))["a"]
        assert result.outcome is PutOutcome.STORED
        assert statements.take() == ["function"]

    async def test_a_plain_put_keeps_the_stored_version(
        self, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The short form finds one, does nothing, and the function does it."""
        await store.put(KIND, {"a": new_put(store, version=3)})
        statements = Statements(store, monkeypatch)
        result = (await store.put(KIND, {"a": new_put(store)}))["a"]
        assert (result.outcome, result.version) == (PutOutcome.STORED, packed_version(3))
        assert statements.take() == ["short", "function"]

    async def test_long_ids_and_many_ids_go_to_the_functions(
        self, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They find the same rows."""
        statements = Statements(store, monkeypatch)
        await store.put(KIND, {LONG: new_put(store)})
        await store.put(KIND, {"a": new_put(store), "b": new_put(store)})
        await store.delete(KIND, [LONG])
        await store.delete(KIND, ["a", "b"])
        assert set(statements.take()) == {"function"}
        assert await store.read(KIND, ["a", "b", LONG]) == {}

    async def test_behind_a_pooler_everything_goes_to_the_functions(
        self, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They have settings of their own; a pooled session may have any."""
        await store.read(KIND, ["a"])
        link_of(store).is_pooled = True
        statements = Statements(store, monkeypatch)
        await store.put(KIND, {"a": new_put(store)})
        await store.read(KIND, ["a"])
        await store.delete(KIND, ["a"])
        assert statements.take() == ["function"] * 3

    async def test_a_short_put_voids_the_lease_and_replaces_the_tags(
        self, store: PostgresStore, url: str, postgres: PostgresServer
    ) -> None:
        """As the function does: those of the key, of the value, or none."""
        schema = url.partition("schema=")[2].partition("&")[0]
        tags = f"SELECT convert_from(tag, 'UTF8') FROM {schema}.tag ORDER BY 1"
        await store.put(KIND, {"a": new_put(store, tags=("own",), late=("late",))})
        for options, left in (
            ({"tags": None}, [("late",), ("own",)]),
            ({"tags": None, "late": ()}, [("own",)]),
            ({"tags": ()}, []),
        ):
            seen = (await store.read(KIND, ["a"]))["a"].copy
            assert seen is not None
            ask = Ask("a", seen.generation, tuple(tag for (tag,) in left if tag == "own"))
            lease = (await store.acquire(KIND, [ask], 30))["a"]
            assert isinstance(lease, Lease)
            await store.put(KIND, {"a": new_put(store, **options)})
            assert postgres.execute(tags) == left
            copies = {"a": (lease, Copy(lease.token, time.time(), Policy(60), b"old"))}
            assert await store.publish(KIND, copies) == {"a"}
            assert (await store.read(KIND, ["a"]))["a"].held_until is None

    async def test_short_forms_announce_changes_as_the_functions_do(
        self, store: PostgresStore, url: str, postgres: PostgresServer
    ) -> None:
        """S10: a kind, an id and a generation; without one it is void."""
        schema = url.partition("schema=")[2].partition("&")[0]
        with psycopg.connect(postgres.address, autocommit=True) as listener:
            listener.execute(f'LISTEN "{schema}"'.encode())
            put = new_put(store)
            await store.put(KIND, {"é": put})
            await store.delete(KIND, ["é"])
            payloads = [notice.payload for notice in listener.notifies(stop_after=2, timeout=20)]
        lines = [payload.removeprefix("0.").split(" ") for payload in payloads]
        names = [[b64decode(part).decode() for part in line[:2]] for line in lines]
        assert names == [[KIND, "é"]] * 2
        assert [line[2:] for line in lines] == [[put.copy.generation], []]

    @pytest.mark.parametrize("heard", ["another life", "a stamp that was never given out"])
    async def test_a_short_form_does_nothing_by_a_stamp_that_does_not_count(
        self, store: PostgresStore, heard: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S8, S13: it may come from before a crash. The function says what counts now."""
        put = new_put(store)
        await store.put(KIND, {"a": put})
        last_heard = link_of(store).heard
        statements = Statements(store, monkeypatch)

        def mishear() -> None:
            if heard == "another life":
                last_heard.life = 0
            else:
                last_heard.hear_stamp(2**62)

        mishear()
        assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is PutOutcome.AGAIN
        assert (await store.read(KIND, ["a"]))["a"].copy == put.copy
        assert statements.take() == ["short", "function", "short"]
        mishear()
        await store.delete(KIND, ["a"])
        assert await store.read(KIND, ["a"]) == {}
        # The short form left it alone, and so did the function, once.
        assert statements.take() == ["short", "function", "function", "short"]

    async def test_only_a_deletion_of_nothing_need_not_wait_for_the_disk(
        self, store: PostgresStore, url: str, postgres: PostgresServer
    ) -> None:
        """Its row is a fence, and a crash that loses it also ends the life it belongs to."""
        schema = url.partition("schema=")[2].partition("&")[0]
        note_waits(postgres, schema)
        await link_of(store).run("SELECT set_config('synchronous_commit', 'on', false)")
        waits = f"SELECT setting FROM {schema}.waits"
        for step, expected in (
            (store.delete(KIND, ["a"]), "off"),
            (store.delete(KIND, ["a"]), "off"),
            (store.put(KIND, {"a": new_put(store)}), "on"),
            (store.delete(KIND, ["a"]), "on"),
        ):
            await step
            assert postgres.execute(waits) == [(expected,)]
            postgres.execute(f"DELETE FROM {schema}.waits")

    async def test_a_lease_need_not_wait_for_the_disk_unless_it_takes_another_one_over(
        self, store: PostgresStore, url: str, postgres: PostgresServer
    ) -> None:
        """Lost in a crash, it costs a load; but the lease that it took over would live again."""
        schema = url.partition("schema=")[2].partition("&")[0]
        note_waits(postgres, schema)
        await link_of(store).run("SELECT set_config('synchronous_commit', 'on', false)")
        waits = f"SELECT DISTINCT setting FROM {schema}.waits"
        lease = (await store.acquire(KIND, [Ask("a")], 30))["a"]
        assert isinstance(lease, Lease)
        assert await store.renew(KIND, [lease], 30) == set()
        await store.release(KIND, [lease])
        assert postgres.execute(waits) == [("off",)]
        postgres.execute(f"DELETE FROM {schema}.waits")
        taken = (await store.acquire(KIND, [Ask("a", take_over=True)], 30))["a"]
        assert isinstance(taken, Lease)
        assert postgres.execute(waits) == [("on",)]
        postgres.execute(f"DELETE FROM {schema}.waits")
        copies = {"a": (taken, Copy(taken.token, time.time(), Policy(60), b"new"))}
        assert await store.publish(KIND, copies) == set()
        assert postgres.execute(waits) == [("on",)]

    async def test_a_value_that_is_known_is_not_sent(self, store: PostgresStore) -> None:
        """As in a read of many."""
        put = new_put(store, bytes(1000))
        await store.put(KIND, {"a": put})
        records = await store.read(KIND, ["a"], {"a": put.copy.generation})
        assert records["a"] == Record(
            Copy(put.copy.generation, put.copy.fetched_at, put.copy.policy, UNREAD)
        )


class TestS14LoopSocket:
    """Talks over the socket of a connection, here to a test instead of a server."""

    @pytest.fixture
    def near(self, ends: tuple[socket.socket, socket.socket]) -> socket.socket:
        return ends[0]

    @pytest.fixture
    def far(self, ends: tuple[socket.socket, socket.socket]) -> socket.socket:
        return ends[1]

    @pytest.fixture
    def ends(self) -> Iterator[tuple[socket.socket, socket.socket]]:
        near, far = socket.socketpair()
        near.settimeout(0)
        with near, far:
            yield near, far

    @staticmethod
    def asking(near: socket.socket, parts: int = 1) -> Talk[bytes]:
        """What a statement does: send, and read so many parts."""
        yield Wait.RW
        near.send(b"?")
        answer = b""
        for _ in range(parts):
            yield Wait.R
            answer += near.recv(100)
        return answer

    async def test_the_socket_stays_watched_between_two_statements(
        self, near: socket.socket, far: socket.socket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S14: to watch it anew for each takes two calls of the system."""
        loop = asyncio.get_running_loop()
        watched: list[int] = []
        add_reader = loop.add_reader

        def noted(descriptor: int, *rest: Any) -> None:
            watched.append(descriptor)
            add_reader(descriptor, *rest)

        monkeypatch.setattr(loop, "add_reader", noted)
        loop_socket = LoopSocket(near.fileno(), 1)
        for answer in (b"1", b"2", b"3"):
            statement = asyncio.create_task(loop_socket.drive(self.asking(near)))
            await turns()
            assert far.recv(1) == b"?"
            far.send(answer)
            assert await statement == answer
            await turns()
        assert watched == [near.fileno()]
        loop_socket.rest()
        assert not loop.remove_reader(near.fileno())
        assert not loop.remove_writer(near.fileno())

    async def test_what_arrives_while_nobody_waits_ends_the_watching(
        self, near: socket.socket, far: socket.socket
    ) -> None:
        """Else the loop would call without an end, for instance when the server has gone."""
        loop_socket = LoopSocket(near.fileno(), 1)
        statement = asyncio.create_task(loop_socket.drive(self.asking(near)))
        await turns()
        far.send(b"1")
        assert await statement == b"1"
        far.close()
        await turns()
        assert not asyncio.get_running_loop().remove_reader(near.fileno())

    async def test_a_caller_that_gives_up_leaves_the_answer_unread(
        self, near: socket.socket, far: socket.socket
    ) -> None:
        """Nothing goes on with its statement: the connection will be closed."""
        loop_socket = LoopSocket(near.fileno(), 1)
        statement = asyncio.create_task(loop_socket.drive(self.asking(near)))
        await turns()
        statement.cancel()
        await asyncio.wait([statement])
        far.send(b"late")
        await turns()
        assert statement.cancelled()
        assert near.recv(100) == b"late"

    async def test_an_error_is_raised_where_the_statement_was_begun(
        self, near: socket.socket, far: socket.socket
    ) -> None:
        """Also one that the loop's callback meets."""

        def failing() -> Talk[None]:
            yield Wait.R
            raise psycopg.OperationalError("the connection is lost")

        loop_socket = LoopSocket(near.fileno(), 1)
        statement = asyncio.create_task(loop_socket.drive(failing()))
        await turns()
        far.send(b"1")
        with pytest.raises(psycopg.OperationalError, match="is lost"):
            await statement
        assert not asyncio.get_running_loop().remove_reader(near.fileno())

    async def test_the_watching_ends_with_the_error_that_may_have_closed_the_socket(
        self, near: socket.socket, far: socket.socket
    ) -> None:
        """Before the caller wakes up: another connection may have the socket's number by then."""
        loop = asyncio.get_running_loop()
        is_watched: list[bool] = []

        def failing() -> Talk[None]:
            yield Wait.RW
            yield Wait.R
            loop.call_soon(lambda: is_watched.append(loop.remove_reader(near.fileno())))
            raise psycopg.OperationalError("the connection is lost")

        loop_socket = LoopSocket(near.fileno(), 1)
        statement = asyncio.create_task(loop_socket.drive(failing()))
        await turns()
        far.send(b"1")
        with pytest.raises(psycopg.OperationalError, match="is lost"):
            await statement
        assert is_watched == [False]

    @pytest.mark.parametrize("what", ["add_reader", "add_writer"])
    async def test_a_socket_that_the_loop_no_longer_watches_is_a_lost_connection(
        self, near: socket.socket, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        """uvloop closes its watcher for good if the server resets an idle connection."""

        def refuse(*_: object) -> None:
            raise RuntimeError("unable to perform operation on <UVPoll closed=True>")

        monkeypatch.setattr(asyncio.get_running_loop(), what, refuse)
        loop_socket = LoopSocket(near.fileno(), 1)
        with pytest.raises(psycopg.OperationalError, match="is lost: unable to perform"):
            await loop_socket.drive(self.asking(near))

    async def test_each_part_of_an_answer_has_its_time(
        self, near: socket.socket, far: socket.socket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S11: a long answer goes on, and one that stops is given up."""
        clock = ManualClock()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
        loop_socket = LoopSocket(near.fileno(), 1)
        statement = asyncio.create_task(loop_socket.drive(self.asking(near, parts=4)))
        await turns()
        for _ in range(3):
            clock.advance(0.9)
            far.send(b"x")
            await turns()
        assert not statement.done()
        clock.advance(1.1)
        with pytest.raises(TimeoutError):
            await statement
