"""How a store announces changes: the contract, and the base of channels of a server.

`engine/news.py` listens. It stops trusting memory as soon as a channel ends.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Self, TypeAlias

from stillfresh.errors import StoreError

Tell: TypeAlias = Callable[[str, str, str | None], None]
"""Called with a kind, an id and the new generation; None: it was invalidated or deleted."""
A_TAG: Final = ""
"""Stands in place of a kind if the id is a tag. The tag's entries are reported as well."""


class Channel(ABC):
    """How a store reports changes that any process makes."""

    @abstractmethod
    async def beat(self) -> None:
        """Wait until every change that was made before this call is reported.

        Raises StoreError if the channel is broken, or silent for too long.
        """


class ServerChannel(Channel):
    """Tasks read what the server sends; a beat goes through it, and comes back on the same way."""

    def __init__(self, server: str, tell: Tell, within: float) -> None:
        self._server = server
        self._tell = tell
        self._within = within
        self._connections: list[Any] = []
        self._readers: list[asyncio.Task[None]] = []
        self._beats: set[bytes | str] = set()
        """Beats that have not come back yet."""
        self._came = asyncio.Event()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    async def open(self) -> None:
        """Connect, and begin to read."""

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for connection in self._connections:
            await connection.disconnect(nowait=True)

    def _hear_beat(self, beat: bytes | str) -> None:
        self._beats.discard(beat)
        self._came.set()

    async def _come_back(
        self, beats: Iterable[bytes | str], sent: Awaitable[object], advice: str = ""
    ) -> None:
        """Send the beats, and wait for them."""
        self._beats = set(beats)
        self._came.clear()
        await sent
        try:
            async with asyncio.timeout(self._within):
                while self._beats and not any(reader.done() for reader in self._readers):
                    await self._came.wait()
                    self._came.clear()
        except TimeoutError:
            raise StoreError(f"{self._server} has sent nothing for too long{advice}") from None
        if self._beats:
            raise StoreError(f"{self._server} ended the channel")
