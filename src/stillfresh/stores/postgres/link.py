"""The way to the server: bounded connections, time-outs, lost answers settled (S2, S11).

Every statement is its own transaction. If its answer was lost, it is sent once more: each step can
tell whether it was done already, and none does harm if the first one is done later (S8). A step
that the server has rolled back (a deadlock) is repeated. While the server is unavailable, one step
at a time tries it (`breaker.py`).
"""

import asyncio
import logging
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, Final

from psycopg import AsyncConnection, AsyncRawCursor, InterfaceError, Notify
from psycopg import Error as PostgresError
from psycopg.pq import TransactionStatus
from psycopg.waiting import wait_async

from stillfresh.errors import StoreError
from stillfresh.stores.breaker import TRIED_AGAIN, Breaker
from stillfresh.stores.postgres.rows import Row
from stillfresh.stores.postgres.schema import SETTINGS, VERSION, quoted

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
UNAVAILABLE: Final = "the PostgreSQL server is unavailable"
MISSING: Final = {"3F000", "42P01", "42883", "42703"}
"""No such schema, table, function or column."""
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

logger = logging.getLogger(__name__)


class PgConnection(AsyncConnection[Row]):
    """A connection that can be left at once. Its timeout restarts with each part that arrives."""

    limit: asyncio.Timeout | None = None
    patience = 0.0
    _moved_at = 0.0

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


class PgLink:
    """At most `most` connections, of one event loop; further callers wait for a place.

    A connection on which anything was left unsaid (an error, a cancellation) is closed, never used
    again. Taking and giving back await nothing, so no cancellation can lose a place.
    """

    def __init__(self, hosts: Sequence[str], schema: str, *, most: int, timeout: float) -> None:
        """`hosts`: connection strings, in the order in which they are tried."""
        self._hosts = list(hosts)
        self._schema = schema
        self._most = most
        self._timeout = timeout
        self._places = asyncio.Semaphore(most)
        self._idle: list[PgConnection] = []
        self._lost = 0  # statements that failed, one after the other
        self._closed, self._breaker = False, Breaker()
        self._why = ""  # the last failure
        self._prepares = True
        self.pushes = self.is_pooled = False
        """Whether its schema pushes (S10); and whether a pooler stands before the server."""

    async def greet(self) -> None:
        """Raise if the server refuses this cache. Without an answer, it is tried again later."""
        began = time.monotonic()
        try:
            await self._once("SELECT 1", ())
        except LOST as exc:
            if not is_lost(exc):
                raise refused(exc, self._schema) from exc
            self._failed(began, exc)

    async def run(
        self,
        statement: str,
        given: Sequence[Any] = (),
        settle: Sequence[Any] | None = None,
        *,
        urgent: bool = False,
    ) -> list[Row]:
        """Run a statement, return its rows. `settle`: its arguments if it is sent again.

        An urgent statement is sent even while the server is unavailable.
        """
        began = time.monotonic()
        if not self._breaker.allows(began) and not urgent:
            raise StoreError(f"{UNAVAILABLE}: {self._why}; {TRIED_AGAIN}")
        try:
            rows = await self._settled(statement, given, given if settle is None else settle)
        except LOST as exc:
            if is_lost(exc):
                self._failed(began, exc)
            else:
                self._answered()
            if _code(exc) == READ_ONLY:
                await self.drop_idle()  # no longer the primary: find the new one
            raise refused(exc, self._schema) from exc
        self._answered()
        return rows

    async def _settled(
        self, statement: str, given: Sequence[Any], settle: Sequence[Any]
    ) -> list[Row]:
        """Try twice, the second time on a new connection; once if the last step failed too."""
        was_away = self._breaker.is_open
        try:
            return await self._done(statement, given)
        except LOST as exc:
            if was_away or not is_lost(exc):
                raise
            await self.drop_idle()
            return await self._done(statement, settle)

    async def _done(self, statement: str, given: Sequence[Any]) -> list[Row]:
        """Repeat a step that the server has rolled back."""
        for _ in range(REPEATS):
            with suppress(Undone):
                return await self._once(statement, given)
        raise StoreError(
            f"the PostgreSQL server rolled a step back {REPEATS} times (deadlock); try again"
        )

    async def _once(self, statement: str, given: Sequence[Any]) -> list[Row]:
        lost = self._lost
        await self._take_a_place()
        try:
            if self._lost > lost:  # otherwise a long queue would find out one by one
                raise TimeoutError("the server failed while this request waited for a connection")
            connection = self._idle.pop() if self._idle else None
            try:
                if connection is None:
                    connection = await self.connected()
                    connection.add_notify_handler(unheard)
                rows = await self._rows(connection, statement, given)
            except BaseException as exc:
                self._lost += isinstance(exc, LOST) and is_lost(exc)
                if connection is not None:
                    await self._give_back(connection)
                if _code(exc) in UNDONE or await self._is_unprepared(exc):
                    raise Undone from exc
                raise
            self._lost = 0
            await self._give_back(connection)
            return rows
        finally:
            self._places.release()

    async def _take_a_place(self) -> None:
        if not self._places.locked():  # a time-out costs more than the place
            await self._places.acquire()
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self._places.acquire()
        except TimeoutError:
            raise StoreError(
                f"all {self._most} connections to the PostgreSQL server were busy for "
                f"{self._timeout:g} s; raise ?max_connections= or ?timeout="
            ) from None

    async def _give_back(self, connection: PgConnection) -> None:
        if self._closed or connection.info.transaction_status is not IDLE:
            await connection.close()
        else:
            self._idle.append(connection)

    async def _is_unprepared(self, error: BaseException) -> bool:
        """True if a prepared statement was lost. From then on new connections prepare nothing."""
        if _code(error) not in UNPREPARED or not self._prepares:
            return False
        self._prepares = False
        await self.drop_idle()
        return True

    async def _rows(
        self, connection: PgConnection, statement: str, given: Sequence[Any]
    ) -> list[Row]:
        cursor = connection.cursor(binary=True)
        try:
            async with asyncio.timeout(self._timeout) as connection.limit:
                await cursor.execute(statement.encode(), given)
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

    async def _check(self, connection: PgConnection) -> None:
        """Raise unless the schema is there, of this release, with isolation `read committed`."""
        statement = SETTINGS.format(schema=quoted(self._schema))
        rows = await self._rows(connection, statement, ())
        if not rows:
            raise StoreError(f"{self._schema}.setting is empty; drop the schema and run {COMMAND}")
        ((version, _, self.pushes, process, isolation),) = rows
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
        self.is_pooled = process != connection.info.backend_pid
        if self._prepares and not self.is_pooled:
            connection.prepare_threshold = PREPARED_AFTER

    async def drop_idle(self) -> None:
        """Close idle connections: they would meet the same failure."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.close()

    async def close(self) -> None:
        self._closed = True
        await self.drop_idle()

    def _answered(self) -> None:
        if self._breaker.is_open:
            self._breaker.succeeded()
            logger.warning("the PostgreSQL server answers again")

    def _failed(self, began: float, error: BaseException) -> None:
        if not self._breaker.is_open:
            logger.warning("%s: %s", UNAVAILABLE, said_by(error))
        self._why = said_by(error)
        self._breaker.failed(began, time.monotonic())


def unheard(_: Notify) -> None:
    """Ignore notifications of others on a pooler's shared connection."""


