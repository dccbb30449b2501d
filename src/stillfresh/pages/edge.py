"""The proxy's side towards clients: what they may claim, and errors.

Every request passes here before the cache sees it; `clients` decides.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from stillfresh.http.fields import Raw, end_to_end, members, values, with_field
from stillfresh.pages import clients
from stillfresh.pages.clients import (
    Networks,
    checked_networks,
    has_body,
    host_fault,
    is_allowed,
    is_host,
    is_trusted,
    peer_of,
    target_of,
)
from stillfresh.pages.model import App, Message, Receive, Scope, Send
from stillfresh.pages.repeats import KEEP, PROXY, Repeat, Repeatable, Response
from stillfresh.pages.routes import EDGE
from stillfresh.pages.stored import send_whole, sized
from stillfresh.pages.tunnels import LINGER, TUNNEL, Inbox

FAULTS: Final = {502: b"destination_unavailable", 504: b"http_response_timeout"}
"""RFC 9209 §2.3: what went wrong between here and the site."""

BELIEVED: Final = frozenset({b"x-forwarded-host", b"x-forwarded-proto"})
"""Fields of a trusted proxy that choose the page."""
LONGEST_SHOWN: Final = 1_000
"""Bytes of a path in the log."""

__all__ = ["KEEP", "LINGER", "PROXY", "TUNNEL", "Edge", "Inbox", "Networks", "Repeat"]
__all__ += ["Repeatable", "Response", "checked_networks", "has_body", "host_fault"]
__all__ += ["is_allowed", "is_host", "is_trusted", "peer_of", "refuse", "target_of"]

logger = logging.getLogger(__name__)


class Edge:
    """Checks requests at the edge. `host`: the only site; None: the request's own host."""

    def __init__(self, app: App, *, host: bytes | None, trusted: Networks = ()) -> None:
        self._app = app
        self._host = host
        self._trusted = trusted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in {"lifespan", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers: Raw = tuple(scope["headers"])
        codings = [coding.lower() for coding in members(values(headers, b"transfer-encoding"))]
        left = None
        if scope["method"] in {"OPTIONS", "TRACE"}:
            left = clients.forwards_left(headers)
        if (fault := clients.host_fault(headers, scope["http_version"])) is not None:
            await refuse(send, 400, fault)
        elif codings not in ([], [b"chunked"]):  # RFC 9112 §6.1
            text = b"This transfer coding is not known here.\n"
            await refuse(send, 501, text, is_last=True)
        elif left == 0 and scope["method"] == "OPTIONS":
            await refuse(send, 200, b"")
        elif left == 0:  # RFC 9110 §7.6.2: no hop may pass it on, so it was meant for us
            await refuse(send, 200, clients.reflected(scope), kind=b"message/http")
        else:
            if left is not None:
                headers = with_field(headers, b"max-forwards", b"%d" % (left - 1))
            await self._pass(self._believed_scope(scope, headers), receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        def note_and_send(message: Message) -> Awaitable[None]:
            nonlocal started
            started = True
            return send(message)

        try:
            await self._app(scope, receive, note_and_send)
        except ConnectionError as exc:  # once begun, the client sees that the answer was cut off
            logger.warning("%s %s: %s", scope["method"], shown_path(scope), exc)
            if not started:
                await refuse(send, 502, b"The site broke off its answer.\n")

    def _believed_scope(self, scope: Scope, headers: Raw) -> Scope:
        """Scheme, host and address as we see them, or as a trusted proxy says.

        RFC 9110 §7.6.1: fields for this hop stay here, except the framing of the body.
        """
        peer = peer_of(scope)
        is_ours = clients.is_trusted(peer, self._trusted)
        framing = [field for field in headers if field[0] == b"transfer-encoding"]
        headers = clients.believed((*end_to_end(headers), *framing), is_trusted=is_ours)
        scheme = scope["scheme"]
        host = self._host or next(iter(values(headers, b"host")), None)
        if is_ours:
            claimed = (clients.forwarded(headers, b"proto") or b"").lower()
            if claimed in {b"http", b"https"}:
                scheme = claimed.decode("ascii")
            named = clients.forwarded(headers, b"host")
            if self._host is None and named and is_host(named):
                host = named
        if host is not None:
            plain = host if self._host is not None else clients.plain_host(host)
            headers = with_field(headers, b"host", plain)
        if peer is not None:
            chain = [*members(values(headers, b"x-forwarded-for")), peer.encode("ascii")]
            headers = with_field(headers, b"x-forwarded-for", b", ".join(chain))
        believed = {**scope, "headers": headers, "scheme": scheme, EDGE: True}
        keep = scope.get(KEEP)
        if keep is not None and scope.get(PROXY) is not is_ours:
            del believed[KEEP]  # the same head means another page if the peer is trusted
        elif keep is not None and is_ours:
            believed[KEEP] = partial(_keep_for_proxy, keep)
        return believed


def _keep_for_proxy(keep: Callable[[Repeatable], None], repeatable: Repeatable) -> None:
    """A trusted proxy says which scheme and host its client has used."""
    keep(repeatable._replace(names=repeatable.names | BELIEVED))


def shown_path(scope: Scope) -> str:
    """The path for a line of the log: without the query, which may have secrets, and not long."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    return raw[:LONGEST_SHOWN].decode("ascii", "backslashreplace")


async def refuse(
    send: Send,
    status: int,
    text: bytes,
    *,
    kind: bytes = b"text/plain",
    is_last: bool = False,
    fault: bytes | None = None,
    more: Raw = (),
) -> None:
    """Send an error of the gateway's own; with `is_last`, close the connection afterwards.

    `fault`: RFC 9209 §2.3, if it is another than the status says.
    """
    fields: Raw = ((b"content-type", kind), (b"cache-control", b"no-store"), *more)
    fault = fault or FAULTS.get(status)
    if fault is not None:
        fields = (*fields, (b"proxy-status", b"stillfresh; error=" + fault))
    if is_last:
        fields = (*fields, (b"connection", b"close"))
    await send_whole(send, status, sized(fields, len(text)), text)
