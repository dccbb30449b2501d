"""G13, I28: the dashboard in its first minute, in each state and at every width, in a real browser.

One page for each state: it must say the right words, then it is measured at every width, light and
dark. What is asserted is what `layout.js` finds wrong; a picture of that is in the test's own
folder of pytest's temporary directory.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socketpair
from typing import Any, Literal

import msgspec
import pytest
from msgspec import structs
from playwright.async_api import Page, expect
from starlette.responses import PlainTextResponse

from stillfresh import Cache, LoadFailed, StoreError
from stillfresh.engine import Objectives, Origin, ResourceStats
from stillfresh.freshness import Verdict
from stillfresh.gateway import Gateway, gateway
from stillfresh.gateway.server import Worker, WorkerNumbers
from stillfresh.pages import PageCache
from stillfresh.stores import Capabilities, capabilities_by_protocol
from stillfresh.stores.memory import MemoryStore
from stillfresh.systems.coordinator import Kind
from tests.kit.layout import wrong_with
from tests.kit.serving import served

NewPage = Callable[..., Awaitable[Page]]
WIDTHS = (390, 500, 640, 641, 768, 900, 901, 1024, 1180, 1181, 1280, 1600, 1920)
"""From a telephone to a large screen, and both sides of each width at which the style changes."""
SCHEMES: dict[Literal["light", "dark"], tuple[int, ...]] = {"light": WIDTHS, "dark": (768, 1920)}
FEW: dict[Literal["light", "dark"], tuple[int, ...]] = {"light": (390, 900, 1280), "dark": (768,)}
"""One of each layout, for every state. One state is measured at all widths in every test run."""
AWAY = "connection to valkey.internal.example:6379 was refused; the next try is in 2.0 s"
REFUSED = "api.internal.example:8080: connection refused"
LONG = "organisation_membership_permission_assignment_by_region"
MANY = [f"kind_{number:02}" for number in range(30)]


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

    def capabilities(self) -> Capabilities:
        return structs.replace(capabilities_by_protocol(self), inline=None)


class World:
    """A gateway in front of a site and a few kinds, in one state."""

    def __init__(
        self,
        *kinds: str,
        store: str | Cache = "memory://",
        objective: Objectives = None,
        check: float = 0.0,
        true_within: str | None = None,
        **options: Any,
    ) -> None:
        self.pages = Passing()
        self.fails = False
        self.trouble = REFUSED
        self.version = 1
        self.kinds = kinds or ("post", "users_subscription")
        declared = [
            Kind(
                name,
                fetch=self.fetch,
                fresh_for="5m",
                objective=objective,
                check=check,
                true_within=true_within,
            )
            for name in self.kinds
        ]
        site = PlainTextResponse("the site")
        made = {"kinds": declared, "pages": site, "page_cache": self.pages, **options}
        self.app: Gateway = gateway(store, **made)

    async def fetch(self, ids: list[str]) -> dict[str, Any]:
        if self.fails:
            raise ConnectionError(self.trouble)
        return {id_: {"id": id_, "version": self.version} for id_ in ids}

    async def read(self, *ids: str, kind: str | None = None) -> None:
        await self.app.hub.resource(kind or self.kinds[0]).get_many(ids)

    @asynccontextmanager
    async def at(self) -> AsyncIterator[str]:
        async with served(self.app) as url:
            yield f"{url}/_stillfresh/"


async def none(world: World) -> None:
    """Nobody has read anything."""


async def one(world: World) -> None:
    """The first request."""
    await world.read("a")


async def wrong(world: World) -> None:
    """The data changed behind the cache's back; one check was true, and one was not."""
    resource = world.app.hub.resource("post")

    async def checked(number: int) -> None:
        await world.read("a")
        while (await resource.stats()).truth.checked < number:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)

    await world.read("a")
    await checked(1)
    world.version += 1
    await checked(2)


async def viewed(world: World) -> None:
    """Watched and not read."""
    connection = world.app.hub.connect()
    connection.subscribe("post", "a")
    connection.subscribe("users_subscription", "b")


