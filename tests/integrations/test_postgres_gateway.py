"""E8, G7: `[outbox]` of a gateway's file: a database says which pages are stale."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.gateway.test_gateway_serve import at, served
from tests.kit.engine import until
from tests.kit.gateway import running
from tests.kit.outbox import PRODUCTS, TABLES, Link, database_at, rows
from tests.kit.servers.postgres import PostgresServer

PAIR = "INSERT INTO products VALUES (1, 'tea', 'eu')"


@pytest.fixture
def link(postgres: PostgresServer) -> Iterator[Link]:
    with database_at(postgres.new_database(), PRODUCTS, PAIR, tables=TABLES) as link:
        yield link


class TestE8Gateway:
    async def test_serve_follows_the_database_and_reports_the_lag(
        self, link: Link, postgres: PostgresServer, tmp_path: Path
    ) -> None:
        """Two workers, one consumer: a page goes with the row that it shows, by its Cache-Tag."""

        async def page(_: Request) -> Response:
            [(name,)] = rows(link, "SELECT name FROM products")
            headers = {"cache-control": "max-age=86400", "cache-tag": "product:1"}
            return PlainTextResponse(name, headers=headers)

        site = Starlette(routes=[Route("/{path:path}", page)])
        database = f"{postgres.address.rpartition('/')[0]}/{link.info.dbname}"
        async with running(site) as upstream:
            file = tmp_path / "stillfresh.toml"
            file.write_text(f"""
                [store]
                url = "sqlite:///fresh.db"
                [pages]
                upstream = "{upstream}"
                [outbox]
                database = "{database}"
                consumer = "shop"
            """)
            async with served(file, "--workers", "2") as (url, _), at(url) as client:
                seen = "SELECT count(seen) FROM stillfresh_outbox.consumer"
                await until(lambda: rows(link, seen) != [(0,)])
                while "hit" not in (await client.get("/")).headers["cache-status"]:
                    await asyncio.sleep(0.01)
                link.execute("UPDATE products SET name = 'green tea'")
                while (told := await client.get("/")).text != "green tea":
                    assert told.text == "tea"
                    await asyncio.sleep(0.01)
                ready, metrics = await client.get("/readyz"), await client.get("/metrics")
        assert 0 <= ready.json()["lags"]["shop"] < 30
        assert 'stillfresh_outbox_lag_seconds{consumer="shop"}' in metrics.text
        assert rows(link, "SELECT name FROM stillfresh_outbox.consumer") == [("shop",)]
