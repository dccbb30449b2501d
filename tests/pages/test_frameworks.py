"""I12: the frameworks' own apps behind the cache, unchanged: Starlette, FastAPI, Django."""

import asyncio
from typing import Any

import pytest
from django.conf import settings
from fastapi import BackgroundTasks, FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route as Path

from stillfresh.pages import IsrMiddleware, PageCache
from tests.kit.isr import Visitor
from tests.kit.shop import configure

ROUTES = {"/pricing": "60s", "/stream": "60s", "/broken": "60s"}


class Counter:
    def __init__(self) -> None:
        self.renders = 0

    def page(self) -> str:
        self.renders += 1
        return f"<h1>{self.renders}</h1>" + "x" * 1000


def starlette(count: Counter, pages: PageCache) -> Any:
    async def pricing(_: Request) -> Response:
        return HTMLResponse(count.page())

    async def stream(_: Request) -> Response:
        async def parts() -> Any:
            yield count.page()
            yield "end"

        return StreamingResponse(parts())

    async def broken(_: Request) -> Response:
        raise RuntimeError("bug")

    return Starlette(
        routes=[Path("/pricing", pricing), Path("/stream", stream), Path("/broken", broken)],
        middleware=[
            Middleware(IsrMiddleware, pages=pages, routes=ROUTES),
            Middleware(GZipMiddleware),
        ],
    )


def fastapi(count: Counter, pages: PageCache) -> Any:
    app = FastAPI()

    @app.get("/pricing", response_class=PlainTextResponse)
    async def pricing(tasks: BackgroundTasks) -> str:
        tasks.add_task(asyncio.sleep, 0)
        return count.page()

    app.add_middleware(IsrMiddleware, pages=pages, routes=ROUTES)
    return app


def django_app(count: Counter, pages: PageCache) -> Any:
    from django.core.asgi import get_asgi_application  # noqa: PLC0415 (after settings)
    from django.http import HttpResponse  # noqa: PLC0415
    from django.urls import path  # noqa: PLC0415

    async def pricing(_: Any) -> Any:
        return HttpResponse(count.page())

    urls = type("Urls", (), {"urlpatterns": [path("pricing", pricing)]})
    configure()
    settings.ROOT_URLCONF = urls
    from django.urls import clear_url_caches  # noqa: PLC0415

    clear_url_caches()
    return IsrMiddleware(get_asgi_application(), pages, routes=ROUTES)


@pytest.mark.parametrize("make", [starlette, fastapi, django_app])
class TestI12Frameworks:
    async def test_a_framework_renders_a_cached_page_once(self, make: Any) -> None:
        """Twice asked for, once rendered, the same bytes; revalidated on demand."""
        count = Counter()
        async with PageCache("memory://") as pages:
            visit = Visitor(make(count, pages))
            answers = [await visit() for _ in range(3)]
            assert count.renders == 1
            assert {answer.text for answer in answers} == {answers[0].text}
            assert answers[-1].headers["cache-status"].startswith("stillfresh; hit")
            await pages.purge("/pricing")
            assert (await visit()).text != answers[0].text
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left)  # Django closes a response in a thread, after it was sent

    async def test_a_404_of_the_framework_is_passed_through(self, make: Any) -> None:
        """What no route names passes."""
        async with PageCache("memory://") as pages:
            assert (await Visitor(make(Counter(), pages))("/nowhere")).status_code == 404


class TestI12Starlette:
    async def test_encoded_and_plain_pages_are_cached_side_by_side(self) -> None:
        """One render for each encoding that is asked for."""
        count = Counter()
        async with PageCache("memory://") as pages:
            visit = Visitor(starlette(count, pages))
            for _ in range(2):
                coded = await visit(headers={"accept-encoding": "gzip, deflate, br;q=0"})
                plain = await visit()
                assert coded.headers["content-encoding"] == "gzip"
                assert "content-encoding" not in plain.headers
            assert count.renders == 2

    async def test_a_client_that_accepts_several_encodings_gets_the_one_of_the_app(self) -> None:
        """I13: and never one that it did not offer, whoever came before."""
        async with PageCache("memory://") as pages:
            visit = Visitor(starlette(Counter(), pages))
            for asked, got in (
                ("br, gzip", "gzip"),
                ("br", None),
                ("gzip;q=0, *;q=0.1", None),
                ("gzip, br;q=0.5", "gzip"),
                ("gzip", "gzip"),
                ("", None),
            ):
                page = await visit(headers={"accept-encoding": asked})
                assert page.headers.get("content-encoding") == got

    async def test_a_streamed_page_is_cached_whole(self) -> None:
        """Part by part from the app, at once from the cache."""
        count = Counter()
        async with PageCache("memory://") as pages:
            visit = Visitor(starlette(count, pages))
            texts = {(await visit("/stream")).text for _ in range(2)}
            assert texts == {"<h1>1</h1>" + "x" * 1000 + "end"}

    async def test_an_exception_of_a_framework_reaches_the_server(self) -> None:
        """Its error page, never stored; the exception as the server would have seen it."""
        async with PageCache("memory://") as pages:
            visit = Visitor(starlette(Counter(), pages))
            with pytest.raises(RuntimeError, match="bug"):
                await visit("/broken")
