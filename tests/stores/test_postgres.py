"""S1, S2, S7, S11: PostgreSQL on a real server: the contract, what lies there, and its schema."""

from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from stillfresh.clock import Clock
from stillfresh.stores.contract import Store
from stillfresh.stores.postgres import link
from stillfresh.stores.urls import store_for
from stillfresh.testing import StoreConformance
from stillfresh.testing.conformance_kit import Deliver
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.servers.postgres import HOST, PostgresServer
from tests.kit.thread_store import ThreadStore

T = TypeVar("T")


class TestS11PostgresStore(StoreConformance):
    """S1, S2, S8: every sentence of the contract."""

    @pytest.fixture(autouse=True)
    def _on(self, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """A statement's own text is in every request, so that it can arrive elsewhere."""
        monkeypatch.setattr(link, "PREPARED_AFTER", None)
        self.server = postgres
        self.url = postgres.new_store()

    async def new_store(self, clock: Clock) -> Store:
        return store_for(self.url, clock)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Store]:
        """Through a proxy, which `delayed` tells to hold requests back."""
        async with FlakyProxy(HOST, self.server.port) as self.proxy:
            self.url = self.url.replace(f":{self.server.port}/", f":{self.proxy.port}/")
            async with super().opened() as store:
                yield store

    async def delayed(self, step: Awaitable[T]) -> tuple[T, Deliver | None]:
        """S8: the step's first request is held back, and sent again by the store."""
        self.proxy.held.clear()
        self.proxy.lose("late", to=b"SELECT * FROM", times=1)
        result = await step
        self.proxy.heal()
        assert len(self.proxy.held) == 1
        return result, lambda: self.server.deliver(self.proxy.held[0])

    async def unanswered(self, step: Awaitable[T], meanwhile: Deliver) -> T:
        """S2: the server publishes or puts, and the connection breaks."""
        lost = self.proxy.lost
        self.proxy.lose("replies", to=b"SELECT * FROM", times=1, meanwhile=meanwhile)
        result = await step
        assert self.proxy.lost == lost + 1
        return result


class TestS14PostgresStoreInThreads(TestS11PostgresStore):
    """E20, S2, S8: the same suite, each step on a blocking connection of a thread."""

    async def new_store(self, clock: Clock) -> Store:
        self.stores.append(ThreadStore(store_for(self.url, clock)))
        return self.stores[-1]

    @pytest.fixture(autouse=True)
    def _ended(self) -> Iterator[None]:
        self.stores: list[ThreadStore] = []
        yield
        for store in self.stores:
            store.end()
