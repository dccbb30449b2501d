"""I15: a page that takes long is read while it is fetched, and kept when it is whole."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.asking import GrowingBody
from stillfresh.pages.model import App, Message, Receive, Scope, Send
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper, idle, turns, until
from tests.kit.serve import Proxy

ROUTES = {"/slow": 60}
LENGTH = (b"content-length", b"6")
FRESH = (b"cache-control", b"max-age=60")


class SlowSite:
    """`one` at once, `two` when it is let go; counted, and numbered by its `version`."""

    def __init__(self, *fields: tuple[bytes, bytes]) -> None:
        self.fields = list(fields)
        self.scopes: list[Scope] = []
        self.gate = asyncio.Event()
        self.said = asyncio.Event()
        self.two = b"two"
        self.error: Exception | None = None
        self.is_short = False

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        self.scopes.append(scope)
        gate, two = self.gate, self.two
        await send({"type": "http.response.start", "status": 200, "headers": self.fields})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        self.said.set()
        await gate.wait()
        if self.error is not None:
            raise self.error
        await send({"type": "http.response.body", "body": two[:1] if self.is_short else two})

    def hold(self) -> None:
        self.gate, self.said = asyncio.Event(), asyncio.Event()


class Along:
    """A visitor who notes what comes, when it comes; `is_slow`: he takes one part, and stops."""

    def __init__(
        self, app: App, method: str = "GET", *, is_slow: bool = False, **more: Any
    ) -> None:
        self.status, self.headers = 0, dict[bytes, bytes]()
        self.parts: list[bytes] = []
        self.is_over = False
        self.goes_on = asyncio.Event()
        if not is_slow:
            self.goes_on.set()
        headers = [(b"host", b"example.com"), *more.pop("headers", ())]
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": "/slow",
            "raw_path": b"/slow",
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            **more,
        }
        self.left = asyncio.Event()
        self._is_heard = False
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._is_heard:
            await self.left.wait()
            return {"type": "http.disconnect"}
        self._is_heard = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.parts.append(message.get("body", b""))
            self.is_over = not message.get("more_body", False)
            await self.goes_on.wait()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    async def sees(self, body: bytes) -> None:
        async with asyncio.timeout(30):
            await until(lambda: self.body == body)

    async def ends(self) -> bytes:
        async with asyncio.timeout(30):
            await self.task
        assert self.is_over
        return self.body


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillfresh.pages.answers.PATIENCE", 0.0)


WAYS = pytest.mark.parametrize(
    ("routes", "field"), [(ROUTES, (b"x-on", b"a route")), (None, FRESH)]
)
"""By its key, and as asked."""


class TestI15Growing:
    @WAYS
    @pytest.mark.parametrize("length", [(), (LENGTH,)])
    async def test_the_first_visitor_receives_a_page_while_it_is_loaded(
        self, pages: PageCache, routes: Any, field: tuple[bytes, bytes], length: Any
    ) -> None:
        """Then it is kept, and the next one gets it whole, with an ETag."""
        site = SlowSite(field, *length)
        isr = IsrMiddleware(site, pages, routes)
        first = Along(isr)
        await first.sees(b"one")
        assert first.headers.get(b"content-length") == (b"6" if length else None)
        assert b"etag" not in first.headers
        assert first.headers[b"cache-status"].startswith(b"stillfresh; fwd=miss; stored")
        site.gate.set()
        assert await first.ends() == b"onetwo"
        second = Along(isr)
        assert await second.ends() == b"onetwo"
        assert second.headers[b"cache-status"].startswith(b"stillfresh; hit")
        assert second.headers[b"content-length"] == b"6"
        assert b"etag" in second.headers
        assert len(site.scopes) == 1
        reads = (await pages.stats()).resources["page"].reads
        assert sum(reads.values()) == 2

    @WAYS
    async def test_waiting_visitors_receive_a_growing_page_if_its_length_is_known(
        self, pages: PageCache, routes: Any, field: tuple[bytes, bytes]
    ) -> None:
        """From its beginning, whenever they came; one load for all."""
        site = SlowSite(field, LENGTH)
        isr = IsrMiddleware(site, pages, routes)
        early = [Along(isr) for _ in range(3)]
        for reader in early:
            await reader.sees(b"one")
        late = Along(isr)
        await late.sees(b"one")
        assert b"; collapsed" in late.headers[b"cache-status"]
        site.gate.set()
        assert [await reader.ends() for reader in (*early, late)] == [b"onetwo"] * 4
        assert len(site.scopes) == 1

    async def test_waiting_visitors_wait_for_the_end_if_the_length_is_unknown(
        self, pages: PageCache
    ) -> None:
        """It may turn out to be too big, and then they have to ask for themselves."""
        site = SlowSite()
        isr = IsrMiddleware(site, pages, ROUTES)
        first, other = Along(isr), Along(isr)
        await first.sees(b"one")
        await turns()
        assert not other.status
        site.gate.set()
        assert (await first.ends(), await other.ends()) == (b"onetwo", b"onetwo")
        assert (len(other.parts), len(site.scopes)) == (1, 1)

    @pytest.mark.parametrize(
        "asked",
        [
            {"method": "HEAD"},
            {"headers": [(b"if-none-match", b'"x"')]},
            {"headers": [(b"if-modified-since", b"Sun, 06 Nov 1994 08:49:37 GMT")]},
            {"headers": [(b"range", b"bytes=0-0")]},
            {"http_version": "1.0"},
        ],
    )
    async def test_head_conditional_and_range_requests_wait_for_the_whole_page(
        self, pages: PageCache, asked: dict[str, Any]
    ) -> None:
        """HEAD, conditions, parts; and HTTP/1.0, which could not tell that it broke off."""
        site = SlowSite(LENGTH)
        isr = IsrMiddleware(site, pages, ROUTES)
        reader = Along(isr, **asked)
        await site.said.wait()
        await turns()
        assert not reader.status
        along = Along(isr)
        await along.sees(b"one")
        site.gate.set()
        await reader.ends()
        assert b"etag" in reader.headers
        assert await along.ends() == b"onetwo"
        assert len(site.scopes) == 1

    async def test_a_page_that_is_loaded_quickly_is_sent_whole(
        self, pages: PageCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With its length and its ETag, in one part."""
        monkeypatch.setattr("stillfresh.pages.answers.PATIENCE", 60.0)
        site = SlowSite()
        isr = IsrMiddleware(site, pages, ROUTES)
        first = Along(isr)
        await site.said.wait()
        await turns()
        assert not first.status
        site.gate.set()
        assert await first.ends() == b"onetwo"
        assert (first.headers[b"content-length"], len(first.parts)) == (b"6", 1)

    async def test_a_slow_visitor_does_not_slow_the_load(self, pages: PageCache) -> None:
        """The load goes on at the site's speed, is kept, and served to others meanwhile."""
        site = SlowSite(LENGTH)
        isr = IsrMiddleware(site, pages, ROUTES)
        slow = Along(isr, is_slow=True)
        await slow.sees(b"one")
        site.gate.set()
        await until(
            lambda: pages.known(pages.key("http://example.com/slow", "/slow", ())) is not None
        )
        assert await Along(isr).ends() == b"onetwo"
        assert not slow.is_over
        slow.goes_on.set()
        assert await slow.ends() == b"onetwo"

    @pytest.mark.parametrize("others", [0, 1])
    async def test_a_visitor_that_leaves_does_not_stop_the_load(
        self, pages: PageCache, others: int
    ) -> None:
        """Others read on, and it is kept."""
        site = SlowSite(LENGTH)
        isr = IsrMiddleware(site, pages, ROUTES)
        first = Along(isr)
        readers = [Along(isr) for _ in range(others)]
        for reader in (first, *readers):
            await reader.sees(b"one")
        first.left.set()
        first.task.cancel()
        with suppress(asyncio.CancelledError):
            await first.task
        site.gate.set()
        for reader in readers:
            assert await reader.ends() == b"onetwo"
        assert await Along(isr).ends() == b"onetwo"
        assert len(site.scopes) == 1

    async def test_a_growing_page_is_not_sent_to_another_variant(self, pages: PageCache) -> None:
        """A head that varies by the language is not for another language."""
        site = SlowSite(FRESH, LENGTH, (b"vary", b"accept-language"))
        isr = IsrMiddleware(site, pages)
        first = Along(isr, headers=[(b"accept-language", b"de")])
        await first.sees(b"one")
        other = Along(isr, headers=[(b"accept-language", b"fr")])
        await until(lambda: len(site.scopes) == 2)
        await other.sees(b"one")
        assert dict(site.scopes[1]["headers"])[b"accept-language"] == b"fr"
        site.gate.set()
        assert [await it.ends() for it in (first, other)] == [b"onetwo"] * 2

    @pytest.mark.parametrize(
        "field", [(b"set-cookie", b"a=1"), (b"cache-control", b"private"), (b"vary", b"*")]
    )
    async def test_a_growing_private_page_is_sent_to_its_own_visitor_only(
        self, pages: PageCache, field: tuple[bytes, bytes]
    ) -> None:
        """I13: that is in the head; each of the others asks for himself."""
        site = SlowSite(LENGTH, field)
        isr = IsrMiddleware(site, pages)
        readers = [Along(isr) for _ in range(3)]
        for reader in readers:
            await reader.sees(b"one")
        site.gate.set()
        assert [await it.ends() for it in readers] == [b"onetwo"] * 3
        assert len(site.scopes) == 3


