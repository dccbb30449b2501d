"""Answers over HTTP: bytes with their header fields, JSON, and problems (RFC 9457) (G2).

Every surface of the gateway answers through here, so all of them carry the same safety fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

SAFETY: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
READING: Final = ("GET", "HEAD")


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
