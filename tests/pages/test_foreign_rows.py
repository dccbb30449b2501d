"""I19, I21: rows that services in other languages wrote, or changed, in the table we share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from stillfresh import ConfigError, Verdict
from stillfresh.pages import PageCache
from stillfresh.stores.contract import Ask, Held, Lease
from stillfresh.stores.urls import store_for
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, in_front

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws, Raw

URL = "http://example.com/pricing"


def pk_of(key: str) -> str:
    return "CACHE#" + sha256(key.encode()).hexdigest()


class Shared:
    """A table that a page cache of ours shares with others."""

    def __init__(self, aws: "Aws", raw: "Raw", clock: ManualClock, site: Site) -> None:
        self.aws = aws
        self.raw = raw
        self.clock = clock
        self.site = site

    @asynccontextmanager
    async def pages(self, **options: Any) -> AsyncIterator[PageCache]:
        store = self.aws.store(self.raw.table, self.clock)
        given: dict[str, Any] = {"clock": self.clock, "store_timeout": "30s", **options}
        async with PageCache(store, **given) as pages:
            yield pages

    async def put(self, body: bytes = b"theirs", *, key: str = "/pricing", **more: Any) -> None:
        """Another library's page, as TableTheory writes it."""
        await self.raw.put_object("theirs/1", body, "text/plain")
        times: dict[str, Any] = {"generated_at": int(self.clock()), "revalidate_seconds": 60}
        row: dict[str, Any] = {"s3_key": "theirs/1", **times, **more}
        await self.raw.put(pk=pk_of(key), sk="META", **row)

    async def update(self, key: str = "/pricing", **attributes: str | int) -> None:
        """Another library's UpdateItem: what it does not name stays as it was."""
        await self.raw.dynamodb.update_item(
            TableName=self.raw.table,
            Key={"pk": {"S": pk_of(key)}, "sk": {"S": "META"}},
            UpdateExpression="SET " + ", ".join(f"#{it} = :{it}" for it in attributes),
            ExpressionAttributeNames={f"#{it}": it for it in attributes},
            ExpressionAttributeValues={
                f":{name}": {"S": value} if isinstance(value, str) else {"N": str(value)}
                for name, value in attributes.items()
            },
        )

    async def lease(self, end: int) -> None:
        """Another library is rendering, until then."""
        row: dict[str, Any] = {"lease_token": "theirs", "lease_expires_at": end}
        await self.raw.put(pk=pk_of("/pricing"), sk="LOCK", **row)

    async def meta(self) -> dict[str, Any]:
        row = await self.raw.row("META")
        assert row is not None
        return row


@pytest.fixture
async def shared(aws: "Aws", clock: ManualClock, site: Site) -> AsyncIterator[Shared]:
    table = aws.new_table()
    async with aws.raw(table) as raw:
        yield Shared(aws, raw, clock, site)


