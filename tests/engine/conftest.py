"""A cache on each store, on a manual clock, in front of an upstream held in the hand."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stillfresh import Cache
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Prices, Sleeper, Upstream, declare
from tests.kit.held_store import SteppedStore, cache_on
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
def prices(cache: Cache, upstream: Upstream) -> Prices:
    return declare(cache, upstream)


@pytest.fixture
def store(clock: ManualClock) -> SteppedStore:
    """A store over a network, whose steps a test can hold and break."""
    return SteppedStore(MemoryStore(clock=clock))


@pytest.fixture
async def here(store: SteppedStore, clock: ManualClock, sleeper: Sleeper) -> AsyncIterator[Cache]:
    """A process on that store."""
    async with cache_on(store, clock, sleeper) as cache:
        yield cache


@pytest.fixture
def ours(here: Cache, upstream: Upstream) -> Prices:
    return declare(here, upstream, tags=lambda key: ["all", f"shop:{key}"])


@pytest.fixture
def naps() -> Sleeper:
    """The second process's sleep."""
    return Sleeper()


@pytest.fixture
async def there(
    here: Cache, store: SteppedStore, clock: ManualClock, naps: Sleeper
) -> AsyncIterator[Cache]:
    """A second process on the same store, which is closed first."""
    assert isinstance(here, Cache)
    async with cache_on(store.inner, clock, naps) as cache:
        yield cache


@pytest.fixture
def theirs(there: Cache, upstream: Upstream) -> Prices:
    return declare(there, upstream, tags=lambda key: ["all", f"shop:{key}"])
