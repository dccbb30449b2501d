"""The extension: the cache of each app, from its settings, and the views that are kept in it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, ParamSpec
from weakref import WeakKeyDictionary

from flask import Flask, Response, has_app_context, request
from flask.globals import app_ctx

from stillfresh.durations import Duration, seconds
from stillfresh.engine import Call, MsgpackCodec, Spec, no_loader, terms_of
from stillfresh.engine.keys import checked_kind
from stillfresh.errors import ConfigError
from stillfresh.integrations.dashboards import dashboard_of
from stillfresh.integrations.flask.errors import is_refusal
from stillfresh.integrations.flask.view import FreshView, ViewResource
from stillfresh.integrations.routes import KeptResponse, RouteSpec, Tags, check_cache
from stillfresh.sync import SyncCache

P = ParamSpec("P")

PREFIX: Final = "STILLFRESH_"
SETTINGS: Final = {"STILLFRESH_STORE": "store", "STILLFRESH_GRACE": "grace"}
"""The settings, and their names in `SyncCache(...)`."""


class AppViews(NamedTuple):
    """The cache and the views of one app."""

    cache: SyncCache
    resources: dict[str, ViewResource]
    """By the names of the views."""


class Fresh:
    """The extension: `fresh = Fresh(app)`, or `fresh = Fresh()` and later `fresh.init_app(app)`.

    Each app has a cache by its settings, unless `cache` is given, which all apps then share.
    """

    def __init__(self, app: Flask | None = None, *, cache: SyncCache | None = None) -> None:
        if cache is not None:
            check_cache(cache, SyncCache)
        self._shared = None if cache is None else AppViews(cache, {})
        self._apps: WeakKeyDictionary[Flask, AppViews] = WeakKeyDictionary()
        self._views: dict[str, FreshView[Any]] = {}
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Read the app's settings. Raises ConfigError for one that cannot be used.

        An HTTPException below 500 that a function cached by this app raises reaches its callers
        as it is.
        """
        settings = {name: value for name, value in app.config.items() if name.startswith(PREFIX)}
        if self._shared is not None and settings:
            raise ConfigError(
                f"{', '.join(settings)}: this Fresh was given a cache; remove the settings, or "
                "write Fresh() without cache="
            )
        views = self._shared or AppViews(_cache_of(settings), {})
        views.cache.pass_on(is_refusal)
        self._apps[app] = views
        app.extensions["stillfresh"] = self
        for view in self._views.values():
            _declare(view, views)

    @property
    def cache(self) -> SyncCache:
        """The cache of the current app, or of the only one."""
        return self._of_app().cache

    def resource_of(self, view: FreshView[Any]) -> ViewResource:
        """Return the resource of the current app's cache that stores the responses of a view."""
        return self._of_app().resources[view.kind]

    def _of_app(self) -> AppViews:
        if self._shared is not None:
            return self._shared
        views = None
        if has_app_context():
            views = self._apps.get(app_ctx.app)
        elif len(self._apps) == 1:
            views = next(iter(self._apps.values()))
        if views is None:
            raise ConfigError(
                f"this Fresh has {len(self._apps)} apps, and the current app is none of them: call "
                f"init_app(app), and outside of requests work in `with app.app_context():`; to "
                f"decorate functions before there is an app, write Fresh(cache=SyncCache(...))"
            )
        return views

    def dashboard(
        self, app: Flask, path: str = "/_stillfresh", *, token: str | None = None
    ) -> None:
        """Add the operator's dashboard to the app, below this path.

        Without a token, only this machine may see it. Needs `stillfresh[web]`, too.
        """
        own = self._shared or self._apps.get(app)
        if own is None:
            raise ConfigError("dashboard: call init_app(app) first")
        board = dashboard_of(own.cache, token)

        def dashboard(subpath: str = "") -> Response:
            reply = board.reply_to(request.environ, f"/{subpath}")
            return Response(reply.body, reply.status, reply.headers)

        base = path.rstrip("/")
        for rule in (f"{base}/", f"{base}/<path:subpath>"):
            app.add_url_rule(rule, "stillfresh_dashboard", dashboard, methods=["GET", "POST"])

    def view(
        self,
        fresh_for: Duration,
        *,
        stale_for: Duration = 0,
        error_for: Duration = 0,
        query: str | Iterable[str] = (),
        per: Callable[[], object] | None = None,
        tags: Tags = (),
        name: str | None = None,
        jitter: float = 0.0,
        memory_for: Duration = 0,
        max_entries: int = 10_000,
        max_bytes: int | str | None = None,
        concurrency: int = 16,
        load_timeout: Duration = "30s",
    ) -> Callable[[Callable[P, Any]], FreshView[P]]:
        """Cache what a view returns. Write it below `@app.get(...)`, next to the function.

        The key is the address without its query, the arguments named in `query`, and what `per`
        returns. Without `per`, or if it returns None, the view sees no cookies and no user. The
        other options are those of `Cache.cached`.
        """
        seconds(fresh_for, name="fresh.view: fresh_for")  # also refuses @fresh.view without (...)

        def decorate(function: Callable[P, Any]) -> FreshView[P]:
            kind = checked_kind(str(name or getattr(function, "__name__", "")))
            if kind in self._views:
                raise ConfigError(f"{kind}: another view has this name; write name='{kind}_2'")
            if any(function in app.view_functions.values() for app in self._apps):
                raise ConfigError(
                    f"{kind}: @fresh.view stands above the route; write it below @app.get(…)"
                )
            spec: RouteSpec = Spec(
                kind,
                no_loader,
                MsgpackCodec[KeptResponse](KeptResponse, kind),
                (lambda call: call.args) if tags else None,
                terms_of(kind, fresh_for, stale_for, error_for, 0, jitter),
                max_entries=max_entries,
                max_bytes=max_bytes,
                memory_for=memory_for,
                concurrency=concurrency,
                load_timeout=load_timeout,
                by_id=False,
                in_thread=True,
            )
            view = FreshView(self, function, spec, query=query, per=per, tags=tags)
            for views in self._apps.values():
                _declare(view, views)
            self._views[kind] = view
            return view

        return decorate


def _declare(view: FreshView[Any], views: AppViews) -> None:
    """Declare the view's entries, once for each cache."""
    if view.kind not in views.resources:
        resource = views.cache.declare(
            view.spec, lambda call: call.id, lambda id_: Call(id_, (), {})
        )
        views.resources[view.kind] = resource


def _cache_of(settings: Mapping[str, Any]) -> SyncCache:
    """The cache that an app's settings describe."""
    for unknown in settings.keys() - SETTINGS.keys():
        raise ConfigError(f"{unknown}: there is no such setting; there are {', '.join(SETTINGS)}")
    if "STILLFRESH_STORE" not in settings:
        raise ConfigError(
            "STILLFRESH_STORE is not set; set app.config['STILLFRESH_STORE'] to an address, such "
            "as 'sqlite:///app.db', 'redis://…' or 'memory://'"
        )
    for name, value in settings.items():  # each by itself, so that the error names it
        try:
            SyncCache(**{"store": "memory://", SETTINGS[name]: value})
        except ConfigError as exc:
            raise ConfigError(f"{name}: {exc}") from exc
    return SyncCache(**{SETTINGS[name]: value for name, value in settings.items()})
