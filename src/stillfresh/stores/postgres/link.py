"""The connections to a PostgreSQL server: statements, limited in time, and errors translated.

Those of an event loop and those of threads differ only in how they wait (`session.py`). Every
statement is its own transaction. A step that the server has rolled back (a deadlock) is repeated.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from psycopg import AsyncConnection, AsyncRawCursor, InterfaceError
from psycopg import Error as PostgresError
from psycopg.pq import TransactionStatus
from psycopg.waiting import wait_async

from stillfresh.errors import StoreError
from stillfresh.stores.breaker import TRIED_AGAIN
from stillfresh.stores.postgres.heard import LastHeard
from stillfresh.stores.postgres.schema import HELLO, SETTINGS, TUNING, VERSION, Row, quoted
from stillfresh.stores.postgres.session import (
    LoopSocket,
    PgSession,
    Talk,
    connect_in_thread,
    talk_in_thread,
)
from stillfresh.stores.server import ServerLink
from stillfresh.stores.thread_pool import ThreadPool
from stillfresh.turns import THIS_THREAD, outside

T = TypeVar("T")

ENDED: Final = {"57P01", "57P02", "57P03", "57P05", "53300"}
"""Codes of a server that ends its connections, or accepts none now."""
FULL: Final = ["too many", "connection slots"]
NOT_YET: Final = (
    *("starting up", "shutting down", "recovery mode", "terminating connection"),
    *FULL,
)
"""Texts of a server that will accept us later; libpq has no code for it."""
BEHIND: Final = re.compile(r"^(DETAIL|CONTEXT): .*", re.MULTILINE | re.DOTALL)
"""What libpq adds to the text of an error that ended the connection."""
UNDONE: Final = {"40001", "40P01"}
"""A serialization failure or a deadlock: nothing was done."""
UNPREPARED: Final = {"26000", "42P05", "0A000"}
"""A pooler that hides itself led a prepared statement elsewhere, or a migration has changed what it
returns. Nothing of it was done."""
PREPARED_AFTER: Final = 5
"""Runs on a connection before a statement is prepared; never behind a pooler."""
REPEATS: Final = 5
SERVER: Final = "the PostgreSQL server"
MISSING: Final = {"3F000", "42P01", "42883", "42703"}
"""No such schema, table, function or column."""
STANDBY: Final = "0A000"
"""A standby has no unlogged tables, and so no life."""
READ_ONLY: Final = "25006"
TOO_MANY: Final = "its limit of connections is reached; lower ?max_connections= or raise the limit"
ADVICE: Final = {
    READ_ONLY: "it is read-only, a standby perhaps; write every host into the address, and "
    "?target_session_attrs=read-write behind it",
    "42501": "its role lacks rights; docs/stores.md lists the GRANTs that it needs",
    "53100": "its disk is full",
    "53300": TOO_MANY,
    "55P03": "another transaction holds the row for too long; look for it in pg_stat_activity",
    "57014": "it took longer than the statement_timeout of the role or the database",
}
COMMAND: Final = (
    "`stillfresh table create` once for this database, as a role that may create the schema"
)
NEVER: Final = 3600.0
NO_HOST: Final = "no host is named"
IDLE: Final = TransactionStatus.IDLE
LOST: Final = (OSError, TimeoutError, PostgresError)


class PgConnection(AsyncConnection[Row]):
    """A connection of an event loop that can be left at once, and wakes up for answers only."""

    async def disconnect(self, *, nowait: bool) -> None:
        del nowait
        await self.close()

    async def wait(self, gen: Any, interval: float = 0, timeout: float | None = None) -> Any:  # noqa: ANN401, ASYNC109 (the library's own)
        del interval, timeout
        return await wait_async(gen, self.pgconn.socket, interval=NEVER)


class LoopConnection(PgConnection):
    """One for the store's statements, which go through `session`."""

    session: PgSession
    socket: LoopSocket

    def begin_session(self, timeout: float) -> None:
        self.session = PgSession(self.pgconn)
        self.socket = LoopSocket(self.pgconn.socket, timeout)

    async def close(self) -> None:
        self.socket.rest()
        await super().close()


class ThreadConnection(PgSession):
    """A connection of threads."""

    def is_clean(self) -> bool:
        return bool(self.pgconn.transaction_status == IDLE)

    def disconnect(self) -> None:
        self.pgconn.finish()


