"""E20 in Flask: what the visitors of a view get, from the cache and without it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import (
    Blueprint,
    Flask,
    Response,
    abort,
    g,
    redirect,
    request,
    send_file,
    session,
    stream_with_context,
    url_for,
)
from flask.testing import FlaskClient
from flask.views import MethodView
from werkzeug.test import TestResponse

from stillfresh import ConfigError, SyncCache
from stillfresh.integrations.flask import Fresh
from stillfresh.testing import ManualClock
from tests.kit.sync import Calling, until

View = Callable[..., Any]


class Shop:
    """An app, its cache on a manual clock, and what its views were called with."""

    def __init__(self, store: str = "memory://") -> None:
        self.clock = ManualClock(1_000_000.0)
        self.cache = SyncCache(store, clock=self.clock, dice=lambda: 0.0)
        self.fresh = Fresh(cache=self.cache)
        self.app = Flask("shop")
        self.app.secret_key = "of the tests"  # noqa: S105
        self.app.testing = True
        self.fresh.init_app(self.app)
        self.calls: list[Any] = []
        self.error: Exception | None = None

    def client(self) -> FlaskClient:
        return self.app.test_client()

    def get(self, path: str, **options: Any) -> TestResponse:
        """By a visitor that nobody knows."""
        return self.client().get(path, **options)

    def called(self, what: Any = None) -> int:
        self.calls.append(what)
        if self.error is not None:
            raise self.error
        return len(self.calls)

    def counted(self, path: str = "/n", **options: Any) -> None:
        """A view that says how often it was called."""

        @self.app.get(path)
        @self.fresh.view("10m", stale_for="1h", error_for="1d", **options)
        def n(**arguments: Any) -> str:
            return f"{self.called(arguments)}"


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    yield shop
    shop.cache.close()


def status(response: TestResponse) -> str:
    return response.headers["Cache-Status"]


class TestE20View:
    def test_a_bypassed_view_has_no_cache_status(self, shop: Shop) -> None:
        """E22: inside `bypassed()` the view is as without the cache."""
        shop.counted()
        shop.get("/n")
        with shop.cache.bypassed():
            told = shop.get("/n")
        assert told.text == "2"
        assert "Cache-Status" not in told.headers
        assert shop.get("/n").text == "1"

    def test_a_second_request_of_a_view_is_a_hit(self, shop: Shop) -> None:
        """The view runs once; the second response is the same, and says that it is a hit."""

        @shop.app.get("/items/<int:id>")
        @shop.fresh.view("10m")
        def item(id: int) -> tuple[dict[str, int], dict[str, str]]:  # noqa: A002
            return {"id": id, "n": shop.called()}, {"X-Shop": "tea", "ETag": '"1"'}

        first = shop.get("/items/7")
        shop.clock.advance(7)
        second = shop.get("/items/7")
        assert first.json == second.json == {"id": 7, "n": 1}
        assert status(first) == "stillfresh; fwd=miss; stored; ttl=600; detail=fresh"
        assert status(second) == "stillfresh; hit; ttl=593; detail=fresh"
        assert (first.headers["Age"], second.headers["Age"]) == ("0", "7")
        assert (second.mimetype, second.headers["X-Shop"]) == ("application/json", "tea")
        again = shop.get("/items/7", headers={"If-None-Match": '"1"'})
        assert (again.status_code, again.data, len(shop.calls)) == (304, b"", 1)
        assert "Cache-Control" not in second.headers

    def test_path_host_and_script_name_are_the_key(self, shop: Shop) -> None:
        """Path, host and script name; arguments that a decorator adds, also."""
        shop.counted("/items/<int:id>")
        seen = [
            shop.get("/items/1").text,
            shop.get("/items/2").text,
            shop.get("/items/1", base_url="http://other.example").text,
            shop.get("/items/1", base_url="https://localhost").text,
            shop.get("/items/1", base_url="http://localhost/mounted").text,
            shop.get("/items/1").text,
        ]
        assert seen == ["1", "2", "3", "4", "5", "1"]

    def test_arguments_added_by_a_decorator_are_in_the_key(
        self, shop: Shop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """If it depends on what the key has not, nothing is kept for that visitor."""

        def greeted(view: View) -> View:
            def wrapped(**arguments: Any) -> Any:
                greeting = request.args.get("lang") or request.headers.get("X-Lang")
                return view(**arguments, greeting=greeting)

            return wrapped

        @shop.fresh.view("10m", query="lang")
        def hello(name: str, greeting: str) -> str:
            return f"{greeting} {name} {shop.called()}"

        shop.app.add_url_rule("/hello/<name>", "hello", greeted(hello))
        assert [shop.get("/hello/ann?lang=hi").text for _ in range(2)] == ["hi ann 1"] * 2
        assert shop.get("/hello/ann?lang=ciao").text == "ciao ann 2"
        assert shop.get("/hello/ann").text == "None ann 3"
        for n in (4, 5):
            assert shop.get("/hello/ann", headers={"X-Lang": "moin"}).text == f"moin ann {n}"
        assert shop.get("/hello/ann").text == "None ann 3"
        assert "hello: a response is not kept" in caplog.text

    def test_a_language_that_routing_takes_away_is_in_the_key(self, shop: Shop) -> None:
        """As in Flask's own pattern: a preprocessor pops it from the arguments."""
        pages = Blueprint("pages", __name__, url_prefix="/<lang>")

        @pages.url_value_preprocessor
        def take(endpoint: str | None, values: dict[str, Any] | None) -> None:
            assert values is not None
            g.lang = values.pop("lang")

        @pages.get("/about")
        @shop.fresh.view("10m")
        def about() -> str:
            return f"{g.lang} {shop.called()}"

        shop.app.register_blueprint(pages)
        assert shop.get("/de/about").text == "de 1"
        assert shop.get("/en/about").text == "en 2"
        assert shop.get("/de/about").text == "de 1"

    def test_the_view_sees_only_the_listed_query(self, shop: Shop) -> None:
        """What is not in the key does not reach the view, and makes no second copy."""

        @shop.app.get("/search")
        @shop.fresh.view("10m", query=("page", "q"))
        def search() -> dict[str, Any]:
            return {"args": request.args.to_dict(flat=False), "n": shop.called()}

        first = shop.get("/search?utm=1&q=tea&q=rum&page=2").json
        assert first == {"args": {"page": ["2"], "q": ["tea", "rum"]}, "n": 1}
        assert shop.get("/search?page=2&q=tea&q=rum&utm=2").json == first
        assert shop.get("/search?page=2&q=rum&q=tea").get_json()["n"] == 2
        assert shop.get("/search?x=1").json == {"args": {}, "n": 3}
        assert shop.get("/search").get_json()["n"] == 3

    def test_head_is_served_by_the_copy_of_get(self, shop: Shop) -> None:
        """Whichever comes first, the view runs once, as for GET."""

        @shop.app.get("/page")
        @shop.fresh.view("10m")
        def page() -> str:
            return f"{request.method} {shop.called()}"

        head = shop.client().head("/page")
        assert (head.data, head.headers["Content-Length"]) == (b"", "5")
        assert shop.get("/page").text == "GET 1"
        assert "hit" in status(shop.client().head("/page"))

    def test_other_methods_pass_through(self, shop: Shop) -> None:
        """A POST always runs the view, and says nothing of a cache."""

        @shop.app.route("/form", methods=["GET", "POST"])
        @shop.fresh.view("10m")
        def form() -> str:
            return f"{request.method} {request.form.get('x')} {shop.called()}"

        assert shop.get("/form").text == "GET None 1"
        posted = shop.client().post("/form", data={"x": "1"})
        assert (posted.text, "Cache-Status" in posted.headers) == ("POST 1 2", False)
        assert shop.get("/form").text == "GET None 1"

    def test_a_view_is_invalidated_by_its_tags(self, shop: Shop) -> None:
        """By the view's arguments, or one tag for all."""
        shop.counted("/items/<int:id>", tags=lambda id: [f"item:{id}"])  # noqa: A006

        @shop.app.get("/list")
        @shop.fresh.view("10m", tags="items")
        def listed() -> str:
            return f"{shop.called()}"

        assert [shop.get(it).text for it in ("/items/1", "/items/2", "/list")] == ["1", "2", "3"]
        shop.cache.invalidate_tag("item:1")
        assert [shop.get(it).text for it in ("/items/1", "/items/2", "/list")] == ["4", "2", "3"]
        shop.cache.invalidate_tag("items")
        assert shop.get("/list").text == "5"

    def test_sixteen_visitors_cause_one_call_of_the_view(self, shop: Shop) -> None:
        """Who waits gets the response of the one that runs the view, in its own thread."""
        gate, threads = threading.Event(), list[str]()

        @shop.app.get("/slow")
        @shop.fresh.view("10m")
        def slow() -> str:
            threads.append(threading.current_thread().name)
            assert gate.wait(20)
            return f"{shop.called()}"

        asked = [Calling(shop.get, "/slow", name=f"visitor-{n}") for n in range(16)]
        until(lambda: threads)
        gate.set()
        assert {it.result().text for it in asked} == {"1"}
        assert len(threads) == 1
        assert threads[0].startswith("visitor-")

    def test_after_request_hooks_run_for_hits(self, shop: Shop) -> None:
        """And for the load once, on the response that is sent."""
        shop.counted()

        @shop.app.after_request
        def mark(response: Response) -> Response:
            response.headers.add("X-After", "1")
            return response

        for _ in range(2):
            assert shop.get("/n").headers.getlist("X-After") == ["1"]

    def test_async_and_class_based_views_are_cached(self, shop: Shop) -> None:
        """As Flask runs them."""

        @shop.app.get("/async")
        @shop.fresh.view("10m")
        async def waiting() -> str:
            return f"{shop.called()}"

        class Listing(MethodView):
            decorators = [shop.fresh.view("10m", tags=lambda id: f"list:{id}")]  # noqa: A006, RUF012

            def get(self, id: int) -> str:  # noqa: A002
                return f"{id} {shop.called()}"

        shop.app.add_url_rule("/list/<int:id>", view_func=Listing.as_view("listing"))
        assert [shop.get("/async").text for _ in range(2)] == ["1", "1"]
        assert [shop.get("/list/7").text for _ in range(2)] == ["7 2", "7 2"]

    def test_a_cached_view_called_by_hand_is_the_function(self, shop: Shop) -> None:
        """Outside of a request nothing is cached."""
        calls = list[int]()

        @shop.fresh.view("10m")
        def plain(x: int = 1) -> int:
            """Says x."""
            calls.append(x)
            return x

        assert [plain(), plain(x=2)] == [1, 2]
        assert (plain.__name__, plain.__doc__) == ("plain", "Says x.")


