"""`GET /v1/{kind}/{id}` and `POST /v1/{kind}/batch`: reads that say how fresh they are."""

import logging
from typing import Final

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, LoadFailed, NotOpen, StillfreshError, StoreError
from stillfresh.gateway.guard import bearer
from stillfresh.gateway.live import Hub
from stillfresh.gateway.live.messages import NO_ID, is_id
from stillfresh.gateway.live.sign_in import Authenticate, ask_hook
from stillfresh.gateway.replies import (
    Problem,
    json_body,
    json_reply,
    problem_app,
    problem_reply,
    tagged,
)
from stillfresh.gateway.rules_rest import Ids, Items, freshness_headers, is_failed, item_of
from stillfresh.http import pause_after
from stillfresh.http.own_writes import FIELD
from stillfresh.systems.coordinator import Kind

SHOWN: Final = ("Age", "Cache-Status", "Date", "ETag", "Retry-After", FIELD)
"""Header fields that a page of another origin may read."""

logger = logging.getLogger(__name__)


class Rest:
    """Everything under `/v1/`, over HTTP: `app`."""

    def __init__(
        self,
        hub: Hub,
        clock: Clock,
        authenticate: Authenticate | None,
        origins: tuple[str, ...] = (),
    ) -> None:
        routes = [
            Route("/v1/{kind}", self._one),
            Route("/v1/{kind}/batch", self._batch, methods=["GET", "POST"]),
            Route("/v1/{kind}/{id:any}", self._one),
        ]
        handlers = {LoadFailed: self._failed, StoreError: _away, NotOpen: _away}
        self.app = CORSMiddleware(  # around all of it: our own mistakes may be read as well
            problem_app(routes, handlers),
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("Authorization", "Content-Type", "If-None-Match", FIELD),
            expose_headers=SHOWN,
        )
        self._hub = hub
        self._clock = clock
        self._authenticate = authenticate

    async def _one(self, request: Request) -> Response:
        name = self._name(request)
        id_ = request.path_params.get("id", "")
        return await self._read(request, name, "" if _is_garbled(id_, request) else id_)

    async def _read(self, request: Request, name: str, id_: str) -> Response:
        kind, _, key = self._checked_name(name, id_, await self._viewer(name, request))
        answer = await self._hub.resource(name).get(key)
        headers = freshness_headers(kind, answer, answer.policy)
        if not answer.found:
            detail = f"{name} {id_!r} does not exist upstream"
            raise Problem(404, "absent", "Does not exist", detail, **headers)
        return tagged(request, msgspec.json.encode(answer.value), "application/json", headers)

    def _name(self, request: Request) -> str:
        name: str = request.path_params["kind"]
        if name not in self._hub.kinds:
            known = ", ".join(self._hub.kinds) or "none"
            raise Problem(404, "unknown_kind", "No such kind", f"there are: {known}")
        return name

    def _checked_name(self, name: str, id_: str, viewer: str | None) -> tuple[Kind, str, str]:
        try:
            if is_id(id_):
                return self._hub.named(name, id_, viewer)
        except ConfigError as exc:
            raise Problem(422, "bad_id", "Invalid id", str(exc)) from exc
        raise Problem(422, "bad_id", "Invalid id", NO_ID)

    async def _viewer(self, name: str, request: Request) -> str | None:
        """The viewer's id, for kinds whose views differ by viewer."""
        if not self._hub.is_per_viewer(name):
            return None
        token = bearer(request.scope)
        viewer_id = None
        if token is not None and self._authenticate is not None:
            viewer_id = await _viewer_of_token(self._authenticate, token)
        if not isinstance(viewer_id, str) or not viewer_id:
            why = f"{name} differs by viewer: send Authorization: Bearer and a token that is known"
            raise Problem(401, "sign_in", "Sign in first", why, www_authenticate="Bearer")
        return viewer_id

    async def _failed(self, request: Request, error: LoadFailed) -> Response:
        del request
        pause = f"{pause_after(error, self._clock())}"
        why = "the upstream failed, and the cache has no copy"
        return problem_reply(
            Problem(503, "upstream_failed", "Upstream failed", why, retry_after=pause)
        )

    async def _batch(self, request: Request) -> Response:
        name = self._name(request)
        if request.method != "POST":
            return await self._read(request, name, "batch")
        given = await json_body(request, Ids, '{"ids": […]}')
        ids = list(dict.fromkeys(given.ids))
        viewer = await self._viewer(name, request)
        for id_ in ids:
            self._checked_name(name, id_, viewer)
        answers = await self._hub.get_many(name, ids, viewer)
        errors = [answer.error for answer in answers.values() if is_failed(answer)]
        if len(errors) == len(answers) and errors[0] is not None:
            raise errors[0]
        now = self._clock()
        items = Items([item_of(id_, answer, now) for id_, answer in answers.items()])
        return json_reply(items, "no-store" if viewer is None else "private, no-store")


async def _away(request: Request, exc: StillfreshError) -> Response:
    logger.warning("%s: %s", request.path_params["kind"], exc)
    return problem_reply(Problem(503, "away", "Not available now", retry_after="5"))


async def _viewer_of_token(authenticate: Authenticate, token: str) -> str | None:
    try:
        return await ask_hook(authenticate, token)
    except StillfreshError:
        raise
    except Exception as exc:
        logger.exception("authenticate failed")
        why = "the server could not check your token"
        raise Problem(503, "sign_in_failed", "Try again later", why, retry_after="5") from exc


def _is_garbled(id_: str, request: Request) -> bool:
    """True if a server put this character where the path is not UTF-8."""
    return "\ufffd" in id_ and b"%EF%BF%BD" not in (request.scope.get("raw_path") or b"").upper()
