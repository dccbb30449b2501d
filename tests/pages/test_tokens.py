"""Read your writes through pages: two workers in front of one site, whose memory lags (E37)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Cache
from stillfresh.engine import at_least, commit_token
from stillfresh.freshness import Verdict
from stillfresh.http.own_writes import ANY_CHANGE, COOKIE, FIELD
from stillfresh.integrations.own_writes import ReadYourWrites
from stillfresh.pages import Page, PageCache
from stillfresh.stores import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper, turns, until
from tests.kit.held_store import SteppedStore
from tests.kit.isr import Site, Visitor, as_it_says, in_front

FOREIGN = "1~c.another"
"""The token of a change by a cache of some other process."""
TOKENS = {
    "of another process": FOREIGN,
    "of an outbox that nobody has": "1~p.7.unknown",
    "forged": '1~c."; Path=/',
    "of a later version": "2~x",
    "oversized": "1~c." + "a" * 5_000,
    "empty parts": "1~~~",
}


@pytest.fixture
async def workers(tmp_path: Path, clock: ManualClock) -> AsyncIterator[list[PageCache]]:
    """Two processes of one site. Neither hears from the other for ten minutes."""
    async with AsyncExitStack() as stack:
        pages = [
            PageCache(
                f"sqlite:///{tmp_path}/pages.db",
                memory_for="10m",
                clock=clock,
                sleep=Sleeper(),
                dice=lambda: 0.0,
            )
            for _ in range(2)
        ]
        yield [await stack.enter_async_context(each) for each in pages]


def cookie(token: str) -> dict[str, str]:
    return {"cookie": f"{COOKIE}={token}"}


def field(token: str) -> dict[str, str]:
    return {FIELD: token}


async def saved(visitor: Visitor, site: Site, url: str = "/pricing") -> str:
    """The user saves: the site's next page is another one."""
    answer = await visitor(url, method="POST")
    return str(answer.headers[FIELD])