async def passed(world: World) -> None:
    """A site that states no freshness."""
    world.pages.passed = {"no-freshness": 40, "set-cookie": 22}


async def failing(world: World) -> None:
    """The upstream is down from the beginning."""
    world.fails = True
    await world.read("a", "b")


async def kept(world: World) -> None:
    """The upstream is down, and what was asked for before is served."""
    await world.read("a")
    await world.app.hub.resource("post").invalidate("a", soft=True)
    world.fails = True
    with suppress(LoadFailed):
        await world.app.hub.resource("post").refresh("a")
    await world.read("a")


async def many(world: World) -> None:
    """Thirty kinds that miss their objective, each read, some of them watched."""
    connection = world.app.hub.connect()
    for number, kind in enumerate(MANY):
        await world.read("a", "b", kind=kind)
        if number % 3 == 0:
            connection.subscribe(kind, "a")


async def long(world: World) -> None:
    """Long names of kinds, ids and reasons."""
    await world.read("x" * 400, "a" * 60 + "/" + "b" * 60)
    world.app.hub.connect().subscribe(LONG, "a")
    world.pages.passed = {"a-reason-that-this-page-does-not-know-and-is-long": 1_234_567}


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


async def workers(world: World) -> None:
    """Three processes, of which the other two counted as much as this one, and one has ended."""
    numbers, board = world.app.dashboard.numbers, WorkerNumbers(3, 200_000)
    await world.read("a")
    told = msgspec.json.encode(await numbers.write())
    for place in (1, 2):
        board.write(place, told)
    board.ended(2)
    ours, other = socketpair()
    with ours, other:
        numbers.share(Worker(0, board, ours))


@dataclass(frozen=True)
class State:
    """How it comes about, and what the page then says, by selector."""

    prepare: Callable[[World], Awaitable[None]]
    level: Literal["none", "ok", "warn", "bad"]
    says: dict[str, str]
    make: Callable[[], World] = World


STATES = {
    "none": State(
        none,
        "ok",
        {
            "#health-text": "Quiet",
            "#histogram-empty": "No reads yet",
            "#entries-empty": "The store is empty",
        },
    ),
    "one": State(
        one,
        "ok",
        {
            "#health-text": "Every read in the last minute got a fresh copy.",
            '[data-slot="saved.ratio"]': "0 %",
            '[data-slot="batch.mean"]': "1 key each",
            '[data-slot="store.copies"]': "1 copy",
        },
    ),
    "viewed": State(viewed, "ok", {"#health-text": "Kept fresh for viewers: 2 keys."}),
    "passed": State(
        passed,
        "none",
        {
            "#health-text": "62 requests passed through uncached: 40 no freshness stated, 22 ",
        },
    ),
    "failing": State(
        failing,
        "bad",
        {
            "#health-text": "2 reads went unanswered",
            "#health-detail": REFUSED,
            '[data-slot="upstream.saved"]': "0",
            "#histogram-empty": "No read got a copy",
        },
    ),
    "kept": State(
        kept,
        "warn",
        {
            "#health-text": "stored copies are served",
            "#health-detail": REFUSED,
            '[data-slot="queue.failing"]': "1",
        },
    ),
    "dead": State(
        one,
        "bad",
        {
            "#health-text": "The store for entities does not answer.",
            "#health-detail": AWAY,
            "#entries-empty": "could not be listed",
            '[data-slot="store.copies"]': "1 of 2 down",
        },
        lambda: World(store=Cache(Dead())),
    ),
    "many": State(
        many,
        "warn",
        {
            "#health-text": "Copies are older than the objective allows: kind_",
            "#kinds": "kind_29",
            "#subscriptions": "other kinds",
        },
        lambda: World(*MANY, objective="99% of reads younger than 0.001ms"),
    ),
    "wrong": State(
        wrong,
        "warn",
        {
            "#health-text": "Reads were wrong: post (1 of 2 checked). Every read in the last ",
            "#truth-kinds": "99 %",
            "#wrong-reads": "post 'a': served fresh from memory",
        },
        lambda: World(check=1.0, objective="99% of reads true within 1ms"),
    ),
    "long": State(long, "warn", {"#kinds": LONG}, lambda: World(LONG, "b")),
    "busy": State(busy, "warn", {"#kinds": "post"}),
    "workers": State(
        workers, "ok", {'[data-slot="reads.total"]': "3", "#workers": "2 of 3 workers"}
    ),
}