class TestE20ViewPersonal:
    """Anything personal is never shared unless the key says so."""

    def test_a_shared_view_sees_no_session_cookie_or_authorization(self, shop: Shop) -> None:
        """Session, cookies, Authorization and what `before_request` made of them are not there."""

        @shop.app.before_request
        def load_user() -> None:
            if "user" in session:
                g.user = session["user"]

        @shop.app.get("/login/<user>")
        def login(user: str) -> str:
            session["user"] = user
            return user

        @shop.app.get("/")
        @shop.fresh.view("10m")
        def index() -> list[Any]:
            auth = request.headers.get("Authorization")
            shop.called()
            return [
                g.get("user"),
                dict(session),
                dict(request.cookies),
                auth,
                request.user_agent.string,
            ]

        ann = shop.client()
        ann.get("/login/ann")
        ann.set_cookie("theme", "dark")
        first = ann.get("/", headers={"Authorization": "Bearer ann"})
        assert first.json == [None, {}, {}, None, ""]
        assert shop.get("/").json == first.json
        assert len(shop.calls) == 1

    def test_per_keeps_a_copy_for_each_visitor(self, shop: Shop) -> None:
        """Run in the visitor's own request; private to browsers and proxies."""

        @shop.app.before_request
        def load_user() -> None:
            g.user = session.get("user")
            g.seen = request.path

        @shop.app.get("/login/<user>")
        def login(user: str) -> str:
            session["user"] = user
            return user

        @shop.app.get("/basket")
        @shop.fresh.view("10m", per=lambda: g.user)
        def basket() -> str:
            return f"{g.user} {request.headers.get('X-Trace')} {shop.called()}"

        ann, bob = shop.client(), shop.client()
        ann.get("/login/ann")
        bob.get("/login/bob")
        first = ann.get("/basket", headers={"X-Trace": "t1"})
        assert first.text == "ann t1 1"
        assert bob.get("/basket").text == "bob None 2"
        assert ann.get("/basket").text == "ann t1 1"
        assert shop.get("/basket").text == "None None 3"
        assert first.headers["Cache-Control"] == "private, no-cache"

    def test_per_that_returns_none_runs_as_an_unknown_visitor(self, shop: Shop) -> None:
        """So the view runs as for a visitor that nobody knows: no stranger's basket is shown."""

        @shop.app.get("/add/<it>")
        def add(it: str) -> str:
            session["basket"] = it
            return it

        @shop.app.get("/basket")
        @shop.fresh.view("10m", per=lambda: session.get("user"))
        def basket() -> str:
            return f"{session.get('basket')} {shop.called()}"

        for it in ("tea", "coffee"):
            visitor = shop.client()
            visitor.get(f"/add/{it}")
            assert visitor.get("/basket").text == "None 1"

    def test_a_view_behind_a_login_is_not_shared(
        self, shop: Shop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Without `per` each visitor runs it, as without the cache, and the author is told once."""

        def login_required(view: View) -> View:
            def checked(**arguments: Any) -> Any:
                return view(**arguments) if "user" in session else redirect("/login")

            return checked

        @shop.app.get("/login/<user>")
        def login(user: str) -> str:
            session["user"] = user
            return user

        @login_required
        @shop.fresh.view("10m")
        def account() -> str:
            return f"{session['user']} {shop.called()}"

        shop.app.add_url_rule("/account", "account", account)
        ann, bob = shop.client(), shop.client()
        ann.get("/login/ann")
        bob.get("/login/bob")
        assert [ann.get("/account").text, bob.get("/account").text] == ["ann 1", "bob 2"]
        assert ann.get("/account").text == "ann 3"
        assert shop.get("/account").status_code == 302
        [said] = [it.message for it in caplog.records if "integrations.flask" in it.name]
        assert said.startswith("account: a response is not kept, since the app answered a visitor")
        assert "per=lambda: current_user.id" in said

    def test_a_refusal_of_unknown_visitors_is_not_served_to_known_ones(self, shop: Shop) -> None:
        """What it said to a stranger is no answer to a visitor that it knows."""

        @shop.app.get("/login/<user>")
        def login(user: str) -> str:
            session["user"] = user
            return user

        @shop.app.get("/account")
        @shop.fresh.view("10m")
        def account() -> Any:
            return session["user"] if "user" in session else redirect("/login")

        ann = shop.client()
        ann.get("/login/ann")
        assert ann.get("/account").text == "ann"
        assert shop.get("/account").status_code == 302
        assert ann.get("/account").text == "ann"

    @pytest.mark.parametrize(
        ("view", "why"),
        [
            (lambda: session.setdefault("csrf", "token"), "the view changed the session"),
            (lambda: ("x", {"Vary": "Accept-Language"}), "it says Vary: Accept-Language"),
        ],
    )
    def test_a_personal_response_of_a_view_is_not_cached(
        self, shop: Shop, caplog: pytest.LogCaptureFixture, view: View, why: str
    ) -> None:
        """Each visitor gets its own, session included; the log says why."""

        @shop.app.get("/own")
        @shop.fresh.view("10m")
        def own() -> Any:
            shop.called()
            return view()

        first, second = shop.get("/own"), shop.get("/own")
        assert ("Set-Cookie" in first.headers) == ("session" in why)
        assert "Cache-Status" not in second.headers
        assert len(shop.calls) >= 3
        assert why in caplog.text

    def test_per_must_be_plain_data(self, shop: Shop) -> None:
        """A user object cannot be a key; its id can."""
        shop.counted(per=object)
        with pytest.raises(ConfigError, match=r"n: .* cannot be a key.*per="):
            shop.get("/n")


class TestE20ViewNotKept:
    @pytest.mark.parametrize(
        ("answer", "status_code"),
        [
            (lambda: ("no", 404), 404),
            (lambda: redirect("/elsewhere"), 302),
            (lambda: abort(410), 410),
            (lambda: ("x", {"Set-Cookie": "a=b"}), 200),
            (lambda: ("x", {"Cache-Control": "private"}), 200),
            (lambda: "x" * 1_048_577, 200),
            (lambda: Response(iter(["a", "b"])), 200),
            (lambda: send_file(__file__), 200),
        ],
    )
    def test_responses_that_cannot_be_cached_are_passed_on(
        self, shop: Shop, answer: View, status_code: int
    ) -> None:
        """Each request runs the view, and gets what it responds."""

        @shop.app.get("/x")
        @shop.fresh.view("10m")
        def x() -> Any:
            shop.called()
            return answer()

        for _ in range(2):
            with shop.get("/x") as response:
                assert response.status_code == status_code
                assert "Cache-Status" not in response.headers
                assert response.data
        assert len(shop.calls) >= 2

    def test_an_error_page_of_a_view_runs_it_once(self, shop: Shop) -> None:
        """For a visitor that nobody knows, what the view said is what it gets."""

        @shop.app.get("/x")
        @shop.fresh.view("10m")
        def x() -> str:
            shop.called()
            abort(404)

        assert shop.get("/x").status_code == 404
        assert len(shop.calls) == 1

    def test_a_page_of_an_error_handler_is_never_cached(self, shop: Shop) -> None:
        """Not even with status 200."""

        @shop.app.errorhandler(KeyError)
        def handled(error: KeyError) -> str:
            return f"sorry {len(shop.calls)}"

        shop.counted()
        shop.error = KeyError("gone")
        assert [shop.get("/n").text, shop.get("/n").text] == ["sorry 1", "sorry 2"]

    def test_a_streamed_view_keeps_its_request(self, shop: Shop) -> None:
        """It is run in the visitor's own."""

        @shop.app.get("/stream")
        @shop.fresh.view("10m")
        def stream() -> Response:
            return Response(stream_with_context(iter([request.headers.get("X-Trace", "-")])))

        assert shop.get("/stream", headers={"X-Trace": "t1"}).text == "t1"


class TestE2ViewStale:
    def test_a_stale_view_is_served_and_refreshed_in_the_background(self, shop: Shop) -> None:
        """In a thread of the pool, in a request of its own, whose teardown runs."""
        torn_down, threads = list[str](), list[str]()

        @shop.app.before_request
        def connect() -> None:
            g.connection = "open"

        @shop.app.teardown_appcontext
        def teardown(error: BaseException | None) -> None:
            torn_down.append(threading.current_thread().name)

        @shop.app.get("/page")
        @shop.fresh.view("10m", stale_for="1h", query="q")
        def page() -> str:
            threads.append(threading.current_thread().name)
            said = [request.args["q"], g.connection, url_for("page", _external=True)]
            return f"{said} {shop.called()}"

        assert shop.get("/page?q=tea").text == "['tea', 'open', 'http://localhost/page'] 1"
        shop.clock.advance(601)
        stale = shop.get("/page?q=tea")
        assert (stale.text[-1], "detail=stale" in status(stale)) == ("1", True)
        until(lambda: shop.get("/page?q=tea").text.endswith("2"))
        assert shop.get("/page?q=tea").text == "['tea', 'open', 'http://localhost/page'] 2"
        assert threads == ["MainThread", "stillfresh-loader"]
        assert "stillfresh-loader" in torn_down

    def test_a_personal_refresh_has_the_visitors_headers(self, shop: Shop) -> None:
        """The same visitor once more; if it has become another one, nothing is kept."""
        users = {"token-1": "ann"}

        @shop.app.get("/me")
        @shop.fresh.view("10m", stale_for="1h", per=lambda: users[request.headers["X-Token"]])
        def me() -> str:
            return f"{users[request.headers['X-Token']]} {shop.called()}"

        headers = {"X-Token": "token-1"}
        assert shop.get("/me", headers=headers).text == "ann 1"
        shop.clock.advance(601)
        assert shop.get("/me", headers=headers).text == "ann 1"
        until(lambda: shop.get("/me", headers=headers).text == "ann 2")
        shop.clock.advance(601)
        asked = list[str]()

        class Turning(dict[str, str]):
            """Knows ann when it is asked first, and then bob."""

            def __getitem__(self, token: str) -> str:
                asked.append(token)
                return super().pop(token, "bob")

        users = Turning(users)
        assert shop.get("/me", headers=headers).text == "ann 2"
        until(lambda: len(asked) == 2)
        until(lambda: not shop.cache.stats().resources["me"].loading)
        assert len(shop.calls) == 2
        assert shop.cache.stats().resources["me"].loaded == 3

    def test_a_copy_whose_refresh_is_404_is_not_served_any_more(self, shop: Shop) -> None:
        """The refresh says that it is gone: it is served no more."""

        @shop.app.errorhandler(LookupError)
        def gone(error: LookupError) -> tuple[str, int]:
            return "gone", 404

        shop.counted("/items/<int:id>")
        assert shop.get("/items/1").text == "1"
        shop.clock.advance(601)
        shop.error = LookupError()
        assert shop.get("/items/1").text == "1"
        until(lambda: shop.get("/items/1").status_code == 404)


class TestE7ViewFailing:
    def test_the_old_response_is_served_while_the_view_fails(self, shop: Shop) -> None:
        """Within `error_for`, and says so."""
        shop.counted()
        shop.get("/n")
        shop.clock.advance(10_000)
        shop.error = OSError("down")
        old = shop.get("/n")
        assert (old.text, old.status_code) == ("1", 200)
        assert "detail=refresh-failed" in status(old)

    def test_a_503_of_a_view_is_a_failure(self, shop: Shop) -> None:
        """With a copy the copy is served; without one the response."""
        down = [False]

        @shop.app.get("/n")
        @shop.fresh.view("10m", error_for="1d")
        def n() -> Any:
            return ("down for repairs", 503) if down[0] else "up"

        shop.get("/n")
        shop.clock.advance(700)
        down[0] = True
        assert "detail=refresh-failed" in status(shop.get("/n"))
        shop.clock.advance(100_000)
        gone = shop.get("/n")
        assert (gone.status_code, gone.text) == (503, "down for repairs")

    def test_without_a_copy_the_views_exception_is_raised_and_then_503(self, shop: Shop) -> None:
        """And 503 in the cooldown, without a call."""
        shop.counted()
        shop.error = OSError("down")
        with pytest.raises(OSError, match="down") as info:
            shop.get("/n")
        assert info.value is shop.error
        cooling = shop.get("/n")
        assert (cooling.status_code, len(shop.calls)) == (503, 1)
        assert int(cooling.headers["Retry-After"]) >= 1
        shop.clock.advance(2)
        shop.error = None
        assert shop.get("/n").text == "2"

    def test_a_view_works_though_its_store_cannot_be_opened(self, tmp_path: Path) -> None:
        """The view works without the cache."""
        shop = Shop(f"sqlite:///{tmp_path}")
        shop.counted()
        assert [shop.get("/n").text, shop.get("/n").text] == ["1", "2"]
        shop.cache.close()
        assert shop.get("/n").text == "3"
