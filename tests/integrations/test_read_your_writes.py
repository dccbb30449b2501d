"""E37: read your writes in FastAPI, Flask and Django, on two workers that share a store."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from flask import Flask, Response
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import Cache, ConfigError, SyncCache, merge_tokens
from stillfresh.http.own_writes import COOKIE, FIELD, token_in, token_of
from stillfresh.integrations.own_writes import ReadYourWrites, WsgiReadYourWrites
from stillfresh.integrations.tagged_values import BlockingCache
from tests.kit import shop

shop.configure()

from django.core.cache import caches  # noqa: E402
from django.http import (  # noqa: E402 (after settings)
    HttpRequest,
    HttpResponse,
    StreamingHttpResponse,
)
from django.test import AsyncRequestFactory, RequestFactory, override_settings  # noqa: E402

from stillfresh.integrations.django import ReadYourWritesMiddleware  # noqa: E402

LAGGING: dict[str, Any] = {"fresh_for": "1h", "memory_for": "10m"}


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A store that tells other workers nothing, so that their memory really lags."""
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
def stock() -> dict[str, int]:
    """The database of the shop."""
    return {"tea": 1}


def fastapi_worker(cache: Cache, stock: dict[str, int]) -> FastAPI:
    """One worker: its own cache object, with a memory that may lag ten minutes."""
    app = FastAPI()
    app.add_middleware(ReadYourWrites, caches=[cache])

    @cache.cached("left", **LAGGING)
    async def left(sku: str) -> int:
        return stock[sku]

    @app.get("/{sku}")
    async def show(sku: str) -> int:
        return await left(sku)

    @app.put("/{sku}")
    async def change(sku: str, number: int) -> None:
        stock[sku] = number
        await left.of(sku).invalidate()

    @app.post("/look")
    async def look() -> None:
        """Change nothing."""

    return app