@asynccontextmanager
async def shown(new_page: NewPage, state: State) -> AsyncIterator[tuple[Page, World]]:
    """The page in that state, live and filled; closed before its gateway is."""
    world = state.make()
    async with world.at() as url:
        await state.prepare(world)
        page = await new_page()
        try:
            await page.goto(url)
            await expect(page.locator("#link")).to_have_text("live")
            filled = page.locator(".entry-name, #entries-empty:not([hidden])").first
            await expect(filled).to_be_visible()
            yield page, world
        finally:
            await page.context.close()
    await world.app.cache.close()


class TestG13FirstMinute:
    @pytest.mark.parametrize(
        ("name", "schemes"),
        [
            pytest.param("busy", SCHEMES, id="busy"),
            *(pytest.param(name, FEW, id=name) for name in STATES if name != "busy"),
            *(
                pytest.param(name, SCHEMES, id=f"{name} at all widths", marks=pytest.mark.proof)
                for name in STATES
                if name != "busy"
            ),
        ],
    )
    async def test_each_state_has_the_right_words_and_fits_at_every_width(
        self,
        new_page: NewPage,
        name: str,
        schemes: dict[Literal["light", "dark"], tuple[int, ...]],
        tmp_path: Path,
        expected_errors: list[str],
    ) -> None:
        """The right words; nothing clipped, overlapping, pale, or wider than the page."""
        expected_errors.append("503")
        async with shown(new_page, STATES[name]) as (page, _):
            for selector, text in STATES[name].says.items():
                await expect(page.locator(selector)).to_contain_text(text)
            await expect(page.locator("#health")).to_have_attribute(
                "data-level", STATES[name].level
            )
            if await page.locator('[data-slot="reads.total"]').inner_text() != "0":
                await expect(page.locator('[data-course="reads"]')).not_to_contain_text("none")
            wrong = {}
            for scheme, widths in schemes.items():
                await page.emulate_media(color_scheme=scheme)
                for width in widths:
                    await page.set_viewport_size({"width": width, "height": 900})
                    if found := await wrong_with(page, width):
                        wrong[width, scheme] = found[:5]
                        picture = tmp_path / f"{name}-{width}-{scheme}.png"
                        await page.screenshot(path=picture, full_page=True)
            assert wrong == {}

    async def test_the_link_back_leads_to_the_site(self, new_page: NewPage) -> None:
        """If there is one: a gateway of kinds alone has nothing at its root."""
        async with shown(new_page, STATES["none"]) as (page, _):
            await expect(page.locator("#bypassed")).to_be_hidden()
            await page.get_by_role("link", name="Back to the site").click()
            await expect(page.locator("body")).to_have_text("the site")
        alone = State(none, "ok", {}, lambda: World(pages=None))
        async with shown(new_page, alone) as (page, _):
            await expect(page.locator("#site")).to_be_hidden()

    async def test_the_histogram_fits_the_policy(self, new_page: NewPage) -> None:
        """A column ends where freshness does, several are before it, and one is behind."""
        async with shown(new_page, STATES["none"]) as (page, world):
            told = await world.app.dashboard.snapshot()
            bounds = list(told["age_buckets"])
            for fresh_for, columns in POLICIES.items():
                found = await page.evaluate(COLUMNS, [bounds, fresh_for])
                assert found == columns


