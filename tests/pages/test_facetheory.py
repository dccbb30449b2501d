"""I18, I20: pages that we and FaceTheory services write and read in one table and bucket."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from stillfresh import ConfigError, Verdict
from stillfresh.freshness import Policy
from stillfresh.pages import Headers, Page, PageCache, cache_pk
from stillfresh.pages.facetheory import address_in_key
from stillfresh.pages.model import Head, StoredPage
from stillfresh.pages.objects import PageShape
from stillfresh.pages.stored import PageCodec, page_in
from stillfresh.stores import store_for
from stillfresh.stores.bodies import Body
from stillfresh.stores.contract import Ask, Lease
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, as_it_says, in_front

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws, Raw
    from tests.kit.servers.facetheory import FaceTheory

KEY = "default::/pricing?"
URL = "http://example.com/pricing"
HTML = "text/html; charset=utf-8"
CSP = "default-src 'none'; script-src 'nonce-Zm9v' https://cdn.example"
SCRIPT = b'{"html": "<script>alert(1)</script>"}'
PAGES = {
    "missing": Page("nothing here", 404, {"content-type": "text/plain"}),
    "redirect": Page("", 301, {"content-type": "text/plain", "location": "/prices?a=1"}),
    "json": Page(SCRIPT, 200, {"content-type": "application/json"}),
    "policy": Page("<p>safe</p>", 200, {"content-type": HTML, "content-security-policy": CSP}),
}


@pytest.fixture
async def raw(aws: "Aws") -> AsyncIterator["Raw"]:
    async with aws.raw(aws.new_table()) as raw:
        yield raw


@pytest.fixture
def face(raw: "Raw", clock: ManualClock) -> "FaceTheory":
    """A service with FaceTheory's default keys."""
    from tests.kit.servers.facetheory import FaceTheory  # noqa: PLC0415 (imports the AWS library)

    return FaceTheory(raw, clock)


def pages_at(aws: "Aws", raw: "Raw", clock: ManualClock, **options: Any) -> PageCache:
    """Ours, with the settings that meet FaceTheory's defaults."""
    given: dict[str, Any] = {"pk": "raw", "s3_prefix": "isr/", **options}
    return PageCache(aws.store(raw.table, clock, **given), clock=clock, store_timeout="30s")


