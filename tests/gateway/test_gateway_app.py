"""G1, G7: the gateway as an app: its routes, its life, mounted in others; health and metrics."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import connect

from stillfresh.engine import Cache
from stillfresh.errors import ConfigError, StillfreshError, StoreError
from stillfresh.gateway import Gateway, gateway
from stillfresh.gateway.guard import checked_hosts, is_called_rightly, is_local
from stillfresh.gateway.reloading import Replaceable
from stillfresh.gateway.server.listening import server_config
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.systems.coordinator import Kind
from tests.kit.gateway import client_of, running
from tests.kit.servers.valkey import binary_of, serving

TOKEN = "sesame"  # noqa: S105 (of a test)


async def prices(ids: list[str]) -> dict[str, Any]:
    return {id_: {"id": id_} for id_ in ids}


def a_kind(name: str = "price") -> Kind:
    return Kind(name, fetch=prices, fresh_for="30s")


def asked(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


class Site:
    """An app with a life of its own."""

    def __init__(self) -> None:
        self.lived: list[str] = []
        self.app = Starlette(
            routes=[Route("/{path:path}", self.page, methods=["GET", "POST"])],
            lifespan=self.lifespan,
        )

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[dict[str, str]]:
        self.lived.append("started")
        yield {"told": "by the site"}
        self.lived.append("ended")

    async def page(self, request: Request) -> PlainTextResponse:
        path = request.url.path
        return PlainTextResponse(f"{path} {request.state.told}")


class TestG1Routes:
    async def test_all_other_paths_go_to_the_site(self) -> None:
        """With what it set up at its start; the gateway's own paths are its own."""
        site = Site()
        async with client_of(gateway(kinds=[a_kind()], pages=site.app)) as client:
            page = await client.get("/v2/blog?x=1")
            own = await client.get("/v1/price/a")
            assert site.lived == ["started"]
        assert page.text == "/v2/blog by the site"
        assert own.json() == {"id": "a"}
        assert site.lived == ["started", "ended"]

    async def test_without_kinds_the_path_v1_goes_to_the_site(self) -> None:
        """A site may have an API of its own."""
        async with gateway(pages=Site().app) as app, asked(app) as client:
            answers = [await client.get(path) for path in ("/v1/x", "/openapi.json", "/healthz")]
        assert [it.text[:10] for it in answers[:2]] == ["/v1/x by t", "/openapi.j"]
        assert answers[2].json() == {"status": "alive"}

    async def test_without_a_site_an_unknown_path_is_a_json_404(self) -> None:
        """RFC 9457."""
        async with gateway() as app, asked(app) as client:
            answers = [await client.get(path) for path in ("/nowhere", "/healthz%0A", "/a%0Ab")]
        for answer in answers:
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
            assert answer.headers["content-type"] == "application/problem+json"
        assert answers[2].json()["detail"] == "nothing is at /a\nb"

    @pytest.mark.parametrize(
        ("odd", "status"),
        [
            ({"path": "/nowhere", "query_string": b"\xff"}, 404),
            ({"path": "/v1/price/\ufffd", "raw_path": None}, 422),
        ],
        ids=["query", "no-raw-path"],
    )
    async def test_odd_scopes_of_other_servers_are_answered(
        self, odd: dict[str, Any], status: int
    ) -> None:
        """ASGI allows any bytes as a query, and servers that do not know the raw path."""
        app = gateway(kinds=[a_kind()])

        async def with_odd(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, **odd}, receive, send)

        async with app, asked(with_odd) as client:
            assert (await client.get("/")).status_code == status

    async def test_the_browser_files_are_served_with_type_and_etag(self) -> None:
        """With their type and tag; asked for again they are not sent again."""
        async with gateway() as app, asked(app) as client:
            script, types = await client.get("/stillfresh.js"), await client.get("/stillfresh.d.ts")
            tag = {"if-none-match": script.headers["etag"]}
            again = await client.get("/stillfresh.js", headers=tag)
            wrong = await client.post("/stillfresh.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert types.status_code == 200
        assert (again.status_code, wrong.status_code) == (304, 405)

    async def test_the_dashboard_path_without_slash_redirects(self) -> None:
        """Without the slash one is led to it."""
        async with client_of(gateway()) as client:
            answer = await client.get("/_stillfresh")
            page = await client.get("/_stillfresh/")
        assert (answer.status_code, answer.headers["location"]) == (308, "/_stillfresh/")
        assert "text/html" in page.headers["content-type"]

    async def test_a_websocket_on_another_path_is_refused(self) -> None:
        """Only `/v1/live` is one."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async with gateway() as app:
            await app({"type": "websocket", "path": "/else", "headers": []}, receive, send)
        assert [it["type"] for it in sent] == ["websocket.close"]


PRIVATE = ["/v1/price/a", "/metrics"]


class TestG1Names:
    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:8", "a.b", "x.c.d:1"])
    async def test_requests_with_the_gateways_own_host_names_are_answered(self, host: str) -> None:
        """Loopback's, and those that it was told."""
        app = gateway(kinds=[a_kind()], hosts=["a.b", "*.c.d"])
        async with client_of(app, headers={"host": host}) as client:
            for path in PRIVATE:
                assert (await client.get(path)).status_code == 200

    @pytest.mark.parametrize("host", ["evil.com", "evil.com@localhost", "", "c.d", "localhost.a"])
    async def test_requests_from_this_machine_with_other_host_names_are_refused(
        self, host: str
    ) -> None:
        """Any name can be made to lead a browser to 127.0.0.1, and its page reads along."""
        app = gateway(kinds=[a_kind()], hosts=["a.b", "*.c.d"])
        async with running(app) as url:
            port = int(url.rpartition(":")[2])
            for path in PRIVATE:
                assert b" 421 " in await raw(port, path, f"Host: {host}")
            assert b" 200 " in await raw(port, "/healthz", f"Host: {host}")
            socket_ = await raw(port, "/v1/live", f"Host: {host}", *UPGRADE)
        assert b" 403 " in socket_

    @pytest.mark.parametrize(
        ("host", "is_right"),
        [
            (b"[fe80::1]", True),
            (b"[fe80::1]:8000", True),
            (b"[fe80::1:8]", False),
            (b"[fe80::1:8]:8000", False),
        ],
    )
    def test_an_ipv6_host_is_compared_whole(self, host: bytes, *, is_right: bool) -> None:
        """Its end is not a port."""
        scope: Scope = {"client": ("127.0.0.1", 1), "headers": [(b"host", host)]}
        hosts = checked_hosts(["[fe80::1]"])
        assert hosts is not None
        assert is_called_rightly(scope, hosts) is is_right

    async def test_a_request_with_two_host_fields_is_refused(self) -> None:
        """Which one is meant, nobody can tell."""
        scope: Scope = {"client": ("127.0.0.1", 1), "headers": [(b"host", b"localhost")] * 2}
        assert not is_called_rightly(scope, ())
        assert not is_local(scope)

    async def test_any_host_name_is_accepted_from_elsewhere_and_when_mounted(self) -> None:
        """Who comes over the network knows the address; a mounted gateway has its app's names."""
        evil = [(b"host", b"evil.com")]
        assert is_called_rightly({"client": ("192.0.2.7", 1), "headers": evil}, ())
        async with client_of(gateway(kinds=[a_kind()]), headers={"host": "any"}) as client:
            assert (await client.get("/v1/price/a")).status_code == 200

    @pytest.mark.parametrize(
        "field",
        [
            b"x-forwarded-for",
            b"x-forwarded-proto",
            b"cf-connecting-ip",
            b"true-client-ip",
            b"x-real-ip",
            b"forwarded",
            b"via",
            b"x-scheme",
            b"x-url-scheme",
            b"x-envoy-original-path",
            b"x-original-url",
            b"x-matched-path",
            b"x-invoke-path",
        ],
    )
    async def test_a_forwarded_request_is_not_local(self, field: bytes) -> None:
        """Also where the proxy says nothing more."""
        headers = [(b"host", b"localhost")]
        assert is_local({"client": ("127.0.0.1", 1), "headers": headers})
        assert not is_local({"client": ("127.0.0.1", 1), "headers": [*headers, (field, b"")]})


UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


async def raw(port: int, path: str, *fields: str) -> bytes:
    """The answer's first line, to fields that no client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write("\r\n".join([f"GET {path} HTTP/1.1", *fields, "", ""]).encode())
        return await asyncio.wait_for(reader.readline(), 30)
    finally:
        writer.close()
        await writer.wait_closed()


class TestG1Mounted:
    @pytest.mark.parametrize("outer", ["starlette", "fastapi"])
    async def test_a_gateway_mounted_under_a_prefix_knows_it(self, outer: str) -> None:
        """Opened by hand, by the app around it; paths and links know the prefix."""
        fresh = gateway(kinds=[a_kind()], token=TOKEN)

        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            async with fresh:
                yield

        app: Starlette = Starlette(lifespan=lifespan, routes=[Mount("/fresh", fresh)])
        if outer == "fastapi":
            app = FastAPI(lifespan=lifespan)
            app.mount("/fresh", fresh)
        async with client_of(app) as client:
            answer = await client.get("/fresh/v1/price/a%2Fb")
            described = await client.get("/fresh/openapi.json")
            dashboard = await client.get("/fresh/_stillfresh")
            script = await client.get("/fresh/stillfresh.js")
            nothing = await client.get("/fresh/v2")
            outside = await client.get("/v1/price/a")
        assert answer.json() == {"id": "a/b"}
        assert described.json()["servers"] == [{"url": "/fresh"}]
        assert dashboard.headers["location"] == "/fresh/_stillfresh/"
        assert (script.status_code, nothing.status_code) == (200, 404)
        assert outside.status_code == 404
        assert "problem" not in outside.headers["content-type"]

    @pytest.mark.parametrize(
        ("root", "prefix"), [("/fresh", ""), ("/fresh/", "/fresh"), ("/fresh", "/fresh"), ("/", "")]
    )
    async def test_a_gateway_behind_a_proxy_with_a_prefix_knows_it(
        self, root: str, prefix: str
    ) -> None:
        """Whether the proxy leaves the prefix on the path or not, and with a slash at its end."""
        app = gateway(kinds=[a_kind()])
        paths = ("/v1/price/a", "/healthz", "/_stillfresh/dashboard.css", "/_stillfresh/api/stats")
        over = httpx.ASGITransport(app=app, root_path=root)
        async with app, httpx.AsyncClient(transport=over, base_url="http://localhost") as client:
            answers = [await client.get(f"{prefix}{path}") for path in paths]
            moved = await client.get(f"{prefix}/_stillfresh")
        assert [answer.status_code for answer in answers] == [200] * 4
        assert moved.headers["location"] == f"{root.rstrip('/')}/_stillfresh/"

    async def test_a_gateway_without_a_lifespan_opens_with_its_first_read(self) -> None:
        """For who has no lifespan at all; closing is still theirs."""
        app = gateway(kinds=[a_kind()])
        async with asked(app) as client:
            answer = await client.get("/v1/price/a")
        assert answer.json() == {"id": "a"}
        await app.close()


class TestG1Life:
    async def test_a_gateway_can_be_opened_and_closed_twice(self) -> None:
        """By hand and by lifespan; it can be opened again."""
        site = Site()
        app = gateway(kinds=[a_kind()], pages=site.app)
        async with app, client_of(app) as client:
            assert (await client.get("/v1/price/a")).status_code == 200
        async with app, asked(app) as client:
            assert (await client.get("/v1/price/a")).status_code == 200
        assert site.lived == ["started", "ended"] * 2

    async def test_closing_a_gateway_leaves_a_given_cache_open(self) -> None:
        """It is its maker's to close."""
        async with Cache("memory://") as cache:
            async with gateway(cache, kinds=[a_kind()]) as app:
                assert app.cache is cache
            assert not cache.is_closed

    async def test_a_gateway_whose_store_cannot_be_opened_is_not_ready(
        self, tmp_path: Path
    ) -> None:
        """By hand it is an error; by lifespan the gateway starts, and is not ready."""
        url = f"sqlite:///{tmp_path}/none/x.db"
        with pytest.raises(StoreError):
            async with gateway(url):
                pass
        async with client_of(gateway(url, kinds=[a_kind()])) as client:
            ready = await client.get("/readyz")
            (tmp_path / "none").mkdir()
            later = await client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json() == {"status": "not ready", "stores": {"entities": "unreachable"}}
        assert later.json() == {"status": "ready", "stores": {"entities": "reachable"}}

    async def test_a_site_that_does_not_start_raises_its_message(self) -> None:
        """And what was opened is closed."""

        async def broken(scope: Scope, receive: Receive, send: Send) -> None:
            del scope
            await receive()
            await send({"type": "lifespan.startup.failed", "message": "no database"})

        with pytest.raises(StillfreshError, match="no database"):
            async with gateway(pages=broken):
                pass
        assert len(asyncio.all_tasks()) == 1

    async def test_a_site_that_does_not_start_fails_the_gateways_start(self) -> None:
        """With its own message, as servers are told it."""

        async def broken(scope: Scope, receive: Receive, send: Send) -> None:
            del scope
            await receive()
            await send({"type": "lifespan.startup.failed", "message": "no database"})
            raise RuntimeError

        said: list[Any] = []

        async def told() -> dict[str, str]:
            return {"type": "lifespan.startup"}

        async def say(message: Any) -> None:
            said.append(message)

        await gateway(pages=broken)({"type": "lifespan"}, told, say)
        assert [it["type"] for it in said] == ["lifespan.startup.failed"]
        assert "no database" in said[0]["message"]
        assert len(asyncio.all_tasks()) == 1

    @pytest.mark.parametrize(
        ("says_so", "level"), [(False, "WARNING"), (True, "ERROR")], ids=["before", "after"]
    )
    async def test_a_site_that_breaks_in_its_lifespan_is_logged(
        self, caplog: pytest.LogCaptureFixture, *, says_so: bool, level: str
    ) -> None:
        """Before it said that it started, it is one that knows no lifespan."""
        ended = asyncio.Event()

        async def broken(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await receive()
                try:
                    if says_so:
                        await send({"type": "lifespan.startup.complete"})
                        await receive()
                    raise RuntimeError("boom")
                finally:
                    ended.set()
            await PlainTextResponse("here")(scope, receive, send)

        async with gateway(pages=broken) as app, asked(app) as client:
            assert (await client.get("/")).text == "here"
        await ended.wait()
        assert [it.levelname for it in caplog.records] == [level]
        assert "boom" in caplog.text

    async def test_the_history_begins_though_the_store_is_away(self, tmp_path: Path) -> None:
        """It is there when the store comes back."""
        app = gateway(f"sqlite:///{tmp_path}/none/x.db", kinds=[a_kind()])
        async with client_of(app) as client:
            (tmp_path / "none").mkdir()
            assert (await client.get("/v1/price/a")).status_code == 200
            history = (await client.get("/_stillfresh/api/history")).json()
        assert len(history) >= 1

    async def test_a_site_without_a_lifespan_is_served(self) -> None:
        """Lives without one."""

        async def simple(scope: Scope, receive: Receive, send: Send) -> None:
            del receive
            assert scope["type"] == "http"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"simple"})

        async with client_of(gateway(pages=simple)) as client:
            assert (await client.get("/")).text == "simple"

    async def test_a_closed_gateway_leaves_no_task(self) -> None:
        """After it is closed."""
        async with gateway(kinds=[a_kind()], pages=Site().app) as app, asked(app) as client:
            await client.get("/v1/price/a")
        assert len(asyncio.all_tasks()) == 1

    async def test_a_running_request_gets_503_when_the_server_ends(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """503 once the server's time is over, and no traceback."""
        begun = asyncio.Event()

        async def never(ids: list[str]) -> dict[str, Any]:
            begun.set()
            await asyncio.Event().wait()
            return dict.fromkeys(ids)

        app = gateway(kinds=[Kind("slow", fetch=never, fresh_for=1)])
        config = server_config(app)
        config.timeout_graceful_shutdown = 0
        async with httpx.AsyncClient(trust_env=False) as client:
            async with running(app, config) as url:
                asking = asyncio.create_task(client.get(f"{url}/v1/slow/a"))
                await begun.wait()
            answer = await asking
        assert (answer.status_code, answer.json()["code"]) == (503, "ending")
        assert not [it for it in caplog.records if it.exc_info]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"origins": "https://x"}, "origins: takes a list"),
            ({"origins": ["*"]}, "origins: write"),
            ({"origins": ["https://x/"]}, "origins: write"),
            ({"token": ""}, "token: must be"),
            ({"token": "a b"}, "token: must be"),
            ({"token": 1}, "token: must be"),
            ({"max_connections": 0}, "max_connections"),
            ({"kinds": [1]}, "kinds: takes a list"),
            ({"kinds": [a_kind(), a_kind()]}, "two are named 'price'"),
            ({"store": "ftp://x"}, "not a store's address"),
            ({"kinds": [a_kind("page")], "page_cache": PageCache("memory://")}, "kind 'page'"),
        ],
    )
    def test_a_bad_option_of_the_gateway_is_named(self, options: dict[str, Any], said: str) -> None:
        """Before anything runs."""
        with pytest.raises(ConfigError, match=said):
            gateway(**options)


