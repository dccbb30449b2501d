"""D5: responses of MCP servers in a store, by the Python SDK's own client and server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp.client import Client
from mcp.client.caching import CacheConfig, CacheEntry, CacheKey
from mcp.server.caching import CacheHint
from mcp.server.mcpserver import MCPServer
from mcp.server.subscriptions import InMemorySubscriptionBus, ResourceUpdated, ToolsListChanged
from mcp_types import ListToolsResult, ReadResourceResult, Tool

from stillfresh import Cache
from stillfresh.integrations.mcp import ResponseStore
from stillfresh.testing import ManualClock

KEY = CacheKey("tools/list", "", "ann")
TEN_SECONDS = 10.0


class Shop:
    """A server whose reads are counted, and clients of it on one store."""

    def __init__(self, cache: Cache, clock: ManualClock) -> None:
        self.reads = 0
        self.clock = clock
        self.store = ResponseStore(cache)
        self.bus = InMemorySubscriptionBus()
        self.scope: Any = "public"
        self.server = self.new_server("public")

    def new_server(self, scope: Any) -> MCPServer[Any]:
        hints: Any = {
            "resources/read": CacheHint(10_000, scope),
            "tools/list": CacheHint(10_000, scope),
        }
        server: MCPServer[Any] = MCPServer("shop", subscriptions=self.bus, cache_hints=hints)

        @server.resource("price://{sku}")
        async def price(sku: str) -> str:
            self.reads += 1
            return f"{sku}: {self.reads}"

        return server

    def client(self, user: str = "ann", store: ResponseStore | None = None) -> Client:
        config = CacheConfig(
            store=store or self.store,
            partition=user,
            target_id="shop",
            share_public=True,
            clock=self.clock,
        )
        return Client(self.server, cache=config)

    async def price(self, user: str = "ann", store: ResponseStore | None = None) -> str:
        async with self.client(user, store) as client:
            result = await client.read_resource("price://tea")
        [content] = result.contents
        text: str = content.text  # type: ignore[union-attr]
        return text


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def cache(clock: ManualClock, tmp_path: Any) -> AsyncIterator[Cache]:
    async with Cache(f"sqlite:///{tmp_path}/responses.db", clock=clock) as cache:
        yield cache


@pytest.fixture
def shop(cache: Cache, clock: ManualClock) -> Shop:
    return Shop(cache, clock)


class TestD5Clients:
    async def test_a_second_client_reads_what_the_first_one_stored(self, shop: Shop) -> None:
        """Until `ttlMs` is over."""
        assert [await shop.price(), await shop.price()] == ["tea: 1", "tea: 1"]
        shop.clock.advance(TEN_SECONDS)
        assert await shop.price() == "tea: 2"

    async def test_a_client_of_another_process_reads_it_too(
        self, shop: Shop, clock: ManualClock, tmp_path: Any
    ) -> None:
        """On the same file, through a cache of its own."""
        assert await shop.price() == "tea: 1"
        async with Cache(f"sqlite:///{tmp_path}/responses.db", clock=clock) as other:
            assert await shop.price(store=ResponseStore(other)) == "tea: 1"

    async def test_public_responses_are_shared_and_private_ones_are_not(self, shop: Shop) -> None:
        """As `cacheScope` says."""
        assert [await shop.price("ann"), await shop.price("bob")] == ["tea: 1", "tea: 1"]
        shop.server = shop.new_server("private")
        shop.clock.advance(TEN_SECONDS)
        prices = [await shop.price(user) for user in ("ann", "bob", "ann", "bob")]
        assert prices == ["tea: 2", "tea: 3", "tea: 2", "tea: 3"]

    async def test_a_notification_of_the_server_drops_the_response(self, shop: Shop) -> None:
        """`resources/updated`, for all clients on the store."""
        await shop.price()
        async with (
            shop.client() as client,
            client.listen(resource_subscriptions=["price://tea"]) as events,
        ):
            await shop.bus.publish(ResourceUpdated(uri="price://tea"))
            assert await anext(aiter(events)) == ResourceUpdated(uri="price://tea")
            result = await client.read_resource("price://tea")
        assert result.contents[0].text == "tea: 2"  # type: ignore[union-attr]
        assert await shop.price("bob") == "tea: 2"

    async def test_a_list_that_changed_is_asked_for_again(self, shop: Shop) -> None:
        """`tools/list_changed`."""
        async with shop.client() as client, client.listen(tools_list_changed=True) as events:
            assert (await client.list_tools()).tools == []
            shop.server.add_tool(lambda: 1, name="one")
            assert (await client.list_tools()).tools == []
            await shop.bus.publish(ToolsListChanged())
            await anext(aiter(events))
            assert [tool.name for tool in (await client.list_tools()).tools] == ["one"]

    async def test_a_tag_invalidates_responses_of_a_method(self, shop: Shop, cache: Cache) -> None:
        """Or all of them, by the store's name."""
        await shop.price()
        await cache.invalidate_tag("mcp:tools/list")
        assert await shop.price() == "tea: 1"
        await cache.invalidate_tag("mcp:resources/read")
        assert await shop.price() == "tea: 2"
        await cache.invalidate_tag("mcp")
        assert await shop.price() == "tea: 3"

    async def test_without_an_open_cache_every_read_reaches_the_server(
        self, shop: Shop, tmp_path: Any
    ) -> None:
        """The SDK goes on without the store."""
        closed = ResponseStore(Cache(f"sqlite:///{tmp_path}/closed.db"))
        prices = [await shop.price(store=closed), await shop.price(store=closed)]
        assert prices == ["tea: 1", "tea: 2"]


class TestD5Store:
    async def test_a_result_comes_back_as_it_was_set(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """Its class, and which fields the server has sent."""
        store = ResponseStore(cache)
        tool = Tool(name="one", input_schema={"type": "object"})
        value = ListToolsResult(tools=[tool], ttl_ms=5)
        entry = CacheEntry(value, "private", clock() + 5)
        await store.set(KEY, entry)
        loaded = await store.get(KEY)
        assert loaded == entry
        assert loaded is not None
        assert loaded.value.model_fields_set == value.model_fields_set
        clock.advance(5)
        assert await store.get(KEY) is None

    async def test_keys_that_would_look_alike_are_apart(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """Whatever their fields contain; and a key is deleted alone."""
        store = ResponseStore(cache)
        entry = CacheEntry(ReadResourceResult(contents=[]), "public", clock() + 5)
        first = CacheKey("resources/read", 'a", "b', "c")
        second = CacheKey("resources/read", "a", 'b", "c')
        await store.set(first, entry)
        assert await store.get(second) is None
        await store.set(second, entry)
        await store.delete(first)
        assert await store.get(first) is None
        assert await store.get(second) == entry
        await store.clear()
        assert await store.get(second) is None

    async def test_an_entry_that_is_over_replaces_the_old_one(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """So nothing older is served in its place."""
        store = ResponseStore(cache)
        value = ListToolsResult(tools=[])
        for expires_at in (clock(), None):
            await store.set(KEY, CacheEntry(value, "public", clock() + 5))
            await store.set(KEY, CacheEntry(value, "public", expires_at))
            assert await store.get(KEY) is None
