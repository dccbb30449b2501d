"""G13, I28: the dashboard in its first minute, in each state, measured in a real browser."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect
from starlette.responses import PlainTextResponse

from stillfresh import Cache, StoreError
from stillfresh.coordinator import Kind
from stillfresh.engine import Origin, ResourceStats
from stillfresh.freshness import Verdict
from stillfresh.isr import PageCache
from stillfresh.stores.memory import MemoryStore
from stillfresh.web import Gateway, gateway
from tests.kit.serving import served

NewPage = Callable[..., Awaitable[Page]]
BREAKS = (640, 641, 900, 901, 1180, 1181)
"""Widths at which the style sheet changes its mind."""
WIDTHS = sorted({*range(390, 1921, 90), *BREAKS, 768, 1280, 1920})
AWAY = "connection to valkey.internal.example:6379 was refused; the next try is in 2.0 s"
PASSED = {"no-freshness": 40, "set-cookie": 22}

MEASURED = Path(__file__).with_name("layout.js").read_text().partition("\n")[2]
"""What is wrong with the layout, in sentences."""


class Passing(PageCache):
    """A page cache whose requests were passed through uncached."""

    def __init__(self) -> None:
        super().__init__("memory://")
        self.passed: dict[str, int] = {}

    def bypassed(self) -> dict[str, int]:
        return dict(self.passed)


class Dead(MemoryStore):
    """Opens, and then refuses everything."""

    async def _refuse(self, *_: Any, **__: Any) -> Any:
        raise StoreError(AWAY)

    stats = read = acquire = entries = publish = release = _refuse
    reads_inline = False


class World:
    """A gateway in front of a site and two kinds, in one state."""

    def __init__(self, store: str | Cache = "memory://", **options: Any) -> None:
        self.pages = Passing()
        self.fails = False
        kinds = [
            Kind("post", fetch=self.fetch, fresh_for="5m"),
            Kind("users_subscription", fetch=self.fetch, fresh_for="5m"),
        ]
        site = PlainTextResponse("the site")
        made = {"kinds": kinds, "pages": site, "page_cache": self.pages, **options}
        self.app: Gateway = gateway(store, **made)

    async def fetch(self, ids: list[str]) -> dict[str, Any]:
        if self.fails:
            raise ConnectionError("api.internal.example:8080: connection refused")
        return {id_: {"id": id_} for id_ in ids}

    async def read(self, *ids: str) -> None:
        await self.app.hub.resource("post").get_many(ids)

    @asynccontextmanager
    async def at(self) -> AsyncIterator[str]:
        async with served(self.app) as url:
            yield f"{url}/_stillfresh/"


async def nothing(_: list[str]) -> dict[str, Any]:
    return {}


async def none(world: World) -> None:
    """Nobody has read anything."""


async def one(world: World) -> None:
    """The first request."""
    await world.read("a")


async def viewed(world: World) -> None:
    """Watched and not read: the state in which the labels collapsed."""
    connection = world.app.hub.connect()
    connection.subscribe("post", "a")
    connection.subscribe("users_subscription", "b")


async def passed(world: World) -> None:
    """A site that states no freshness."""
    world.pages.passed = dict(PASSED)


async def failing(world: World) -> None:
    """The upstream is down from the beginning."""
    world.fails = True
    await world.read("a", "b")


async def busy(world: World) -> None:
    """Large numbers."""
    await world.read(*(f"ann:{number}" for number in range(300)))
    world.pages.passed = {"no-freshness": 123_456_789, "set-cookie": 12_345, "of-a-new-kind": 1}
    numbers = world.app.dashboard.numbers
    counted = numbers._count

    def grown(stats: ResourceStats) -> ResourceStats:
        by_origin = {origin: dict.fromkeys(Verdict, 0) for origin in Origin}
        by_origin[Origin.STORE] = dict.fromkeys(Verdict, 123_456_789)
        ages = tuple(123_456_789 for _ in stats.ages)
        return replace(stats, reads_by_origin=by_origin, ages=ages)

    async def large() -> dict[str, dict[str, ResourceStats]]:
        caches = (await counted()).items()
        return {name: {it: grown(kinds[it]) for it in kinds} for name, kinds in caches}

    numbers._count = large  # type: ignore[method-assign]


STATES: dict[str, Callable[[World], Awaitable[None]]] = {
    "none": none,
    "one": one,
    "viewed": viewed,
    "passed": passed,
    "failing": failing,
    "busy": busy,
    "dead": one,
}


@pytest.fixture(autouse=True)
def patience() -> None:
    """A busy machine is no error."""
    expect.set_options(timeout=30_000)


@asynccontextmanager
async def shown(new_page: NewPage, state: str, **options: Any) -> AsyncIterator[tuple[Page, World]]:
    """The page in that state, live and filled; closed before its gateway is."""
    world = World(Cache(Dead())) if state == "dead" else World()
    async with world.at() as url:
        await STATES[state](world)
        page = await new_page(**options)
        try:
            await page.goto(url)
            await expect(page.locator("#link")).to_have_text("live")
            filled = page.locator(".entry-name, #entries-empty:not([hidden])").first
            await expect(filled).to_be_visible()
            yield page, world
        finally:
            await page.context.close()
    await world.app.cache.close()


@pytest.mark.parametrize("state", STATES)
class TestG13Layout:
    async def test_is_right_at_every_width(
        self, new_page: NewPage, state: str, expected_errors: list[str]
    ) -> None:
        """No sideways scrolling, no broken word, nothing out of its card or over another."""
        expected_errors.append("503")
        async with shown(new_page, state) as (page, _):
            wrong = {}
            for width in WIDTHS:
                await page.set_viewport_size({"width": width, "height": 900})
                if found := await page.evaluate(MEASURED):
                    wrong[width] = found[:5]
            assert wrong == {}


class TestG13Words:
    async def test_nothing_has_happened_yet(self, new_page: NewPage) -> None:
        """Said so, instead of an empty chart; with a way back to the site."""
        async with shown(new_page, "none") as (page, _):
            await expect(page.locator("#health-text")).to_contain_text("Quiet")
            await expect(page.locator("#histogram-empty")).to_have_text("No reads yet.")
            await expect(page.locator("#bypassed")).to_be_hidden()
            await page.get_by_role("link", name="Back to the site").click()
            await expect(page.locator("body")).to_have_text("the site")

    async def test_without_a_site_there_is_no_way_back(self, new_page: NewPage) -> None:
        """A gateway of kinds alone has nothing at its root."""
        world = World(pages=None)
        async with world.at() as url:
            page = await new_page()
            await page.goto(url)
            await expect(page.locator("#link")).to_have_text("live")
            await expect(page.locator("#site")).to_be_hidden()
            await page.context.close()

    async def test_one_read(self, new_page: NewPage) -> None:
        """One of each is not several."""
        async with shown(new_page, "one") as (page, _):
            await expect(page.locator("#health-text")).to_contain_text("All fresh")
            await expect(page.locator('[data-slot="batch.mean"]')).to_have_text("1 key each")
            await expect(page.locator('[data-slot="store.copies"]')).to_have_text("1 copy")

    async def test_reads_that_nobody_could_answer(self, new_page: NewPage) -> None:
        """They saved no request, and have no age."""
        async with shown(new_page, "failing") as (page, _):
            await expect(page.locator("#health-text")).to_contain_text("2 reads went unanswered")
            await expect(page.locator('[data-slot="upstream.saved"]')).to_have_text("0")
            await expect(page.locator("#histogram-empty")).to_contain_text("No read got a copy")

    async def test_a_dead_store(self, new_page: NewPage, expected_errors: list[str]) -> None:
        """Named in the line at the top and above the entries; what is known is said to be that."""
        expected_errors.append("503")
        async with shown(new_page, "dead") as (page, _):
            await expect(page.locator("#health-text")).to_contain_text(AWAY)
            await expect(page.locator("#health")).to_have_attribute("data-level", "bad")
            await expect(page.locator("#entries-empty")).to_contain_text("could not be listed")
            await expect(page.locator('[data-slot="store.copies"]')).to_have_text("0 copies known")

    @pytest.mark.parametrize(
        ("fresh_for", "labels"),
        [
            ("30s", ["1s", "2s", "5s", "10s", "20s", "30s", "60s", "older"]),
            ("5m", ["10s", "20s", "30s", "60s", "2m", "5m", "10m", "older"]),
            ("1h", ["2m", "5m", "10m", "20m", "30m", "60m", "2h", "older"]),
        ],
    )
    async def test_the_histogram_fits_the_policy(
        self, new_page: NewPage, fresh_for: str, labels: list[str]
    ) -> None:
        """A column ends where freshness does, several are before it, and one is behind."""
        world = World(kinds=[Kind("post", fetch=nothing, fresh_for=fresh_for)])
        world.app.cache.cores["post"].memory.counts.ages[0] += 1
        async with world.at() as url:
            page = await new_page()
            await page.goto(url)
            await page.locator("#age-all").click()
            await expect(page.locator(".bucket .bound")).to_have_text(labels)
            await page.context.close()


class TestI28Dashboard:
    async def test_everything_passed_through(self, new_page: NewPage) -> None:
        """The line at the top says so, by reason; the table says what each reason means."""
        async with shown(new_page, "passed") as (page, world):
            health = page.locator("#health-text")
            await expect(health).to_contain_text(
                "62 requests passed through uncached: 40 no freshness stated, 22 set a cookie."
            )
            await expect(page.locator("#health")).to_have_attribute("data-level", "warn")
            rows = page.locator("#reasons tr")
            await expect(rows).to_have_count(2)
            await expect(rows.first).to_contain_text("Add a route")
            world.pages.passed["set-cookie"] += 100
            await expect(rows.first).to_contain_text("set a cookie")
            await expect(health).to_contain_text("162 requests passed through uncached")

    async def test_never_all_fresh(self, new_page: NewPage) -> None:
        """Fresh reads beside requests that were not cached are told beside each other."""
        async with shown(new_page, "one") as (page, world):
            health = page.locator("#health-text")
            await expect(health).to_contain_text("All fresh")
            world.pages.passed = {"method": 1, "a-b": 2, "path": 3, "host": 4, "full": 5}
            await expect(health).to_contain_text("1 fresh. 15 requests passed through uncached:")
            await expect(health).to_contain_text("5 no room, 4 unknown host, 3 ambiguous path, ")
            await expect(health).to_contain_text("3 for other reasons.")
            assert "All" not in await health.inner_text()
            await expect(page.locator("#health")).to_have_attribute("data-level", "warn")
            await world.read(*(f"{number}" for number in range(20)))
            await expect(page.locator("#health")).to_have_attribute("data-level", "ok")
            assert "All" not in await health.inner_text()
