"""S10, S11: names, rows, slices, errors and news of the PostgreSQL store, without a server."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from psycopg import InterfaceError, OperationalError
from psycopg.errors import (
    AdminShutdown,
    DeadlockDetected,
    DiskFull,
    InvalidSqlStatementName,
    ReadOnlySqlTransaction,
    SerializationFailure,
    TooManyConnections,
    UndefinedTable,
)

from stillfresh import ConfigError, Policy, StoreError
from stillfresh.stores import server
from stillfresh.stores.contract import UNREAD, Copy, Failure, Held, Lease, Mark, Newer, Record
from stillfresh.stores.postgres import admin as postgres_admin
from stillfresh.stores.postgres import store as postgres_store
from stillfresh.stores.postgres.admin import SchemaState
from stillfresh.stores.postgres.channel import PgChannel
from stillfresh.stores.postgres.link import (
    REPEATS,
    PgConnection,
    PgLink,
    connected_to,
    is_lost,
    refused,
    said_by,
)
from stillfresh.stores.postgres.listing import COUNTED, STRETCH, count, list_entries
from stillfresh.stores.postgres.schema import (
    LONGEST_KEY,
    OLDEST_SERVER,
    VERSION,
    Row,
    SortedIds,
    key_of,
    name_of,
    record_of,
    text_of,
)

TIMES = (5.5, 30.0, 60.0, 90.0)
FAILED = (2, 9.5, b"no")
ROW: Row = (b"a", "g", *TIMES, 1, 7.5, *FAILED, b"t7", 12, "token", False, b"value")
COPY = Copy("g", 5.5, Policy(30, 60, 90), b"value", Mark.SOFT, b"t7")


class TestS11Rows:
    def test_a_row_is_a_record(self) -> None:
        """A value that is known already is not read; an absent copy has none."""
        assert record_of(ROW) == Record(COPY, 7.5, Failure(2, 9.5, "no"))
        known = record_of((*ROW[:15], None), "g")
        assert known is not None
        assert known.copy == replace(COPY, value=UNREAD)
        absent = record_of((*ROW[:14], True, None))
        assert absent is not None
        assert absent.copy == replace(COPY, value=None)
        without = record_of((*ROW[:11], None, *ROW[12:]))
        assert without is not None
        assert without.copy == replace(COPY, version=b"")

    def test_an_empty_row_is_no_record(self) -> None:
        """S13: it is there for its stamp; of a row with a lease or a failure there is a record."""
        empty = (b"a", *[None] * 5, 0, *[None] * 5, 12, None, True, None)
        assert record_of(empty) is None
        assert record_of((*empty[:7], 7.5, *empty[8:])) == Record(None, 7.5)
        assert record_of((*empty[:8], *FAILED, *empty[11:])) == Record(
            failure=Failure(2, 9.5, "no")
        )

    @pytest.mark.parametrize("duration", [float("nan"), float("inf"), float("-inf"), -1.0])
    @pytest.mark.parametrize("column", [3, 4, 5])
    def test_an_impossible_duration_is_no_copy(self, column: int, duration: float) -> None:
        """S15: the lease and the failure of the row are read."""
        row = (*ROW[:column], duration, *ROW[column + 1 :])
        assert record_of(row) == Record(None, 7.5, Failure(2, 9.5, "no"))
        alone = (*row[:7], None, None, None, None, *row[11:])
        assert record_of(alone) is None

    def test_an_error_that_is_no_text_is_shown(self) -> None:
        """S15: with a sign in place of its bytes."""
        damaged = record_of((*ROW[:10], b"no \xff", *ROW[11:]))
        assert damaged is not None
        assert damaged.failure == Failure(2, 9.5, "no \ufffd")

    def test_a_long_name_has_a_short_key(self) -> None:
        """Another long name has another one; a short name is its own key."""
        short, long, other = (name_of(it) for it in ("k" * 500, "k" * 501, "k" * 500 + "x"))
        assert key_of(short) == short
        assert len(key_of(long)) == len(key_of(other)) == LONGEST_KEY + 32
        assert key_of(long) != key_of(other)
        assert text_of(name_of("a\ud800")) == "a\ud800"

    def test_ids_are_locked_in_one_order(self) -> None:
        """Each once; a long one has its whole name beside its key."""
        long = "l" * 501
        found = SortedIds(["b", long, "a", "b"])
        assert found.ids == ["a", "b", long]
        assert found.keys == sorted(found.keys)
        assert found.by_key[key_of(name_of(long))] == long
        assert found.long == [None, None, name_of(long)]

    @pytest.mark.parametrize("kind", ["", "k" * 501])
    def test_a_kind_fits_into_an_index(self, kind: str) -> None:
        """And is not empty."""
        with pytest.raises(ConfigError, match="kind: must have 1 to 500 bytes"):
            postgres_store._kind(kind)
        assert postgres_store._kind("k" * 500) == b"k" * 500

    def test_a_statement_takes_so_many_ids_and_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A value that is larger than a slice goes alone."""
        monkeypatch.setattr(server, "SLICE", 3)
        monkeypatch.setattr(server, "SLICE_BYTES", 10)

        def cut(ids: list[str], sizes: dict[str, int] | None = None) -> list[list[str]]:
            return [some.ids for some in postgres_store._cut(ids, sizes)]

        assert cut([]) == []
        assert cut([*"abcd"]) == [["a", "b", "c"], ["d"]]
        assert cut([*"abc"], {"a": 5, "b": 5, "c": 1}) == [["a", "b"], ["c"]]
        assert cut([*"abc"], {"a": 1, "b": 99, "c": 1}) == [["a"], ["b"], ["c"]]

    def test_an_outcome_is_a_grant(self) -> None:
        """A lease, the end of another's, or the copy that is newer."""
        grant = postgres_store._grant
        row = postgres_store.LeaseRow
        assert grant("a", row("lease", 3, ROW)) == Lease("a", "token", 7.5, 3)
        assert grant("a", row("held", 3, ROW)) == Held(7.5)
        failure = Failure(2, 9.5, "no")
        assert grant("a", row("newer", 3, ROW)) == Newer(Record(COPY, 7.5, failure))


