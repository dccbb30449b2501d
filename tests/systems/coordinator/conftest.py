"""A coordinator that is started, signed in and visible, on a real file and a manual clock."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stillfresh.testing import ManualClock
from tests.kit.coordinator import START, VIEWER, Site, made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
async def site(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Site]:
    async with running(made(tmp_path, clock)) as site:
        yield site


@pytest.fixture
async def following(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Site]:
    """It fetches the originals of reposts too."""
    async with running(made(tmp_path, clock, follow_reposts=True)) as site:
        yield site


@asynccontextmanager
async def running(site: Site) -> AsyncIterator[Site]:
    site.ttl.sign_in(VIEWER)
    async with site.controller:
        site.ttl.start()
        site.ttl.set_visible(True)
        yield site
        await site.ttl.stop()
