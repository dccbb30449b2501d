"""The one HTTP client: it checks addresses, and limits the time and the size of an answer.

The library is httpx2; a program may pass a client of httpx too. Their errors end here: a failed
request raises `LoadFailed`, or `RetryAfter` if the upstream says when to come back. Redirects are
not followed, so ids and header fields reach no other server.
"""

import asyncio
import sys
import time
import zlib
from collections.abc import AsyncIterable, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

from stillfresh.checks import checked_whole
from stillfresh.durations import Duration, seconds
from stillfresh.engine import RetryAfter
from stillfresh.errors import ConfigError, LoadFailed, needs, shown, shown_address
from stillfresh.http.fields import Raw, checked_headers, pause_of

with needs("web", "asking an upstream"):
    import httpx2

if TYPE_CHECKING:
    import httpx

MAX_BYTES: Final = 8 * 1024 * 1024
OK: Final = 200
NOTHING: Final = 204
GZIP_WINDOW: Final = 31
ACCEPT: Final = {"accept": "application/json", "accept-encoding": "gzip"}


def checked_url(
    url: object,
    name: str = "url",
    *,
    like: str = "must begin with http:// or https:// and a host",
    may_sign_in: bool = False,
) -> httpx2.URL:
    """Check the whole address of a server; an error never shows the part before an @."""
    text = url if isinstance(url, str) else ""
    try:
        parsed = httpx2.URL(text)
        is_whole = " " not in text and urlsplit(text).port != 0
        labels = parsed.raw_host.decode("ascii").encode("idna").split(b".")
        is_server = parsed.scheme in {"http", "https"} and labels != [b""] and b"xn--" not in labels
    except UnicodeError:
        raise ConfigError(f"{name}: {shown_address(url)} is not a host's name") from None
    except (httpx2.InvalidURL, ValueError):
        raise ConfigError(f"{name}: {shown_address(url)} is not a URL") from None
    if not (is_whole and is_server) or parsed.fragment:
        raise ConfigError(f"{name}: {like}, not {shown_address(url)}")
    if parsed.userinfo and not may_sign_in:
        raise ConfigError(
            f"{name}: write it without a name and a password, not {shown_address(url)}"
        )
    return parsed


def new_client(timeout: float, *, idle_connections: int) -> httpx2.AsyncClient:
    """A client without cookies that keeps `idle_connections`, closed before servers do.

    Connecting has its own timeout: cancelled from outside, it would leave a socket open.
    """
    limits = httpx2.Limits(
        max_connections=100, max_keepalive_connections=idle_connections, keepalive_expiry=4.0
    )
    jar = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
    waits = httpx2.Timeout(timeout, connect=timeout / 2)
    return httpx2.AsyncClient(timeout=waits, limits=limits, cookies=jar)


def checked_client(client: object) -> httpx2.AsyncClient:
    """Accept a client of httpx too: it has the same methods as one of httpx2."""
    if not isinstance(client, tuple(library.AsyncClient for library in _libraries())):
        raise ConfigError(
            f"client: must be an httpx2.AsyncClient or an httpx.AsyncClient, not {shown(client)}"
        )
    return cast("httpx2.AsyncClient", client)


def request_errors() -> tuple[type[Exception], ...]:
    """The errors of a request; `UnicodeError`: a redirect to a host with an invalid name."""
    errors = (
        (library.HTTPError, library.InvalidURL, library.StreamError) for library in _libraries()
    )
    return (UnicodeError, *chain.from_iterable(errors))


def _libraries() -> list[ModuleType]:
    """A client of httpx's comes from a program that has imported httpx."""
    other = sys.modules.get("httpx")
    return [httpx2] if other is None else [httpx2, other]


def pause_asked(response: httpx2.Response) -> float | None:
    """Seconds after which the upstream accepts another request; None if it does not say."""
    headers = response.headers
    return pause_of(headers.get("retry-after", ""), headers.get("date", ""), time.time())


class Unreadable(ValueError):
    """The body cannot be used; the text says why."""


