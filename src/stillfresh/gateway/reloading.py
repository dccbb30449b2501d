"""SIGHUP: a gateway with new settings replaces the running one.

Settings of the socket and the processes need a restart, and the log says so. If the new settings
cannot be read, or their store cannot be opened, nothing changes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from starlette.types import Receive, Scope, Send

from stillfresh.errors import StillfreshError
from stillfresh.gateway.app import Gateway
from stillfresh.gateway.config import Settings

FIXED: Final = ("host", "port", "uds", "workers", "record", "record_share")
WITHIN: Final = 10.0
"""Seconds for requests on the replaced gateway to end."""

logger = logging.getLogger(__name__)


def after_reload(old: Settings, new: Settings) -> Settings:
    """The new settings, except for those that need a restart."""
    fixed = {name: getattr(old.server, name) for name in FIXED}
    return replace(new, server=replace(new.server, **fixed), log=old.log)


def unchangeable(old: Settings, new: Settings) -> Iterator[str]:
    """Changed settings that need a restart."""
    for name in FIXED:
        if (stays := getattr(old.server, name)) != getattr(new.server, name):
            yield f"server.{name}: takes a restart; it stays {stays}"
    if old.log != new.log:
        yield "log: takes a restart"


def read_again(read: Callable[[], Settings], old: Settings) -> Settings | None:
    """None if there are mistakes, which are logged."""
    try:
        new = read()
    except StillfreshError as exc:
        for line in str(exc).splitlines():
            logger.error("not reloaded: %s", line)  # noqa: TRY400 (a mistake in a file, no trace)
        return None
    for line in unchangeable(old, new):
        logger.warning("%s", line)
    return after_reload(old, new)


class Replaceable:
    """An ASGI app that passes requests to the current gateway."""

    def __init__(self, app: Gateway) -> None:
        self.app = app
        self._busy: dict[Gateway, int] = {app: 0}
        self._idle = asyncio.Event()
        self._replacing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        self._busy[app] += 1
        try:
            await app(scope, receive, send)
        finally:
            if app in self._busy:  # otherwise it was closed meanwhile
                self._busy[app] -= 1
                self._idle.set()

    async def replace(self, new: Gateway, replaced: Callable[[], None]) -> None:
        """Open the new one. The old one closes when its requests are answered.

        `replaced`: called as soon as new requests go to the new one.
        """
        async with self._replacing:
            try:
                await new.cache.open()
                await new.open()
            except StillfreshError as exc:
                logger.error("not reloaded: %s", exc)  # noqa: TRY400 (a store that is unavailable)
                await new.close()
                return
            old = self.app
            self.app = new
            replaced()
            new.is_draining = old.is_draining
            self._busy[new] = 0
            try:
                async with asyncio.timeout(WITHIN):
                    while self._busy[old]:
                        self._idle.clear()
                        await self._idle.wait()
            except TimeoutError:
                pass  # closing cuts them off
            del self._busy[old]
            await old.close()
            logger.warning("reloaded")
