"""I13, I14: variants that state different `Vary` fields, as another process meets them first."""

from pathlib import Path
from typing import Any

import pytest

from stillfresh.pages import PageCache, Route
from stillfresh.pages.model import App
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, Visitor, as_it_says

GERMAN = {"accept-language": "de"}
ENGLISH = {"accept-language": "en"}


def by_language(site: Site, german: str) -> App:
    """Says its language and kind; the German page states another `Vary` than the others."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent = dict(scope["headers"])
        language = sent.get(b"accept-language", b"none")
        site.body = language + b" " + sent.get(b"x-kind", b"-")
        vary = german if language == b"de" else "Accept-Language"
        site.says("Cache-Control: max-age=60", f"Vary: {vary}")
        await site(scope, receive, send)

    return app


@pytest.mark.parametrize("forward", ["request", "key"])
@pytest.mark.parametrize("revalidate", [None, "60s"])
class TestI13OtherVary:
    @pytest.fixture
    def routes(self, forward: Any, revalidate: Any) -> dict[str, Route]:
        return {"/*": Route(revalidate, forward=forward)}

    async def test_a_variant_stored_first_is_served_only_to_its_own_language(
        self, tmp_path: Path, clock: ManualClock, site: Site, routes: Any
    ) -> None:
        """The German page does not name the language; the page that it stands beside does."""
        app = by_language(site, "Accept-Encoding")
        url = f"sqlite:///{tmp_path}/p.db"
        async with PageCache(url, clock=clock) as one, PageCache(url, clock=clock) as two:
            first, second = (as_it_says(app, it, routes=routes) for it in (one, two))
            for headers in ({}, GERMAN, ENGLISH):
                await first(headers=headers)
            renders = site.renders
            for _ in range(2):
                texts = [(await second(headers=it)).text for it in (GERMAN, GERMAN, ENGLISH, {})]
                assert texts == ["de -", "de -", "en -", "none -"]
            assert site.renders == renders

    async def test_a_variant_that_varies_by_another_field_is_not_served_without_it(
        self, tmp_path: Path, clock: ManualClock, site: Site, routes: Any
    ) -> None:
        """The German page depends on `X-Kind` as well: each kind has its own answer."""
        app = by_language(site, "Accept-Language, X-Kind")
        url = f"sqlite:///{tmp_path}/p.db"
        async with PageCache(url, clock=clock) as one, PageCache(url, clock=clock) as two:
            first, second = (as_it_says(app, it, routes=routes) for it in (one, two))
            await first()
            for visit in (first, second):
                for _ in range(3):
                    assert await kinds(visit) == ["de a", "de b", "de a", "en -"]

    @pytest.mark.parametrize("told", ["Cookie", "Accept-Encoding, accept-language", None])
    async def test_a_304_with_a_smaller_vary_does_not_open_a_variant_to_all(
        self, pages: PageCache, clock: ManualClock, site: Site, routes: Any, told: str | None
    ) -> None:
        """The page that is still valid is the German one, however often it is confirmed."""
        lines = ["Cache-Control: max-age=60", 'ETag: "de"']

        async def app(scope: Any, receive: Any, send: Any) -> None:
            sent = dict(scope["headers"])
            site.body = sent.get(b"accept-language", b"none")
            vary = told if b"if-none-match" in sent else "Accept-Language"
            site.says(*lines, *([f"Vary: {vary}"] if vary else []))
            await site(scope, receive, send)

        site.validates = True
        visit = as_it_says(app, pages, routes=routes)
        for _ in range(3):
            assert (await visit(headers=GERMAN)).text == "de"
            lines[1] = 'ETag: "none"'
            assert (await visit()).text == "none"
            lines[1] = 'ETag: "de"'
            assert (await visit(headers=GERMAN)).headers["vary"].lower().count("accept-l") == 1
            clock.advance(60 + 8 * 86_400)


async def kinds(visit: Visitor) -> list[str]:
    sent = [{**GERMAN, "x-kind": "a"}, {**GERMAN, "x-kind": "b"}, {**GERMAN, "x-kind": "a"}]
    return [(await visit(headers=it)).text for it in [*sent, ENGLISH]]
