"""The story of a request: from the stored response, by a load, or as without a cache.

It runs on the event loop of the cache. Async clients await it; a thread runs it on the loop thread
and sends the request itself, as the engine's loader. `ResponseCache.answer` reads top to bottom.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias, TypedDict

from stillfresh.bounded import BoundedDict
from stillfresh.checks import checked_bytes, checked_flag
from stillfresh.durations import Duration, seconds
from stillfresh.engine import (
    HITS,
    Answer,
    Cache,
    Origin,
    OwnLoad,
    Private,
    Read,
    Resource,
    Spec,
    no_loader,
    terms_of,
)
from stillfresh.errors import (
    ConfigError,
    LoadFailed,
    NotOpen,
    StillfreshError,
    StoreError,
    shown,
    without_secrets,
)
from stillfresh.freshness import Verdict
from stillfresh.http import (
    CREDENTIALS,
    Reason,
    age_at,
    cache_status,
    checked_credentials,
    why_asked,
)
from stillfresh.http.fields import Raw, values
from stillfresh.integrations.http_cache.keys import (
    SECRETS,
    clean_url,
    prefix_tag,
    url_tag,
    variant_key,
    variant_of,
)
from stillfresh.integrations.http_cache.model import (
    Controls,
    Forward,
    FoundResponse,
    HttpRequest,
    Lookup,
    PassedResponse,
    Reply,
    ResponseCodec,
    ResponseInfo,
    ResponseKey,
    StoredResponse,
    UpstreamFailed,
)
from stillfresh.integrations.http_cache.rules import (
    HttpSettings,
    answer_fields,
    changed_groups,
    changed_urls,
    is_for_sender,
    is_good,
    is_open_now,
    may_serve_on_error,
    part_for,
    plain_fields,
    request_wish,
    status_text,
    unstored_response,
)
from stillfresh.integrations.http_cache.site_load import SiteLoad, Unstored

VARIANTS: Final = 4
"""Keys that one request looks at: each response may vary by other fields."""
MOST_PENDING: Final = 1_000
"""Addresses that were changed while the store did not answer."""
GATEWAY_TIMEOUT: Final = 504
OF_SHARED: Final = "_shared"
"""The end of the name of every shared cache, and of no private one."""

StoredAnswer: TypeAlias = Answer[StoredResponse]
logger = logging.getLogger(__name__)


class HttpCacheOptions(TypedDict, total=False):
    """The options of a client's cache.

    Args:
        name: The name of the resource in the store, in statistics and on the dashboard.
        shared: Store only what RFC 9111 lets a shared cache store: nothing personal.
        fresh_for: How long every response is fresh; None: as long as the response says.
        stale_for: How long an old response is served while it is refreshed, if the response
            does not say how long.
        error_for: How long an old response is served if the site fails, if the response does
            not say how long.
        keep_for: How long a response is kept after that, to be validated or read offline.
        heuristic: Without stated freshness, estimate it from `Last-Modified`.
        by_body: Store responses to POST and QUERY, by the body of the request.
        max_body: The largest body that is stored; a larger one is streamed past the cache.
        credentials: More request fields that identify the sender, besides `X-Api-Key` and such.
        secrets: More query parameters whose values never appear in keys.
        max_entries: The most responses in memory.
        max_bytes: The most bytes of responses in memory.
        memory_for: How long memory is believed without asking a shared store.
        lease_for: How long a request whose process died blocks other processes.
        load_timeout: How long a request may take before callers that wait send their own.
        concurrency: The most requests at once.
        objective: The freshness objective, which statistics count.
    """

    name: str
    shared: bool
    fresh_for: Duration | None
    stale_for: Duration
    error_for: Duration
    keep_for: Duration
    heuristic: bool
    by_body: bool
    max_body: int | str
    credentials: Iterable[str]
    secrets: Iterable[str]
    max_entries: int
    max_bytes: int | str | None
    memory_for: Duration
    lease_for: Duration
    load_timeout: Duration
    concurrency: int
    objective: str | None


class ResponseCache:
    """The responses of one client, as a resource of a cache."""

    def __init__(
        self,
        cache: Cache,
        *,
        in_thread: bool,
        name: str = "http",
        shared: bool = False,
        fresh_for: Duration | None = None,
        stale_for: Duration = 0,
        error_for: Duration = 0,
        keep_for: Duration = "7d",
        heuristic: bool = False,
        by_body: bool = False,
        max_body: int | str = "8MB",
        credentials: Iterable[str] = (),
        secrets: Iterable[str] = (),
        max_entries: int = 10_000,
        max_bytes: int | str | None = "256MB",
        memory_for: Duration = 0,
        lease_for: Duration = "5s",
        load_timeout: Duration = "10m",
        concurrency: int = 1_000,
        objective: str | None = None,
    ) -> None:
        if name.endswith(OF_SHARED):
            raise ConfigError(
                f"name: {shown(name)} ends in {OF_SHARED}, as names of shared "
                "caches do; choose another"
            )
        self.cache = cache
        self.settings = HttpSettings(
            is_shared=checked_flag("shared", shared),
            is_heuristic=checked_flag("heuristic", heuristic),
            is_by_body=checked_flag("by_body", by_body),
            fresh_for=None if fresh_for is None else seconds(fresh_for, name="fresh_for"),
            stale_for=seconds(stale_for, name="stale_for"),
            error_for=seconds(error_for, name="error_for"),
            keep_for=seconds(keep_for, name="keep_for"),
            max_body=checked_bytes("max_body", max_body),
            credentials=checked_credentials(CREDENTIALS) | checked_credentials(credentials),
            secrets=SECRETS | checked_secrets(secrets),
        )
        # A shared cache must never read what a private one stored under the same name.
        self.kind = f"{name}{OF_SHARED}" if shared else name
        spec: Spec[ResponseKey, StoredResponse] = Spec(
            self.kind,
            no_loader,
            ResponseCodec(),
            lambda key: key.tags,
            terms_of(self.kind, 0, 0, 0, 0),
            concurrency=concurrency,
            max_entries=max_entries,
            max_bytes=max_bytes,
            memory_for=memory_for,
            lease_for=lease_for,
            load_timeout=load_timeout,
            by_id=False,
            in_thread=in_thread,
            objective=objective,
        )
        self.resource: Resource[ResponseKey, StoredResponse] = cache.declare(
            spec, lambda key: key.id, ResponseKey
        )
        self._unconfirmed: BoundedDict[str, None] = BoundedDict(MOST_PENDING)
        """Tags whose invalidation the store has not confirmed: what has them is not served."""
        self._is_all_unconfirmed = False
        """There were more of them than are kept: nothing is served."""

    def hit(
        self, lookup: Lookup, known: Callable[[ResponseKey], StoredAnswer | None]
    ) -> FoundResponse | None:
        """The response, if memory has it and it is fresh. `known`: looks there without waiting."""
        if self._unconfirmed or self._is_all_unconfirmed or lookup.reason is not None:
            return None
        key = lookup.key
        for _ in range(VARIANTS):
            answer = known(key)
            if answer is None or not answer.found or answer.verdict is not Verdict.FRESH:
                return None
            other = self._other_variant(lookup, answer)
            if other is None:
                is_served = self._is_served(lookup, answer)
                return self._found_response(lookup, answer, "") if is_served else None
            key = other
        return None

    async def answer(self, lookup: Lookup, site_load: SiteLoad, load: OwnLoad) -> Reply:
        """Return the response, or say that the client sends the request itself.

        `load` runs the steps of the site_load. Raises the client's own error if the site does not
        answer and no stored response may be served.
        """
        try:
            if await self._is_unconfirmed(lookup.url):
                return Forward(Reason.CHANGED)
            key = lookup.key
            for _ in range(VARIANTS):
                stored = await self.resource.get_stored(key)
                is_stored = stored is not None and stored.found
                if stored is not None and is_stored:
                    other = self._other_variant(lookup, stored)
                    if other is not None:
                        key = other
                        continue
                reply = await self._from_key(lookup, key, stored, site_load, load)
                if not isinstance(reply, ResponseKey):
                    return reply
                key = reply
        except (StoreError, NotOpen) as exc:
            logger.warning("%s: sent without the cache: %s", self.kind, without_secrets(str(exc)))
            return Forward(Reason.STORE)
        return Forward(Reason.VARY)

    async def _from_key(
        self,
        lookup: Lookup,
        key: ResponseKey,
        stored: StoredAnswer | None,
        site_load: SiteLoad,
        load: OwnLoad,
    ) -> Reply | ResponseKey:
        """The response under this key; or the key of the variant that the request needs."""
        is_stored = stored is not None and stored.found
        old = stored if is_stored else None
        is_open = old is None or is_for_sender(old.value, lookup, self.settings)
        is_refreshed = False
        if old is not None and is_open and self._is_served(lookup, old):
            is_refreshed = old.verdict is Verdict.STALE and not lookup.controls.force_cache
            if not is_refreshed or lookup.wish.only_if_cached:
                self.resource.count_read(key, old)
                return self._found_response(lookup, old, "")
        if lookup.wish.only_if_cached:
            return self._gateway_timeout()
        if lookup.reason is not None:
            return Forward(lookup.reason)
        if not is_open:
            return Forward(Reason.AUTHORIZATION)
        now = self.cache.clock()
        before = why_asked(old, now, absent="uri-miss")
        site_load.stored = old
        # A fresh response that is not good enough is loaded again. An absence says that an earlier
        # response could not be stored: this one may be.
        last = self.resource.last_answer(key)
        is_absent = last is not None and not last.found
        is_fresh = stored is not None and stored.verdict in {Verdict.FRESH, Verdict.STALE}
        anew = is_absent or (is_fresh and not is_refreshed)
        outcome = await self.resource.read(key, load, anew=anew)
        if self._is_failure_of_another(outcome, lookup, site_load):
            outcome = await self.resource.read(key, load, anew=True)
        return self._judge(lookup, outcome, site_load, before)

    def _is_failure_of_another(
        self, outcome: Read[StoredResponse], lookup: Lookup, site_load: SiteLoad
    ) -> bool:
        """True if nothing can be served after a failure that says nothing about this request.

        That is an earlier failure, or the failure of another caller's client, which may wait for
        less time than this one, or be closed. The callers that waited for it send one more request.
        """
        if site_load.is_sent:
            return False
        if isinstance(outcome, LoadFailed):
            cause = outcome.__cause__
            return not isinstance(cause, UpstreamFailed) or cause.response is None
        if isinstance(outcome, Private) or outcome.error is None:
            return False
        return not may_serve_on_error(outcome, lookup, self.settings, self.cache.clock())

    def _judge(
        self, lookup: Lookup, outcome: Read[StoredResponse], site_load: SiteLoad, before: str
    ) -> Reply | ResponseKey:
        if isinstance(outcome, Private):
            return self._passed(outcome.value, site_load, before)
        if isinstance(outcome, LoadFailed):
            return self._failed(outcome, site_load, before)
        if not outcome.found:
            return Forward(Reason.PRIVATE, before)  # it is only for the caller whose request it was
        other = self._other_variant(lookup, outcome)
        if other is not None:
            return other
        if not is_for_sender(outcome.value, lookup, self.settings):
            return Forward(Reason.AUTHORIZATION, before)
        if outcome.error is not None:
            if not may_serve_on_error(outcome, lookup, self.settings, self.cache.clock()):
                return self._failed(outcome.error, site_load, before)
            return self._found_response(lookup, outcome, before, why="refresh-failed")
        is_own = outcome.origin is Origin.LOADED
        if not is_own and not is_open_now(outcome, lookup, self.settings, self.cache.clock()):
            return Forward(Reason.AUTHORIZATION, before)
        return self._found_response(lookup, outcome, before, cookies=site_load.cookies)

    def _is_served(self, lookup: Lookup, answer: StoredAnswer) -> bool:
        is_open = is_for_sender(answer.value, lookup, self.settings)
        return is_open and is_good(answer, lookup, self.settings, self.cache.clock())

    def _other_variant(self, lookup: Lookup, answer: StoredAnswer) -> ResponseKey | None:
        """§4.1: the key of the request's own variant; None if this is the one.

        A request whose fields are too long to compare gets a variant that no response has.
        """
        head = answer.value.head
        if not head.vary:
            return None
        variant = variant_of(head.vary, lookup.request.headers)
        if variant == head.variant:
            return None
        return variant_key(lookup.key, head.vary, variant or "long")

    def _found_response(
        self,
        lookup: Lookup,
        answer: StoredAnswer,
        before: str,
        *,
        why: str = "",
        cookies: Raw = (),
    ) -> FoundResponse:
        now = self.cache.clock()
        fields = answer_fields(answer, now, status_text(answer, now, before, why))
        response = answer.value
        if lookup.reason is not None:
            response, fields = part_for(lookup.request, response, fields)
        error = answer.error
        cause = None if error is None else error.__cause__
        if isinstance(cause, UpstreamFailed) and cause.error is not None:
            cause = cause.error
        info = ResponseInfo(
            from_cache=answer.origin in HITS or error is not None,
            is_stored=True,
            age=age_at(answer, now),
            verdict=answer.verdict,
            origin=answer.origin,
            fetched_at=answer.fetched_at,
            error=cause if isinstance(cause, Exception) else error,
        )
        return FoundResponse(response, (*fields, *cookies), info)

    def _passed(self, unstored: Unstored, site_load: SiteLoad, before: str) -> Reply:
        reason = unstored.reason
        info = ResponseInfo(from_cache=False, is_stored=False, reason=reason)
        live = unstored.live
        if live is not None:
            site_load.take()
            return PassedResponse(live, passed_status(live.headers, reason, before), info)
        response = unstored.response
        if response is None:
            return Forward(reason, before)
        status = passed_status(response.head.headers, reason, before)
        return FoundResponse(response, (*plain_fields(response), (b"cache-status", status)), info)

    def _failed(self, failed: LoadFailed, site_load: SiteLoad, before: str) -> Reply:
        """The site's own error, or the client's exception, as without a cache."""
        cause = failed.__cause__
        if not isinstance(cause, UpstreamFailed) and site_load.error is not None:
            cause = site_load.error
        if not isinstance(cause, UpstreamFailed):
            # For example `load_timeout`, or a value that could not be stored.
            logger.warning(
                "%s: sent without the cache: %s", self.kind, without_secrets(str(failed))
            )
            return Forward(Reason.FAILED, before)
        response = cause.response
        if response is not None:
            info = ResponseInfo(from_cache=False, is_stored=False, reason=Reason.FAILED)
            how = before if site_load.is_sent else f"{before}; collapsed"
            status = passed_status(response.head.headers, Reason.FAILED, how)
            fields = (*plain_fields(response), (b"cache-status", status))
            return FoundResponse(response, fields, info)
        error = cause.error
        if error is None:
            return Forward(Reason.FAILED, before)
        # Each caller gets an exception of its own, so that tracebacks do not pile up.
        raise error if site_load.error is cause else _copy_of(error)

    def refusal(self, request: HttpRequest, controls: Controls) -> FoundResponse | None:
        """The answer in place of sending the request; None if the site may be asked."""
        is_refused = request_wish(request.headers, controls).only_if_cached
        return self._gateway_timeout() if is_refused else None

    def _gateway_timeout(self) -> FoundResponse:
        """§5.2.1.7: the answer to `only-if-cached` if nothing may be served."""
        text = b"There is no stored response that may be served.\n"
        fields = (
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(text)),
            (b"cache-status", cache_status([], "detail=only-if-cached")),
        )
        info = ResponseInfo(from_cache=False, is_stored=False, reason=Reason.NO_STORE)
        return FoundResponse(unstored_response(GATEWAY_TIMEOUT, fields, text), fields, info)

    # Invalidating.

    async def note_change(self, request: HttpRequest, status: int, headers: Raw) -> None:
        """§4.4: after an unsafe request, no older response of its address is served."""
        tags = changed_groups(request.method, request.url, status, headers)
        for url in changed_urls(request.method, request.url, status, headers):
            try:
                tags.append(url_tag(clean_url(url, self.settings.secrets)))
            except ConfigError:
                continue  # of a Location that is no address
        for tag in tags:  # all of them before the first wait: the caller may be cancelled in it
            self._note_unconfirmed(tag)
        for tag in tags:
            try:
                await self._confirm(tag)
            except StillfreshError as exc:
                logger.warning("%s: not invalidated yet: %s", without_secrets(tag), exc)

    def _note_unconfirmed(self, tag: str) -> None:
        """Beyond the limit, everything passes the cache until all of it is invalidated."""
        if tag not in self._unconfirmed and len(self._unconfirmed) >= MOST_PENDING:
            self._is_all_unconfirmed = True
        else:
            self._unconfirmed.note(tag, None)

    async def _confirm(self, tag: str) -> None:
        try:
            await self.cache.invalidate_tag(tag)
        except BaseException:  # another change of this address may have been confirmed meanwhile
            self._note_unconfirmed(tag)
            raise
        self._unconfirmed.pop(tag, None)

    async def _confirm_all(self) -> None:
        self._is_all_unconfirmed = False
        try:
            await self.resource.invalidate_all()
        except BaseException:
            self._is_all_unconfirmed = True
            raise

    async def _is_unconfirmed(self, url: str) -> bool:
        """True while a change of this address, or of a group, is not confirmed by the store."""
        try:
            if self._is_all_unconfirmed:
                await self._confirm_all()
            for tag in list(self._unconfirmed):
                if tag == url_tag(url) or tag.startswith("group:"):
                    await self._confirm(tag)
        except StillfreshError:
            return True
        return False

    async def invalidate(self, *urls: str, soft: bool = False) -> None:
        """Invalidate all responses of these addresses, of every sender and variant."""
        for url in urls:
            tag = url_tag(clean_url(url, self.settings.secrets))
            await self.cache.invalidate_tag(tag, soft=soft)

    async def invalidate_prefix(self, *urls: str, soft: bool = False) -> None:
        """Invalidate all responses at and below these addresses; queries do not count."""
        for url in urls:
            tag = prefix_tag(clean_url(url, self.settings.secrets))
            await self.cache.invalidate_tag(tag, soft=soft)

    async def invalidate_tag(self, *tags: str, soft: bool = False) -> None:
        """Invalidate all responses with one of these tags."""
        for tag in tags:
            await self.cache.invalidate_tag(tag, soft=soft)


def checked_secrets(names: Iterable[str]) -> frozenset[str]:
    """Return the names of query parameters in lower case."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError("secrets: must be a list of query parameters, such as ['license']")
    return frozenset(name.lower() for name in names)


def _copy_of(error: Exception) -> Exception:
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 (a class of the user's, which copies in its own way or not)
        return error


def passed_status(headers: Raw, reason: Reason, before: str) -> bytes:
    """The `Cache-Status` of a response that is not stored."""
    return cache_status(values(headers, b"cache-status"), f"fwd={before}; detail={reason}")
