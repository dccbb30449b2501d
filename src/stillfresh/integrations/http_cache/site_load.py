"""One request to the site, and what becomes of its response: stored, passed on, or a failure.

`SiteLoad.steps` is the story, for async clients and for threads: a generator that yields the calls
of the client (send, read, close) and receives their results. `run_async` awaits them, `run_sync`
calls them. A response that is not stored reaches its caller as it arrives.
"""

from collections.abc import Callable, Generator
from functools import partial
from threading import Lock
from typing import Any, Protocol

from stillfresh.clock import Clock
from stillfresh.engine import Answer, Loaded, Private
from stillfresh.http import Reason, conditions, is_failure, is_refresh, private, refreshed
from stillfresh.http.fields import Raw, pause_of, values
from stillfresh.integrations.http_cache.model import (
    LiveResponse,
    Lookup,
    StoredResponse,
    UpstreamDropped,
    UpstreamFailed,
    UpstreamPaused,
)
from stillfresh.integrations.http_cache.rules import (
    HttpSettings,
    Storable,
    declared_length,
    judge_response,
    may_serve_on_error,
    new_response,
    to_store,
    unstored_response,
)

NOT_MODIFIED = 304

Steps = Generator[Callable[[], Any], Any, Any]
"""Yields calls of the client, and receives their results."""


class Unstored:
    """A response for the caller that sent the request, and why it is not stored.

    It is live, or its body was read already.
    """

    def __init__(
        self,
        reason: Reason,
        live: LiveResponse | None = None,
        response: StoredResponse | None = None,
    ) -> None:
        self.reason = reason
        self.live = live
        self.response = response


class Sender(Protocol):
    """Sends one request, with more fields; returns a LiveResponse, or an awaitable of one."""

    def __call__(self, more: Raw, /) -> Any: ...  # noqa: ANN401 (as the client is async or not)


