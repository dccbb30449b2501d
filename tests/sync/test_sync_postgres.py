"""E20, S11, S14: a thread reads and changes PostgreSQL on a blocking connection of its own.

The store's steps in threads pass the whole conformance suite (`tests/stores/test_postgres.py`).
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from stillfresh import Policy, StoreError, SyncCache
from stillfresh.stores.contract import UNREAD, Copy, Put, PutOutcome, Record
from stillfresh.stores.postgres import PostgresStore
from stillfresh.stores.urls import store_for
from stillfresh.sync import SyncResource
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.servers.postgres import HOST, PostgresServer, postgres_serving
from tests.kit.sync import Calling, until
from tests.kit.sync_numbers import (
    check_that_an_outage_is_told,
    check_that_no_step_needs_the_loop,
    declared,
    is_stored,
    opened,
    value,
)

KIND = "number"


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_store()


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """One that can be stopped, and knows afterwards what it has acknowledged."""
    with postgres_serving("synchronous_commit=on") as server:
        yield server


@contextmanager
def rows_locked(postgres: PostgresServer, url: str) -> Iterator[None]:
    """Inside the block every step that changes a row waits for it."""
    schema = url.partition("schema=")[2].partition("&")[0]
    with psycopg.connect(postgres.address) as holder:
        holder.execute(f"SELECT 1 FROM {schema}.entry FOR UPDATE".encode())
        yield


def is_waiting(numbers: SyncResource[str, int]) -> bool:
    """True while a thread is in the middle of a step."""
    runtime = numbers._resource.core.runtime
    assert runtime is not None
    return bool(runtime._blocks)


class TestE20ThreadsUsePostgres:
    @pytest.mark.parametrize("memory_for", [0, 60])
    def test_every_change_and_read_that_loads_nothing_stays_in_its_thread(
        self, url: str, monkeypatch: pytest.MonkeyPatch, memory_for: float
    ) -> None:
        """The loop thread is not asked, and memory is as up to date as if it had been."""
        check_that_no_step_needs_the_loop(url, monkeypatch, memory_for)

    def test_threads_at_once_lose_no_change(self, url: str) -> None:
        """More threads than connections add to one number; the others wait for a connection."""
        with opened(f"{url}&max_connections=3") as numbers:
            numbers.put("a", 0)

            def add() -> None:
                for _ in range(5):
                    numbers.update("a", lambda answer: answer.value + 1 if answer else 1)
                    numbers.get("a")

            calls = [Calling(add) for _ in range(8)]
            for call in calls:
                call.result()
            assert value(numbers) == 40

    async def test_s2_a_lost_reply_is_settled_and_not_repeated_blindly(
        self, url: str, postgres: PostgresServer
    ) -> None:
        """The server did it, and the connection broke: the change counts once."""
        async with FlakyProxy(HOST, postgres.port) as proxy:
            cache = SyncCache(url.replace(f":{postgres.port}/", f":{proxy.port}/"))
            await asyncio.to_thread(cache.open)
            try:
                numbers = declared(cache)
                await asyncio.to_thread(numbers.put, "a", 1)
                for step in (b".put(", b".put("):
                    before = await asyncio.to_thread(value, numbers)
                    assert before is not None
                    proxy.lose("replies", to=step, times=1)
                    add_one = lambda answer: answer.value + 1  # noqa: E731
                    answer = await asyncio.to_thread(numbers.update, "a", add_one)
                    assert answer is not None
                    assert answer.value == before + 1
                assert proxy.lost == 2
                proxy.lose("replies", to=b".delete(", times=1)
                await asyncio.to_thread(numbers.delete, "a")
                assert proxy.lost == 3
                assert await asyncio.to_thread(value, numbers) is None
            finally:
                await asyncio.to_thread(cache.close)

    def test_a_server_that_goes_away_is_told_and_comes_back(self, server: PostgresServer) -> None:
        """A put raises StoreError; once the server is there again, puts are stored."""
        check_that_an_outage_is_told(
            server, server.new_store(), "the PostgreSQL server is unavailable"
        )

    def test_a_server_that_hangs_ends_a_step_at_the_time_out(
        self, url: str, postgres: PostgresServer
    ) -> None:
        """On a connection that was made before, and on one that is made now."""
        with opened(url) as numbers:
            numbers.put("a", 1)
        hasty = url.replace("timeout=30s", "timeout=200ms")
        with opened(hasty) as numbers:
            until(lambda: is_stored(numbers, 2))  # not at once if this machine is slow just now
            with (
                rows_locked(postgres, url),
                pytest.raises(StoreError, match="unavailable: TimeoutError"),
            ):
                numbers.put("a", 3)
        with socket.create_server((HOST, 0)) as silent:  # it accepts connections, and says nothing
            port = silent.getsockname()[1]
            with (
                opened(hasty.replace(f":{postgres.port}/", f":{port}/")) as numbers,
                pytest.raises(StoreError, match="unavailable"),
            ):
                numbers.put("a", 4)

    def test_hooks_see_the_steps_of_threads_in_their_own_thread(self, url: str) -> None:
        """G15: as they see those of the loop."""
        seen: list[tuple[str, str]] = []

        @contextmanager
        def hook(span: Any) -> Iterator[None]:
            seen.append((span.step, threading.current_thread().name))
            yield

        with SyncCache(url, hooks=[hook]) as cache:
            numbers = declared(cache)
            seen.clear()
            numbers.put("a", 1)
            numbers.get("a")
            numbers.delete("a")
        here = threading.current_thread().name
        assert {("put", here), ("read", here), ("delete", here)} <= set(seen)

    def test_closing_waits_for_a_put_of_another_thread(
        self, url: str, postgres: PostgresServer
    ) -> None:
        """It ends as if the cache had been closed after it."""
        with SyncCache(url) as cache:
            numbers = declared(cache)
            numbers.put("a", 1)
            with rows_locked(postgres, url):
                put = Calling(lambda: numbers.put("a", 2))
                until(lambda: is_waiting(numbers))
                closing = Calling(cache.close)
            closing.result()
            assert put.result().stored
        with opened(url) as numbers:
            assert value(numbers) == 2

    def test_a_store_that_was_closed_keeps_no_connection_of_a_thread(
        self, url: str, postgres: PostgresServer
    ) -> None:
        """Idle ones are closed with it."""
        schema = url.partition("schema=")[2].partition("&")[0]
        named = f"{url}&application_name={schema}"
        count = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{schema}'"
        with opened(named) as numbers:
            numbers.put("a", 1)
            assert postgres.execute(count) != [(0,)]
        until(lambda: postgres.execute(count) == [(0,)])


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
class TestE20ThreadsForkPostgres:
    def test_a_fork_while_a_thread_waits_for_the_server(
        self, url: str, postgres: PostgresServer
    ) -> None:
        """The child has connections of its own; the parent's thread gets its own reply."""
        with opened(url) as numbers:
            numbers.put("a", 1)
            with rows_locked(postgres, url):
                put = Calling(lambda: numbers.put("a", 2))
                until(lambda: is_waiting(numbers))
                reading, writing = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(reading)
                    numbers.put("b", 3)
                    os.write(writing, f"{value(numbers, 'b')}".encode())
                    os._exit(0)
                os.close(writing)
                with os.fdopen(reading) as pipe:
                    assert pipe.read() == "3"
                os.waitpid(pid, 0)
            assert put.result().stored
            assert (value(numbers), value(numbers, "b")) == (2, 3)


