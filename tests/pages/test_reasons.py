"""I28: a request that passed uncached says why, and is counted by that reason."""

from pathlib import Path
from typing import Any

import pytest

from stillfresh.http.sharing import Reason
from stillfresh.pages import PageCache, Route
from tests.kit.isr import Site, as_it_says, in_front

ROOT = Path(__file__).parents[2]
COOKIE = {"cookie": "a=1"}
KEY = {"authorization": "Basic x"}
FRESH = "Cache-Control: max-age=60"
BIG = {"x-big": "a" * 9_000}


def detail(answer: Any) -> str:
    """The reason in `Cache-Status`, or nothing."""
    return str(answer.headers["cache-status"]).partition("detail=")[2]


class TestI28Reasons:
    @pytest.mark.parametrize(
        ("says", "headers", "reason"),
        [
            ([], {}, "no-freshness"),
            ([FRESH, "Set-Cookie: a=1"], {}, "set-cookie"),
            (["Cache-Control: private"], {}, "private"),
            (["Cache-Control: no-store"], {}, "private"),
            ([FRESH, "Vary: *"], {}, "vary"),
            ([FRESH, "Vary: Cookie"], COOKIE, "cookie"),
            ([FRESH], COOKIE, "cookie"),
            ([FRESH], KEY, "authorization"),
            ([FRESH], {"x-api-key": "1"}, "authorization"),
            ([FRESH], {"range": "bytes=0-1,4-5"}, "range"),
            ([FRESH], BIG, "headers"),
            ([FRESH], {"cache-control": "no-store"}, "no-store"),
            ([FRESH], {"if-match": '"a"'}, "condition"),
            ([FRESH, "Content-Type: text/event-stream"], {}, "stream"),
            ([FRESH, "Content-Length: 2000000"], {}, "size"),
        ],
    )
    async def test_every_bypass_without_a_route_has_its_reason(
        self, pages: PageCache, site: Site, says: list[str], headers: dict[str, str], reason: str
    ) -> None:
        """At the first visit, when the answer tells, and at the next, when it is known before."""
        site.says(*says)
        visit = as_it_says(site, pages)
        told = [detail(await visit(headers=headers)) for _ in range(2)]
        assert told == [reason] * 2
        assert pages.bypassed() == {reason: 2}

    @pytest.mark.parametrize(
        ("says", "headers", "reason"),
        [
            (["Set-Cookie: a=1"], {}, "set-cookie"),
            (["Cache-Control: private"], COOKIE, "private"),
            ([], KEY, "authorization"),
            (["Vary: Cookie"], COOKIE, "vary"),
        ],
    )
    async def test_every_bypass_under_a_route_has_its_reason(
        self, pages: PageCache, site: Site, says: list[str], headers: dict[str, str], reason: str
    ) -> None:
        """By its key, too."""
        site.says(*says)
        visit = in_front(site, pages)
        assert [detail(await visit(headers=headers)) for _ in range(2)] == [reason] * 2
        assert pages.bypassed() == {reason: 2}

    async def test_methods_hosts_and_paths_that_are_not_cached_have_a_reason(
        self, pages: PageCache, site: Site
    ) -> None:
        """Methods, hosts, paths, and paths that no route names."""
        visit = in_front(site, pages, hosts=["example.com"], routes={"/a/*": "60s"})
        told = [
            detail(await visit("/a/b", method="POST")),
            detail(await visit("/a/b", method="OPTIONS")),
            detail(await visit("/a/b", headers={"host": "evil.example"})),
            detail(await visit("/a/%2e%2e/b")),
            detail(await visit("/b")),
        ]
        assert told == ["method", "method", "host", "path", "route"]
        assert pages.bypassed() == {"method": 2, "host": 1, "path": 1, "route": 1}

    async def test_a_request_beyond_the_query_limit_has_the_reason_full(
        self, pages: PageCache, site: Site
    ) -> None:
        """All places for queries are taken."""
        visit = in_front(site, pages, routes={"/*": Route("60s", query=None)}, max_queries=1)
        told = [detail(await visit(f"/?q={number}")) for number in range(3)]
        assert told == ["", "full", "full"]

    async def test_hits_and_misses_are_not_counted_as_bypasses(
        self, pages: PageCache, site: Site
    ) -> None:
        """Nothing is counted for what the cache serves or stores."""
        site.says(FRESH)
        visit = as_it_says(site, pages)
        for _ in range(3):
            await visit()
        assert pages.bypassed() == {}

    @pytest.mark.parametrize("store", ["memory://", "sqlite:///{}/pages.db"])
    async def test_a_bypass_is_not_counted_as_a_hit(
        self, tmp_path: Path, site: Site, store: str
    ) -> None:
        """As asked, a stored page that a client with a key is not given counts as no read."""
        site.says(FRESH)
        async with PageCache(store.format(tmp_path)) as pages:
            visit = as_it_says(site, pages)
            await visit()
            for _ in range(3):
                assert detail(await visit(headers=KEY)) == "authorization"
            counts = (await pages.cache.stats()).resources["page"]
            assert (counts.hits, sum(counts.reads.values())) == (0, 1)
            site.says("Cache-Control: public, max-age=60")
            await visit("/open")
            await visit("/open", headers=KEY)
            counts = (await pages.cache.stats()).resources["page"]
            assert (counts.hits, sum(counts.reads.values())) == (1, 3)

    def test_every_bypass_reason_is_documented(self) -> None:
        """docs/isr.md has each of them; no other can be counted."""
        pages = PageCache("memory://")
        for reason in Reason:
            pages.count_bypass(reason)
        assert pages.bypassed() == {str(reason): 1 for reason in Reason}
        text = (ROOT / "docs" / "isr.md").read_text()
        assert all(f"`{reason}`" in text for reason in Reason)

    def test_the_dashboard_knows_every_bypass_reason(self) -> None:
        """In a few words, and what it means."""
        script = ROOT / "src/stillfresh/gateway/static/dashboard-reasons.js"
        text = script.read_text()
        assert [reason for reason in Reason if f'"{reason}": ["' not in text] == []
