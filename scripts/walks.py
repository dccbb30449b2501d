"""Writes the walks of docs/architecture.md: the files of `src` that one request passes through.

Each walk does one thing through the public API and notes every function of stillfresh that runs
meanwhile, in any thread. Opening, closing and importing do not count, nor does waiting for the end
of work in the background. `python scripts/walks.py` writes the page, with `--print` it only shows
the lists; `tests/test_walks.py` keeps the page true.

Three figures are counted for each walk:

files: the files of these functions.

functions: the functions and methods that ran, each once, by their qualified names. Comprehensions
and lambdas do not count; nor do methods that `dataclass` makes, which have no file.

hand-overs: how often the work goes on in another task or another thread. On an event loop, a
function that begins or goes on is a hand-over if the function before it ran in another task. So a
task that is begun inside its creator's turn (`EagerTask`) is one hand-over, and one more when the
creator goes on. All callbacks without a task count as one task. A thread without an event loop
counts one hand-over each time it takes up work: when the first function runs after the thread
waited at a queue or a lock. Threads are counted apart, so that the order in which two of them run
at the same time does not matter.

The files are the same in every run, however fast the machine is: every walk has a clock that stands
still, and SQLite's look at its file, which is made at intervals, is not due. With one version of
Python, so are the functions and the hand-overs, except on Redis: what a server pushes may arrive
before or after a reply, and the link asks the server for its settings at intervals.
"""

import ast
import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import floor
from pathlib import Path
from queue import SimpleQueue
from statistics import median_low
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import stillfresh
from stillfresh.gateway import Gateway, gateway
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.stores import sqlite
from stillfresh.stores.sqlite import store as sqlite_store
from stillfresh.systems.coordinator import Database, Kind, TtlConfig, TtlController, TtlCoordinator
from stillfresh.systems.feed import FeedCache, FeedEngine, Topic
from stillfresh.testing import ManualClock

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # a script's path begins with its own folder

from tests.kit.engine import until  # noqa: E402 (see above)
from tests.kit.servers.valkey import Server, binary_of, serving  # noqa: E402 (see above)

SRC = Path(stillfresh.__file__).parent
OURS = f"{SRC}{os.sep}"
TESTING = f"{SRC / 'testing'}{os.sep}"
PAGE = ROOT / "docs" / "architecture.md"
MARKS = re.compile(r"(<!-- walk (\w+) -->\n).*?(<!-- /walk -->)", re.DOTALL)
NOT_CALLS = {"<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>"}
NOW = 1_000_000_000.25
"""The time of the walks. Between whole milliseconds: copies are stamped with whole ones."""
TURNS_LEFT = 20
"""Of an event loop, at most, until the tasks of a warm-up have ended."""
WAITS = (SimpleQueue, type(threading.Lock()), type(threading.RLock()))
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Walk:
    """What ran: files in the order in which they were first entered, and two figures."""

    files: list[str]
    functions: int
    hand_overs: int


class Notes:
    """Notes what runs, as a profiler that every thread calls."""

    def __init__(self) -> None:
        self._is_noting = False
        self._found: dict[tuple[str, str], None] = {}
        self._hand_overs = 0
        self._waited: set[int] = set()
        """Threads that have waited, and have run no function since."""
        self._last_task: dict[int, object] = {}
        """By thread with an event loop: the task in which the last function ran."""
        self._observers: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def noting(self) -> AsyncIterator[None]:
        """Note what runs inside the block, after the last turns of what was done before it."""
        for _ in range(TURNS_LEFT):
            await asyncio.sleep(0)
        self._last_task = {threading.get_ident(): asyncio.current_task()}
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Do not note the calls of the block, which awaits nothing: the walk only looks."""
        self._is_noting = False
        try:
            yield
        finally:
            self._is_noting = True

    async def observe(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Await it, and note only what the others do."""
        task = asyncio.create_task(waiting)
        self._observers.add(task)
        await task

    def profile(self, frame: FrameType, event: str, called: object) -> None:
        if event == "call" and _is_ours(frame.f_code):
            if _has_loop():
                self._note_on_loop(frame.f_code)
            else:
                self._note_in_thread(frame.f_code)
        elif event == "c_call" and _is_wait(called):
            self._waited.add(threading.get_ident())

    def _note_on_loop(self, code: CodeType) -> None:
        task = asyncio.current_task()
        if not self._is_noting or task in self._observers:
            return
        self._found[code.co_filename, code.co_qualname] = None
        thread = threading.get_ident()
        if self._last_task.get(thread) is not task:
            self._last_task[thread] = task
            self._hand_overs += 1

    def _note_in_thread(self, code: CodeType) -> None:
        thread = threading.get_ident()
        has_waited = thread in self._waited
        self._waited.discard(thread)
        if self._is_noting:
            self._found[code.co_filename, code.co_qualname] = None
            self._hand_overs += has_waited

    def walk(self) -> Walk:
        files = dict.fromkeys(str(Path(file).relative_to(SRC)) for file, _ in self._found)
        return Walk(list(files), len(self._found), self._hand_overs)


