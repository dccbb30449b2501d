"""Responses that arrive faster than their visitors read them: memory first, then a file.

A visitor who reads slowly must not hold a connection to the site, and must not fill memory. So the
response is read from the site at the site's speed: into memory, up to a limit for each response and
for all of them; then into a temporary file without a name, up to a limit for all files. Where that
is full too, the site waits for the visitor, as it would without a gateway.
"""

import asyncio
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable
from typing import IO, Any, Final, TypeVar

T = TypeVar("T")

MOST_IN_MEMORY: Final = 1_048_576
"""Bytes of one response."""
MOST_IN_MEMORY_OF_ALL: Final = 16_777_216
"""Bytes of all responses."""
FROM_FILE: Final = 65_536
"""Bytes that are read from a file at a time."""

logger = logging.getLogger(__name__)


class SpoolRoom:
    """The room of all responses of a process together."""

    def __init__(self, max_spill: int) -> None:
        self._max_spill = max_spill
        self.in_memory = 0
        self.in_files = 0

    def take_memory(self, size: int) -> bool:
        """True if so many bytes may be in memory; then they count until they are given back."""
        if self.in_memory + size > MOST_IN_MEMORY_OF_ALL:
            return False
        self.in_memory += size
        return True

    def take_file(self, size: int) -> bool:
        """The same for files."""
        if self.in_files + size > self._max_spill:
            return False
        self.in_files += size
        return True


class Spool:
    """One response on its way: one task calls `add`, another one `next`.

    Bytes in the file come after those in memory. While it has some, no bytes go into memory.
    """

    def __init__(self, room: SpoolRoom) -> None:
        self._room = room
        self._memory: deque[bytes] = deque()
        self._size = 0
        """Bytes in memory."""
        self._file: IO[bytes] | None = None
        self._taken = 0
        """Bytes of room that the file has."""
        self._written = 0
        self._read = 0
        self._is_writing = False
        """`add` has not counted yet what it writes to the file."""
        self._is_whole = False
        self._error: Exception | None = None
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._under_way: set[asyncio.Future[Any]] = set()
        """Steps on the file, in threads, which nothing can interrupt: one of each task at most."""

    async def add(self, part: bytes) -> None:
        """Take the next part; waits while there is no room for it."""
        while not self._goes_into_memory(part) and not await self._goes_into_file(part):
            if not self._memory and not self._unread:
                self._memory.append(part)  # its reader waits: one part is beyond the limits
                break
            self._has_room.clear()
            await self._has_room.wait()
        self._has_news.set()

    @property
    def _unread(self) -> int:
        """Bytes in the file that were not read."""
        return self._written - self._read

    def _goes_into_memory(self, part: bytes) -> bool:
        if self._unread or self._size + len(part) > MOST_IN_MEMORY:
            return False
        if not self._room.take_memory(len(part)):
            return False
        self._size += len(part)
        self._memory.append(part)
        return True

    async def _goes_into_file(self, part: bytes) -> bool:
        if not self._room.take_file(len(part)):
            return False
        self._taken += len(part)
        self._is_writing = True
        try:
            await self._in_thread(self._write, part, self._written)
        except OSError as exc:  # the disk is full: it waits in memory
            logger.warning("a response could not be put into a temporary file: %s", exc)
            self._taken -= len(part)
            self._room.in_files -= len(part)
            return False
        finally:
            self._is_writing = False
        self._written += len(part)
        return True

    async def _in_thread(self, step: Callable[..., T], *arguments: object) -> T:
        """If its caller is cancelled, the step goes on, and the file stays open until it ends."""
        loop = asyncio.get_running_loop()
        # No task: a loop that ends would cancel it, while the thread goes on with the file.
        running = loop.run_in_executor(None, step, *arguments)
        self._under_way.add(running)
        running.add_done_callback(self._under_way.discard)
        return await asyncio.shield(running)

    def end(self, error: Exception | None = None) -> None:
        """It is complete, or it broke off: `next` raises this after what has come."""
        self._is_whole = True
        self._error = error
        self._has_news.set()

    async def next(self) -> bytes:
        """The next part; empty at the end."""
        while not self._memory and not self._unread:
            if self._is_whole:
                if self._error is not None:
                    raise self._error
                return b""
            self._has_news.clear()
            await self._has_news.wait()
        part = self._from_memory() if self._memory else await self._from_file()
        self._has_room.set()
        return part

    def _from_memory(self) -> bytes:
        part = self._memory.popleft()
        counted = min(len(part), self._size)
        self._size -= counted
        self._room.in_memory -= counted
        return part

    async def _from_file(self) -> bytes:
        size = min(FROM_FILE, self._unread)
        part = await self._in_thread(self._read_at, size, self._read)
        self._read += len(part)
        if not self._unread and not self._is_writing:  # begin it anew
            self._room.in_files -= self._taken
            self._taken = 0
            self._written = 0
            self._read = 0
        return part

    def close(self) -> None:
        """Give the room back, whatever was not read."""
        self._room.in_memory -= self._size
        self._room.in_files -= self._taken
        self._size = 0
        self._taken = 0
        self._memory.clear()
        if self._under_way:
            last = asyncio.gather(*self._under_way, return_exceptions=True)
            last.add_done_callback(lambda _: self._close_file())
        else:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # In a thread:

    def _write(self, data: bytes, at: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file.fileno(), view, at)
            view = view[written:]
            at += written

    def _read_at(self, size: int, at: int) -> bytes:
        if self._file is None:
            raise AssertionError("only bytes that were written are read")
        return os.pread(self._file.fileno(), size, at)