class BodyReader:
    """The bytes of a body, without their compression, and never more than `most` of them."""

    def __init__(self, most: int, encoding: str = "") -> None:
        name = encoding.strip().lower()
        if name not in {"", "identity", "gzip", "x-gzip"}:
            raise Unreadable(f"a body encoded as {shown(encoding)}, not as gzip or not at all")
        self.data = bytearray()
        self._most = most
        self._gzip = zlib.decompressobj(GZIP_WINDOW) if name.endswith("gzip") else None

    def add(self, chunk: bytes) -> None:
        """Add bytes. Decompresses no more than fits: a small answer can expand to gigabytes."""
        room = self._most + 1 - len(self.data)
        if self._gzip is None:
            self.data += chunk[:room]
        else:
            self.data += self._inflate(self._gzip, chunk, room)
        if len(self.data) > self._most:
            raise Unreadable(f"more than {self._most:,} bytes (max_bytes)")

    def _inflate(self, gzip: "zlib._Decompress", chunk: bytes, room: int) -> bytes:
        try:
            data = gzip.decompress(chunk, room)
        except zlib.error as exc:
            raise Unreadable(f"a broken gzip stream ({exc})") from exc
        if gzip.unused_data:
            raise Unreadable("data after the end of its gzip stream")
        return data

    def end(self) -> bytes:
        """Return the body. Raises Unreadable if its gzip stream is incomplete."""
        if self._gzip is not None and not self._gzip.eof:
            raise Unreadable("a gzip stream that was cut short")
        return bytes(self.data)


async def collected(chunks: AsyncIterable[bytes], most: int, encoding: str = "") -> bytes:
    """Read a body chunk by chunk, so that no more than `most` bytes are ever in memory."""
    body = BodyReader(most, encoding)
    async for chunk in chunks:
        body.add(chunk)
        await asyncio.sleep(0)  # a thousand tiny chunks that came at once are not one step
    return body.end()


async def whole(response: httpx2.Response, most: int) -> bytes:
    """The body of an upstream's answer."""
    encoding = response.headers.get("content-encoding", "")
    return await collected(response.aiter_raw(), most, encoding)


class Refused(LoadFailed):
    """The upstream answered with an unexpected status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpAnswer(NamedTuple):
    """A whole answer; names of fields in lower case."""

    status: int
    headers: Raw
    body: bytes


class Endpoint:
    """`await Endpoint(client, url).ask({"ids": […]})` is the body of the answer to that POST."""

    def __init__(
        self,
        client: "httpx2.AsyncClient | httpx.AsyncClient",
        url: str,
        *,
        timeout: Duration = "10s",
        max_bytes: int = MAX_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._client = checked_client(client)
        self._url = url
        self._timeout = seconds(timeout, name="timeout", positive=True)
        self._max_bytes = checked_whole("max_bytes", max_bytes)
        all_headers = {**checked_headers(headers or {}), **ACCEPT}
        self._headers: Raw = tuple(
            (name.encode(), value.encode()) for name, value in all_headers.items()
        )
        address = urlsplit(url)
        self._where = f"{address.netloc}{address.path}"
        """The address in errors, without the query, which may be a secret."""

    async def ask(self, content: dict[str, Any] | None = None) -> bytes:
        """POST the content as JSON, or GET without it. The body; an empty list for 204."""
        answer = await self.answer(content, takes=(OK, NOTHING))
        return answer.body if answer.status == OK else b"[]"

    async def answer(
        self,
        content: dict[str, Any] | None = None,
        url: str | None = None,
        headers: Raw = (),
        *,
        takes: tuple[int, ...] = (OK,),
    ) -> HttpAnswer:
        """An answer with one of the statuses `takes`; only 200 has a body. `url`: another one."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._request(content, url or self._url, headers, takes)
        except TimeoutError as exc:
            raise LoadFailed(f"{self._where}: no complete answer in {self._timeout:g} s") from exc
        except Unreadable as exc:
            raise LoadFailed(f"{self._where}: the answer is {exc}") from exc
        except request_errors() as exc:
            raise LoadFailed(f"{self._where}: {type(exc).__name__}: {exc}") from exc

    async def _request(
        self, content: dict[str, Any] | None, url: str, headers: Raw, takes: tuple[int, ...]
    ) -> HttpAnswer:
        """The answer; a `Retry-After` is obeyed."""
        method = "GET" if content is None else "POST"
        sent = [*self._headers, *headers]
        exchange = self._client.stream(
            method, url, json=content, headers=sent, follow_redirects=False
        )
        async with exchange as response:
            status = response.status_code
            if status in takes:
                body = await whole(response, self._max_bytes) if status == OK else b""
                fields = ((name.lower(), value) for name, value in response.headers.raw)
                return HttpAnswer(status, tuple(fields), body)
            message = f"{self._where}: HTTP {status}"
            if response.has_redirect_location:
                to = shown(response.headers["location"].partition("?")[0])
                message += f" to {to}; redirects are not followed, write the address that answers"
            pause = pause_asked(response)
            if pause is not None:
                raise RetryAfter(pause, message)
            raise Refused(message, status)