def said_by(error: BaseException) -> str:
    """Return what an error of the server says, in one line, without the statement."""
    primary = error.diag.message_primary if isinstance(error, PostgresError) else None
    text = primary or BEHIND.sub("", str(error))
    text = " ".join(text.split()).removesuffix(".")
    if any(word in text for word in FULL):
        text = f"{text}; {TOO_MANY}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class PgLink(ServerLink):
    """Connections to the first of several servers that accepts us, and statements over them."""

    failures = lost = LOST
    _error_text = staticmethod(said_by)

    def __init__(self, hosts: Sequence[str], schema: str, *, most: int, timeout: float) -> None:
        """`hosts`: connection strings, in the order in which they are tried."""
        super().__init__(SERVER, most=most, timeout=timeout)
        self._hosts = list(hosts)
        self._schema = schema
        self._prepares = True
        self.pushes = self.is_pooled = False
        """Whether its schema pushes; and whether a pooler stands before the server."""
        self.heard = LastHeard()
        self._threads = ThreadPool(
            self._connected_in_thread,
            most=most,
            lost=LOST,
            timeout=timeout,
            busy=self._all_busy,
        )

    async def _hello(self) -> None:
        await self._execute("SELECT 1", ())

    async def run(
        self,
        statement: str,
        arguments: Sequence[Any] = (),
        resent_arguments: Callable[[], Sequence[Any]] | None = None,
        *,
        urgent: bool = False,
    ) -> list[Row]:
        """Run a statement, return its rows.

        `resent_arguments` is called if the statement is sent again, and returns its arguments then.
        An urgent statement is sent even while the server is unavailable.
        """
        first = partial(self._execute, statement, arguments)

        def again() -> Awaitable[list[Row]]:
            if resent_arguments is None:
                return first()
            return self._execute(statement, resent_arguments())

        try:
            return await self._try_twice(first, again, urgent=urgent)
        except StoreError as exc:
            if _code(exc.__cause__) == READ_ONLY:
                await self.drop_idle()  # no longer the primary: find the new one
            raise

    async def _execute(self, statement: str, arguments: Sequence[Any]) -> list[Row]:
        """Run a statement; repeat it if the server has rolled it back."""

        def exchange(connection: LoopConnection) -> Awaitable[list[Row]]:
            return connection.socket.drive(self._rows(connection.session, statement, arguments))

        for _ in range(REPEATS):
            may_be_prepared = self._prepares
            try:
                if THIS_THREAD.has_turn:
                    with outside():
                        return self._execute_in_thread(statement, arguments)
                return await self._once(exchange)
            except PostgresError as exc:
                code = _code(exc)
                if may_be_prepared and code in UNPREPARED:
                    await self._stop_preparing()
                elif code not in UNDONE:
                    raise
        raise StoreError(
            f"the PostgreSQL server rolled a step back {REPEATS} times (deadlock); try again"
        )

    def _rows(
        self, session: PgSession, statement: str, arguments: Sequence[Any]
    ) -> Talk[list[Row]]:
        if not self._prepares:  # it was in use when another one lost its statements
            session.stop_preparing()
        return session.rows(statement, arguments)

    def _execute_in_thread(self, statement: str, arguments: Sequence[Any]) -> list[Row]:
        """Run a statement once, on a connection of threads, while this thread waits."""

        def talk(connection: ThreadConnection) -> list[Row]:
            rows = self._rows(connection, statement, arguments)
            return talk_in_thread(connection, rows, self._timeout)

        return self._threads.exchange(talk)

    def read_in_thread(self, statement: str, arguments: Sequence[Any]) -> list[Row]:
        """Run a statement that only reads, in one attempt. StoreError if that fails.

        Unlike all other steps, it runs without the turn of the cache's event loop.
        """
        began = time.monotonic()
        if self._breaker.is_open:
            raise StoreError(f"{SERVER} is unavailable: {self._why}; {TRIED_AGAIN}")
        try:
            return self._execute_in_thread(statement, arguments)
        except LOST as exc:
            if isinstance(exc, TimeoutError):
                self._note_failure(began, exc)
            raise self._store_error(exc) from exc

    @property
    def has_own_sessions(self) -> bool:
        """True if each connection is one of the server's, with our settings (`TUNING`)."""
        return self._prepares and not self.is_pooled

    async def _take_permit(self) -> None:
        if not self._permits.locked():  # a time-out costs more than the permit
            await self._permits.acquire()
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._permits.acquire()
        except TimeoutError:
            raise self._all_busy() from None

    def _all_busy(self) -> StoreError:
        return StoreError(
            f"all {self._most} connections to the PostgreSQL server were busy for "
            f"{self._timeout:g} s; raise ?max_connections= or ?timeout="
        )

    async def _connect(self) -> LoopConnection:
        return await self.connected()

    def _is_clean(self, connection: LoopConnection) -> bool:
        return connection.info.transaction_status is IDLE

    def _is_lost(self, error: BaseException) -> bool:
        return super()._is_lost(error) and is_lost(error)

    def _store_error(self, error: Exception) -> StoreError:
        return refused(error, self._schema)

    async def _stop_preparing(self) -> None:
        """A prepared statement was lost, so others may be lost on every connection."""
        self._prepares = False
        await self.drop_idle()

    async def connected(self) -> LoopConnection:
        """A connection for the caller, which closes it."""
        connection = await connected_to(self._hosts, self._timeout)
        try:
            await connection.socket.drive(self._greeting(connection.session))
        except BaseException:
            await connection.close()
            raise
        connection.socket.rest()
        return connection

    def _connected_in_thread(self) -> ThreadConnection:
        tried = tuple(self._hosts)
        for number, host in enumerate(tried, 1):
            try:
                pgconn = connect_in_thread(host, time.monotonic() + self._timeout)
            except LOST:
                if number == len(tried):
                    raise
                continue
            try_first(self._hosts, host)
            connection = ThreadConnection(pgconn)
            try:
                talk_in_thread(connection, self._greeting(connection), self._timeout)
            except BaseException:
                connection.disconnect()
                raise
            return connection
        raise OSError(NO_HOST)

    async def drop_idle(self, *, nowait: bool = True) -> None:
        """Close idle connections; in a thread only the threads' own, the others are the loop's."""
        self._threads.drop_idle()
        if not THIS_THREAD.has_turn:
            await super().drop_idle(nowait=nowait)

    async def close(self) -> None:
        self._threads.close()
        await super().close()

    def _greeting(self, session: PgSession) -> Talk[None]:
        """Raise unless the schema is there, of this release, with isolation `read committed`."""
        rows = yield from self._hello_rows(session)
        if not rows:
            raise StoreError(f"{self._schema}.setting is empty; drop the schema and run {COMMAND}")
        ((version, _, self.pushes, process, isolation, *life),) = rows
        if isolation != "read committed":
            raise StoreError(
                f"stillfresh needs transactions of the level 'read committed', and those of this "
                f"role are '{isolation}'; run ALTER ROLE {session.pgconn.user.decode()} SET "
                f"default_transaction_isolation = 'read committed'"
            )
        if version != VERSION:
            what = f"run {COMMAND}" if version < VERSION else "update stillfresh"
            raise StoreError(
                f"the schema {self._schema} in the PostgreSQL database has version {version}, and "
                f"this release of stillfresh needs {VERSION}; {what}"
            )
        if life:  # with the last stamp and the time
            self.heard.hear(*life)
        self.is_pooled = process != session.pgconn.backend_pid
        if self.has_own_sessions:
            yield from session.rows(TUNING)
            session.prepare_after = PREPARED_AFTER

    def _hello_rows(self, session: PgSession) -> Talk[list[Row]]:
        """The settings, and what the server says of itself; only the settings if it cannot."""
        schema = quoted(self._schema)
        try:
            return (yield from session.rows(HELLO.format(schema=schema)))
        except PostgresError as exc:
            if _code(exc) not in {*MISSING, STANDBY}:
                raise
        return (yield from session.rows(SETTINGS.format(schema=schema)))