def _has_loop() -> bool:
    """True in a thread whose event loop runs."""
    return asyncio._get_running_loop() is not None  # noqa: SLF001 (raises nothing)


def _is_wait(called: object) -> bool:
    name = getattr(called, "__name__", "")
    return name in {"get", "acquire"} and isinstance(getattr(called, "__self__", None), WAITS)


def _is_ours(code: CodeType) -> bool:
    return (
        code.co_filename.startswith(OURS)
        and not code.co_filename.startswith(TESTING)
        and code.co_name not in NOT_CALLS
    )


async def cold_sqlite_read(folder: Path, notes: Notes) -> None:
    """`await prices.get("sku-1")` on an empty SQLite file: read, leased, loaded, published."""
    url = f"sqlite:///{folder / 'prices.db'}"
    async with stillfresh.Cache(url, clock=ManualClock(NOW)) as cache:

        @cache.batched("price", fresh_for="30s")
        async def prices(skus: list[str]) -> dict[str, int]:
            return dict.fromkeys(skus, 1)

        await prices.get("warm")
        async with notes.noting():
            await prices.get("sku-1")


@contextmanager
def _valkey(folder: Path) -> Iterator[Server]:
    binary = binary_of("valkey")
    if binary is None:
        raise RuntimeError("the walks on Redis need valkey-server; `make setup` installs it")
    with serving(binary, folder) as server:
        yield server


async def _no_beat(_seconds: float) -> None:
    """Instead of `sleep`: the later beats of a channel would come at any point of a walk."""
    await asyncio.Event().wait()


def _server_time() -> float:
    """The time of now, which a server's clock has as well; between whole milliseconds, as `NOW`."""
    return floor(time.time() * 1000) / 1000 + 0.00025


def _expect(*, is_so: bool) -> None:
    if not is_so:
        raise RuntimeError("this walk went another way than its text says")


async def stale_redis_read(folder: Path, notes: Notes) -> None:
    """`await prices.get("sku-1")` of a stale copy on Redis: served, refreshed behind, published."""
    clock = ManualClock(_server_time())
    with _valkey(folder) as server:
        async with stillfresh.Cache(server.url(), clock=clock, sleep=_no_beat) as cache:

            @cache.batched("price", fresh_for="30s", stale_for="1h")
            async def prices(skus: list[str]) -> dict[str, int]:
                return dict.fromkeys(skus, 1)

            await prices.get_many(["sku-1", "warm"])
            clock.advance(31)
            await prices.get("warm")
            await prices.settled("30s")
            async with notes.noting():
                answer = await prices.get("sku-1")
                await notes.observe(prices.settled("30s"))
            _expect(is_so=answer.verdict is stillfresh.Verdict.STALE)
            _expect(is_so=(await prices.get("sku-1")).verdict is stillfresh.Verdict.FRESH)


async def tag_with_push(folder: Path, notes: Notes) -> None:
    """`await theirs.invalidate_tag("shop")`; our memory hears of it, and our next read loads.

    Their cache has no resource, and so it does not listen: which of two listeners hears of the tag
    first is chance.
    """
    clock = ManualClock(_server_time())
    with _valkey(folder) as server:
        url = server.url()
        ours = stillfresh.Cache(url, clock=clock, sleep=_no_beat)
        theirs = stillfresh.Cache(url, clock=clock, sleep=_no_beat)

        @ours.batched("price", fresh_for="1h", memory_for="1m", tags=lambda _: ["shop"])
        async def prices(skus: list[str]) -> dict[str, int]:
            return dict.fromkeys(skus, 1)

        def is_in_memory() -> bool:
            with notes.unnoted():
                return prices.get_nowait("sku-1") is not None

        async with ours, theirs:
            await prices.get("sku-1")
            await until(lambda: _is_listening(ours))
            clock.advance(1)
            await prices.refresh("sku-1")
            _expect(is_so=prices.get_nowait("sku-1") is not None)
            async with notes.noting():
                await theirs.invalidate_tag("shop")
                await until(lambda: not is_in_memory())
                answer = await prices.get("sku-1")
            _expect(is_so=answer.origin is stillfresh.Origin.LOADED)


