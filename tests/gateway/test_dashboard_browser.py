"""G6: the dashboard in a real browser: what it shows, what it does, by keyboard and by hand."""

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route

from stillfresh import Cache
from stillfresh.gateway import Dashboard, gateway
from stillfresh.pages.upstream import Upstream
from stillfresh.systems.coordinator import Kind
from tests.kit.serving import served

NewPage = Callable[..., Awaitable[Page]]
TOKEN = "correct-horse"  # noqa: S105 (of the tests)
ODD = [
    "a/b c",
    "100%",
    "two\nlines",
    "<img src=x onerror=alert(1)>",
    "..",
    ".",
    "späße ☃",
    "x" * 400,
]
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


class World:
    """A gateway of two kinds, and an upstream that can be told to fail."""

    def __init__(self, **options: Any) -> None:
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        kinds = [
            Kind("post", fetch=self.fetch, fresh_for="1h"),
            Kind(
                "user", fetch=self.fetch, fresh_for="1h", objective="90% of reads younger than 1m"
            ),
        ]
        self.app = gateway(kinds=kinds, **options)

    async def fetch(self, ids: list[str]) -> dict[str, Any]:
        self.asked.append(list(ids))
        if self.error is not None:
            raise self.error
        return {id_: {"id": id_, "asked": len(self.asked)} for id_ in ids}

    async def read(self, kind: str, *ids: str) -> None:
        await self.app.hub.resource(kind).get_many(ids)

    @asynccontextmanager
    async def at(self) -> AsyncIterator[str]:
        async with served(self.app) as url:
            yield url


@pytest.fixture
def world() -> World:
    return World()


@pytest_asyncio.fixture(loop_scope="session")
async def url(world: World) -> AsyncIterator[str]:
    async with world.at() as url:
        await world.read("post", *(f"ann:{number}" for number in range(40)))
        await world.read("user", "ann", "bob")
        yield f"{url}/_stillfresh/"


@pytest_asyncio.fixture(loop_scope="session")
async def new_board(url: str, new_page: NewPage) -> AsyncIterator[NewPage]:
    """Pages that are closed before the gateway is, so that none of them misses it."""
    made: list[Page] = []

    async def board(**options: Any) -> Page:
        made.append(await new_page(**options))
        return await opened(made[-1], url)

    yield board
    for page in made:
        await page.context.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(new_board: NewPage) -> Page:
    return await new_board()


async def opened(page: Page, url: str) -> Page:
    """Live, and its table filled."""
    await page.goto(url)
    await expect(page.locator("#link")).to_have_text("live")
    await expect(page.locator(".entry-name").first).to_be_visible()
    return page


def slot(page: Page, name: str) -> Any:
    return page.locator(f'[data-slot="{name}"]')


NO_SOCKET = """window.WebSocket = class extends EventTarget {
  constructor() { super(); setTimeout(() => this.dispatchEvent(new Event("close"))); }
};"""
SILENT = """window.WebSocket = class extends EventTarget {
  constructor() { super(); setTimeout(() => this.dispatchEvent(new Event("open"))); }
  send() {}
};"""


