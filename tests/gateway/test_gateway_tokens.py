"""E37: read your writes through a gateway: entities, live updates, the browser client, pages."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Page as BrowserPage
from starlette.requests import Request

from stillfresh import Cache
from stillfresh.gateway import Gateway
from stillfresh.http.own_writes import COOKIE, FIELD
from stillfresh.integrations.own_writes import ReadYourWrites
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.systems.coordinator import Kind
from tests.gateway.test_client_edges import by_code
from tests.kit.engine import until
from tests.kit.gateway import client_of, running
from tests.kit.live import Upstream, Viewer, viewing
from tests.kit.processes import command
from tests.kit.serve import Proxy, started

pytestmark = pytest.mark.asyncio(loop_scope="session")

NO_ICON = b'<!doctype html><link rel="icon" href="data:,">'
"""Otherwise the browser asks for one, whenever it likes."""
LAG: dict[str, Any] = {"fresh_for": "1h", "memory_for": "10m"}


class World:
    """Two processes that share a store. The second one lags ten minutes behind."""

    def __init__(self, one: Cache, two: Cache) -> None:
        self.upstream = Upstream()
        kinds = [Kind("word", fetch=self.upstream.word, **LAG)]
        self.first = Gateway(one, kinds=kinds)
        self.second = Gateway(two, kinds=kinds, pages=self.page)
        self.html = ""

    async def page(self, scope: Any, receive: Any, send: Any) -> None:
        """A site that has one page, for browsers."""
        del receive
        if scope["type"] == "http":
            headers = [(b"content-type", b"text/html")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self.html.encode()})

    async def saved(self) -> str:
        """Somebody saves in the first process; the second one has the old word in memory."""
        await self.second.hub.get("word", "a")
        self.upstream.version += 1
        return await self.first.hub.resource("word").invalidate("a")


@pytest_asyncio.fixture(loop_scope="session")
async def world(tmp_path: Path) -> AsyncIterator[World]:
    address = f"sqlite:///{tmp_path}/shared.db"
    async with Cache(address) as one, Cache(address) as two:
        world = World(one, two)
        async with world.first, world.second:
            yield world


@asynccontextmanager
async def viewing_in(world: World) -> AsyncIterator[Viewer]:
    """A viewer of the second process."""
    async with running(world.second) as url, viewing(int(url.rpartition(":")[2])) as viewer:
        yield viewer


class TestE37Entities:
    @pytest.mark.parametrize("way", ["field", "cookie"])
    async def test_an_entity_is_no_older_than_the_token(self, world: World, way: str) -> None:
        """Read alone and with others; clients without it get what is in memory."""
        async with client_of(world.second) as client:
            token = await world.saved()
            headers = {FIELD: token} if way == "field" else {"Cookie": f"{COOKIE}={token}"}
            assert (await client.get("/v1/word/a")).json() == "a 1"
            mine = await client.post("/v1/word/batch", json={"ids": ["a"]}, headers=headers)
            assert mine.json()["items"][0]["value"] == "a 2"
            assert FIELD not in mine.headers
            token = await world.saved()
            headers = {FIELD: token} if way == "field" else {"Cookie": f"{COOKIE}={token}"}
            assert (await client.get("/v1/word/a", headers=headers)).json() == "a 3"

    async def test_a_page_of_another_origin_may_send_and_read_the_field(
        self, tmp_path: Path
    ) -> None:
        """As a browser asks for it before."""
        kinds = [Kind("word", fetch=Upstream().word, **LAG)]
        gateway = Gateway(kinds=kinds, origins=["https://a.example"])
        async with gateway, client_of(gateway) as client:
            asking = {
                "Origin": "https://a.example",
                "Access-Control-Request-Method": "GET",
                "Access-Control-Request-Headers": FIELD,
            }
            answer = await client.options("/v1/word/a", headers=asking)
            assert answer.status_code == 200
            answer = await client.get("/v1/word/a", headers={"Origin": "https://a.example"})
            assert FIELD in answer.headers["access-control-expose-headers"]

    async def test_a_purge_gives_a_token_to_the_operators_program(self, tmp_path: Path) -> None:
        """So that it can look whether the page is there."""
        pages = PageCache(f"sqlite:///{tmp_path}/pages.db")
        site = IsrMiddleware(_nothing, pages)
        operator = "operator"
        gateway = Gateway(pages=site, page_cache=pages, token=operator)
        async with gateway, client_of(gateway) as client:
            answer = await client.post(
                "/_stillfresh/api/purge",
                json={"urls": ["/a"]},
                headers={"Authorization": "Bearer operator"},
            )
            assert answer.status_code == 200
            assert answer.headers[FIELD].startswith("1~c.")


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    del scope, receive
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class TestE37Live:
    async def test_a_viewer_that_comes_with_a_token_is_shown_nothing_older(
        self, world: World
    ) -> None:
        """By the cookie of the handshake; another viewer gets what is in memory."""
        async with running(world.second) as url:
            token = await world.saved()
            port = int(url.rpartition(":")[2])
            async with viewing(port) as other:
                await other.watch("a", kind="word")
                assert (await other.hear())["value"] == "a 1"
                cookie = {"Cookie": f"{COOKIE}={token}"}
                async with viewing(port, additional_headers=cookie) as viewer:
                    await viewer.watch("a", kind="word")
                    assert (await viewer.hear())["value"] == "a 2"

    async def test_a_viewer_that_says_its_token_is_shown_what_it_has_changed(
        self, world: World
    ) -> None:
        """What is on screen is read again, and loaded if it must be."""
        async with viewing_in(world) as viewer:
            await viewer.watch("a", kind="word")
            assert (await viewer.hear())["value"] == "a 1"
            token = await world.saved()
            await viewer.nothing()
            await viewer.say("at_least", token=token)
            assert (await viewer.hear())["value"] == "a 2"

    @pytest.mark.parametrize("token", ["1~c.another", "forged", "x" * 1_000])
    async def test_a_token_that_names_no_change_brings_nothing_again(
        self, world: World, token: str
    ) -> None:
        """The store was asked, and has the copy that the viewer has."""
        async with viewing_in(world) as viewer:
            await viewer.watch("a", kind="word")
            assert (await viewer.hear())["value"] == "a 1"
            [session] = world.second.live._sessions
            await viewer.say("at_least", token=token)
            await viewer.nothing()
            reader = session.connection._reader
            if reader is not None:
                await asyncio.wait([reader])
            await viewer.nothing()

    async def test_a_token_counts_for_a_minute(self, world: World) -> None:
        """As the cookie of a browser does."""
        async with viewing_in(world) as viewer:
            for maker in ("one", "two"):
                await viewer.say("at_least", token=f"1~c.{maker}")
            await viewer.nothing()
            [session] = world.second.live._sessions
            both = "1~c.one~c.two"
            assert session.connection.token == both
            now = session._own_until
            session.check(now - 1)
            assert session.connection.token == both
            session.check(now + 1)
            assert not session.connection.token

    @pytest.mark.parametrize("given", ["token", "response"])
    async def test_a_page_hands_its_own_change_to_the_client(
        self, world: World, page: BrowserPage, given: str
    ) -> None:
        """`atLeast` takes the token or the response; also before the connection is there."""
        world.html = '<!doctype html><b data-fresh="word:a"></b>' + by_code()
        async with running(world.second) as url:
            await page.goto(url)
            await page.wait_for_function("document.querySelector('b').textContent === 'a 1'")
            token = await world.saved()
            change = "token" if given == "token" else "new Response('', {headers})"
            await page.evaluate(
                f"token => {{ const headers = {{'{FIELD}': token}}; client.atLeast({change}); }}",
                token,
            )
            await page.wait_for_function("document.querySelector('b').textContent === 'a 2'")
            sent: list[Any] = []

            def note(payload: str | bytes) -> None:
                frame = json.loads(payload)
                sent.extend(frame if isinstance(frame, list) else [frame])

            page.on("websocket", lambda socket: socket.on("framesent", note))
            async with page.expect_websocket():
                for session in world.second.live._sessions:
                    session.end(1012, "")  # type: ignore[arg-type]
            await until(lambda: any(each["type"] == "subscribe" for each in sent))
            assert [each["token"] for each in sent if each["type"] == "at_least"] == [token]
            await page.evaluate("client.close()")


class TestE37WholeWay:
    async def test_a_browser_that_saved_on_one_worker_sees_it_on_the_other_one(
        self, tmp_path: Path, page: BrowserPage
    ) -> None:
        """Through pages and data that both lag ten minutes; everybody else still gets hits."""
        stock = {"tea": 1}
        loads: list[str] = []

        def site_of(cache: Cache) -> Any:
            @cache.cached("left", **LAG)
            async def left(sku: str) -> int:
                loads.append(sku)
                return stock[sku]

            async def app(scope: Any, receive: Any, send: Any) -> None:
                if scope["type"] != "http":
                    return
                while (await receive()).get("more_body"):
                    pass
                headers = [(b"content-type", b"text/html")]
                status = 200
                text = b""
                if scope["method"] == "POST":
                    stock["tea"] += 1
                    await left.of("tea").invalidate()
                    status = 303
                    headers = [(b"location", b"/tea")]
                elif scope["path"] == "/tea":
                    left_now = await left("tea")
                    text = NO_ICON + b"<form method=post><b>%d</b><button>Buy</button></form>" % (
                        left_now
                    )
                start = {"type": "http.response.start", "status": status, "headers": headers}
                await send(start)
                await send({"type": "http.response.body", "body": text})

            return ReadYourWrites(app, caches=[cache])

        data = f"sqlite:///{tmp_path}/data.db"
        stored = f"sqlite:///{tmp_path}/pages.db"
        renders: list[str] = []

        def worker(cache: Cache, pages: PageCache) -> Gateway:
            site = site_of(cache)

            async def noting(scope: Any, receive: Any, send: Any) -> None:
                is_get = scope["type"] == "http" and scope["method"] == "GET"
                if is_get and scope["path"] == "/tea":
                    renders.append(scope["path"])
                await site(scope, receive, send)

            routes = {"/tea": "1h"}
            return Gateway(pages=IsrMiddleware(noting, pages, routes), page_cache=pages)

        async with Cache(data) as one, Cache(data) as two:
            lagging = [PageCache(stored, memory_for="10m") for _ in range(2)]
            first = worker(one, lagging[0])
            second = worker(two, lagging[1])

            async def balancer(scope: Any, receive: Any, send: Any) -> None:
                """Changes go to the first worker, reads to the second one."""
                await (first if scope.get("method") == "POST" else second)(scope, receive, send)

            async with (
                first,
                second,
                client_of(balancer) as stranger,
            ):
                for _ in range(3):
                    assert "<b>1</b>" in (await stranger.get("/tea")).text
                await page.goto(f"{stranger.base_url}/tea")
                assert await page.text_content("b") == "1"
                assert renders == ["/tea"]
                await page.click("button")
                await page.wait_for_function("document.querySelector('b')?.textContent === '2'")
                assert renders == ["/tea"] * 2
                cookies = {each["name"]: each for each in await page.context.cookies()}
                assert cookies[COOKIE]["httpOnly"]
                await page.reload()
                assert await page.text_content("b") == "2"
                hit = await stranger.get("/tea")
                assert "hit" in hit.headers["cache-status"]
                assert renders == ["/tea"] * 2
                assert loads == ["tea", "tea"]

    @pytest.mark.proof
    async def test_a_browser_sees_it_on_another_machine(
        self, tmp_path: Path, page: BrowserPage
    ) -> None:
        """Two sites behind two gateways, each a process of its own whose memory lags a minute."""
        stock = tmp_path / "stock"
        stock.write_text("5")
        options = ["--route", "/tea=1h", "--memory-for", "1m"]
        options += ["--store", f"sqlite:///{tmp_path}/pages.db"]
        data = f"sqlite:///{tmp_path}/data.db"
        with ExitStack() as stack:
            gateways: list[str] = []
            for _ in range(2):
                _, port = started(stack, command("shop_site", data, stock))
                proxy = Proxy(stack, *options, upstream=f"http://127.0.0.1:{port}")
                gateways.append(proxy.url)
            client = httpx.AsyncClient(timeout=60, trust_env=False)

            async def balancer(scope: Any, receive: Any, send: Any) -> None:
                """Changes go to the first machine, reads to the second one."""
                if scope["type"] != "http":
                    return
                machine = gateways[0 if scope["method"] == "POST" else 1]
                request = Request(scope, receive)
                answer = await client.request(
                    request.method,
                    machine + request.url.path,
                    headers=request.headers.raw,
                    content=await request.body(),
                )
                headers = [(name.lower(), value) for name, value in answer.headers.raw]
                start = {"type": "http.response.start", "status": answer.status_code}
                await send({**start, "headers": headers})
                await send({"type": "http.response.body", "body": answer.content})

            async with client, client_of(balancer) as stranger:
                for _ in range(3):
                    assert "<b>5</b>" in (await stranger.get("/tea")).text
                await page.goto(f"{stranger.base_url}/tea")
                await page.click("button")
                await page.wait_for_function("document.querySelector('b')?.textContent === '4'")
                await page.reload()
                assert await page.text_content("b") == "4"
                hit = await stranger.get("/tea")
                assert "hit" in hit.headers["cache-status"]
