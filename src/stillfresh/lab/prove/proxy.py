"""A TCP proxy in a thread, whose connections can be cut, delayed and half answered."""

import asyncio
import threading
from contextlib import suppress
from typing import Final, Self

from stillfresh.lab.prove.stage import Fault, lasting

HOST: Final = "127.0.0.1"


TURNS: Final = 3
"""Of the event loop, until each accepted connection has reached its handler."""


async def stop_listening(server: asyncio.Server) -> None:
    """Close a server, and lose none of the connections that it has accepted.

    asyncio never closes a connection that it accepted just before `Server.close()`. So the server
    first stops to accept, and closes after all accepted connections are known to their handler.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(TURNS):
        await asyncio.sleep(0)
    server.close()


class Proxy:
    """A proxy between the processes of a proof and their store, or a cache and its site."""

    def __init__(self, host: str, port: int) -> None:
        self.delay = 0.0
        """Seconds that each request and each reply takes longer."""
        self.loses_replies = False
        """Requests are done, and the connection breaks before their reply."""
        self.is_away = False
        self.port = 0
        self._to = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
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
        """The server cannot be reached, or can again."""
        self.is_away = is_away
        self.cut()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_open.set()
        await self._over.wait()
        await stop_listening(server)
        self._cut()
        for task in self._relays:
            task.cancel()
        if self._relays:
            await asyncio.wait(self._relays)

    def _accept(self, near: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        """Note the connection at once: a task that is cancelled before it began closes nothing."""
        self._writers.add(client)
        relay = asyncio.create_task(self._relay(near, client))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, near: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        writers = {client}
        tasks: list[asyncio.Task[None]] = []
        try:
            if self.is_away:
                return
            far, server = await asyncio.open_connection(*self._to)
            writers.add(server)
            self._writers.add(server)
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


def faults_of_connections(proxy: Proxy, server: str) -> dict[str, Fault]:
    """The faults of connections to a server, which is named like this."""

    def set_delay(seconds: float) -> None:
        proxy.delay = seconds

    def set_losing(is_so: bool) -> None:
        proxy.loses_replies = is_so

    return {
        "connections cut": lasting(proxy.cut, lambda: None, 0.0),
        "connections delayed": lasting(lambda: set_delay(0.25), lambda: set_delay(0.0), 1.0, 3.0),
        "replies lost": lasting(lambda: set_losing(True), lambda: set_losing(False), 0.3, 1.0),
        f"{server} out of reach": lasting(
            lambda: proxy.set_away(True), lambda: proxy.set_away(False), 0.3, 1.0, 3.0
        ),
    }