POLICIES = {
    1: [0.1, 0.3, 1, 2, 5, 10, 15],
    15: [0.3, 1, 2, 5, 10, 15, 30],
    30: [1, 2, 5, 10, 15, 30, 60],
    300: [15, 30, 60, 120, 300, 600, 900],
    3600: [120, 300, 600, 900, 1800, 3600, 7200],
}
COLUMNS = """async ([bounds, term]) => {
  const { columns } = await import("./dashboard-draw.js");
  const drawn = columns([1, ...bounds.map(() => 0)], bounds, [term]);
  return drawn.slice(0, -1).map(([bound]) => bound);
}"""


class TestG21Answers:
    """The dashboard answers three questions first: how old, how many saved, how slow."""

    async def test_the_first_cards_answer_the_three_questions(self, new_page: NewPage) -> None:
        """Ages and times of loads as quantiles, and the share of reads that needed no load."""
        async with shown(new_page, STATES["one"]) as (page, world):
            titles = page.locator(".cards > section h2")
            for at, title in enumerate(["How old is what we", "How many requests", "How slow are"]):
                await expect(titles.nth(at)).to_contain_text(title)
            for _ in range(3):
                await world.read("a")
            await expect(page.locator('[data-slot="saved.ratio"]')).to_have_text("75 %")
            await expect(page.locator('[data-slot="saved.requests"]')).to_have_text("3")
            for figure in ("age.p50", "age.p99", "load.p50", "load.p99"):
                await expect(page.locator(f'[data-slot="{figure}"]')).to_contain_text("≤ ")

    async def test_the_answers_are_of_the_last_minutes_or_since_the_start(
        self, new_page: NewPage
    ) -> None:
        """A page that was opened later knows what was noted before."""
        state = State(one, "ok", {})
        world = state.make()
        async with world.at() as url:
            await world.read("a")
            world.app.dashboard.numbers._notes.clear()
            await world.app.dashboard.numbers.note()
            await world.read("a")
            await world.read("a")
            page = await new_page()
            await page.goto(url)
            ratio = page.locator('[data-slot="saved.ratio"]')
            await expect(ratio).to_have_text("100 %")
            await page.get_by_role("button", name="since the start").click()
            await expect(ratio).to_have_text("67 %")
            await page.context.close()
        await world.app.cache.close()

    async def test_usual_reasons_to_pass_uncached_do_not_alarm(self, new_page: NewPage) -> None:
        """A healthy site has pages without a route: the line at the top stays green."""
        async with shown(new_page, STATES["one"]) as (page, world):
            world.pages.passed = {"route": 100, "no-freshness": 20, "method": 3}
            await expect(page.locator("#health-text")).to_contain_text("123 requests passed")
            await expect(page.locator("#health")).to_have_attribute("data-level", "ok")

    async def test_the_line_at_the_top_does_not_call_stale_entries_fresh(
        self, new_page: NewPage
    ) -> None:
        """It speaks of reads: an entry that nobody read since may be stale."""
        async with shown(new_page, STATES["one"]) as (page, world):
            await world.app.hub.resource("post").invalidate("a", soft=True)
            await page.get_by_role("button", name="Reload").click()
            await expect(page.locator("#entries")).to_contain_text("stale")
            words = await page.locator("#health-text").inner_text()
            assert "Every read in the last minute got a fresh copy" in words
            assert "All" not in words

    @pytest.mark.parametrize(
        ("objective", "level"), [(None, "warn"), ("40% of reads true within 1ms", "ok")]
    )
    async def test_wrong_reads_that_the_objective_allows_do_not_alarm(
        self, new_page: NewPage, objective: str | None, level: str
    ) -> None:
        """Half of the checked reads were wrong: without an objective, each is too much."""
        options: dict[str, Any] = {"objective": objective}
        if objective is None:
            options = {"true_within": "1ms"}
        state = State(wrong, "ok", {}, lambda: World(check=1.0, **options))
        async with shown(new_page, state) as (page, _):
            await expect(page.locator("#health")).to_have_attribute("data-level", level)

    async def test_wrong_reads_of_long_ago_do_not_alarm(self, new_page: NewPage) -> None:
        """The table still has them."""
        async with shown(new_page, STATES["wrong"]) as (page, world):
            await expect(page.locator("#health-text")).to_contain_text("Reads were wrong")
            numbers = world.app.dashboard.numbers
            clock = numbers._clock
            numbers._clock = lambda: clock() + 301
            await expect(page.locator("#health-text")).not_to_contain_text("wrong")
            await expect(page.locator("#health")).to_have_attribute("data-level", "ok")
            await expect(page.locator("#wrong-reads")).to_contain_text("post 'a': served fresh")

    async def test_a_curve_has_an_axis_and_says_the_value_under_the_pointer(
        self, new_page: NewPage
    ) -> None:
        """Since when, and its highest value; under a pointer, the rate at that time."""
        async with shown(new_page, STATES["none"]) as (page, _):
            curve = page.locator('[data-course="own"]')
            points = [[8, 1.5], [6, 3], [4, 2], [2, 0]]
            await page.evaluate(CURVE, points)
            await expect(curve.locator(".axis > :visible")).to_have_text(
                ["60 s ago", "max 3.0", "now"]
            )
            box = await curve.bounding_box()
            assert box is not None
            await page.mouse.move(box["x"] + box["width"] * (1 - 6 / 60), box["y"] + 5)
            await expect(curve.locator(".axis > :visible")).to_have_text(["3.0 /s, 6 s ago"])
            await page.mouse.move(0, 0)
            await expect(curve.locator(".axis > .now")).to_be_visible()


