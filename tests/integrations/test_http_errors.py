"""E30 in FastAPI, Flask and Django: HTTP exceptions of functions, and LoadFailed as a 503."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, HTTPException
from flask import Flask, abort

from stillfresh import Cache, LoadFailed, RetryAfter, SyncCache
from stillfresh.integrations import fastapi, flask
from stillfresh.testing import ManualClock
from tests.kit import shop

shop.configure()

from django.core.exceptions import PermissionDenied  # noqa: E402 (after settings)
from django.http import Http404, HttpResponse  # noqa: E402
from django.test import AsyncRequestFactory, RequestFactory  # noqa: E402

from stillfresh.integrations.django import UnavailableMiddleware, cache_page  # noqa: E402

REQUESTS = RequestFactory()


class TestE30InFastAPI:
    @pytest.fixture
    def cache(self) -> Cache:
        return Cache("memory://")

    @pytest.fixture
    def app(self, cache: Cache) -> FastAPI:
        app = FastAPI(lifespan=fastapi.lifespan(cache))
        app.add_exception_handler(LoadFailed, fastapi.unavailable)

        @cache.cached("item", fresh_for=30)
        async def item(number: int) -> int:
            calls.append(number)
            if number == 500:
                raise HTTPException(500, "broken")
            if number == 120:
                raise RetryAfter("2m")
            if number >= 400:
                raise HTTPException(number, "no such item")
            return number

        calls: list[int] = []
        app.state.calls = calls

        @app.get("/items/{number}")
        async def show(number: int) -> int:
            return await item(number)

        return app

    async def ask(self, app: FastAPI, path: str) -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.get(path)

    async def test_an_http_exception_of_a_cached_function_is_the_response(
        self, app: FastAPI, cache: Cache
    ) -> None:
        """Each time, since it is not kept and nothing cools down."""
        async with cache:
            for _ in range(2):
                response = await self.ask(app, "/items/404")
                assert (response.status_code, response.json()) == (
                    404,
                    {"detail": "no such item"},
                )
        assert app.state.calls == [404, 404]

    async def test_one_line_makes_a_failed_load_a_503_with_retry_after(
        self, app: FastAPI, cache: Cache
    ) -> None:
        """Of the load itself, and during its cooldown; as long as the upstream asked."""
        async with cache:
            for path, first in {"/items/500": "5", "/items/120": "120"}.items():
                response = await self.ask(app, path)
                assert (response.status_code, response.headers["Retry-After"]) == (503, first)
                again = await self.ask(app, path)
                assert again.status_code == 503
                assert 1 <= int(again.headers["Retry-After"]) <= int(first)
        assert app.state.calls == [500, 120]


class TestE30InFlask:
    @pytest.fixture
    def cache(self) -> Iterator[SyncCache]:
        with SyncCache("memory://") as cache:
            yield cache

    @pytest.fixture
    def app(self, cache: SyncCache) -> Flask:
        app = Flask("shop")
        flask.Fresh(cache=cache).init_app(app)
        app.register_error_handler(LoadFailed, flask.unavailable)
        calls: list[int] = []
        app.extensions["calls"] = calls

        @cache.cached("item", fresh_for=30)
        def item(number: int) -> int:
            calls.append(number)
            if number >= 400:
                abort(number)
            return number

        @app.get("/items/<int:number>")
        def show(number: int) -> str:
            return str(item(number))

        return app

    def test_an_http_exception_of_a_cached_function_is_the_response(self, app: Flask) -> None:
        client = app.test_client()
        assert [client.get("/items/404").status_code for _ in range(2)] == [404, 404]
        assert app.extensions["calls"] == [404, 404]

    def test_one_line_makes_a_failed_load_a_503_with_retry_after(self, app: Flask) -> None:
        client = app.test_client()
        for pause in ("5", "1"):
            response = client.get("/items/500")
            assert (response.status_code, response.headers["Retry-After"]) == (503, pause)
        assert app.extensions["calls"] == [500]


class TestE30InDjango:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        clock = ManualClock(start=1_700_000_000.0)
        with shop.cache_on(f"sqlite:///{tmp_path}/cache.db", clock, monkeypatch) as cache:
            yield cache

    @pytest.mark.parametrize("error", [Http404("no such item"), PermissionDenied("no")])
    def test_an_http_exception_of_a_cached_page_reaches_django(self, error: Exception) -> None:
        """Each time: nothing cools down, and no other visitor gets an error of the cache."""
        calls: list[Any] = []

        @cache_page(60)
        def page(request: Any) -> HttpResponse:
            calls.append(request)
            raise error

        for _ in range(3):
            with pytest.raises(type(error)) as caught:
                page(REQUESTS.get("/items/7"))
            assert caught.value is error
        assert len(calls) == 3

    def test_one_line_of_middleware_makes_a_failed_load_a_503(self) -> None:
        """Other exceptions are left to Django."""
        middleware = UnavailableMiddleware(lambda _: HttpResponse("page"))
        request = REQUESTS.get("/")
        response = middleware.process_exception(request, LoadFailed("down"))
        assert response is not None
        assert (response.status_code, response["Retry-After"]) == (503, "5")
        assert middleware.process_exception(request, ValueError("x")) is None
        assert middleware(request).content == b"page"

    async def test_the_middleware_works_for_async_views(self) -> None:
        async def view(_: Any) -> HttpResponse:
            return HttpResponse("page")

        middleware: Any = UnavailableMiddleware(view)
        assert (await middleware(AsyncRequestFactory().get("/"))).content == b"page"
