"""The client's side of an exchange that is passed on (I12, I15): its upload, and its leaving.

A small upload is whole before anything is taken for it; one that stalls is given up; and who
leaves takes the connection to the site along, which so sees that nobody listens any more.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Protocol

from stillfresh.isr.collecting import Receive

SMALL: Final = 65_536
"""Bytes of an upload that are waited for before a connection to the site is taken."""


class Left(Exception):
    """The client is gone."""


class Stalled(Exception):
    """The client does not go on with its upload."""


class Closable(Protocol):
    def close(self) -> None: ...


class Visitor:
    """`timeout`: seconds for each part of its upload."""

    def __init__(self, receive: Receive, timeout: float, *, has_body: bool) -> None:
        self._receive = receive
        self._timeout = timeout
        self._has_body = has_body
        self._is_whole = not has_body
        self._begun = b""
        self._watching: asyncio.Future[None] | None = None
        self._connection: Closable | None = None
        self.is_gone = False

    async def begin(self) -> None:
        came = bytearray()
        while not self._is_whole and len(came) < SMALL:
            came += await self._part()
        self._begun = bytes(came)

    def upload(self) -> AsyncIterator[bytes] | None:
        return self._parts() if self._has_body else None

    async def _parts(self) -> AsyncIterator[bytes]:
        yield self._begun
        while not self._is_whole:
            yield await self._part()
        self.watch()

    async def _part(self) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                message = await self._receive()
        except TimeoutError:
            raise Stalled from None
        if message["type"] == "http.disconnect":
            raise Left
        self._is_whole = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    def attach(self, connection: Closable | None) -> None:
        """What is closed when the client leaves, which is heard once its upload is whole."""
        self._connection = connection
        if self._is_whole:
            self.watch()

    def watch(self) -> None:
        """From now on nothing that it sends is wanted."""
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._left())
            self._watching.add_done_callback(self._over)

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _over(self, watching: "asyncio.Future[None]") -> None:
        self.is_gone = not watching.cancelled()
        if self.is_gone and self._connection is not None:
            self._connection.close()

    def end(self) -> None:
        self._connection = None
        if self._watching is not None:
            self._watching.cancel()
