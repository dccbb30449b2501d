"""Answers over HTTP: bytes with their header fields, JSON, and problems (RFC 9457) (G2).

Every surface of the gateway answers through here, so all of them carry the same safety fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from stillfresh.http.validation import etag_of, not_modified

SAFETY: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
READING: Final = ("GET", "HEAD")
TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "ts": "text/plain; charset=utf-8",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer; `send` leaves the body out where none may be."""

    status: int
    body: bytes = b""
    content_type: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    async def send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.fields()})
        body = b"" if scope["method"] == "HEAD" else self.body
        await send({"type": "http.response.body", "body": body})

    def fields(self) -> list[tuple[bytes, bytes]]:
        made = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        if self.content_type:
            made.append((b"content-type", self.content_type.encode()))
        if self.status not in {204, 304}:
            made.append((b"content-length", b"%d" % len(self.body)))
        return [*made, *SAFETY]


class Problem(Exception):
    """RFC 9457: what was wrong with a request, for people (`detail`) and programs (`code`)."""

    def __init__(
        self, status: int, code: str, title: str, detail: str = "", **headers: str
    ) -> None:
        super().__init__(detail or title)
        self.status = status
        self.code = code
        self.title = title
        self.detail = detail
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def problem_reply(problem: Problem) -> Reply:
    told = {
        "type": f"urn:stillfresh:problem:{problem.code}",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail or problem.title,
        "code": problem.code,
    }
    headers = {"cache-control": "no-store", **problem.headers}
    body = msgspec.json.encode(told)
    return Reply(problem.status, body, "application/problem+json", headers)


def json_reply(value: object, status: int = 200, **headers: str) -> Reply:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Reply(status, msgspec.json.encode(value), "application/json", named)


def method_of(scope: Scope, *allowed: str) -> str:
    """The request's method, if it is one of these; GET and HEAD if none is named."""
    method: str = scope["method"]
    known = allowed or READING
    if method not in known:
        may = ", ".join(known)
        raise Problem(405, "method_not_allowed", "Not done here", f"use {may}", allow=may)
    return method


def header(scope: Scope, name: bytes) -> str:
    for field_name, value in scope["headers"]:
        if field_name == name:
            text: str = value.decode("latin-1")
            return text
    return ""


async def read_body(receive: Receive, most: int) -> bytes:
    """Never more than `most` bytes are held."""
    body = bytearray()
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            raise Problem(400, "cut_off", "The request broke off")
        body += message.get("body", b"")
        if len(body) > most:
            raise Problem(413, "too_long", "Too long", f"a body has at most {most:,} bytes")
        if not message.get("more_body"):
            return bytes(body)


async def send_file(scope: Scope, send: Send, name: str) -> None:
    """A file that browsers load, from the package, with its ETag (G5, G6).

    `name` is ours, never the visitor's.
    """
    method_of(scope)
    body = _file(name)
    etag = etag_of(body)
    headers = {"etag": etag.decode(), "cache-control": "no-cache"}
    if name.endswith(".html"):
        headers["content-security-policy"] = POLICY
    if not_modified(tuple(scope["headers"]), etag, None):
        await Reply(304, headers=headers).send(scope, send)
        return
    kind = TYPES[name.rpartition(".")[2]]
    await Reply(200, body, kind, headers).send(scope, send)


@cache
def _file(name: str) -> bytes:
    """Read once: a name is one of a few."""
    try:
        return files("stillfresh.web").joinpath("static", name).read_bytes()
    except FileNotFoundError as exc:
        raise Problem(404, "not_found", "Not found", f"this build has no {name}") from exc