class TestE37Pages:
    @pytest.mark.parametrize("way", ["key", "request"])
    @pytest.mark.parametrize("carried", [cookie, field])
    async def test_a_user_sees_the_change_on_the_next_page_of_another_worker(
        self, workers: list[PageCache], site: Site, way: Any, carried: Any
    ) -> None:
        """All others still get the page that this worker has in memory (E37)."""
        first, second = (in_front(site, pages, forward=way) for pages in workers)
        assert (await second()).text == "page 1"
        token = await saved(first, site)
        before = site.renders
        assert (await second()).text == "page 1"
        assert site.renders == before
        shown = await second(headers=carried(token))
        assert shown.text == f"page {before + 1}"
        assert FIELD not in shown.headers
        assert "set-cookie" not in shown.headers

    async def test_a_response_to_a_change_gives_a_field_and_a_cookie_for_a_minute(
        self, pages: PageCache, site: Site
    ) -> None:
        """(E37)."""
        answer = await in_front(site, pages)("/pricing", method="POST")
        value = answer.headers["set-cookie"]
        assert value.startswith(f"{COOKIE}={answer.headers[FIELD]}; Max-Age=60; Path=/; HttpOnly")

    async def test_a_site_that_looks_at_tokens_and_changes_nothing_itself_gives_one_too(
        self, workers: list[PageCache], site: Site
    ) -> None:
        """The page was invalidated while its site was answering (E37)."""
        async with Cache("memory://") as cache:
            app = ReadYourWrites(site, caches=[cache])
            first, second = (in_front(app, pages) for pages in workers)
            await second()
            token = await saved(first, site)
            assert workers[0].cache.maker in token
            assert (await second(headers=cookie(token))).text == "page 3"

    async def test_clients_that_change_one_page_at_the_same_time_are_each_given_a_token(
        self, clock: ManualClock, site: Site
    ) -> None:
        """The second change joins the invalidation that the first one has begun (E37)."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with PageCache(store, clock=clock) as pages:
            visitor = in_front(site, pages)
            await visitor()
            changes = [await store.holding("invalidate", saved(visitor, site))]
            changes += [asyncio.create_task(saved(visitor, site)) for _ in range(2)]
            await until(lambda: site.renders == 4)
            await turns()
            store.let_go("invalidate")
            assert await asyncio.gather(*changes) == [f"1~c.{pages.cache.maker}"] * 3

    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE"])
    async def test_a_response_to_a_safe_method_gives_none(
        self, pages: PageCache, site: Site, method: str
    ) -> None:
        """(E37)."""
        answer = await in_front(site, pages)("/pricing", field(FOREIGN), method=method)
        assert not {FIELD.lower(), "set-cookie"} & {*answer.headers}

    async def test_a_change_that_the_site_refused_gives_none(
        self, pages: PageCache, site: Site
    ) -> None:
        """(E37)."""
        site.says(status=403)
        answer = await in_front(site, pages)("/pricing", method="POST")
        assert not {FIELD.lower(), "set-cookie"} & {*answer.headers}

    async def test_the_sites_own_token_and_the_clients_earlier_one_are_in_the_new_token(
        self, pages: PageCache, site: Site
    ) -> None:
        """Each once, and other cookies of the site stay (E37)."""
        site.says(
            f"{FIELD}: 1~c.sites~p.7.shop",
            f"Set-Cookie: {COOKIE}=1~c.sites; Path=/",
            "Set-Cookie: session=5",
        )
        answer = await in_front(site, pages)("/pricing", field("1~c.earlier"), method="POST")
        tokens = answer.headers.get_list(FIELD)
        assert len(tokens) == 1
        assert {"c.sites", "c.earlier", "p.7.shop"} < {*tokens[0].split("~")}
        assert len(tokens[0].split("~")) == 5
        cookies = answer.headers.get_list("set-cookie")
        assert [value.partition("=")[0] for value in cookies] == ["session", COOKIE]
        assert cookies[1].startswith(f"{COOKIE}={tokens[0]};")

    @pytest.mark.parametrize("way", ["key", "request"])
    async def test_a_page_is_not_shown_to_a_token_while_it_is_refreshed(
        self, pages: PageCache, site: Site, way: Any
    ) -> None:
        """`revalidate` is soft: others get the old page at once (E37)."""
        visitor = in_front(site, pages, forward=way)
        await visitor()
        token = (await pages.revalidate("/pricing")).token
        mine = await site.holding(visitor(headers=cookie(token)))
        others = await visitor()
        assert others.text == "page 1"
        assert not mine.done()
        site.let_go()
        assert (await mine).text == "page 2"

    @pytest.mark.parametrize("way", ["key", "request"])
    async def test_an_invalidated_page_is_not_shown_to_a_token_when_rendering_fails(
        self, pages: PageCache, site: Site, way: Any
    ) -> None:
        """The visitor gets the site's error, others the old page (E37)."""
        visitor = in_front(site, pages, forward=way)
        await visitor()
        token = (await pages.revalidate("/pricing")).token
        site.says(status=500)
        assert (await visitor(headers=cookie(token))).status_code == 500
        assert (await visitor()).text == "page 1"

    @pytest.mark.parametrize("way", ["key", "request"])
    async def test_an_old_page_that_nobody_has_changed_is_shown_to_a_token(
        self, pages: PageCache, site: Site, clock: ManualClock, way: Any
    ) -> None:
        """Also while the site is down: it is old, and no older than the change (E37)."""
        visitor = in_front(site, pages, forward=way)
        await visitor()
        site.says(status=500)
        clock.advance(61)
        assert (await visitor(headers=cookie(FOREIGN))).text == "page 1"

    async def test_max_stale_does_not_bring_a_token_a_page_from_before_the_change(
        self, pages: PageCache, site: Site
    ) -> None:
        """(E37)."""
        visitor = as_it_says(site, pages)
        site.says("Cache-Control: max-age=60, stale-while-revalidate=600")
        await visitor()
        token = (await pages.revalidate("/pricing")).token
        wishes = {"cache-control": "max-stale=1000", **field(token)}
        assert (await visitor(headers=wishes)).text == "page 2"

    async def test_only_if_cached_does_not_bring_a_token_a_page_from_before_the_change(
        self, pages: PageCache, site: Site
    ) -> None:
        """(E37)."""
        visitor = as_it_says(site, pages)
        site.says("Cache-Control: max-age=60, stale-while-revalidate=600")
        await visitor()
        wishes = {"cache-control": "only-if-cached", **field(FOREIGN)}
        assert (await visitor(headers=wishes)).text == "page 1"
        await pages.revalidate("/pricing")
        assert (await visitor(headers=wishes)).status_code == 504

    async def test_a_token_asks_for_parts_and_heads_and_on_conditions_as_everybody_may(
        self, workers: list[PageCache], site: Site
    ) -> None:
        """Range, HEAD and If-None-Match get the page from after the change (E37)."""
        first, second = (in_front(site, pages) for pages in workers)
        etag = (await second()).headers["etag"]
        token = await saved(first, site)
        site.body = b"longer than before"
        headers = {**cookie(token), "range": "bytes=0-5"}
        assert (await second(headers=headers)).text == "longer"
        assert (await second(headers={**headers, "if-range": etag})).status_code == 200
        head = await second(headers=cookie(token), method="HEAD")
        assert head.headers["content-length"] == "18"
        assert head.headers["etag"] != etag
        headers = {**cookie(token), "if-none-match": etag}
        assert (await second(headers=headers)).status_code == 200
        headers = {**cookie(token), "if-none-match": head.headers["etag"]}
        assert (await second(headers=headers)).status_code == 304

    async def test_a_part_that_is_stored_is_not_shown_after_a_change(
        self, pages: PageCache, site: Site
    ) -> None:
        """(E37)."""
        visitor = as_it_says(site, pages)
        site.says("Cache-Control: max-age=60", "Content-Range: bytes 0-3/9", status=206)
        site.body = b"abcd"
        part = {"range": "bytes=0-3"}
        assert (await visitor(headers=part)).text == "abcd"
        token = (await pages.revalidate("/pricing")).token
        site.body = b"ABCD"
        assert (await visitor(headers={**part, **field(token)})).text == "ABCD"


