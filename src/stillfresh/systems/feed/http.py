"""The feed's network over HTTP, with `httpx2`. Needs `stillfresh[web]`.

Below `base_url`, in JSON; fields that have no name here are carried as `extra`:

- `GET /days/{YYYY-MM-DD}?category=…`: an array of topics without bodies (no query: all of them)
- `GET /topics/{uuid}`: a topic; 404 or 410: there is none
- `GET /topics/{uuid}/comments`: an array of comments; 404 or 410: there are none
- `POST /topics`: a topic; any 2xx: published
- `DELETE /topics/{uuid}`: any 2xx, 404 or 410: gone
- `POST /topics/{uuid}/comments`: a comment; any 2xx: published

Whatever else comes raises `FeedHttpError`, which names the URL, what came and what was expected;
429 and 503 with `Retry-After` raise `RetryAfter`, so that the engine waits that long. Nothing is
tried twice here: the engine's cooldowns do that.
"""

import asyncio
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypeVar
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from stillfresh.checks import checked_whole
from stillfresh.durations import Duration, seconds
from stillfresh.engine import RetryAfter
from stillfresh.errors import ConfigError, NotOpen, StillfreshError, needs, shown, shown_address
from stillfresh.http.fields import checked_headers
from stillfresh.systems.feed import rules
from stillfresh.systems.feed.model import Comment, Topic, checked_uuid

with needs("web", "stillfresh.systems.feed.http"):
    import httpx2

    from stillfresh.http.client import (
        OK,
        BodyReader,
        Unreadable,
        checked_client,
        checked_url,
        new_client,
        pause_asked,
        request_errors,
        whole,
    )

if TYPE_CHECKING:
    import httpx

__all__ = ["FeedHttpError", "HttpFeedSource"]

R = TypeVar("R", Topic, Comment)

MOST_REDIRECTS: Final = 5
EXCERPT: Final = 100
"""Bytes of an error's body that are read at all."""
LONGEST: Final = 300
"""Characters of a URL, or of an answer, that an error shows."""
KEPT: Final = 20
"""Idle connections."""
WRITTEN: Final = "a status of 2xx"
ABSENT: Final = frozenset({404, 410})
BUSY: Final = frozenset({429, 503})
_TOPICS: Final = rules.JsonRecords(Topic, strict=True)
_COMMENTS: Final = rules.JsonRecords(Comment, strict=True)


