"""T15: the page of a history in Chromium: steps, playing, zoom, the law, and the keyboard."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, expect
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from stillfresh.lab.replay import SCENARIOS, page_of, play_of, replayed
from tests.gateway.conftest import NewPage
from tests.kit.layout import wrong_with
from tests.kit.serving import served

OVERLAPS = """
() => {
  const words = [...document.querySelectorAll("svg text.verdict")];
  const boxes = words.map((node) => node.getBBox());
  const isApart = (one, other) =>
    one.x >= other.x + other.width || other.x >= one.x + one.width
    || one.y >= other.y + other.height || other.y >= one.y + one.height;
  const covers = (one, place) => boxes.slice(place + 1).some((other) => !isApart(one, other));
  return words.filter((_, place) => covers(boxes[place], place)).map((node) => node.textContent);
}
"""
"""Words of reads that cover others."""
HIDDEN = """
() => {
  const signs = [...document.querySelectorAll("svg g > circle, svg g > path:not(.arrow)")];
  const isApart = (one, other) =>
    one.x >= other.x + other.width || other.x >= one.x + one.width
    || one.y >= other.y + other.height || other.y >= one.y + one.height;
  const isFree = (word) => signs.every(
    (sign) => sign.parentNode === word.parentNode || isApart(word.getBBox(), sign.getBBox()));
  const words = [...document.querySelectorAll("svg text.verdict:not(.bad)")];
  return words.filter((word) => !isFree(word)).map((word) => word.textContent);
}
"""
"""Words of right reads below the sign of something else."""


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Made outside of any event loop, as the simulator runs its own."""
    return {name: page_of(replayed(play_of(name), 3)) for name in SCENARIOS}


@asynccontextmanager
async def opened(new_page: NewPage, text: str, **options: object) -> AsyncIterator[Page]:
    answer = HTMLResponse(text)
    async with served(Starlette(routes=[Route("/", lambda _: answer)])) as url:
        page = await new_page(**options)
        await page.goto(url)
        yield page


