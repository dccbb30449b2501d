"""The connections to a PostgreSQL server: statements, limited in time, and errors translated.

Every statement is its own transaction. A step that the server has rolled back (a deadlock) is
repeated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Any, Final

from psycopg import AsyncConnection, AsyncRawCursor, InterfaceError, Notify
from psycopg import Error as PostgresError
from psycopg.pq import TransactionStatus
from psycopg.waiting import wait_async

from stillfresh.errors import StoreError
from stillfresh.stores.postgres.heard import LastHeard
from stillfresh.stores.postgres.schema import HELLO, SETTINGS, VERSION, Row, quoted
from stillfresh.stores.server import ServerLink

ENDED: Final = {"57P01", "57P02", "57P03", "57P05", "53300"}
"""Codes of a server that ends its connections, or accepts none now."""
FULL: Final = ["too many", "connection slots"]
NOT_YET: Final = ("starting up", "shutting down", "recovery mode", *FULL)
"""Texts of a server that will accept us later; libpq has no code for it."""
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
IDLE: Final = TransactionStatus.IDLE
LOST: Final = (OSError, TimeoutError, PostgresError)


class PgConnection(AsyncConnection[Row]):
    """A connection that can be left at once. Its timeout restarts with each part that arrives."""

    limit: asyncio.Timeout | None = None
    patience = 0.0
    _moved_at = 0.0

    async def disconnect(self, *, nowait: bool) -> None:
        del nowait
        await self.close()

    async def wait(self, gen: Any, interval: float = 0, timeout: float | None = None) -> Any:  # noqa: ANN401, ASYNC109 (the library's own)
        del interval, timeout
        return await wait_async(self._moving(gen), self.pgconn.socket, interval=NEVER)

    def _moving(self, gen: Any) -> Generator[Any, Any, Any]:  # noqa: ANN401
        """A long answer may take its time while parts of it keep arriving."""
        try:
            state = next(gen)
            while True:
                ready = yield state
                now = asyncio.get_running_loop().time()
                if self.limit is not None and now - self._moved_at > self.patience / 8:
                    self.limit.reschedule(now + self.patience)
                    self._moved_at = now
                state = gen.send(ready)
        except StopIteration as exc:
            return exc.value


def said_by(error: BaseException) -> str:
    """Return what an error of the server says, in one line, without the statement."""
    primary = error.diag.message_primary if isinstance(error, PostgresError) else None
    text = " ".join((primary or str(error)).split()).removesuffix(".")
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

        async def exchange(connection: PgConnection, _: asyncio.Timeout) -> list[Row]:
            return await self._rows(connection, statement, arguments)

        for _ in range(REPEATS):
            try:
                return await self._once(exchange, None)
            except PostgresError as exc:
                if _code(exc) not in UNDONE and not await self._is_unprepared(exc):
                    raise
        raise StoreError(
            f"the PostgreSQL server rolled a step back {REPEATS} times (deadlock); try again"
        )

    async def _take_permit(self) -> None:
        if not self._permits.locked():  # a time-out costs more than the permit
            await self._permits.acquire()
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._permits.acquire()
        except TimeoutError:
            raise StoreError(
                f"all {self._most} connections to the PostgreSQL server were busy for "
                f"{self._timeout:g} s; raise ?max_connections= or ?timeout="
            ) from None

    async def _connect(self) -> PgConnection:
        connection = await self.connected()
        connection.add_notify_handler(unheard)
        return connection

    def _is_clean(self, connection: PgConnection) -> bool:
        return connection.info.transaction_status is IDLE

    def _is_lost(self, error: BaseException) -> bool:
        return super()._is_lost(error) and is_lost(error)

    def _store_error(self, error: Exception) -> StoreError:
        return refused(error, self._schema)

    async def _is_unprepared(self, error: BaseException) -> bool:
        """True if a prepared statement was lost. From then on new connections prepare nothing."""
        if _code(error) not in UNPREPARED or not self._prepares:
            return False
        self._prepares = False
        await self.drop_idle()
        return True

    async def _rows(
        self, connection: PgConnection, statement: str, arguments: Sequence[Any]
    ) -> list[Row]:
        cursor = connection.cursor(binary=True)
        try:
            async with asyncio.timeout(self._timeout) as connection.limit:
                await cursor.execute(statement.encode(), arguments)
        finally:
            connection.limit = None
        return await cursor.fetchall() if cursor.description is not None else []

    async def connected(self) -> PgConnection:
        """A connection for the caller, which closes it."""
        connection = await connected_to(self._hosts, self._timeout)
        try:
            await self._check(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _hello_rows(self, connection: PgConnection) -> list[Row]:
        """The settings, and what the server says of itself; only the settings if it cannot."""
        schema = quoted(self._schema)
        try:
            return await self._rows(connection, HELLO.format(schema=schema), ())
        except PostgresError as exc:
            if _code(exc) not in {*MISSING, STANDBY}:
                raise
        return await self._rows(connection, SETTINGS.format(schema=schema), ())

    async def _check(self, connection: PgConnection) -> None:
        """Raise unless the schema is there, of this release, with isolation `read committed`."""
        rows = await self._hello_rows(connection)
        if not rows:
            raise StoreError(f"{self._schema}.setting is empty; drop the schema and run {COMMAND}")
        ((version, _, self.pushes, process, isolation, *life),) = rows
        if isolation != "read committed":
            raise StoreError(
                f"stillfresh needs transactions of the level 'read committed', and those of this "
                f"role are '{isolation}'; run ALTER ROLE {connection.info.user} SET "
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
        self.is_pooled = process != connection.info.backend_pid
        if self._prepares and not self.is_pooled:
            connection.prepare_threshold = PREPARED_AFTER


def unheard(_: Notify) -> None:
    """Ignore notifications of others on a pooler's shared connection."""


async def connected_to(hosts: list[str], patience: float) -> PgConnection:
    """Connect to the first host that accepts us; it is tried first the next time."""
    tried = tuple(hosts)  # other callers reorder the hosts meanwhile
    for number, host in enumerate(tried, 1):
        try:
            async with asyncio.timeout(patience):
                connection = await PgConnection.connect(
                    host,
                    autocommit=True,
                    prepare_threshold=None,
                    cursor_factory=AsyncRawCursor,
                )
        except LOST:
            if number == len(tried):
                raise
        else:
            connection.patience = patience
            hosts.remove(host)
            hosts.insert(0, host)
            return connection
    raise OSError("no host is named")


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
