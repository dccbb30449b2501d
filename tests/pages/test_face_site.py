"""I31: a FaceTheory service behind our cache, on the same table and with the same keys, or not."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from stillfresh.pages import PageCache
from stillfresh.testing import ManualClock
from tests.kit.engine import turns
from tests.kit.isr import Site, as_it_says, in_front

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws, Raw
    from tests.kit.servers.facetheory import FaceSite

URL = "http://example.com/pricing"


@pytest.fixture
async def raw(aws: "Aws") -> AsyncIterator["Raw"]:
    async with aws.raw(aws.new_table()) as raw:
        yield raw


@pytest.fixture
def face_site(raw: "Raw", clock: ManualClock) -> "FaceSite":
    """A service whose cache keys are the URLs of its pages; it does not wait for leases."""
    from tests.kit.servers.facetheory import FaceSite, FaceTheory  # noqa: PLC0415 (imports AWS's)

    face = FaceTheory(raw, clock, wait_seconds=0)
    return FaceSite(face, lambda path: f"http://example.com{path}")


def pages_at(aws: "Aws", raw: "Raw", clock: ManualClock, **options: Any) -> PageCache:
    given: dict[str, Any] = {"pk": "raw", "s3_prefix": "isr/", **options}
    return PageCache(aws.store(raw.table, clock, **given), clock=clock, store_timeout="30s")


WAYS = [in_front, as_it_says]
EVERY_WAY: dict[str, dict[str, Any]] = {
    "a duration": {"routes": {"/pricing": "60s"}},
    "a duration, as asked": {"routes": {"/pricing": "60s"}, "forward": "request"},
    "no duration, by key": {"forward": "key"},
    "no duration": {},
}
NEVER_FRESH = "Cache-Control: public, max-age=0, s-maxage=0, stale-if-error=60, must-revalidate"
FRESH_ONCE = "Cache-Control: max-age=10"
MONTH = 30 * 86_400


class EncodingSite(Site):
    """A site that compresses its pages for visitors that accept gzip."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        accepted = dict(scope["headers"]).get(b"accept-encoding", b"")

        async def encode(message: Any) -> None:
            if b"gzip" not in accepted:
                await send(message)
            elif message["type"] == "http.response.start":
                coding = (b"content-encoding", b"gzip")
                await send({**message, "headers": [*message["headers"], coding]})
            else:
                await send({**message, "body": gzip.compress(message["body"])})

        await super().__call__(scope, receive, encode)


@pytest.fixture
def encoding_site(clock: ManualClock) -> EncodingSite:
    return EncodingSite(clock)


