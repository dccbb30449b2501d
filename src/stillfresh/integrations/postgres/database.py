"""A connection to the user's database, and its errors as ours. The adapter to psycopg."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import errors

from stillfresh.errors import ConfigError, StoreError, shown_address
from stillfresh.stores.postgres import PgConnection, said_by

PATIENCE: Final = 10.0
"""Seconds that the server has for one statement."""
LINK: Final[dict[str, Any]] = {
    "autocommit": True,
    "prepare_threshold": None,  # a pooler may hand the next statement to another session
    "connect_timeout": 5,
    "client_encoding": "utf8",
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}
MISSING: Final = (
    "there is no outbox in this database; run `stillfresh outbox create DATABASE --table "
    "'products=product:{id}'`"
)

Row: TypeAlias = tuple[Any, ...]


class OutboxLink:
    """One connection; after a statement that did not end in time it is no longer used."""

    def __init__(self, connection: PgConnection) -> None:
        self.connection = connection

    async def ask(self, statement: str, *values: object) -> list[Row]:
        """The rows; for a statement without rows, one row with the number of changed rows."""
        with translated():
            async with asyncio.timeout(PATIENCE):
                cursor = await self.connection.execute(statement.encode(), values or None)
                return await cursor.fetchall() if cursor.description else [(cursor.rowcount,)]

    async def notified(self) -> None:
        """Wait for a notification."""
        with translated():
            async for _ in self.connection.notifies(stop_after=1):
                pass


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[OutboxLink]:
    """Connect to the database at this address; the connection is closed at the block's end."""
    with translated():
        try:
            connection = await PgConnection.connect(address, **LINK)
        except psycopg.ProgrammingError as exc:
            raise ConfigError(
                f"database {shown_address(address)}: not an address; write "
                "postgresql://user@host:5432/name"
            ) from exc
    try:
        yield OutboxLink(connection)
    finally:
        await connection.close()


@contextmanager
def translated() -> Iterator[None]:
    """Turn the database's errors into StoreError, or ConfigError that says what to do."""
    try:
        yield
    except (errors.UndefinedTable, errors.InvalidSchemaName) as exc:
        raise ConfigError(f"{said_by(exc)}: {MISSING}") from exc
    except errors.InsufficientPrivilege as exc:
        raise ConfigError(f"{said_by(exc)}; docs/postgres.md lists the rights it needs") from exc
    except errors.LockNotAvailable as exc:
        raise StoreError(f"{said_by(exc)}: a table is in use; try again") from exc
    except psycopg.Error as exc:
        raise StoreError(f"the database failed: {said_by(exc)}") from exc
    except TimeoutError as exc:
        raise StoreError(f"the database did not answer within {PATIENCE:g} s") from exc
