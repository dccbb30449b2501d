"""An HTTP cache for requests: an adapter for sessions.

```python
session = requests.Session()
session.mount("https://", CacheAdapter("sqlite:///http.db"))
response = session.get("https://api.example.org/items")
info_of(response).age
```

One adapter serves any number of sessions and threads. Needs `stillfresh[requests]`.
"""

import io
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from http import client as http_client
from typing import Any, Final, Unpack

from stillfresh.engine import Cache, CacheStats
from stillfresh.errors import ConfigError, NotOpen, needs
from stillfresh.http import Reason
from stillfresh.http.fields import Raw
from stillfresh.integrations.http_cache.model import (
    Controls,
    Forward,
    FoundResponse,
    HttpRequest,
    PassedResponse,
    ResponseInfo,
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
from stillfresh.integrations.http_cache.site_load import SiteLoad, run_sync
from stillfresh.integrations.http_cache.threads import from_any_thread, in_thread
from stillfresh.stores.contract import Store
from stillfresh.sync import SyncCache, SyncResource

with needs("requests", "stillfresh.integrations.requests"):
    from requests import PreparedRequest, Response, exceptions
    from requests.adapters import BaseAdapter, HTTPAdapter
    from urllib3 import HTTPHeaderDict, HTTPResponse
    from urllib3.exceptions import HTTPError, ProtocolError, SSLError

__all__ = ["CacheAdapter", "Controls", "HttpCacheOptions", "ResponseInfo", "info_of"]

PART: Final = 65_536
"""Bytes that are read at once."""
FIELD: Final = CONTROL_FIELD.decode()


class RawLive:
    """The response of an adapter, whose body is read as the site sent it."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.status: int = response.status_code
        self.headers = fields_of(response)
        self.prefix: list[bytes] = []

    def read(self) -> bytes:
        """Raises what `response.content` raises."""
        try:
            part: bytes = self.response.raw.read(PART, decode_content=False)
        except ProtocolError as exc:
            raise exceptions.ChunkedEncodingError(exc, request=self.response.request) from exc
        except SSLError as exc:
            raise exceptions.SSLError(exc, request=self.response.request) from exc
        except HTTPError as exc:
            raise exceptions.ConnectionError(exc, request=self.response.request) from exc
        return part

    def close(self) -> None:
        self.response.close()

    def passed(self) -> Response:
        if self.prefix:
            body = RawBody(self.prefix, self.response.raw)
            self.response.raw = _raw_response(self.status, self.headers, body)
        return self.response


class RawBody(io.RawIOBase):
    """A body of which a part was read already, as a file."""

    def __init__(self, prefix: list[bytes], unread: Any) -> None:  # noqa: ANN401 (of urllib3)
        self._prefix = io.BytesIO(b"".join(prefix))
        self._unread = unread

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 (any buffer)
        part = self._prefix.read(len(buffer))
        if not part:
            part = self._unread.read(len(buffer), decode_content=False)
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._unread.close()
        self._unread.release_conn()  # `close` alone leaves its place in the pool taken
        super().close()


class ReadFields:
    """The fields of a response where requests looks for cookies; its body is read elsewhere."""

    def __init__(self, fields: HTTPHeaderDict) -> None:
        self.msg = fields

    def isclosed(self) -> bool:
        return True

    def close(self) -> None:
        pass


class CacheAdapter(BaseAdapter):
    """Caches the responses of sessions, by RFC 9111. Any number of threads may use it.

    Args:
        cache: A `SyncCache`, a store, or the address of one, such as "sqlite:///http.db".
        adapter: Sends the requests; None: an adapter of requests.
        options: As in `HttpCacheOptions`.
    """

    def __init__(
        self,
        cache: "str | Store | SyncCache" = "memory://",
        adapter: BaseAdapter | None = None,
        **options: Unpack[HttpCacheOptions],
    ) -> None:
        super().__init__()
        if isinstance(cache, Cache):
            raise ConfigError("cache: an adapter of requests needs a SyncCache, not a Cache")
        self._is_own = not isinstance(cache, SyncCache)
        self.cache = cache if isinstance(cache, SyncCache) else SyncCache(cache)
        """The cache, for statistics, the dashboard and `bypassed()`."""
        self._responses = ResponseCache(self.cache.on_loop, in_thread=True, **options)
        self._resource = SyncResource(self.cache.run, self._responses.resource)
        self._adapter = HTTPAdapter() if adapter is None else adapter
        self._builder = HTTPAdapter()

    def send(  # noqa: PLR0917 (as in requests)
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: Any = None,  # noqa: ANN401 (of requests)
        verify: bool | str = True,
        cert: Any = None,  # noqa: ANN401 (of requests)
        proxies: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the stored response, or the site's."""
        controls = _controls_of(request)
        request = _without_controls(request)
        http_request = _request_data(request, verify, cert)
        responses = self._responses
        settings = {"timeout": timeout, "verify": verify, "cert": cert, "proxies": proxies}
        lookup = plan_request(http_request, controls, responses.settings)
        if isinstance(lookup, Forward):
            return self._forward(request, http_request, controls, lookup, stream=stream, **settings)
        hit = responses.hit(lookup, self._resource.get_nowait)
        if hit is not None:
            return self._new_response(request, hit)
        send = partial(self._ask, request, settings)
        site_load = SiteLoad(lookup, send, self.cache.clock, responses.settings)
        try:
            reply = in_thread(
                self.cache, responses.answer, lookup, site_load, lambda: run_sync(site_load.steps())
            )
        except NotOpen:
            reply = Forward(Reason.STORE)
        except exceptions.RequestException as exc:
            exc.request = request  # it may be a copy of another caller's, whose credentials it has
            raise
        finally:
            live = site_load.leave()
            if live is not None:
                live.close()
        match reply:
            case FoundResponse():
                return self._new_response(request, reply)
            case PassedResponse(RawLive() as passed):
                return _with_info(passed.passed(), reply.status, reply.info)
            case Forward():
                return self._forward(
                    request, http_request, controls, reply, stream=stream, **settings
                )
        raise AssertionError(reply)

    def _ask(self, request: PreparedRequest, settings: dict[str, Any], more: Raw) -> RawLive:
        """The body is read here or by the caller, so it is always streamed."""
        sent = request
        if more:
            sent = request.copy()
            sent.headers.update({name.decode(): value.decode("latin-1") for name, value in more})
        return RawLive(self._adapter.send(sent, stream=True, **settings))

    def _forward(
        self,
        request: PreparedRequest,
        http_request: HttpRequest,
        controls: Controls,
        why: Forward,
        **settings: Any,  # noqa: ANN401 (of requests)
    ) -> Response:
        refusal = self._responses.refusal(http_request, controls)
        if refusal is not None:
            return self._new_response(request, refusal)
        response = self._adapter.send(request, **settings)
        fields = fields_of(response)
        if request.method not in SAFE:
            status = response.status_code
            with suppress(NotOpen):  # a closed cache serves nothing
                in_thread(self.cache, self._responses.note_change, http_request, status, fields)
        info = ResponseInfo(from_cache=False, is_stored=False, reason=why.reason)
        return _with_info(response, passed_status(fields, why.reason, why.before), info)

    def _new_response(self, request: PreparedRequest, hit: FoundResponse) -> Response:
        stored = hit.response
        body = b"" if request.method == "HEAD" else bytes(stored.body)
        raw = _raw_response(stored.head.status, hit.fields, io.BytesIO(body), request.method)
        response: Response = self._builder.build_response(request, raw)
        response.connection = self  # type: ignore[assignment]
        response.stillfresh = hit.info  # type: ignore[attr-defined]
        return response

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
        """Close the adapter, and the cache if it was made here."""
        if self._is_own:
            from_any_thread(self.cache.close)
        self._adapter.close()


def info_of(response: Response) -> ResponseInfo:
    """Return where a response came from. Raises ConfigError if no CacheAdapter made it."""
    info = getattr(response, "stillfresh", None)
    if not isinstance(info, ResponseInfo):
        raise ConfigError("response: not from a CacheAdapter; mount one with session.mount(...)")
    return info


def _without_controls(request: PreparedRequest) -> PreparedRequest:
    """The request that the site sees. The session's own keeps the field, for redirects."""
    if FIELD not in request.headers:
        return request
    sent = request.copy()
    del sent.headers[FIELD]
    return sent


def _controls_of(request: PreparedRequest) -> Controls:
    given = request.headers.get(FIELD)
    if given is None:
        return Controls()
    value = given if isinstance(given, bytes) else given.encode("latin-1", "replace")
    return controls_in(((CONTROL_FIELD, value),))


def _request_data(request: PreparedRequest, verify: bool | str, cert: object) -> HttpRequest:
    raw = tuple((_bytes(name).lower(), _bytes(value)) for name, value in request.headers.items())
    url = str(request.url)
    is_encrypted = url.lower().startswith("https:")
    return HttpRequest(
        str(request.method),
        url,
        raw,
        _known_body(request),
        certificate=repr(cert) if is_encrypted and cert else "",
        trust=repr(verify) if is_encrypted and verify is not True else "",
    )


def _known_body(request: PreparedRequest) -> bytes | None:
    """None for a stream, which can be read once only."""
    match request.body:
        case None:
            return b""
        case str(text):
            return text.encode()
        case bytes(data):
            return data
    return None


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1", "replace")


def fields_of(response: Response) -> Raw:
    """The fields, each line on its own."""
    raw = response.raw.headers if response.raw is not None else None
    lines = response.headers if raw is None else raw
    return tuple((_bytes(name).lower(), _bytes(value)) for name, value in lines.items())


def _raw_response(
    status: int,
    fields: Raw,
    body: io.IOBase,
    method: str | None = None,
) -> HTTPResponse:
    headers = HTTPHeaderDict()
    for name, value in fields:
        headers.add(name.decode("latin-1").title(), value.decode("latin-1"))
    return HTTPResponse(
        body=body,
        headers=headers,
        status=status,
        version=11,
        reason=http_client.responses.get(status, ""),
        preload_content=False,
        original_response=ReadFields(headers),  # type: ignore[arg-type]
        request_method=method,
    )


def _with_info(response: Response, status: bytes, info: ResponseInfo) -> Response:
    response.headers["Cache-Status"] = status.decode("latin-1")
    response.stillfresh = info  # type: ignore[attr-defined]
    return response
