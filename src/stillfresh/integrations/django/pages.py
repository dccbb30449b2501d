"""Pages: `cache_page` and a middleware that serve stale pages, and render each one once.

Django's own cache middleware decides what may be cached, for how long and under which key. It asks
its cache twice for each request: `get` before the view, `set` after it. A `PageExchange` takes the
place of that cache. Its `get` reads the page through the engine, with the view as the loader, so
many requests at once call the view once. If the view was called by this request, `get` answers
None and the middleware returns the response that the exchange has noted.
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
from stillfresh.engine import Answer, Loaded, Private
from stillfresh.errors import StoreError
from stillfresh.http import cache_status, outcome_of, without_lifetime
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
        page: HttpResponse | None = rules.process_request(request)
        if page is not None:
            if exchange.answer is not None and exchange.answer.unverified:
                _end_lifetime(page)
            return _with_status(page, exchange.outcome)
        response = exchange.response
        if response is None:
            response = rules.process_response(request, _rendered(view(request)))
        return _with_status(response, exchange.outcome)

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        """Apply Django's rules of which responses may be cached."""
        if _names_visitor(request, response):
            request._cache_update_cache = False
        processed: HttpResponse = super().process_response(request, response)
        return processed

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
        self.answer: Answer[bytes] | None = None
        """The page that was found, as the cache answered."""
        self._is_found = False
        self._is_stored = False
        self._rules = rules
        self._backend = rules.backend
        self._request = request
        self._view = view
        self._tags = tags
        self._thread = get_ident()

    @property
    def outcome(self) -> str:
        """For `Cache-Status`: what became of this request."""
        if self._is_found and self.answer is not None:
            return outcome_of(self.answer, self.answer.policy.fresh_for)
        if self._is_found:
            return "hit"
        if self._request.method not in {"GET", "HEAD"}:
            return "fwd=method"
        return "fwd=miss; stored" if self._is_stored else "fwd=miss"

    def get(self, key: str) -> Any:
        """A page, or the header fields that pages of its address vary by."""
        if self._request.method != "GET":
            value = self._backend.get(key)
            self._is_found = value is not None
            return value
        if self.response is not None:
            return None
        try:
            value, answer = self._backend.read_with_answer(
                key, lambda: self._load(key), tags=self._tags_of(key)
            )
        except ServerSideError:
            self._is_found = False
            return None
        # Django reads the `Vary` entry first and the page last: this is the page's answer.
        self._is_found = value is not MISSING and self.response is None
        self.answer = answer
        return None if value is MISSING else value

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
        values = Kept()
        self._rules.on(values).process_response(request, response)
        if is_own:
            self._is_stored = bool(values)
        own = values.pop(key, None)
        for other_key, (value, timeout) in values.items():
            # A put that fails would drop it from memory, and the next visit would render again.
            if not self._backend.is_known_without_store(other_key, value):
                self.set(other_key, value, timeout)
        if own is None:
            return Private(None, is_noted=False)
        return self._loaded(key, *own)

    def _loaded(self, key: str, value: object, timeout: float) -> Loaded[bytes]:
        """The `Vary` entry of an address outlives its pages, so that it is learned only once."""
        rules = self._rules
        loaded = self._backend.loaded(
            value, timeout, self._tags_of(key), rules.stale_for, rules.error_for
        )
        if not isinstance(value, HttpResponse):
            longer = 1 + max(loaded.stale_for or 0, loaded.error_for or 0)
            loaded.fresh_for = (loaded.fresh_for or 0) + longer
        return loaded

    def _tags_of(self, key: str) -> Sequence[str]:
        return () if ".cache_header." in key else self._tags


def _with_status(response: HttpResponse, outcome: str) -> HttpResponse:
    """Say in `Cache-Status` what the cache did; what other caches said stands before it."""
    before = response.get("Cache-Status")
    members = [] if before is None else [before.encode("latin-1")]
    response["Cache-Status"] = cache_status(members, outcome).decode("latin-1")
    return response


def _end_lifetime(response: HttpResponse) -> None:
    """Take the lifetime out of an unverified page, so that no other cache keeps it as fresh."""
    fields = [(name.encode(), value.encode("latin-1")) for name, value in response.items()]
    for name, _ in fields:
        del response[name.decode()]
    for name, value in without_lifetime(fields):
        response[name.decode()] = value.decode("latin-1")


def _rendered(response: Any) -> HttpResponse:
    """The response; a `TemplateResponse` is rendered first."""
    rendered: HttpResponse = response.render() if hasattr(response, "render") else response
    return rendered


def _names_visitor(request: Any, response: HttpResponse) -> bool:
    """True if the response is only for this visit. If the session was read, it varies by cookie."""
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
        sync_view = async_to_sync(view) if is_async else view
        pages = PageMiddleware(
            sync_view, page_timeout=timeout, cache_alias=cache, key_prefix=key_prefix
        )
        pages.stale_for = stale_for
        pages.error_for = error_for

        @wraps(view)
        def cached(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            page_tags = tags(request, *args, **kwargs) if callable(tags) else tags

            def call_view(page_request: HttpRequest) -> HttpResponse:
                response: HttpResponse = sync_view(page_request, *args, **kwargs)
                return response

            return pages.respond(request, call_view, page_tags)

        @wraps(view)
        async def cached_async(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            return await sync_to_async(cached)(request, *args, **kwargs)

        return cached_async if is_async else cached

    return decorate