async def connected_to(hosts: list[str], patience: float) -> PgConnection:
    """Connect to the first host that accepts us; it is tried first the next time."""
    for number, host in enumerate(tried := tuple(hosts), 1):  # others reorder them meanwhile
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
    said, code = said_by(error), _code(error)
    if is_lost(error):
        return StoreError(f"{UNAVAILABLE}: {said}")
    if code in MISSING:
        return StoreError(f"the database has no schema {schema}; run {COMMAND}")
    advice = f"; {ADVICE[code]}" if code in ADVICE else ""
    return StoreError(f"the PostgreSQL server refused: {said}{advice}")


class Undone(Exception):
    """The server has rolled a step back."""


def _code(error: BaseException) -> str:
    return getattr(error, "sqlstate", None) or ""


def is_lost(error: BaseException) -> bool:
    """True if no server answered, or it was ending: the statement may have been done."""
    if not isinstance(error, PostgresError) or isinstance(error, InterfaceError):
        return True
    code, said = _code(error), str(error)
    if code:
        return code in ENDED or code.startswith("08")
    return "FATAL" not in said or any(word in said for word in NOT_YET)


def said_by(error: BaseException) -> str:
    """Return what an error of the server says, in one line, without the statement."""
    primary = error.diag.message_primary if isinstance(error, PostgresError) else None
    said = " ".join((primary or str(error)).split())
    if any(word in said for word in FULL):
        said = f"{said}; {TOO_MANY}"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
