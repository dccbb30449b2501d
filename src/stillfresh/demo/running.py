"""One process, one address: the demo served until it is told to end (G8)."""

import asyncio
import contextlib
import logging
import signal
import socket
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stillfresh.demo.assembly import demo
from stillfresh.demo.pace import Pace
from stillfresh.demo.upstream import QuietServer
from stillfresh.errors import StillfreshError
from stillfresh.quiet import quietly
from stillfresh.web.serving import address, bound, server_config

GRACE: Final = 2
"""Seconds that requests under way are given when the demo is told to end."""


def run(
    host: str = "127.0.0.1",
    port: int = 8000,
    store: str | None = None,
    say: Callable[[str], object] = print,
    open_browser: bool = False,
    *,
    speed: float = 1.0,
) -> None:
    """Until SIGINT or SIGTERM. `store` is a directory to keep; without one nothing is kept.

    `speed`: so many times as fast as a visitor likes it, for tests and films.
    """
    pace = Pace().faster(speed)
    # Its trouble is on purpose, and shown.
    with quietly(logging.ERROR), _directory(store) as directory, bound(host, port) as listener:
        where = address(host, listener.getsockname()[1])

        def listening() -> None:
            say(f"stillfresh demo: {where}/")
            say(f"its dashboard:   {where}/_stillfresh/")
            say("Ctrl-C ends it")
            if open_browser:
                asyncio.get_running_loop().run_in_executor(None, webbrowser.open, where)

        asyncio.run(_served(directory, pace, host, listener, listening))


async def _served(
    directory: Path,
    pace: Pace,
    host: str,
    listener: socket.socket,
    listening: Callable[[], None],
) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    async with demo(directory, pace, (host,)) as made:
        config = server_config(made.app)
        config.lifespan, config.timeout_graceful_shutdown = "off", GRACE
        server = QuietServer(config, listening)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        ending = asyncio.create_task(told.wait())
        await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        made.close()
        server.should_exit = True
        await serving


@contextlib.contextmanager
def _directory(store: str | None) -> Iterator[Path]:
    if store is None:
        with tempfile.TemporaryDirectory(prefix="stillfresh-demo-") as made:
            yield Path(made)
        return
    path = Path(store)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StillfreshError(f"store: {store} cannot be the demo's directory: {exc}") from exc
    yield path.absolute()
