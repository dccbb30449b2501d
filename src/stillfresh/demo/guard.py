"""The header fields of every answer of the demo's site, and what it refuses.

A page of another site can send neither our header field nor our cookie, and it has another name. So
it cannot turn a switch here, even by a name that its owner points at this machine.
"""

from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillfresh.gateway.guard import EVERYWHERE, LOCAL_NAMES, host_name, is_address, is_of_this_page
from stillfresh.gateway.replies import POLICY, SAFETY

HEADER: Final = "x-stillfresh-demo"
"""Only a script of this origin can set it without a preflight request of the browser."""
RESPONSE_FIELDS: Final = {
    **SAFETY,
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """`hosts`: the allowed names of the site, besides those of loopback.

    If it is bound to all addresses, each address is allowed, but no other name: anybody may own it.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._hosts = LOCAL_NAMES | set(hosts)
        self._by_address = bool(self._hosts & EVERYWHERE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(RESPONSE_FIELDS)
            await send(message)

        why = self._refusal(scope) if scope["type"] == "http" else None
        app = self._app if why is None else PlainTextResponse(f"{why}\n", 403)
        await app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> str | None:
        """Why a request is refused; None if it is allowed."""
        name = host_name(scope) or ""
        if name not in self._hosts and not (self._by_address and is_address(name)):
            return "this demo is not called by that name"
        is_ours = is_of_this_page(scope) and Headers(scope=scope).get(HEADER) == "1"
        is_allowed = is_ours or scope["method"] in {"GET", "HEAD"}
        return None if is_allowed else "only this demo's own page may do that"
