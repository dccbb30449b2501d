"""Read your writes over HTTP: how a client carries the token of its changes.

A response to a request that changes something gives the token twice: in a field, for programs, and
in a cookie that lives for a minute, so that a browser sends it along by itself. A request with
either of them is served nothing older than those changes. What a token means, and why a forged one
does no harm, is in `engine/at_least.py`.

A cache of responses passes the token on in the field alone. With field and cookie removed, the
request is like that of anybody else, so neither can become part of a key.
"""

import re
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from stillfresh.engine import NotedChanges, merge_tokens, noted_changes
from stillfresh.http.cookies import CookieNames
from stillfresh.http.fields import Raw, values

FIELD: Final = "Stillfresh-Token"
FIELD_NAME: Final = FIELD.lower().encode()
COOKIE: Final = "stillfresh_token"
COOKIE_NAME: Final = COOKIE.encode()
COOKIES: Final = CookieNames.of([COOKIE])
COOKIE_FOR: Final = 60  # seconds that a browser keeps the cookie
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
ANY_CHANGE: Final = "1~c.*"
"""The token of a change by anybody."""
IN_COOKIE: Final = re.compile(rf"(?:^|;)\s*{COOKIE}=([!-:<-~]*)", re.ASCII)
Send: TypeAlias = Callable[[Any], Awaitable[None]]
Reading: TypeAlias = Callable[[], AbstractContextManager[None]]
T = TypeVar("T")


class ReadsAtLeast(Protocol):
    """A cache whose reads can be asked for nothing older than a change."""

    def at_least(self, token: str, /) -> AbstractContextManager[None]: ...


def token_of(fields: Iterable[str], cookies: Iterable[str]) -> str:
    """The token of a request with these values of the field and of `Cookie`; "" if it has none."""
    in_cookies = [match for cookie in cookies for match in IN_COOKIE.findall(cookie)]
    return merge_tokens(*(field.strip() for field in fields), *in_cookies)


def token_in(headers: Raw) -> str:
    """The token of a request with these header fields; "" if it has none."""
    if not _may_have_token(headers):
        return ""
    fields = values(headers, FIELD_NAME)
    cookies = values(headers, b"cookie")
    return token_of(map(_text, fields), map(_text, cookies))


def _may_have_token(headers: Raw) -> bool:
    """True if there is a field or a cookie of that name, whatever is in it."""
    for name, value in headers:
        if name == FIELD_NAME or (name == b"cookie" and COOKIE_NAME in value):
            return True
    return False


def without_token(headers: Raw) -> Raw:
    """These header fields of a request without field and cookie of a token."""
    if not _may_have_token(headers):
        return headers
    others = tuple(field for field in headers if field[0] != FIELD_NAME)
    return COOKIES.removed_from(others)


def with_token(headers: Raw, token: str) -> Raw:
    """These header fields of a request with this token, in the field alone."""
    return (*without_token(headers), (FIELD_NAME, token.encode("ascii")))


def fields_of(token: str, *, is_secure: bool) -> list[tuple[str, str]]:
    """The fields that give a client its token."""
    cookie = f"{COOKIE}={token}; Max-Age={COOKIE_FOR}; Path=/; HttpOnly; SameSite=Lax"
    if is_secure:
        cookie += "; Secure"
    return [(FIELD, token), ("Set-Cookie", cookie)]


class OwnWrites:
    """The changes that one request has made, and those that its client had made before."""

    def __init__(self, caches: Collection[ReadsAtLeast], token: str, changes: NotedChanges) -> None:
        self._caches = caches
        self._token = token
        self._changes = changes

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside the block, reads of the caches are no older than the client's changes."""
        with ExitStack() as stack:
            if self._token:
                for cache in self._caches:
                    stack.enter_context(cache.at_least(self._token))
            yield

    def streamed(self, parts: Iterable[T]) -> Iterable[T]:
        """The body of a response, which may be made while it is sent: with such reads as well."""
        if not self._token or isinstance(parts, list | tuple):
            return parts
        return StreamedParts(parts, self.reading)

    def streamed_async(self, parts: AsyncIterable[T]) -> AsyncIterable[T]:
        """The same for an asynchronous iterator."""
        return _streamed_async(parts, self.reading) if self._token else parts

    def fields(self, method: str, *, is_secure: bool, inner: str = "") -> list[tuple[str, str]]:
        """What to add to the response: nothing if the method is safe, or nothing was changed.

        `inner`: the token that the response has already.
        """
        token = self._changes.token
        if method in SAFE or not token:
            return []
        return fields_of(merge_tokens(inner, token, self._token), is_secure=is_secure)

    def added_to(self, headers: Raw, method: str, *, is_secure: bool) -> Raw:
        """The header fields of a response with the token of all changes."""
        inner = merge_tokens(*map(_text, values(headers, FIELD_NAME)))
        added = self.fields(method, is_secure=is_secure, inner=inner)
        if not added:
            return headers
        others = [field for field in headers if not _gives_token(*field)]
        return (*others, *((name.lower().encode(), value.encode()) for name, value in added))

    def given_with(self, send: Send, scope: Mapping[str, Any]) -> Send:
        """The `send` of an ASGI app whose response is given the token."""
        is_secure = scope.get("scheme") == "https"

        async def send_with_token(message: Any) -> None:  # noqa: ANN401 (as ASGI has it)
            if message["type"] == "http.response.start":
                headers = tuple(message.get("headers", ()))
                added = self.added_to(headers, scope["method"], is_secure=is_secure)
                message = {**message, "headers": [*added]}
            await send(message)

        return send_with_token


class StreamedParts(Generic[T]):
    """The parts of a body, each made in a block of `reading()`, which is closed before it is sent.

    The server that sends the parts runs in a context of its own between them.
    """

    def __init__(self, parts: Iterable[T], reading: Reading) -> None:
        self._parts = parts
        self._reading = reading

    def __iter__(self) -> Iterator[T]:
        with self._reading():
            parts = iter(self._parts)
        while True:
            with self._reading():
                try:
                    part = next(parts)
                except StopIteration:
                    return
            yield part

    def close(self) -> None:
        """End the body early, as WSGI has it."""
        close = getattr(self._parts, "close", None)
        if close is not None:
            close()


async def _streamed_async(parts: AsyncIterable[T], reading: Reading) -> AsyncIterator[T]:
    iterator = aiter(parts)
    while True:
        with reading():
            try:
                part = await anext(iterator)
            except StopAsyncIteration:
                return
        yield part


@contextmanager
def own_writes(caches: Collection[ReadsAtLeast], token: str) -> Iterator[OwnWrites]:
    """Inside the block a request with this token is handled: its reads, and its changes."""
    with noted_changes() as changes:
        writes = OwnWrites(caches, token, changes)
        with writes.reading():
            yield writes


def _gives_token(name: bytes, value: bytes) -> bool:
    """True for a field of a response that gives a token."""
    name = name.lower()
    if name == b"set-cookie":
        return COOKIES.have(value.partition(b";")[0])
    return name == FIELD_NAME


def _text(value: bytes) -> str:
    return value.decode("latin-1")
