"""D1: the cache of a client on every kind of store, and from code that runs an event loop."""

import asyncio
import gc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
import requests

from stillfresh import Cache
from stillfresh.engine import Origin
from stillfresh.integrations.httpx import AsyncCacheTransport, CacheTransport
from stillfresh.integrations.requests import CacheAdapter, info_of
from stillfresh.stores.postgres import admin
from tests.kit.http_site import Site, SiteAnswer, SiteRequest, serving_site

STORES = ("memory", "sqlite", "valkey", "postgres", "dynamodb")


@pytest.fixture
def site() -> Iterator[Site]:
    with serving_site() as site:
        yield site


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind, by its address."""
    server: Any
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/http.db"
        case "valkey":
            server = request.getfixturevalue("valkey")
            return str(server.url(prefix=f"p{uuid.uuid4().hex}"))
        case "postgres":
            server = request.getfixturevalue("postgres")
            address = f"{server.address}?schema=s{uuid.uuid4().hex}"
            asyncio.run(admin.create(address))
            return address
        case "dynamodb":
            server = request.getfixturevalue("aws")
            return str(server.address(server.new_table()))
    return "memory://"


def validated(request: SiteRequest) -> SiteAnswer:
    """A body that never changes, and is to be validated each time."""
    headers = {"ETag": '"v"', "Cache-Control": "max-age=0"}
    if request.headers.get("if-none-match") == '"v"':
        return SiteAnswer(b"", 304, headers)
    return SiteAnswer(b"same", 200, headers)


class TestD1Stores:
    def test_a_response_is_stored_validated_and_invalidated_on_every_store(
        self, site: Site, store: str
    ) -> None:
        site.answers["/validated"] = validated
        site.answer("/items/1", b"one", cache_control="max-age=600", cache_tag="item")
        adapter = CacheAdapter(store)
        with requests.Session() as session:
            session.mount("http://", adapter)
            for _ in range(2):
                assert session.get(f"{site.url}/validated").text == "same"
            assert "if-none-match" in site.last("/validated").headers
            changes: list[Callable[[], object]] = [
                lambda: adapter.invalidate(f"{site.url}/items/1"),
                lambda: adapter.invalidate_prefix(f"{site.url}/items"),
                lambda: adapter.invalidate_tag("item"),
                lambda: session.post(f"{site.url}/items/1"),
            ]
            for number, change in enumerate(changes):
                answers = [session.get(f"{site.url}/items/1") for _ in range(2)]
                assert [info_of(answer).from_cache for answer in answers] == [False, True], number
                change()
            assert not info_of(session.get(f"{site.url}/items/1")).from_cache

    async def test_two_async_clients_share_every_store_but_memory(
        self, site: Site, store: str
    ) -> None:
        site.answer("/a", b"one", cache_control="max-age=600")
        async with httpx2.AsyncClient(transport=AsyncCacheTransport(store)) as first:
            await asyncio.gather(*(first.get(f"{site.url}/a") for _ in range(8)))
            async with httpx.AsyncClient(transport=AsyncCacheTransport(store)) as second:
                response = await second.get(f"{site.url}/a")
        is_memory = store.startswith("memory:")
        assert response.extensions["stillfresh"].from_cache != is_memory
        assert site.count("/a") == (2 if is_memory else 1)


class TestD1Loops:
    async def test_a_sync_client_works_where_an_event_loop_runs(self, site: Site) -> None:
        """As in a notebook: the call holds the loop, as without a cache."""
        site.answer("/a", b"one", cache_control="max-age=600")

        def use() -> list[Origin]:
            with httpx.Client(transport=CacheTransport()) as client:
                answers = [client.get(f"{site.url}/a") for _ in range(2)]
                client.post(f"{site.url}/a")
                answers.append(client.get(f"{site.url}/a"))
            return [answer.extensions["stillfresh"].origin for answer in answers]

        assert use() == [Origin.LOADED, Origin.MEMORY, Origin.LOADED]

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_transport_outlives_event_loops_that_were_not_cleaned_up(
        self, site: Site, tmp_path: Path
    ) -> None:
        """Their connections stay open, and belong to a loop that is closed."""
        site.answer("/a", b"one", cache_control="max-age=600")
        transport = AsyncCacheTransport(Cache(f"sqlite:///{tmp_path}/http.db"))

        async def get(number: int) -> str:
            client = httpx.AsyncClient(transport=transport)
            return (await client.get(f"{site.url}/a?{number}")).text

        async def close() -> None:
            await transport.aclose()
            await transport.cache.close()

        assert [asyncio.run(get(number)) for number in range(3)] == ["one"] * 3
        asyncio.run(close())
        gc.collect()

    def test_one_transport_serves_clients_of_both_libraries(self, site: Site) -> None:
        """Each gets responses of its own library."""
        site.answer("/a", b"one", cache_control="max-age=600")
        site.answer("/b", b"two", cache_control="no-store")
        transport = CacheTransport()
        with (
            httpx.Client(transport=transport) as client,
            httpx2.Client(transport=transport) as other,
        ):
            assert isinstance(client.get(f"{site.url}/a"), httpx.Response)
            assert isinstance(other.get(f"{site.url}/a"), httpx2.Response)
            assert client.get(f"{site.url}/b").text == other.get(f"{site.url}/b").text
        assert site.count("/a") == 1