class Script:
    """A link whose statements are answered one after the other, and noted."""

    def __init__(self, *answers: list[Row]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Sequence[Any]]] = []

    async def run(self, statement: str, given: Sequence[Any] = ()) -> list[Row]:
        self.asked.append((statement, given))
        return self.answers.pop(0)


def entry(id_: str) -> Row:
    return (id_.encode(), *ROW[1:15], None, 5, b"post", None)


async def listed(script: Script, search: str = "", limit: int = 10, **more: Any) -> list[str]:
    link = cast("PgLink", script)
    given = {"kind": None, "after": None} | more
    found = await list_entries(link, "s", given["kind"], search, after=given["after"], limit=limit)
    assert all(it.size == 5 and it.record.copy is not None for it in found)
    return [it.id for it in found]


class TestE28Listing:
    async def test_a_listing_goes_from_slice_to_slice(self) -> None:
        """Behind the end of the last one, until it has enough or there are no more."""
        ends: list[Row] = [(b"post", b"m")]
        script = Script([entry("a")], ends, [entry("b")], ends, [entry("c")], [])
        assert await listed(script, "x") == ["a", "b", "c"]
        assert [given[:2] for _, given in script.asked] == [
            *[(b"", b"")] * 2,
            *[(b"post", b"m")] * 4,
        ]
        assert [given[2:] for _, given in script.asked[::2]] == [(b"x", 10), (b"x", 9), (b"x", 8)]
        assert script.answers == []

    async def test_a_full_page_is_one_statement(self) -> None:
        """Of one kind, or behind an entry; a kind begins with its empty id."""
        script = Script([entry("a"), entry("b")])
        assert await listed(script, kind="post", limit=2) == ["a", "b"]
        ((statement, given),) = script.asked
        assert given == (b"post", b"", b"", 2, b"post\0")
        assert "(e.kind, e.key) >= ($1, $2)" in statement
        script = Script([entry("b")])
        assert await listed(script, kind="post", after=("post", "a"), limit=1) == ["b"]
        ((statement, given),) = script.asked
        assert given[:2] == (b"post", b"a")
        assert "(e.kind, e.key) > ($1, $2)" in statement
        long = "long" * 200
        named = (key_of(long.encode()), *entry("x")[1:-1], long.encode())
        assert await listed(Script([named]), limit=1) == [long]

    async def test_damaged_rows_do_not_end_a_listing(self) -> None:
        """S15: a page is full, or there are no more entries, whatever was left out of it."""
        no_text = (b"\xff", *entry("x")[1:])
        no_copy = (b"y", "g", 5.5, -1.0, *ROW[4:7], *[None] * 5, *entry("y")[12:])
        script = Script([no_text, no_copy], [entry("z")], [])
        assert await listed(script, limit=2) == ["z"]
        assert [given[:2] for _, given in script.asked] == [(b"", b""), *[(b"post", b"y")] * 2]
        assert script.answers == []

    async def test_a_small_table_is_counted_and_a_large_one_estimated(self) -> None:
        """By the server's own count of rows, but never below what was seen."""
        size: list[Row] = [(4_096, 10.0)]
        part: list[Row] = [(3, 1, STRETCH, b"post", b"z")]
        last: list[Row] = [(2, 1, 5, None, None)]
        script = Script(size, part, last)
        stats = await count(cast("PgLink", script), "s", 5.0)
        assert (stats.copies, stats.leases, stats.bytes) == (5, 2, 4_096)
        assert script.asked[2][1] == (b"post", b"z", 5.0)
        seen = COUNTED * STRETCH
        for rows, scale in ((4.0 * seen, 4), (1.0, 1)):
            script = Script([(4_096, rows)], *[part] * COUNTED)
            stats = await count(cast("PgLink", script), "s", None)
            assert (stats.copies, stats.leases) == (3 * COUNTED * scale, COUNTED * scale)


