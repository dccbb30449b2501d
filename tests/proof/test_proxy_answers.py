"""T5: the corpus of upstream answers, before the reverse proxy.

What is whole is passed on as it came; what is not ends as a 502, a 504 or a cut answer and is never
kept; the page of before is served meanwhile, and the next good answer is taken.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from starlette.types import ASGIApp

from stillfresh.gateway.config import PagesSettings
from stillfresh.gateway.sources import site_of
from stillfresh.pages import PageCache, Route
from stillfresh.testing import ManualClock
from tests.kit.asgi_client import Heard, ask, http_scope
from tests.kit.bad_answers import GROUPS, SLOW, Bad, noted
from tests.kit.servers.raw import RawUpstream, raw_upstream

PATIENCE = 30.0
IMPATIENT = 0.5
"""Seconds for a site that is slow."""
MOST_SENT = 30_000_000
"""Bytes that fit into the sockets between an upstream and who has stopped reading."""
MOST_ERROR = 1_000
TURNS = 100
"""Looks, after which a refresh on a busy machine may have failed as well."""

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


class Site:
    """A proxy in front of a raw socket: `/kept/…` for a minute, everything else as it says."""

    def __init__(self, app: ASGIApp, upstream: RawUpstream, clock: ManualClock) -> None:
        self._app = app
        self.upstream = upstream
        self._clock = clock
        self._names = count()

    def later(self) -> None:
        self._clock.advance(600)

    def new(self) -> str:
        return f"{next(self._names)}"

    async def get(self, path: str) -> Heard:
        async with asyncio.timeout(PATIENCE):
            return await ask(self._app, http_scope(path))

    async def fresh(self, version: int) -> str:
        """The path of a page that was never asked for before, and now is there."""
        async with asyncio.timeout(PATIENCE):
            while (await self.get(path := f"/kept/{self.new()}")).body != body_of(version):
                pass
        return path

    async def shows(self, path: str, version: int) -> None:
        """A while after it was found stale; time stands still while it is refreshed."""
        async with asyncio.timeout(PATIENCE):
            for turn in count():
                if (await self.get(path)).body == body_of(version):
                    return
                if turn % TURNS == 0:
                    self.later()
                await asyncio.sleep(0.001)


@asynccontextmanager
async def sited(patience: float) -> AsyncIterator[Site]:
    clock = ManualClock(start=1_700_000_000.0)
    async with (
        raw_upstream(lambda *_: {"version": upstream.version}) as upstream,
        PageCache("memory://", clock=clock) as pages,
    ):
        settings = PagesSettings((upstream.url,), routes={"/kept/*": Route(60.0)}, timeout=patience)
        yield Site(site_of(settings, pages), upstream, clock)


def body_of(version: int) -> bytes:
    return b'{"version": %d}' % version


def said(bad: Bad, version: int) -> tuple[int, bytes]:
    """Status and body of one that is whole: it says how long it is."""
    data = b"".join(part for part in bad.say(body_of(version)) if part)
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    return int(head.split()[1]), body[: int(length[1])]


def is_failure(heard: Heard) -> bool:
    """Told in a line by the proxy itself, or cut."""
    if heard.is_cut:
        return True
    is_ours = heard.size < MOST_ERROR and heard.body.count(b"\n") == 1
    return heard.status in {502, 504} and is_ours and b"Traceback" not in heard.body


def is_passed(heard: Heard, bad: Bad, version: int) -> bool:
    """As it came; one without an end is passed on as long as somebody listens."""
    if bad.is_whole:
        return heard.is_whole and (heard.status, heard.body) == said(bad, version)
    return heard.has_left.is_set() or (bad.is_legal and heard.is_whole)


def is_right(heard: Heard, bad: Bad, version: int) -> bool:
    return is_passed(heard, bad, version) or (not bad.is_whole and is_failure(heard))


async def survives(site: Site, bad: Bad) -> None:
    """The page of before, one that was never asked for, and one that is not kept."""
    upstream, cold, passing = site.upstream, f"/kept/{site.new()}", f"/passed/{site.new()}"
    upstream.bad, upstream.version = None, 1
    old = await site.fresh(1)
    upstream.bad, upstream.version, upstream.sent = bad, 2, 0
    site.later()
    assert (await site.get(old)).body == body_of(1), "stale, and refreshed behind"
    came = [await site.get(cold)]
    assert upstream.sent < MOST_SENT
    came += [await site.get(passing)]
    assert [it for it in came if not is_right(it, bad, 2)] == []
    still = await site.get(old)
    assert still.body == body_of(1) or is_passed(still, bad, 2), still
    upstream.bad, upstream.version = None, 3
    again = await site.get(cold)
    assert (again.status or 0) >= 500 or again.body == body_of(3) or is_passed(again, bad, 2), again
    for path in (passing, old, cold):
        await site.shows(path, 3)


class TestT5Proxy:
    @pytest.mark.parametrize("group", GROUPS)
    async def test_the_proxy_survives_any_bad_answer_of_the_site(self, group: str) -> None:
        """One after the other, through one proxy: it survives each of them."""
        async with sited(PATIENCE) as site:
            for bad in GROUPS[group]:
                with noted(bad):
                    await survives(site, bad)

    async def test_the_proxy_ends_slow_answers_with_504_or_cuts_them(self) -> None:
        """Is a 504 after a while, or cut."""
        await asyncio.gather(*(self._is_slow(bad) for bad in SLOW))

    async def _is_slow(self, bad: Bad) -> None:
        async with sited(IMPATIENT) as site:
            with noted(bad):
                await survives(site, bad)
