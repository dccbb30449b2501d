"""D3: pages that are compressed or encrypted in the store."""

from typing import TYPE_CHECKING, Any

import pytest

from stillfresh import CodecMaker, ConfigError, Verdict, encrypted, new_key, zstd
from stillfresh.pages import PageCache
from stillfresh.stores.contract import Store
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, in_front

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws

KEY = new_key()
MAKERS: dict[str, CodecMaker] = {"zstd": zstd(above=0), "encrypted": encrypted(KEY, zstd())}


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> CodecMaker:
    return MAKERS[request.param]


@pytest.fixture(params=["memory", "sqlite", "dynamodb"])
def place(request: pytest.FixtureRequest, tmp_path: Any, clock: ManualClock) -> str | Store:
    if request.param == "dynamodb":
        aws: Aws = request.getfixturevalue("aws")
        return aws.store(aws.new_table(), clock)
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/pages.db"


async def stored_bytes(pages: PageCache, path: str) -> bytes:
    store = await pages.cache.store()
    ids = [entry.id for entry in await pages.cache.entries()] or [path]
    record = (await store.read("page", ids))[ids[0]]
    assert record.copy is not None
    assert isinstance(record.copy.value, bytes)
    return record.copy.value


class TestD3Pages:
    async def test_a_page_is_stored_changed_and_served_as_it_was(
        self, place: str | Store, clock: ManualClock, site: Site, maker: CodecMaker
    ) -> None:
        async with PageCache(place, clock=clock, codec=maker) as pages:
            visit = in_front(site, pages)
            assert [(await visit()).text for _ in range(3)] == ["page 1"] * 3
            data = await stored_bytes(pages, "/pricing")
            assert data.startswith(b"\xc1sf")
            assert maker is MAKERS["zstd"] or b"page 1" not in data
            assert (await visit()).headers["cache-status"].startswith("stillfresh; hit")
        assert site.renders == 1

    async def test_another_process_with_the_key_serves_the_page(
        self, tmp_path: Any, clock: ManualClock, site: Site, maker: CodecMaker
    ) -> None:
        url = f"sqlite:///{tmp_path}/pages.db"
        for _ in range(2):
            async with PageCache(url, clock=clock, codec=maker) as pages:
                page = await pages.get("/a", site.render, revalidate=60)
                assert (page.body, page.verdict) == (b"page 1", Verdict.FRESH)
        assert site.renders == 1

    @pytest.mark.parametrize("reader", ["another key", "no codec"])
    async def test_a_page_that_cannot_be_read_is_rendered_again(
        self,
        tmp_path: Any,
        clock: ManualClock,
        site: Site,
        reader: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        url = f"sqlite:///{tmp_path}/pages.db"
        async with PageCache(url, clock=clock, codec=encrypted(KEY)) as pages:
            await pages.get("/a", site.render, revalidate=60)
        other = encrypted(new_key()) if reader == "another key" else None
        async with PageCache(url, clock=clock, codec=other) as pages:
            for _ in range(2):
                page = await pages.get("/a", site.render, revalidate=60)
                assert page.body == b"page 2"
        assert len(caplog.records) == 1

    def test_a_codec_that_does_not_know_pages_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"codec: pages have zstd\(\) or encrypted\(keys\)"):
            PageCache("memory://", codec=object())  # type: ignore[arg-type]
