"""E22: the fixture for tests that are `async def`. They run in any order."""

import pytest

from stillfresh import Cache
from stillfresh.testing import async_cache_fixture

cache = Cache("redis://127.0.0.1:1")
empty_cache = async_cache_fixture(cache)
calls: list[int] = []


@cache.cached("report", fresh_for="5m")
async def report(year: int) -> dict[str, int]:
    calls.append(year)
    return {"year": year}


@pytest.mark.parametrize("turn", [1, 2])
async def test_each_async_test_begins_with_an_empty_cache(
    turn: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The application's own store, which is not there, is not asked."""
    calls.clear()
    assert await report(2026) == await report(2026)
    assert calls == [2026]
    assert not caplog.records
