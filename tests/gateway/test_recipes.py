"""I35: the files of docs/guides/gateway-recipes.md do what the page says."""

import re
import tomllib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from stillfresh.gateway.config import settings_of
from stillfresh.gateway.sources import site_of
from stillfresh.pages import PageCache
from stillfresh.testing import ManualClock
from tests.kit.isr import Site
from tests.kit.processes import ROOT

PAGE = (ROOT / "docs" / "guides" / "gateway-recipes.md").read_text()
ANN = {"authorization": "Bearer of-ann"}
BOB = {"authorization": "Bearer of-bob"}


class Recipe:
    """The file below a heading of the page, in front of a site in this process."""

    def __init__(self, title: str, host: str) -> None:
        text = PAGE.partition(f"\n## {title}\n")[2]
        block = re.search(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert block is not None, title
        settings = settings_of(tomllib.loads(block[1]), {})
        assert settings.pages is not None
        own = settings.pages
        self.clock = ManualClock(1_700_000_000.0)
        self.site = Site(self.clock)
        self.pages = PageCache(
            "memory://",
            clock=self.clock,
            stale_for=own.stale_for,
            error_for=own.error_for,
            expose_tags=own.expose_tags,
        )
        app: Any = site_of(own, self.pages, self.site)  # type: ignore[arg-type]  # any app
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url=f"http://{host}"
        )

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(path, headers=headers)

    async def texts(self, path: str, *senders: dict[str, str]) -> list[str]:
        return [(await self.client.get(path, headers=sender)).text for sender in senders]


@pytest.fixture
async def recipe(request: pytest.FixtureRequest) -> AsyncIterator[Recipe]:
    recipe = Recipe(*request.param)
    async with recipe.pages:
        yield recipe


def of(title: str, host: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("recipe", [(title, host)], indirect=True)


@of("A shop with cookies", "shop.example")
class TestI35Shop:
    async def test_visitors_with_ignored_cookies_share_a_product(self, recipe: Recipe) -> None:
        senders = [{"cookie": f"_ga=1; _ga_X={number}; consent=yes"} for number in range(3)]
        assert await recipe.texts("/product/7", *senders) == ["page 1"] * 3
        assert recipe.site.seen("cookie") == []

    async def test_basket_account_and_admin_are_never_cached(self, recipe: Recipe) -> None:
        recipe.site.says("Cache-Control: public, max-age=60")
        for path in ("/basket", "/basket/add", "/account", "/admin", "/admin/login"):
            first, second = await recipe.texts(path, {"cookie": "sid=1"}, {"cookie": "sid=1"})
            assert first != second
            assert recipe.site.seen("cookie") == ["sid=1"]

    async def test_a_soft_purge_by_tag_renders_the_catalogue_behind(self, recipe: Recipe) -> None:
        await recipe.get("/product/7")
        assert len(await recipe.pages.revalidate_tag("catalogue")) == 1
        assert (await recipe.get("/product/7")).text == "page 1"
        await recipe.pages.settled()
        assert (await recipe.get("/product/7")).text == "page 2"

    async def test_products_are_served_stale_while_the_site_is_down(self, recipe: Recipe) -> None:
        await recipe.get("/product/7")
        recipe.site.status = 503
        recipe.clock.advance(6 * 86_400)
        assert (await recipe.get("/product/7")).text == "page 1"
        await recipe.pages.settled()
        page = await recipe.get("/product/7")
        assert (page.status_code, page.text) == (200, "page 1")


@of("An API with tokens", "api.example")
class TestI35Api:
    async def test_each_token_has_its_own_copies(self, recipe: Recipe) -> None:
        key = {"x-api-key": "k"}
        seen = await recipe.texts("/api/me", ANN, BOB, key, ANN, BOB, key)
        assert seen == ["page 1", "page 2", "page 3"] * 2

    async def test_public_answers_are_shared_by_all_callers(self, recipe: Recipe) -> None:
        recipe.site.says("Cache-Control: public")
        assert await recipe.texts("/api/public/a", {}, ANN, BOB) == ["page 1"] * 3
        assert recipe.site.seen("authorization") == []

    async def test_a_revoked_token_gets_the_sites_answer_after_half_a_minute(
        self, recipe: Recipe
    ) -> None:
        await recipe.get("/api/me", **ANN)
        recipe.site.says("WWW-Authenticate: Bearer", status=401)
        assert (await recipe.get("/api/me", **ANN)).status_code == 200
        recipe.clock.advance(31)
        assert (await recipe.get("/api/me", **ANN)).status_code == 401

    async def test_callers_get_their_last_copies_while_the_api_is_down(
        self, recipe: Recipe
    ) -> None:
        first = await recipe.texts("/api/me", ANN, BOB)
        recipe.site.status = 503
        recipe.clock.advance(1_800)
        assert await recipe.texts("/api/me", ANN, BOB) == first


@of("A blog behind a CDN", "blog.example")
class TestI35Blog:
    async def test_every_reader_is_a_guest_but_not_in_the_editor(self, recipe: Recipe) -> None:
        recipe.site.says("Cache-Control: max-age=60")
        senders = [{"cookie": "sid=1"}, {"cookie": "sid=2"}]
        assert await recipe.texts("/post", *senders) == ["page 1"] * 2
        first, second = await recipe.texts("/ghost/posts", *senders)
        assert first != second
        assert recipe.site.seen("cookie") == ["sid=2"]

    async def test_a_purge_by_the_sites_tag_reaches_its_pages_alone(self, recipe: Recipe) -> None:
        recipe.site.says("Cache-Control: max-age=60", "Cache-Tag: post-7, index")
        assert (await recipe.get("/post")).headers["cache-tag"] == "post-7, index"
        recipe.site.says("Cache-Control: max-age=60", "Cache-Tag: post-8")
        other = (await recipe.get("/other")).text
        await recipe.pages.purge_tag("post-7")
        assert (await recipe.get("/post")).text == "page 3"
        assert (await recipe.get("/other")).text == other

    async def test_cdn_cache_control_counts(self, recipe: Recipe) -> None:
        recipe.site.says("Cache-Control: no-store", "CDN-Cache-Control: max-age=60")
        assert await recipe.texts("/post", {}, {}) == ["page 1"] * 2
