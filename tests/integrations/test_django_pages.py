"""Pages in Django: E2 and E5 for views, and invalidation by model (E6, E8)."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stillfresh import ConfigError, StoreError
from stillfresh.testing import ManualClock
from tests.integrations.test_django_cache import THREADS, together
from tests.kit import shop
from tests.kit.servers.valkey import Server, binary_of, serving
from tests.kit.sync import until

shop.configure()

from django.contrib.messages import add_message, get_messages  # noqa: E402 (after settings)
from django.contrib.messages.middleware import MessageMiddleware  # noqa: E402
from django.contrib.sessions.middleware import SessionMiddleware  # noqa: E402
from django.core.management import CommandError, call_command  # noqa: E402 (after settings)
from django.db import connections, transaction  # noqa: E402
from django.db.models.signals import m2m_changed, post_delete, post_save  # noqa: E402
from django.http import HttpResponse  # noqa: E402
from django.middleware.csrf import CsrfViewMiddleware, get_token  # noqa: E402
from django.template import engines  # noqa: E402
from django.template.response import TemplateResponse  # noqa: E402
from django.test import RequestFactory, override_settings  # noqa: E402
from django.utils import translation  # noqa: E402
from django.utils.cache import patch_vary_headers  # noqa: E402

from stillfresh.integrations.django import (  # noqa: E402
    PageMiddleware,
    cache_page,
    invalidate,
    invalidate_on_change,
    tag_of,
)
from tests.kit.shop.models import Book, Label, Product, ProductInAdmin  # noqa: E402

REQUESTS = RequestFactory()
SIGNALS = (post_save, post_delete, m2m_changed)
LOCMEM = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


@pytest.fixture(scope="module", autouse=True)
def _shop() -> None:
    """Whichever test comes first has its tables."""
    shop.tables()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        server: Server = request.getfixturevalue("valkey")
        return server.url()
    return f"sqlite:///{tmp_path}/cache.db"


@pytest.fixture(autouse=True)
def cache(url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with shop.cache_on(url, clock, monkeypatch) as cache:
        yield cache


class Shop:
    """A view: counts its renders, and answers as it is told to."""

    def __init__(self) -> None:
        self.renders: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.answer: Callable[[Any], HttpResponse] | None = None

    def __call__(self, request: Any, **_: Any) -> HttpResponse:
        self.renders.append(f"{threading.current_thread().name} {translation.get_language()}")
        number = len(self.renders)
        self.gate.wait(30)
        return self.answer(request) if self.answer else HttpResponse(f"page {number}")


@pytest.fixture
def view() -> Shop:
    return Shop()


@pytest.fixture
def page(view: Shop) -> Callable[..., Any]:
    return cache_page(10, stale_for=60, error_for=600)(view)


def site(view: Callable[[Any], HttpResponse]) -> Any:
    """With the middlewares that most sites have."""
    return SessionMiddleware(CsrfViewMiddleware(MessageMiddleware(view)))


def text(response: HttpResponse) -> str:
    return str(response.content.decode())


class TestE2Pages:
    def test_a_cached_view_is_rendered_once(self, page: Any, view: Shop) -> None:
        """Then it is served as it was, and says how old it is."""
        answers = [page(REQUESTS.get("/")) for _ in range(3)]
        assert [text(it) for it in answers] == ["page 1"] * 3
        assert ["Age" in it for it in answers] == [False, True, True]
        assert answers[0]["Cache-Control"] == "max-age=10"
        assert text(page(REQUESTS.get("/?page=2"))) == "page 2"

    def test_a_cached_view_says_in_cache_status_what_the_cache_did(
        self, page: Any, view: Shop, clock: ManualClock
    ) -> None:
        """I14: RFC 9211, with the time that is left; not stored with the page."""
        status = [page(REQUESTS.get("/"))["Cache-Status"] for _ in range(3)]
        assert (
            status
            == ["stillfresh; fwd=miss; stored"] + ["stillfresh; hit; ttl=10; detail=fresh"] * 2
        )
        clock.advance(4)
        assert page(REQUESTS.get("/"))["Cache-Status"] == "stillfresh; hit; ttl=6; detail=fresh"
        assert page(REQUESTS.head("/"))["Cache-Status"] == "stillfresh; hit"
        assert page(REQUESTS.post("/"))["Cache-Status"] == "stillfresh; fwd=method"
        clock.advance(10)
        view.gate.clear()
        stale = page(REQUESTS.get("/"))["Cache-Status"]
        view.gate.set()
        assert stale == "stillfresh; hit; ttl=-4; detail=stale"
        until(lambda: text(page(REQUESTS.get("/"))) != "page 1")

    def test_a_view_that_may_not_be_cached_says_that_it_is_not_stored(self, cache: Any) -> None:
        """I14: behind what another cache has said of it."""

        @cache_page(10)
        def answer(_: Any) -> HttpResponse:
            fields = {"Cache-Control": "private", "Cache-Status": "origin; hit"}
            return HttpResponse("for you", headers=fields)

        for _ in range(2):
            status = answer(REQUESTS.get("/private"))["Cache-Status"]
            assert status == "origin; hit, stillfresh; fwd=miss"

    def test_a_stale_view_is_served_and_rendered_in_the_background(
        self, page: Any, view: Shop, clock: ManualClock
    ) -> None:
        """Callers are answered at once; it is rendered once, in the language of the request."""
        with translation.override("de"):
            page(REQUESTS.get("/"))
            clock.advance(11)
            view.gate.clear()
            assert [text(page(REQUESTS.get("/"))) for _ in range(3)] == ["page 1"] * 3
            view.gate.set()
            until(lambda: text(page(REQUESTS.get("/"))) == "page 2")
        assert len(view.renders) == 2
        assert view.renders[1].startswith("stillfresh-")
        assert view.renders[1].endswith(" de")

    def test_concurrent_requests_of_a_view_are_one_render(self, page: Any, view: Shop) -> None:
        """Also of a page that nobody has asked for before."""
        view.gate.clear()
        timer = threading.Timer(0.2, view.gate.set)
        timer.start()
        answers = together(lambda _: page(REQUESTS.get("/")))
        timer.join()
        assert ([text(it) for it in answers], len(view.renders)) == (["page 1"] * THREADS, 1)

    def test_a_failing_view_is_served_from_the_old_page(
        self, page: Any, view: Shop, clock: ManualClock
    ) -> None:
        """By an exception or a 5xx answer; when the page is gone the caller is told."""
        page(REQUESTS.get("/"))
        clock.advance(100)
        view.answer = lambda _: HttpResponse("down", status=503)
        assert text(page(REQUESTS.get("/"))) == "page 1"
        clock.advance(1000)
        assert page(REQUESTS.get("/")).status_code == 503
        view.answer = lambda request: HttpResponse(request.GET["missing"])
        for _ in range(2):
            with pytest.raises(KeyError):
                page(REQUESTS.get("/other"))

    @pytest.mark.parametrize(
        "field", [("Cache-Control", "private"), ("Vary", "*"), ("Set-Cookie", "")]
    )
    def test_personal_responses_of_a_view_are_not_cached(
        self, page: Any, view: Shop, field: tuple[str, str]
    ) -> None:
        """By Django's rules; each of many callers gets the answer to its own request."""

        def answer(request: Any) -> HttpResponse:
            response = HttpResponse(f"for {request.GET['who']}")
            if field[0] == "Set-Cookie":
                response.set_cookie("id", request.GET["who"])
                patch_vary_headers(response, ["Cookie"])
            else:
                response[field[0]] = field[1]
            return response

        view.answer = answer
        answers = together(lambda number: page(REQUESTS.get("/", {"who": number})))
        answers += [page(REQUESTS.get("/", {"who": 0}))]
        assert [text(it) for it in answers] == [f"for {it}" for it in [*range(THREADS), 0]]
        assert len(view.renders) == THREADS + 1

    def test_a_cached_view_varies_by_headers_and_language(self, page: Any, view: Shop) -> None:
        """On the headers that the view names, and on the language."""
        view.answer = lambda request: HttpResponse(
            request.headers["X-Kind"], headers={"Vary": "X-Kind"}
        )
        kinds = ["a", "b", "a", "b"]
        answers = [page(REQUESTS.get("/", headers={"X-Kind": it})) for it in kinds]
        assert [text(it) for it in answers] == kinds
        assert len(view.renders) == 2

    def test_a_post_is_not_cached_and_a_head_is_answered_by_get(
        self, page: Any, view: Shop
    ) -> None:
        """A POST is the view's; a HEAD is answered from the page of a GET."""
        page(REQUESTS.post("/"))
        page(REQUESTS.post("/"))
        page(REQUESTS.get("/"))
        assert text(page(REQUESTS.head("/"))) == "page 3"
        assert len(view.renders) == 3

    def test_a_template_response_is_rendered_once(self, view: Shop, page: Any) -> None:
        """With the view, not by the handler of the request."""
        template = engines["django"].from_string("hello")
        view.answer = lambda request: TemplateResponse(request, template)
        assert [text(page(REQUESTS.get("/"))) for _ in range(2)] == ["hello"] * 2
        assert len(view.renders) == 1

    async def test_an_async_view_is_cached(self, view: Shop) -> None:
        """Awaited on its own loop."""

        @cache_page(10)
        async def page(request: Any) -> HttpResponse:
            return view(request)

        assert [text(await page(REQUESTS.get("/"))) for _ in range(2)] == ["page 1"] * 2

    def test_the_middleware_caches_a_whole_site(self, view: Shop) -> None:
        """By a middleware, for CACHE_MIDDLEWARE_SECONDS."""
        site = PageMiddleware(view)
        assert [text(site(REQUESTS.get("/"))) for _ in range(2)] == ["page 1"] * 2
        assert text(site(REQUESTS.get("/two"))) == "page 2"

    @pytest.mark.parametrize("kind", ["session", "new in session", "token", "message"])
    @pytest.mark.parametrize("is_template", [False, True])
    def test_a_page_with_session_token_or_messages_is_not_shared(
        self, page: Any, view: Shop, kind: str, *, is_template: bool
    ) -> None:
        """Though the middlewares that would say `Vary: Cookie` stand outside of `cache_page`."""

        def made(request: Any) -> str:
            if kind == "token":
                return str(get_token(request))
            if kind == "message":
                return ", ".join(str(it) for it in get_messages(request))
            if kind == "new in session":
                request.session["seen"] = request.GET
            return f"for {request.session.get('user')}"

        def answer(request: Any) -> HttpResponse:
            if is_template:
                template = engines["django"].from_string("{{ made }}")
                return TemplateResponse(request, template, {"made": lambda: made(request)})
            return HttpResponse(made(request))

        def sign_in(request: Any) -> HttpResponse:
            request.session["user"] = request.GET["who"]
            add_message(request, 20, f"hello {request.GET['who']}")
            return HttpResponse()

        view.answer = answer
        engine = "django.contrib.sessions.backends.signed_cookies"
        seen: list[str] = []
        with override_settings(SESSION_ENGINE=engine):
            for who in ("ann", "bob", ""):
                cookies = site(sign_in)(REQUESTS.get("/in", {"who": who})).cookies if who else {}
                sent = "; ".join(f"{name}={it.coded_value}" for name, it in cookies.items())
                seen.append(text(site(page)(REQUESTS.get("/", headers={"Cookie": sent}))))
        assert len(set(seen)) == 3, seen

    def test_cache_page_refuses_another_cache_backend(self, page: Any) -> None:
        """It could not serve what is stale."""
        with (
            override_settings(CACHES=LOCMEM),
            pytest.raises(ConfigError, match="not LocMemCache"),
        ):
            page(REQUESTS.get("/"))


