"""`GET /v1/{kind}/{id}` and `POST /v1/{kind}/batch`: reads that say how fresh they are (G2)."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import msgspec
from starlette.types import Receive, Scope, Send

from stillfresh.clock import Clock
from stillfresh.coordinator import Hub, Kind
from stillfresh.durations import seconds
from stillfresh.engine import Answer, RetryAfter
from stillfresh.errors import ConfigError, LoadFailed, NotOpen, StoreError
from stillfresh.freshness import Verdict
from stillfresh.isr.rules_fields import date_text
from stillfresh.isr.rules_freshness import Terms
from stillfresh.isr.rules_headers import cache_control, cache_status
from stillfresh.isr.rules_validation import etag_of, not_modified
from stillfresh.web.guard import bearer
from stillfresh.web.replies import (
    Problem,
    Reply,
    header,
    json_reply,
    method_of,
    problem_reply,
    read_body,
)

__all__ = ["Authenticate", "Rest"]

Authenticate: TypeAlias = Callable[[str], str | Awaitable[str | None] | None]

MAX_BODY: Final = 1_048_576
MAX_IDS: Final = 200
MAX_ID: Final = 1_000
RETRY_AFTER: Final = 5.0
"""Seconds, where nobody said when to come back."""

logger = logging.getLogger(__name__)


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a batch."""

    ids: list[str]


