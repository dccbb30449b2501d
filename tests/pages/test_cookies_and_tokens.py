"""I35: ignored cookies, pages for each token, and paths that are never cached."""

from typing import Any

import pytest

from stillfresh.errors import ConfigError
from stillfresh.pages import IsrMiddleware, PageCache, Route
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, Visitor, as_it_says, in_front

ANN = {"authorization": "Bearer of-ann"}
BOB = {"authorization": "Bearer of-bob"}
WAYS = pytest.mark.parametrize("way", ["request", "key"])


def behind_tokens(site: Site, pages: PageCache, **more: Any) -> Visitor:
    route = Route("60s", vary=["Authorization"], **more)
    return in_front(site, pages, routes={"/api/*": route})


class TestI35IgnoredCookies:
    @WAYS
    async def test_an_ignored_cookie_is_no_reason_not_to_share(
        self, pages: PageCache, site: Site, way: str
    ) -> None:
        site.says("Cache-Control: max-age=60")
        visit = as_it_says(site, pages, ignore_cookies=["_ga*", "consent"], forward=way)
        first = await visit(headers={"cookie": "_ga=1; consent=yes"})
        second = await visit(headers={"cookie": "_ga_X=2"})
        assert (first.text, second.text) == ("page 1", "page 1")
        assert site.seen("cookie", 0) == []

    async def test_another_cookie_still_forbids_sharing_and_reaches_the_site_alone(
        self, pages: PageCache, site: Site
    ) -> None:
        site.says("Cache-Control: max-age=60")
        visit = as_it_says(site, pages, ignore_cookies=["_ga*"])
        first = await visit(headers={"cookie": "_ga=1; sid=ann"})
        assert first.headers["cache-status"].endswith("detail=cookie")
        assert site.seen("cookie") == ["sid=ann"]
        assert (await visit(headers={"cookie": "_ga=1; sid=bob"})).text == "page 2"
        assert site.seen("cookie") == ["sid=bob"]

    async def test_an_ignored_cookie_makes_no_variant_of_a_page_that_varies_by_cookie(
        self, pages: PageCache, site: Site
    ) -> None:
        site.says("Cache-Control: public, max-age=60", "Vary: Cookie")
        visit = as_it_says(site, pages, ignore_cookies=["_ga"])
        texts = [(await visit(headers={"cookie": f"_ga={number}"})).text for number in range(3)]
        assert texts == ["page 1"] * 3

    async def test_a_routes_own_list_counts_in_place_of_the_one_for_all(
        self, pages: PageCache, site: Site
    ) -> None:
        site.says("Cache-Control: max-age=60")
        routes = {
            "/shop/*": Route(ignore_cookies=["cart"], query=None),
            "/raw/*": Route(ignore_cookies=[], query=None),
            "*": Route(query=None),
        }
        visit = as_it_says(site, pages, routes=routes, ignore_cookies=["_ga"])
        sent = {"cookie": "_ga=1; cart=2"}
        for path, left in [("/shop/a", "_ga=1"), ("/raw/a", "_ga=1; cart=2"), ("/a", "cart=2")]:
            await visit(path, headers=sent)
            assert site.seen("cookie") == [left]

    async def test_a_change_reaches_the_site_with_all_its_cookies(
        self, pages: PageCache, site: Site
    ) -> None:
        """Only what may be stored is asked without them."""
        visit = as_it_says(site, pages, ignore_cookies=["*"])
        await visit(headers={"cookie": "_ga=1"}, method="POST")
        assert site.seen("cookie") == ["_ga=1"]

    async def test_a_response_that_sets_a_cookie_is_not_shared_if_all_cookies_are_ignored(
        self, pages: PageCache, site: Site
    ) -> None:
        site.says("Cache-Control: max-age=60", "Set-Cookie: sid=1")
        visit = as_it_says(site, pages, ignore_cookies=["*"])
        assert [(await visit()).text for _ in range(2)] == ["page 1", "page 2"]


class TestI35Never:
    async def test_a_path_that_is_never_cached_passes_whatever_the_site_says(
        self, pages: PageCache, site: Site
    ) -> None:
        site.says("Cache-Control: public, max-age=60")
        visit = in_front(site, pages, routes={"*": "60s", "/admin*": "never"})
        for path in ("/admin", "/admin/login", "/%61dmin/login"):
            pages_seen = [(await visit(path)).text for _ in range(2)]
            assert pages_seen[0] != pages_seen[1]
            assert (await visit(path)).headers["cache-status"].endswith("detail=route")
        assert (await visit("/a")).text == (await visit("/a")).text

    async def test_the_site_gets_the_request_of_a_path_that_is_never_cached_as_it_came(
        self, pages: PageCache, site: Site
    ) -> None:
        visit = in_front(site, pages, routes={"*": "60s", "/admin*": "never"})
        await visit("/admin?b=1&a=2", headers={"cookie": "sid=1", **ANN})
        assert (site.seen("cookie"), site.seen("authorization")) == (["sid=1"], ["Bearer of-ann"])
        assert site.scopes[-1]["query_string"] == b"b=1&a=2"