class TestT15ReplayPage:
    async def test_keys_step_through_the_history(
        self, new_page: NewPage, pages: dict[str, str]
    ) -> None:
        """The same step is in the picture, in the live text and in the list."""
        async with opened(new_page, pages["invalidation"]) as page:
            count = await page.locator("#steps li").count()
            await expect(page.locator("#place")).to_have_text(f"step {count} of {count}")
            await page.keyboard.press("Home")
            await expect(page.locator("#now")).to_have_text("Press Next to begin.")
            await page.keyboard.press("ArrowRight")
            await expect(page.locator("#place")).to_have_text(f"step 1 of {count}")
            first = await page.locator("#steps li").first.inner_text()
            assert first.split("\n")[-1] in await page.locator("#now").inner_text()
            await expect(page.locator("#steps [aria-current]")).to_have_count(1)
            assert await page.locator("svg .later").count() > 0
            await page.keyboard.press("End")
            await expect(page.locator("svg .later")).to_have_count(0)

    async def test_the_moment_of_the_law_is_marked_and_reached_by_a_key(
        self, new_page: NewPage, pages: dict[str, str]
    ) -> None:
        """With the sentence that says what the store does there."""
        async with opened(new_page, pages["invalidation"]) as page:
            await expect(page.locator(".law-band")).to_have_count(1)
            await page.keyboard.press("l")
            await expect(page.locator("#now")).to_contain_text("The store refuses price 'a'")
            await expect(page.locator("#now")).to_have_class(re.compile("law"))

    async def test_without_the_law_wrong_reads_are_shown_as_wrong(
        self, new_page: NewPage, pages: dict[str, str]
    ) -> None:
        """By a word and a sign, and not by colour alone."""
        async with opened(
            new_page, pages["invalidation-without-the-law"], color_scheme="dark"
        ) as page:
            await expect(page.locator("#outcome")).to_contain_text("A promise was broken")
            wrong = page.locator("svg text.verdict.bad")
            await expect(wrong).to_have_count(3)
            await expect(wrong.first).to_have_text("✕ v1 FRESH")

    async def test_buttons_zoom_and_play(self, new_page: NewPage, pages: dict[str, str]) -> None:
        """Zooming makes the picture wider; playing goes on by itself, and stops."""
        async with opened(new_page, pages["invalidation"]) as page:
            picture = page.locator("#scroll svg")
            before = float(await picture.get_attribute("width") or 0)
            await page.get_by_role("button", name="Zoom in").click()
            assert float(await picture.get_attribute("width") or 0) > 1.5 * before
            await page.get_by_role("button", name="Zoom out").click()
            await expect(page.get_by_role("button", name="Zoom out")).to_be_disabled()
            await page.keyboard.press("Home")
            play = page.locator("#play")
            await play.click()
            await expect(play).to_have_attribute("aria-pressed", "true")
            await expect(page.locator("#place")).to_contain_text("step 2 of")
            await play.click()
            await expect(play).to_have_attribute("aria-pressed", "false")

    async def test_a_button_at_its_end_keeps_the_focus(
        self, new_page: NewPage, pages: dict[str, str]
    ) -> None:
        """A really disabled button would lose it, and with it the place of a keyboard's user."""
        async with opened(new_page, pages["invalidation"]) as page:
            first = page.locator("#first")
            await first.press("Enter")
            await expect(first).to_be_disabled()
            await expect(first).to_be_focused()
            await page.keyboard.press("ArrowRight")
            await expect(page.locator("#place")).to_contain_text("step 1 of")

    async def test_the_words_of_reads_do_not_cover_one_another(
        self, new_page: NewPage, pages: dict[str, str]
    ) -> None:
        """Where reads are close, they are named after zooming in."""
        async with opened(new_page, pages["visitors"]) as page:
            named = page.locator("svg text.verdict")
            before = await named.count()
            assert before < await page.locator("#scroll circle.read").count()
            assert await page.evaluate(OVERLAPS) == []
            for _ in range(6):
                await page.get_by_role("button", name="Zoom in").click()
            assert await named.count() > before
            assert await page.evaluate(OVERLAPS) == []

    async def test_no_sign_hides_the_words_of_a_right_read(
        self, new_page: NewPage, pages: dict[str, str]
    ) -> None:
        """Changes are drawn later, in the same lane."""
        async with opened(new_page, pages["visitors"]) as page:
            assert await page.locator("svg text.verdict").count() > 0
            assert await page.evaluate(HIDDEN) == []
            await page.get_by_role("button", name="Zoom in").click()
            assert await page.evaluate(HIDDEN) == []

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [390, 1280])
    async def test_the_layout_holds_in_both_schemes(
        self, new_page: NewPage, pages: dict[str, str], width: int, scheme: str
    ) -> None:
        """Contrast, no clipped words, no sideways scroll."""
        async with opened(
            new_page,
            pages["invalidation-without-the-law"],
            viewport={"width": width, "height": 800},
            color_scheme=scheme,
        ) as page:
            await page.add_style_tag(content="ol.steps { max-height: none; }")  # no hidden lines
            assert await wrong_with(page, width) == []

    @pytest.mark.parametrize("width", [390, 1280])
    async def test_the_page_is_no_wider_than_the_window(
        self, new_page: NewPage, pages: dict[str, str], width: int
    ) -> None:
        """On a telephone the picture scrolls inside its frame."""
        async with opened(
            new_page, pages["visitors"], viewport={"width": width, "height": 800}
        ) as page:
            assert await page.evaluate("document.documentElement.scrollWidth") <= width

    def test_the_page_loads_nothing(self, pages: dict[str, str]) -> None:
        """It is one file: no address of another one is in it."""
        page = pages["invalidation"]
        assert not re.search(r"""(src|href)=["'](?!data:)""", page)
        assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
