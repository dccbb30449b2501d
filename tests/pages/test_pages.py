"""I8, I9, I10, I11, I16: `PageCache.get`, on each store, on a manual clock."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from stillfresh import ConfigError, NotOpen, StoreError, Verdict
from stillfresh.pages import Page, PageCache
from stillfresh.pages.model import PageKey
from stillfresh.pages.page_cache import CONCURRENCY
from stillfresh.stores import Capabilities, WrappedStore
from stillfresh.stores.contract import Ask
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper, outcome, turns, until
from tests.kit.held_store import SteppedStore
from tests.kit.isr import Site, as_it_says, in_front


async def idle(pages: PageCache) -> None:
    while (await pages.stats()).resources["page"].loading:
        await asyncio.sleep(0)


T = TypeVar("T")


class Counting(MemoryStore):
    """Counts its reads."""

    reads = 0

    async def read(self, *args: Any, **options: Any) -> Any:
        self.reads += 1
        return await super().read(*args, **options)


class TestI8Serve:
    async def test_a_stale_page_is_served_at_once_and_rendered_in_the_background(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """The visitor of a stale page waits for nobody; the next one has the new page."""
        for expected, verdict in ((b"page 1", Verdict.FRESH), (b"page 1", Verdict.FRESH)):
            page = await pages.get("/pricing", site.render, revalidate=60)
            assert (page.body, page.verdict, page.status) == (expected, verdict, 200)
        clock.advance(60)
        site.hold()
        stale = await pages.get("/pricing", site.render, revalidate=60)
        assert (stale.body, stale.verdict, stale.age) == (b"page 1", Verdict.STALE, 60)
        await site.asked.wait()
        site.let_go()
        await idle(pages)
        assert (await pages.get("/pricing", site.render, revalidate=60)).body == b"page 2"
        assert site.renders == 2

    async def test_a_page_keeps_its_status_headers_and_body(
        self, pages: PageCache, site: Site
    ) -> None:
        """Also from the store, and with a strong ETag of the body."""
        site.says("Content-Type: text/x", "X-Two: a", "X-Two: b", status=404)
        for _ in range(2):
            page = await pages.get("/gone", site.render, revalidate="1m")
            assert page == Page(page.body, 404, {"content-type": "text/x", "x-two": "a, b"})
            assert page.etag is not None
        assert site.renders == 1

    async def test_eight_visitors_of_an_absent_page_are_one_render(
        self, pages: PageCache, site: Site
    ) -> None:
        """I9: all get the same."""
        asked = [pages.get("/pricing", site.render, revalidate=60) for _ in range(8)]
        assert {page.body for page in await asyncio.gather(*asked)} == {b"page 1"}
        assert site.renders == 1

    async def test_a_failing_render_leaves_the_old_page_and_cools_down(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """By an exception, or by a status of 500 or more."""
        await pages.get("/pricing", site.render, revalidate=60)
        clock.advance(60)
        site.status = 503
        await pages.get("/pricing", site.render, revalidate=60)
        await idle(pages)
        for _ in range(3):
            page = await pages.get("/pricing", site.render, revalidate=60)
            assert (page.body, page.verdict) == (b"page 1", Verdict.STALE)
            assert page.error is not None
        assert site.renders == 2
        clock.advance(1)
        site.status, site.error = 200, RuntimeError("database")
        await pages.get("/pricing", site.render, revalidate=60)
        await idle(pages)
        assert (await pages.get("/pricing", site.render, revalidate=60)).body == b"page 1"
        assert site.renders == 3

    async def test_the_error_is_reported_while_a_retry_is_running(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """E31: in `error`, and in `Cache-Status`, until a render succeeds."""
        visit = in_front(site, pages)
        await visit()
        clock.advance(60)
        site.error = RuntimeError("database")
        await visit()
        await idle(pages)
        seen = [(await visit()).headers["cache-status"]]
        clock.advance(1)
        site.hold()
        seen += [(await visit()).headers["cache-status"] for _ in range(3)]
        await site.asked.wait()
        site.let_go()
        await idle(pages)
        seen.append((await visit()).headers["cache-status"])
        assert [it.rpartition("; ")[2] for it in seen] == ["detail=refresh-failed"] * 5
        assert site.renders == 3
        site.error = None
        clock.advance(2)
        await visit()
        await idle(pages)
        assert "detail" not in (await visit()).headers["cache-status"]

    async def test_a_request_that_wants_a_fresher_page_waits_for_the_retry(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """E31: only a cooldown is a reason to answer it with the old page."""
        site.says("Cache-Control: max-age=60, stale-while-revalidate=600")
        visit = as_it_says(site, pages)
        wish = {"cache-control": "max-age=5"}
        await visit()
        clock.advance(61)
        site.status = 503
        await visit()
        await idle(pages)
        assert (await visit(headers=wish)).text == "page 1"
        site.status = 200
        clock.advance(1)
        assert (await visit(headers=wish)).text == "page 3"

    async def test_without_a_page_the_error_is_served_and_then_503(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """Never stored; within the cooldown: 503, and when to come again."""
        site.status, site.body = 500, b"sorry"
        page = await pages.get("/a", site.render, revalidate=60)
        assert (page.status, page.body, page.stored) == (500, b"sorry", False)
        page = await pages.get("/a", site.render, revalidate=60)
        assert (page.status, page.headers["retry-after"]) == (503, "1")
        site.error = RuntimeError("database")
        with pytest.raises(RuntimeError, match="database"):
            await pages.get("/b", site.render, revalidate=60)
        clock.advance(2)
        site.error, site.status = None, 200
        assert (await pages.get("/a", site.render, revalidate=60)).status == 200

    async def test_a_visitor_that_waits_too_long_for_another_gets_503_with_retry_after(
        self, pages: PageCache, site: Site, sleeper: Sleeper
    ) -> None:
        """`wait`, then 503 with Retry-After; the one who renders waits for his own render."""
        first = await site.holding(pages.get("/pricing", site.render, revalidate=60))
        second = asyncio.create_task(pages.get("/pricing", site.render, revalidate=60))
        await until(lambda: sleeper.asked.count(7.0) == 2)
        await turns()
        sleeper.wake()
        page = await second
        assert (page.status, page.headers["retry-after"]) == (503, "1")
        site.let_go()
        assert (await first).body == b"page 1"

    async def test_polling_stops_when_the_last_waiting_visitor_got_503(
        self, site: Site, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Another process renders: once its last waiter is gone, the store is asked no more."""
        store = Counting(clock=clock)
        async with PageCache(store, clock=clock, sleep=sleeper) as pages:
            await store.acquire("page", [Ask("/pricing")], 5)
            asking = asyncio.create_task(pages.get("/pricing", site.render, revalidate=60))
            await until(lambda: len(sleeper.asked) == 2)  # `wait`, and the pause before a look
            assert 7.0 in sleeper.asked
            sleeper.wake()
            assert (await asking).status == 503
            await turns()
            reads, pauses = store.reads, len(sleeper.asked)
            for _ in range(5):
                sleeper.wake()
                await turns()
            assert store.reads <= reads + 1
            assert len(sleeper.asked) <= pauses + 1
            assert not (await pages.stats()).resources["page"].loading

    async def test_a_cancelled_caller_does_not_stop_the_render(
        self, pages: PageCache, site: Site
    ) -> None:
        """I15: others wait for it."""
        first = await site.holding(pages.get("/pricing", site.render, revalidate=60))
        second = asyncio.create_task(pages.get("/pricing", site.render, revalidate=60))
        await turns()
        first.cancel()
        await turns()
        site.let_go()
        assert (await second).body == b"page 1"
        assert site.renders == 1

    async def test_a_page_that_sets_a_cookie_is_rendered_for_each_caller(
        self, pages: PageCache, site: Site
    ) -> None:
        """I13: eight visitors, eight renders, nothing stored."""
        site.says("Set-Cookie: session=1")
        asked = [pages.get("/me", site.render, revalidate=60) for _ in range(8)]
        bodies = {page.body for page in await asyncio.gather(*asked)}
        assert bodies == {f"page {number}".encode() for number in range(1, 9)}
        assert site.renders == 8

    async def test_a_page_whose_body_cannot_be_read_is_a_miss(
        self, tmp_path: Path, site: Site, clock: ManualClock
    ) -> None:
        """Bytes of another shape are rendered anew, not a crash."""
        url = f"sqlite:///{tmp_path}/pages.db"
        async with PageCache(url, clock=clock) as pages:
            await pages.get("/pricing", site.render, revalidate=60)
        import apsw  # noqa: PLC0415 (only here)

        connection = apsw.Connection(str(tmp_path / "pages.db"))
        column = next(
            row[1] for row in connection.execute("PRAGMA table_info(page)") if row[2] == "BLOB"
        )
        connection.execute(f"UPDATE page SET {column} = x'00ff'")
        connection.close()
        async with PageCache(url, clock=clock) as pages:
            assert (await pages.get("/pricing", site.render, revalidate=60)).body == b"page 2"


