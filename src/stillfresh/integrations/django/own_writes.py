"""Read your writes in a Django site: one line of MIDDLEWARE."""

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core.cache import caches
from django.http import FileResponse, HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from stillfresh.http.own_writes import COOKIE, FIELD, OwnWrites, ReadsAtLeast, own_writes, token_of
from stillfresh.integrations.django.backend import StillfreshCache
from stillfresh.integrations.own_writes import checked_caches


class ReadYourWritesMiddleware:
    """A user who has changed something reads nothing older, from any process or machine.

    It concerns the caches of CACHES with our backend, and those that the setting
    `STILLFRESH_READ_YOUR_WRITES` names by their import paths. A response to POST, PUT, PATCH or
    DELETE that changed one of them carries a token in a field and in a cookie.
    """

    async_capable = True
    sync_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        self._caches = _caches()
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if self._is_async:
            return self._respond_later(request)
        with own_writes(self._caches, _token(request)) as writes:
            return _with_token(self._get_response(request), request, writes)

    async def _respond_later(self, request: HttpRequest) -> HttpResponseBase:
        with own_writes(self._caches, _token(request)) as writes:
            return _with_token(await self._get_response(request), request, writes)


def _token(request: HttpRequest) -> str:
    field = request.headers.get(FIELD, "")
    return token_of([field], [f"{COOKIE}={request.COOKIES.get(COOKIE, '')}"])


def _with_token(
    response: HttpResponseBase, request: HttpRequest, writes: OwnWrites
) -> HttpResponseBase:
    if isinstance(response, StreamingHttpResponse) and not isinstance(response, FileResponse):
        parts: Any = response.streaming_content
        is_async = response.is_async
        response.streaming_content = (writes.streamed_async if is_async else writes.streamed)(parts)
    fields = dict(writes.fields(request.method or "GET", is_secure=request.is_secure()))
    if fields:
        response[FIELD] = fields[FIELD]
        response.cookies.load(fields["Set-Cookie"])
    return response


def _caches() -> tuple[ReadsAtLeast, ...]:
    """The caches of this site that use stillfresh."""
    backends = [caches[alias] for alias in settings.CACHES]
    of_django = [cache.cache for cache in backends if isinstance(cache, StillfreshCache)]
    named = getattr(settings, "STILLFRESH_READ_YOUR_WRITES", ())
    return checked_caches([*of_django, *(import_string(path) for path in named)])