class TestS11Errors:
    def test_no_answer_is_not_a_refusal(self) -> None:
        """A server that ends, is full or is starting may have done the step, or will accept us."""
        lost = [
            *[OSError(), TimeoutError(), InterfaceError("closed"), AdminShutdown("x")],
            *[TooManyConnections("x"), OperationalError("connection reset")],
            OperationalError("FATAL: the database system is starting up"),
            OperationalError("FATAL: sorry, too many clients already"),
            OperationalError("FATAL: terminating connection due to administrator command"),
        ]
        answered = [DiskFull("x"), OperationalError("FATAL: no such role")]
        assert [is_lost(it) for it in (*lost, *answered)] == [True] * 9 + [False] * 2

    def test_an_error_says_what_to_do(self) -> None:
        """In one line, by the server's code."""
        assert str(refused(OSError("gone."), "s")) == (
            "the PostgreSQL server is unavailable: OSError: gone"
        )
        assert "no schema s; run `stillfresh table create`" in str(
            refused(UndefinedTable("x"), "s")
        )
        assert str(refused(DiskFull("no\n  room"), "s")) == (
            "the PostgreSQL server refused: DiskFull: no room; its disk is full"
        )
        assert "target_session_attrs" in str(refused(ReadOnlySqlTransaction("x"), "s"))
        assert said_by(TimeoutError()) == "TimeoutError"
        assert "lower ?max_connections=" in said_by(OperationalError("too many clients"))

    def test_an_error_that_ends_the_connection_does_not_show_the_statement(self) -> None:
        """libpq puts it behind the words of the server, perhaps with parameters."""
        ended = OperationalError(
            "consuming input failed: terminating connection due to administrator command\n"
            "DETAIL:  the machine goes down\n"
            'CONTEXT:  SQL statement "UPDATE entry SET value = $1"\n'
            "unnamed portal with parameters: $1 = 'secret'\n"
            "server closed the connection unexpectedly"
        )
        assert said_by(ended) == (
            "OperationalError: consuming input failed: terminating connection due to administrator "
            "command"
        )

    async def test_an_address_without_a_host_is_an_error(self) -> None:
        """And not a wait."""
        with pytest.raises(OSError, match="no host is named"):
            await connected_to([], 1.0)


