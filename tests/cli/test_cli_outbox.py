"""E8: `stillfresh outbox …` on a real server."""

import asyncio
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillfresh import Cache
from stillfresh.pages import Page, PageCache
from tests.kit.cli import COMMAND, call, interruptible, said
from tests.kit.outbox import PRODUCTS, Link, database_at, rows, told
from tests.kit.servers.postgres import PostgresServer

TABLE = ("--table", "products=product:{id}", "--table", "products=shop:{shop}")


async def loads_of(store: str) -> list[str]:
    """What is not fresh in the store: a value and a page of the same tag."""
    loads = []
    async with Cache(store) as cache, PageCache(store) as pages:

        @cache.cached("value", fresh_for="1d", tags=lambda: ["product:1"])
        async def value() -> int:
            loads.append("value")
            return 1

        async def page() -> Page:
            loads.append("page")
            return Page(b"page")

        await value()
        await pages.get("/", page, "1d", tags=["product:1"])
        await pages.settled()
    return loads


INSERT = "INSERT INTO products VALUES (1, 'tea', 'eu')"


@pytest.fixture
def address(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def link(address: str) -> Iterator[Link]:
    with database_at(address, PRODUCTS) as link:
        yield link


class TestE8OutboxCommands:
    def test_outbox_create_and_drop_work(self, address: str, link: Link) -> None:
        """Several tags for one table; dropped, nothing is told."""
        assert (
            said("outbox", "create", address, *TABLE) == "the outbox records changes of products\n"
        )
        assert told(link, INSERT) == ["", "product:1", "shop:eu"]
        assert said("outbox", "drop", address) == "the outbox was removed\n"
        assert rows(link, "SELECT to_regnamespace('stillfresh_outbox')") == [(None,)]

    def test_outbox_create_prints_its_sql_for_migrations(self, link: Link) -> None:
        """Without a database; run by any tool it does what create does."""
        link.execute(said("outbox", "create", "--sql", *TABLE).encode())
        assert told(link, INSERT) == ["", "product:1", "shop:eu"]

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["create", *TABLE], "name a DATABASE, or --sql"),
            (["create", "postgresql://h/d", "--sql", *TABLE], "name a DATABASE, or --sql"),
            (
                ["create", "postgresql://h/d", "--table", "products"],
                "write a name and then columns",
            ),
            (["create", "h[", *TABLE], "not an address; write postgresql://"),
            (["follow", "postgresql://h/d", "memory://"], "lives in the process that uses it"),
            (["show", "postgresql://h/d", "--max-lag", "soon"], "--max-lag"),
        ],
    )
    def test_wrong_use_of_outbox_ends_with_2(self, arguments: list[str], expected: str) -> None:
        """With what to write instead."""
        result = call("outbox", *arguments)
        assert (result.exit_code, expected in result.stderr) == (2, True), result.stderr

    def test_outbox_show_reports_the_lag(self, address: str, link: Link) -> None:
        """Of each consumer; with --max-lag it is a health check."""
        said("outbox", "create", address, *TABLE)
        assert said("outbox", "show", address) == ""
        add = "INSERT INTO stillfresh_outbox.consumer VALUES ('shop', '1:1:', 1, now() - interval"
        link.execute(f"{add} '100 s')".encode())
        assert said("outbox", "show", address) == f"{'shop':20} 100 s behind at most\n"
        lags = json.loads(said("outbox", "show", address, "--json"))
        assert lags == {"shop": pytest.approx(100, rel=0.1)}
        assert call("outbox", "show", address, "--max-lag", "1m").exit_code == 1
        assert call("outbox", "show", address, "--max-lag", "1h").exit_code == 0

    @pytest.mark.parametrize("options", [(), ("--pages",)])
    def test_outbox_follow_invalidates_in_a_store_until_sigterm(
        self, address: str, link: Link, tmp_path: Path, options: tuple[str, ...]
    ) -> None:
        """A process of its own: values, or pages, with a changed tag; SIGTERM ends it with 0."""
        said("outbox", "create", address, *TABLE)
        store = f"sqlite:///{tmp_path / 'shop.db'}"
        command = [*COMMAND, "outbox", "follow", address, store, "--consumer", "shop", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == f"{store} is up to date as shop\n"
                assert [asyncio.run(loads_of(store)) for _ in range(2)] == [["value", "page"], []]
                link.execute(INSERT.encode())
                count = "SELECT count(*) FROM stillfresh_outbox.changed"
                while rows(link, count) != [(0,)]:
                    pass
                assert asyncio.run(loads_of(store)) == (["page"] if options else ["value"])
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=30) == 0
            finally:
                process.kill()

    def test_ctrl_c_ends_outbox_follow_quietly_before_it_has_caught_up(
        self, tmp_path: Path
    ) -> None:
        """The database does not answer: what waits for it is told to nobody."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            database = f"postgresql://127.0.0.1:{taken.getsockname()[1]}/shop"
        command = [*COMMAND, "outbox", "follow", database, f"sqlite:///{tmp_path}/shop.db"]
        with interruptible(command) as process:
            assert process.stderr is not None
            for _ in range(2):  # as it starts, and then by itself
                assert "is tried again" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        more = [it for it in err.splitlines() if it and "is tried again" not in it]
        assert (process.returncode, out, more) == (130, "", [])
