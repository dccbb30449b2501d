"""I16: a page at hand is served just as the long way would serve it."""

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.model import StoredPage
from stillfresh.testing import ManualClock
from tests.kit.examples import examples
from tests.kit.isr import Site, Visitor, in_front
from tests.kit.page_world import SAYS, PageWorld, changes

Field = tuple[bytes, bytes]

FIELDS: tuple[Field, ...] = (
    (b"accept-encoding", b"gzip"),
    (b"accept-encoding", b"br, gzip;q=0.5"),
    (b"accept-language", b"de"),
    (b"authorization", b"Basic x"),
    (b"cache-control", b"no-cache"),
    (b"cache-control", b"only-if-cached"),
    (b"cookie", b"session=1"),
    (b"cookie", b"session=1; stillfresh_token=1~c.another"),
    (b"host", b"a.example"),
    (b"if-match", b'"a"'),
    (b"if-modified-since", b"Tue, 14 Nov 2023 22:13:20 GMT"),
    (b"if-none-match", b'"a"'),
    (b"pragma", b"no-cache"),
    (b"range", b"bytes=1-3"),
    (b"stillfresh-token", b"1~c.maker"),
    (b"user-agent", b"x"),
    (b"x-lang", b"de"),
    (b"x-lang", b"en"),
)