class TestI19Extra:
    @pytest.mark.parametrize("with_time", [True, False])
    async def test_an_update_by_another_library_is_served_with_its_own_headers(
        self, shared: Shared, *, with_time: bool
    ) -> None:
        """Its body, ETag and type are served, with nothing of the page that we had written."""
        shared.site.says("Content-Type: text/html", "X-Ours: yes", 'ETag: "ours"', status=404)
        async with shared.pages() as pages:
            assert (await pages.get("/pricing", shared.site.render, revalidate=60)).status == 404
            await shared.raw.put_object("theirs/2", b"theirs", "text/plain")
            time: dict[str, Any] = {"generated_at": int(shared.clock()) + 1} if with_time else {}
            shared.clock.advance(len(time))
            await shared.update(s3_key="theirs/2", etag='"theirs"', **time)
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
        assert (page.status, page.body, page.etag) == (200, b"theirs", '"theirs"')
        assert dict(page.headers) == {"content-type": "text/plain", "etag": '"theirs"'}

    async def test_a_changed_etag_on_our_row_is_another_page(self, shared: Shared) -> None:
        """The body was replaced in its place: memory and our own headers are of the page before."""
        async with shared.pages() as pages:
            shared.site.says("Content-Type: text/html", "X-Ours: yes", status=404)
            await pages.get("/pricing", shared.site.render, revalidate=60)
            s3_key = (await shared.meta())["s3_key"]["S"]
            await shared.raw.put_object(s3_key, b"theirs, and longer", "text/plain")
            await shared.update(etag='"theirs"')
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
        assert (page.status, page.body, page.etag) == (200, b"theirs, and longer", '"theirs"')
        assert "x-ours" not in page.headers

    @pytest.mark.parametrize("etag", ["a\r\nSet-Cookie: x=1", "\u2603", "a\x00b", "\x7f"])
    async def test_an_invalid_etag_in_a_row_is_dropped(self, shared: Shared, etag: str) -> None:
        """The page is served all the same."""
        await shared.put(etag=etag)
        await shared.put(etag=etag, key=URL)
        async with shared.pages() as pages:
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
            assert (page.body, page.etag) == (b"theirs", None)
            told = await in_front(shared.site, pages)()
        assert (told.text, told.headers.get("etag")) == ("theirs", None)
        assert "set-cookie" not in told.headers


class TestI19Terms:
    async def test_a_foreign_stale_page_is_rendered_first_if_stale_for_is_zero(
        self, shared: Shared
    ) -> None:
        """A foreign page that is stale is rendered before the visitor is answered."""
        await shared.put()
        async with shared.pages(stale_for=0) as pages:
            shared.clock.advance(61)
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
        assert (page.body, page.verdict) == (b"page 1", Verdict.FRESH)

    async def test_a_foreign_page_stale_for_too_long_is_not_served(self, shared: Shared) -> None:
        """Up to `stale_for` past its time it is served at once; then it is rendered first."""
        for late, body in ((0, b"theirs"), (1, b"page")):
            await shared.put()
            async with shared.pages(stale_for=100, error_for=50) as pages:
                shared.clock.advance(60 + 99 + late)
                page = await pages.get("/pricing", shared.site.render, revalidate=60)
                assert page.body.startswith(body)

    async def test_a_foreign_page_is_served_within_error_for_if_the_render_fails(
        self, shared: Shared
    ) -> None:
        """A render that fails falls back to it, by the cache's own terms."""
        shared.site.error = RuntimeError("down")
        await shared.put()
        shared.clock.advance(61)
        async with shared.pages(stale_for=0, error_for=1) as pages:
            with pytest.raises(RuntimeError):
                await pages.get("/pricing", shared.site.render, revalidate=60)
        shared.clock.advance(60)
        async with shared.pages(stale_for=0, error_for=1000) as pages:
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
            assert page.body == b"theirs"

    async def test_a_foreign_rows_interval_is_in_cache_control(self, shared: Shared) -> None:
        """`Cache-Control` and `Cache-Status; ttl` come from `revalidate_seconds`.

        I31: nothing allows caches between us and the visitor to serve it stale.
        """
        await shared.put(key=URL, revalidate_seconds=30)
        async with shared.pages(stale_for=100) as pages:
            visit = in_front(shared.site, pages)
            shared.clock.advance(10)
            told = await visit()
            assert (told.text, told.headers["age"]) == ("theirs", "10")
            assert told.headers["cache-status"] == "stillfresh; hit; ttl=20"
            assert told.headers["cache-control"] == "public, max-age=0, s-maxage=30"

    async def test_a_foreign_objects_cache_control_is_passed_on(self, shared: Shared) -> None:
        """I31: what the other service says to caches, in its own words; our ttl is of the row."""
        await shared.put(key=URL, revalidate_seconds=30)
        words = "public, max-age=1, s-maxage=2, stale-if-error=30"
        await shared.raw.s3.put_object(
            Bucket=shared.raw.bucket, Key="theirs/1", Body=b"theirs", CacheControl=words
        )
        async with shared.pages(stale_for=100) as pages:
            visit = in_front(shared.site, pages)
            shared.clock.advance(10)
            told = await visit()
            assert (told.text, told.headers["cache-control"]) == ("theirs", words)
            assert told.headers["cache-status"] == "stillfresh; hit; ttl=20"
            known = await visit(headers={"authorization": "Bearer x"})
            assert known.text == "page 1"  # `public` there is every page's, and decides nothing
            await pages.revalidate(URL)
            old = await visit()
            assert (old.text, old.headers["cache-control"]) == (
                "theirs",
                "public, max-age=0, s-maxage=0",
            )
            await pages.settled()

    async def test_an_interval_that_another_changed_on_our_row_counts(self, shared: Shared) -> None:
        """Also for what memory holds already."""
        async with shared.pages() as pages:
            visit = in_front(shared.site, pages)
            assert "s-maxage=60" in (await visit()).headers["cache-control"]
            await shared.update(key=URL, revalidate_seconds=20)
            told = await visit()
            assert "s-maxage=20" in told.headers["cache-control"]
            assert (told.text, told.headers["cache-status"]) == (
                "page 1",
                "stillfresh; hit; ttl=20",
            )


