"""A hub over an upstream that counts, and a live socket over it on a real port."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from stillfresh import Cache
from stillfresh.gateway.live import Hub, Live
from tests.kit.live import Start, Upstream, games, served


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
async def cache() -> AsyncIterator[Cache]:
    async with Cache("memory://") as cache:
        yield cache


@pytest.fixture
async def hub(cache: Cache, upstream: Upstream) -> Hub:
    return Hub(cache, kinds=upstream.kinds())


@pytest.fixture
async def start(hub: Hub) -> AsyncIterator[Start]:
    """`live, port = await start(heartbeat=5)`"""
    async with AsyncExitStack() as stack:

        async def started(**options: Any) -> tuple[Live, int]:
            live = games(Live(hub, **options))
            port = await stack.enter_async_context(served(live, lifespan="off"))
            stack.push_async_callback(live.close)
            return live, port

        yield started


@pytest.fixture
def nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a viewer does is no error of the server's."""
    yield
    assert [it.getMessage() for it in caplog.records if it.levelno >= logging.ERROR] == []
