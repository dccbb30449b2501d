"""I8-I11: on Valkey and PostgreSQL, the page cache by itself, and two proxies that share it."""

import asyncio
from contextlib import ExitStack

import pytest

from stillfresh.pages import Page, PageCache
from tests.kit.serve import Proxy


@pytest.fixture(params=["valkey", "postgres"])
def store(request: pytest.FixtureRequest) -> str:
    """A place of its own on the server."""
    server = request.getfixturevalue(request.param)
    return str(server.new_store() if request.param == "postgres" else server.url())


class TestI8Servers:
    async def test_two_caches_on_one_server_render_a_page_once(self, store: str) -> None:
        """For eight visitors at two caches at once; revalidated in one, it is stale in both."""
        renders = 0

        async def render() -> Page:
            nonlocal renders
            renders += 1
            await asyncio.sleep(0)
            return Page(f"page {renders}")

        async with asyncio.timeout(30), PageCache(store) as one, PageCache(store) as two:
            asked = [it.get("/pricing", render, 60) for it in (one, two) * 4]
            assert {page.body for page in await asyncio.gather(*asked)} == {b"page 1"}
            await one.revalidate("/pricing")
            assert (await two.get("/pricing", render, 60)).body == b"page 1"
            while (await one.get("/pricing", render, 60)).body != b"page 2":
                pass
            await two.purge("/pricing")
            assert (await one.get("/pricing", render, 60)).body == b"page 3"

    @pytest.mark.parametrize("scheme", ["redis", "postgresql"])
    async def test_pages_are_rendered_without_the_server(self, scheme: str) -> None:
        """I10: nobody waits for it, opening and closing included."""
        async with asyncio.timeout(30):
            pages = PageCache(f"{scheme}://127.0.0.1:1/0", store_timeout="200ms")
            page = await pages.get("/pricing", lambda: Page("here"), 60)
            assert page.body == b"here"
            await pages.close()

    def test_two_proxies_on_one_server_render_a_page_once(self, store: str) -> None:
        """What one has kept the other serves; a change through one is seen at the other."""
        with ExitStack() as stack:
            one = Proxy(stack, "--store", store, "--site-host", "shop.example")
            two = Proxy(
                stack, "--store", store, "--site-host", "shop.example", upstream=one.upstream
            )
            for proxy in (one, two):
                proxy.client.headers["host"] = "shop.example"
            says = {"cache_control": "max-age=60"}
            pages = [it.get("/r", **says).text for it in (one, two, one, two)]
            assert pages == ["/r 1"] * 4
            two.client.post("/r?cache-control=max-age%3D60")
            assert one.get("/r", **says).text == "/r 3"
