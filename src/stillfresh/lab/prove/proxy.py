"""A TCP proxy in a thread, whose connections can be cut, delayed and half answered."""

import asyncio
import threading
from contextlib import suppress
from typing import Final, Self

HOST: Final = "127.0.0.1"


class Proxy:
    """A proxy between the processes of a proof and their store."""

    def __init__(self, host: str, port: int) -> None:
        self.delay = 0.0
        """Seconds that each request and each reply takes longer."""
        self.loses_replies = False
        """Requests are done, and the connection breaks before their reply."""
        self.is_away = False
        self.port = 0
        self._to = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_open.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._cut)

    def set_away(self, is_away: bool) -> None:
        """The store cannot be reached, or can again."""
        self.is_away = is_away
        self.cut()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._relay, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_open.set()
        await self._over.wait()
        server.close()
        self._cut()

    async def _relay(self, near: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        writers = {client}
        tasks: list[asyncio.Task[None]] = []
        try:
            if self.is_away:
                return
            far, server = await asyncio.open_connection(*self._to)
            writers.add(server)
            self._writers |= writers
            tasks = [
                asyncio.create_task(self._pass(near, server, is_reply=False)),
                asyncio.create_task(self._pass(far, client, is_reply=True)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass  # the client finds its connection broken, as the store's is, or the proxy ends
        finally:
            for task in tasks:
                task.cancel()
            self._writers -= writers
            for writer in writers:
                writer.transport.abort()

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                if self.delay:
                    await asyncio.sleep(self.delay)
                if is_reply and self.loses_replies:
                    return
                target.write(data)
                await target.drain()
