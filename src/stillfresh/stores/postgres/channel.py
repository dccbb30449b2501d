"""How a PostgreSQL store announces changes: each step notifies when it commits.

One connection listens. Notifications arrive in the order of commits, so a beat that comes back
proves that everything before it was heard. Through a pooler that switches connections nothing is
heard: no beat comes back, and memory asks the store as without push.
"""

import asyncio
from base64 import b64decode
from contextlib import aclosing
from secrets import token_hex
from typing import Final

from stillfresh.errors import StoreError
from stillfresh.stores.channel import A_TAG, ServerChannel, Tell
from stillfresh.stores.postgres.link import LOST, SERVER, LoopConnection, PgLink, refused
from stillfresh.stores.postgres.schema import quoted, text_of

BEAT: Final = "!"
SLICE: Final = 100
"""Notifications that are handled in one turn of the loop."""
NO_PUSH: Final = (
    "this PostgreSQL store does not push (`stillfresh table create --push` turns it on)"
)
POOLED: Final = (
    "; a pooler stands before it: LISTEN needs one that pools sessions, or the server itself"
)


class PgChannel(ServerChannel):
    """One connection that listens to the changes of a schema, and reports them by `tell`."""

    def __init__(self, link: PgLink, schema: str, tell: Tell, within: float) -> None:
        super().__init__(SERVER, tell, within)
        self._link = link
        self._schema = schema
        self._pieces: list[str] = []
        """Parts of an announcement that is not complete yet."""
        self._reported = 0
        """Announcements so far; after each slice, other tasks run."""

    async def open(self) -> None:
        try:
            connection = await self._link.connected()
            self._connections.append(connection)
            if not self._link.pushes:
                raise StoreError(NO_PUSH)
            async with asyncio.timeout(self._within):
                await connection.execute(f"LISTEN {quoted(self._schema)}".encode())
        except LOST as exc:
            raise refused(exc, self._schema) from exc
        self._readers = [asyncio.create_task(self._read(connection))]

    async def beat(self) -> None:
        """Through the server, and back on the connection that listens."""
        beat = BEAT + token_hex(8)
        sent = self._link.run("SELECT pg_notify($1, $2)", (self._schema, beat))
        await self._come_back([beat], sent, POOLED if self._link.is_pooled else "")

    async def _read(self, connection: LoopConnection) -> None:
        try:
            async with aclosing(connection.notifies()) as notices:
                async for notice in notices:
                    await self._hear(notice.payload)
        except (*LOST, ValueError):  # or a notification that is not ours
            return
        finally:
            self._came.set()

    async def _hear(self, payload: str) -> None:
        """A part has its number, whether more follow, and a piece of the text."""
        if payload.startswith(BEAT):
            self._hear_beat(payload)
            return
        number, ends, part = payload.partition(".")
        if not number.isdecimal():
            number, _, part = payload.partition("+")
            ends = ""
        if int(number) != len(self._pieces):
            raise ValueError("a notification is missing")
        self._pieces.append(part)
        if ends:
            text = "".join(self._pieces)
            self._pieces = []
            for line in text.split("\n"):
                self._report(*line.split(" "))
                self._reported += 1
                if not self._reported % SLICE:
                    await asyncio.sleep(0)

    def _report(self, first: str, id_: str | None = None, generation: str | None = None) -> None:
        kind = text_of(b64decode(first))
        if id_ is None:
            self._tell(A_TAG, kind, None)
        else:
            self._tell(kind, text_of(b64decode(id_)), generation)
