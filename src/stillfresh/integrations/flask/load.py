"""A view's load: by the request that waits for it, or by the same request again (E3, E20).

A view with a copy for each visitor (`per`) is run by the waiting request itself. All others run in
a request of their own: a view for all visitors must not see one of them, and a refresh runs after
its request has ended and its database session is closed.
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


def replayed(environ: Environ, query: Query, *, whole: bool) -> Environ:
    """The same request again, as a GET without a client; `whole`: with the visitor's fields."""
    kept = {
        name: it
        for name, it in environ.items()
        if name in KEPT or (whole and isinstance(it, str) and not name.startswith("werkzeug."))
    }
    kept.setdefault("REMOTE_ADDR", "127.0.0.1")
    kept |= {"REQUEST_METHOD": "GET", "QUERY_STRING": urlencode(query), "CONTENT_LENGTH": "0"}
    kept |= {"wsgi.input": BytesIO(), "wsgi.multithread": True, "wsgi.multiprocess": True}
    return {**kept, "wsgi.run_once": False}


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
        self._environ = replayed(self._own, query, whole=is_personal)
        self.report = report
        self._is_personal = is_personal
        has_all = sorted(request.args.items(multi=True)) == sorted(query)
        is_known = any(name in self._own for name in VISITOR)
        self._is_whole = has_all and (is_personal or not is_known)
        """True if no part of the request is left out that might matter."""
        self._said: KeptResponse | Private[Response | None] | Exception | None = None

    def __call__(self) -> object:
        """For the engine: the response to store, or a `Private` for its caller only."""
        is_here = has_request_context() and request.environ is self._own
        if is_here and self._is_personal and self._is_whole and request.method == "GET":
            response, said = self._judged(self._run)
            return said if isinstance(said, KeptResponse) else Private(response, is_noted=False)
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
            if self._said is None:
                raise
        if isinstance(self._said, Exception):
            raise self._said
        if self._said is None:
            why = "the app answered a visitor that it does not know before the view ran"
            self.report(why)
            raise Dropped(why)
        return self._said

    def ran(self, call: Call[Any], run: Run) -> Response:
        """Called by the repeated request in place of the view's read."""
        if call != self._call:
            self._said = Dropped(f"made again, the request is for {call!r}, not {self._call!r}")
            self.report(f"{self._said}")
            raise self._said
        try:
            response, said = self._judged(run)
        except Exception as exc:
            self._said = exc
            raise
        if said is NOBODYS:
            response.close()
        self._said = said
        return response

    def _judged(self, run: Run) -> tuple[Response, KeptResponse | Private[Response | None]]:
        """The response, and what to store; the app's error handlers run as always."""
        app, is_error = self._app, False
        try:
            response = app.make_response(run())
        except Exception as exc:  # noqa: BLE001 (raised again if the app has no handler for it)
            response, is_error = app.make_response(app.handle_user_exception(exc)), True
            response.make_sequence()  # an HTTPException's comes as a stream
        if response.status_code >= 500:
            raise HTTPException(f"the view responded {response.status}", response)
        if response.is_streamed or response.direct_passthrough:
            return response, NOBODYS
        if why := "" if self._is_personal else _visitors(response):
            self.report(why)
            return response, NOBODYS
        headers = [(name.encode(), it.encode("latin-1")) for name, it in response.headers]
        body = response.get_data()
        if is_error or not is_for_all(response.status_code, headers, len(body)):
            return response, Private(response, is_noted=False) if self._is_whole else NOBODYS
        return response, KeptResponse(response.status_code, headers, body)


def _visitors(response: Response) -> str:
    """Why it is for one visitor, although the view was run without one; empty if it is not."""
    if session.modified:
        return "the view changed the session"
    return f"it says Vary: {response.vary.to_header()}" if response.vary else ""
