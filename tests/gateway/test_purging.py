"""I27: pages are purged over HTTP, by operators and by peers that are allowed to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from stillfresh import ConfigError
from stillfresh.gateway import Gateway, gateway
from stillfresh.gateway.config import settings_of
from stillfresh.gateway.purging import PurgeRequests, asked_by, purge
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.edge import Edge, checked_networks

TOKEN = "correct-horse"  # noqa: S105 (of the tests)
BEARER = {"Authorization": f"Bearer {TOKEN}"}
API = "/_stillfresh/api/purge"
FRESH = [(b"cache-control", b"max-age=60"), (b"cache-tag", b"shop, eu")]


class Shop:
    """A site that counts, behind a gateway, and clients with addresses."""

    def __init__(self, *purge_from: str, **options: Any) -> None:
        self.count = 0
        self.methods: list[str] = []
        self.pages = PageCache("memory://")
        isr = IsrMiddleware(self, self.pages)
        site = PurgeRequests(isr, self.pages, checked_networks(purge_from))
        edge = Edge(site, host=b"shop.example", trusted=checked_networks(["10.9.9.9"]))
        self.app: Gateway = gateway("memory://", pages=edge, page_cache=self.pages, **options)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError
        self.count += 1
        self.methods.append(scope["method"])
        await send({"type": "http.response.start", "status": 200, "headers": FRESH})
        await send({"type": "http.response.body", "body": b"%d" % self.count})

    @asynccontextmanager
    async def client(self, peer: str = "127.0.0.1", **headers: str) -> AsyncIterator[Any]:
        transport = httpx.ASGITransport(app=self.app, client=(peer, 1234))
        base = "http://127.0.0.1:8080"
        async with (
            self.app,
            httpx.AsyncClient(transport=transport, base_url=base, headers=headers) as client,
        ):
            yield client


async def texts(client: httpx.AsyncClient, *paths: str) -> list[str]:
    return [(await client.get(path)).text for path in paths]


class TestI27PurgeApi:
    async def test_the_purge_api_purges_by_url_and_by_tag(self) -> None:
        """What each reached is told; gone pages are made anew."""
        async with Shop(token=TOKEN).client() as client:
            await texts(client, "/a", "/a?x=1", "/b")
            asked = {"urls": ["/a", "/none"], "tags": ["shop", "unknown"]}
            answer = await client.post(API, json=asked, headers=BEARER)
            assert answer.status_code == 200
            assert answer.json() == {
                "urls": {"/a": 2, "/none": 0},
                "tags": {"shop": 1, "unknown": 0},
            }
            assert await texts(client, "/a", "/b") == ["4", "5"]

    async def test_a_soft_purge_serves_the_stale_page_while_it_is_rendered(self) -> None:
        """A page that is only stale is served while a new one is made."""
        shop = Shop(token=TOKEN)
        async with shop.client() as client:
            await texts(client, "/a")
            asked = {"tags": ["eu"], "soft": True}
            answer = await client.post(API, json=asked, headers=BEARER)
            assert answer.json() == {"urls": {}, "tags": {"eu": 1}}
            await texts(client, "/a")
            assert await shop.pages.settled()
            assert await texts(client, "/a") == ["2"]

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({}, ["name urls, or tags"]),
            ({"urls": ["", "/b"], "tags": ["", "x"]}, ["urls[0]: ", "tags[0]: "]),
            ({"urls": ["/x"] * 1_001}, ["urls: at most 1,000, not 1,001"]),
            ({"url": ["/x"]}, ["url"]),
            ({"urls": "/x"}, ["urls"]),
            ([], ["send {"]),
        ],
    )
    async def test_a_malformed_purge_is_422_and_purges_nothing(
        self, asked: object, said: list[str]
    ) -> None:
        """As a problem (RFC 9457), and nothing is done."""
        async with Shop(token=TOKEN).client() as client:
            await texts(client, "/b")
            answer = await client.post(API, json=asked, headers=BEARER)
            assert answer.status_code == 422
            assert answer.headers["content-type"] == "application/problem+json"
            assert all(it in answer.json()["detail"] for it in said)
            assert await texts(client, "/b") == ["1"]

    async def test_the_purge_api_is_for_operators_only(self) -> None:
        """With a token only with it; without one from this machine, and not from a form."""
        async with Shop(token=TOKEN).client() as client:
            wrong = {"Authorization": "Bearer no"}
            for headers, status in (({}, 401), (wrong, 401), (BEARER, 200)):
                answer = await client.post(API, json={"urls": ["/"]}, headers=headers)
                assert answer.status_code == status
            assert (await client.get(API, headers=BEARER)).status_code == 405
        for peer, headers, status in (
            ("127.0.0.1", {}, 403),
            ("127.0.0.1", {"X-Stillfresh": "1"}, 200),
            ("10.0.0.1", {"X-Stillfresh": "1"}, 403),
            ("127.0.0.1", {"X-Stillfresh": "1", "Origin": "https://evil.example"}, 403),
        ):
            async with Shop().client(peer, **headers) as client:
                answer = await client.post(API, json={"urls": ["/"]})
                assert answer.status_code == status

    async def test_the_purge_api_of_a_gateway_without_pages_is_404(self) -> None:
        """It says so."""
        app = gateway("memory://", token=TOKEN)
        async with app, httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client:
            answer = await client.post(f"http://x{API}", json={"urls": ["/"]}, headers=BEARER)
            assert (answer.status_code, answer.json()["code"]) == (404, "no_pages")


class TestI27PurgeRequests:
    async def test_purge_requests_pass_to_the_site_by_default(self) -> None:
        """Off by default: they are the site's, as any other method."""
        shop = Shop()
        async with shop.client() as client:
            assert (await client.request("PURGE", "/a")).text == "1"
            assert shop.methods == ["PURGE"]

    async def test_a_purge_request_purges_its_own_url(self) -> None:
        """That one, over http and https; the site is not asked."""
        shop = Shop("10.0.0.0/8")
        async with shop.client("10.1.2.3") as client:
            await texts(client, "/a", "/a?x=1")
            answer = await client.request("PURGE", "/a?x=1")
            pages = {"http://shop.example/a?x=1": 1, "https://shop.example/a?x=1": 0}
            assert (answer.status_code, answer.json()) == (200, {"urls": pages, "tags": {}})
            assert await texts(client, "/a", "/a?x=1") == ["1", "3"]
            assert shop.methods == ["GET"] * 3

    async def test_a_purge_of_an_unencoded_path_finds_its_page(self) -> None:
        """A client may send its bytes unencoded."""
        shop = Shop("10.0.0.0/8")
        async with shop.client("10.1.2.3") as client:
            await texts(client, "/caf%C3%A9")
            headers = [(b"host", b"shop.example")]
            target = {"raw_path": b"/caf\xc3\xa9", "query_string": b""}
            asked = asked_by({"type": "http", "headers": headers, **target})
            assert (await purge(shop.pages, asked)).urls["http://shop.example/caf%C3%A9"] == 1

    async def test_a_purge_request_purges_the_tags_it_names(self) -> None:
        """In any of the fields by which a site names them; `Soft-Purge: 1` makes them stale."""
        shop = Shop("10.0.0.0/8")
        async with shop.client("10.1.2.3") as client:
            await texts(client, "/a", "/b")
            for field, soft in (("Surrogate-Key", "0"), ("Cache-Tag", "1")):
                headers = {field: "eu", "Soft-Purge": soft}
                answer = await client.request("PURGE", "/", headers=headers)
                assert answer.json() == {"urls": {}, "tags": {"eu": 2}}
                await texts(client, "/a", "/b")
                assert await shop.pages.settled()
            assert await texts(client, "/a", "/b") in (["5", "6"], ["6", "5"])

    @pytest.mark.parametrize("peer", ["127.0.0.1", "11.0.0.1"])
    async def test_purge_requests_from_other_addresses_are_refused(self, peer: str) -> None:
        """By the connection's own address, whatever a field claims."""
        shop = Shop("10.0.0.0/8")
        async with shop.client(peer, **{"X-Forwarded-For": "10.0.0.1"}) as client:
            await texts(client, "/a")
            answer = await client.request("PURGE", "/a")
            assert (answer.status_code, answer.json()["code"]) == (403, "not_allowed")
            assert await texts(client, "/a") == ["1"]

    @pytest.mark.parametrize(
        ("visitor", "status"), [("9.9.9.9", 403), ("10.0.0.1", 200), ("10.0.0.1, 9.9.9.9", 403)]
    )
    async def test_a_trusted_proxy_does_not_purge_for_others(
        self, visitor: str, status: int
    ) -> None:
        """Though its own address may: the one for whom it passes the request on counts, too."""
        shop = Shop("10.0.0.0/8")
        async with shop.client("10.9.9.9", **{"X-Forwarded-For": visitor}) as client:
            assert (await client.request("PURGE", "/a")).status_code == status

    def test_purge_from_takes_networks_only(self) -> None:
        """`[pages] purge_from`; what is no network is refused."""
        pages = {"upstream": "http://localhost:1", "purge_from": ["10.0.0.0/8"]}
        found = settings_of({"pages": pages}).pages
        assert found is not None
        assert found.purge_from == ("10.0.0.0/8",)
        with pytest.raises(ConfigError, match="purge_from"):
            settings_of({"pages": {**pages, "purge_from": ["everybody"]}})
