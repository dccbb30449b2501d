"""An HTTP cache for httpx and httpx2: a transport for async clients, and one for sync clients.

```python
async with httpx.AsyncClient(transport=AsyncCacheTransport("sqlite:///http.db")) as client:
    response = await client.get("https://api.example.org/items")
    response.extensions["stillfresh"].age
```

The same transport serves both libraries. Needs `stillfresh[httpx]`.
"""

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Unpack

from stillfresh.engine import Cache, CacheStats
from stillfresh.errors import ConfigError, MissingExtra, MissingMethod, NotOpen, shown
from stillfresh.http import Reason
from stillfresh.http.fields import Raw
from stillfresh.integrations.http_cache.model import (
    Controls,
    Forward,
    FoundResponse,
    HttpRequest,
    PassedResponse,
    ResponseInfo,
    controls_from,
)
from stillfresh.integrations.http_cache.responses import (
    HttpCacheOptions,
    ResponseCache,
    passed_status,
)
from stillfresh.integrations.http_cache.rules import (
    CONTROL_FIELD,
    SAFE,
    controls_in,
    plan_request,
)
from stillfresh.integrations.http_cache.site_load import SiteLoad, run_async, run_sync
from stillfresh.integrations.http_cache.threads import from_any_thread, in_thread
from stillfresh.stores.contract import Store
from stillfresh.sync import SyncCache, SyncResource

__all__ = ["AsyncCacheTransport", "CacheTransport", "Controls", "HttpCacheOptions", "ResponseInfo"]

EXTENSION: Final = "stillfresh"
"""The extension of a request with its controls, and of a response with its `ResponseInfo`."""
LIBRARIES: Final = [import_module(name) for name in ("httpx2", "httpx") if find_spec(name)]
if not LIBRARIES:
    raise MissingExtra("stillfresh.integrations.httpx needs httpx2: install stillfresh[httpx]")

if TYPE_CHECKING:
    import httpx
    import httpx2

    class AsyncTransportBase(httpx2.AsyncBaseTransport, httpx.AsyncBaseTransport):  # type: ignore[misc]
        pass

    class TransportBase(httpx2.BaseTransport, httpx.BaseTransport):  # type: ignore[misc]
        pass

    class AsyncStreamBase(httpx2.AsyncByteStream, httpx.AsyncByteStream):
        pass

    class StreamBase(httpx2.SyncByteStream, httpx.SyncByteStream):
        pass
else:

    def _base(name: str) -> type:
        """A class of both libraries, so that the clients of both accept it."""
        return type(name, tuple(getattr(library, name) for library in LIBRARIES), {})

    AsyncTransportBase = _base("AsyncBaseTransport")
    TransportBase = _base("BaseTransport")
    AsyncStreamBase = _base("AsyncByteStream")
    StreamBase = _base("SyncByteStream")


class AsyncBody(AsyncStreamBase):
    """A body of which a part was read already."""

    def __init__(self, live: "AsyncLive") -> None:
        self._live = live

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._live.prefix:
            yield part
        while part := await self._live.read():
            yield part

    async def aclose(self) -> None:
        await self._live.close()


class AsyncLive:
    """The response of an async transport."""

    def __init__(self, response: Any) -> None:  # noqa: ANN401 (of httpx or httpx2)
        self.response = response
        self.status: int = response.status_code
        self.headers = fields_of(response)
        self.prefix: list[bytes] = []
        self._stream = response.stream
        self._parts: AsyncIterator[bytes] | None = None

    async def read(self) -> bytes:
        if self._parts is None:
            self._parts = aiter(self._stream)
        async for part in self._parts:
            if part:
                return part
        return b""

    async def close(self) -> None:
        await self._stream.aclose()

    def passed(self) -> Any:  # noqa: ANN401 (of httpx or httpx2)
        if self.prefix:
            self.response.stream = AsyncBody(self)
        return self.response


class SyncBody(StreamBase):
    """A body of which a part was read already."""

    def __init__(self, live: "SyncLive") -> None:
        self._live = live

    def __iter__(self) -> Iterator[bytes]:
        yield from self._live.prefix
        while part := self._live.read():
            yield part

    def close(self) -> None:
        self._live.close()


class SyncLive:
    """The response of a sync transport."""

    def __init__(self, response: Any) -> None:  # noqa: ANN401 (of httpx or httpx2)
        self.response = response
        self.status: int = response.status_code
        self.headers = fields_of(response)
        self.prefix: list[bytes] = []
        self._stream = response.stream
        self._parts: Iterator[bytes] | None = None

    def read(self) -> bytes:
        if self._parts is None:
            self._parts = iter(self._stream)
        for part in self._parts:
            if part:
                return part
        return b""

    def close(self) -> None:
        self._stream.close()

    def passed(self) -> Any:  # noqa: ANN401 (of httpx or httpx2)
        if self.prefix:
            self.response.stream = SyncBody(self)
        return self.response


