"""`GET /v1/{kind}/{id}` and `POST /v1/{kind}/batch`: reads that say how fresh they are (G2)."""

import asyncio
import inspect
import logging
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from stillfresh.clock import Clock
from stillfresh.coordinator import Kind
from stillfresh.engine import Answer
from stillfresh.errors import ConfigError, LoadFailed, NotOpen, StillfreshError, StoreError
from stillfresh.http.validation import etag_of, not_modified
from stillfresh.live import Hub
from stillfresh.live.messages import NO_ID, is_id
from stillfresh.live.sign_in import Authenticate
from stillfresh.web.guard import bearer
from stillfresh.web.replies import (
    READING,
    Problem,
    Reply,
    header,
    json_reply,
    method_of,
    problem_reply,
    read_body,
)
from stillfresh.web.rules_rest import (
    MAX_IDS,
    freshness_headers,
    is_failed,
    item_of,
    pause_after,
)

MAX_BODY: Final = 1_048_576
BODY_WITHIN: Final = 30.0
"""Seconds for a request to come whole."""
SIGN_IN_WITHIN: Final = 5.0
"""Seconds that `authenticate` has."""

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
        except LoadFailed as exc:
            reply = problem_reply(self._failed(exc))
        except (StoreError, NotOpen) as exc:
            logger.warning("%s: %s", kind_name, exc)
            reply = problem_reply(Problem(503, "away", "Not available now", retry_after="5"))
        except Exception:
            logger.exception("%s could not be answered", kind_name)
            reply = problem_reply(Problem(500, "broken", "It is our mistake; it has been noted"))
        await reply.send(scope, send)

    async def _reply(self, name: str, id_: str, scope: Scope, receive: Receive) -> Reply:
        if name not in self._hub.kinds:
            raise Problem(404, "unknown_kind", "No such kind", f"there are: {self._known()}")
        if id_ == "batch" and method_of(scope, *READING, "POST") == "POST":
            return await self._batch(name, scope, receive)
        method_of(scope)
        viewer = await self._viewer(name, scope)
        kind = self._named(name, "" if _is_garbled(id_, scope) else id_, viewer)
        return self._one(kind, id_, await self._hub.get(name, id_, viewer), scope)

    def _known(self) -> str:
        return ", ".join(self._hub.kinds) or "none"

    def _named(self, name: str, id_: str, viewer: str | None) -> Kind:
        if not is_id(id_):
            raise Problem(422, "bad_id", "Not an id", NO_ID)
        try:
            return self._hub.named(name, id_, viewer)[0]
        except ConfigError as exc:
            raise Problem(422, "bad_id", "Not an id", str(exc)) from exc

    async def _viewer(self, name: str, scope: Scope) -> str | None:
        """Only a kind whose views differ by viewer asks who it is."""
        if not self._hub.is_per_viewer(name):
            return None
        token, found = bearer(scope), None
        if token is not None and self._authenticate is not None:
            found = await self._signed_in(self._authenticate, token)
        if not isinstance(found, str) or not found:
            why = f"{name} differs by viewer: send Authorization: Bearer and a token that is known"
            raise Problem(401, "sign_in", "Sign in first", why, www_authenticate="Bearer")
        return found

    async def _signed_in(self, authenticate: Authenticate, token: str) -> str | None:
        """What the application's hook says, in time."""
        try:
            async with asyncio.timeout(SIGN_IN_WITHIN):
                said = authenticate(token)
                return await said if inspect.isawaitable(said) else said
        except StillfreshError:
            raise
        except Exception as exc:
            logger.exception("authenticate failed")
            why = "who you are could not be found out"
            raise Problem(503, "sign_in_failed", "Try again later", why, retry_after="5") from exc

    def _one(self, kind: Kind, id_: str, answer: Answer[Any], scope: Scope) -> Reply:
        headers = freshness_headers(kind, answer, answer.age)
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

    def _failed(self, error: LoadFailed) -> Problem:
        pause = f"{pause_after(error, self._clock())}"
        why = "the upstream could not say, and nothing is kept"
        return Problem(503, "upstream_failed", "Upstream failed", why, retry_after=pause)

    async def _batch(self, name: str, scope: Scope, receive: Receive) -> Reply:
        ids = await self._ids(scope, receive)
        viewer = await self._viewer(name, scope)
        kind = self._hub.kind(name, viewer)
        for id_ in ids:
            self._named(name, id_, viewer)
        answers = await self._hub.get_many(name, ids, viewer)
        now = self._clock()
        items = [item_of(id_, answer, answer.age, now) for id_, answer in answers.items()]
        errors = [answer.error for answer in answers.values() if is_failed(answer)]
        if len(errors) == len(items) and errors[0] is not None:
            raise self._failed(errors[0])
        control = "private, no-store" if kind.per_viewer else "no-store"
        return json_reply({"items": items}, cache_control=control)

    async def _ids(self, scope: Scope, receive: Receive) -> list[str]:
        if header(scope, b"content-type").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "not_json", "Not JSON", "send content-type: application/json")
        try:
            async with asyncio.timeout(BODY_WITHIN):
                body = await read_body(receive, MAX_BODY)
            asked = msgspec.json.decode(body, type=Asked)
        except TimeoutError as exc:
            raise Problem(408, "too_slow", "Too slow", "the request did not come whole") from exc
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise Problem(422, "bad_body", "Not a batch", f'send {{"ids": […]}}: {exc}') from exc
        if not 0 < len(asked.ids) <= MAX_IDS:
            why = f"a batch has 1 to {MAX_IDS} ids, not {len(asked.ids)}"
            raise Problem(422, "bad_body", "Not a batch", why)
        return list(dict.fromkeys(asked.ids))


def _is_garbled(id_: str, scope: Scope) -> bool:
    """Servers put this character where a path is no UTF-8; unless it was really written."""
    return "\ufffd" in id_ and b"%EF%BF%BD" not in scope.get("raw_path", b"").upper()