class TestI19Bodies:
    async def test_a_stored_body_shorter_than_its_size_is_a_miss(self, shared: Shared) -> None:
        """Cut short in S3: rendered, not served."""
        async with shared.pages() as pages:
            await pages.get("/pricing", shared.site.render, revalidate=60)
            await shared.raw.put_object((await shared.meta())["s3_key"]["S"], b"pag")
        async with shared.pages() as pages:
            assert (await pages.get("/pricing", shared.site.render, revalidate=60)).body == (
                b"page 2"
            )

    async def test_a_body_size_left_by_us_is_ignored_for_a_foreign_body(
        self, shared: Shared
    ) -> None:
        """An update that leaves `body_size` behind brings a shorter page."""
        async with shared.pages() as pages:
            await pages.get("/pricing", shared.site.render, revalidate=60)
            await shared.raw.put_object("theirs/2", b"new")
            await shared.update(s3_key="theirs/2")
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
            assert page.body == b"new"

    @pytest.mark.parametrize(
        ("pointer", "body"),
        [
            ("s3://pages/theirs/1", b"theirs"),
            ("s3://{other}/theirs/1", b"page 1"),
            ("s3://pages", b"page 1"),
            ("s3://pages/", b"page 1"),
            ("s3:///theirs/1", b"page 1"),
        ],
    )
    async def test_a_pointer_to_a_body_is_followed_only_within_our_bucket(
        self, shared: Shared, pointer: str, body: bytes
    ) -> None:
        """`s3://bucket/key`; whoever writes a row does not choose the bucket that we read."""
        other = shared.raw.table
        where = {"LocationConstraint": "eu-central-1"}
        await shared.raw.s3.create_bucket(Bucket=other, CreateBucketConfiguration=where)
        await shared.raw.s3.put_object(Bucket=other, Key="theirs/1", Body=b"elsewhere")
        await shared.put(s3_key=pointer.format(other=other))
        async with shared.pages() as pages:
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
            assert page.body == body

    @pytest.mark.parametrize("form", ["{}", "s3://pages/{}"])
    async def test_a_row_cannot_point_to_another_tenants_body(
        self, shared: Shared, form: str
    ) -> None:
        """Nor to one of ours that was written for another row."""
        async with shared.pages(tenant="rich") as pages:
            await pages.get("/secret", shared.site.render, revalidate=60)
        secret = (await shared.meta())["s3_key"]["S"]
        await shared.put(s3_key=form.format(secret))
        async with shared.pages() as pages:
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
        assert page.body == b"page 2"

    @pytest.mark.parametrize("form", ["{}", "s3://pages/{}"])
    async def test_purging_a_row_deletes_no_other_rows_body(
        self, shared: Shared, form: str
    ) -> None:
        """Somebody made it point there; the purge deletes the row and only its own body."""
        async with shared.pages(tenant="a") as pages:
            await pages.get("/kept", shared.site.render, revalidate=60)
            key = (await shared.meta())["s3_key"]["S"]
            row: dict[str, Any] = {"generated_at": 1, "revalidate_seconds": 60}
            pk = f"TENANT#a#{pk_of('/pricing')}"
            await shared.raw.put(pk=pk, sk="META", s3_key=form.format(key), **row)
            await pages.purge("/pricing")
            shared.clock.advance(1_000)
        assert await shared.raw.objects() == {key}

    async def test_an_eviction_keeps_a_body_that_a_pointer_names(self, shared: Shared) -> None:
        """Another library wrote our own pointer in the form `s3://bucket/key`."""
        async with shared.pages(stale_for="36500d") as pages:
            await pages.get("/pricing", shared.site.render, revalidate=60)
            key = (await shared.meta())["s3_key"]["S"]
            await shared.update(s3_key=f"s3://{shared.raw.bucket}/{key}")
            shared.clock.advance(20 * 366 * 86_400)
            await pages.cache.evict()
            assert key in await shared.raw.objects()


