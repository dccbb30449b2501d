"""A database with an outbox for the tests, and a cache of what is in it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from stillfresh import Cache
from stillfresh.integrations.postgres import create_outbox

PRODUCTS = "CREATE TABLE products (id int PRIMARY KEY, name text, shop text)"
TABLES = {"products": ["product:{id}", "shop:{shop}"]}

Link = psycopg.Connection[tuple[Any, ...]]


@contextmanager
def database_at(address: str, *statements: str, tables: Any = None) -> Iterator[Link]:
    """A connection to it; each statement is a transaction of its own."""
    with psycopg.connect(address, autocommit=True) as link:
        for statement in statements:
            link.execute(statement.encode())
        if tables is not None:
            asyncio.run(create_outbox(address, tables))
            link.execute("DELETE FROM stillfresh_outbox.changed")
        yield link


def rows(link: Link, statement: str, *values: object) -> list[tuple[Any, ...]]:
    return link.execute(statement.encode(), values).fetchall()


def told(link: Link, *statements: str) -> list[str]:
    """The tags that they put into the outbox, one for each row there."""
    for statement in statements:
        link.execute(statement.encode())
    query = "WITH told AS (DELETE FROM stillfresh_outbox.changed RETURNING tag) SELECT * FROM told"
    return sorted(tag for (tag,) in rows(link, query))


def waiting_rows(link: Link) -> int:
    [(count,)] = rows(link, "SELECT count(*) FROM stillfresh_outbox.changed")
    return int(count)


class Shop:
    """Names of products by id, read through a cache from the database."""

    def __init__(self, link: Link, cache: Cache) -> None:
        self.cache = cache
        self.loads = 0

        @cache.cached("product", fresh_for="1d", tags=lambda number: [f"product:{number}"])
        async def name(number: int) -> str | None:
            self.loads += 1
            names = rows(link, "SELECT name FROM products WHERE id = %s", number)
            return names[0][0] if names else None

        self.name = name