class TestE37Keys:
    @pytest.mark.parametrize("carried", [cookie, field])
    @pytest.mark.parametrize("way", ["key", "request"])
    async def test_a_page_with_and_without_a_token_is_one_page(
        self, pages: PageCache, site: Site, carried: Any, way: Any
    ) -> None:
        """Also if the site says that it varies by both (E37)."""
        visitor = in_front(site, pages, forward=way)
        site.says("Cache-Control: max-age=60", f"Vary: Cookie, {FIELD}")
        assert (await visitor(headers=carried(FOREIGN))).text == "page 1"
        assert (await visitor()).text == "page 1"
        assert (await visitor(headers=carried("1~c.third"))).text == "page 1"
        assert site.renders == 1

    async def test_the_token_is_taken_from_among_other_cookies(
        self, pages: PageCache, site: Site
    ) -> None:
        """(E37)."""
        visitor = as_it_says(site, pages)
        headers = {"cookie": f"a=1; {COOKIE}={FOREIGN}; b=2"}
        await visitor(headers=headers)
        assert site.seen("cookie") == ["a=1; b=2"]
        assert site.seen(FIELD) == [ANY_CHANGE]

    @pytest.mark.parametrize("patterns", [["*"], ["still*"], [COOKIE]])
    async def test_ignored_cookies_do_not_take_the_token_along(
        self, workers: list[PageCache], site: Site, patterns: list[str]
    ) -> None:
        """(E37)."""
        first, second = (in_front(site, pages, ignore_cookies=patterns) for pages in workers)
        await second()
        token = await saved(first, site)
        assert (await second(headers=cookie(token))).text == "page 3"

    @pytest.mark.parametrize("way", ["key", "request"])
    async def test_every_load_asks_the_sites_own_caches_for_all_changes(
        self, pages: PageCache, site: Site, way: Any
    ) -> None:
        """Nothing of the visitor's token is in it: a site may show its request to everybody.

        And a position that was made up must not make the load of a page wait, and fail (E37).
        """
        visitor = in_front(site, pages, forward=way)
        await visitor("/blog/a")
        assert site.seen(FIELD) == [ANY_CHANGE]
        await visitor("/blog/b", {**field("1~c.mine~p.7.shop"), **cookie("1~c.older")})
        assert site.seen(FIELD) == [ANY_CHANGE]
        assert site.seen("cookie") == []

    def test_the_token_of_a_load_is_that_of_a_change_by_anybody(self) -> None:
        """(E37)."""
        assert at_least.at_least_of(ANY_CHANGE) == at_least.ANYTHING

    async def test_a_request_that_passes_uncached_has_its_token(
        self, pages: PageCache, site: Site
    ) -> None:
        """In the field alone (E37)."""
        visitor = in_front(site, pages)
        await visitor("/account", {**cookie("1~c.mine"), "authorization": "x"})
        assert site.seen(FIELD) == ["1~c.mine"]
        assert site.seen("cookie") == []

    async def test_a_token_in_a_response_is_not_stored(self, pages: PageCache, site: Site) -> None:
        """Only the visitor whose own response it is could use it (E37)."""
        visitor = in_front(site, pages)
        site.says(f"{FIELD}: 1~c.somebody")
        assert FIELD not in (await visitor()).headers
        assert FIELD not in (await visitor()).headers
        served = await pages.get("/own", lambda: Page("", 200, {FIELD: "1~c.somebody"}), "1m")
        assert FIELD not in served.headers

    @pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
    @pytest.mark.parametrize("carried", [cookie, field])
    async def test_any_token_costs_one_read_of_the_store_and_no_render(
        self, clock: ManualClock, site: Site, token: str, carried: Any
    ) -> None:
        """(E37)."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with PageCache(store, memory_for="10m", clock=clock) as pages:
            visitor = in_front(site, pages)
            await visitor()
            await visitor()
            store.calls.clear()
            assert (await visitor()).text == "page 1"
            assert store.calls == []
            assert (await visitor(headers=carried(token))).text == "page 1"
            assert store.calls == ["read"]
            assert site.renders == 1
            assert (await visitor()).text == "page 1"
            assert store.calls == ["read"]

    @pytest.mark.parametrize("way", ["key", "request"])
    async def test_a_token_gets_the_sites_own_page_while_the_store_cannot_be_asked(
        self, clock: ManualClock, site: Site, way: Any
    ) -> None:
        """Memory may be older than the change; others go on using it (E37)."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with PageCache(store, memory_for="10m", clock=clock) as pages:
            visitor = in_front(site, pages, forward=way)
            await visitor()
            store.broken |= {"read", "acquire"}
            assert (await visitor(headers=cookie(FOREIGN))).text == "page 2"
            assert (await visitor()).text in {"page 1", "page 2"}

    async def test_a_cookie_that_only_looks_like_a_token_is_none(
        self, workers: list[PageCache], site: Site
    ) -> None:
        """(E37)."""
        first, second = (in_front(site, pages) for pages in workers)
        await second()
        token = await saved(first, site)
        for name in (f"my_{COOKIE}", f"{COOKIE}2", COOKIE.upper()):
            assert (await second(headers={"cookie": f"{name}={token}"})).text == "page 1"
        assert (await second(headers={"cookie": f"{COOKIE}="})).text == "page 1"