async def connected_to(hosts: list[str], patience: float) -> LoopConnection:
    """Connect to the first host that accepts us; it is tried first the next time."""
    tried = tuple(hosts)  # other callers reorder the hosts meanwhile
    for number, host in enumerate(tried, 1):
        try:
            async with asyncio.timeout(patience):
                connection = await LoopConnection.connect(
                    host,
                    autocommit=True,
                    prepare_threshold=None,
                    cursor_factory=AsyncRawCursor,
                )
        except LOST:
            if number == len(tried):
                raise
        else:
            connection.begin_session(patience)
            try_first(hosts, host)
            return connection
    raise OSError(NO_HOST)


def try_first(hosts: list[str], host: str) -> None:
    """Move the host that has accepted us to the front. Other callers do the same meanwhile."""
    with suppress(ValueError):
        hosts.remove(host)
        hosts.insert(0, host)


def refused(error: BaseException, schema: str) -> StoreError:
    """The error as a StoreError that says what to do."""
    reason = said_by(error)
    code = _code(error)
    if is_lost(error):
        return StoreError(f"{SERVER} is unavailable: {reason}")
    if code in MISSING:
        return StoreError(f"the database has no schema {schema}; run {COMMAND}")
    advice = f"; {ADVICE[code]}" if code in ADVICE else ""
    return StoreError(f"the PostgreSQL server refused: {reason}{advice}")


def _code(error: BaseException | None) -> str:
    return getattr(error, "sqlstate", None) or ""


def is_lost(error: BaseException) -> bool:
    """True if no server answered, or it was ending: the statement may have been done."""
    if not isinstance(error, PostgresError) or isinstance(error, InterfaceError):
        return True
    code = _code(error)
    if code:
        return code in ENDED or code.startswith("08")
    text = str(error)
    return "FATAL" not in text or any(word in text for word in NOT_YET)