@pytest.fixture(autouse=True)
def _one_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two caches whose answers are compared give the same tokens."""
    monkeypatch.setattr("stillfresh.engine.lifecycle.new_maker", lambda: "maker")


PATHS = ("/own/a", "/own/a?q=1", "/said/a", "/said/a?z=1")
visits = st.tuples(
    st.just("visit"),
    st.integers(0, 2),
    st.sampled_from(["GET", "GET", "GET", "HEAD", "PUT"]),
    st.sampled_from(PATHS),
    st.lists(st.sampled_from(FIELDS), max_size=2).map(tuple),
)
events = st.one_of(visits, visits, visits, changes)


def visit(url: str, *fields: Field, plain: int = 2, method: str = "GET") -> tuple[Any, ...]:
    return "visit", plain, method, url, fields


OTHERS = (
    [visit("/own/a", field) for field in FIELDS],
    [("says", SAYS[0]), *(visit("/said/a", field) for field in FIELDS)],
    [("says", SAYS[3]), *(visit("/said/a", field, field) for field in FIELDS)],
    [visit("/own/a"), ("advance", 0.5), visit("/own/a"), ("advance", 0.5), visit("/own/a")],
    [visit("/own/a"), ("says", SAYS[1]), ("advance", 61.0)]
    + [visit("/own/a", field, plain=1) for field in FIELDS[:3] * 3],
    [("says", SAYS[1])]
    + [visit("/said/a", FIELDS[0]), ("says", SAYS[2]), ("advance", 40.0)]
    + [visit("/said/a", field, plain=1) for field in FIELDS[:3] * 3],
    [("says", SAYS[1]), visit("/said/a")]
    + [("says", ("Cache-Control: max-age=2", "Vary: Accept-Encoding"))]
    + [visit("/said/a", FIELDS[0], plain=0), ("advance", 1.5)]
    + [visit("/said/a", FIELDS[0], plain=0)] * 2
    + [("advance", 0.75), visit("/said/a", FIELDS[0], plain=0)],
)
"""Every header after a plain visit; an age that grows; a page that begins to vary; a variant that
ends before the page that it is one of."""


class World(PageWorld):
    """With or without what is at hand."""

    def __init__(self, *, has_memo: bool, is_private: bool) -> None:
        super().__init__(in_memory=is_private)
        if not has_memo:
            self.app._memo.find = lambda *_: None  # type: ignore[method-assign]

    async def step(self, what: str, *given: Any) -> object:
        return await (self.visits(*given) if what == "visit" else self.change(what, *given))

    async def visits(self, plain: int, method: str, url: str, fields: Sequence[Field]) -> object:
        """After some that ask for the page and nothing more."""
        before = [await self.visit("GET", url, ()) for _ in range(plain)]
        return [*before, await self.visit(method, url, fields)]

    async def visit(self, method: str, url: str, fields: Sequence[Field]) -> object:
        """What it was answered, once nothing is under way behind it."""
        path, _, query = url.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "scheme": "http",
            "root_path": "",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(b"host", b"a.example"), *fields],
        }
        told: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            told.append(dict(message))

        await self.app(scope, receive, send)
        while await self.is_loading():
            await asyncio.sleep(0)
        start, body = told
        return start["status"], sorted(start["headers"]), body["body"], self.site.renders


async def lived(steps: Sequence[tuple[Any, ...]], **options: bool) -> list[object]:
    world = World(**options)
    async with world.pages:
        told = [await world.step(*step) for step in steps]
        return [*told, await world.reads()]


def compare(steps: Sequence[tuple[Any, ...]], *, is_private: bool) -> None:
    fast = asyncio.run(lived(steps, has_memo=True, is_private=is_private))
    slow = asyncio.run(lived(steps, has_memo=False, is_private=is_private))
    assert fast == slow


class TestI16PageMemo:
    @settings(max_examples=examples(30), deadline=None)
    @given(st.lists(events, min_size=4, max_size=20), st.booleans())
    def test_a_prepared_answer_equals_the_answer_of_the_full_path(
        self, steps: list[tuple[Any, ...]], is_private: bool
    ) -> None:
        """Status, every header field, body, how often the site was asked, and what is counted."""
        compare(steps, is_private=is_private)

    @pytest.mark.parametrize("steps", OTHERS)
    @pytest.mark.parametrize("is_private", [True, False])
    def test_a_prepared_answer_obeys_each_header_and_each_change(
        self, steps: list[tuple[Any, ...]], is_private: bool
    ) -> None:
        """Each header by itself, and each change that random steps seldom hit on."""
        compare(steps, is_private=is_private)

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"accept-encoding": "gzip"},
            {"accept-encoding": "gzip", "if-none-match": '"other"'},
            {"accept-language": "de", "range": "bytes=0-1"},
        ],
    )
    async def test_pages_with_variants_and_conditions_have_prepared_answers(
        self, pages: PageCache, site: Site, headers: dict[str, str]
    ) -> None:
        """The third visit does not go the long way."""
        site.says("Vary: Accept-Encoding, Accept-Language")
        isr = IsrMiddleware(site, pages, routes={"/pricing": "60s"})
        visit = Visitor(isr)
        await visit()
        said = [(await visit(headers=headers)).status_code for _ in range(2)]
        isr._visits.find = _refused  # type: ignore[assignment,method-assign]
        assert [(await visit(headers=headers)).status_code] == said[1:]

    async def test_a_page_that_begins_to_vary_is_no_longer_served_to_everybody(
        self, pages: PageCache, site: Site
    ) -> None:
        """What was remembered without its headers is remembered by them."""
        visit = in_front(site, pages)
        for _ in range(2):
            await visit(headers={"accept-language": "de"})
        site.says("Vary: Accept-Language")
        await pages.purge("/pricing")
        first = [(await visit(headers={"accept-language": it})).text for it in ("de", "fr", "de")]
        assert first == ["page 3", "page 4", "page 3"]

    async def test_pages_dropped_from_memory_are_freed(
        self, clock: ManualClock, site: Site
    ) -> None:
        """What is at hand is found through memory's entry, and goes with it."""
        site.says("X-Dropped: yes")
        async with PageCache("memory://", clock=clock, max_entries=2) as pages:
            visit = Visitor(IsrMiddleware(site, pages, routes={"/*": "60s"}))
            for number in range(9):
                await visit(f"/{number}")
                await visit(f"/{number}")
        gc.collect()
        stored = [it for it in gc.get_objects() if type(it) is StoredPage]
        assert not [it for it in stored if (b"x-dropped", b"yes") in it.head.headers]


async def _refused(*_: object) -> None:
    raise AssertionError("the long way")