class TestE37Below:
    @pytest.mark.parametrize("is_own", [True, False], ids=["the user", "somebody else"])
    async def test_a_page_is_never_made_of_what_a_lagging_cache_below_has_in_memory(
        self, workers: list[PageCache], tmp_path: Path, *, is_own: bool
    ) -> None:
        """Whoever visits first: the page is stored, and the user is served that one (E37)."""
        stock = {"tea": 1}

        def site_of(cache: Cache) -> Any:
            @cache.cached("left", fresh_for="1h", memory_for="10m")
            async def left(sku: str) -> int:
                return stock[sku]

            async def app(scope: Any, receive: Any, send: Any) -> None:
                del receive
                if scope["method"] == "POST":
                    stock["tea"] += 1
                    await left.of("tea").invalidate()
                text = b"%d" % await left("tea")
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": text})

            return ReadYourWrites(app, caches=[cache])

        below = f"sqlite:///{tmp_path}/below.db"
        async with Cache(below) as one, Cache(below) as two:
            first = in_front(site_of(one), workers[0])
            second = in_front(site_of(two), workers[1])
            assert (await second("/blog/tea")).text == "1"
            assert (await second("/pricing")).text == "1"
            answer = await first("/pricing", method="POST")
            tokens = field(answer.headers[FIELD])
            await workers[0].revalidate("/blog/tea")
            workers[1].resource.forget(tag="path:/blog/tea")
            workers[1].resource.forget(tag="path:/pricing")
            for path in ("/pricing", "/blog/tea"):
                if not is_own:
                    await second(path)
                    await workers[1].settled()
                assert (await second(path, tokens)).text == "2"

    async def test_a_read_with_a_token_takes_no_page_from_before_the_change(
        self, workers: list[PageCache], site: Site
    ) -> None:
        """`PageCache.get(at_least=…)`, without HTTP (E37)."""
        first, second = workers
        await second.get("/a", site.render, "1m", tags=["all"])
        reached = await first.revalidate_tag("all")
        assert reached == ["/a"]
        assert (await second.get("/a", site.render, "1m")).body == b"page 1"
        served = await second.get("/a", site.render, "1m", at_least=reached.token)
        assert served.body == b"page 2"
        assert served.verdict is Verdict.FRESH
        token = (await first.purge("/a")).token
        with second.at_least(token):
            assert (await second.get("/a", site.render, "1m")).body == b"page 3"
        token = (await first.purge_tag("all")).token
        assert token == (await first.revalidate("/a")).token

    async def test_a_page_waits_for_the_outbox_that_delivers_the_users_commit(
        self, workers: list[PageCache], site: Site
    ) -> None:
        """(E37)."""
        pages = workers[1]
        visitor = in_front(site, pages)
        await visitor()
        delivered = asyncio.Event()
        positions: list[int] = []

        async def wait(position: int) -> None:
            positions.append(position)
            await delivered.wait()

        pages.cache.outboxes.follow("shop", wait)
        token = commit_token("shop", 7)
        mine = asyncio.create_task(visitor(headers=cookie(token)))
        await until(lambda: positions == [7])
        assert (await visitor()).text == "page 1"
        await pages.revalidate("/pricing")  # as the consumer does it
        delivered.set()
        assert (await mine).text == "page 2"

    async def test_a_page_passes_uncached_if_the_commit_is_not_delivered_in_time(
        self, workers: list[PageCache], site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The site knows of the commit (E37)."""
        monkeypatch.setattr(at_least, "LONGEST_WAIT", 0.0)
        pages = workers[1]
        visitor = in_front(site, pages)
        await visitor()
        pages.cache.outboxes.follow("shop", lambda _: asyncio.Event().wait())
        answer = await visitor(headers=cookie(commit_token("shop", 7)))
        assert answer.text == "page 2"
        assert answer.headers["cache-status"] == "stillfresh; fwd=bypass; detail=changed"