class FeedHttpError(StillfreshError):
    """The server did not send what was asked for. `status` is None if it sent no response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class FeedRequest(msgspec.Struct, frozen=True):
    """A request, and its name in errors; its URL has no credentials."""

    method: str
    url: str
    expected: str
    content: bytes | None = None

    def message(self, came: str) -> str:
        """What an error says: the request, what came and what was expected."""
        return f"{self.method} {_cut(self.url)}: {_cut(came)}; expected {self.expected}"

    def error(self, came: str, status: int | None = None) -> FeedHttpError:
        return FeedHttpError(self.message(came), status)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


class HttpFeedSource:
    """A `FeedSource` over HTTP: `async with HttpFeedSource("https://feed.example/v1") as source:`.

    `timeout` is for a whole exchange. Responses above `max_bytes` fail. It does not close a
    `client` that you give.
    """

    def __init__(
        self,
        base_url: str,
        *,
        client: "httpx2.AsyncClient | httpx.AsyncClient | None" = None,
        timeout: Duration = "10s",
        max_bytes: int = 8_000_000,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._base, self._auth = _checked_base(base_url)
        self._timeout = seconds(timeout, name="timeout", positive=True)
        self._max_bytes = checked_whole("max_bytes", max_bytes)
        self._headers = httpx2.Headers({"Accept": "application/json"})
        self._headers.update(checked_headers(headers or {}))
        self._headers["Accept-Encoding"] = "gzip"
        self._is_ours = client is None
        self._client = (
            new_client(self._timeout, idle_connections=KEPT)
            if client is None
            else checked_client(client)
        )
        self._is_closed = False

    async def day_index(self, day: date, category: str | None) -> list[Topic]:
        """Return the topics of one day without bodies."""
        query = "" if category is None else f"?category={_encode('category', category)}"
        path = f"/days/{day:%Y-%m-%d}{query}"
        expected = "200 and a JSON array of topics"
        topics = await self._ask("GET", path, expected, _TOPICS.all)
        return [topic if topic.body is None else replace(topic, body=None) for topic in topics]

    async def topic(self, uuid: str) -> Topic | None:
        """Return the whole topic, or None if the server has none."""
        path = f"/topics/{_encode('uuid', uuid)}"
        expected = "200 and a topic as JSON, or 404"
        topics = await self._ask(
            "GET", path, expected, lambda data: [_TOPICS.one(data)], absent=ABSENT
        )
        return topics[0] if topics else None

    async def comments(self, uuid: str) -> list[Comment]:
        """Return all comments of a topic."""
        path = f"/topics/{_encode('uuid', uuid)}/comments"
        expected = "200 and a JSON array of comments, or 404"
        return await self._ask("GET", path, expected, _COMMENTS.all, absent=ABSENT)

    async def create_topic(self, topic: Topic) -> None:
        """Publish a topic."""
        await self._ask("POST", "/topics", WRITTEN, sends=rules.checked_topic(topic))

    async def delete_topic(self, uuid: str) -> None:
        """Delete a topic."""
        await self._ask("DELETE", f"/topics/{_encode('uuid', uuid)}", WRITTEN, absent=ABSENT)

    async def add_comment(self, topic_uuid: str, comment: Comment) -> None:
        """Publish a comment."""
        path = f"/topics/{_encode('topic_uuid', topic_uuid)}/comments"
        (new,) = rules.checked_comments(topic_uuid, [comment])
        await self._ask("POST", path, WRITTEN, sends=new)

    async def close(self) -> None:
        """Close the client, unless it was given."""
        self._is_closed = True
        if self._is_ours:
            await self._client.aclose()

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"HttpFeedSource({self._base!r})"

    async def _ask(
        self,
        method: str,
        path: str,
        expected: str,
        decode: Callable[[bytes], list[R]] | None = None,
        *,
        sends: Topic | Comment | None = None,
        absent: Container[object] = (),
    ) -> list[R]:
        """The body; empty for a write, and if the status says that it does not exist."""
        content = None if sends is None else msgspec.json.encode(rules.json_object(sends))
        request = FeedRequest(method, f"{self._base}{path}", expected, content)
        self._check_open()
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._send(self._build(request))
                try:
                    return await self._read(request, response, decode)
                finally:
                    await response.aclose()
        except FeedHttpError as exc:
            if exc.status in absent:
                return []
            raise
        except TimeoutError as exc:
            raise request.error(f"no complete answer in {self._timeout:g} s") from exc
        except request_errors() as exc:
            came = f"{type(exc).__name__}: {exc}".removesuffix(": ")
            if type(exc).__name__ == "ConnectTimeout":
                came = f"no connection within {self._timeout / 2:g} s"
            raise request.error(came) from exc

    async def _read(
        self,
        request: FeedRequest,
        response: httpx2.Response,
        decode: Callable[[bytes], list[R]] | None,
    ) -> list[R]:
        """The records of a response. A write is done when its status arrives: no body is read."""
        is_good = response.is_success if decode is None else response.status_code == OK
        if not is_good:
            raise await _refusal(request, response)
        if decode is None:
            return []
        try:
            return _records(decode, await whole(response, self._max_bytes))
        except Unreadable as exc:
            kind = response.headers.get("Content-Type")
            came = "no content type," if kind is None else shown(kind)
            raise request.error(f"{came} with: {exc}", response.status_code) from exc

    def _build(self, request: FeedRequest) -> httpx2.Request:
        """Connecting has its own time-out: cancelled from outside, it leaves a socket open."""
        headers = self._headers.copy()
        if request.content is not None:
            headers["Content-Type"] = "application/json"
        return self._client.build_request(
            request.method,
            request.url,
            content=request.content,
            headers=headers,
            timeout=(self._timeout / 2, None, None, None),
        )

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        """Reads follow redirects within their host, so that no header field reaches another one."""
        for _ in range(MOST_REDIRECTS):
            response = await self._send_once(request)
            following = response.next_request
            if request.method != "GET" or following is None or not _is_near(request, following):
                return response
            await response.aclose()
            request = following
        return await self._send_once(request)

    async def _send_once(self, request: httpx2.Request) -> httpx2.Response:
        send = partial(self._client.send, request, stream=True, follow_redirects=False)
        if self._auth is not None:
            send = partial(send, auth=self._auth)
        try:
            return await send()
        except httpx2.InvalidURL as exc:
            raise httpx2.RemoteProtocolError(f"a redirect with an invalid address: {exc}") from exc

    def _check_open(self) -> None:
        if self._is_closed or self._client.is_closed:
            raise NotOpen(f"{self!r} is closed, or the client it was given; make another one")


async def _refusal(request: FeedRequest, response: httpx2.Response) -> Exception:
    status = response.status_code
    reason = response.reason_phrase[:EXCERPT]
    came = f"status {status} {reason}{_target(response)}{await _excerpt(response)}"
    pause = pause_asked(response)
    if status in BUSY and pause is not None:
        return RetryAfter(pause, f"{request.message(came)}; asked to wait {pause:g} s")
    return request.error(came, status)


def _target(response: httpx2.Response) -> str:
    if response.next_request is None:
        return ""
    url = response.next_request.url.copy_with(userinfo=b"", query=None, fragment=None)
    return f" to {shown(str(url))} (followed for reads, on the same host, {MOST_REDIRECTS} times)"


async def _excerpt(response: httpx2.Response) -> str:
    """The beginning of the body; empty if it cannot be read."""
    body = BodyReader(EXCERPT)
    with suppress(Unreadable, *request_errors()):
        async for chunk in response.aiter_raw():
            body.add(chunk)
    is_plain = body.data and "Content-Encoding" not in response.headers
    return f", {shown(body.data[:EXCERPT].decode(errors='replace'))}" if is_plain else ""


def _is_near(request: httpx2.Request, following: httpx2.Request) -> bool:
    """True if a redirect stays on the same server."""
    here = request.url
    target = following.url
    return (here.scheme, here.host, here.port) == (target.scheme, target.host, target.port)


def _checked_base(base_url: object) -> tuple[str, tuple[str, str] | None]:
    """The URL without its credentials, and these."""
    like = "must be like 'https://feed.example/v1', without a query"
    url = checked_url(base_url, "base_url", like=like, may_sign_in=True)
    if url.query:
        raise ConfigError(f"base_url: {like}, not {shown_address(base_url)}")
    auth = (url.username, url.password) if url.userinfo else None
    return str(url.copy_with(userinfo=b"")).rstrip("/"), auth


def _records(decode: Callable[[bytes], list[R]], data: bytes) -> list[R]:
    """All or none: one entry left out would look like a topic that is gone.

    And what the types cannot say: a name that is not empty, a time that fits.
    """
    try:
        records = decode(data)
    except (ValueError, RecursionError) as exc:
        text = shown(data[:EXCERPT].decode(errors="replace"))
        raise Unreadable(f"{text} ({exc})" if data else "nothing") from exc
    for place, record in enumerate(records):
        if not record.topic_uuid or (isinstance(record, Comment) and not record.comment_uuid):
            raise Unreadable(f"an empty uuid - at `$[{place}]`")
        if not -rules.LARGEST <= record.created_at < rules.LARGEST:
            raise Unreadable(f"a time beyond 64 bits - at `$[{place}].created_at`")
    return records


def _encode(name: str, text: object) -> str:
    """One segment of a path or one value of a query, whatever characters it has."""
    segment = quote(checked_uuid(text, name), safe="")
    return segment.replace(".", "%2E") if segment in {".", ".."} else segment