class TestI15BrokenOff:
    @WAYS
    @pytest.mark.parametrize("fault", ["raises", "too short"])
    async def test_a_body_that_breaks_off_is_never_cached(
        self,
        pages: PageCache,
        clock: ManualClock,
        routes: Any,
        field: tuple[bytes, bytes],
        fault: str,
    ) -> None:
        """Its readers' answers break off too; later visitors get a new one."""
        site = SlowSite(field, LENGTH)
        isr = IsrMiddleware(site, pages, routes)
        readers = [Along(isr) for _ in range(2)]
        for reader in readers:
            await reader.sees(b"one")
        if fault == "raises":
            site.error = ConnectionError("gone")
        site.is_short = True
        site.gate.set()
        for reader in readers:
            with pytest.raises(ConnectionError):
                await reader.task
            assert not reader.is_over
        await idle(pages.cache)
        site.error, site.is_short = None, False
        clock.advance(3)
        assert await Along(isr).ends() == b"onetwo"
        assert len(site.scopes) == 2

    async def test_the_old_page_is_served_if_a_refresh_breaks_off(
        self, pages: PageCache, clock: ManualClock
    ) -> None:
        """A refresh that breaks off takes nothing away."""
        site = SlowSite()
        isr = IsrMiddleware(site, pages, ROUTES)
        site.gate.set()
        assert await Along(isr).ends() == b"onetwo"
        clock.advance(61)
        site.error, site.two = ConnectionError("gone"), b"new"
        for _ in range(2):
            assert await Along(isr).ends() == b"onetwo"
            await idle(pages.cache)
        assert len(site.scopes) == 2

    async def test_a_load_beyond_render_timeout_breaks_off_its_responses(
        self, clock: ManualClock
    ) -> None:
        """`render_timeout` is for the whole load."""
        sleeper = Sleeper()
        async with PageCache("memory://", clock=clock, sleep=sleeper, render_timeout=9) as pages:
            isr = IsrMiddleware(SlowSite(LENGTH), pages, ROUTES)
            reader = Along(isr)
            await reader.sees(b"one")
            for _ in range(9):
                sleeper.wake(1.7)
                await turns()
            with pytest.raises(ConnectionError):
                await reader.task