class TestG6Live:
    async def test_numbers_change_without_a_reload(self, page: Page, world: World) -> None:
        """Told over the socket, a second after they changed; nothing is asked again."""
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await expect(slot(page, "reads.total")).to_have_text("42")
        await world.read("post", "ann:1", "ann:2", "ann:3")
        await expect(slot(page, "reads.total")).to_have_text("45")
        await expect(page.locator('tr[data-kind="entities post"] td').nth(5)).to_have_text("95 %")
        assert not [it for it in asked if "api/stats" in it]

    async def test_the_page_shows_the_connections_to_the_site_if_there_is_one(
        self, page: Page, world: World
    ) -> None:
        """I33: in use, of all that may be; a gateway without a site has no such lines."""
        shown = page.locator("#site-connections")
        await expect(slot(page, "reads.total")).to_have_text("42")
        await expect(shown).to_be_hidden()
        site = Upstream("http://127.0.0.1:1", clock=time.time, connections=7, max_streams=9)
        await site.places.visitors.take_now()
        world.app.dashboard.numbers.site = site
        values = ["1 of 7", "0 of 7", "0 of 9"]
        await expect(shown.locator("dd")).to_have_text(values)
        await expect(shown.locator("dt")).to_have_text(
            ["site, visitors", "site, loads", "site, streams"]
        )

    async def test_the_page_shows_the_right_numbers(self, page: Page) -> None:
        """Reads, requests made and saved, batches and how full, the store, the viewers."""
        await expect(slot(page, "upstream.made")).to_have_text("3")
        await expect(slot(page, "upstream.saved")).to_have_text("39")
        await expect(slot(page, "upstream.keys")).to_have_text("42")
        await expect(slot(page, "batch.mean")).to_have_text("14 keys each")
        await expect(slot(page, "batch.full")).to_have_text("70 %")
        await expect(slot(page, "batch.largest")).to_have_text("20 keys")
        await expect(slot(page, "leases.won")).to_have_text("42")
        await expect(slot(page, "store.copies")).to_have_text("42 copies")
        await expect(slot(page, "live.connections")).to_have_text("1 connected")
        await expect(slot(page, "age.p99")).to_have_text(re.compile(r"^≤ [\d.]+ m?s$"))
        await expect(page.locator("#health")).to_have_attribute("data-level", "ok")
        await expect(page.locator("#kinds tr")).to_have_count(2)

    async def test_a_kinds_objective_is_shown_with_share_and_burn_rate(
        self, page: Page, world: World
    ) -> None:
        """G14: what is wanted, the share that met it, and the burn rate."""
        row = page.locator('tr[data-kind="entities user"] td.objective')
        await expect(row).to_have_text(["90 % < 60 s", "100 %", "0×"])
        others = page.locator('tr[data-kind="entities post"] td.objective')
        await expect(others).to_have_text(["–", "–", "–"])
        world.error = RuntimeError("down")
        await world.read("user", "new", "newer")
        await expect(row).to_have_text(["90 % < 60 s", "50 %", "5×"])
        await expect(row.nth(2)).to_have_class(re.compile("bad"))

    async def test_stale_reads_are_counted_beside_the_good_news(
        self, new_page: NewPage, url: str, world: World
    ) -> None:
        """Who was answered is told first; then how many copies were fresh, and how many stale."""
        await world.app.hub.resource("user").invalidate("ann", soft=True)
        await world.read("user", "ann")
        page = await opened(await new_page(), url)
        health = page.locator("#health-text")
        await expect(health).to_contain_text("All is well: every read in the last minute")
        await expect(health).to_contain_text("42 fresh, 1 stale and refreshed in the background")
        await expect(page.locator("#health")).to_have_attribute("data-level", "ok")
        await page.close()

    async def test_a_kinds_rate_is_shown_from_the_first_second(self, page: Page) -> None:
        """What was read before the page was opened is in the row of its kind, as in the sum."""
        for kind in ("entities post", "entities user"):
            row = page.locator(f'tr[data-kind="{kind}"] td').first
            assert await row.inner_text() not in {"", "0"}

    async def test_the_health_line_names_the_failing_kind(self, page: Page, world: World) -> None:
        """The upstream fails, and good again."""
        world.error = RuntimeError("boom")
        await world.read("user", "new")
        health = page.locator("#health-text")
        await expect(health).to_contain_text("The upstream fails for 1 kind (user)")
        await expect(page.locator("#health")).to_have_attribute("data-level", "bad")
        await expect(page.locator("#health-detail")).to_have_text("user: RuntimeError: boom")
        await expect(slot(page, "queue.failing")).to_have_text("1")
        world.error = None
        await world.app.hub.resource("user").refresh("new")
        await expect(health).not_to_contain_text("failing")
        await expect(page.locator("#health-detail")).to_be_empty()

    @pytest.mark.parametrize("socket", [NO_SOCKET, SILENT], ids=["none", "silent"])
    async def test_without_a_working_socket_the_page_polls(
        self, new_page: NewPage, url: str, world: World, socket: str
    ) -> None:
        """The same numbers, a little later; also where the socket is there but tells nothing."""
        page = await new_page()
        await page.clock.install()
        await page.add_init_script(socket)
        await page.goto(url)
        await expect(slot(page, "reads.total")).to_have_text("42")
        await page.clock.fast_forward(6_000)
        await expect(page.locator("#link")).to_have_text("polling")
        await world.read("post", "ann:1")
        await page.clock.fast_forward(2_000)
        await expect(slot(page, "reads.total")).to_have_text("43")
        await page.close()

    async def test_a_dashboard_mounted_alone_polls(self, new_page: NewPage) -> None:
        """Mounted alone, it opens no socket: `/v1/live` would be the app's own."""
        page, sockets, cache = await new_page(), list[str](), Cache("memory://")
        page.on("websocket", lambda socket: sockets.append(socket.url))
        app = Starlette(routes=[Mount("/_stillfresh", Dashboard(cache))])
        async with cache, served(app) as url:
            await page.goto(f"{url}/_stillfresh/")
            await expect(page.locator("#link")).to_have_text("polling")
            await page.close()
        assert sockets == []

    async def test_screen_readers_hear_only_new_messages(self, page: Page, world: World) -> None:
        """A number in the line at the top changes; who listens hears of it once."""
        news = page.locator("#news")
        await expect(news).to_contain_text("fresh")
        heard = await news.inner_text()
        for _ in range(2):
            total = slot(page, "reads.total")
            before = await total.inner_text()
            await world.read("post", "ann:1")
            await expect(total).not_to_have_text(before)
        assert await news.inner_text() == heard
        world.error = RuntimeError("boom")
        await world.read("user", "new")
        await expect(news).to_contain_text("The upstream fails")

    async def test_the_page_says_when_the_gateway_does_not_answer(
        self, new_page: NewPage, expected_errors: list[str]
    ) -> None:
        """The numbers stay, and are said to be old."""
        expected_errors += ["WebSocket connection", "ERR_CONNECTION_REFUSED"]
        page, world = await new_page(), World()
        async with world.at() as url:
            await world.read("post", "a")
            await opened(page, f"{url}/_stillfresh/")
        await expect(page.locator("#health-text")).to_contain_text("does not answer")
        await expect(page.locator("#link")).to_have_text("no connection")
        await expect(slot(page, "reads.total")).to_have_text("1")


