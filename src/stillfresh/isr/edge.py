"""The side of the proxy that faces the clients (I12, I13): what they may say, and what breaks.

Every request goes through here before the cache sees it; `rules_forward` decides.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from stillfresh.http.fields import Raw, members, values
from stillfresh.isr import rules_forward as rules
from stillfresh.isr.collecting import App, Receive
from stillfresh.isr.responses import Message, Send, send_whole, sized
from stillfresh.isr.rules_forward import Networks, checked_networks, is_host
from stillfresh.isr.rules_routes import EDGE, Scope

FAULTS: Final = {502: b"destination_unavailable", 504: b"http_response_timeout"}
"""RFC 9209 §2.3: what went wrong between here and the site."""

__all__ = ["Edge", "checked_networks", "is_host", "refuse"]

logger = logging.getLogger(__name__)


class Edge:
    """`host`: that of the one site there is, whatever it is called; None: as it is asked for."""

    def __init__(self, app: App, *, host: bytes | None, trusted: Networks = ()) -> None:
        self._app = app
        self._host = host
        self._trusted = trusted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (fault := rules.host_fault(scope["headers"], scope["http_version"])) is not None:
            await refuse(send, 400, fault)
        elif (unknown := rules.coding_fault(scope["headers"])) is not None:
            await refuse(send, 501, unknown, is_last=True)
        elif scope["method"] in {"OPTIONS", "TRACE"}:
            await self._limited(scope, receive, send)
        else:
            await self._pass(scope, receive, send)

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """RFC 9110 §7.6.2: so many more may pass it on; who may not is who was meant."""
        left = rules.forwards_left(scope["headers"])
        if left == 0:
            await _answer(scope, send)
            return
        if left is not None:
            scope = {**scope, "headers": rules.with_forwards(scope["headers"], left - 1)}
        await self._pass(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def told(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(self._believed(scope), receive, told)
        except ConnectionError as exc:  # once begun, an answer that just ends is seen to be cut
            logger.warning("%s", exc)
            if not started:
                await refuse(send, 502, b"The site broke off its answer.\n")

    def _believed(self, scope: Scope) -> Mapping[str, Any]:
        """I13: of the scheme, the host and the address, what we see, or what one we trust says."""
        peer = scope["client"][0] if scope.get("client") else None
        is_ours = rules.is_trusted(peer, self._trusted)
        headers: Raw = rules.believed(rules.own_fields(tuple(scope["headers"])), is_trusted=is_ours)
        host, scheme = self._host, scope["scheme"]
        if is_ours:
            scheme = _scheme(headers) or scheme
            host = host or _host(headers)
        if host is None and (hosts := values(headers, b"host")):
            host = rules.plain_host(hosts[0])
        if host is not None:
            headers = ((b"host", host), *(it for it in headers if it[0] != b"host"))
        if peer is not None:
            headers = _from(headers, peer)
        return {**scope, "headers": headers, "scheme": scheme, EDGE: True}


def _scheme(headers: Raw) -> str | None:
    said = (rules.forwarded(headers, b"proto") or b"").lower()
    return said.decode("ascii") if said in {b"http", b"https"} else None


def _host(headers: Raw) -> bytes | None:
    said = rules.forwarded(headers, b"host")
    return rules.plain_host(said) if said is not None and is_host(said) else None


def _from(headers: Raw, peer: str) -> Raw:
    name = b"x-forwarded-for"
    chain = [*members(values(headers, name)), peer.encode("ascii")]
    return (*(it for it in headers if it[0] != name), (name, b", ".join(chain)))


async def _answer(scope: Scope, send: Send) -> None:
    if scope["method"] == "OPTIONS":
        await refuse(send, 200, b"")
        return
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    await refuse(send, 200, rules.reflected(target, scope["headers"]), kind=b"message/http")


async def refuse(
    send: Send,
    status: int,
    text: bytes,
    *,
    kind: bytes = b"text/plain",
    is_last: bool = False,
) -> None:
    """What a proxy says on its own; `is_last`: and then it hangs up."""
    fields: Raw = ((b"content-type", kind), (b"cache-control", b"no-store"))
    if (fault := FAULTS.get(status)) is not None:
        fields = (*fields, (b"proxy-status", b"stillfresh; error=" + fault))
    if is_last:
        fields = (*fields, (b"connection", b"close"))
    await send_whole(send, status, sized(fields, len(text)), text)
