"""S1, S2, S5: the Redis store on real servers: the contract, the layout, bad input."""

import pytest
from valkey_server import SERVERS, Server, binary_of

from stillfresh.clock import Clock
from stillfresh.stores.contract import Store
from stillfresh.stores.urls import store_for
from stillfresh.testing import StoreConformance


@pytest.fixture(params=[name for name in SERVERS if binary_of(name)])
def server(request: pytest.FixtureRequest) -> Server:
    name = {"valkey": "valkey", "redis": "redis_server"}[request.param]
    server: Server = request.getfixturevalue(name)
    return server


class TestS1RedisStore(StoreConformance):
    """Every sentence of the contract, on Valkey and on Redis."""

    server: Server

    @pytest.fixture(autouse=True)
    def _on(self, server: Server) -> None:
        self.server = server
        self.url = server.url()

    async def new_store(self, clock: Clock) -> Store:
        return store_for(self.url, clock)
