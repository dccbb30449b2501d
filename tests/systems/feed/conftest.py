"""A feed cache in a file of its own, on a manual clock, in front of a network held in the hand."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from stillfresh.systems.feed import FeedCache, FeedEngine
from stillfresh.testing import ManualClock
from tests.kit.feed import NOW, Heard, Network


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "feed_cache.db"


@pytest.fixture
def cache(path: Path, clock: ManualClock) -> Iterator[FeedCache]:
    with FeedCache.open(path, clock=clock) as cache:
        yield cache


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
async def engine(
    cache: FeedCache, network: Network, clock: ManualClock
) -> AsyncIterator[FeedEngine]:
    engine = FeedEngine(cache, network, clock=clock)
    yield engine
    await engine.close()


@pytest.fixture
def heard(engine: FeedEngine) -> Heard:
    return Heard(engine)
