"""Pages of a gateway on loopback, under its own names only.

The owner of any name can point it at 127.0.0.1, and so lead a browser on this machine to the
gateway. The site behind would believe the request, because the gateway sends it the site's own
Host. So pages obey the rules of `/v1/`: another Host is refused, and a WebSocket of another origin.
"""

import logging
from collections.abc import Collection
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from stillfresh.errors import shown
from stillfresh.gateway.guard import is_called_rightly
from stillfresh.gateway.live.messages import is_allowed_origin
from stillfresh.http.fields import values
from stillfresh.pages.edge import TUNNEL, host_fault, refuse

ANOTHER_NAME: Final = (
    b"This gateway does not answer to this name. From this machine it answers to localhost,\n"
    b"127.0.0.1, ::1 and the names in server.hosts. If a proxy on this machine passes on the\n"
    b"visitor's Host, add that name to server.hosts.\n"
)
ANOTHER_ORIGIN: Final = (
    b"Pages of this origin may not open a WebSocket here. Add the origin to server.origins.\n"
)

logger = logging.getLogger(__name__)


class PageNames:
    """An ASGI app that passes on requests which name this gateway, and refuses others.

    Args:
        app: The pages.
        hosts: The gateway's names besides loopback's.
        origins: Origins whose pages may open WebSockets of the site, besides its own.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif not self._is_named(scope):
            self._warn(scope)
            await _refuse(scope, receive, send, 421, ANOTHER_NAME)
        elif scope["type"] != "http" and not self._has_allowed_origin(scope):
            await _refuse(scope, receive, send, 403, ANOTHER_ORIGIN)
        else:
            await self._app(scope, receive, send)

    def _is_named(self, scope: Scope) -> bool:
        """True if the edge may have the request: it answers a malformed one with 400.

        HTTP/1.0 may leave the Host out. Browsers never do, so no name has led one here.
        """
        headers = scope["headers"]
        if not values(headers, b"host"):
            return True
        if host_fault(headers, scope.get("http_version", "1.1")) is not None:
            return True
        return is_called_rightly(scope, self._hosts)

    def _has_allowed_origin(self, scope: Scope) -> bool:
        host = values(scope["headers"], b"host")
        origin = values(scope["headers"], b"origin")
        return is_allowed_origin(_text(origin), _text(host), self._origins)

    def _warn(self, scope: Scope) -> None:
        """Log the first refusal only: visitors choose how many there are."""
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "a request from this machine was refused with 421, because of the Host %s; if a proxy "
            "on this machine passes on the visitor's Host, add the name to server.hosts "
            "(or to STILLFRESH_SERVER__HOSTS); later ones are not logged",
            shown(_text(values(scope["headers"], b"host"))),
        )


def _text(lines: list[bytes]) -> str:
    return b", ".join(lines).decode("latin-1")


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, text: bytes) -> None:
    if scope["type"] == "websocket":
        await WebSocketClose(4403, "not under this name")(scope, receive, send)
    else:
        await refuse(send, status, text, is_last=scope["type"] == TUNNEL)