class TestS5StoreAway:
    @pytest.fixture
    def url(self, tmp_path: Path) -> Iterator[str]:
        """A server that has just stopped."""
        binary = binary_of("valkey")
        assert binary is not None
        with serving(binary, tmp_path) as self.server:
            yield self.server.url(timeout="200ms")

    def test_during_an_outage_pages_are_rendered_and_writes_raise(
        self, cache: Any, page: Any, view: Shop
    ) -> None:
        """What changes something says that it could not."""
        assert text(page(REQUESTS.get("/"))) == "page 1"
        self.server.stop()
        assert text(page(REQUESTS.get("/new"))) == "page 2"
        assert [cache.get_or_set("a", lambda: 1), cache.get("b", "none")] == [1, "none"]
        for change in (cache.set, cache.add):
            with pytest.raises(StoreError):
                change("a", 1)

    def test_an_outage_costs_two_renders_of_a_view_not_one_per_request(
        self, page: Any, view: Shop, clock: ManualClock
    ) -> None:
        """E29: one for what the address varies by, one for the page, each for its own time."""
        self.server.stop()
        for _ in range(9):
            page(REQUESTS.get("/new"))
            clock.advance(1)
        assert len(view.renders) == 2

    def test_an_unverified_view_has_no_lifetime_for_browsers(
        self, page: Any, clock: ManualClock
    ) -> None:
        """E29: neither a browser nor a cache in between keeps it."""
        first = page(REQUESTS.get("/"))
        assert (first["Cache-Control"], "Expires" in first) == ("max-age=10", True)
        self.server.stop()
        clock.advance(2)
        second = page(REQUESTS.get("/"))
        assert text(second) == "page 1"
        assert (second["Cache-Control"], "Expires" in second) == ("max-age=0", False)

    def test_during_an_outage_get_or_set_serves_the_older_value(self, cache: Any) -> None:
        """E29: `get` returns only what is certain; `get_or_set` may return an older value."""
        made = [cache.get_or_set("a", lambda number=number: number, 60) for number in range(2)]
        assert (made, cache.get("a")) == ([0, 0], 0)
        self.server.stop()
        assert cache.get("a", "none") == "none"
        assert [cache.get_or_set("a", lambda: 7, 60) for _ in range(3)] == [0, 0, 0]


