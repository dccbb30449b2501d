"""Shared by all HTTP apps of the gateway: JSON, files, and problems (RFC 9457).

Every response of the gateway itself is made here, so all of them carry the same safety fields.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from stillfresh.http import etag_of, not_modified
from stillfresh.http.client import Unreadable, collected

T = TypeVar("T")
MAX_BODY: Final = 1_048_576
BODY_WITHIN: Final = 30.0
"""Seconds for a request body to arrive."""
SAFETY: Final = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
TYPES: Final = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "ts": "text/plain",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)


class AnyText(PathConvertor):
    """`{id:any}`: the rest of a path, line ends included."""

    regex = r"[\s\S]*"


register_url_convertor("any", AnyText())


class Problem(HTTPException):
    """What was wrong with a request, for people (`detail`) and programs (`code`)."""

    def __init__(
        self, status: int, code: str, title: str, detail: str = "", **headers: str
    ) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(status, detail or title, named)
        self.code = code
        self.title = title


class ProblemBody(msgspec.Struct):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str


def problem_app(routes: Iterable[Route], handlers: Mapping[Any, Any] | None = None) -> Starlette:
    """An app that answers every error, a visitor's or its own, with a problem."""
    own = {HTTPException: _answer, Exception: _broken, **(handlers or {})}
    routes = list(routes)
    for route in routes:  # its `$` would match before a line end, too
        route.path_regex = re.compile(rf"{route.path_regex.pattern.removesuffix('$')}\Z")
    app = Starlette(routes=routes, exception_handlers=own)
    app.router.redirect_slashes = False
    return app


def reply(
    body: bytes, media_type: str | None, headers: Mapping[str, str], status: int = 200
) -> Response:
    return Response(body, status, {**headers, **SAFETY}, media_type)


def json_reply(value: object, cache_control: str = "no-store", status: int = 200) -> Response:
    body = msgspec.json.encode(value)
    return reply(body, "application/json", {"cache-control": cache_control}, status)


def problem_reply(problem: Problem) -> Response:
    status = problem.status_code
    code = problem.code
    kind = f"urn:stillfresh:problem:{code}"
    body = msgspec.json.encode(ProblemBody(kind, problem.title, status, problem.detail, code))
    headers = {"cache-control": "no-store", **(problem.headers or {})}
    return reply(body, "application/problem+json", headers, status)


async def _answer(request: Request, exc: HTTPException) -> Response:
    """A problem as it is; the framework's own errors are an unknown path or method."""
    if isinstance(exc, Problem):
        return problem_reply(exc)
    if exc.headers is None:
        nothing = f"nothing is at {request.scope['path']}"
        return problem_reply(Problem(404, "not_found", "Not found", nothing))
    may = ", ".join(sorted(exc.headers["Allow"].split(", ")))
    return problem_reply(
        Problem(405, "method_not_allowed", "Not done here", f"use {may}", allow=may)
    )


async def _broken(request: Request, exc: Exception) -> Response:
    """The server logs what it was."""
    del request, exc
    return problem_reply(Problem(500, "broken", "It is our mistake; it has been noted"))


async def json_body(request: Request, type_: type[T], example: str) -> T:
    """The body of a request: complete, in time, and of this type."""
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != "application/json":
        raise Problem(415, "not_json", "Not JSON", "send content-type: application/json")
    try:
        async with asyncio.timeout(BODY_WITHIN):
            body = await collected(request.stream(), MAX_BODY)
        return msgspec.json.decode(body, type=type_)
    except TimeoutError as exc:
        raise Problem(408, "too_slow", "Too slow", "the body did not arrive in time") from exc
    except ClientDisconnect as exc:
        raise Problem(400, "cut_off", "The request was cut off") from exc
    except Unreadable as exc:
        why = f"a body has at most {MAX_BODY:,} bytes"
        raise Problem(413, "too_long", "Too long", why) from exc
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Problem(422, "bad_body", "Invalid body", f"send {example}: {exc}") from exc


def tagged(request: Request, body: bytes, media_type: str, headers: dict[str, str]) -> Response:
    """The response with its ETag; without a body for a client that has it already."""
    etag = etag_of(body)
    headers = {**headers, "etag": etag.decode()}
    if not_modified(tuple(request.headers.raw), etag, None):
        return reply(b"", None, headers, 304)
    return reply(body, media_type, headers)


async def file_reply(name: str, request: Request) -> Response:
    """A file for browsers, from the package; visitors never choose `name`."""
    headers = {"cache-control": "no-cache"}
    if name.endswith(".html"):
        headers["content-security-policy"] = POLICY
    return tagged(request, _file(name), TYPES[name.rpartition(".")[2]], headers)


@cache
def _file(name: str) -> bytes:
    """Read once: there are only a few names."""
    return files("stillfresh.gateway").joinpath("static", name).read_bytes()
