"""A coordinator that is started, signed in and visible, on a real file and a manual clock."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ttl_kit import START, VIEWER, Site, made

from stillfresh.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
async def site(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Site]:
    site = made(tmp_path, clock)
    site.ttl.sign_in(VIEWER)
    async with site.controller:
        site.ttl.start()
        site.ttl.set_visible(True)
        yield site
        await site.ttl.stop()