class TestG6LookingForEntries:
    async def test_entries_can_be_filtered_by_search_and_kind(self, page: Page) -> None:
        """A part of an id, of one kind or of all."""
        names = page.locator(".entry-name .id")
        await page.locator("#search").fill("ann")
        await expect(names).to_have_count(25)
        await page.locator("#kind").select_option("user")
        await expect(names).to_have_text(["ann"])
        await page.locator("#search").fill("nobody")
        await expect(page.locator("#entries-empty")).to_contain_text("No entry matches")
        await page.locator("#search").fill("")
        await expect(names).to_have_text(["ann", "bob"])

    async def test_entries_can_be_paged_forward_and_back(self, page: Page) -> None:
        """Forward and back, each entry once."""
        names = page.locator(".entry-name .id")
        first = await names.all_inner_texts()
        await page.locator("#next").click()
        await expect(names).to_have_count(17)
        second = await names.all_inner_texts()
        assert len({*first, *second}) == 42
        await expect(page.locator("#next")).to_be_disabled()
        await page.locator("#previous").click()
        await expect(names).to_have_text(first)

    async def test_an_empty_store_says_so(self, new_page: NewPage) -> None:
        """And nothing is broken for want of numbers."""
        page = await new_page()
        async with World().at() as url:
            await page.goto(f"{url}/_stillfresh/")
            await expect(page.locator("#entries-empty")).to_contain_text("The store is empty")
            await expect(page.locator("#health-text")).to_contain_text("Quiet")
            await expect(slot(page, "age.p50")).to_have_text("–")
            await page.close()

    async def test_entries_with_odd_ids_are_shown_opened_and_deleted(
        self, page: Page, world: World
    ) -> None:
        """Shown as they are, with nothing run or hidden; opened and deleted by their own name."""
        await world.read("user", *ODD)
        await page.locator("#reload").click()
        await page.locator("#kind").select_option("user")
        await expect(page.locator(".entry-name")).to_have_count(2 + len(ODD))
        for id_ in ODD:
            shown = id_.replace("\n", "↵")
            await page.locator(".entry-name", has=page.get_by_text(shown, exact=True)).click()
            await expect(page.locator("#panel-title")).to_have_text(shown)
            await expect(page.locator("#panel-value")).to_contain_text('"asked"')
            await page.locator("#delete").click()
            await page.locator("#confirm-yes").click()
            await expect(page.locator("#panel-said")).to_have_text("Deleted.")
        await page.keyboard.press("Escape")
        await expect(page.locator(".entry-name .id")).to_have_text(["ann", "bob"])