def numbers(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


class TestG7Metrics:
    async def test_metrics_cover_entities_pages_and_viewers(self) -> None:
        """Prometheus' text; each name described once."""
        async with PageCache("memory://") as pages:
            site = IsrMiddleware(Site().app, pages, {"*": "1m"})
            app = gateway(kinds=[a_kind()], pages=site, page_cache=pages)
            async with client_of(app) as client:
                await client.get("/v1/price/a")
                await client.get("/v1/price/a")
                await client.get("/blog")
                answer = await client.get("/metrics")
        found = numbers(answer.text)
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert found['stillfresh_loads_total{resource="price"}'] == 1
        assert found['stillfresh_loads_total{resource="page"}'] == 1
        reads = 'stillfresh_reads_total{{resource="price",origin="{}",verdict="fresh"}}'
        assert found[reads.format("loaded")] == found[reads.format("memory")] == 1
        assert found["stillfresh_connections"] == 0
        assert found['stillfresh_subscriptions{resource="price"}'] == 0
        described = [line for line in answer.text.splitlines() if line.startswith("# TYPE")]
        assert len(described) == len(set(described))

    async def test_uncached_requests_are_counted_by_reason(self) -> None:
        """I28: a page that states no freshness, twice."""
        async with PageCache("memory://") as pages:
            app = gateway(pages=IsrMiddleware(Site().app, pages), page_cache=pages)
            async with client_of(app) as client:
                for _ in range(2):
                    await client.get("/blog")
                found = numbers((await client.get("/metrics")).text)
        assert found['stillfresh_bypassed_total{reason="no-freshness"}'] == 2

    async def test_metrics_count_connections_and_subscriptions(self) -> None:
        """Connections, and what they look at, by kind."""
        asked_for = '{"type": "subscribe", "items": [["price", "a"], ["price", "b"]]}'
        async with (
            running(gateway(kinds=[a_kind()])) as url,
            connect(f"{url.replace('http', 'ws')}/v1/live", proxy=None) as viewer,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            await viewer.send(asked_for)
            while "update" not in str(await viewer.recv()):
                pass
            found = numbers((await client.get("/metrics")).text)
        assert found["stillfresh_connections"] == 1
        assert found['stillfresh_subscriptions{resource="price"}'] == 2

    async def test_metrics_need_the_token_if_there_is_one(self) -> None:
        """401 for everybody else."""
        async with gateway(token=TOKEN) as app, asked(app) as client:
            answers = [
                await client.get("/metrics", headers={"authorization": sent})
                for sent in ("", "Bearer open", "Bearer sesame")
            ]
        assert [it.status_code for it in answers] == [401, 401, 200]


class TestG7Health:
    async def test_health_and_readiness_name_each_store(self) -> None:
        """Of each store."""
        app = gateway(page_cache=PageCache("memory://"))
        async with app, asked(app) as client:
            alive, ready = await client.get("/healthz"), await client.get("/readyz")
            head = await client.head("/healthz")
        assert alive.json() == {"status": "alive"}
        stores = {"entities": "reachable", "pages": "reachable"}
        assert ready.json() == {"status": "ready", "stores": stores}
        assert (head.status_code, head.content) == (200, b"")
        assert alive.headers["cache-control"] == "no-store"

    async def test_readyz_is_503_while_the_store_is_unreachable(self, tmp_path: Path) -> None:
        """A real server, stopped; alive all the same."""
        binary = binary_of("valkey")
        assert binary is not None
        with serving(binary, tmp_path) as server:
            app = gateway(server.url(), kinds=[a_kind()])
            async with app, asked(app) as client:
                before = await client.get("/readyz")
                server.stop()
                after = await client.get("/readyz")
                alive = await client.get("/healthz")
        assert [it.status_code for it in (before, after, alive)] == [200, 503, 200]

    async def test_readyz_does_not_wait_for_a_silent_store(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has a time to answer."""
        monkeypatch.setattr("stillfresh.gateway.numbers.READY_WITHIN", 0.05)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            app: Gateway = gateway(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
            async with asked(app) as client:
                answer = await client.get("/readyz")
            closing = asyncio.create_task(app.close())
            silent.close()
            await closing
        assert answer.status_code == 503


class TestG17Replacing:
    async def test_kept_answers_are_dropped_before_the_old_gateway_has_ended(self) -> None:
        """It may end much later: a request is still under way there."""
        is_asked = asyncio.Event()
        is_released = asyncio.Event()
        dropped: list[str] = []

        async def site(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                is_asked.set()
                await is_released.wait()
                await PlainTextResponse("old")(scope, receive, send)

        old = Gateway(pages=site)
        new = Gateway(pages=site)
        async with old, new:
            app = Replaceable(old)
            slow = asyncio.ensure_future(asked(app).get("/slow"))
            await is_asked.wait()
            replacing = asyncio.ensure_future(app.replace(new, lambda: dropped.append("all")))
            while app.app is old:
                await asyncio.sleep(0)
            assert dropped == ["all"]
            assert not replacing.done()
            is_released.set()
            assert (await slow).text == "old"
            await replacing