class TestI31SameStore:
    @pytest.mark.parametrize("way", WAYS)
    async def test_the_sites_old_page_is_never_published_as_a_new_one(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face_site: "FaceSite", way: Any
    ) -> None:
        """It answers `stale` while we hold the lease that it needs; the row stays as it was."""
        face = face_site.face
        await face.visit(URL, face_site.render)
        before = await face.record(URL)
        clock.advance(61)
        async with pages_at(aws, raw, clock) as pages:
            told = await way(face_site, pages)()
            await pages.settled()
            assert (told.status_code, told.text) == (200, "page 1")
            assert await face.record(URL) == before

    @pytest.mark.parametrize("way", WAYS)
    async def test_a_site_that_shares_the_table_is_noticed_and_asked_without_a_lease(
        self,
        aws: "Aws",
        raw: "Raw",
        clock: ManualClock,
        face_site: "FaceSite",
        way: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The log names the cause once; from then on the site renders, and fresh pages are hits."""
        face = face_site.face
        await face.visit(URL, face_site.render)
        clock.advance(61)
        async with pages_at(aws, raw, clock) as pages:
            visit = way(face_site, pages)
            assert (await visit()).text == "page 1"
            await pages.settled()
            for number in range(2, 5):
                passed = await visit()
                assert (passed.text, passed.headers["x-facetheory-isr"]) == (
                    f"page {number}",
                    "miss",
                )
                assert passed.headers["cache-status"] == "stillfresh; fwd=bypass; detail=same-store"
                hit = await visit()
                assert hit.text == f"page {number}"
                assert "hit; ttl=60" in hit.headers["cache-status"]
                clock.advance(61)
        errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 1
        assert "uses the same table and cache keys" in errors[0]
        assert "docs/facetheory.md" in errors[0]

    async def test_a_page_that_the_site_wrote_while_we_failed_shows_the_shared_table(
        self,
        aws: "Aws",
        raw: "Raw",
        clock: ManualClock,
        face_site: "FaceSite",
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Without a page, the first visitor gets the site's error. Then the site has a page."""
        async with pages_at(aws, raw, clock) as pages:
            visit = as_it_says(face_site, pages)
            told = [await visit() for _ in range(3)]
        assert [it.status_code for it in told] == [500, 200, 200]
        assert "detail=failed" in told[1].headers["cache-status"]
        assert "hit" in told[2].headers["cache-status"]
        assert "uses the same table and cache keys" in caplog.text

    async def test_a_slow_error_under_our_lease_says_what_may_be_the_cause(
        self,
        aws: "Aws",
        raw: "Raw",
        clock: ManualClock,
        face_site: "FaceSite",
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """FaceTheory's error does not name itself; it comes after seven seconds of waiting."""

        async def rest(pause: float) -> None:
            clock.advance(pause)

        face_site.face.wait_seconds = 7
        face_site.face.poll_seconds = 1
        face_site.face.sleep = rest
        store = aws.store(raw.table, clock, pk="raw", s3_prefix="isr/")
        async with PageCache(store, clock=clock, store_timeout="30s", lease_for="60s") as pages:
            visit = in_front(face_site, pages)
            assert (await visit()).status_code == 500
            assert (await visit()).status_code == 503
        errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 1
        assert "500 after 7.0 s" in errors[0]
        assert "held the lease" in errors[0]


class TestI31OtherStore:
    @pytest.mark.parametrize("way", WAYS)
    async def test_a_site_with_a_table_of_its_own_is_cached(
        self,
        aws: "Aws",
        raw: "Raw",
        clock: ManualClock,
        face_site: "FaceSite",
        way: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Its old page is not stored, but its next page is. No error is logged."""
        async with aws.raw(aws.new_table()) as other, pages_at(aws, other, clock) as pages:
            visit = way(face_site, pages)
            assert (await visit()).text == "page 1"
            clock.advance(61)
            face_site.error = RuntimeError("no database")
            assert (await visit()).text == "page 1"
            await pages.settled()
            row = await other.row("META")
            assert row is not None
            assert row["generated_at"] == {"N": "1700000000"}
            face_site.error = None
            clock.advance(61)
            await visit()
            await pages.settled()
            assert (await visit()).text == f"page {len(face_site.face.renders)}"
        assert [it for it in caplog.records if it.levelname == "ERROR"] == []


class TestI31Hydration:
    @pytest.mark.parametrize("way", WAYS)
    async def test_a_pages_hydration_data_comes_from_the_site_and_is_not_stored(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face_site: "FaceSite", way: Any
    ) -> None:
        """The page's own HTML is never served instead, though a route drops unknown parameters."""
        from tests.kit.servers.facetheory import sidecar_token  # noqa: PLC0415 (imports AWS's)

        face = face_site.face
        face.hydrates = True
        await face.visit(URL, face_site.render)
        record = await face.record(URL)
        assert record is not None
        token = sidecar_token(record.pointer)
        async with pages_at(aws, raw, clock) as pages:
            visit = way(face_site, pages)
            assert (await visit()).text == "page 1"
            rows = await raw.rows()
            for query in ("", "a=1&"):
                told = await visit(f"/pricing?{query}__facetheory_isr_hydration={token}")
                assert told.headers["content-type"] == "application/json; charset=utf-8"
                assert told.json() == {"renders": 1}
                assert told.headers["cache-status"] == "stillfresh; fwd=bypass; detail=hydration"
            assert await raw.rows() == rows

    @pytest.mark.parametrize(
        "query",
        [
            "__facetheory_isr_hydration=x",
            "a=1&%5F_facetheory_isr_hydration=x",
            "__facetheory%5fisr_hydration",
            "__facetheory_isr_hydration&a=1",
        ],
    )
    async def test_a_request_for_hydration_data_is_known_however_it_is_written(
        self, pages: PageCache, site: Site, query: str
    ) -> None:
        """FaceTheory decodes the name, and needs no value."""
        site.says("Cache-Control: max-age=60")
        told = await as_it_says(site, pages)(f"/pricing?{query}")
        assert told.headers["cache-status"] == "stillfresh; fwd=bypass; detail=hydration"

    @pytest.mark.parametrize(
        "query", ["x__facetheory_isr_hydration=x", "a=__facetheory_isr_hydration"]
    )
    async def test_another_parameter_does_not_ask_for_hydration_data(
        self, pages: PageCache, site: Site, query: str
    ) -> None:
        site.says("Cache-Control: max-age=60")
        told = await as_it_says(site, pages)(f"/pricing?{query}")
        assert "stored" in told.headers["cache-status"]


class TestI31SiteCopy:
    @pytest.mark.parametrize("way", WAYS)
    async def test_an_old_page_of_the_site_is_passed_on_and_says_so(
        self, aws: "Aws", clock: ManualClock, face_site: "FaceSite", way: Any
    ) -> None:
        """If the cache has none; nothing is stored."""
        await face_site.face.visit(URL, face_site.render)
        clock.advance(61)
        face_site.error = RuntimeError("no database")
        async with aws.raw(aws.new_table()) as other, pages_at(aws, other, clock) as pages:
            told = await way(face_site, pages)()
            assert (told.status_code, told.text) == (200, "page 1")
            assert told.headers["cache-status"] == "stillfresh; fwd=miss; detail=site-copy"
            again = await way(face_site, pages)()
            assert (again.status_code, again.text) == (200, "page 1")
            assert pages.bypassed() == {"site-copy": 2}
            assert await other.row("META") is None

    @pytest.mark.parametrize("way", EVERY_WAY.values(), ids=EVERY_WAY)
    @pytest.mark.parametrize("before", [None, FRESH_ONCE, NEVER_FRESH])
    @pytest.mark.parametrize("later", [20, 700])
    async def test_one_visit_asks_the_site_once(
        self,
        pages: PageCache,
        site: Site,
        clock: ManualClock,
        way: dict[str, Any],
        before: str | None,
        later: int,
    ) -> None:
        """Whatever the cache has of the page; the old page is for everybody, so it is passed on."""
        visit = as_it_says(site, pages, **way)
        if before is not None:
            site.says(before, 'ETag: "1"')
            await visit()
        clock.advance(later)
        site.says(NEVER_FRESH, 'ETag: "0"', "x-facetheory-isr: stale")
        for _ in range(3):
            asked = site.renders
            told = await visit(headers={"cookie": "theme=dark"} if before is None else {})
            await pages.settled()
            assert told.status_code == 200
            assert site.renders - asked <= 1

    @pytest.mark.parametrize("is_known", [False, True])
    async def test_an_old_page_that_varies_by_a_field_of_the_visitor_is_asked_for_again(
        self, pages: PageCache, site: Site, clock: ManualClock, *, is_known: bool
    ) -> None:
        """By its key alone the site was asked without the field: the visitor may get another."""
        visit = in_front(site, pages)
        if is_known:
            await visit()
            clock.advance(30 * 86_400)
        site.says("Vary: Accept-Language", "x-facetheory-isr: stale")
        told = await visit(headers={"accept-language": "de"})
        assert told.text == f"page {site.renders}"
        assert site.seen("accept-language") == ["de"]

    @pytest.mark.parametrize("way", EVERY_WAY.values(), ids=EVERY_WAY)
    @pytest.mark.parametrize("reason", ["x-facetheory-isr: stale", "Cache-Control: no-cache"])
    @pytest.mark.parametrize("accepted", [{}, {"accept-encoding": "br"}])
    async def test_a_visitor_never_gets_a_coding_that_another_visitor_asked_for(
        self,
        pages: PageCache,
        encoding_site: EncodingSite,
        clock: ManualClock,
        way: dict[str, Any],
        reason: str,
        accepted: dict[str, str],
    ) -> None:
        """A refresh asks for the stored variant, whichever visitor triggers it."""
        visit = as_it_says(encoding_site, pages, **way)
        encoding_site.says("Cache-Control: max-age=60", "Vary: Accept-Encoding")
        first = await visit(headers={"accept-encoding": "gzip"})
        assert first.headers["content-encoding"] == "gzip"
        clock.advance(MONTH)
        encoding_site.says("Vary: Accept-Encoding", reason)
        for _ in range(2):
            told = await visit(headers=accepted)
            assert told.status_code == 200
            assert "content-encoding" not in told.headers

    async def test_waiting_visitors_get_the_old_page_only_in_their_own_coding(
        self, pages: PageCache, encoding_site: EncodingSite, clock: ManualClock
    ) -> None:
        """Those with the same fields share one request."""
        visit = in_front(encoding_site, pages)
        encoding_site.says("Vary: Accept-Encoding")
        await visit(headers={"accept-encoding": "gzip"})
        clock.advance(MONTH)
        encoding_site.says("Vary: Accept-Encoding", "x-facetheory-isr: stale")
        first = await encoding_site.holding(visit(headers={"accept-encoding": "gzip"}))
        others = [
            asyncio.create_task(visit(headers={"accept-encoding": accepted}))
            for accepted in ("gzip", "identity", "br")
        ]
        await turns()  # they wait for the first one's load
        encoding_site.let_go()
        told = await asyncio.gather(first, *others)
        assert [it.headers.get("content-encoding") for it in told] == ["gzip", "gzip", None, None]
        assert [it.status_code for it in told] == [200] * 4
        assert encoding_site.renders == 4

    @pytest.mark.parametrize("way", EVERY_WAY.values(), ids=EVERY_WAY)
    @pytest.mark.parametrize("before", [None, FRESH_ONCE, NEVER_FRESH])
    async def test_an_old_page_keeps_its_age(
        self,
        pages: PageCache,
        site: Site,
        clock: ManualClock,
        way: dict[str, Any],
        before: str | None,
    ) -> None:
        """I25: otherwise a browser would keep it for all of its time again."""
        visit = as_it_says(site, pages, **way)
        if before is not None:
            site.says(before, 'ETag: "1"')
            await visit()
            clock.advance(20 if before == NEVER_FRESH and "routes" not in way else MONTH)
        site.says("Cache-Control: max-age=600", "Age: 500", "x-facetheory-isr: stale")
        told = await visit()
        assert "detail=site-copy" in told.headers["cache-status"]
        assert told.headers["age"] == "500"

    async def test_the_age_of_an_old_page_grows_while_the_site_answers(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        visit = in_front(site, pages)
        site.says("Cache-Control: max-age=600", "Age: 500", "x-facetheory-isr: stale")
        told = await site.holding(visit())
        clock.advance(7)
        site.let_go()
        assert (await told).headers["age"] == "507"

    async def test_an_old_page_without_an_age_gets_none(self, pages: PageCache, site: Site) -> None:
        site.says("Cache-Control: max-age=600", "x-facetheory-isr: stale")
        assert "age" not in (await in_front(site, pages)()).headers

    @pytest.mark.parametrize("way", EVERY_WAY.values(), ids=EVERY_WAY)
    @pytest.mark.parametrize(
        ("terms", "later"), [({"stale_for": 0, "error_for": 0}, 100), ({}, MONTH)]
    )
    async def test_each_visit_gets_the_old_page_if_the_stored_one_is_too_old(
        self,
        url: str,
        site: Site,
        clock: ManualClock,
        way: dict[str, Any],
        terms: dict[str, Any],
        later: int,
    ) -> None:
        """The site answers, so there is no cooldown. The stored page stays, to be validated."""
        async with PageCache(url, clock=clock, **terms) as pages:
            visit = as_it_says(site, pages, **way)
            site.says(FRESH_ONCE, 'ETag: "1"')
            await visit()
            clock.advance(later)
            site.says("x-facetheory-isr: stale")
            for number in range(2, 5):
                told = await visit()
                assert (told.status_code, told.text) == (200, f"page {number}")
                assert "detail=site-copy" in told.headers["cache-status"]
            site.says(FRESH_ONCE, 'ETag: "1"')
            site.validates = True
            told = await visit()
            assert (told.status_code, told.text) == (200, "page 1")
            assert "stored" in told.headers["cache-status"]

    async def test_an_old_page_that_is_too_big_leaves_the_stored_one(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """The visitors' own requests get it; the stored page can still be validated."""
        visit = in_front(site, pages, max_body=10)
        site.says('ETag: "1"')
        await visit()
        clock.advance(MONTH)
        site.says("x-facetheory-isr: stale")
        site.body = b"a page of more than ten bytes"
        for _ in range(2):
            told = await visit()
            assert (told.status_code, told.content) == (200, site.body)
        site.says('ETag: "1"')
        site.validates = True
        told = await visit()
        assert (told.status_code, told.text) == (200, "page 1")
        assert "stored" in told.headers["cache-status"]

    async def test_an_old_page_that_sets_a_cookie_is_asked_for_again(
        self, pages: PageCache, site: Site
    ) -> None:
        """I13: the request by the page's key was nobody's own."""
        site.says("Set-Cookie: id=1", "x-facetheory-isr: stale")
        told = await in_front(site, pages)()
        assert (told.text, told.headers["set-cookie"]) == ("page 2", "id=1")

    async def test_an_old_page_of_a_load_before_an_invalidation_is_for_earlier_visitors_only(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        visit = in_front(site, pages)
        await visit()
        clock.advance(MONTH)
        site.says("x-facetheory-isr: stale")
        first = await site.holding(visit())
        await pages.revalidate("/pricing")
        later = asyncio.create_task(visit())
        await turns()  # it waits for the next load
        site.let_go()
        assert [(await first).text, (await later).text] == ["page 2", "page 3"]

    async def test_a_site_that_fails_still_cools_down_if_the_stored_page_is_too_old(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """I8: only an old page of the site is no failure."""
        visit = in_front(site, pages)
        await visit()
        clock.advance(MONTH)
        site.says("x-facetheory-isr: stale", status=500)
        assert (await visit()).status_code == 500
        told = await visit()
        assert told.status_code == 503
        assert "detail=cooling" in told.headers["cache-status"]
        assert site.renders == 2

    async def test_refreshes_that_bring_an_old_page_cool_down_while_the_stored_one_is_served(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        visit = in_front(site, pages)
        await visit()
        clock.advance(100)
        site.says("x-facetheory-isr: stale")
        for _ in range(3):
            assert (await visit()).text == "page 1"
            await pages.settled()
        assert site.renders == 2

    @pytest.mark.parametrize("way", EVERY_WAY.values(), ids=EVERY_WAY)
    @pytest.mark.parametrize("before", [None, NEVER_FRESH])
    @pytest.mark.parametrize("shown", [False, True])
    async def test_an_old_page_shows_its_tags_only_if_they_are_exposed(
        self,
        url: str,
        site: Site,
        clock: ManualClock,
        way: dict[str, Any],
        before: str | None,
        *,
        shown: bool,
    ) -> None:
        """I26."""
        async with PageCache(url, clock=clock, expose_tags=shown) as pages:
            visit = as_it_says(site, pages, **way)
            if before is not None:
                site.says(before, 'ETag: "1"')
                await visit()
                clock.advance(MONTH if "routes" in way else 20)
            site.says(NEVER_FRESH, 'ETag: "0"', "x-facetheory-isr: stale", "Surrogate-Key: k")
            told = await visit()
            assert "detail=site-copy" in told.headers["cache-status"]
            assert told.headers.get("surrogate-key") == ("k" if shown else None)