@pytest.fixture
def product() -> Iterator[Any]:
    shop.tables()
    yield Product.objects.create(name="Lamp")
    connections.close_all()


class TestE8Models:
    @pytest.fixture(autouse=True)
    def _connected(self) -> Iterator[None]:
        """Twice is as once."""
        before = {it: list(it.receivers) for it in SIGNALS}
        invalidate_on_change(Product, Label)
        invalidate_on_change(Product, Label)
        yield
        for signal, receivers in before.items():
            signal.receivers[:] = receivers
            signal.sender_receivers_cache.clear()

    def test_saving_and_deleting_a_model_invalidate_its_tags(
        self, cache: Any, product: Any
    ) -> None:
        """Invalidate what is tagged with the instance, and what is tagged with its model."""
        other = Product.objects.create(name="Desk")
        tags = {"one": tag_of(product), "other": tag_of(other), "all": tag_of(Product)}

        def fill() -> None:
            for key, tag in tags.items():
                cache.set(key, tag, tags=[tag])

        fill()
        product.save()
        assert cache.get_many(tags) == {"other": f"shop.product:{other.pk}"}
        fill()
        product.delete()
        assert list(cache.get_many(tags)) == ["other"]

    def test_model_tags_are_invalidated_after_the_commit(self, cache: Any, product: Any) -> None:
        """Not before: a reader would load the old row again; and not after a rollback."""
        cache.set("all", 1, tags=[tag_of(Product)])
        with transaction.atomic():
            product.save()
            assert cache.get("all") == 1
            transaction.set_rollback(True)
        assert cache.get("all") == 1
        with transaction.atomic():
            product.save()
        assert cache.get("all") is None

    @pytest.mark.parametrize("way", ["add", "remove", "set", "clear", "reverse", "back"])
    def test_a_change_of_a_many_to_many_relation_invalidates_both_sides(
        self, cache: Any, product: Any, way: str
    ) -> None:
        """A change of them invalidates both sides."""
        label = Label.objects.create(name="new")
        if way in {"remove", "clear", "back"}:
            product.labels.add(label)
        cache.set("product", 1, tags=[tag_of(product)])
        cache.set("label", 1, tags=[tag_of(label)])
        cache.set("labels", 1, tags=[tag_of(Label)])
        match way:
            case "reverse":
                label.product_set.add(product)
            case "clear":
                product.labels.clear()
            case "back":
                label.product_set.clear()
            case "set":
                product.labels.set([label])
            case _:
                getattr(product.labels, way)(label)
        assert cache.get_many(["product", "label", "labels"]) == {}

    @pytest.mark.parametrize("model", [ProductInAdmin, Book])
    def test_saving_a_proxy_or_child_model_invalidates_its_base_model(
        self, cache: Any, model: Any
    ) -> None:
        """Django sends their signals under their own names."""
        one = model.objects.create(name="Chair")
        for tag in (tag_of(Product), f"shop.product:{one.pk}", tag_of(one), tag_of(model)):
            cache.set("it", 1, tags=[tag])
            one.save()
            assert cache.get("it") is None, tag

    def test_invalidate_takes_a_model_after_a_bulk_update(self, cache: Any, product: Any) -> None:
        """After what sends no signals."""
        cache.set("all", 1, tags=["shop.product"])
        Product.objects.update(name="Chair")
        assert cache.get("all") == 1
        invalidate(Product)
        assert cache.get("all") is None

    def test_the_tags_of_a_view_may_depend_on_its_arguments(self, product: Any, view: Shop) -> None:
        """`tags` is a function of the request and the view's arguments."""
        page = cache_page(60, tags=lambda _, pk: [f"shop.product:{pk}"])(view)
        pages = [text(page(REQUESTS.get(f"/{pk}"), pk=pk)) for pk in (product.pk, 0)]
        product.save()
        pages += [text(page(REQUESTS.get(f"/{pk}"), pk=pk)) for pk in (product.pk, 0)]
        assert pages == ["page 1", "page 2", "page 3", "page 2"]