async def shown(page: Page, id_: str) -> None:
    await page.locator("#search").fill(id_)
    await expect(page.locator(".entry-name")).to_have_count(1)
    await page.locator(".entry-name").click()
    await expect(page.locator("#panel-text")).to_contain_text(id_)


class TestG6Words:
    async def test_an_entry_that_was_never_loaded_is_shown_as_no_copy(
        self, page: Page, world: World
    ) -> None:
        """Its badge says that there is no copy; its note begins with the cause."""
        world.error = RuntimeError("out of order")
        await world.read("user", "new")
        await page.locator("#search").fill("new")
        await expect(page.locator(".entry-name")).to_have_count(1)
        await expect(page.locator("#entries .badge")).to_have_text("no copy, failing")
        note = page.locator("#entries .clamp")
        await expect(note).to_have_text(re.compile(r"^RuntimeError: out of order; next try in"))

    async def test_long_ids_are_cut_in_the_middle(self, page: Page, world: World) -> None:
        """Cut in the middle: the end is on screen, whole."""
        await world.read("user", "n" * 300 + "-first", "n" * 300 + "-second")
        await page.locator("#search").fill("nnn")
        await expect(page.locator(".entry-name")).to_have_count(2)
        for end in ("first", "second"):
            tail = page.locator(".entry-name .id span:last-child", has_text=end)
            box = await tail.bounding_box()
            name = await page.locator(".entry-name", has_text=end).bounding_box()
            assert box is not None
            assert name is not None
            assert box["x"] + box["width"] <= name["x"] + name["width"]


class TestG6OneEntry:
    async def test_an_opened_entry_shows_explanation_terms_and_value(self, page: Page) -> None:
        """A sentence, the terms, and the value."""
        await shown(page, "ann:33")
        await expect(page.locator("#panel-text")).to_contain_text("a fresh copy")
        await expect(page.locator("#panel-text")).to_contain_text("nothing else happens")
        await expect(page.locator("#panel-verdict")).to_have_text("fresh")
        await expect(page.locator("#panel-facts")).to_contain_text("60 min")
        await expect(page.locator("#panel-value")).to_contain_text('"id": "ann:33"')

    async def test_an_entry_can_be_refreshed_invalidated_and_deleted(
        self, page: Page, world: World
    ) -> None:
        """Each is done, and said; deleting asks first."""
        await shown(page, "ann:33")
        said = page.locator("#panel-said")
        await page.locator("#refresh").click()
        await expect(said).to_have_text("Loaded again.")
        assert world.asked[-1] == ["ann:33"]
        await page.locator("#invalidate").click()
        await expect(said).to_contain_text("Invalidated")
        await expect(page.locator("#panel-verdict")).to_have_text("expired")
        await expect(page.locator("#entries .badge")).to_have_text("expired")
        await page.locator("#delete").click()
        await page.locator("#confirm-no").click()
        await expect(page.locator(".entry-name")).to_have_count(1)
        await page.locator("#delete").click()
        await page.locator("#confirm-yes").click()
        await expect(said).to_have_text("Deleted.")
        await expect(page.locator(".entry-name")).to_have_count(0)

    async def test_a_failed_refresh_shows_its_error(
        self, page: Page, world: World, expected_errors: list[str]
    ) -> None:
        """The copy stays; the error is on the page, and on its row."""
        expected_errors.append("502")
        await shown(page, "ann:33")
        world.error = RuntimeError("out of order")
        await page.locator("#refresh").click()
        await expect(page.locator("#panel-said")).to_contain_text("out of order")
        await expect(page.locator("#entries .badge")).to_have_text("fresh, failing")


