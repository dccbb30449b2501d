"""`@fresh.view`: responses are stored, served at once, and refreshed in the background.

Flask's own functions before and after each request run as without the cache, for hits as well.
"""

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec

from flask import Response, current_app, has_app_context, has_request_context, request
from werkzeug.exceptions import ServiceUnavailable

from stillfresh.engine import Answer, Call, Dropped, Private, Read, checked_tags
from stillfresh.errors import ConfigError, LoadFailed, NotOpen, StoreError, shown
from stillfresh.http import freshness_fields, pause_after, without_lifetime
from stillfresh.integrations.flask.load import Query, ViewLoad
from stillfresh.integrations.routes import MARK, KeptResponse, RouteSpec, Tags, id_of
from stillfresh.sync import SyncResource

if TYPE_CHECKING:
    from stillfresh.integrations.flask.extension import Fresh

P = ParamSpec("P")
ViewResource = SyncResource[Call[Any], KeptResponse]

logger = logging.getLogger(__name__)


class FreshView(Generic[P]):
    """A view function, made by `@fresh.view`. Outside of a request, it is the function itself."""

    __name__: str

    def __init__(
        self,
        fresh: "Fresh",
        function: Callable[P, Any],
        spec: RouteSpec,
        *,
        query: str | Iterable[str],
        per: Callable[[], object] | None,
        tags: Tags,
    ) -> None:
        if per is not None and not callable(per):
            raise ConfigError(
                f"{spec.kind}: per is a function without arguments, such as "
                f"per=lambda: current_user.id, not {shown(per)}"
            )
        self._fresh = fresh
        self._function = function
        self.spec = spec
        self._query = (query,) if isinstance(query, str) else tuple(query)
        self._per = per
        self._tags = tags
        self._tag_names = _checked_names(spec.kind, function, tags) if callable(tags) else ()
        self._is_reported = False
        update_wrapper(self, function)

    @property
    def kind(self) -> str:
        """The name of its entries in the store."""
        return self.spec.kind

    def report(self, why: str) -> None:
        """Log, once for a view, why its response was not cached."""
        if not self._is_reported:
            self._is_reported = True
            logger.warning(
                "%s: a response is not kept, since %s. If it depends on the visitor, write per= "
                "(for example per=lambda: current_user.id), or remove @fresh.view.",
                self.kind,
                why,
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:  # noqa: ANN401 (Flask's)
        """Return the stored response, or load it."""
        if not has_request_context() or request.method not in {"GET", "HEAD"}:
            return self._run(*args, **kwargs)
        run = partial(self._run, *args, **kwargs)
        query = [(name, value) for name in self._query for value in request.args.getlist(name)]
        personal = None if self._per is None else self._per()
        call = self._call(query, kwargs, personal)
        load = request.environ.get(MARK)
        if isinstance(load, ViewLoad) and load.report == self.report:
            return load.run_view(call, run)
        try:
            return self._read(call, run, query, is_personal=personal is not None)
        except (StoreError, NotOpen):  # it cannot be opened: as without the cache
            return run()

    def _run(self, *args: P.args, **kwargs: P.kwargs) -> Any:  # noqa: ANN401 (the view's)
        if not has_app_context():
            return self._function(*args, **kwargs)
        return current_app.ensure_sync(self._function)(*args, **kwargs)

    def _call(self, query: Query, arguments: dict[str, Any], personal: object) -> Call[Any]:
        """The entry: by the path, with its arguments, and by arguments that decorators added."""
        from_path = request.view_args or {}
        added = {
            name: value for name, value in arguments.items() if value is not from_path.get(name)
        }
        address = [request.scheme, request.host, request.root_path, request.path]
        parts = [*address, query, personal, added]
        advice = "let per= return plain data, such as the user's id"
        id_ = id_of(self.kind, parts, [personal, added], advice)
        tags = self._tags
        if callable(tags):
            tags = tags(**{name: arguments[name] for name in self._tag_names})
        return Call(id_, checked_tags(self.kind, tags), {})

    def _read(
        self, call: Call[Any], run: Callable[[], Any], query: Query, *, is_personal: bool
    ) -> object:
        cache = self._fresh.cache
        if cache.is_bypassed():
            return run()
        resource = self._fresh.resource_of(self)
        result: Read[KeptResponse] | None = resource.get_nowait(call)
        if result is None:
            load = ViewLoad(call, run, query, self.report, is_personal=is_personal)
            result = resource.read(call, load)
        match result:
            case Private(Response() as response):
                return response
            case Answer(found=True) as answer:
                return self._response(answer)
            case LoadFailed() as failed if not isinstance(failed.__cause__, Dropped):
                pause = pause_after(failed, cache.clock())
                raise failed.__cause__ or ServiceUnavailable(retry_after=pause)
        return run()  # the load was for another caller only, or failed for visitors without `per`

    def _response(self, answer: Answer[KeptResponse]) -> Response:
        """A new response for each request, because sending may change it."""
        stored = answer.value
        fields = without_lifetime(stored.headers) if answer.unverified else stored.headers
        headers = [(name.decode(), value.decode("latin-1")) for name, value in fields]
        response: Response = current_app.response_class(stored.body, stored.status, headers)
        response.headers.update(freshness_fields(answer, answer.policy.fresh_for))
        if self._per is not None:
            response.headers.setdefault("Cache-Control", "private, no-cache")
        if "ETag" in response.headers or "Last-Modified" in response.headers:
            response.make_conditional(request)
        return response


def _checked_names(kind: str, function: Callable[..., Any], tags: Callable[..., Any]) -> list[str]:
    """The view's arguments that `tags` takes."""
    names = list(inspect.signature(tags).parameters)
    known = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return names
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{kind}: tags= takes {name!r}, which the view does not; "
                f"it takes: {', '.join(known) or 'nothing'}"
            )
    return names