def _is_listening(cache: stillfresh.Cache) -> bool:
    news = None if cache.opened is None else cache.opened.news
    return news is not None and news.proved_at >= news.since


async def stale_feed_list(folder: Path, notes: Notes) -> None:
    """`await feed.get_all()` of a stale list: served, revalidated behind, and told."""
    posted = int(NOW) - 100
    topic = Topic(topic_uuid="a", author="ann", title="A", body="…", created_at=posted)

    class Source:
        async def day_index(self, _day: object, _category: str | None) -> list[Topic]:
            return [topic]

    clock = ManualClock(NOW)
    cache = FeedCache.open(folder / "feed.db", clock=clock)
    engine = FeedEngine(cache, Source(), clock=clock)  # type: ignore[arg-type]
    told = asyncio.Event()
    engine.on_updated(lambda _: told.set())
    await engine.get_all(days_back=7)
    told.clear()
    clock.advance(301)
    async with notes.noting():
        await engine.get_all(days_back=7)
        await told.wait()
    await engine.close()
    cache.close()


async def viewport(folder: Path, notes: Notes) -> None:
    """A post scrolls into view and a tick refreshes it."""

    class Nexus:
        async def posts_by_ids(self, post_ids: list[str], _viewer_id: str | None) -> list[Any]:
            names = [id_.split(":") for id_ in post_ids]
            return [{"details": {"author": author, "id": id_}} for author, id_ in names]

        async def users_by_ids(self, _user_ids: list[str], _viewer_id: str | None) -> list[Any]:
            return []

    database = Database(folder / "app.db")
    controller = TtlController(nexus=Nexus(), database=database, clock=ManualClock(NOW))
    ttl = TtlCoordinator(controller, TtlConfig.from_env({}))
    ttl.sign_in("ann")
    ttl.set_visible(True)
    ttl.start()
    ttl.subscribe_post(composite_post_id="ann:warm")
    while await controller.get("post", "ann:warm") is None:
        await ttl.tick()
    async with notes.noting():
        ttl.subscribe_post(composite_post_id="ann:1")
        await ttl.tick()
    await ttl.stop()
    await controller.close()


async def browser_watch(folder: Path, notes: Notes) -> None:
    """A browser connects, says what is on its screen, and is sent it."""

    async def items(ids: list[str]) -> dict[str, dict[str, str]]:
        return {id_: {"name": id_} for id_ in ids}

    address = f"sqlite:///{folder / 'live.db'}"
    kinds = [Kind("item", fetch=items, fresh_for="30s")]
    app = gateway(address, kinds=kinds, clock=ManualClock(NOW))
    async with app.cache:
        await app.cache.resources["item"].get("warm")
        async with notes.noting():
            await _viewed(app)
        await app.live.close()


async def _viewed(app: Gateway) -> None:
    said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    for message in (
        {"type": "websocket.connect"},
        {
            "type": "websocket.receive",
            "text": '{"type": "subscribe", "items": [["item", "1"]]}',
        },
    ):
        said.put_nowait(message)

    async def send(message: MutableMapping[str, Any]) -> None:
        if '"update"' in str(message.get("text") or message.get("bytes") or ""):
            said.put_nowait({"type": "websocket.disconnect", "code": 1000})

    scope = {
        "type": "websocket",
        "path": "/v1/live",
        "raw_path": b"/v1/live",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "subprotocols": [],
        "scheme": "ws",
        "root_path": "",
        "extensions": {},
        "state": {},
    }
    await app(scope, said.get, send)