class SiteLoad:
    """The load that one caller brings."""

    def __init__(self, lookup: Lookup, send: Sender, clock: Clock, settings: HttpSettings) -> None:
        self._lookup = lookup
        self._is_post = lookup.request.method == "POST"
        """RFC 9110 §13.1.2: a condition of a POST is answered with 412, not with 304."""
        self._send = send
        self._clock = clock
        self._settings = settings
        self.stored: Answer[StoredResponse] | None = None
        """The stored response that the site is asked about."""
        self.is_sent = False
        self.error: Exception | None = None
        """Why the load failed."""
        self.cookies: Raw = ()
        """Cookies of the site's response, for this caller only."""
        self._lock = Lock()
        self._is_left = False
        self._live: LiveResponse | None = None
        """A response that the caller has not taken yet."""

    def take(self) -> None:
        """The caller has the live response, and closes it."""
        self._live = None

    def leave(self) -> LiveResponse | None:
        """The caller is gone. Returns a live response that must be closed."""
        with self._lock:
            self._is_left = True
            live = self._live
            self._live = None
        return live

    def steps(self) -> Steps:
        """Ask the site, and return a `Loaded` or a `Private`. Raises UpstreamFailed."""
        self.is_sent = True
        if self._live is not None:  # the load runs again, because the entry was invalidated
            yield self._live.close
            self._live = None
        old = None if self.stored is None or not self.stored.found else self.stored.value
        try:
            return (yield from self._ask(old))
        except UpstreamFailed as exc:
            self.error = exc
            raise

    def _ask(self, old: StoredResponse | None) -> Steps:
        asked_if = () if old is None or self._is_post else conditions(old.head.headers)
        fetched_at = self._clock()
        try:
            live: LiveResponse = yield partial(self._send, asked_if)
        except Exception as exc:  # noqa: BLE001 (each client has its own errors)
            raise self._failed(exc) from None
        if live.status == NOT_MODIFIED and asked_if and old is not None:
            yield live.read
            yield live.close
            if not is_refresh(old.head.headers, live.headers):
                return (yield from self._ask(None))  # RFC 9111 §4.3.4: it is about another one
            self._note_cookies(live.headers)
            headers = refreshed(old.head.headers, live.headers, self._clock())
            return self._load_result(old.head.status, headers, bytes(old.body), fetched_at)
        try:
            return (yield from self._receive(live, fetched_at))
        except UpstreamFailed:
            raise
        except Exception as exc:  # noqa: BLE001 (each client has its own errors)
            yield live.close
            raise self._failed(exc) from None

    def _receive(self, live: LiveResponse, fetched_at: float) -> Steps:
        settings = self._settings
        headers = live.headers
        is_failed = is_failure(live.status)
        if is_failed and self._may_serve_old():
            yield live.close
            raise self._refused(unstored_response(live.status, headers), headers)
        judgement = judge_response(self._lookup, live.status, headers, fetched_at, settings)
        reason = judgement if isinstance(judgement, Reason) else None
        length = declared_length(headers)
        if length is not None and length > settings.max_body:
            reason = Reason.SIZE
        is_told = is_failed and reason is not Reason.SIZE and self._is_for_all_waiting(live)
        if reason is not None and not is_told:
            return (yield from self._pass_on(live, reason))
        parts: list[bytes] = []
        size = 0
        while part := (yield live.read):
            parts.append(part)
            size += len(part)
            if size > settings.max_body:
                live.prefix = parts
                return (yield from self._pass_on(live, Reason.SIZE))
        yield live.close
        body = b"".join(parts)
        if reason is not None:
            response = unstored_response(live.status, headers, body)
            raise UpstreamDropped(response=response)
        if length is not None and length != size:
            response = unstored_response(live.status, headers, body)
            return Private(Unstored(Reason.BODY, response=response), is_noted=False)
        self._note_cookies(headers)
        return self._load_result(live.status, headers, body, fetched_at)

    def _load_result(
        self, status: int, headers: Raw, body: bytes, fetched_at: float
    ) -> Loaded[StoredResponse] | Private[Unstored]:
        judgement = judge_response(self._lookup, status, headers, fetched_at, self._settings)
        if isinstance(judgement, Storable):
            response = new_response(judgement, status, headers, body, fetched_at)
            return to_store(self._lookup, response, self._settings)
        response = unstored_response(status, headers, body)
        return Private(Unstored(judgement, response=response), is_noted=False)

    def _note_cookies(self, headers: Raw) -> None:
        self.cookies = tuple(field for field in headers if field[0] == b"set-cookie")

    def _is_for_all_waiting(self, live: LiveResponse) -> bool:
        """True if all callers that wait may get this error of the site: nothing in it is personal.

        In a private cache they have the same credentials. A cookie is for one of them.
        """
        if values(live.headers, b"set-cookie"):
            return False
        is_private_cache = not self._settings.is_shared
        is_plain = private(live.status, live.headers) is None and not self._lookup.carried
        return is_private_cache or is_plain

    def _may_serve_old(self) -> bool:
        return may_serve_on_error(self.stored, self._lookup, self._settings, self._clock())

    def _failed(self, error: Exception) -> UpstreamFailed:
        """Only where an old response is served, the next requests wait for a cooldown."""
        if self._may_serve_old():
            return UpstreamFailed(error)
        return UpstreamDropped(error)

    def _refused(self, response: StoredResponse, headers: Raw) -> UpstreamFailed:
        retry_after = b", ".join(values(headers, b"retry-after")).decode("latin-1")
        date = b", ".join(values(headers, b"date")).decode("latin-1")
        pause = pause_of(retry_after, date, self._clock())
        if pause is None:
            return UpstreamFailed(response=response)
        return UpstreamPaused(pause, response)

    def _pass_on(self, live: LiveResponse, reason: Reason) -> Steps:
        with self._lock:
            if not self._is_left:
                self._live = live
                return Private(Unstored(reason, live), is_noted=False)
        yield live.close  # nobody reads it: it refreshed a copy in the background
        return Private(Unstored(reason), is_noted=False)


async def run_async(steps: Steps) -> object:
    """Run the steps of an async client."""
    try:
        call = next(steps)
        while True:
            try:
                result = await call()
            except BaseException as exc:  # noqa: BLE001 (the steps decide)
                call = steps.throw(exc)
            else:
                call = steps.send(result)
    except StopIteration as end:
        return end.value


def run_sync(steps: Steps) -> object:
    """Run the steps in this thread."""
    try:
        call = next(steps)
        while True:
            try:
                result = call()
            except BaseException as exc:  # noqa: BLE001 (the steps decide)
                call = steps.throw(exc)
            else:
                call = steps.send(result)
    except StopIteration as end:
        return end.value
