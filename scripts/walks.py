"""Writes the walks of docs/architecture.md: the files of `src` that one request passes through.

Each walk does one thing through the public API and notes every file of stillfresh whose functions
ran meanwhile, in any thread. Opening, closing and importing do not count. `python scripts/walks.py`
writes the page, with `--print` it only shows the lists; `tests/test_walks.py` keeps the page true.
"""

import ast
import asyncio
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import stillfresh
from stillfresh.gateway import Gateway, gateway
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.systems.coordinator import Database, Kind, TtlConfig, TtlController, TtlCoordinator
from stillfresh.systems.feed import FeedCache, FeedEngine, Topic
from stillfresh.testing import ManualClock

SRC = Path(stillfresh.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
MARKS = re.compile(r"(<!-- walk (\w+) -->\n).*?(<!-- /walk -->)", re.DOTALL)
NOT_CALLS = {"<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>"}
Noting = Callable[[], AbstractContextManager[None]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


async def cold_sqlite_read(folder: Path, noting: Noting) -> None:
    """`await prices.get("sku-1")` on an empty SQLite file: read, leased, loaded, published."""
    async with stillfresh.Cache(f"sqlite:///{folder / 'prices.db'}") as cache:

        @cache.batched("price", fresh_for="30s")
        async def prices(skus: list[str]) -> dict[str, int]:
            return dict.fromkeys(skus, 1)

        await prices.get("warm")
        with noting():
            await prices.get("sku-1")


async def stale_feed_list(folder: Path, noting: Noting) -> None:
    """`await feed.get_all()` of a stale list: served, revalidated behind, and told."""
    topic = Topic(topic_uuid="a", author="ann", title="A", body="…", created_at=1_000_000_000)

    class Source:
        async def day_index(self, _day: object, _category: str | None) -> list[Topic]:
            return [topic]

    clock = ManualClock(1_000_000_100.0)
    cache = FeedCache.open(folder / "feed.db", clock=clock)
    engine = FeedEngine(cache, Source(), clock=clock)  # type: ignore[arg-type]
    told = asyncio.Event()
    engine.on_updated(lambda _: told.set())
    await engine.get_all(days_back=7)
    told.clear()
    clock.advance(301)
    with noting():
        await engine.get_all(days_back=7)
        await told.wait()
    await engine.close()
    cache.close()


async def viewport(folder: Path, noting: Noting) -> None:
    """A post scrolls into view and a tick refreshes it."""

    class Nexus:
        async def posts_by_ids(self, post_ids: list[str], _viewer_id: str | None) -> list[Any]:
            names = [id_.split(":") for id_ in post_ids]
            return [{"details": {"author": author, "id": id_}} for author, id_ in names]

        async def users_by_ids(self, _user_ids: list[str], _viewer_id: str | None) -> list[Any]:
            return []

    controller = TtlController(nexus=Nexus(), database=Database(folder / "app.db"))
    ttl = TtlCoordinator(controller, TtlConfig.from_env({}))
    ttl.sign_in("ann")
    ttl.set_visible(True)
    ttl.start()
    ttl.subscribe_post(composite_post_id="ann:warm")
    while await controller.get("post", "ann:warm") is None:
        await ttl.tick()
    with noting():
        ttl.subscribe_post(composite_post_id="ann:1")
        await ttl.tick()
    await ttl.stop()
    await controller.close()


async def browser_watch(folder: Path, noting: Noting) -> None:
    """A browser connects, says what is on its screen, and is sent it."""

    async def items(ids: list[str]) -> dict[str, dict[str, str]]:
        return {id_: {"name": id_} for id_ in ids}

    address = f"sqlite:///{folder / 'live.db'}"
    app = gateway(address, kinds=[Kind("item", fetch=items, fresh_for="30s")])
    async with app.cache:
        with noting():
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


async def page_request(folder: Path, noting: Noting) -> None:
    """A page is asked for twice: rendered and stored for one visitor, a hit for the other."""

    async def site(_scope: object, _receive: object, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})

    async with PageCache(f"sqlite:///{folder / 'pages.db'}") as pages:
        app = IsrMiddleware(site, pages, routes={"/*": "60s"})
        await _visited(app, "/warm")
        with noting():
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


WALKS: dict[str, Callable[[Path, Noting], Coroutine[Any, Any, None]]] = {
    walk.__name__: walk
    for walk in (cold_sqlite_read, stale_feed_list, viewport, page_request, browser_watch)
}


def files_of(name: str) -> list[str]:
    """The files of one walk, in the order in which they were first entered."""
    found: dict[str, None] = {}
    active = False

    def note(frame: FrameType, event: str, _: object) -> None:
        if active and event == "call" and frame.f_code.co_name not in NOT_CALLS:
            found[frame.f_code.co_filename] = None

    @contextmanager
    def noting() -> Iterator[None]:
        nonlocal active
        active = True
        try:
            yield
        finally:
            active = False

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with TemporaryDirectory() as folder:
            asyncio.run(WALKS[name](Path(folder), noting))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    names = [str(Path(it).relative_to(SRC)) for it in found if it.startswith(str(SRC))]
    return [name for name in names if not name.startswith("testing/")]


def listed(files: list[str]) -> str:
    """Each file with what its first line says that it is for."""
    lines = [f"{len(files)} files:", ""]
    for name in files:
        said = ast.get_docstring(ast.parse((SRC / name).read_text())) or ""
        lines.append(f"1. `{name}`: {said.splitlines()[0]}")
    return "\n".join([*lines, ""])


def written(page: str) -> str:
    """The page with its walks as they are."""
    return MARKS.sub(lambda marks: f"{marks[1]}{listed(files_of(marks[2]))}{marks[3]}", page)


if __name__ == "__main__":
    if "--print" in sys.argv:
        for walk in WALKS:
            files = files_of(walk)
            sys.stdout.write("\n  ".join([f"{walk}: {len(files)}", *files]) + "\n")
    else:
        PAGE.write_text(written(PAGE.read_text()))
