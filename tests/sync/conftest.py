"""A SyncCache on a manual clock, in front of an upstream of plain functions."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stillfresh import SyncCache
from stillfresh.testing import ManualClock
from tests.kit.servers.valkey import Server
from tests.kit.sync import PlainUpstream, SyncPrices, declare

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


@pytest.fixture
def upstream() -> PlainUpstream:
    return PlainUpstream()


@pytest.fixture
def address() -> str:
    """Tests of other stores override it."""
    return "memory://"


def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/cache.db"
        case "redis":
            server: Server = request.getfixturevalue("valkey")
            return server.url()
        case "postgres":
            return str(request.getfixturevalue("postgres").new_store())
        case "dynamodb":
            aws: Aws = request.getfixturevalue("aws")
            return aws.address(aws.new_table())
        case _:
            return "memory://"


every_store = pytest.fixture(params=["memory", "sqlite", "redis", "postgres", "dynamodb"])(place)
shared_store = pytest.fixture(params=["sqlite", "redis", "dynamodb"])(place)


@pytest.fixture
def cache(address: str, clock: ManualClock) -> Iterator[SyncCache]:
    with SyncCache(address, clock=clock, dice=lambda: 0.0) as cache:
        yield cache


@pytest.fixture
def prices(cache: SyncCache, upstream: PlainUpstream) -> SyncPrices:
    return declare(cache, upstream)
