"""T5: a corpus of upstream answers, before every door that reads an upstream.

Whatever comes instead of an answer: what was there stays, who asks for what is not there is told so
in a sentence, no more is read than allowed, and the next good answer is taken.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.kit.bad_answers import GROUPS, SLOW, Bad, noted
from tests.kit.servers.raw import raw_upstream
from tests.kit.upstream_doors import DOORS, Door

PATIENCE = 30.0
IMPATIENT = 0.5
"""Seconds for the door whose upstream is slow."""
MOST_SENT = 30_000_000
"""Bytes that fit into the sockets between an upstream and who has stopped reading."""

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@asynccontextmanager
async def opened(door: Door) -> AsyncIterator[Door]:
    async with raw_upstream(door.views) as upstream:
        door.upstream = upstream
        async with door.stack:
            await door.open()
            yield door


async def shows(door: Door, version: int) -> None:
    """On a busy machine a good answer may be too late as well: then the next one is taken."""
    async with asyncio.timeout(PATIENCE):
        while await door.version() != version:
            door.later()


async def survives(door: Door, bad: Bad) -> None:
    """The copy stays, what is not there has failed, and the next good answer is taken."""
    await shows(door, 1)
    door.upstream.bad, door.upstream.version, door.upstream.sent = bad, 2, 0
    door.later()
    assert await door.version() in ({1, 2, None} if bad.is_legal else {1})
    said = await door.cold()
    assert bad.is_legal or (said and len(said) < 1_000 and "\n" not in said)
    assert door.upstream.sent < MOST_SENT
    door.upstream.bad, door.upstream.version = None, 1
    door.later()
    await shows(door, 1)


@pytest.mark.parametrize("name", DOORS)
class TestT5UpstreamAnswers:
    @pytest.mark.parametrize("group", GROUPS)
    async def test_each_door_survives_any_bad_answer_of_the_upstream(
        self, name: str, group: str, tmp_path: Path
    ) -> None:
        """One after the other, through one door: it survives each of them."""
        async with opened(DOORS[name](tmp_path, PATIENCE)) as door:
            for bad in GROUPS[group]:
                with noted(bad):
                    await survives(door, bad)

    async def test_each_door_gives_up_on_a_slow_upstream(self, name: str, tmp_path: Path) -> None:
        """Is given up after a while, and so is one who sends a byte at a time."""
        await asyncio.gather(*(self._is_slow(name, bad, tmp_path) for bad in SLOW))

    async def _is_slow(self, name: str, bad: Bad, folder: Path) -> None:
        own = folder / bad.name
        own.mkdir()
        async with opened(DOORS[name](own, IMPATIENT)) as door:
            with noted(bad):
                await survives(door, bad)


@pytest.fixture(scope="module", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """Reading the certificates for each client would be most of what this costs."""
    context = httpx.create_ssl_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", lambda **_: context)
        yield
