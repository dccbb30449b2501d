"""The operator's dashboard in a Django site: one line of `urlpatterns`."""

import re
from io import BytesIO

from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, re_path
from django.views.decorators.csrf import csrf_exempt

from stillfresh.errors import ConfigError
from stillfresh.integrations.dashboards import dashboard_of
from stillfresh.integrations.django.backend import backend_of
from stillfresh.sync import SyncCache


def dashboard(
    route: str = "_stillfresh/",
    *,
    token: str | None = None,
    cache: str | SyncCache = "default",
) -> URLPattern:
    """Return the URL pattern of the dashboard: `urlpatterns = [dashboard(token="…"), …]`.

    Without a token, only this machine may see it. `cache`: an alias of CACHES, or a SyncCache of
    your own. Needs `stillfresh[web]`, too.
    """
    if not route.endswith("/") or route.startswith("/"):
        raise ConfigError(f"dashboard: write a route as '_stillfresh/', not {route!r}")
    shown = cache if isinstance(cache, SyncCache) else backend_of(cache, "the dashboard").cache
    board = dashboard_of(shown, token)

    def view(request: HttpRequest, subpath: str) -> HttpResponse:
        # Django has decoded the paths, and under ASGI there is no input of WSGI.
        environ = {
            **request.META,
            "PATH_INFO": as_wsgi(request.path_info),
            "SCRIPT_NAME": as_wsgi(request.META.get("SCRIPT_NAME", "")),
            "CONTENT_LENGTH": str(len(request.body)),
            "wsgi.input": BytesIO(request.body),
        }
        reply = board.reply_to(environ, f"/{subpath}")
        return HttpResponse(reply.body, status=reply.status, headers=dict(reply.headers))

    # Its actions have a check of their own: a token, or a field that a form cannot send.
    return re_path(rf"^{re.escape(route)}(?P<subpath>[\s\S]*)\Z", csrf_exempt(view))


def as_wsgi(text: str) -> str:
    """PEP 3333: bytes of UTF-8, each as one character."""
    return text.encode("utf-8", "surrogateescape").decode("latin-1")
