"""I8, I13: pages of each visitor's own, and errors of the cache's own: who waits for what."""

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest

from stillfresh.pages import IsrMiddleware, PageCache, Route
from stillfresh.pages.model import Receive, Scope, Send
from stillfresh.pages.page_cache import UNSHARED_FOR
from stillfresh.pages.upstream import Upstream
from stillfresh.testing import ManualClock
from tests.kit.engine import turns, until
from tests.kit.isr import Site, as_it_says, in_front


async def idle(pages: PageCache) -> None:
    while (await pages.stats()).resources["page"].loading:
        await asyncio.sleep(0)


async def begun(site: Site, renders: int) -> None:
    """Until so many renders are under way, though none has ended."""
    async with asyncio.timeout(60):
        await until(lambda: site.renders >= renders)


@pytest.fixture
def dead_port() -> Iterator[int]:
    """Nobody listens there, and nobody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


class TestI13SendersAtOnce:
    @pytest.mark.parametrize(
        "says", [b"max-age=0, must-revalidate", b"s-maxage=0", b"no-cache, must-revalidate"]
    )
    async def test_visitors_at_once_never_get_what_the_site_decides_for_each_sender(
        self, pages: PageCache, says: bytes
    ) -> None:
        """These directives allow to store it, and ask the site for each visitor."""

        async def site(scope: Scope, _: Receive, send: Send) -> None:
            fields = dict(scope["headers"])
            name = fields.get(b"authorization", fields.get(b"cookie", b"nobody"))
            await turns(20)
            headers = [(b"cache-control", says), (b"etag", b'"1"')]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": name})

        senders = [{"Authorization": "a"}, {"Authorization": "b"}, {}, {"Cookie": "c"}]
        app = IsrMiddleware(site, pages, routes={"/*": Route(query=None)})
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            for order in (senders, senders[::-1]):
                path = f"/me-{len(order[0])}"
                crowd = [client.get(path, headers=sender) for sender in order]
                texts = [answer.text for answer in await asyncio.gather(*crowd)]
                names = [next(iter(sender.values()), "nobody") for sender in order]
                assert texts == names


class TestI13SlowPrivatePages:
    @pytest.mark.parametrize("line", ["Set-Cookie: a=1", "Cache-Control: private"])
    async def test_each_visitor_of_a_private_page_waits_for_one_render_of_its_own(
        self, pages: PageCache, site: Site, clock: ManualClock, line: str
    ) -> None:
        """However long ago the page was found private, a crowd queues behind nobody."""
        visit = in_front(site, pages)
        site.says(line)
        await visit()
        for passed in (1, UNSHARED_FOR, UNSHARED_FOR + 3_600):
            clock.advance(passed)
            before = site.renders
            site.hold()
            crowd = [asyncio.ensure_future(visit()) for _ in range(8)]
            await begun(site, before + 8)
            site.let_go()
            answers = await asyncio.gather(*crowd)
            await idle(pages)
            assert site.renders <= before + 9  # the ninth: whether it is still so
            assert len({answer.text for answer in answers}) == 8

    async def test_whether_a_page_is_still_private_is_checked_in_the_background(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """Once in a while, by one; what became public is shared from then on."""
        visit = in_front(site, pages)
        site.says("Cache-Control: private")
        await visit()
        clock.advance(UNSHARED_FOR)
        before = site.renders
        await visit()
        await idle(pages)
        await visit()
        assert site.renders == before + 3
        site.says("Content-Type: text/html")
        clock.advance(UNSHARED_FOR)
        await visit()
        await idle(pages)
        assert "hit" in (await visit()).headers["cache-status"]

    async def test_a_failed_background_check_of_a_private_page_fails_no_visitor(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """The page stays each visitor's own."""
        failing = False

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            site.status = 500 if failing and b"cookie" not in dict(scope["headers"]) else 200
            await site(scope, receive, send)

        visit = in_front(app, pages)
        site.says("Cache-Control: private")
        await visit()
        failing = True
        clock.advance(UNSHARED_FOR)
        for _ in range(3):
            assert (await visit(headers={"cookie": "a=1"})).status_code == 200
            await idle(pages)

    async def test_a_change_of_a_private_page_does_not_make_visitors_queue(
        self, pages: PageCache, site: Site
    ) -> None:
        """There was no copy that could be out of date."""
        visit = in_front(site, pages)
        site.says("Cache-Control: private")
        await visit()
        await visit(method="POST")
        before = site.renders
        site.hold()
        crowd = [asyncio.ensure_future(visit()) for _ in range(4)]
        await begun(site, before + 4)
        site.let_go()
        await asyncio.gather(*crowd)
        await idle(pages)

    async def test_a_private_page_of_get_is_rendered_for_each_caller_at_once(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """`PageCache.get`, as by HTTP."""
        site.says("Set-Cookie: a=1")
        await pages.get("/me", site.render, revalidate=60)
        clock.advance(UNSHARED_FOR)
        before = site.renders
        site.hold()
        crowd = [
            asyncio.ensure_future(pages.get("/me", site.render, revalidate=60)) for _ in range(4)
        ]
        await begun(site, before + 4)
        site.let_go()
        assert len({page.body for page in await asyncio.gather(*crowd)}) == 4
        await idle(pages)


class TestI8ErrorsOfOurOwn:
    @pytest.mark.parametrize("is_routed", [True, False])
    async def test_a_dead_site_is_requested_once_for_all_waiting_visitors(
        self, pages: PageCache, clock: ManualClock, dead_port: int, *, is_routed: bool
    ) -> None:
        """What the proxy says of it holds nothing of anybody: all who waited are told."""
        upstream = Upstream(f"http://127.0.0.1:{dead_port}", clock=clock)
        gate, asked = asyncio.Event(), 0

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal asked
            asked += 1
            await gate.wait()
            await upstream(scope, receive, send)

        visit = in_front(app, pages) if is_routed else as_it_says(app, pages)
        crowd = [asyncio.ensure_future(visit()) for _ in range(5)]
        await until(lambda: asked > 0)
        await turns(300)
        gate.set()
        answers = await asyncio.gather(*crowd)
        assert {answer.status_code for answer in answers} == {502}
        assert len({answer.text for answer in answers}) == 1
        assert "cannot be reached" in answers[0].text
        assert answers[0].headers["cache-control"] == "no-store"
        assert answers[0].headers["proxy-status"].startswith("stillfresh; error=")
        assert asked == 1

    async def test_a_spoofed_gateway_error_with_a_cookie_goes_to_one_visitor_only(
        self, pages: PageCache, site: Site
    ) -> None:
        """I13: a site that speaks as this proxy shares no cookie by it."""
        visit = in_front(site, pages)
        site.says("Proxy-Status: stillfresh; error=x", "Set-Cookie: a=1", status=502)
        site.hold()
        crowd = [asyncio.ensure_future(visit()) for _ in range(3)]
        await site.asked.wait()
        await turns()
        site.let_go()
        answers = await asyncio.gather(*crowd)
        assert len([answer for answer in answers if "set-cookie" in answer.headers]) == 1

    async def test_a_failed_refresh_goes_to_the_visitor_that_triggered_it(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """The site is asked once, and its error goes to the visitor whose request it was."""
        visit = as_it_says(site, pages)
        site.says("Cache-Control: public, max-age=60, stale-while-revalidate=600")
        await visit()
        clock.advance(61)
        site.says("Cache-Control: private", status=500)
        answer = await visit(headers={"authorization": "one", "cache-control": "max-age=0"})
        assert (answer.text, site.renders) == ("page 2", 2)
