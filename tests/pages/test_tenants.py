"""I17: a tenant is the same on every store, and in whichever of three ways it is named."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stillfresh import Cache, ConfigError
from stillfresh.gateway.config import settings_of
from stillfresh.gateway.sources import page_cache_of
from stillfresh.pages import PageCache
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, in_front

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws
    from tests.kit.servers.valkey import Server

HASH = sha256(b"/pricing").hexdigest()
CONFLICTS = [
    "memory://?tenant=acme",
    "sqlite:///pages.db?tenant=acme",
    "redis://localhost/0?tenant=acme",
    "dynamodb://t?bucket=b&tenant=acme",
]


def with_tenant(address: str, tenant: str) -> str:
    return f"{address}{'&' if '?' in address else '?'}tenant={tenant}"


def served(address: str, tenant: str) -> PageCache:
    """The page cache of `stillfresh serve --store ADDRESS --tenant TENANT`."""
    pages = {"upstream": "http://site.test", "tenant": tenant}
    settings = settings_of({"store": {"url": address}, "pages": pages}, {})
    assert settings.pages is not None
    return page_cache_of(settings.pages, settings.store)


@pytest.fixture(params=["sqlite", "redis", "dynamodb"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/pages.db"
    if request.param == "redis":
        server: Server = request.getfixturevalue("valkey")
        return f"redis://127.0.0.1:{server.port}/0?prefix={tmp_path.name}-{tmp_path.parent.name}"
    aws: Aws = request.getfixturevalue("aws")
    return aws.address(aws.new_table())


class TestI17Tenant:
    async def test_three_ways_to_name_a_tenant_reach_the_same_pages(
        self, address: str, site: Site
    ) -> None:
        """`tenant=`, `serve --tenant` and `?tenant=` in the address: one render for all three."""
        slow: dict[str, Any] = {"store_timeout": "30s"}
        async with (
            PageCache(address, tenant="acme", **slow) as by_argument,
            PageCache(with_tenant(address, "acme"), **slow) as by_address,
            served(address, "acme") as by_command,
            PageCache(with_tenant(address, "acme"), tenant="acme", **slow) as by_both,
        ):
            caches = (by_argument, by_address, by_command, by_both)
            bodies = [(await it.get("/x", site.render, revalidate=600)).body for it in caches]
            assert bodies == [b"page 1"] * 4

    async def test_pages_and_purges_of_tenants_are_separate_on_every_store(
        self, address: str, site: Site
    ) -> None:
        """Pages, revalidations, purges and listings of one tenant are of no concern to another."""
        site.says("Vary: Accept-Language")
        slow: dict[str, Any] = {"store_timeout": "30s"}
        async with (
            PageCache(address, tenant="a", **slow) as one,
            PageCache(with_tenant(address, "b"), **slow) as two,
            PageCache(address, **slow) as none,
        ):
            texts = [
                (await in_front(site, pages)(headers=headers)).text
                for pages in (one, two, none) * 2
                for headers in ({}, {"accept-language": "de"})
            ]
            assert texts == [f"page {number}" for number in range(1, 7)] * 2
            await one.revalidate("/pricing")
            await one.purge("/pricing")
            told = await in_front(site, two)()
            assert (told.text, told.headers["cache-status"][:15]) == ("page 3", "stillfresh; hit")
            listed = await two.cache.entries("page")
            assert len(listed) == 2
            assert all("#" not in it.id and "pricing" in it.id for it in listed)
            assert await one.cache.entries("page") == []

    @pytest.mark.parametrize("url", CONFLICTS)
    def test_two_tenants_at_once_are_a_mistake(self, url: str) -> None:
        """Which of them was meant cannot be guessed; the error names both."""
        with pytest.raises(ConfigError, match=r"tenant: .*'acme'.* 'other'"):
            PageCache(url, tenant="other")
        with pytest.raises(ConfigError, match=r"pages\.tenant.* 'acme'.* 'other'"):
            served(url, "other")

    @pytest.mark.parametrize("url", CONFLICTS)
    @pytest.mark.parametrize("bad", ["", "a%23b", "x" * 201, "a&tenant=b"])
    def test_an_address_with_an_invalid_tenant_is_refused(self, url: str, bad: str) -> None:
        """By one rule, whatever the store."""
        with pytest.raises(ConfigError, match=r"tenant|takes each once"):
            Cache(url.replace("acme", bad))

    async def test_a_store_object_takes_a_tenant_unless_it_has_one(
        self, clock: ManualClock, site: Site, aws: "Aws"
    ) -> None:
        """One that has its own tenant already takes no other."""
        makes: list[Callable[[], Any]] = [
            lambda: MemoryStore(clock=clock),
            lambda: aws.store(aws.new_table(), clock),
        ]
        for store in (make() for make in makes):
            slow: dict[str, Any] = {"clock": clock, "store_timeout": "30s"}
            async with (
                PageCache(store, tenant="a", **slow) as one,
                PageCache(store, tenant="b", **slow) as two,
            ):
                for pages, body in ((one, b"page 1"), (two, b"page 2"), (one, b"page 1")):
                    page = await pages.get("/x", site.render, revalidate=60)
                    assert page.body == body
            site.scopes.clear()
        with pytest.raises(ConfigError, match=r"tenant: .*'acme'"):
            PageCache(aws.store("t", clock, tenant="acme"), tenant="b")


class TestI17Rows:
    async def test_all_three_ways_to_name_a_tenant_write_the_same_row_key(
        self, aws: "Aws", site: Site
    ) -> None:
        """`TENANT#acme#CACHE#<hash of the cache key>`, literally; tags stand behind it too."""
        table = aws.new_table()
        address = aws.address(table)
        for pages in (
            PageCache(address, tenant="acme", store_timeout="30s"),
            PageCache(with_tenant(address, "acme"), store_timeout="30s"),
            served(address, "acme"),
        ):
            async with pages, aws.raw(table) as raw:
                await pages.get("/pricing", site.render, revalidate=600)
                rows = await raw.rows()
                found = {row["pk"]["S"] for row in rows if row["sk"]["S"] == "META"}
                assert found == {f"TENANT#acme#CACHE#{HASH}"}
                assert all(row["pk"]["S"].startswith("TENANT#acme#") for row in rows)
                await pages.purge("/pricing")

    async def test_a_page_that_another_library_wrote_for_a_tenant_is_served(
        self, aws: "Aws", site: Site, clock: ManualClock
    ) -> None:
        """It wrote `TENANT#acme#CACHE#<hash>`; no other tenant is served that page."""
        table = aws.new_table()
        async with aws.raw(table) as raw:
            await raw.put_object("theirs/acme", b"from Go")
            row: dict[str, Any] = {"generated_at": int(clock()), "revalidate_seconds": 60}
            pk = f"TENANT#acme#CACHE#{HASH}"
            await raw.put(pk=pk, sk="META", s3_key="theirs/acme", **row)
            for tenant, body in (("acme", b"from Go"), ("other", b"page 1"), (None, b"page 2")):
                store = aws.store(table, clock)
                slow: dict[str, Any] = {"clock": clock, "store_timeout": "30s"}
                async with PageCache(store, tenant=tenant, **slow) as pages:
                    page = await pages.get("/pricing", site.render, revalidate=60)
                    assert page.body == body