class AsyncCacheTransport(AsyncTransportBase):
    """Caches the responses of an async client, by RFC 9111.

    Args:
        cache: A `Cache`, a store, or the address of one, such as "sqlite:///http.db".
        transport: Sends the requests; None: the library's own transport.
        options: As in `HttpCacheOptions`.
    """

    def __init__(
        self,
        cache: "str | Store | Cache" = "memory://",
        transport: "httpx2.AsyncBaseTransport | httpx.AsyncBaseTransport | None" = None,
        **options: Unpack[HttpCacheOptions],
    ) -> None:
        if isinstance(cache, SyncCache):
            raise ConfigError("cache: an async client needs a Cache, not a SyncCache")
        self._is_own = not isinstance(cache, Cache)
        self.cache = cache if isinstance(cache, Cache) else Cache(cache)
        """The cache, for statistics, the dashboard and `bypassed()`."""
        self._responses = ResponseCache(self.cache, in_thread=False, **options)
        self._transport: Any = transport
        # A connection works in the event loop that opened it only.
        self._transports: dict[AbstractEventLoop, dict[ModuleType, Any]] = {}
        self._lock = Lock()

    async def handle_async_request(self, request: Any) -> Any:  # noqa: ANN401 (of either library)
        """Return the stored response, or the site's."""
        library = _library_of(request)
        controls = _controls_of(request)
        request = _without_controls(library, request)
        is_by_body = controls.by_body or self._is_by_body(request)
        body = await request.aread() if is_by_body and _is_known(library, request) else None
        http_request = _request_data(request, body)
        responses = self._responses
        lookup = plan_request(http_request, controls, responses.settings)
        if isinstance(lookup, Forward):
            return await self._forward(library, request, http_request, controls, lookup)
        hit = responses.hit(lookup, responses.resource.get_nowait)
        if hit is not None:
            return _new_response(library, request, hit)
        site_load = SiteLoad(
            lookup,
            partial(self._send, library, request),
            self.cache.clock,
            responses.settings,
        )
        try:
            reply = await responses.answer(lookup, site_load, lambda: run_async(site_load.steps()))
        finally:
            live = site_load.leave()
            if live is not None:
                await live.close()
        match reply:
            case FoundResponse():
                return _new_response(library, request, reply)
            case PassedResponse(AsyncLive() as passed):
                return _with_info(passed.passed(), reply.status, reply.info)
            case Forward():
                return await self._forward(library, request, http_request, controls, reply)
        raise AssertionError(reply)

    def _is_by_body(self, request: Any) -> bool:  # noqa: ANN401 (of either library)
        return self._responses.settings.is_by_body and request.method in {"POST", "QUERY"}

    async def _send(self, library: ModuleType, request: Any, more: Raw) -> AsyncLive:  # noqa: ANN401
        inner = self._inner(library)
        return AsyncLive(await inner.handle_async_request(_with_fields(library, request, more)))

    async def _forward(
        self,
        library: ModuleType,
        request: Any,  # noqa: ANN401 (of either library)
        http_request: HttpRequest,
        controls: Controls,
        why: Forward,
    ) -> Any:  # noqa: ANN401 (of either library)
        refusal = self._responses.refusal(http_request, controls)
        if refusal is not None:
            return _new_response(library, request, refusal)
        response = await self._inner(library).handle_async_request(request)
        fields = fields_of(response)
        if request.method not in SAFE:
            try:
                await self._responses.note_change(http_request, response.status_code, fields)
            except BaseException:  # the caller is cancelled, and the connection is given back
                await response.aclose()
                raise
        return _forwarded_response(response, fields, why)

    def _inner(self, library: ModuleType) -> Any:  # noqa: ANN401 (of either library)
        """The given transport, or one of the request's own library and of this event loop."""
        if self._transport is not None:
            return self._transport
        with self._lock:
            loop = get_running_loop()
            if loop not in self._transports:
                self._forget_closed_loops()
            of_loop = self._transports.setdefault(loop, {})
            if library not in of_loop:
                of_loop[library] = library.AsyncHTTPTransport()
            return of_loop[library]

    def _forget_closed_loops(self) -> None:
        for loop in [loop for loop in self._transports if loop.is_closed()]:
            del self._transports[loop]

    async def invalidate(self, *urls: str, soft: bool = False) -> None:
        """Invalidate all responses of these addresses. `soft`: serve them while they refresh."""
        await self._responses.invalidate(*urls, soft=soft)

    async def invalidate_prefix(self, *urls: str, soft: bool = False) -> None:
        """Invalidate all responses at and below these addresses."""
        await self._responses.invalidate_prefix(*urls, soft=soft)

    async def invalidate_tag(self, *tags: str, soft: bool = False) -> None:
        """Invalidate all responses with one of these tags."""
        await self._responses.invalidate_tag(*tags, soft=soft)

    async def stats(self) -> CacheStats:
        """Return the counts of the cache."""
        return await self.cache.stats()

    async def aclose(self) -> None:
        """Close the transport, as far as this event loop uses it; and the cache if made here."""
        if self._is_own:
            await self.cache.close()
        with self._lock:
            self._forget_closed_loops()
            of_loop = self._transports.pop(get_running_loop(), {})
        for transport in (self._transport, *of_loop.values()):
            if transport is not None:
                await transport.aclose()