class Rest:
    """An ASGI app (HTTP only) over a hub; `path` is what follows `/v1/`."""

    def __init__(self, hub: Hub, clock: Clock, authenticate: Authenticate | None) -> None:
        self._hub = hub
        self._clock = clock
        self._authenticate = authenticate

    async def answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        kind_name, _, id_ = path.partition("/")
        try:
            reply = await self._reply(kind_name, id_, scope, receive)
        except Problem as problem:
            reply = problem_reply(problem)
        except (StoreError, NotOpen) as exc:
            logger.warning("%s %s: %s", scope["method"], path, exc)
            away = Problem(503, "unavailable", "Not available now", retry_after="5")
            reply = problem_reply(away)
        await reply.send(scope, send)

    async def _reply(self, name: str, id_: str, scope: Scope, receive: Receive) -> Reply:
        if name not in self._hub.kinds:
            raise Problem(404, "unknown_kind", "No such kind", f"there are: {self._known()}")
        if scope["method"] == "POST" and id_ == "batch":
            return await self._batch(name, scope, receive)
        method_of(scope)
        viewer = await self._viewer(name, scope)
        kind, key = self._named(name, id_, viewer), id_
        answer = (await self._hub.get_many(name, [key], viewer))[key]
        return self._one(kind, id_, answer, scope)

    def _known(self) -> str:
        return ", ".join(self._hub.kinds) or "none"

    def _named(self, name: str, id_: str, viewer: str | None) -> Kind:
        if len(id_) > MAX_ID or not id_.isprintable():
            why = f"an id is text of 1 to {MAX_ID:,} printable characters"
            raise Problem(422, "bad_id", "Not an id", why)
        try:
            return self._hub.named(name, id_, viewer)[0]
        except ConfigError as exc:
            raise Problem(422, "bad_id", "Not an id", str(exc)) from exc

    async def _viewer(self, name: str, scope: Scope) -> str | None:
        """Only a kind whose views differ by viewer asks who it is."""
        try:
            self._hub.kind(name, None)
        except ConfigError:
            return await self._signed_in(name, scope)
        return None

    async def _signed_in(self, name: str, scope: Scope) -> str:
        token = bearer(scope)
        viewer = None
        if token is not None and self._authenticate is not None:
            found = self._authenticate(token)
            viewer = await found if inspect.isawaitable(found) else found
        if viewer is None:
            why = f"{name} differs by viewer: send Authorization: Bearer and a token that is known"
            raise Problem(401, "sign_in", "Sign in first", why, www_authenticate="Bearer")
        return viewer

    def _one(self, kind: Kind, id_: str, answer: Answer[Any], scope: Scope) -> Reply:
        if not answer.found and answer.error is not None:
            raise self._failed(answer.error)
        headers = self._headers(kind, answer)
        if not answer.found:
            detail = f"{kind.name} {id_!r} does not exist upstream"
            gone = Problem(404, "absent", "Does not exist", detail)
            gone.headers = headers
            raise gone
        body = msgspec.json.encode(answer.value)
        etag = etag_of(body)
        headers["etag"] = etag.decode()
        if not_modified(tuple(scope["headers"]), etag, None):
            return Reply(304, headers=headers)
        return Reply(200, body, "application/json", headers)

    def _headers(self, kind: Kind, answer: Answer[Any]) -> dict[str, str]:
        now, age = self._clock(), answer.age
        fresh_for = seconds(kind.fresh_for)
        if not answer.found:
            absent_for = kind.absent_for
            fresh_for = fresh_for / 10 if absent_for is None else seconds(absent_for)
        status = cache_status([], _status(answer, fresh_for - age)).decode()
        return {
            "age": f"{int(age)}",
            "cache-control": _control(kind, answer, fresh_for),
            "cache-status": status,
            "date": date_text(now).decode(),
            **({"vary": "authorization"} if kind.per_viewer else {}),
        }

    def _failed(self, error: LoadFailed) -> Problem:
        pause = f"{_pause(error, self._clock()):.0f}"
        return Problem(503, "upstream_failed", "Upstream failed", str(error), retry_after=pause)

    async def _batch(self, name: str, scope: Scope, receive: Receive) -> Reply:
        ids = await self._ids(scope, receive)
        viewer = await self._viewer(name, scope)
        kind = self._hub.kind(name, viewer)
        for id_ in ids:
            self._named(name, id_, viewer)
        answers = await self._hub.get_many(name, ids, viewer)
        items = [self._item(id_, answer) for id_, answer in answers.items()]
        errors = [answer.error for answer in answers.values() if answer.error and not answer.found]
        if errors and len(errors) == len(items):
            raise self._failed(errors[0])
        control = "private, no-store" if kind.per_viewer else "no-store"
        date = date_text(self._clock()).decode()
        return json_reply({"items": items}, cache_control=control, date=date)

    async def _ids(self, scope: Scope, receive: Receive) -> list[str]:
        if header(scope, b"content-type").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "not_json", "Not JSON", "send content-type: application/json")
        try:
            asked = msgspec.json.decode(await read_body(receive, MAX_BODY), type=Asked)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise Problem(422, "bad_body", "Not a batch", f'send {{"ids": […]}}: {exc}') from exc
        ids = list(dict.fromkeys(asked.ids))
        if not 0 < len(ids) <= MAX_IDS:
            why = f"a batch has 1 to {MAX_IDS} ids, not {len(ids)}"
            raise Problem(422, "bad_body", "Not a batch", why)
        return ids

    def _item(self, id_: str, answer: Answer[Any]) -> dict[str, Any]:
        told: dict[str, Any] = {"id": id_, "status": "found" if answer.found else "absent"}
        if answer.found:
            told["value"] = answer.value
        elif answer.error is not None:
            pause = round(_pause(answer.error, self._clock()))
            return {"id": id_, "status": "failed", "error": str(answer.error), "retry_after": pause}
        told |= {"fetched_at": answer.fetched_at, "age": answer.age, "verdict": answer.verdict}
        return told if answer.error is None else {**told, "error": str(answer.error)}


def _pause(error: LoadFailed, now: float) -> float:
    """A whole second at least."""
    if error.retry_at is not None:
        return max(1.0, error.retry_at - now)
    cause = error.__cause__
    return max(1.0, cause.seconds if isinstance(cause, RetryAfter) else RETRY_AFTER)


def _status(answer: Answer[Any], ttl: float) -> str:
    """RFC 9211: a hit, or forwarded because it was not there."""
    match answer.origin:
        case "memory" | "store":
            what = "hit"
        case _:
            what = "fwd=miss; stored"
    said = f"{what}; ttl={int(ttl)}; detail={answer.verdict}"
    return said if answer.error is None else f"{said}-after-error"


def _control(kind: Kind, answer: Answer[Any], fresh_for: float) -> str:
    """Browsers ask each time and are told 304; one viewer's views stay with that viewer."""
    if kind.per_viewer:
        return "private, no-cache"
    is_fresh = answer.verdict is Verdict.FRESH
    terms = Terms(fresh_for if is_fresh else 0.0, seconds(kind.stale_for), 0.0)
    return cache_control(terms).decode()
