"""T5: asks an ASGI app as a server does, and keeps what it says, message by message."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Heard", "ask", "http_scope"]

ENOUGH = 4_000_000
"""Bytes, after which a client leaves."""


class Heard:
    """An answer, as far as it came."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.size = 0
        self.is_whole = False
        self.has_left = asyncio.Event()

    def __repr__(self) -> str:
        return f"{self.status} {self.headers[:9]} {self.body[:200]!r} {self.is_whole=}"

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def is_cut(self) -> bool:
        return self.status is not None and not self.is_whole

    def field(self, name: bytes) -> bytes:
        return b", ".join(value for key, value in self.headers if key == name)

    async def send(self, message: Mapping[str, Any]) -> None:
        """As servers check it: a start, then parts of bytes until the last."""
        if self.has_left.is_set():
            return
        if message["type"] == "http.response.start":
            assert self.status is None
            self.status = message["status"]
            self.headers = list(message["headers"])
            return
        assert self.status is not None
        assert not self.is_whole
        part = message.get("body", b"")
        assert isinstance(part, bytes)
        self.size += len(part)
        self.parts.append(part)
        self.is_whole = not message.get("more_body", False)
        if self.size > ENOUGH:
            self.has_left.set()


def http_scope(
    path: str = "/",
    *,
    method: str = "GET",
    headers: Iterable[tuple[bytes, bytes]] = (),
    **others: Any,
) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("latin-1", "replace"),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"site.test"), *headers],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 80),
        "state": {},
        **others,
    }


async def ask(app: Any, scope: Mapping[str, Any], body: bytes = b"") -> Heard:
    """What the app raises is raised."""
    response = Heard()
    is_asked = False

    async def receive() -> dict[str, Any]:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await response.has_left.wait()
        return {"type": "http.disconnect"}

    await app(scope, receive, response.send)
    return response