CURVE = """async (points) => {
  const { spark } = await import("./dashboard-draw.js");
  const drawn = document.querySelector('[data-course="reads"]');
  const place = drawn.cloneNode(true); // one that the page does not draw itself
  place.dataset.course = "own";
  place.replaceChildren(...[...place.children].slice(0, 2));
  drawn.before(place);
  spark(place, points, "Reads");
}"""


class TestHealthLine:
    async def test_one_reason_for_uncached_requests_stands_without_a_second_number(
        self, new_page: NewPage
    ) -> None:
        async with shown(new_page, STATES["one"]) as (page, world):
            world.pages.passed = {"method": 7}
            await expect(page.locator("#health-text")).to_contain_text(
                "7 requests passed through uncached: not GET or HEAD."
            )

    async def test_an_error_of_several_lines_is_shown_by_its_first_line(
        self, new_page: NewPage
    ) -> None:
        async with shown(new_page, STATES["one"]) as (page, world):
            world.trouble = "Server error '500'\nFor more information, read the manual"
            world.fails = True
            with suppress(LoadFailed):
                await world.app.hub.resource("post").refresh("a")
            await world.read("a")
            detail = page.locator("#health-detail")
            await expect(detail).to_contain_text("Server error '500'")
            await expect(detail).not_to_contain_text("For more information")


class TestI28Dashboard:
    async def test_uncached_requests_are_shown_beside_fresh_reads(self, new_page: NewPage) -> None:
        """Reads and uncached requests are told beside each other, with what each reason means."""
        async with shown(new_page, STATES["one"]) as (page, world):
            health, rows = page.locator("#health-text"), page.locator("#reasons tr")
            world.pages.passed = {"method": 1, "a-b": 2, "no-freshness": 3, "host": 4, "full": 5}
            await expect(health).to_contain_text("1 fresh. 15 requests passed through uncached:")
            await expect(health).to_contain_text(
                "5 limit reached, 4 unknown host, 3 no freshness stated"
            )
            await expect(health).to_contain_text("3 for other reasons.")
            await expect(rows).to_have_count(5)
            await expect(rows.nth(2)).to_contain_text("Add a route")
            assert "All" not in await health.inner_text()
            await expect(page.locator("#health")).to_have_attribute("data-level", "warn")
            world.pages.passed["method"] += 5
            await expect(rows.first).to_contain_text("not GET or HEAD")
            await world.read(*(f"{number}" for number in range(30)))
            await expect(page.locator("#health")).to_have_attribute("data-level", "ok")
            assert "All" not in await health.inner_text()
