"""What is wrong with the layout of a page, in sentences, as `layout.js` measures it."""

from pathlib import Path

from playwright.async_api import Page

WRONG = Path(__file__).with_name("layout.js").read_text().partition("\n")[2]
LOOKS = 40


async def wrong_with(page: Page, width: int) -> list[str]:
    """What stays wrong: a page that was just made wider may still be settling."""
    sentences: list[str] = []
    for _ in range(LOOKS):
        sentences = await page.evaluate(WRONG, width)
        if not sentences:
            break
        await page.wait_for_timeout(100)
    return sentences