class TestI18BothDirections:
    @pytest.mark.parametrize("name", PAGES)
    async def test_facetheory_serves_a_page_that_we_stored(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory", name: str
    ) -> None:
        """Status, type and security policy as we were given them; nothing is rendered there."""
        page = PAGES[name]
        async with pages_at(aws, raw, clock) as pages:
            etag = (await pages.get(KEY, lambda: page, revalidate=60)).etag
        clock.advance(5)
        told = await face.visit(KEY, Site(clock).render)
        assert (told.state, told.status, told.body) == ("hit", page.status, page.body)
        names = ("content-type", "content-security-policy")
        expected = {it: page.headers[it] for it in names if it in page.headers}
        assert {it: told.headers[it] for it in names if it in told.headers} == expected
        assert told.headers["etag"] == etag

    @pytest.mark.parametrize("name", PAGES)
    async def test_we_serve_a_page_that_facetheory_stored(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory", name: str
    ) -> None:
        """As a function and over HTTP; a JSON document is never HTML, a 404 never 200."""
        page, site = PAGES[name], Site(clock)

        async def render() -> Page:
            return page

        for key in (KEY, URL):
            await face.visit(key, render)
        async with pages_at(aws, raw, clock) as pages:
            got = await pages.get(KEY, site.render, revalidate=60)
            told = await in_front(site, pages)()
        assert (got.status, got.body, got.verdict) == (page.status, page.body, Verdict.FRESH)
        assert (told.status_code, told.content) == (page.status, page.body)
        for field in ("content-type", "content-security-policy"):
            assert got.headers.get(field) == page.headers.get(field)
            assert told.headers.get(field) == page.headers.get(field)
        assert site.renders == 0

    async def test_a_redirects_target_is_stored_in_the_objects_metadata(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, site: Site
    ) -> None:
        """FaceTheory keeps no `Location`; a service that writes it beside the status reaches us."""
        async with pages_at(aws, raw, clock) as pages:
            await pages.get(KEY, lambda: PAGES["redirect"], revalidate=60)
            row = await raw.row("META")
            assert row is not None
            found = await raw.s3.head_object(Bucket=raw.bucket, Key=row["s3_key"]["S"])
            assert found["Metadata"]["facetheory-location"] == "/prices?a=1"
            await raw.dynamodb.update_item(  # from now on the row is another service's
                TableName=raw.table,
                Key={"pk": row["pk"], "sk": row["sk"]},
                UpdateExpression="SET etag = :etag",
                ExpressionAttributeValues={":etag": {"S": '"theirs"'}},
            )
            page = await pages.get(KEY, site.render, revalidate=60)
        assert (page.status, page.headers["location"], page.etag) == (
            301,
            "/prices?a=1",
            '"theirs"',
        )

    async def test_facetheory_does_not_serve_a_page_without_a_type_as_html(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """Which is what FaceTheory takes an object for that says none."""
        async with pages_at(aws, raw, clock) as pages:
            await pages.get(KEY, lambda: Page(SCRIPT), revalidate=60)
            assert "content-type" not in (await pages.get(KEY, Page, revalidate=60)).headers
        told = await face.visit(KEY, Site(clock).render)
        assert told.headers["content-type"] == "application/octet-stream"

    async def test_a_policy_too_long_for_s3_is_served_by_us_only(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """A foreign reader gets status and type; we serve the whole policy."""
        policy = "; ".join(f"img-src https://host-{number}.example" for number in range(80))
        fields = {"content-type": HTML, "content-security-policy": policy}
        async with pages_at(aws, raw, clock) as pages:
            await pages.get(KEY, lambda: Page("gone", 410, fields), revalidate=60)
        async with pages_at(aws, raw, clock) as pages:
            page = await pages.get(KEY, Site(clock).render, revalidate=60)
        assert (page.status, page.headers["content-security-policy"]) == (410, policy)
        told = await face.visit(KEY, Site(clock).render)
        assert (told.status, told.headers["content-type"]) == (410, HTML)
        assert "content-security-policy" not in told.headers

    @given(
        status=st.one_of(st.sampled_from(["404", "99", "600", "206", "304", "२००"]), st.text()),
        kind=st.text(),
        policy=st.text(),
        coding=st.one_of(st.none(), st.sampled_from(["gzip", "identity", "aws-chunked", "a\r\nb"])),
    )
    def test_metadata_of_other_writers_injects_no_header(
        self, status: str, kind: str, policy: str, coding: str | None
    ) -> None:
        """Whatever they say: a page of header fields that can be sent, and a status that is one."""
        about = {
            "facetheory-status": status,
            "facetheory-content-type": kind,
            "facetheory-content-security-policy": policy,
        }
        body = Body(b"x", "text/plain", '"e"', encoding=coding, metadata=about, terms=Policy(60))
        page = page_in(PageShape().inside(body))
        assert Headers(page.headers.raw) == page.headers
        assert page.status == (404 if status == "404" else 200) or 200 <= page.status <= 599
        assert page.status not in {206, 304}
        assert page.headers["content-type"] in {"text/plain", kind}
        assert page.headers.get("content-encoding") in {None, "gzip"}

    @pytest.mark.parametrize(("row", "stale_by"), [(0, 240), (60, 0)])
    def test_a_page_that_another_service_made_fresh_is_not_stale_by_its_first_age(
        self, row: int, stale_by: float
    ) -> None:
        """It came stale, and the row has the times of now."""
        body = PageShape().outside(PageCodec().encode(StoredPage(Head(stale_by=240.0), b"x")))
        head = PageCodec().decode(PageShape().inside(structs.replace(body, terms=Policy(row)))).head
        assert (head.fresh_for, head.stale_by) == (row, stale_by)


class Zipped(Site):
    """A site that compresses for those who take it; `always`, for whomever."""

    always = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = dict(scope["headers"]).get(b"accept-encoding", b"")
        self.body, self.headers = b"<p>plain</p>", [(b"content-type", b"text/html")]
        self.headers.append((b"cache-control", b"max-age=60"))
        if b"gzip" in asked or self.always:
            self.headers.append((b"content-encoding", b"gzip"))
            self.body = gzip.compress(self.body, mtime=0)
        if not self.always:
            self.headers.append((b"vary", b"Accept-Encoding"))
        await super().__call__(scope, receive, send)


class TestI18Encoded:
    @pytest.mark.parametrize("way", [in_front, as_it_says])
    async def test_encoded_forms_of_a_page_have_keys_of_their_own(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory", way: Any
    ) -> None:
        """Encoded forms lie under keys of their own, and say so; a foreign reader gets text.

        No visit is two requests: the first is given the page as it is, which all can read.
        """
        site, renders, told = Zipped(clock), list[int](), list[Any]()
        async with pages_at(aws, raw, clock) as pages:
            visit = way(site, pages)
            zipped = {"accept-encoding": "gzip"}
            for headers in (zipped, zipped, zipped, {}, {}):
                told.append(await visit(headers=headers))
                renders.append(site.renders)
        codings = [it.headers.get("content-encoding") for it in told]
        assert codings == [None, "gzip", "gzip", None, None]
        assert renders == [1, 2, 2, 2, 2]
        assert {it.text for it in told} == {"<p>plain</p>"}
        assert (await face.visit(URL, site.render)).body == b"<p>plain</p>"
        found = {}
        for row in await raw.rows():
            if row["sk"]["S"] == "META":
                stored = await raw.s3.head_object(Bucket=raw.bucket, Key=row["s3_key"]["S"])
                found[row["pk"]["S"]] = stored.get("ContentEncoding") or None
        own = cache_pk(URL, raw=True)
        assert found == {own: None, f"{own}\nvary accept-encoding: gzip": "gzip"}

    async def test_a_page_encoded_unasked_is_not_stored(
        self, aws: "Aws", raw: "Raw", clock: ManualClock
    ) -> None:
        """Others would serve its bytes as text: it goes to the visitor, and says why."""
        site = Zipped(clock)
        site.always = True
        async with pages_at(aws, raw, clock) as pages:
            told = await as_it_says(site, pages)()
            assert (told.text, told.headers["content-encoding"]) == ("<p>plain</p>", "gzip")
            assert "detail=encoded" in told.headers["cache-status"]
            coded = Page(gzip.compress(b"x"), 200, {"content-encoding": "gzip"})
            page = await pages.get(KEY, lambda: coded, revalidate=60)
            assert (page.body, page.stored) == (coded.body, False)
        assert await raw.row("META") is None

    async def test_an_encoded_object_is_served_only_to_clients_that_accept_it(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, site: Site
    ) -> None:
        """`ContentEncoding` is told; a visitor who cannot read it gets a page of ours."""
        what: dict[str, Any] = {"Bucket": raw.bucket, "Key": f"theirs/{raw.table}"}
        body = gzip.compress(b"theirs", mtime=0)
        await raw.s3.put_object(**what, Body=body, ContentEncoding="gzip", ContentType="text/html")
        row: dict[str, Any] = {"generated_at": int(clock()), "revalidate_seconds": 60}
        await raw.put(pk=cache_pk(URL), sk="META", s3_key=what["Key"], **row)
        async with pages_at(aws, raw, clock, pk="sha256") as pages:
            visit = in_front(site, pages)
            told = await visit(headers={"accept-encoding": "gzip"})
            assert (told.text, told.headers["content-encoding"]) == ("theirs", "gzip")
            assert (await visit()).text == "page 1"


class TestI20Settings:
    @pytest.mark.parametrize(
        ("ours", "pointer_prefix", "key_prefix"),
        [
            ({"s3_prefix": "isr/"}, "isr/", ""),
            ({"s3_prefix": "/isr", "s3_key": "short"}, "", "isr/"),
            ({"s3_prefix": ""}, "isr/", ""),
        ],
    )
    async def test_facetheory_and_we_find_each_others_pages(
        self,
        aws: "Aws",
        raw: "Raw",
        clock: ManualClock,
        face: "FaceTheory",
        ours: dict[str, str],
        pointer_prefix: str,
        key_prefix: str,
    ) -> None:
        """FaceTheory's default keys, with its prefix in `s3_key` or added by its S3 store."""
        face.pointer_prefix, face.key_prefix = pointer_prefix, key_prefix
        site = Site(clock)
        async with pages_at(aws, raw, clock, **ours) as pages:
            await pages.get(KEY, site.render, revalidate=60)
            assert (await face.visit(KEY, site.render)).body == b"page 1"
            other = "acme::/a?x=1#cookies=5"
            assert (await face.visit(other, site.render)).body == b"page 2"
            assert (await pages.get(other, site.render, revalidate=60)).body == b"page 2"
            assert site.renders == 2
            clock.advance(61)
            assert (await face.visit(KEY, site.render)).body == b"page 3"
            assert (await pages.get(KEY, site.render, revalidate=60)).body == b"page 3"
            pks = {row["pk"]["S"] for row in await raw.rows() if row["sk"]["S"] == "META"}
            assert pks == {f"CACHE#{KEY}", f"CACHE#{other}"}
            mine = []
            # All pages of the listing: other tests have put more than a thousand objects there.
            listing = raw.s3.get_paginator("list_objects_v2").paginate(Bucket=raw.bucket)
            async for part in listing:
                names = [listed["Key"] for listed in part["Contents"]]
                mine += [name for name in names if f"{raw.table}/" in name]
            assert all(it.startswith(ours["s3_prefix"].strip("/")) for it in mine)
            assert mine

    async def test_raw_keys_and_prefix_can_be_set_in_the_address(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """`pk=raw`, `s3_prefix=isr/`; `pk=sha256` is what it is without."""
        site = Site(clock)
        address = aws.address(raw.table, pk="raw", s3_prefix="isr/", tenant="acme")
        async with PageCache(address, clock=clock, store_timeout="30s") as pages:
            await pages.get(KEY, site.render, revalidate=60)
        row = await raw.row("META")
        assert row is not None
        assert row["pk"]["S"] == f"TENANT#acme#CACHE#{KEY}"
        assert row["s3_key"]["S"].startswith(f"isr/{raw.table}/tenant=acme/")
        face.pk_of = lambda key: f"TENANT#acme#CACHE#{key}"
        assert (await face.visit(KEY, site.render)).state == "hit"

    @pytest.mark.parametrize("option", ["pk=md5", "pk=", "s3_key=long", f"s3_prefix={'x' * 201}"])
    def test_an_unknown_key_form_in_the_address_is_refused(self, option: str) -> None:
        """In one line that says what is allowed."""
        name = option.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"{name}: must be"):
            store_for(f"dynamodb://t?bucket=b&{option}", ManualClock())

    @pytest.mark.parametrize("size", [1_500, 2_042, 2_043, 16_000])
    async def test_a_cache_key_of_any_length_works(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, size: int
    ) -> None:
        """As it stands up to DynamoDB's 2,048 bytes; beyond, where nobody else can have it, hashed.

        Its tags work too, though the row of a tag has only half that room.
        """
        site, key = Site(clock), "/" + "k" * (size - 1)
        async with pages_at(aws, raw, clock) as pages:
            for _ in range(2):
                page = await pages.get(key, site.render, revalidate=60, tags=["long"])
                assert page.body == b"page 1"
            row = await raw.row("META")
            assert row is not None
            assert (row["pk"]["S"] == f"CACHE#{key}") is (size <= 2_042)
            assert [it.id for it in await pages.cache.entries("page")] in ([key], [])
            await pages.revalidate_tag("long")
            stale = await pages.get(key, site.render, revalidate=60, tags=["long"])
            assert stale.verdict is Verdict.STALE
            await pages.settled()
            await pages.purge(key)
        assert await raw.rows() == []

    async def test_an_eviction_with_raw_keys_keeps_every_body(
        self, aws: "Aws", raw: "Raw", clock: ManualClock
    ) -> None:
        """A raw key cannot be told from a body's name: bodies without a row wait for S3's rule."""
        clock.advance(10**8)  # S3's own clock: every object is old
        site = Site(clock)
        clock.advance(10**9)
        async with pages_at(aws, raw, clock) as pages:
            await pages.get("a#x", site.render, revalidate=60)
            await pages.get("b#x", site.render, revalidate=60)
            assert await pages.cache.evict() == 0
            assert (await pages.get("a#x", site.render, revalidate=60)).body == b"page 1"
        async with pages_at(aws, raw, clock) as pages:
            assert (await pages.get("b#x", site.render, revalidate=60)).body == b"page 2"
            clock.advance(30 * 86_400)
            assert await pages.cache.evict() == 2
        listed = await raw.s3.list_objects_v2(Bucket=raw.bucket, Prefix=f"isr/{raw.table}/")
        assert (await raw.rows(), listed.get("Contents", [])) == ([], [])


class TestI20AnyText:
    @pytest.mark.parametrize("key", [KEY, "a", "page two", "urn:x", "é\n#", "s3://x", "\0\0"])
    async def test_any_text_is_a_cache_key_on_every_store(
        self, pages: PageCache, site: Site, key: str
    ) -> None:
        """On every store; `revalidate` and `purge` reach it."""
        for _ in range(2):
            assert (await pages.get(key, site.render, revalidate=60)).body == b"page 1"
        await pages.revalidate(key)
        assert (await pages.get(key, site.render, revalidate=60)).verdict is Verdict.STALE
        await pages.settled()
        assert (await pages.get(key, site.render, revalidate=60)).body == b"page 2"
        await pages.purge(key)
        assert (await pages.get(key, site.render, revalidate=60)).body == b"page 3"


class TestI20Reach:
    async def test_revalidate_reaches_a_raw_page_that_only_others_wrote(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """I21: by the cache key, in FaceTheory's own form."""
        site = Site(clock)
        await face.visit(KEY, site.render)
        async with pages_at(aws, raw, clock) as pages:
            await pages.revalidate(KEY)
            row = await raw.row("META")
            assert row is not None
            assert row["revalidate_seconds"] == {"N": "0"}
        assert (await face.visit(KEY, site.render)).body == b"page 2"


class TestI31Substitute:
    """The substitute behaves like FaceTheory 4.0.2, which was run beside it by hand."""

    async def test_facetheory_dates_a_page_by_the_start_of_its_render(
        self, clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """`generated_at` is the time before the render."""

        async def render() -> Page:
            clock.advance(3)
            return Page("slow")

        began = int(clock())
        await face.visit(KEY, render)
        row = await face.meta(KEY)
        assert row is not None
        assert row["generated_at"] == {"N": str(began)}

    @pytest.mark.parametrize("status", [200, 500, 503])
    async def test_facetheory_answers_a_failed_render_with_the_stale_page(
        self, clock: ManualClock, face: "FaceTheory", status: int
    ) -> None:
        """With 200 and `stale`, and nothing is stored; without an older page, with 500."""

        async def fail() -> Page:
            if status == 200:
                raise RuntimeError("no database")
            return Page("an error", status)

        first = await face.visit(KEY, fail)
        assert (first.status, first.state, await face.meta(KEY)) == (500, "", None)
        await face.visit(KEY, Site(clock).render)
        before = await face.meta(KEY)
        clock.advance(61)
        answer = await face.visit(KEY, fail)
        assert (answer.status, answer.state, answer.body) == (200, "stale", b"page 1")
        assert await face.meta(KEY) == before

    async def test_facetheory_answers_a_lost_lease_with_the_old_page_or_an_error(
        self, clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """The page that was rendered is not served."""

        async def too_slow() -> Page:
            clock.advance(face.lease_seconds + 1)
            return Page("too late")

        assert (await face.visit(KEY, too_slow)).status == 500
        await face.visit(KEY, Site(clock).render)
        clock.advance(61)
        answer = await face.visit(KEY, too_slow)
        assert (answer.status, answer.state, answer.body) == (200, "stale", b"page 1")

    async def test_facetheory_waits_seven_seconds_for_a_lock(
        self, clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """Then it tries once more, and answers with the old page, or with 500."""

        async def rest(pause: float) -> None:
            clock.advance(pause)

        face.sleep = rest
        face.poll_seconds = 0.5
        face.lease_seconds = 60
        assert await face.try_lease(KEY) is not None
        began = clock()
        assert (await face.visit(KEY, Site(clock).render)).status == 500
        assert clock() - began == 7
        clock.advance(60)
        await face.visit(KEY, Site(clock).render)
        clock.advance(61)
        assert await face.try_lease(KEY) is not None
        answer = await face.visit(KEY, Site(clock).render)
        assert (answer.status, answer.state, answer.body) == (200, "stale", b"page 1")

    async def test_facetheory_serves_a_page_published_while_it_waits(
        self, clock: ManualClock, face: "FaceTheory", raw: "Raw"
    ) -> None:
        """With `wait-hit`."""
        token = await face.try_lease(KEY)
        assert token is not None

        async def rest(_: float) -> None:
            await face.commit(KEY, token, Page("another's"), clock(), f"isr/{raw.table}.html")

        face.sleep = rest
        answer = await face.visit(KEY, Site(clock).render)
        assert (answer.state, answer.body) == ("wait-hit", b"another's")

    @pytest.mark.parametrize(("told", "status"), [("404", 404), ("x", 200), ("99", 200)])
    async def test_facetheory_reads_an_invalid_status_as_200(
        self, clock: ManualClock, face: "FaceTheory", raw: "Raw", told: str, status: int
    ) -> None:
        """Of an object that some service wrote."""
        key = f"isr/{raw.table}.html"
        await raw.s3.put_object(
            Bucket=raw.bucket, Key=key, Body=b"x", Metadata={"facetheory-status": told}
        )
        row: dict[str, Any] = {"generated_at": int(clock()), "revalidate_seconds": 60}
        await raw.put(pk=cache_pk(KEY, raw=True), sk="META", s3_key=key, **row)
        assert (await face.visit(KEY, Site(clock).render)).status == status

    async def test_facetheory_gives_no_freshness_to_caches(
        self, clock: ManualClock, face: "FaceTheory", raw: "Raw"
    ) -> None:
        """The same `Cache-Control` is on its objects."""
        answer = await face.visit(KEY, Site(clock).render)
        told = "public, max-age=0, s-maxage=0, stale-if-error=60, must-revalidate"
        assert answer.headers["cache-control"] == told
        row = await face.meta(KEY)
        assert row is not None
        written = await raw.s3.head_object(Bucket=raw.bucket, Key=row["s3_key"]["S"])
        assert written["CacheControl"] == told

    async def test_facetheory_refuses_an_inline_script_under_a_strict_policy(
        self, face: "FaceTheory"
    ) -> None:
        """Though it has been stored."""
        policy = {"content-security-policy": "script-src 'self'"}

        async def render() -> Page:
            return Page("<script>1</script>", 200, policy)

        assert (await face.visit(KEY, render)).status == 500
        assert (await face.visit(KEY, render)).status == 500
        assert face.renders == [KEY]

    async def test_facetheorys_default_key_has_the_query_and_digests_of_the_visitor(self) -> None:
        """As the real one wrote them for this request."""
        from tests.kit.servers.facetheory import default_key  # noqa: PLC0415 (see above)

        assert default_key("/news/{slug}", {"slug": "a"}, [("q", "1")]) == (
            "default::/news/{slug}?slug=a&q=1"
        )
        visitor = {"authorization": "x", "cookie": "a=b"}
        assert default_key("/news/{slug}", {"slug": "a"}, [("q", "1")], visitor) == (
            "default::/news/{slug}?slug=a&q=1"
            "#auth=b73e185c5e932edae7ef631e&cookies=42144f3939c3ffbbf0bf8b1f"
        )


class TestI31PagesOfOthers:
    """What FaceTheory wrote can be listed and invalidated."""

    async def test_raw_keys_are_listed_and_all_of_them_can_be_invalidated(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """By their cache keys; a page that is being rendered for the first time, too."""
        site = Site(clock)
        keys = [KEY, "default::/pricing?q=1#cookies=0123", "default::/b?"]
        for key in keys:
            await face.visit(key, site.render)
        await face.try_lease("default::/c?")
        async with pages_at(aws, raw, clock) as pages:
            listed = await pages.cache.entries("page")
            assert {entry.id for entry in listed} == {*keys, "default::/c?"}
            found = await pages.cache.entries("page", search="/pricing")
            assert {entry.id for entry in found} == set(keys[:2])
            assert await pages.cache.invalidate_all() == 4
            for key in keys:
                row = await face.meta(key)
                assert row is not None
                assert row["revalidate_seconds"] == {"N": "0"}
            assert await face.try_lease("default::/c?") is not None

    @pytest.mark.parametrize("tenant", [None, "acme"])
    async def test_hashed_keys_are_listed_by_their_rows(
        self,
        aws: "Aws",
        raw: "Raw",
        clock: ManualClock,
        face: "FaceTheory",
        tenant: str | None,
    ) -> None:
        """The cache key cannot be known, but the row can be named, invalidated and deleted."""
        site = Site(clock)
        face.pk_of = lambda key: cache_pk(key, tenant)
        await face.visit(KEY, site.render)
        listed_id = cache_pk(KEY)
        async with pages_at(aws, raw, clock, pk="sha256", tenant=tenant) as pages:
            await pages.get("/ours", site.render, revalidate=60)
            listed = await pages.cache.entries("page")
            assert {entry.id for entry in listed} == {"/ours", listed_id}
            await pages.revalidate(listed_id)
            row = await face.meta(KEY)
            assert row is not None
            assert row["revalidate_seconds"] == {"N": "0"}
            assert (await pages.get(KEY, site.render, revalidate=60)).verdict is Verdict.STALE
            await pages.settled()

    async def test_rows_of_another_tenant_are_not_listed(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """Whatever their keys are."""
        await face.visit(KEY, Site(clock).render)
        face.pk_of = lambda key: f"TENANT#acme#CACHE#{key}"
        await face.visit("default::/acme?", Site(clock).render)
        for tenant, key in [(None, KEY), ("acme", "default::/acme?"), ("other", None)]:
            async with pages_at(aws, raw, clock, tenant=tenant) as pages:
                listed = await pages.cache.entries("page")
                assert [entry.id for entry in listed] == ([] if key is None else [key])

    async def test_revalidate_reaches_every_variant_that_others_wrote(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """With `scan`: by the path, by the URL, or by FaceTheory's key without its query."""
        site = Site(clock)
        route = "default::/news/{slug}?slug=a"
        url = "https://example.com/news/a"
        meant = [route, f"{route}&q=1", f"{route}#cookies=01", f"{route}&q=1#auth=02", f"{url}?q=1"]
        others = [f"{route}b", "default::/news/{slug}?slug=b", f"{url}b", "default::/news/a/b?"]
        for key in (*meant, *others):
            await face.visit(key, site.render)
        async with pages_at(aws, raw, clock) as pages:
            assert await pages.revalidate("/news/a") == []
            assert set(await pages.revalidate("/news/a", scan=True)) == set(meant)
            assert set(await pages.revalidate(route, scan=True)) == set(meant[:4])
            assert await pages.revalidate(url, scan=True) == [f"{url}?q=1"]
            for key in (*meant, *others):
                row = await face.meta(key)
                assert row is not None
                assert row["revalidate_seconds"] == {"N": "0" if key in meant else "60"}

    async def test_a_scan_reaches_a_path_with_an_encoded_slash_and_no_real_slash(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """The two are different pages, whoever wrote them."""
        encoded = ["default::/news/{slug}?slug=a%252Fb", "https://example.com/news/a%2Fb?q=1"]
        real = ["default::/news/{path+}?path=a%2Fb", "https://example.com/news/a/b"]
        for key in (*encoded, *real):
            await face.visit(key, Site(clock).render)
        async with pages_at(aws, raw, clock) as pages:
            assert set(await pages.revalidate("/news/a%2Fb", scan=True)) == set(encoded)
            assert set(await pages.purge("/news/a/b", scan=True)) == set(real)

    @pytest.mark.parametrize(
        ("key", "address"),
        [
            ("default::/pricing?", "/pricing"),
            ("acme::/pricing?q=1#auth=01&cookies=02", "/pricing?q=1"),
            ("default::/news/{slug}?slug=a%2520b&q=1", "/news/a%20b?q=1"),
            ("default::/news/{slug}?slug=a&slug=b", "/news/a?slug=b"),
            ("default::/files/{proxy+}?proxy=a%2Fb", "/files/a/b"),
            ("default::/files/{proxy+}?proxy=a%2F", "/files/a/"),
            ("default::/files/{proxy*}?q=1", "/files?q=1"),
            ("default::/{proxy*}?", "/"),
            ("default::/news/{slug}?", None),
            ("something else", None),
            ("CACHE#" + "0" * 64, None),
        ],
    )
    def test_the_address_is_read_from_a_default_cache_key(
        self, key: str, address: str | None
    ) -> None:
        """The path as it was sent, and the query; without a parameter of the route, none."""
        assert address_in_key(key) == address


class TestI18Contention:
    async def test_one_of_32_contenders_gets_the_lease(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """Thirty rounds, half of the contenders theirs: one lease each."""
        stores = [aws.store(raw.table, clock, pk="raw") for _ in range(4)]
        for store in stores:
            await store.open()

        async def ours(number: int, key: str) -> bool:
            store = stores[number % len(stores)]
            return isinstance((await store.acquire("page", [Ask(key)], 5))[key], Lease)

        async def theirs(key: str) -> bool:
            return await face.try_lease(key) is not None

        winners = []
        for number in range(30):
            key = f"default::/{number}?"
            mixed = [it for n in range(16) for it in (ours(n, key), theirs(key))]
            winners.append(sum(await asyncio.gather(*mixed)))
        for store in stores:
            await store.close()
        assert winners == [1] * 30

    async def test_a_mixed_fleet_serves_one_page(
        self, aws: "Aws", raw: "Raw", clock: ManualClock, face: "FaceTheory"
    ) -> None:
        """Ours and theirs ask for one absent page at once: it is rendered once by us, or by them.

        Theirs may render it a second time: who wins a lease there does not look again.
        """
        site, ours = Site(clock), [pages_at(aws, raw, clock) for _ in range(3)]
        for number in range(10):
            key = f"default::/{number}?"
            asked = [it.get(key, site.render, revalidate=60) for it in ours]
            visits = [face.visit(key, site.render) for _ in range(3)]
            told: list[Any] = await asyncio.gather(*asked, *visits)
            assert all(it.status == 200 and it.body.startswith(b"page") for it in told)
            by_us = site.renders - len(face.renders)
            assert by_us <= number + 1
            last = await face.stored(await face.record(key), "hit")
            assert last is not None
            pages = await asyncio.gather(*(it.get(key, site.render, revalidate=60) for it in ours))
            assert {page.body for page in pages} == {last.body}
            clock.advance(1)
        for it in ours:
            await it.close()