class TestG6Keyboard:
    async def test_the_dashboard_can_be_used_by_keyboard_alone(
        self, page: Page, world: World
    ) -> None:
        """`/` searches, arrows move, Enter opens, Tab reaches the buttons, Escape goes back."""
        keys = page.keyboard
        await keys.press("/")
        await expect(page.locator("#search")).to_be_focused()
        await keys.type("ann:1")
        await expect(page.locator(".entry-name")).to_have_count(11)
        for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp"):
            await keys.press(key)
        await expect(page.locator(".entry-name").nth(1)).to_be_focused()
        await keys.press("End")
        await expect(page.locator(".entry-name").last).to_be_focused()
        await keys.press("Enter")
        await expect(page.locator("#panel-title")).to_be_focused()
        await expect(page.locator("#panel-text")).to_contain_text("a fresh copy")
        await keys.press("Tab")
        await expect(page.locator("#panel-close")).to_be_focused()
        await keys.press("Tab")
        await keys.press("Enter")
        await expect(page.locator("#panel-said")).to_have_text("Loaded again.")
        assert world.asked[-1] == ["ann:19"]
        await keys.press("Tab")
        await keys.press("Tab")
        await keys.press("Enter")
        await expect(page.locator("#confirm")).to_be_visible()
        await keys.press("Escape")
        await expect(page.locator("#confirm")).to_be_hidden()
        await expect(page.locator("#panel")).to_be_visible()
        await keys.press("Escape")
        await expect(page.locator("#panel")).to_be_hidden()
        await expect(page.locator(".entry-name").last).to_be_focused()

    async def test_the_entries_table_is_one_tab_stop(self, page: Page) -> None:
        """Tab goes past its rows at once; the arrows go along them."""
        stops = page.locator('.entry-name[tabindex="0"]')
        await expect(stops).to_have_count(1)
        await page.locator("#reload").focus()
        await page.keyboard.press("Tab")
        await expect(page.locator(".entry-name").first).to_be_focused()
        await page.keyboard.press("Tab")
        await expect(page.locator("#next")).to_be_focused()

    async def test_the_focused_element_is_outlined(self, page: Page) -> None:
        """What has it is outlined."""
        await page.keyboard.press("/")
        await page.keyboard.press("ArrowDown")
        outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"

    async def test_focus_stays_on_its_row_when_the_table_is_updated(
        self, page: Page, world: World
    ) -> None:
        """A row that is still there is the same row."""
        row = page.locator(".entry-name").nth(5)
        await row.focus()
        await world.read("post", "aaa")
        await page.evaluate("document.getElementById('reload').click()")
        await expect(page.locator(".entry-name .id").first).to_have_text("aaa")
        await expect(page.locator(".entry-name").nth(6)).to_be_focused()


class TestG6Look:
    async def test_the_dashboard_follows_a_dark_colour_scheme(self, new_board: NewPage) -> None:
        """Light letters on a dark page, where the system says so."""
        page = await new_board(color_scheme="dark")
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        letters = await page.evaluate("getComputedStyle(document.body).color")
        assert (ground, letters) == ("rgb(15, 18, 22)", "rgb(232, 235, 240)")

    async def test_the_dashboard_fits_a_telephone(self, new_board: NewPage, world: World) -> None:
        """360 px wide, nothing stands out to the side: not a long id, not an open panel."""
        page = await new_board(**PHONE)
        await world.read("user", "x" * 500)
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        await page.locator("#search").fill("xxx")
        await expect(page.locator(".entry-name")).to_have_count(1)
        await page.locator(".entry-name").tap()
        await expect(page.locator("#panel-text")).to_contain_text("xxx")
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        box = "document.getElementById('panel').getBoundingClientRect()"
        await page.wait_for_function(f"() => {box}.x === 0 && {box}.width === 360")

    async def test_no_animation_runs_with_reduced_motion(self, new_board: NewPage) -> None:
        """`prefers-reduced-motion`: no animation runs on."""
        page = await new_board(reduced_motion="reduce")
        running = "document.getAnimations().filter((it) => it.playState === 'running').length"
        await page.wait_for_function(f"{running} === 0")


class TestG6Token:
    async def test_the_token_is_asked_for_and_kept_for_the_tab(
        self, new_page: NewPage, expected_errors: list[str]
    ) -> None:
        """A wrong one is said to be; the right one opens numbers, entries and actions."""
        page, world = await new_page(), World(token=TOKEN)
        expected_errors.append("401")
        async with world.at() as url:
            await world.read("post", "a")
            await page.goto(f"{url}/_stillfresh/")
            await expect(page.locator("#sign-in")).to_be_visible()
            await page.keyboard.press("Escape")
            await expect(page.locator("#sign-in")).to_be_visible()
            await page.locator("#token").fill("wrong")
            await page.keyboard.press("Enter")
            await expect(page.locator("#sign-in-said")).to_have_text("This token is wrong.")
            assert "wrong" not in page.url
            await page.locator("#token").fill(TOKEN)
            await page.keyboard.press("Enter")
            await expect(page.locator("#link")).to_have_text("live")
            await shown(page, "a")
            await page.locator("#refresh").click()
            await expect(page.locator("#panel-said")).to_have_text("Loaded again.")
            await page.reload()
            await expect(page.locator("#link")).to_have_text("live")
            assert await page.evaluate("localStorage.length") == 0
            await page.evaluate("sessionStorage.setItem('stillfresh-token', 'old')")
            await expect(page.locator(".entry-name")).to_have_count(1)
            await page.locator(".entry-name").click()
            await expect(page.locator("#sign-in")).to_be_visible()
            await page.close()
        assert len(world.asked) == 2