class Rolling(PgLink):
    """Each statement ends as the script says."""

    def __init__(self, *script: Any) -> None:
        super().__init__(["host=x"], "s", most=1, timeout=1)
        self.script = list(script)

    async def _once(self, *_: object) -> Any:
        done = self.script.pop(0)
        if isinstance(done, Exception):
            raise done
        return done


class TestS11Repeats:
    async def test_a_step_that_was_rolled_back_is_done_again(self) -> None:
        """A few times; then it is an error."""
        rows: list[Row] = [(1,)]
        link = Rolling(DeadlockDetected(), SerializationFailure(), rows)
        assert await link.run("SELECT 1") == rows
        link = Rolling(*[DeadlockDetected()] * REPEATS, rows)
        with pytest.raises(StoreError, match=r"rolled a step back 5 times \(deadlock\); try again"):
            await link.run("SELECT 1")
        assert link.script == [rows]

    async def test_a_statement_that_was_prepared_elsewhere_is_sent_again(self) -> None:
        """Once: from then on nothing is prepared. Any other error is a refusal."""
        link = Rolling(InvalidSqlStatementName(), [], InvalidSqlStatementName(), DiskFull())
        assert await link.run("SELECT 1") == []
        assert not link._prepares
        for words in ("InvalidSqlStatementName", "its disk is full"):
            with pytest.raises(StoreError, match=words):
                await link.run("SELECT 1")

    async def test_a_server_that_became_a_standby_is_left(self) -> None:
        """Its idle connections are closed, so that the next step finds the new primary."""
        closed = list[str]()

        class Idle:
            async def disconnect(self, *, nowait: bool) -> None:
                closed.append(f"{nowait}")

        for error, expected in ((ReadOnlySqlTransaction(), ["True"]), (DiskFull(), [])):
            link = Rolling(error)
            link._idle = [Idle()]
            closed.clear()
            with pytest.raises(StoreError):
                await link.run("SELECT 1")
            assert closed == expected


class Statements:
    """A connection whose statements are noted; there is a schema, or there is none."""

    def __init__(self, *, has_schema: bool) -> None:
        self.ran: list[tuple[str, Sequence[Any]]] = []
        self._has_schema = has_schema

    async def execute(self, statement: bytes, given: Sequence[Any] = ()) -> "Statements":
        self.ran.append((statement.decode(), given))
        return self

    async def fetchone(self) -> Row:
        return ("shop" if self._has_schema else None,)

    def starting(self, word: str) -> list[str]:
        return [statement for statement, _ in self.ran if statement.startswith(word)]


def a_state(version: int, *, is_unlogged: bool, pushes: bool) -> SchemaState:
    return SchemaState("shop", version, is_unlogged, pushes)