class TestG10ManageCommand:
    def test_the_manage_command_inspects_invalidates_evicts_and_clears(
        self, cache: Any, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The commands of `stillfresh`, for the cache of an alias."""
        with override_settings(CACHES={"default": {"BACKEND": shop.BACKEND, "LOCATION": url}}):
            cache.set("price", 1, None, tags=["shop.product"])
            call_command("stillfresh", "inspect", "--limit", "5")
            assert ":1:price" in capsys.readouterr().out
            call_command("stillfresh", "invalidate", "shop.product")
            assert capsys.readouterr().out == "1 entry invalidated\n"
            assert cache.get("price") is None
            call_command("stillfresh", "evict")
            assert "evicted" in capsys.readouterr().out
            cache.set("price", 2)
            call_command("stillfresh", "clear")
            assert cache.get("price") is None

    def test_mistakes_of_the_manage_command_are_named(self, cache: Any) -> None:
        """A cache of another kind, an invalidation of nothing."""
        with pytest.raises(CommandError, match="name the tags"):
            call_command("stillfresh", "invalidate")
        with pytest.raises(CommandError, match="stillfresh --cache ALIAS inspect"):
            call_command("stillfresh", "inspect", "--cache", "default")
        with pytest.raises(CommandError, match="inspect failed"):
            call_command("stillfresh", "inspect", "--limits", "5")
        with pytest.raises(ConfigError, match=r"model.*not 'shop"):
            invalidate_on_change("shop.Product")  # type: ignore[arg-type]
        with override_settings(CACHES=LOCMEM), pytest.raises(CommandError, match="not LocMemCache"):
            call_command("stillfresh", "clear")