class TestE6Growing:
    """The law, while a page is fetched."""

    @pytest.fixture
    async def other(self, tmp_path: Path, clock: ManualClock) -> AsyncIterator[PageCache]:
        async with PageCache(f"sqlite:///{tmp_path}/shared.db", clock=clock) as other:
            yield other

    @pytest.fixture
    async def here(self, tmp_path: Path, clock: ManualClock) -> AsyncIterator[PageCache]:
        async with PageCache(f"sqlite:///{tmp_path}/shared.db", clock=clock) as here:
            yield here

    @pytest.mark.parametrize("where", ["here", "elsewhere", "in memory"])
    async def test_an_invalidated_growing_page_is_not_sent_to_later_visitors(
        self, here: PageCache, other: PageCache, where: str
    ) -> None:
        """Here or in another process: earlier visitors read on, nothing of it is kept."""
        site = SlowSite(LENGTH)
        isr = IsrMiddleware(site, here, ROUTES)
        before = Along(isr)
        await before.sees(b"one")
        old_gate, site.two = site.gate, b"new"
        site.hold()
        if where == "in memory":  # the store is not told yet
            here.forget("http://example.com/slow")
        else:
            await (here if where == "here" else other).revalidate("/slow")
        after = Along(isr)
        await turns()
        assert not after.status
        old_gate.set()
        assert await before.ends() == b"onetwo"
        site.gate.set()
        seen = await after.ends()
        if where != "in memory":
            assert seen == b"onenew"
            assert await Along(isr).ends() == b"onenew"
            assert len(site.scopes) == 2

    @pytest.mark.parametrize("name", [b"surrogate-key", b"cache-tag", b"cache-groups"])
    async def test_a_growing_page_with_unknown_tags_is_sent_to_its_first_visitor_only(
        self, here: PageCache, name: bytes
    ) -> None:
        """I26: they may be invalidated meanwhile, and only the publish would tell."""
        site = SlowSite(LENGTH, (name, b"a"))
        isr = IsrMiddleware(site, here, ROUTES)
        first, other = Along(isr), Along(isr)
        await first.sees(b"one")
        await turns()
        assert not other.status
        site.gate.set()
        assert [await it.ends() for it in (first, other)] == [b"onetwo"] * 2


