"""I34: the paths of the gateway's own can be moved below a prefix; all others are the site's."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from stillfresh.errors import ConfigError
from stillfresh.gateway import gateway
from stillfresh.gateway.server.listening import server_config
from stillfresh.systems.coordinator import Kind
from tests.gateway.test_gateway_signals import asking, serving
from tests.kit.gateway import client_of, running
from tests.kit.http_site import serving_site
from tests.kit.sync import until

PREFIX = "/_cache"
OURS = (
    "/healthz",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/stillfresh.js",
    "/stillfresh.d.ts",
    "/stillfresh-waiting.js",
    "/stillfresh-waiting.d.ts",
    "/_stillfresh/",
    "/_stillfresh/api/stats",
    "/v1/price/a",
)


async def prices(ids: list[str]) -> dict[str, Any]:
    return {id_: {"id": id_} for id_ in ids}


async def page(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"site {request.scope['raw_path'].decode()}")


SITE = Starlette(routes=[Route("/{path:path}", page, methods=["GET", "POST"])])


def moved(prefix: str = PREFIX, **options: Any) -> Any:
    kinds = [Kind("price", fetch=prices, fresh_for="30s")]
    return gateway(kinds=kinds, pages=SITE, own_prefix=prefix, **options)


async def raw(url: str, target: str) -> bytes:
    """The whole answer to a target that no client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        writer.write(
            f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


class TestI34OwnPrefix:
    @pytest.mark.parametrize("prefix", [PREFIX, "/a/b.c/_~-", "/v1", "/_stillfresh"])
    async def test_own_paths_are_below_the_prefix_and_nowhere_else(self, prefix: str) -> None:
        """Each of them; the same path without the prefix is the site's."""
        async with client_of(moved(prefix)) as client:
            for path in OURS:
                own = await client.get(prefix + path)
                assert own.status_code == 200
                assert not own.text.startswith("site ")
                if not path.startswith(f"{prefix}/"):
                    assert (await client.get(path)).text == f"site {path}"

    async def test_an_unknown_path_below_the_prefix_never_reaches_the_site(self) -> None:
        """Also with the prefix alone; one that only begins with the same letters is the site's."""
        async with client_of(moved()) as client:
            for path in ("", "/", "/nowhere", "/_cache/metrics", "//metrics", "/v1", "/metrics/"):
                answer = await client.get(PREFIX + path)
                assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
            for path in ("/_cached", "/_CACHE/metrics", "/_cache.css", "/_cach"):
                assert (await client.get(path)).text == f"site {path}"

    async def test_links_and_the_description_know_the_prefix(self) -> None:
        """The way to the dashboard, OpenAPI, and the same below a mount."""
        async with client_of(moved()) as client:
            dashboard = await client.get("/_cache/_stillfresh")
            described = await client.get("/_cache/openapi.json")
        assert dashboard.headers["location"] == "/_cache/_stillfresh/"
        assert described.json()["servers"] == [{"url": "/_cache"}]
        inner = moved()
        async with inner, client_of(Starlette(routes=[Mount("/in", inner)])) as client:
            dashboard = await client.get("/in/_cache/_stillfresh")
            health = await client.get("/in/_cache/healthz")
            site = await client.get("/in/healthz")
        assert dashboard.headers["location"] == "/in/_cache/_stillfresh/"
        assert (health.json(), site.text) == ({"status": "alive"}, "site /in/healthz")

    @pytest.mark.parametrize(
        ("target", "is_site"),
        [
            ("/%5Fcache/metrics", False),
            ("/_cache%2Fmetrics", False),
            ("/_cache/%2e%2e/x", False),
            ("/_cache/../x", False),
            ("/_cache/..;/x", False),
            ("http://localhost/_cache/metrics", False),
            ("/x/../_cache/metrics", True),
            ("//_cache/metrics", True),
            ("/./_cache/metrics", True),
            ("/%255Fcache/metrics", True),
            ("/_cache;x/metrics", True),
            ("/_cache%5Cmetrics", True),
            ("/_cache%00/metrics", True),
            ("http://localhost/metrics", True),
        ],
    )
    async def test_a_path_written_in_another_way_is_either_ours_or_the_sites(
        self, target: str, *, is_site: bool
    ) -> None:
        """Decoded once, and compared letter by letter: what is ours is never sent to the site."""
        app = moved()
        async with running(app, server_config(app, app.is_site)) as url:
            answer = await raw(url, target)
        assert (b"\r\n\r\nsite " in answer) is is_site

    async def test_live_connections_are_below_the_prefix(self) -> None:
        """Elsewhere it is a WebSocket of the site, which has none here."""
        app = moved()
        async with running(app, server_config(app, app.is_site)) as url:
            live = url.replace("http://", "ws://")
            async with connect(f"{live}/_cache/v1/live") as socket, asyncio.timeout(30):
                await socket.send('{"type": "subscribe", "kind": "price", "ids": ["a"]}')
                assert "price" in str(await socket.recv())
            with pytest.raises(InvalidStatus):
                async with connect(f"{live}/_cache/v1/other"):
                    pass
            assert app.is_site("/v1/live")

    def test_a_prefix_without_a_site_is_refused(self) -> None:
        """It would leave all other paths to nobody."""
        with pytest.raises(ConfigError, match="own_prefix: goes with pages"):
            gateway(own_prefix=PREFIX)
        with pytest.raises(ConfigError, match="own_prefix: must be a path such as '/_cache'"):
            gateway(pages=SITE, own_prefix="cache/")

    def test_sighup_moves_the_paths_while_the_server_runs(self, tmp_path: Path) -> None:
        """A page that was kept ready under the new prefix is not given again."""
        with serving_site() as site:
            site.answer("/_own/metrics", b"page", cache_control="max-age=600")
            place = tmp_path / "s.sock"
            text = f'[server]\nuds = "s.sock"\n[pages]\nupstream = "{site.url}"\n'
            file = tmp_path / "s.toml"
            file.write_text(text)
            with serving(tmp_path, "s.toml") as (process, _), asking(place) as client:
                assert [client.get("/_own/metrics").text for _ in range(4)] == ["page"] * 4
                file.write_text(text + 'own_prefix = "/_own"\n')
                process.send_signal(signal.SIGHUP)
                until(lambda: client.get("/_own/healthz").status_code == 200)
                assert client.get("/_own/metrics").text.startswith("# HELP")
                assert client.get("/metrics").status_code == 404


def test_a_moved_gateway_still_checks_names_of_its_own() -> None:
    """The prefix changes where paths are, and not who may ask."""

    async def statuses() -> list[int]:
        app = moved(hosts=[], token="sesame")  # noqa: S106 (of a test)
        async with client_of(app, headers={"host": "evil.com"}) as client:
            paths = ("/v1/price/a", "/metrics")
            named = [(await client.get(PREFIX + path)).status_code for path in paths]
        async with client_of(app) as client:
            return [*named, (await client.get(f"{PREFIX}/metrics")).status_code]

    assert asyncio.run(statuses()) == [421, 421, 401]
