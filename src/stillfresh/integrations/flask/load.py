"""A view's load: by the request that waits for it, or by the same request again.

A view with a copy for each visitor (`per`) is run by the waiting request itself. All others run in
a request of their own: a view for all visitors must not see one of them, and a refresh runs after
its request has ended and its database session is closed.

The repeated request goes through the app's functions and decorators to the view. There the
`FreshView` finds the `ViewLoad` under `MARK` and calls `run_view`, which notes the outcome. The
outcome is noted, and not returned, because the app's functions around the view may change it.
"""

from collections.abc import Callable
from io import BytesIO
from typing import Any, Final
from urllib.parse import urlencode

from flask import Flask, Response, has_request_context, request, session
from flask.globals import app_ctx
from werkzeug.exceptions import HTTPException

from stillfresh.engine import Call, Dropped, Private
from stillfresh.integrations.routes import MARK, KeptResponse, is_for_all

KEPT: Final = frozenset(
    {"SCRIPT_NAME", "PATH_INFO", "HTTP_HOST", "SERVER_NAME", "SERVER_PORT", "SERVER_PROTOCOL"}
    | {"wsgi.url_scheme", "wsgi.version", "wsgi.errors"}
)
"""The parts that are equal in all requests for the same copy."""
VISITOR: Final = ("HTTP_COOKIE", "HTTP_AUTHORIZATION", "REMOTE_USER")

NOBODYS: Final = Private[Response | None](None, is_noted=False)
"""Neither stored nor for the visitor, whose request must run the view itself."""

Run = Callable[[], Any]
Query = list[tuple[str, str]]
Environ = dict[str, Any]


def repeat_environ(environ: Environ, query: Query, *, whole: bool) -> Environ:
    """The same request again, as a GET without a client; `whole`: with the visitor's fields."""
    repeated = {
        name: value
        for name, value in environ.items()
        if name in KEPT or (whole and isinstance(value, str) and not name.startswith("werkzeug."))
    }
    repeated.setdefault("REMOTE_ADDR", "127.0.0.1")
    repeated["REQUEST_METHOD"] = "GET"
    repeated["QUERY_STRING"] = urlencode(query)
    repeated["CONTENT_LENGTH"] = "0"
    repeated["wsgi.input"] = BytesIO()
    repeated["wsgi.multithread"] = True
    repeated["wsgi.multiprocess"] = True
    repeated["wsgi.run_once"] = False
    return repeated


class ViewLoad:
    """The loader that one request brings. `report` is called if a response cannot be stored."""

    def __init__(
        self,
        call: Call[Any],
        run: Run,
        query: Query,
        report: Callable[[str], None],
        *,
        is_personal: bool,
    ) -> None:
        self._app: Flask = app_ctx.app
        self._call = call
        self._run = run
        self._own: Environ = request.environ
        self._environ = repeat_environ(self._own, query, whole=is_personal)
        self.report = report
        self._is_personal = is_personal
        has_all = sorted(request.args.items(multi=True)) == sorted(query)
        is_known = any(name in self._own for name in VISITOR)
        self._is_whole = has_all and (is_personal or not is_known)
        """True if no part of the request is left out that might matter."""
        self._outcome: KeptResponse | Private[Response | None] | Exception | None = None
        """What the repeated request's view did; None while it has not run."""

    def __call__(self) -> object:
        """For the engine: the response to store, or a `Private` for its caller only."""
        is_here = has_request_context() and request.environ is self._own
        if is_here and self._is_personal and self._is_whole and request.method == "GET":
            response, outcome = self._call_view(self._run)
            if isinstance(outcome, KeptResponse):
                return outcome
            return Private(response, is_noted=False)
        with self._app.app_context(), self._app.request_context({**self._environ, MARK: self}):
            return self._replay()

    def _replay(self) -> object:
        """Run the request through the app's functions and all decorators, to the view."""
        try:
            if self._app.preprocess_request() is None:
                self._app.dispatch_request()
        except HTTPException:
            pass  # of the app, before the view; or the view's, which is noted
        except Exception:
            if self._outcome is None:
                raise
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if self._outcome is None:
            why = "the app answered a visitor that it does not know before the view ran"
            self.report(why)
            raise Dropped(why)
        return self._outcome

    def run_view(self, call: Call[Any], run: Run) -> Response:
        """Run the view and note its outcome. The repeated request calls it in place of a read."""
        if call != self._call:
            problem = Dropped(f"made again, the request is for {call!r}, not {self._call!r}")
            self._outcome = problem
            self.report(f"{problem}")
            raise problem
        try:
            response, outcome = self._call_view(run)
        except Exception as exc:
            self._outcome = exc
            raise
        if outcome is NOBODYS:
            response.close()
        self._outcome = outcome
        return response

    def _call_view(self, run: Run) -> tuple[Response, KeptResponse | Private[Response | None]]:
        """The response, and what to store; the app's error handlers run as always."""
        app = self._app
        is_error = False
        try:
            response = app.make_response(run())
        except Exception as exc:  # noqa: BLE001 (raised again if the app has no handler for it)
            response = app.make_response(app.handle_user_exception(exc))
            is_error = True
            response.make_sequence()  # an HTTPException's comes as a stream
        if response.status_code >= 500:
            raise HTTPException(f"the view responded {response.status}", response)
        if response.is_streamed or response.direct_passthrough:
            return response, NOBODYS
        why = "" if self._is_personal else _why_personal(response)
        if why:
            self.report(why)
            return response, NOBODYS
        headers = [(name.encode(), value.encode("latin-1")) for name, value in response.headers]
        body = response.get_data()
        if not is_error and is_for_all(response.status_code, headers, len(body)):
            return response, KeptResponse(response.status_code, headers, body)
        if self._is_whole:
            return response, Private(response, is_noted=False)
        return response, NOBODYS


def _why_personal(response: Response) -> str:
    """Why it is for one visitor, although the view was run without one; empty if it is not."""
    if session.modified:
        return "the view changed the session"
    if response.vary:
        return f"it says Vary: {response.vary.to_header()}"
    return ""
