"""Pages: `cache_page` and a middleware that serve stale pages, and render each one once (E2, E5).

Django's own cache middleware decides what may be cached, for how long and under which key. A
`PageExchange` takes the place of its cache.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import wraps
from threading import get_ident
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.middleware.cache import CacheMiddleware
from django.utils.cache import patch_vary_headers

from stillfresh.durations import Duration
from stillfresh.engine import Loaded, Private
from stillfresh.errors import StoreError
from stillfresh.http.freshness import without_lifetime
from stillfresh.integrations.django.backend import MISSING, StillfreshCache, backend_of

Tags = Sequence[str] | Callable[..., Sequence[str]]
"""The tags of a page, or a function of the request and the view's arguments."""


class ServerSideError(Exception):
    """The view answered with a 5xx status; the old page is kept."""


class PageMiddleware(CacheMiddleware):
    """Caches pages. Use it in place of Django's two cache middlewares, first in MIDDLEWARE."""

    async_capable = False
    stale_for: Duration | None = None
    error_for: Duration | None = None
    standing_in: Any = None
    """The object that Django's rules use as their cache."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.respond(request, self.get_response)

    def respond(
        self,
        request: HttpRequest,
        view: Callable[[HttpRequest], HttpResponse],
        tags: Sequence[str] = (),
    ) -> HttpResponse:
        """Return the page, fresh or stale; render it with `view` if there is none."""
        exchange = PageExchange(self, request, view, tags)
        rules = self.on(exchange)
        found: HttpResponse | None = rules.process_request(request)
        if found is not None:
            if exchange.is_unverified:
                _end_lifetime(found)
            return found
        if exchange.response is not None:
            return exchange.response
        return rules.process_response(request, _rendered(view(request)))

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        """Apply Django's rules of which responses may be cached."""
        if _names_visitor(request, response):
            request._cache_update_cache = False
        judged: HttpResponse = super().process_response(request, response)
        return judged

    def on(self, standing_in: object) -> "PageMiddleware":
        """Return this middleware for another cache."""
        rules = copy(self)
        rules.standing_in = standing_in
        return rules

    @property
    def cache(self) -> Any:
        """The cache that Django's rules read and write."""
        return self.standing_in

    @property
    def backend(self) -> StillfreshCache:
        """The `StillfreshCache` of the alias; raises ConfigError if it is another backend."""
        return backend_of(self.cache_alias, "pages that may be stale")


class PageExchange:
    """One request for a page. Django's rules use it as their cache."""

    def __init__(
        self,
        rules: PageMiddleware,
        request: HttpRequest,
        view: Callable[[HttpRequest], HttpResponse],
        tags: Sequence[str],
    ) -> None:
        self.response: HttpResponse | None = None
        """The view's response, if this request called the view."""
        self.is_unverified = False
        """True if the store could not be asked about the page that was found."""
        self._rules = rules
        self._backend = rules.backend
        self._request = request
        self._view = view
        self._tags = tags
        self._thread = get_ident()

    def get(self, key: str) -> Any:
        """A page, or the header fields that pages of its address vary by."""
        if self._request.method != "GET":
            return self._backend.get(key)
        if self.response is not None:
            return None
        try:
            found, is_unverified = self._backend.read_checked(
                key, lambda: self._load(key), tags=self._tags_of(key)
            )
        except ServerSideError:
            return None
        self.is_unverified = is_unverified  # of the page, which is read last
        return None if found is MISSING else found

    def set(self, key: str, value: object, timeout: float) -> None:
        """Store a page. If the store is unavailable, the visitor still gets it."""
        with suppress(StoreError):
            self._backend.put(key, self._loaded(key, value, timeout), tags=self._tags_of(key))

    def _load(self, key: str) -> object:
        """Call the view; store all that Django's rules store, and return this key's value."""
        is_own = get_ident() == self._thread
        request = self._request if is_own else copy(self._request)
        request._cache_update_cache = True
        response = _rendered(self._view(request))
        if is_own:
            self.response = response
        if response.status_code >= 500:
            raise ServerSideError(f"the view answered with status {response.status_code}")
        kept = Kept()
        self._rules.on(kept).process_response(request, response)
        own = kept.pop(key, None)
        for other, (value, timeout) in kept.items():
            # A put that fails would drop it from memory, and the next visit would render again.
            if not self._backend.is_known_without_store(other, value):
                self.set(other, value, timeout)
        return Private(None, is_noted=False) if own is None else self._loaded(key, *own)

    def _loaded(self, key: str, value: object, timeout: float) -> Loaded[bytes]:
        """The `Vary` entry of an address outlives its pages, so that it is learned only once."""
        rules, backend = self._rules, self._backend
        loaded = backend.loaded(
            value, timeout, self._tags_of(key), rules.stale_for, rules.error_for
        )
        if not isinstance(value, HttpResponse):
            longer = 1 + max(loaded.stale_for or 0, loaded.error_for or 0)
            loaded.fresh_for = (loaded.fresh_for or 0) + longer
        return loaded

    def _tags_of(self, key: str) -> Sequence[str]:
        return () if ".cache_header." in key else self._tags


def _end_lifetime(response: HttpResponse) -> None:
    """E29: nobody knows whether it is still right, so no cache may keep it as fresh."""
    fields = [(name.encode(), value.encode("latin-1")) for name, value in response.items()]
    for name, _ in fields:
        del response[name.decode()]
    for name, value in without_lifetime(fields):
        response[name.decode()] = value.decode("latin-1")


def _rendered(response: Any) -> HttpResponse:
    rendered: HttpResponse = response.render() if hasattr(response, "render") else response
    return rendered


def _names_visitor(request: Any, response: HttpResponse) -> bool:
    """True if it is only for this visit. If the session was read, it varies by cookie."""
    session: Any = getattr(request, "session", None)
    messages: Any = getattr(request, "_messages", None)
    has_token = request.META.get("CSRF_COOKIE_NEEDS_UPDATE", False)
    if has_token or getattr(session, "accessed", False):
        patch_vary_headers(response, ["Cookie"])
    return bool(
        (has_token and settings.CSRF_COOKIE_NAME not in request.COOKIES)
        or getattr(session, "modified", False)
        or (getattr(messages, "used", False) and len(messages))
    )


class Kept(dict[str, tuple[Any, float]]):
    """The values that Django's rules store of one response, and for how many seconds."""

    def set(self, key: str, value: object, timeout: float) -> None:
        self[key] = value, timeout


def cache_page(
    timeout: float,
    *,
    cache: str | None = None,
    key_prefix: str | None = None,
    stale_for: Duration | None = None,
    error_for: Duration | None = None,
    tags: Tags = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Cache a view as Django's `cache_page` does.

    For `stale_for` after the timeout, the old page is served while a new one is rendered in the
    background. For `error_for`, it is served if the view fails. `tags` are for `invalidate_tag`.
    """

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        is_async = iscoroutinefunction(view)
        called = async_to_sync(view) if is_async else view
        pages = PageMiddleware(
            called, page_timeout=timeout, cache_alias=cache, key_prefix=key_prefix
        )
        pages.stale_for, pages.error_for = stale_for, error_for

        @wraps(view)
        def cached(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            own = tags(request, *args, **kwargs) if callable(tags) else tags
            return pages.respond(request, lambda it: called(it, *args, **kwargs), own)

        @wraps(view)
        async def awaited(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            return await sync_to_async(cached)(request, *args, **kwargs)

        return awaited if is_async else cached

    return decorate
