"""A cache on each store, on a manual clock, in front of an upstream held in the hand."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stillfresh import Cache, Resource
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Sleeper, Upstream, declare
from tests.kit.servers.valkey import Server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture(params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        server: Server = request.getfixturevalue("valkey")
        return server.url()
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/cache.db"


@pytest.fixture
async def cache(url: str, clock: ManualClock, sleeper: Sleeper) -> AsyncIterator[Cache]:
    async with Cache(url, clock=clock, sleep=sleeper, dice=lambda: 0.0) as cache:
        yield cache


@pytest.fixture
def prices(cache: Cache, upstream: Upstream) -> Resource[str, Price]:
    return declare(cache, upstream)