class TestG12SignIn:
    async def test_the_sign_in_form_says_how_long_to_wait_after_too_many_tokens(
        self, new_page: NewPage, expected_errors: list[str]
    ) -> None:
        """With the time to wait, where the token is asked for."""
        page, world = await new_page(), World(token=TOKEN)
        expected_errors.append("429")
        async with world.at() as url:
            await page.goto(f"{url}/_stillfresh/")
            said = page.locator("#sign-in-said")
            for number in range(10):
                await page.locator("#token").fill(f"wrong-{number}")
                await page.keyboard.press("Enter")
                await expect(said).to_have_text("This token is wrong.")
                await page.evaluate("document.getElementById('sign-in-said').textContent = ''")
            await page.locator("#token").fill(TOKEN)
            await page.keyboard.press("Enter")
            await expect(said).to_contain_text("too many wrong tokens from this address; try again")
            await page.close()


HOSTILE = """<!doctype html><title>hostile</title>
<form method="post" action="{target}/_stillfresh/api/entries/post/a/delete" target="frame">
<input name="x" value="y"></form><iframe name="frame"></iframe>
<iframe src="{target}/_stillfresh/"></iframe>"""

ATTACKS = """async (target) => {
  const path = `${target}/_stillfresh/api/entries/post/a/delete`;
  const tries = [
    () => fetch(path, { method: "POST", mode: "no-cors" }),
    () => fetch(path, { method: "POST", headers: { "X-Stillfresh": "1" } }),
    () => fetch(path, { method: "POST", body: new URLSearchParams({ a: 1 }) }),
    () => fetch(`${target}/_stillfresh/api/stats`),
    () => fetch(`${target}/_stillfresh/api/stats`, { mode: "no-cors" }).then((it) => it.text()),
  ];
  const read = [];
  for (const attempt of tries) {
    try { const told = await attempt(); read.push(typeof told === "string" ? told : told.type); }
    catch (error) { read.push(error.name); }
  }
  document.querySelector("form").submit();
  const socket = new WebSocket(target.replace("http", "ws") + "/v1/live");
  const heard = await new Promise((resolve) => {
    socket.onopen = () => socket.send('{"type": "stats"}');
    socket.onmessage = ({ data }) => {
      const { type } = JSON.parse(data);
      if (type !== "welcome") resolve(type);
    };
    socket.onclose = () => resolve("closed");
    socket.onerror = () => resolve("closed");
  });
  return { read, heard };
}"""


class TestG6HostilePage:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    @pytest.mark.parametrize("allowed", [False, True])
    async def test_a_hostile_page_in_a_browser_reaches_nothing(
        self, new_page: NewPage, expected_errors: list[str], host: str, allowed: bool
    ) -> None:
        """Its form, its scripts and its socket; also where its origin may use the live updates."""
        expected_errors += ["CORS", "403", "frame", "Failed to load", "WebSocket", "Refused"]
        targets: list[str] = []

        async def page_of(_: Request) -> HTMLResponse:
            return HTMLResponse(HOSTILE.format(target=targets[0]))

        async with served(Starlette(routes=[Route("/", page_of)])) as hostile:
            origin = hostile.replace("127.0.0.1", host)
            world = World(origins=[origin] if allowed else [])
            async with world.at() as target:
                targets.append(target)
                await world.read("post", "a")
                page = await new_page()
                posts: list[int] = []
                page.on(
                    "response",
                    lambda it: posts.append(it.status) if it.request.method == "POST" else None,
                )
                await page.goto(origin)
                told = await page.evaluate(ATTACKS, target)
                assert "copies" not in str(told["read"])
                assert told["heard"] == ("error" if allowed else "closed")
                assert set(posts) <= {403}
                record = await world.app.hub.resource("post").explain("a")
                assert str(record.verdict) == "fresh"
                assert len(world.asked) == 1
                await page.close()