class CacheTransport(TransportBase):
    """Caches the responses of a sync client, by RFC 9111. Any number of threads may use it.

    Args:
        cache: A `SyncCache`, a store, or the address of one, such as "sqlite:///http.db".
        transport: Sends the requests; None: the library's own transport.
        options: As in `HttpCacheOptions`.
    """

    def __init__(
        self,
        cache: "str | Store | SyncCache" = "memory://",
        transport: "httpx2.BaseTransport | httpx.BaseTransport | None" = None,
        **options: Unpack[HttpCacheOptions],
    ) -> None:
        if isinstance(cache, Cache):
            raise ConfigError("cache: a sync client needs a SyncCache, not a Cache")
        self._is_own = not isinstance(cache, SyncCache)
        self.cache = cache if isinstance(cache, SyncCache) else SyncCache(cache)
        """The cache, for statistics, the dashboard and `bypassed()`."""
        self._responses = ResponseCache(self.cache.on_loop, in_thread=True, **options)
        self._resource = SyncResource(self.cache.run, self._responses.resource)
        self._transport: Any = transport
        self._transports: dict[ModuleType, Any] = {}
        self._lock = Lock()

    def handle_request(self, request: Any) -> Any:  # noqa: ANN401 (of either library)
        """Return the stored response, or the site's."""
        library = _library_of(request)
        controls = _controls_of(request)
        request = _without_controls(library, request)
        is_by_body = controls.by_body or self._is_by_body(request)
        body = request.read() if is_by_body and _is_known(library, request) else None
        http_request = _request_data(request, body)
        responses = self._responses
        lookup = plan_request(http_request, controls, responses.settings)
        if isinstance(lookup, Forward):
            return self._forward(library, request, http_request, controls, lookup)
        hit = responses.hit(lookup, self._resource.get_nowait)
        if hit is not None:
            return _new_response(library, request, hit)
        site_load = SiteLoad(
            lookup,
            partial(self._send, library, request),
            self.cache.clock,
            responses.settings,
        )
        try:
            reply = in_thread(
                self.cache, responses.answer, lookup, site_load, lambda: run_sync(site_load.steps())
            )
        except NotOpen:
            reply = Forward(Reason.STORE)
        finally:
            live = site_load.leave()
            if live is not None:
                live.close()
        match reply:
            case FoundResponse():
                return _new_response(library, request, reply)
            case PassedResponse(SyncLive() as passed):
                return _with_info(passed.passed(), reply.status, reply.info)
            case Forward():
                return self._forward(library, request, http_request, controls, reply)
        raise AssertionError(reply)

    def _is_by_body(self, request: Any) -> bool:  # noqa: ANN401 (of either library)
        return self._responses.settings.is_by_body and request.method in {"POST", "QUERY"}

    def _send(self, library: ModuleType, request: Any, more: Raw) -> SyncLive:  # noqa: ANN401
        inner = self._inner(library)
        return SyncLive(inner.handle_request(_with_fields(library, request, more)))

    def _forward(
        self,
        library: ModuleType,
        request: Any,  # noqa: ANN401 (of either library)
        http_request: HttpRequest,
        controls: Controls,
        why: Forward,
    ) -> Any:  # noqa: ANN401 (of either library)
        refusal = self._responses.refusal(http_request, controls)
        if refusal is not None:
            return _new_response(library, request, refusal)
        response = self._inner(library).handle_request(request)
        fields = fields_of(response)
        if request.method not in SAFE:
            status = response.status_code
            with suppress(NotOpen):  # a closed cache serves nothing
                in_thread(self.cache, self._responses.note_change, http_request, status, fields)
        return _forwarded_response(response, fields, why)

    def _inner(self, library: ModuleType) -> Any:  # noqa: ANN401 (of either library)
        """The given transport, or one of the request's own library."""
        if self._transport is not None:
            return self._transport
        with self._lock:
            if library not in self._transports:
                self._transports[library] = library.HTTPTransport()
            return self._transports[library]

    def invalidate(self, *urls: str, soft: bool = False) -> None:
        """Invalidate all responses of these addresses. `soft`: serve them while they refresh."""
        in_thread(self.cache, partial(self._responses.invalidate, *urls, soft=soft))

    def invalidate_prefix(self, *urls: str, soft: bool = False) -> None:
        """Invalidate all responses at and below these addresses."""
        in_thread(self.cache, partial(self._responses.invalidate_prefix, *urls, soft=soft))

    def invalidate_tag(self, *tags: str, soft: bool = False) -> None:
        """Invalidate all responses with one of these tags."""
        in_thread(self.cache, partial(self._responses.invalidate_tag, *tags, soft=soft))

    def stats(self) -> CacheStats:
        """Return the counts of the cache."""
        return from_any_thread(self.cache.stats)

    def close(self) -> None:
        """Close the transport, and the cache if it was made here."""
        if self._is_own:
            from_any_thread(self.cache.close)
        for transport in (self._transport, *self._transports.values()):
            if transport is not None:
                transport.close()


