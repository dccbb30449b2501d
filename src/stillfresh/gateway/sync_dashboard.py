"""The dashboard of a `SyncCache`, answered in the calling thread: for WSGI apps.

The dashboard's own app runs on the loop thread of the cache, where the cache lives. A request is
small and complete, and so is its response.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillfresh.gateway.replies import MAX_BODY, Problem
from stillfresh.http.client import Unreadable, collected

PREFIX: Final = "HTTP_"
UNPREFIXED: Final = ("CONTENT_TYPE", "CONTENT_LENGTH")


class WholeReply(NamedTuple):
    """A response with all of its body."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


async def whole_reply(app: ASGIApp, scope: Scope, body: bytes) -> WholeReply:
    """Ask an ASGI app, and wait for all of its response."""
    is_asked = False
    started: Message = {"status": 500, "headers": []}
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal is_asked
        if is_asked:
            return {"type": "http.disconnect"}
        is_asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal started
        if message["type"] == "http.response.start":
            started = message
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    headers = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in started["headers"]
    ]
    return WholeReply(started["status"], headers, b"".join(parts))


async def send_reply(reply: WholeReply, send: Send) -> None:
    """Send the response to an ASGI server."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


async def body_of(receive: Receive) -> bytes:
    """The body of a request. Raises Problem (413) for one that is too long."""

    async def parts() -> Any:  # noqa: ANN401 (an async iterator of bytes)
        has_more = True
        while has_more:
            message = await receive()
            has_more = message.get("more_body", False)
            yield message.get("body", b"")

    try:
        return await collected(parts(), MAX_BODY)
    except Unreadable as exc:
        why = f"a body has at most {MAX_BODY:,} bytes"
        raise Problem(413, "too_long", "Too long", why) from exc


def scope_of(environ: Mapping[str, Any], path: str) -> Scope:
    """The ASGI scope of a WSGI request, for an app that is mounted; `path`: the rest, as `/…`.

    WSGI has the bytes of a path as Latin-1 text (PEP 3333).
    """
    whole = _utf8(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": environ.get("SERVER_PROTOCOL", "HTTP/1.1").partition("/")[2],
        "method": environ["REQUEST_METHOD"],
        "scheme": environ.get("wsgi.url_scheme", "http"),
        "path": whole,
        "raw_path": None,
        "root_path": whole.removesuffix(path),
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1"),
        "headers": list(_headers(environ)),
        "client": (environ.get("REMOTE_ADDR", ""), 0),
        "server": (environ.get("SERVER_NAME", ""), None),
    }


def _headers(environ: Mapping[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    for name, value in environ.items():
        if name.startswith(PREFIX) or (name in UNPREFIXED and value):
            field = name.removeprefix(PREFIX).replace("_", "-").lower()
            yield field.encode("latin-1"), str(value).encode("latin-1")


def _utf8(text: str) -> str:
    return text.encode("latin-1").decode("utf-8", "replace")


def wsgi_body(environ: Mapping[str, Any]) -> bytes:
    """The body of a WSGI request; one byte more than allowed is enough to refuse it."""
    length = str(environ.get("CONTENT_LENGTH") or "0")
    size = int(length) if length.isascii() and length.isdigit() else 0
    body: bytes = environ["wsgi.input"].read(min(size, MAX_BODY + 1)) if size else b""
    return body
