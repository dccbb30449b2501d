"""The client's end of a tunnel: its connection, from the switch of protocols on.

Needs `stillfresh[web]`.
"""

import asyncio
from collections.abc import Iterable

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from stillfresh.pages.edge import LINGER, Inbox


class ClientEnd:
    """Before `open` the request can be refused, by an answer like any other."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self._cycle: RequestResponseCycle | None = None
        self.status: int | None = None
        """Of the answer with which the tunnel began."""
        self.inbox = Inbox(transport)
        self.read = self.inbox.read

    def attach(self, cycle: RequestResponseCycle) -> None:
        """After a refusal the connection is of no use: its parser has stopped."""
        self._cycle = cycle
        cycle.keep_alive = False

    def open(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        if self._cycle is not None:
            self._cycle.response_started = True
        self._transport.write(head_of(status, headers))

    async def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
            await self._flow.drain()

    def finish(self) -> None:
        """Send the remaining bytes, and close."""
        if self._cycle is not None:
            self._cycle.response_complete = True
        if not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(LINGER, self._transport.abort)


def head_of(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    return STATUS_LINE[status] + lines + b"\r\n"