class TestS11Schema:
    @pytest.mark.parametrize("newer", [-1, 0])
    async def test_an_old_server_is_refused(
        self, newer: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before anything is made; the oldest that will do is taken."""

        class Begun(Exception):
            """A transaction was begun."""

        def transaction() -> None:
            raise Begun

        info = SimpleNamespace(server_version=OLDEST_SERVER + newer)

        @asynccontextmanager
        async def connected(_: str) -> AsyncIterator[tuple[object, str]]:
            yield SimpleNamespace(info=info, transaction=transaction), "shop"

        monkeypatch.setattr(postgres_admin, "_connected", connected)
        with pytest.raises(StoreError if newer else Begun, match="14 or newer" if newer else None):
            await postgres_admin.create("postgres://host")

    async def made(
        self, before: SchemaState, monkeypatch: pytest.MonkeyPatch, **asked: bool | None
    ) -> Statements:
        async def state(*_: object) -> SchemaState:
            return before

        monkeypatch.setattr(postgres_admin, "_state", state)
        connection = Statements(has_schema=before.version is not None)
        given = {"unlogged": None, "pushes": None} | asked
        await postgres_admin._make(cast("PgConnection", connection), "shop", **given)
        return connection

    @pytest.mark.parametrize(
        ("before", "asked", "expected"),
        [
            (SchemaState("shop"), None, True),
            (SchemaState("shop"), False, False),
            (a_state(VERSION, is_unlogged=False, pushes=False), None, False),
            (a_state(VERSION, is_unlogged=False, pushes=False), True, True),
            (a_state(VERSION, is_unlogged=False, pushes=True), None, True),
            (a_state(VERSION, is_unlogged=False, pushes=True), False, False),
        ],
    )
    async def test_whether_it_pushes_stays_unless_it_is_named(
        self,
        before: SchemaState,
        asked: bool | None,
        expected: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """S10: at first it does."""
        made = await self.made(before, monkeypatch, pushes=asked)
        ((_, given),) = [it for it in made.ran if it[0].startswith("UPDATE")]
        assert given == (VERSION, False, expected)

    async def test_tables_that_exist_are_not_created_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tables are logged unless it is said, and change that only if they have another."""
        new = await self.made(SchemaState("shop"), monkeypatch, unlogged=True)
        assert new.starting("CREATE SCHEMA") == ['CREATE SCHEMA "shop"']
        assert new.starting("ALTER TABLE") == []
        now = a_state(VERSION, is_unlogged=False, pushes=True)
        same = await self.made(now, monkeypatch)
        assert same.starting("CREATE SCHEMA") == same.starting("ALTER TABLE") == []
        assert len(same.ran) < len(new.ran)
        other = await self.made(now, monkeypatch, unlogged=True)
        assert [it.rpartition(" ")[2] for it in other.starting("ALTER TABLE")] == ["UNLOGGED"] * 3
        kept = await self.made(a_state(VERSION, is_unlogged=True, pushes=True), monkeypatch)
        assert kept.starting("ALTER TABLE") == []

    async def test_a_newer_schema_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another release of stillfresh uses it."""
        newer = a_state(VERSION + 1, is_unlogged=False, pushes=True)
        with pytest.raises(StoreError, match="which is newer than this release"):
            await self.made(newer, monkeypatch)


class TestS10News:
    def heard(self) -> tuple[PgChannel, list[tuple[str, str, str | None]]]:
        news = list[tuple[str, str, str | None]]()
        link = PgLink(["host=x"], "s", most=1, timeout=1)
        return PgChannel(link, "s", lambda *it: news.append(it), 1.0), news

    async def test_news_may_come_in_pieces(self) -> None:
        """Each line is a kind, an id and a generation, or a tag."""
        channel, news = self.heard()
        post, a, tag = (b64encode(it).decode() for it in (b"post", b"a", b"eu"))
        text = f"{post} {a} gen\n{post} {a}\n{tag}"
        for payload in (f"0+{text[:5]}", f"1+{text[5:9]}", f"2.{text[9:]}", f"0.{tag}"):
            await channel._hear(payload)
        assert news == [
            ("post", "a", "gen"),
            ("post", "a", None),
            ("", "eu", None),
            ("", "eu", None),
        ]

    async def test_a_piece_that_is_missing_breaks_the_channel(self) -> None:
        """What it said is not known: memory must ask the store."""
        channel, news = self.heard()
        await channel._hear("0+cG9z")
        with pytest.raises(ValueError, match="a notification is missing"):
            await channel._hear("2.dA==")
        assert news == []

    async def test_a_beat_is_no_news(self) -> None:
        """It is waited for; that of another process is nobody's."""
        channel, news = self.heard()

        async def sent() -> None:
            await channel._hear("!other")
            assert channel._beats == {"!mine"}
            await channel._hear("!mine")

        await asyncio.wait_for(channel._come_back(["!mine"], sent()), 20)
        assert news == []
