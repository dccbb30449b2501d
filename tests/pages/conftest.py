"""A page cache on a manual clock, and a site whose renders are counted."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stillfresh.pages import PageCache
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper
from tests.kit.isr import Site


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not a store that is away."""
    defaults = PageCache.__init__.__kwdefaults__ or {}
    monkeypatch.setattr(PageCache.__init__, "__kwdefaults__", {**defaults, "store_timeout": "30s"})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/pages.db"


@pytest.fixture
async def pages(url: str, clock: ManualClock, sleeper: Sleeper) -> AsyncIterator[PageCache]:
    async with PageCache(url, clock=clock, sleep=sleeper, dice=lambda: 0.0) as pages:
        yield pages


@pytest.fixture
def site(clock: ManualClock) -> Site:
    return Site(clock)
