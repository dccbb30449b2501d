"""S1, S2, S5: the Redis store on real servers: the contract, the layout, bad input."""

from collections.abc import Callable

import pytest
from valkey_server import SERVERS, Server, binary_of

from stillfresh.clock import Clock
from stillfresh.stores.contract import Store
from stillfresh.stores.urls import store_for
from stillfresh.testing import StoreConformance


@pytest.fixture(params=[name for name in SERVERS if binary_of(name)])
def server(request: pytest.FixtureRequest, servers: Callable[[str], Server]) -> Server:
    return servers(request.param)


class TestS1RedisStore(StoreConformance):
    """Every sentence of the contract, on Valkey, on Redis, and under a cluster's rules."""

    server: Server

    @pytest.fixture(autouse=True)
    def _on(self, server: Server) -> None:
        self.server = server
        self.url = server.url()

    async def new_store(self, clock: Clock) -> Store:
        return store_for(self.url, clock)