class TestI19PointerSwap:
    """TableTheory's second recipe: META names the row of the current version."""

    async def point(self, shared: Shared, body: bytes = b"version 7", **version: Any) -> None:
        await shared.raw.put_object("theirs/7", body, "text/plain")
        times: dict[str, Any] = {"generated_at": int(shared.clock()), "revalidate_seconds": 60}
        row: dict[str, Any] = {"s3_key": "theirs/7", "etag": '"7"', **times, **version}
        for key in ("/pricing", URL):
            await shared.raw.put(pk=pk_of(key), sk="META", current_sk="VER#7", version=3)
            await shared.raw.put(pk=pk_of(key), sk="VER#7", **row)

    async def test_a_version_that_a_pointer_names_is_served(self, shared: Shared) -> None:
        """With the version's body, ETag, age and interval."""
        await self.point(shared)
        async with shared.pages() as pages:
            shared.clock.advance(5)
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
            told = await in_front(shared.site, pages)()
        assert (page.body, page.etag, page.age) == (b"version 7", '"7"', 5.0)
        assert page.verdict is Verdict.FRESH
        assert told.headers["cache-status"] == "stillfresh; hit; ttl=55"

    @pytest.mark.parametrize("late", [61, 10**7])
    async def test_a_row_with_a_pointer_is_never_overwritten(
        self, shared: Shared, late: int
    ) -> None:
        """Stale or gone: our render is served and not stored; every row is as it was."""
        await self.point(shared)
        before = await shared.raw.rows()
        async with shared.pages(stale_for=100, error_for=100) as pages:
            shared.clock.advance(late)
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
            assert page.body == (b"version 7" if late == 61 else b"page 1")
        assert await shared.raw.rows() == before

    async def test_a_pointer_that_appears_during_a_render_stays(self, shared: Shared) -> None:
        """The publication of what was begun before it is refused."""
        async with shared.pages() as pages:

            async def render() -> Any:
                await self.point(shared)
                return await shared.site.render()

            await pages.get("/pricing", render, revalidate=60)
            found = [row for row in await shared.raw.rows() if row["sk"]["S"] == "META"]
            assert [row.get("current_sk") for row in found] == [{"S": "VER#7"}] * 2
            assert not [row for row in found if "s3_key" in row]

    @pytest.mark.parametrize("current", ["VER#gone", "LOCK", "META"])
    async def test_a_pointer_to_nothing_is_a_miss_and_left_alone(
        self, shared: Shared, current: str
    ) -> None:
        """Rendered for the visitor."""
        await shared.raw.put(pk=pk_of("/pricing"), sk="META", current_sk=current)
        before = await shared.raw.rows()
        async with shared.pages() as pages:
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
        assert page.body == b"page 1"
        assert await shared.raw.rows() == before

    async def test_revalidate_marks_the_version_that_the_pointer_names(
        self, shared: Shared
    ) -> None:
        """I21: `revalidate_seconds` becomes zero where it stands; the pointer is as it was."""
        await self.point(shared)
        pointer = await shared.meta()
        async with shared.pages() as pages:
            await pages.revalidate("/pricing")
            page = await pages.get("/pricing", shared.site.render, revalidate=60)
            assert page.verdict is Verdict.STALE
        rows = {(it["pk"]["S"], it["sk"]["S"]): it for it in await shared.raw.rows()}
        assert rows[pk_of("/pricing"), "VER#7"]["revalidate_seconds"] == {"N": "0"}
        assert pointer in rows.values()