OTHER_CLIENT: Final = "{{}} is for {}; write transport={} for {}"
"""What a client of the other kind is told. It calls the first method that it needs."""
FOR_ASYNC: Final = OTHER_CLIENT.format("httpx.AsyncClient", "CacheTransport(…)", "httpx.Client")
FOR_SYNC: Final = OTHER_CLIENT.format("httpx.Client", "AsyncCacheTransport(…)", "httpx.AsyncClient")
for _method in ("handle_request", "__enter__"):
    setattr(AsyncCacheTransport, _method, MissingMethod(FOR_ASYNC))
for _method in ("handle_async_request", "__aenter__"):
    setattr(CacheTransport, _method, MissingMethod(FOR_SYNC))


def _library_of(request: object) -> ModuleType:
    for library in LIBRARIES:
        if isinstance(request, library.Request):
            return library
    raise ConfigError(f"request: must be a request of httpx or httpx2, not {shown(request)}")


def _controls_of(request: Any) -> Controls:  # noqa: ANN401 (of either library)
    """The controls of the extension, or of the field."""
    given = request.extensions.get(EXTENSION)
    if given is not None:
        return controls_from(given)
    return controls_in(tuple((name.lower(), value) for name, value in request.headers.raw))


def _without_controls(library: ModuleType, request: Any) -> Any:  # noqa: ANN401
    """The request that the site sees. The client's own keeps the field, for redirects."""
    if CONTROL_FIELD.decode() not in request.headers:
        return request
    sent = _with_fields(library, request, ())
    del sent.headers[CONTROL_FIELD.decode()]
    return sent


def _is_known(library: ModuleType, request: Any) -> bool:  # noqa: ANN401 (of either library)
    """True if its body is in memory. A stream is sent as it comes, however long it is."""
    return isinstance(request.stream, library.ByteStream)


def _request_data(request: Any, body: bytes | None) -> HttpRequest:  # noqa: ANN401 (of either library)
    raw = tuple((name.lower(), value) for name, value in request.headers.raw)
    return HttpRequest(request.method, str(request.url), raw, body)


def _with_fields(library: ModuleType, request: Any, more: Raw) -> Any:  # noqa: ANN401
    """A request of its own for each try: a client may send it again while it is sent here."""
    return library.Request(
        request.method,
        request.url,
        headers=[*request.headers.raw, *more],
        stream=request.stream,
        extensions=request.extensions,
    )


def fields_of(response: Any) -> Raw:  # noqa: ANN401 (of either library)
    return tuple((name.lower(), value) for name, value in response.headers.raw)


def _new_response(library: ModuleType, request: Any, hit: FoundResponse) -> Any:  # noqa: ANN401
    stored = hit.response
    body = b"" if request.method == "HEAD" else bytes(stored.body)
    return library.Response(
        stored.head.status,
        headers=list(hit.fields),
        stream=library.ByteStream(body),
        extensions={"http_version": b"HTTP/1.1", EXTENSION: hit.info},
    )


def _with_info(response: Any, status: bytes, info: ResponseInfo) -> Any:  # noqa: ANN401
    response.headers["cache-status"] = status.decode("latin-1")
    response.extensions[EXTENSION] = info
    return response


def _forwarded_response(response: Any, fields: Raw, why: Forward) -> Any:  # noqa: ANN401 (of either)
    info = ResponseInfo(from_cache=False, is_stored=False, reason=why.reason)
    return _with_info(response, passed_status(fields, why.reason, why.before), info)
