"""I2, I8: pages on DynamoDB and S3, where services in other languages read and write them too."""

from collections.abc import AsyncIterator
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from stillfresh import Verdict
from stillfresh.pages import FaceTheoryCacheLease, FaceTheoryCacheMetadata, PageCache
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, in_front

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws, Raw

PK = "CACHE#" + sha256(b"/pricing").hexdigest()


@pytest.fixture
async def table(aws: "Aws") -> str:
    return aws.new_table()


@pytest.fixture
async def shelf(aws: "Aws", table: str, clock: ManualClock) -> AsyncIterator[PageCache]:
    async with PageCache(aws.store(table, clock), clock=clock, store_timeout="30s") as pages:
        yield pages


@pytest.fixture
async def raw(aws: "Aws", table: str) -> AsyncIterator["Raw"]:
    async with aws.raw(table) as raw:
        yield raw


class TestI2Pages:
    async def test_a_page_is_stored_as_the_shared_schema_says(
        self, shelf: PageCache, site: Site, raw: "Raw"
    ) -> None:
        """The body as it is in S3, its ETag in the row, and no more than the schema asks for."""
        page = await shelf.get("/pricing", site.render, revalidate=60)
        item = await raw.row("META")
        assert item is not None
        meta = FaceTheoryCacheMetadata.from_item(item)
        assert meta is not None
        assert (meta.pk, meta.revalidate_seconds, meta.etag) == (PK, 60, page.etag)
        stored = await raw.s3.get_object(Bucket=raw.bucket, Key=meta.s3_key)
        async with stored["Body"] as stream:
            assert await stream.read() == b"page 1"
        assert stored["ContentType"] == "text/html"

    async def test_a_page_that_another_library_wrote_is_served(
        self, shelf: PageCache, site: Site, raw: "Raw", clock: ManualClock
    ) -> None:
        """Status 200, the object's content type, its ETag unchanged; then it is stale like ours."""
        await raw.put_object("theirs/1", b"from Go")
        row = {"generated_at": int(clock()), "revalidate_seconds": 60}
        await raw.put(pk=PK, sk="META", s3_key="theirs/1", etag='W/"theirs"', **row)
        page = await shelf.get("/pricing", site.render, revalidate=60)
        assert (page.status, page.body, page.etag) == (200, b"from Go", 'W/"theirs"')
        assert page.headers["content-type"] == "text/html"
        assert (page.verdict, site.renders) == (Verdict.FRESH, 0)
        clock.advance(61)
        page = await shelf.get("/pricing", site.render, revalidate=60)
        assert (page.body, page.verdict) == (b"from Go", Verdict.STALE)

    async def test_the_middleware_works_on_dynamodb(self, shelf: PageCache, site: Site) -> None:
        """The middleware on DynamoDB: one render, served, revalidated, purged."""
        visit = in_front(site, shelf)
        assert [(await visit()).text for _ in range(2)] == ["page 1"] * 2
        await shelf.revalidate("/pricing")
        assert (await visit()).headers["cache-status"] == "stillfresh; hit; ttl=0"
        await shelf.purge("/pricing")
        assert (await visit()).text != "page 1"

    async def test_a_row_whose_body_is_missing_in_s3_is_a_miss(
        self, shelf: PageCache, site: Site, raw: "Raw", clock: ManualClock
    ) -> None:
        """I8: rendered, not a crash."""
        row = {"generated_at": int(clock()), "revalidate_seconds": 60}
        await raw.put(pk=PK, sk="META", s3_key="nowhere", **row)
        assert (await shelf.get("/pricing", site.render, revalidate=60)).body == b"page 1"

    def test_the_schemas_records_can_be_imported(self) -> None:
        """I2: `isr` shows the records that others know."""
        assert FaceTheoryCacheLease.__name__ == "FaceTheoryCacheLease"