class TestI35Tokens:
    async def test_each_token_has_its_own_copies(self, pages: PageCache, site: Site) -> None:
        visit = behind_tokens(site, pages)
        texts = [(await visit("/api/me", headers=who)).text for who in (ANN, BOB, ANN, BOB, {})]
        assert texts == ["page 1", "page 2", "page 1", "page 2", "page 3"]
        assert site.seen("authorization", 0) == ["Bearer of-ann"]
        assert site.seen("authorization", 2) == []

    async def test_a_page_for_a_token_is_not_for_other_caches(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """A CDN that ignores `Vary` would give it to everybody."""
        visit = behind_tokens(site, pages)
        for _ in range(2):
            page = await visit("/api/me", headers=ANN)
            assert page.headers["cache-control"] == "private, max-age=0"
        assert (await visit("/api/me")).headers["cache-control"].startswith("public")
        clock.advance(61)
        stale = await visit("/api/me", headers=ANN)
        assert stale.headers["cache-control"] == "private, max-age=0"

    async def test_a_key_never_shows_a_token(self, pages: PageCache, site: Site) -> None:
        visit = behind_tokens(site, pages)
        await visit("/api/me", headers=ANN)
        keys = [entry.id for entry in await pages.cache.entries("page")]
        assert keys
        assert not any("of-ann" in key for key in keys)

    async def test_a_site_that_varies_by_the_token_is_cached_too(
        self, pages: PageCache, site: Site
    ) -> None:
        site.says("Vary: Authorization, Accept-Language")
        visit = behind_tokens(site, pages)
        texts = [
            (await visit("/api/me", headers={**who, "accept-language": language})).text
            for who in (ANN, BOB)
            for language in ("de", "en", "de")
        ]
        assert texts == ["page 1", "page 2", "page 1", "page 3", "page 4", "page 3"]

    async def test_a_response_that_says_private_or_sets_a_cookie_is_not_stored(
        self, pages: PageCache, site: Site
    ) -> None:
        visit = behind_tokens(site, pages)
        for line in ("Cache-Control: private, max-age=60", "Set-Cookie: a=1"):
            site.says(line)
            path = f"/api/{line[:3]}"
            texts = [(await visit(path, headers=ANN)).text for _ in range(2)]
            assert texts[0] != texts[1]

    async def test_a_cookie_beside_the_token_forbids_sharing(
        self, pages: PageCache, site: Site
    ) -> None:
        visit = behind_tokens(site, pages)
        texts = [
            (await visit("/api/me", headers={**ANN, "cookie": "sid=1"})).text for _ in range(2)
        ]
        assert texts == ["page 1", "page 2"]

    async def test_a_revoked_token_gets_its_copy_once_more_and_then_the_sites_answer(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        visit = behind_tokens(site, pages)
        await visit("/api/me", headers=ANN)
        site.says("WWW-Authenticate: Bearer", status=401)
        clock.advance(61)
        assert (await visit("/api/me", headers=ANN)).status_code == 200
        await pages.settled()
        assert (await visit("/api/me", headers=ANN)).status_code == 401

    async def test_a_purge_reaches_the_copies_of_all_tokens(
        self, pages: PageCache, site: Site
    ) -> None:
        visit = behind_tokens(site, pages, tags=["api"])

        async def texts() -> set[str]:
            return {(await visit("/api/me", headers=who)).text for who in (ANN, BOB)}

        first = await texts()
        await pages.purge("/api/me")
        second = await texts()
        await pages.purge_tag("api")
        third = await texts()
        assert len(first | second | third) == 6

    async def test_a_token_that_connection_hides_from_the_site_is_in_no_key(
        self, pages: PageCache, site: Site
    ) -> None:
        """The site would answer as to nobody, and that answer would be the sender's page."""
        visit = behind_tokens(site, pages)
        hidden = {**ANN, "connection": "authorization"}
        assert "detail=headers" in (await visit("/api/me", headers=hidden)).headers["cache-status"]
        assert (await visit("/api/me", headers=ANN)).text == "page 2"

    async def test_an_api_key_can_be_the_token(self, pages: PageCache, site: Site) -> None:
        routes = {"/api/*": Route("60s", vary=["X-Shop-Key"])}
        visit = in_front(site, pages, routes=routes, credentials=["X-Shop-Key"])
        texts = [(await visit("/api/a", headers={"x-shop-key": key})).text for key in "aba"]
        assert texts == ["page 1", "page 2", "page 1"]

    def test_a_token_route_that_asks_by_key_alone_is_refused(
        self, pages: PageCache, site: Site
    ) -> None:
        route = Route("60s", vary=["Authorization"], forward="key")
        with pytest.raises(ConfigError, match=r"route '/api/\*': vary has Authorization"):
            IsrMiddleware(site, pages, {"/api/*": route})