class Away(MemoryStore):
    """A store that can be cut off."""

    is_away = False

    def __getattribute__(self, name: str) -> Any:
        steps = {"open", "read", "read_now", "acquire", "publish", "renew", "release"}
        if name in steps and object.__getattribute__(self, "is_away"):
            raise StoreError("cut off")
        return super().__getattribute__(name)


class Hanging(WrappedStore):
    """A store that can stop to answer."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MemoryStore(clock=clock))
        self.is_hanging = False

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), inline=None)

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        if self.is_hanging and name in HANGS:
            await asyncio.get_running_loop().create_future()
        return await super().step(name, work)


HANGS = {"read", "acquire", "publish", "renew", "release", "invalidate", "invalidate_tag"}


class TestI10StoreHangs:
    async def test_a_store_that_hangs_counts_as_unavailable(
        self, site: Site, clock: ManualClock
    ) -> None:
        """What memory has is served; what it has not is rendered, and changes get their answer."""
        store = Hanging(clock)
        short: dict[str, Any] = {"store_timeout": 0.01, "lease_for": 0.01}
        async with asyncio.timeout(60), PageCache(store, clock=clock, **short) as pages:
            visit = in_front(site, pages)
            await visit()
            store.is_hanging = True
            assert (await visit()).text == "page 1"
            assert (await visit("/blog/new")).text == "page 2"
            assert (await visit(method="POST")).text == "page 3"
            store.is_hanging = False


class TestI8Crowd:
    async def test_a_render_beyond_the_concurrency_limit_is_passed_through(
        self, pages: PageCache, site: Site
    ) -> None:
        """Not stored, and not refused."""
        visit = in_front(site, pages)
        site.hold()
        gate = site.gate
        crowd = [asyncio.ensure_future(visit(f"/blog/{n}")) for n in range(CONCURRENCY)]
        await until(lambda: site.renders == CONCURRENCY)
        site.gate = None
        page = await visit("/blog/more")
        assert page.headers["cache-status"] == "stillfresh; fwd=bypass; detail=full"
        assert (await pages.get("/own", site.render, revalidate=60)).stored is False
        assert gate is not None
        gate.set()
        assert {page.status_code for page in await asyncio.gather(*crowd)} == {200}
        assert "stored" in (await visit("/blog/more")).headers["cache-status"]


class TestI10StoreAway:
    async def test_during_an_outage_the_last_known_pages_are_served(
        self, site: Site, clock: ManualClock
    ) -> None:
        """And rendered behind without being stored."""
        store = Away(clock=clock)
        async with PageCache(store, clock=clock) as pages:
            await pages.get("/pricing", site.render, revalidate=60)
            store.is_away = True
            clock.advance(3600)
            page = await pages.get("/pricing", site.render, revalidate=60)
            assert (page.body, page.verdict) == (b"page 1", Verdict.STALE)
            store.is_away = False

    async def test_during_an_outage_unknown_pages_are_rendered_without_storing(
        self, site: Site, clock: ManualClock
    ) -> None:
        """A store that is unavailable, from the start or since, fails nobody."""
        store = Away(clock=clock)
        pages = PageCache(store, clock=clock)
        store.is_away = True
        page = await pages.get("/pricing", site.render, revalidate=60)
        assert (page.body, page.stored) == (b"page 1", False)
        store.is_away = False
        async with pages:
            store.is_away = True
            assert (await pages.get("/new", site.render, revalidate=60)).body == b"page 2"
            store.is_away = False


class TestI11OnDemand:
    async def test_a_revalidation_by_tag_overtakes_a_running_read_of_its_page(
        self, site: Site, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """The store is unavailable then: memory's copy of by now is served, and called stale."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with PageCache(store, clock=clock, sleep=sleeper) as pages:
            await pages.get("/pricing", site.render, revalidate=60)
            looking = await store.holding("read", pages.resource.get_stored(PageKey("/pricing")))
            gate = store.gates.pop("read")
            await pages.revalidate("/pricing")
            stale = await pages.get("/pricing", site.render, revalidate=60)
            assert stale.verdict is Verdict.STALE
            store.broken = {"read"}
            gate.set()
            answer = await looking
            assert answer is not None
            assert (answer.verdict, answer.unverified) == (Verdict.STALE, True)

    async def test_revalidate_makes_a_page_stale_at_once(
        self, pages: PageCache, site: Site
    ) -> None:
        """Served once more, rendered behind."""
        await pages.get("/pricing", site.render, revalidate=60)
        await pages.get("/other", site.render, revalidate=60)
        await pages.revalidate("/pricing")
        page = await pages.get("/pricing", site.render, revalidate=60)
        assert (page.body, page.verdict) == (b"page 1", Verdict.STALE)
        await idle(pages)
        assert (await pages.get("/pricing", site.render, revalidate=60)).body == b"page 3"
        assert (await pages.get("/other", site.render, revalidate=60)).verdict is Verdict.FRESH

    async def test_revalidate_tag_reaches_all_pages_of_the_tag(
        self, pages: PageCache, site: Site
    ) -> None:
        """And no other's."""
        for path, tags in (("/a", ["blog"]), ("/b", "blog"), ("/c", ["shop"])):
            await pages.get(path, site.render, revalidate=60, tags=tags)
        await pages.revalidate_tag("blog")
        verdicts = [
            (await pages.get(path, site.render, revalidate=60)).verdict
            for path in ("/a", "/b", "/c")
        ]
        assert verdicts == [Verdict.STALE, Verdict.STALE, Verdict.FRESH]
        await idle(pages)

    @pytest.mark.parametrize("tags", [None, 5, [""], [None]])
    async def test_tags_that_are_no_words_are_refused(
        self, pages: PageCache, site: Site, tags: Any
    ) -> None:
        """By an error that names what was given."""
        with pytest.raises(ConfigError, match=r"tags?: .*'blog', not (None|5|'')"):
            await pages.get("/a", site.render, revalidate=60, tags=tags)

    async def test_a_purged_page_is_rendered_for_the_next_visitor(
        self, pages: PageCache, site: Site
    ) -> None:
        """The next visitor waits for a render."""
        await pages.get("/pricing", site.render, revalidate=60)
        await pages.purge("/pricing")
        assert (await pages.explain("/pricing")).age is None
        assert (await pages.get("/pricing", site.render, revalidate=60)).body == b"page 2"

    @pytest.mark.parametrize("step", ["revalidate", "purge"])
    async def test_a_running_render_does_not_publish_after_revalidate_or_purge(
        self, pages: PageCache, site: Site, step: str
    ) -> None:
        """The law: what was rendered before is not served as fresh; one more render follows."""
        first = await site.holding(pages.get("/pricing", site.render, revalidate=60))
        await getattr(pages, step)("/pricing")
        site.let_go()
        assert (await first).body == b"page 1"
        await idle(pages)
        page = await pages.get("/pricing", site.render, revalidate=60)
        assert (page.body, page.verdict) == (b"page 2", Verdict.FRESH)