class TestI15TooBig:
    @WAYS
    async def test_a_page_that_grows_too_big_is_still_sent_to_its_first_visitor(
        self, pages: PageCache, routes: Any, field: tuple[bytes, bytes]
    ) -> None:
        """It is not kept; others, who waited to see whether it fits, ask for themselves."""
        site = SlowSite(field)
        isr = IsrMiddleware(site, pages, routes, max_body=4)
        first, other = Along(isr), Along(isr)
        await first.sees(b"one")
        site.gate.set()
        assert [await it.ends() for it in (first, other)] == [b"onetwo"] * 2
        assert len(site.scopes) == 2
        assert sum(pages.bypassed().values()) == 2
        assert pages.bypassed()["size"] >= 1
        if routes is None:
            assert (await pages.explain("http://example.com/slow")).age is None

    @WAYS
    async def test_a_page_too_big_before_its_first_read_is_still_one_request(
        self, pages: PageCache, routes: Any, field: tuple[bytes, bytes]
    ) -> None:
        """Between the offer and his first part; as asked that is one request."""
        for pause in range(12):
            asked = list[int]()

            async def site(_: Scope, __: Receive, send: Send) -> None:
                asked.append(1)  # noqa: B023 (called within this round)
                await send({"type": "http.response.start", "status": 200, "headers": [field]})
                await send({"type": "http.response.body", "body": b"one", "more_body": True})
                await turns(pause)  # noqa: B023
                await send({"type": "http.response.body", "body": b"two" * 9, "more_body": True})
                await turns(9)
                await send({"type": "http.response.body", "body": b"end"})

            visitor = Along(IsrMiddleware(site, pages, routes, max_body=9))
            assert await visitor.ends() == b"one" + b"two" * 9 + b"end"
            assert len(asked) == 1 or routes is not None

    async def test_the_app_of_an_uncached_page_waits_for_its_reader(self, pages: PageCache) -> None:
        """What nobody has read is not collected."""
        sent = 0

        async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
            nonlocal sent
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(1_000):
                await send({"type": "http.response.body", "body": b"x" * 100, "more_body": True})
                sent += 100
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b""})

        slow = Along(IsrMiddleware(app, pages, ROUTES, max_body=1_000), is_slow=True)
        await turns(2_000)
        assert sent <= 2_000
        slow.goes_on.set()
        assert len(await slow.ends()) == 100_000

    @pytest.mark.parametrize("is_told", [True, False])
    async def test_a_reader_of_an_uncached_page_that_leaves_ends_it(
        self, pages: PageCache, is_told: bool
    ) -> None:
        """It is his alone by then: the app hears of it, or is cancelled with him."""
        ended = asyncio.Event()

        async def app(_scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            try:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for _ in range(3):
                    await send({"type": "http.response.body", "body": b"x" * 9, "more_body": True})
                    await asyncio.sleep(0.01)
                assert (await receive())["type"] == "http.disconnect"
            finally:
                ended.set()

        reader = Along(IsrMiddleware(app, pages, ROUTES, max_body=10))
        await reader.sees(b"x" * 27)
        if is_told:
            reader.left.set()
        else:
            reader.task.cancel()
        async with asyncio.timeout(30):
            await ended.wait()
            with suppress(ConnectionError, asyncio.CancelledError):
                await reader.task
        assert not reader.is_over


class SlowServer:
    """A site on a socket: half of a page, and the other half, or nothing, when it is let go."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.gate = asyncio.Event()
        self.is_cut = False

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        self.asked.append(path)
        halves = [b"a" * HALF, b"b" * HALF]
        framing = b"Content-Length: %d" % (2 * HALF)
        if path.endswith(b"/chunked"):
            framing = b"Transfer-Encoding: chunked"
            halves = [b"%x\r\n%b\r\n" % (HALF, it) for it in halves]
            halves[1] += b"0\r\n\r\n"
        head = b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n%b\r\n\r\n" % framing
        writer.write(head + halves[0])
        await writer.drain()
        await self.gate.wait()
        if not self.is_cut:
            writer.write(halves[1])
        writer.close()


HALF = 300_000


class TestI15GrowingOfProcesses:
    async def test_workers_send_a_page_while_it_is_loaded(self, tmp_path: Path) -> None:
        """The first half is there while the site makes the second; what is cut looks cut."""
        site = SlowServer()
        with ExitStack() as stack:
            async with await asyncio.start_server(site, "127.0.0.1", 0) as server:
                upstream = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                options = ("--workers", "2", "--store", f"sqlite:///{tmp_path}/pages.db")
                proxy = await asyncio.to_thread(Proxy, stack, *options, upstream=upstream)
                for site.is_cut, paths in (
                    (True, ["/cut/chunked", "/cut/whole"]),
                    (False, ["/chunked", "/whole"]),
                ):
                    site.gate.clear()
                    clients = [await opened(proxy.url, path) for path in paths]
                    for reader, _ in clients:
                        await has_come(reader, b"a")
                    site.gate.set()
                    for reader, writer in clients:
                        rest = await reader.read()
                        assert rest.count(b"b") == (0 if site.is_cut else HALF)
                        assert not (site.is_cut and rest.endswith(b"0\r\n\r\n"))
                        writer.close()
                for path in ("/chunked", "/whole", "/cut/chunked"):
                    answer = await asyncio.to_thread(proxy.get, path)
                    assert (answer.status_code, len(answer.content)) == (200, 2 * HALF)
                assert sorted(site.asked[:4]) == [
                    b"/chunked",
                    b"/cut/chunked",
                    b"/cut/whole",
                    b"/whole",
                ]
                assert site.asked[4:] == [b"/cut/chunked"]


async def has_come(reader: asyncio.StreamReader, letter: bytes) -> None:
    """One half of a page, in whatever chunks."""
    came = b""
    async with asyncio.timeout(30):
        while came.count(letter) < HALF:
            came += await reader.read(65_536)


async def opened(url: str, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host = url.removeprefix("http://")
    name, port = host.split(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    return reader, writer


class TestI15Bodies:
    @given(st.lists(st.binary(max_size=9)), st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def test_all_readers_of_a_growing_body_read_the_same(
        self, parts: list[bytes], speeds: list[int]
    ) -> None:
        """Whenever they begin and however fast they are; and nothing once it broke off."""

        async def read(body: GrowingBody, turns_each: int) -> bytes:
            got: list[bytes] = []

            async def send(message: Message) -> None:
                got.append(message.get("body", b""))
                await turns(turns_each)

            await turns(turns_each)
            await body.pour(send, {"type": "http.response.start"})
            return b"".join(got)

        async def run() -> None:
            body = GrowingBody()
            readers = [asyncio.ensure_future(read(body, speed)) for speed in speeds]
            for part in parts:
                body.add(part)
                await turns(2)
            body.end()
            whole = body.whole()
            assert await asyncio.gather(*readers) == [whole] * len(speeds)
            assert (whole, body.readers) == (b"".join(parts), 0)

        asyncio.run(run())