async def page_request(folder: Path, notes: Notes) -> None:
    """A page is asked for twice: rendered and stored for one visitor, a hit for the other."""

    async def site(_scope: object, _receive: object, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    url = f"sqlite:///{folder / 'pages.db'}"
    async with PageCache(url, clock=ManualClock(NOW)) as pages:
        app = IsrMiddleware(site, pages, routes={"/*": "60s"})
        await _visited(app, "/warm")
        async with notes.noting():
            await _visited(app, "/pricing")
            await _visited(app, "/pricing")


async def _visited(app: IsrMiddleware, path: str) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: MutableMapping[str, Any]) -> None:
        pass

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "extensions": {},
        "state": {},
    }
    await app(scope, receive, send)


WALKS: dict[str, Callable[[Path, Notes], Coroutine[Any, Any, None]]] = {
    walk.__name__: walk
    for walk in (
        cold_sqlite_read,
        stale_redis_read,
        tag_with_push,
        stale_feed_list,
        viewport,
        page_request,
        browser_watch,
    )
}


BEFORE = {
    "cold_sqlite_read": (21, 119, 15),
    "stale_redis_read": (25, 158, 13),
    "tag_with_push": (35, 192, 17),
    "stale_feed_list": (32, 207, 26),
    "viewport": (32, 202, 31),
    "page_request": (42, 292, 25),
    "browser_watch": (36, 277, 31),
}
"""Files, functions and hand-overs of each walk: what this script counted at commit 819eb355, before
the engine's loads became tasks that begin at once."""
TABLE = re.compile(r"(<!-- walks -->\n).*?(<!-- /walks -->)", re.DOTALL)
TITLES = re.compile(r"^### (.+)\n\n(?:.+\n)+\n<!-- walk (\w+) -->", re.MULTILINE)


def walked(name: str) -> Walk:
    """Do one walk, and return what ran.

    SQLite looks at its file once when it is opened. On a slow machine it would look again.
    """
    notes = Notes()
    store_looks = patch.object(sqlite_store, "LOOK_EVERY", float("inf"))
    feed_looks = patch.object(sqlite, "LOOK_EVERY", float("inf"))
    threading.setprofile(notes.profile)
    sys.setprofile(notes.profile)
    try:
        with TemporaryDirectory() as folder, store_looks, feed_looks:
            asyncio.run(WALKS[name](Path(folder), notes))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return notes.walk()


def usual(name: str) -> Walk:
    """The middle figures of three walks, and the files of all three, since some differ by chance.

    For example, on a busy machine a request waits for a connection that another one has.
    """
    walks = [walked(name) for _ in range(3)]
    files = [file for file in walks[0].files if all(file in walk.files for walk in walks)]
    functions = median_low(walk.functions for walk in walks)
    return Walk(files, functions, median_low(walk.hand_overs for walk in walks))


def listed(walk: Walk) -> str:
    """Its figures, and each file with what its first line says that it is for."""
    lines = [f"{figures(walk)}:", ""]
    for name in walk.files:
        said = ast.get_docstring(ast.parse((SRC / name).read_text())) or ""
        lines.append(f"1. `{name}`: {said.splitlines()[0]}")
    return "\n".join([*lines, ""])


def figures(walk: Walk) -> str:
    return f"{len(walk.files)} files, {walk.functions} functions, {walk.hand_overs} hand-overs"


def compared(walks: dict[str, Walk], titles: dict[str, str]) -> str:
    """The table of all walks, before and after."""
    lines = ["| walk | files | functions | hand-overs |", "| --- | --- | --- | --- |"]
    for name, walk in walks.items():
        now = (len(walk.files), walk.functions, walk.hand_overs)
        cells = [f"{old} → {new}" for old, new in zip(BEFORE[name], now, strict=True)]
        lines.append(f"| {' | '.join([titles[name], *cells])} |")
    return "\n".join([*lines, ""])


def written(page: str) -> str:
    """The page with its walks as they are."""
    walks = {name: usual(name) for name in WALKS}
    titles = {name: title for title, name in TITLES.findall(page)}
    page = TABLE.sub(lambda marks: f"{marks[1]}{compared(walks, titles)}{marks[2]}", page)
    return MARKS.sub(lambda marks: f"{marks[1]}{listed(walks[marks[2]])}{marks[3]}", page)


if __name__ == "__main__":
    if "--print" in sys.argv:
        for name in WALKS:
            walk = walked(name)
            sys.stdout.write("\n  ".join([f"{name}: {figures(walk)}", *walk.files]) + "\n")
    else:
        PAGE.write_text(written(PAGE.read_text()))