class TestI8Doors:
    async def test_pages_of_two_tenants_are_separate(
        self, tmp_path: Path, site: Site, clock: ManualClock
    ) -> None:
        """I13: on one store, the same path, each has his own; and no key can name another's."""
        url = f"sqlite:///{tmp_path}/pages.db"
        async with (
            PageCache(url, clock=clock, tenant="a") as one,
            PageCache(url, clock=clock, tenant="b") as two,
            PageCache(url, clock=clock) as none,
        ):
            bodies = [
                (await pages.get("/x", site.render, revalidate=60)).body
                for pages in (one, two, none, one, two, none)
            ]
            assert bodies == [b"page 1", b"page 2", b"page 3"] * 2
            await one.purge("/x")
            assert (await two.get("/x", site.render, revalidate=60)).body == b"page 2"
            with pytest.raises(ConfigError):
                await none.get("TENANT#a#/x", site.render, revalidate=60)

    @pytest.mark.parametrize(
        ("path", "revalidate", "tags"),
        [("", 60, ()), ("https://a/\nvary x: y", 60, ()), (5, 60, ()), ("/a", 0, ()),
         ("/a", "soon", ()), ("/a", 60, [""]), ("/" + "a" * 70_000, 60, ())],
    )  # fmt: skip
    async def test_bad_arguments_of_get_are_refused_before_a_render(
        self, pages: PageCache, site: Site, path: Any, revalidate: Any, tags: Any
    ) -> None:
        """Before anything is rendered."""
        with pytest.raises(ConfigError):
            await pages.get(path, site.render, revalidate=revalidate, tags=tags)
        assert site.renders == 0

    async def test_a_render_may_be_a_plain_function_and_must_make_a_page(
        self, pages: PageCache
    ) -> None:
        """Anything else is told, and nothing is stored."""
        made = await pages.get("/a", lambda: Page("hello"), revalidate=60)
        assert made.body == b"hello"
        with pytest.raises(ConfigError, match="returns a Page"):
            await pages.get("/b", lambda: "hello", revalidate=60)  # type: ignore[arg-type, return-value]

    async def test_a_closed_page_cache_raises_not_open_and_can_be_reopened(
        self, site: Site
    ) -> None:
        """And can be opened again."""
        pages = PageCache("memory://")
        async with pages:
            await pages.get("/a", site.render, revalidate=60)
        assert isinstance(await outcome(pages.get("/a", site.render, revalidate=60)), NotOpen)
        async with pages:
            assert (await pages.get("/a", site.render, revalidate=60)).body == b"page 2"

    @pytest.mark.parametrize(
        "options", [{"wait": "x"}, {"tenant": "a#b"}, {"max_entries": 0}, {"stale_for": -1}]
    )
    def test_bad_options_of_the_page_cache_are_refused(self, options: dict[str, Any]) -> None:
        """When they are written, not when they are used."""
        with pytest.raises(ConfigError):
            PageCache("memory://", **options)


class TestI16Memory:
    async def test_a_page_in_a_memory_store_is_held_once(self, clock: ManualClock) -> None:
        """In a store of this process, the body in memory is the stored value."""
        body = b"x" * 100_000
        async with PageCache("memory://", clock=clock) as pages:
            page = await pages.get("/a", lambda: Page(body), revalidate=60)
            assert page.body == body
            answer = pages.resource.last_answer(PageKey("/a"))
            store = await pages.cache.store()
            copy = (await store.read("page", ["/a"]))["/a"].copy
            assert answer is not None
            assert copy is not None
            assert answer.value.body is copy.value

    async def test_a_page_from_a_file_is_not_copied(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Its body is not copied out of the row."""
        async with PageCache(f"sqlite:///{tmp_path}/pages.db", clock=clock) as pages:
            await pages.get("/a", lambda: Page(b"x"), revalidate=60)
            answer = pages.resource.last_answer(PageKey("/a"))
            assert answer is not None
            assert isinstance(answer.value.body, memoryview)