class TestS14ReadsInThreads:
    async def test_a_read_in_a_thread_is_one_attempt_without_the_loop(
        self, url: str, postgres: PostgresServer
    ) -> None:
        """One key, or many. Without an answer, StoreError sends the caller the general way."""
        async with FlakyProxy(HOST, postgres.port) as proxy:
            store = store_for(url.replace(f":{postgres.port}/", f":{proxy.port}/"), time.time)
            assert isinstance(store, PostgresStore)
            await store.open()
            try:
                copies = {id_: Copy(f"generation-{id_}", 1.0, Policy(60), b"1") for id_ in "ab"}
                results = await store.put(KIND, {id_: Put(copies[id_]) for id_ in "ab"})
                assert {result.outcome for result in results.values()} == {PutOutcome.STORED}

                async def read(
                    ids: list[str], known: dict[str, str] | None = None
                ) -> dict[str, Record]:
                    return await asyncio.to_thread(store.read_in_thread, KIND, ids, known)

                many = await read(["a", "b", "none"])
                assert {id_: record.copy for id_, record in many.items()} == copies
                assert (await read(["b"]))["b"].copy == copies["b"]
                assert await read(["none"]) == {}
                known = (await read(["b"], {"b": "generation-b"}))["b"].copy
                assert known is not None
                assert known.value is UNREAD
                proxy.lose("replies", to=b"SELECT * FROM")
                with pytest.raises(StoreError, match="unavailable"):
                    await read(["a"])
                assert proxy.lost == 1
            finally:
                proxy.heal()
                await store.close()
