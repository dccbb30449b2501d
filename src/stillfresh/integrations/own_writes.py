"""Read your writes in any ASGI or WSGI app.

`app.add_middleware(ReadYourWrites, caches=[cache])` for FastAPI and Starlette,
`app.wsgi_app = WsgiReadYourWrites(app.wsgi_app, caches=[cache])` for Flask.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from stillfresh.errors import ConfigError, shown
from stillfresh.http.own_writes import ReadsAtLeast, own_writes, token_in, token_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


class ReadYourWrites:
    """ASGI middleware: a client that has changed something reads nothing older.

    `caches` are those that the app reads. A response to POST, PUT, PATCH or DELETE that changed
    one of them carries a token in the field `Stillfresh-Token` and in a cookie. Reads of a request
    with that token, on any machine that shares the store, are no older than the change.
    """

    def __init__(self, app: App, caches: Collection[ReadsAtLeast]) -> None:
        self._app = app
        self._caches = checked_caches(caches)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        with own_writes(self._caches, token_in(scope["headers"])) as writes:
            await self._app(scope, receive, writes.given_with(send, scope))


class WsgiReadYourWrites:
    """WSGI middleware that does what `ReadYourWrites` does for ASGI."""

    def __init__(self, app: "WSGIApplication", caches: Collection[ReadsAtLeast]) -> None:
        self._app = app
        self._caches = checked_caches(caches)

    def __call__(
        self, environ: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        fields = [environ.get("HTTP_STILLFRESH_TOKEN", "")]
        token = token_of(fields, [environ.get("HTTP_COOKIE", "")])
        with own_writes(self._caches, token) as writes:

            def start(status: str, headers: list[tuple[str, str]], *failure: Any) -> Any:  # noqa: ANN401 (as WSGI has it)
                is_secure = environ.get("wsgi.url_scheme") == "https"
                fields = writes.fields(environ["REQUEST_METHOD"], is_secure=is_secure)
                return start_response(status, [*headers, *fields], *failure)

            return writes.streamed(self._app(environ, start))


def checked_caches(caches: Collection[ReadsAtLeast]) -> tuple[ReadsAtLeast, ...]:
    """The caches. Raises ConfigError if one is none, or if it is not given in a list."""
    if not isinstance(caches, list | tuple | set | frozenset):
        raise ConfigError(f"caches: takes a list of caches, not {shown(caches)}")
    for cache in caches:
        if not hasattr(cache, "at_least"):
            raise ConfigError(f"caches: {shown(cache)} is no Cache, SyncCache or PageCache")
    return tuple(caches)