class TestI19Leases:
    @pytest.mark.parametrize(("length", "is_held"), [(600, True), (900, True), (906, False)])
    async def test_a_foreign_lease_of_up_to_a_quarter_hour_is_held(
        self, shared: Shared, *, length: int, is_held: bool
    ) -> None:
        """Up to a quarter of an hour; further away it is from before a clock was set back."""
        end = int(shared.clock()) + length
        await shared.lease(end)
        store = shared.aws.store(shared.raw.table, shared.clock)
        await store.open()
        grant = (await store.acquire("page", [Ask("/pricing")], 5))["/pricing"]
        await store.close()
        assert isinstance(grant, Held if is_held else Lease)

    async def test_max_lease_in_the_address_limits_foreign_leases(self, shared: Shared) -> None:
        """For services that lease for longer, or never for so long."""
        end = int(shared.clock()) + 3000
        await shared.lease(end)
        for max_lease, kind in (("1h", Held), ("10s", Lease)):
            address = shared.aws.address(shared.raw.table, max_lease=max_lease)
            store = store_for(address, shared.clock)
            await store.open()
            grant = (await store.acquire("page", [Ask("/pricing")], 5))["/pricing"]
            await store.close()
            assert isinstance(grant, kind)
        with pytest.raises(ConfigError, match="max_lease"):
            store_for("dynamodb://t?bucket=b&max_lease=soon", shared.clock)

    async def test_no_page_is_rendered_during_a_long_foreign_lease(self, shared: Shared) -> None:
        """Stale pages are served while another service, with a lease of ten minutes, renders."""
        await shared.put()
        shared.clock.advance(61)
        end = int(shared.clock()) + 600
        await shared.lease(end)
        async with shared.pages() as pages:
            for _ in range(3):
                page = await pages.get("/pricing", shared.site.render, revalidate=60)
                assert (page.body, page.verdict) == (b"theirs", Verdict.STALE)
            stats = await pages.stats()
            assert stats.resources["page"].leases_denied == 0
        assert shared.site.renders == 0


class TestI21Revalidate:
    @pytest.mark.parametrize(
        ("path", "key"),
        [
            ("/pricing", "/pricing"),
            ("/caf%C3%A9", "/café"),
            (URL, URL),
            ("HTTP://Example.com:80/pricing", URL),
        ],
    )
    async def test_revalidate_reaches_a_page_that_only_others_wrote(
        self, shared: Shared, path: str, key: str
    ) -> None:
        """No tag row of ours names it: its key does."""
        await shared.put(key=key)
        async with shared.pages() as pages:
            await pages.revalidate(path)
            assert (await shared.meta())["revalidate_seconds"] == {"N": "0"}
            page = await pages.get(key, shared.site.render, revalidate=60)
            assert (page.body, page.verdict) == (b"theirs", Verdict.STALE)

    async def test_revalidate_voids_the_lease_of_another_library(self, shared: Shared) -> None:
        """The law holds for a lease that another library took, too."""
        await shared.put()
        await shared.lease(int(shared.clock()) + 600)
        async with shared.pages() as pages:
            await pages.revalidate("/pricing")
        assert await shared.raw.row("LOCK") is None