async def ask(app: FastAPI, method: str, path: str, **options: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop") as client:
        return await client.request(method, path, **options)


async def test_a_user_sees_the_change_on_the_next_page_of_another_worker(
    address: str, stock: dict[str, int]
) -> None:
    """By the cookie or by the field; all others still get the copy in its memory (E37)."""
    async with Cache(address) as one, Cache(address) as two:
        first = fastapi_worker(one, stock)
        second = fastapi_worker(two, stock)
        assert (await ask(second, "GET", "/tea")).json() == 1
        saved = await ask(first, "PUT", "/tea?number=2")
        cookie = saved.headers["Set-Cookie"]
        assert "Max-Age=60" in cookie
        assert "HttpOnly" in cookie
        assert "Secure" not in cookie
        assert (await ask(second, "GET", "/tea")).json() == 1
        shown = await ask(second, "GET", "/tea", headers={"Cookie": cookie.partition(";")[0]})
        assert shown.json() == 2
        assert "Set-Cookie" not in shown.headers
        saved = await ask(first, "PUT", "/tea?number=3")
        headers = {FIELD: saved.headers[FIELD]}
        assert (await ask(second, "GET", "/tea", headers=headers)).json() == 3


async def test_two_changes_on_two_workers_are_in_one_token(
    address: str, stock: dict[str, int]
) -> None:
    """(E37)."""
    async with Cache(address) as one, Cache(address) as two:
        saved = await ask(fastapi_worker(one, stock), "PUT", "/tea?number=2")
        headers = {FIELD: saved.headers[FIELD]}
        again = await ask(fastapi_worker(two, stock), "PUT", "/tea?number=3", headers=headers)
        token = again.headers[FIELD]
        assert merge_tokens(token, saved.headers[FIELD]) == token
        assert token != saved.headers[FIELD]


async def test_a_request_that_changes_nothing_gives_no_token(
    address: str, stock: dict[str, int]
) -> None:
    """(E37)."""
    async with Cache(address) as cache:
        app = fastapi_worker(cache, stock)
        for method, path in (("GET", "/tea"), ("HEAD", "/tea"), ("POST", "/look")):
            response = await ask(app, method, path)
            assert not {FIELD, "Set-Cookie"} & {*response.headers}


async def test_the_cookie_is_secure_where_the_page_is(address: str, stock: dict[str, int]) -> None:
    """(E37)."""
    async with Cache(address) as cache:
        app = fastapi_worker(cache, stock)
        saved = await ask(app, "PUT", "https://shop/tea?number=2")
        assert saved.headers["Set-Cookie"].endswith("; Secure")


@pytest.fixture
def workers(address: str) -> Iterator[tuple[SyncCache, SyncCache]]:
    with BlockingCache(address) as one, BlockingCache(address) as two:
        yield one, two


def test_a_flask_app_reads_its_users_writes(
    workers: tuple[SyncCache, SyncCache], stock: dict[str, int]
) -> None:
    """(E37)."""

    def app_of(cache: SyncCache) -> Any:
        app = Flask("shop")

        @cache.cached("left", **LAGGING)
        def left(sku: str) -> int:
            return stock[sku]

        @app.get("/<sku>")
        def show(sku: str) -> str:
            return str(left(sku))

        @app.get("/streamed/<sku>")
        def show_while_sending(sku: str) -> Response:
            return Response(str(left(sku)) for _ in range(2))

        @app.put("/<sku>/<int:number>")
        def change(sku: str, number: int) -> str:
            stock[sku] = number
            left.of(sku).invalidate()
            return "saved"

        app.wsgi_app = WsgiReadYourWrites(  # type: ignore[method-assign]
            app.wsgi_app, caches=[cache]
        )
        return app

    first, second = map(app_of, workers)
    stranger = second.test_client()
    assert stranger.get("/tea").text == "1"
    saved = first.test_client().put("/tea/2")
    assert stranger.get("/tea").text == "1"
    user = second.test_client()
    user.set_cookie(COOKIE, saved.headers[FIELD])
    assert user.get("/tea").text == "2"
    assert stranger.get("/tea", headers={FIELD: saved.headers[FIELD]}).text == "2"
    saved = first.test_client().put("/tea/3")
    assert stranger.get("/streamed/tea").text == "22"
    user.set_cookie(COOKIE, saved.headers[FIELD])
    assert user.get("/streamed/tea").text == "33"


def left_of(cache: SyncCache, stock: dict[str, int]) -> Any:
    @cache.cached("left", **LAGGING)
    def left(sku: str) -> int:
        return stock[sku]

    return left


def test_a_body_that_is_made_while_it_is_sent_is_no_older_than_the_token(
    workers: tuple[SyncCache, SyncCache],
) -> None:
    """The server's own thread reads without the token between the parts (E37)."""
    stock = {"tea": 1, "milk": 1}
    mine, others = (left_of(cache, stock) for cache in workers)
    is_closed = False

    def body() -> Iterator[int]:
        nonlocal is_closed
        try:
            yield others("tea")
            yield others("milk")
        finally:
            is_closed = True

    site: Any = WsgiReadYourWrites(lambda *_: body(), caches=[workers[1]])  # type: ignore[arg-type]
    assert (others("tea"), others("milk")) == (1, 1)
    stock.update(tea=2, milk=2)
    token = merge_tokens(mine.of("tea").invalidate(), mine.of("milk").invalidate())
    environ = {"REQUEST_METHOD": "GET", "HTTP_STILLFRESH_TOKEN": token}
    response = site(environ, lambda *_: None)
    parts = iter(response)
    assert next(parts) == 2
    assert others("milk") == 1
    assert next(parts) == 2
    response.close()
    assert is_closed


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_streamed_response_of_django_is_no_older_than_the_token(
    workers: tuple[SyncCache, SyncCache],
    stock: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_async: bool,
) -> None:
    """(E37)."""
    mine, others = (left_of(cache, stock) for cache in workers)
    monkeypatch.setattr(f"{__name__}.OTHER", workers[1], raising=False)

    def parts() -> Iterator[str]:
        yield str(others("tea"))
        yield " left"

    async def parts_later() -> AsyncIterator[str]:
        for part in parts():
            yield part

    def view(_: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(parts_later() if is_async else parts())

    with override_settings(STILLFRESH_READ_YOUR_WRITES=[f"{__name__}.OTHER"]):
        site: Any = ReadYourWritesMiddleware(view)
    assert others("tea") == 1
    stock["tea"] = 2
    token = mine.of("tea").invalidate()
    response = site(RequestFactory().get("/", headers={FIELD: token}))
    if is_async:
        body = b"".join([part async for part in response.streaming_content])
    else:
        body = b"".join(response.streaming_content)
    assert body == b"2 left"
    assert others("tea") == 2
    response.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_django_site_reads_its_users_writes(
    workers: tuple[SyncCache, SyncCache],
    stock: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_async: bool,
) -> None:
    """(E37)."""

    def site_of(cache: SyncCache) -> Any:
        monkeypatch.setattr(f"{__name__}.OTHER", cache, raising=False)

        @cache.cached("left", **LAGGING)
        def left(sku: str) -> int:
            return stock[sku]

        def view(request: HttpRequest) -> HttpResponse:
            if request.method == "PUT":
                stock["tea"] += 1
                left.of("tea").invalidate()
            return HttpResponse(str(left("tea")))

        async def later(request: HttpRequest) -> HttpResponse:
            return view(request)

        with override_settings(STILLFRESH_READ_YOUR_WRITES=[f"{__name__}.OTHER"]):
            return ReadYourWritesMiddleware(later if is_async else view)

    async def response_of(site: Any, request: HttpRequest) -> HttpResponse:
        response = site(request)
        return await response if is_async else response

    factory: Any = AsyncRequestFactory() if is_async else RequestFactory()
    first, second = map(site_of, workers)
    await response_of(second, factory.get("/"))
    saved = await response_of(first, factory.put("/"))
    token = saved[FIELD]
    assert saved.cookies[COOKIE].value == token
    assert saved.cookies[COOKIE]["max-age"] == "60"
    by_cookie = factory.get("/")
    by_cookie.COOKIES[COOKIE] = token
    stranger = await response_of(second, factory.get("/"))
    user = await response_of(second, by_cookie)
    assert (stranger.content, user.content) == (b"1", b"2")


def test_the_middleware_of_django_covers_the_caches_of_the_site(
    workers: tuple[SyncCache, SyncCache], address: str
) -> None:
    """Of `CACHES`, without a setting (E37)."""
    backend = {"BACKEND": "stillfresh.integrations.django.StillfreshCache", "LOCATION": address}
    lagging = {**backend, "OPTIONS": {"MEMORY_FOR": "10m"}}
    with override_settings(CACHES={"default": lagging}):
        caches["default"].set("tea", 1)
        token = workers[0].invalidate_tag("none").token

        def view(_: HttpRequest) -> HttpResponse:
            assert caches["default"].cache.on_loop.watched_blocks
            return HttpResponse()

        middleware: Any = ReadYourWritesMiddleware(view)
        assert middleware(RequestFactory().get("/", headers={FIELD: token})).status_code == 200


@pytest.mark.parametrize("caches", [None, Cache("memory://"), [object()], "caches"])
def test_what_is_no_list_of_caches_is_refused(caches: Any) -> None:
    """(E37)."""
    with pytest.raises(ConfigError, match="caches: "):
        ReadYourWrites(lambda *_: None, caches)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cookie", "token"),
    [
        ("stillfresh_token=1~c.a", "1~c.a"),
        ("a=b; stillfresh_token=1~c.a", "1~c.a"),
        ("a=b;stillfresh_token=1~c.a;c=d", "1~c.a"),
        ("not_stillfresh_token=1~c.a", ""),
        ("stillfresh_token=", ""),
        ("stillfresh_token=1~c.a; stillfresh_token=1~c.b", "1~c.a~c.b"),
        ("stillfresh_token=x", "1~c.*"),
    ],
)
def test_the_token_is_found_among_cookies(cookie: str, token: str) -> None:
    """(E37)."""
    assert token_of([], [cookie]) == token
    assert token_in(((b"cookie", cookie.encode()),)) == token


@given(st.lists(st.tuples(st.sampled_from([b"cookie", FIELD.lower().encode()]), st.binary())))
def test_no_request_has_a_token_that_cannot_be_read(headers: list[tuple[bytes, bytes]]) -> None:
    """(E37)."""
    token = token_in(tuple(headers))
    assert token.isascii()
    assert merge_tokens(token) == token
