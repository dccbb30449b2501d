"""The demo in a real browser: a real `stillfresh demo` process and headless Chromium (G9).

It runs ten times as fast as for visitors; what happens is waited for, never for how long.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Page, Route, expect

from tests.kit.browser_site import PATIENCE
from tests.kit.layout import wrong_with
from tests.kit.servers.valkey import free_port

READY = re.compile(r"(http://[\d.]+:\d+/)")


class Demo:
    """A process of its own; ended with the test, however it ends."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "stillfresh", "demo", "--port", str(port or free_port())]
        environment = {**os.environ, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [*command, "--speed", "10", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        said = ""
        while not (found := READY.search(said)):
            line = self.process.stdout.readline()
            assert line, f"the demo ended: {said}"
            said += line
        self.url = found[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].strip("/"))

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Its exit code, and what it said since it was ready."""
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=30)
        return self.process.returncode, said

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=30)


@contextmanager
def started(folder: Path, *options: str, port: int | None = None) -> Iterator[Demo]:
    demo = Demo(folder, *options, port=port)
    try:
        yield demo
    finally:
        demo.kill()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """One demo for the tests that leave it as they found it."""
    with started(tmp_path_factory.mktemp("demo")) as demo:
        yield demo


@pytest_asyncio.fixture(loop_scope="session")
async def demo(shared: Demo) -> Demo:
    """Well again, whatever the test before it did."""
    await turn(shared.url, "fine")
    return shared


async def turn(url: str, mode: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, headers={"X-Stillfresh-Demo": "1"}) as client:
        said: dict[str, Any] = (await client.post("/demo/upstream", json={"mode": mode})).json()
        return said


async def shown(page: Page, url: str) -> None:
    """The page is there, and the first post has come."""
    await page.goto(url)
    badge = page.locator("[data-post] [data-badge]").first
    await expect(badge).to_contain_text(re.compile("fresh|stale"))


ON_SCREEN = """() => {
  const inside = (element) => {
    const box = element.getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight && box.height > 0;
  };
  const posts = [...document.querySelectorAll("[data-post]")].filter(inside);
  const people = [...document.querySelectorAll("[data-fresh]")].filter(inside);
  const ids = posts.map((it) => `post:${it.dataset.post}`);
  ids.push(...people.map((it) => it.dataset.fresh));
  const chips = [...document.querySelectorAll("#watching li")].map((it) => it.textContent);
  return [[...new Set(ids)].sort(), chips.sort()];
}"""
IS_EXACT = f"""() => {{
  const [onScreen, watched] = ({ON_SCREEN})();
  return onScreen.length > 0 && onScreen.join() === watched.join();
}}"""


class TestG9Feed:
    async def test_exactly_the_visible_posts_are_subscribed(self, demo: Demo, page: Page) -> None:
        """On arrival, and again after scrolling half way down: exactly what is on screen."""
        await shown(page, demo.url)
        await page.wait_for_function(IS_EXACT)
        before = (await page.evaluate(ON_SCREEN))[1]
        await page.evaluate("scrollTo(0, document.body.scrollHeight / 2)")
        await page.wait_for_function(IS_EXACT)
        after = (await page.evaluate(ON_SCREEN))[1]
        assert not {it for it in before if it.startswith("post:")} & set(after)

    async def test_scrolling_loads_only_posts_that_come_on_screen(
        self, demo: Demo, page: Page
    ) -> None:
        """The last posts are drawn; those that were passed over were never asked for."""
        await shown(page, demo.url)
        await page.evaluate(
            "document.querySelector('[data-post]:nth-last-of-type(1)').scrollIntoView()"
        )
        last = page.locator("[data-post]").last
        await expect(last.locator("[data-badge]")).to_contain_text("fresh")
        passed_over = page.locator("[data-post]").nth(120).locator("[data-badge]")
        await expect(passed_over).to_have_text("not loaded yet")

    async def test_an_upstream_change_appears_without_a_reload(
        self, demo: Demo, page: Page
    ) -> None:
        """Somewhere on screen a number changes by itself, in the same document."""
        await shown(page, demo.url)
        await page.evaluate("window.isTheSame = true")
        counts = (
            "[...document.querySelectorAll('[data-count]')].slice(0, 8).map((it) => it.textContent)"
        )
        before = await page.evaluate(f"{counts}.join()")
        await page.wait_for_function(f"(before) => {counts}.join() !== before", arg=before)
        assert await page.evaluate("window.isTheSame")

    @pytest.mark.proof
    async def test_a_hidden_tab_of_the_demo_stops_refreshing(self, demo: Demo, page: Page) -> None:
        """Nobody looks: the upstream is asked for no post any more; looked at again, it is."""
        await shown(page, demo.url)
        await hide(page, hidden=True)
        before = await quiet(demo.url)
        await hide(page, hidden=False)
        await until(demo.url, lambda now: now["asked"] > before)


async def hide(page: Page, *, hidden: bool) -> None:
    """As when another tab comes to the front: headless Chromium has no front."""
    await page.evaluate(
        """(hidden) => {
          const value = hidden ? "hidden" : "visible";
          Object.defineProperty(document, "visibilityState", {value, configurable: true});
          Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


async def state(url: str) -> dict[str, Any]:
    """What the demo counts."""
    async with httpx.AsyncClient(base_url=url) as client:
        said: dict[str, Any] = (await client.get("/demo/state")).json()
        return said


async def until(url: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE / 1000):
        while True:
            now = await state(url)
            if holds(now):
                return now
            await asyncio.sleep(0.05)


async def changed(url: str, times: int) -> dict[str, Any]:
    """When the upstream's world has changed so often again; posts are fresh for 14 changes."""
    before = (await state(url))["changes"]
    return await until(url, lambda now: now["changes"] >= before + times)


async def quiet(url: str) -> int:
    """What the upstream was asked, once it is asked no more for as long as posts are fresh."""
    async with asyncio.timeout(PATIENCE / 1000):
        before = -1
        while (asked := int((await changed(url, 40))["asked"])) != before:
            before = asked
        return asked


class TestG9Trouble:
    async def test_a_dead_upstream_shows_stale_posts_with_their_age(
        self, demo: Demo, page: Page
    ) -> None:
        """The switch on the page; the text stays, the badge says stale, and the age grows."""
        await shown(page, demo.url)
        first = page.locator("[data-post]").first
        await expect(page.locator("#page tr")).to_have_count(6)
        await page.get_by_label("Down").check()
        await expect(page.locator("body")).to_have_attribute("data-mode", "down")
        badge = first.locator("[data-badge]")
        await expect(badge).to_contain_text("stale")
        text = await first.locator(".text").text_content()
        await expect(badge).to_have_text(re.compile(r"stale, ([3-9]|\d\d+) s"))
        assert await first.locator(".text").text_content() == text
        await expect(page.locator("#word")).to_contain_text("The site stays")
        await page.reload()
        await expect(badge).to_have_text(re.compile(r"stale, \d+ s"))
        assert await first.locator(".text").text_content() == text
        await page.get_by_label("Fine").check()
        await expect(badge).to_have_text(re.compile("fresh"))

    @pytest.mark.proof
    async def test_a_post_that_was_never_answered_says_so(
        self, tmp_path: Path, page: Page, expected_errors: list[str]
    ) -> None:
        """Asked, and no answer yet: neither "not asked", nor shown as it never was; then it is."""
        expected_errors.append("503")
        with started(tmp_path) as demo:
            await turn(demo.url, "down")
            await page.goto(demo.url)
            first = page.locator("[data-post]").first
            badge, why = first.locator("[data-badge]"), first.locator(".why")
            await expect(badge).to_have_text("no answer yet")
            await expect(why).to_have_text("load failed, will try again")
            await expect(page.locator("#page-badge")).to_have_text("no copy")
            await expect(page.locator("#topics-badge")).to_have_text("no copy")
            await page.get_by_label("Fine").check()
            await expect(badge).to_contain_text("fresh")
            await expect(why).to_be_hidden()
            await expect(page.locator("#page-badge")).to_contain_text("fresh")
            await expect(page.locator("#topics-badge")).to_contain_text("fresh")
            await page.close()

    @pytest.mark.proof
    async def test_a_topic_without_a_copy_shows_no_age(self, demo: Demo, page: Page) -> None:
        """The age of the topic before is not left standing beside it."""
        await shown(page, demo.url)
        await page.locator("#topics button").first.click()
        badge = page.locator("#talk-badge")
        await expect(badge).to_contain_text("fresh")
        await page.get_by_label("Down").check()
        await expect(page.locator("body")).to_have_attribute("data-mode", "down")
        await page.locator("#topics button").nth(2).click()
        await expect(page.locator("#comments")).to_contain_text(
            "There is no copy yet, and the upstream does not answer."
        )
        await expect(badge).to_have_text("no copy")

    @pytest.mark.proof
    async def test_a_refused_comment_returns_to_its_field(self, demo: Demo, page: Page) -> None:
        """Back in the field, with a note that stays; sent again when the upstream is well."""
        await shown(page, demo.url)
        await page.locator("#topics button").first.click()
        await expect(page.locator("#comments li").first).not_to_have_class("muted")
        await page.get_by_label("Failing").check()
        await expect(page.locator("body")).to_have_attribute("data-mode", "failing")
        field, note = page.locator("#said"), page.locator("#say-word")
        await field.fill("Not lost at all")
        await field.press("Enter")
        await expect(note).to_contain_text("Not sent")
        await expect(field).to_have_value("Not lost at all")
        await expect(page.locator("#comments")).not_to_contain_text("Not lost at all")
        await changed(demo.url, 40)  # the list is read again meanwhile
        await expect(note).to_contain_text("Not sent")
        await page.get_by_label("Fine").check()
        await expect(page.locator("body")).to_have_attribute("data-mode", "fine")
        await field.press("Enter")
        await expect(note).to_be_empty()
        await expect(page.locator("#comments")).to_contain_text("Not lost at all")
        await expect(field).to_have_value("")

    @pytest.mark.proof
    async def test_the_demo_page_reconnects_after_a_restart(
        self, tmp_path: Path, page: Page, expected_errors: list[str]
    ) -> None:
        """The same page goes on by itself when the demo is back on its port."""
        expected_errors += [
            "ERR_CONNECTION_REFUSED",
            "WebSocket",
            "ERR_INCOMPLETE_CHUNKED_ENCODING",
        ]
        expected_errors += ["net::ERR", "Failed to load resource"]
        kept = str(tmp_path / "kept")
        with started(tmp_path, "--store", kept) as demo:
            await shown(page, demo.url)
            await page.evaluate("window.isTheSame = true")
            demo.end()
        with started(tmp_path, "--store", kept, port=demo.port):
            await page.wait_for_function(IS_EXACT)
            badge = page.locator("[data-post] [data-badge]").first
            await expect(badge).to_contain_text(re.compile("fresh, 0 s old"))
            assert await page.evaluate("window.isTheSame")
            await page.close()

    @pytest.mark.parametrize(
        "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.proof)]
    )
    async def test_the_demo_ends_and_leaves_no_file_and_no_process(
        self, tmp_path: Path, page: Page, expected_errors: list[str], number: signal.Signals
    ) -> None:
        """With a page open: exit code 0, the port free, no file, no process, no traceback."""
        expected_errors += ["ERR_", "WebSocket", "Failed to load resource"]
        with started(tmp_path) as demo:
            await shown(page, demo.url)
            code, said = demo.end(number)
            assert code == 0
            assert "Traceback" not in said
            assert "Error" not in said
            assert list(tmp_path.iterdir()) == []
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", demo.port))


class TestG9Games:
    async def test_the_next_game_is_never_the_current_one(self, demo: Demo, page: Page) -> None:
        """Eight games are opened and played; what is offered is always another."""
        await shown(page, demo.url)
        offered, board = page.locator("#next"), page.locator("#board")
        doing = page.locator("#games-word")
        for _ in range(8):
            # A click while the last one is on its way is refused.
            await expect(doing).not_to_contain_text("…")
            await expect(offered).to_be_enabled()
            game = str(await offered.evaluate(TAKEN))
            await expect(board).to_have_attribute("data-game", game)
            await page.wait_for_function(NOT_CURRENT)
            await board.evaluate(PLAYED)
            await page.wait_for_function(NOT_CURRENT)
            waiting = await page.locator("#queue button").evaluate_all(
                "(all) => all.map((it) => it.dataset.game)"
            )
            assert await board.get_attribute("data-game") not in waiting

    @pytest.mark.proof
    async def test_every_click_is_answered_while_the_game_service_is_down(
        self, demo: Demo, page: Page
    ) -> None:
        """A move says that it was taken back, a game of which nothing is kept that it cannot be
        shown: never another board under its name, nor an age that stands still. It comes later.
        """
        await shown(page, demo.url)
        board, badge = page.locator("#board"), page.locator("#board-badge")
        note, offered = page.locator("#games-word"), page.locator("#next")
        await expect(offered).to_be_enabled()
        await offered.click()
        await expect(badge).to_contain_text("fresh")
        await page.get_by_label("Down").check()
        proof = page.locator("#proof")
        await expect(proof).to_contain_text("service does not answer")
        await board.locator("button[aria-disabled='false']").first.click()
        await expect(note).to_contain_text("taken back")
        await expect(board).not_to_contain_text("✕")
        await changed(demo.url, 20)
        await expect(note).to_contain_text("taken back")
        game = await offered.get_attribute("data-game")
        await offered.click()
        await expect(page.locator("#turn")).to_contain_text("cannot be shown")
        await expect(board).to_have_attribute("data-game", game or "")
        await expect(badge).to_have_text("no copy")
        await expect(proof).to_contain_text("service does not answer")
        await page.get_by_label("Fine").check()
        await expect(badge).to_contain_text("fresh")
        await expect(page.locator("#turn")).to_contain_text("Your turn")


TAKEN = "button => { const game = button.dataset.game; button.click(); return game; }"
"""In one turn: another game may be offered at any moment."""
PLAYED = "board => board.querySelector('[aria-disabled=false]')?.click()"
NOT_CURRENT = """() =>
  document.getElementById("next").dataset.game !== document.getElementById("board").dataset.game"""


class TestG9Page:
    async def test_every_part_is_filled_and_says_how_fresh_it_is(
        self, demo: Demo, page: Page
    ) -> None:
        """Topics, comments, the slow page, an approval with its time."""
        await shown(page, demo.url)
        fresh = re.compile(r"(fresh|stale), \d+ s")
        await expect(page.locator("#topics li").first).to_be_visible()
        await expect(page.locator("#topics-badge")).to_have_text(fresh)
        await page.locator("#topics button").first.click()
        await expect(page.locator("#talk-badge")).to_have_text(fresh)
        await expect(page.locator("#page tr")).to_have_count(6)
        await expect(page.locator("#page-badge")).to_have_text(fresh)
        await expect(page.locator("#approvals li").first).to_be_visible()

    async def test_a_telephone_shows_one_part_at_a_time(
        self, demo: Demo, new_page: Callable[..., Any]
    ) -> None:
        """The tabs at the bottom choose it; what is not shown is not kept fresh."""
        page = await new_page(viewport={"width": 360, "height": 700})
        await shown(page, demo.url)
        await page.get_by_role("link", name="Games", exact=True).click()
        await expect(page.locator("#board")).to_be_visible()
        await expect(page.locator("#feed")).to_be_hidden()
        await expect(page.locator("#watched")).to_have_text("0 posts, 0 people")


ROWS = """
() => [...document.querySelectorAll("header:has(> .code-button)")]
  .filter((header) => header.offsetParent)
  .map((header) => [header.querySelector("h2"), header.querySelector(".code-button")])
  .filter(([title, button]) => {
    const [one, other] = [title.getBoundingClientRect(), button.getBoundingClientRect()];
    return one.bottom <= other.top || other.bottom <= one.top;
  })
  .map(([title]) => title.textContent)
"""
"""Cards whose code button stands in another row than their title."""


class TestG22Header:
    @pytest.mark.parametrize("width", [1265, 390])
    async def test_the_code_button_of_each_card_stands_beside_its_title(
        self, demo: Demo, new_page: Callable[..., Any], width: int
    ) -> None:
        """Also if scroll bars take their place, as this browser's do not."""
        page = await new_page(viewport={"width": width, "height": 860})
        await shown(page, demo.url)
        columns = page.locator(".side")
        await columns.evaluate_all("all => all.forEach((it) => it.style.paddingInlineEnd = '11px')")
        assert await page.evaluate(ROWS) == []

    @pytest.mark.parametrize(("width", "rows"), [(390, 4), (1280, 2)])
    async def test_the_header_holds_together_and_each_figure_has_a_label(
        self, demo: Demo, new_page: Callable[..., Any], width: int, rows: int
    ) -> None:
        """On a desk in two rows, on a telephone in four; no figure without its words above it."""
        page = await new_page(viewport={"width": width, "height": 860})
        await shown(page, demo.url)
        await page.evaluate("document.getElementById('polled').textContent = '123,456'")
        assert await wrong_with(page, width) == []
        boxes = await page.evaluate(FIGURES)
        assert len(boxes) == 4
        for label, figure in boxes:
            assert label["words"]
            assert label["bottom"] <= figure["top"] + 1
            assert abs(label["left"] - figure["left"]) < 1
        assert len({round(figure["top"]) for _, figure in boxes}) == 1
        height = await page.evaluate("document.querySelector('.top').offsetHeight")
        assert height <= 44 * rows + 8

    async def test_the_code_of_a_card_opens_and_closes_by_keyboard(
        self, demo: Demo, page: Page
    ) -> None:
        """Escape closes it, and the focus is where it was."""
        await shown(page, demo.url)
        button = page.get_by_role("button", name="Code of A cached function")
        await button.focus()
        await page.keyboard.press("Enter")
        code = page.locator("#code-rate")
        await expect(code).to_be_visible()
        await expect(code.locator("pre")).to_contain_text('@cache.cached("rate"')
        await page.keyboard.press("Escape")
        await expect(code).to_be_hidden()
        await expect(button).to_be_focused()

    async def test_the_cached_function_can_be_called_and_invalidated(
        self, demo: Demo, page: Page
    ) -> None:
        await shown(page, demo.url)
        await expect(page.locator("#rate")).to_have_text(re.compile(r"^\d\.\d{4}$"))
        await page.get_by_role("button", name="Invalidate it").click()
        await expect(page.locator("#rate-word")).to_contain_text("the next call waits")
        await page.get_by_role("button", name="Call it").click()
        await expect(page.locator("#rate-badge")).to_contain_text("fresh")
        await expect(page.locator("#rate-word")).to_contain_text("Until the copy is 10 s old")


FIGURES = """() => [...document.querySelectorAll(".meter > div:not(.word)")].map((figure) =>
  [...figure.children].map((part) => {
    const { left, top, bottom } = part.getBoundingClientRect();
    return { left, top, bottom, words: part.textContent };
  }))"""
SHIFTS = """
window.shifts = [];
const acts = [];
for (const type of ["pointerdown", "click", "keydown", "change"]) {
  addEventListener(type, () => {
    const act = { since: performance.now(), until: Infinity };
    acts.push(act);
    requestAnimationFrame(() => requestAnimationFrame((now) => { act.until = now; }));
  }, true);
}
const isDone = (at) => acts.some(({ since, until }) => since <= at && at <= until);
const name = (node) => node?.id || node?.className || node?.parentElement?.className || "a text";
new PerformanceObserver((list) => {
  for (const { hadRecentInput, startTime, value, sources } of list.getEntries()) {
    if (hadRecentInput || !value || isDone(startTime)) continue;
    shifts.push(sources.map(({ node }) => name(node)).join());
  }
}).observe({ type: "layout-shift" });
"""
"""What moved by itself: no click or key in the half second before, or since the last frame, which
may take longer on a busy machine.
"""
FOCUS = "document.activeElement.closest('[id]')?.id"
WIDTHS = (360, 390, 768, 900, 901, 1024, 1180, 1181, 1440)
"""From a telephone to a desk, and both sides of each width at which the style changes."""
MODES = ("fine", "slow", "failing", "down")


class Visitor:
    """Somebody with a keyboard, or with a mouse; on a telephone, one part at a time."""

    def __init__(self, page: Page, folder: Path, *, by_keyboard: bool) -> None:
        self.page = page
        self.folder = folder
        self.by_keyboard = by_keyboard

    async def press(self, selector: str) -> None:
        target = self.page.locator(selector).first
        await expect(target).to_be_visible()
        if self.by_keyboard:
            await target.focus()
            await self.page.keyboard.press("Enter")
        else:
            await target.click()

    async def turn_to(self, part: str) -> None:
        tab = self.page.locator(f'.tabs [data-view="{part}"]')
        if await tab.is_visible():
            await tab.click()

    async def switch(self, mode: str) -> None:
        """Done when the switch may be used again: while it is turned, it is disabled."""
        if self.by_keyboard:
            before = MODES[MODES.index(mode) - 1]
            await self.page.locator(f'#switch [value="{before}"]').focus()
            await self.page.keyboard.press("ArrowRight")
        else:
            await self.page.locator(f'#switch [value="{mode}"]').click()
        await self.page.wait_for_function(
            "(mode) => document.body.dataset.mode === mode && "
            "document.activeElement.matches(`#switch:enabled [value='${mode}']`)",
            arg=mode,
        )

    async def approve(self) -> None:
        """The next request, if one expires before it is reached."""
        async with asyncio.timeout(PATIENCE / 1000):
            while "Approved" not in await self.page.locator("#approvals-word").inner_text():
                await self.press("#approvals button")
                await expect(self.page.locator("#approvals [aria-disabled='true']")).to_have_count(
                    0
                )

    async def has_focus(self, where: str) -> None:
        await self.page.wait_for_function(f"() => ({FOCUS}) === {where!r}")

    async def says(self, selector: str, text: str) -> None:
        await expect(self.page.locator(selector)).to_contain_text(text)

    async def look(self, what: str) -> None:
        """Nothing is wrong with the layout; a picture of what is."""
        assert self.page.viewport_size is not None
        width = self.page.viewport_size["width"]
        if wrong := await wrong_with(self.page, width):
            await self.page.screenshot(path=self.folder / f"{what}-{width}.png")
        assert wrong == []


class TestG19Visit:
    @pytest.mark.parametrize(
        ("width", "by_keyboard", "scheme"),
        [
            (390, True, "light"),
            pytest.param(390, False, "dark", marks=pytest.mark.proof),
            pytest.param(1280, True, "dark", marks=pytest.mark.proof),
            pytest.param(1280, False, "light", marks=pytest.mark.proof),
        ],
    )
    async def test_a_visit_causes_no_layout_shift_and_no_lost_focus(
        self,
        demo: Demo,
        new_page: Callable[..., Any],
        tmp_path: Path,
        width: int,
        by_keyboard: bool,
        scheme: str,
    ) -> None:
        """A visit through all parts, well and failing: no layout shift, no text cut or pale."""
        size = {"width": width, "height": 860}
        page = await new_page(viewport=size, color_scheme=scheme)
        it = Visitor(page, tmp_path, by_keyboard=by_keyboard)
        await shown(page, demo.url)
        for part in ("#page tr", "#topics li", "#approvals button", "#queue button"):
            await expect(page.locator(part).first).to_be_attached()
        await page.evaluate(SHIFTS)
        await it.look("feed")

        await it.press("#got-it")
        await it.has_focus("feed")
        await it.press("#next:enabled")
        await it.says("#board-badge", "fresh")
        await it.has_focus("board")
        await self._play(it)
        await it.press("#queue button")
        await it.has_focus("board")
        await it.look("games")
        await it.turn_to("approvals")
        await it.approve()
        await page.wait_for_function(f"() => ({FOCUS} ?? '').startsWith('approvals')")
        await it.look("approvals")
        await it.turn_to("page")
        await it.press("#page-again")
        await it.says("#page-word", "served in")
        await it.has_focus("page-again")
        await it.look("page")
        await it.turn_to("topics")
        await it.press("#topics button")
        await it.says("#talk-badge", " old")
        await it.press("#say button")
        await it.says("#say-word", "the comment is empty")
        await it.has_focus("said")

        await it.switch("slow")
        await it.switch("failing")
        await page.locator("#said").fill("Is this taken?")
        await it.press("#say button")
        await it.says("#say-word", "Not sent: the upstream answered with 500.")
        await it.has_focus("said")
        await expect(page.locator("#said")).to_have_value("Is this taken?")
        await it.says("#word", "The upstream answers with errors")
        await it.look("failing")
        assert " is unavailable" not in await page.locator("body").inner_text()
        await it.switch("down")
        await it.says("#word", "The upstream is down")
        await it.look("down")
        await turn(demo.url, "fine")
        await it.says("#word", "The upstream is fine")
        assert await page.evaluate("shifts") == []

    async def _play(self, it: Visitor) -> None:
        """Arrow keys go from cell to cell, and the cell that was played keeps the focus."""
        board = it.page.locator("#board button")
        if not it.by_keyboard:
            await it.press("#board [aria-disabled='false']")
        else:
            await board.first.focus()
            for key, at in (("ArrowRight", 1), ("ArrowDown", 4), ("ArrowLeft", 3), ("ArrowUp", 0)):
                await it.page.keyboard.press(key)
                await expect(board.nth(at)).to_be_focused()
            await it.press("#board [aria-disabled='false']")
        await it.says("#board", "✕")
        await it.has_focus("board")
        # A click while the move is on its way is refused.
        await expect(it.page.locator("#games-word")).not_to_contain_text("…")

    @pytest.mark.proof
    async def test_the_demo_page_fits_every_width(
        self, demo: Demo, new_page: Callable[..., Any]
    ) -> None:
        """One page, made wider, is never wider than its window."""
        page = await new_page()
        await shown(page, demo.url)
        for width in WIDTHS:
            await page.set_viewport_size({"width": width, "height": 860})
            await page.wait_for_function("innerWidth >= document.documentElement.scrollWidth")

    @pytest.mark.proof
    async def test_the_list_of_games_does_not_change_under_the_pointer(
        self, demo: Demo, page: Page
    ) -> None:
        """The list of games changes when the pointer has left it, or by the visitor's own doing."""
        await shown(page, demo.url)
        queue, offered = page.locator("#queue button"), page.locator("#next")
        await expect(queue).to_have_count(5)
        ids = "[...document.querySelectorAll('#queue button')].map((it) => it.dataset.game).join()"
        await queue.nth(2).hover()
        before = await page.evaluate(ids)

        async def reversed_games(route: Route) -> None:
            """As if the longest wait were the shortest."""
            answer = await (await route.fetch()).json()
            await route.fulfill(json={**answer, "next": answer["next"][::-1]})

        await page.route("**/demo/games", reversed_games)
        await page.evaluate("import('/demo/static/games.js').then(({ changed }) => changed())")
        last = before.split(",")[-1]
        await expect(offered).to_have_attribute("data-game", last)  # the news is there
        assert await page.evaluate(ids) == before
        await page.mouse.move(0, 0)
        await page.wait_for_function(f"() => {ids}.startsWith({last!r})")
        await queue.nth(2).hover()
        await page.keyboard.press("n")
        await page.wait_for_function(f"() => !{ids}.includes({last!r})")
