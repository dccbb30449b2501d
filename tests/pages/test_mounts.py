"""I11, I12, I13: a cache inside another app: mounts, prefixes, rewritten paths."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.model import App, Receive, Scope, Send
from tests.kit.isr import Site, Visitor


def rewriting(app: App) -> App:
    """As some do: `/v1/…` is cut off the path, and `x-kind` put before it; raw_path is left."""

    async def rewrites(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix("/v1")
        kind = dict(scope["headers"]).get(b"x-kind", b"").decode()
        await app({**scope, "path": f"/{kind}{path}" if kind else path}, receive, send)

    return rewrites


class TestI12Mounts:
    async def test_a_mounted_site_is_cached_by_the_path_that_the_client_requested(
        self, pages: PageCache, site: Site
    ) -> None:
        """Starlette's mount: the app finds its place, and is purged by the whole path."""
        isr = IsrMiddleware(site, pages, routes={"/site/pricing": 60})
        visit = Visitor(Starlette(routes=[Mount("/site", app=isr)]))
        assert [(await visit("/site/pricing")).text for _ in range(2)] == ["page 1"] * 2
        scope = site.scopes[0]
        assert (scope["root_path"], scope["path"]) == ("/site", "/site/pricing")
        for key in ("/site/pricing", "http://example.com/site/pricing"):
            before = (await visit("/site/pricing")).text
            await pages.purge(key)
            assert (await visit("/site/pricing")).text != before

    async def test_a_rewritten_path_reaches_the_app_as_rewritten(
        self, pages: PageCache, site: Site
    ) -> None:
        """With the cache, the app is asked for the same as without it."""
        isr = IsrMiddleware(site, pages, routes={"/v1/*": 60})
        visit = Visitor(rewriting(isr))
        await visit("/v1/pricing", method="OPTIONS")
        assert [(await visit("/v1/pricing")).text for _ in range(3)] == ["page 2"] * 3
        assert site.scopes[1]["path"] == site.scopes[0]["path"] == "/pricing"
        assert site.scopes[1]["raw_path"] == site.scopes[0]["raw_path"] == b"/v1/pricing"

    @pytest.mark.parametrize("step", ["purge", "revalidate", "url", "post"])
    async def test_a_page_of_a_rewritten_path_is_invalidated_by_the_clients_path(
        self, pages: PageCache, site: Site, step: str
    ) -> None:
        """On demand by path or URL, or by a change."""
        visit = Visitor(rewriting(IsrMiddleware(site, pages, routes={"/v1/*": 60})))
        await visit("/v1/pricing")
        if step == "post":
            await visit("/v1/pricing", method="POST")
        elif step == "url":
            await pages.purge("http://example.com/v1/pricing")
        else:
            await getattr(pages, step)("/v1/pricing")
        told = (await visit("/v1/pricing")).headers["cache-status"]
        assert told.startswith("stillfresh; fwd=") or told == "stillfresh; hit; ttl=0"
        while (await pages.stats()).resources["page"].loading:
            await asyncio.sleep(0)

    async def test_two_paths_behind_one_url_are_two_pages(
        self, pages: PageCache, site: Site
    ) -> None:
        """Whatever an outer layer chose them by, nobody is served another's."""
        visit = Visitor(rewriting(IsrMiddleware(site, pages, routes={"/v1/*": 60})))
        kinds: tuple[dict[str, str], ...] = ({}, {"x-kind": "beta"}, {}, {"x-kind": "beta"})
        texts = [(await visit("/v1/pricing", headers=kind)).text for kind in kinds]
        assert texts == ["page 1", "page 2", "page 1", "page 2"]
        assert [scope["path"] for scope in site.scopes] == ["/pricing", "/beta/pricing"]

    async def test_a_rewritten_path_with_a_line_break_is_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """A line break in a rewritten path is no way into another's key."""

        async def odd(scope: Scope, receive: Receive, send: Send) -> None:
            await isr({**scope, "path": "/a\nvary accept: b"}, receive, send)

        isr = IsrMiddleware(site, pages, routes={"/v1/*": 60})
        visit = Visitor(odd)
        assert (await visit("/v1/a")).text != (await visit("/v1/a")).text
