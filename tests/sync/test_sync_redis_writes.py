"""E20, S14: a thread changes Redis on a connection of its own, without the loop thread.

The store's steps in threads pass the whole conformance suite (`tests/stores/test_redis.py`).
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stillfresh import StillfreshError, SyncCache
from stillfresh.stores.redis import threads as redis_threads
from stillfresh.stores.redis.threads import TimedReplies
from stillfresh.sync import SyncResource
from stillfresh.sync.loop_thread import PROCESS
from stillfresh.turns import THIS_THREAD, SharedLoop, outside
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.servers.valkey import HOST, Server, binary_of, serving
from tests.kit.sync import Calling, until
from tests.kit.sync_numbers import (
    check_that_an_outage_is_told,
    check_that_no_step_needs_the_loop,
    declared,
    opened,
    value,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that can be stopped."""
    binary = binary_of("valkey")
    assert binary is not None
    with serving(binary, tmp_path) as server:
        yield server


class TestE20ThreadsWrite:
    @pytest.mark.parametrize("memory_for", [0, 60])
    def test_every_change_and_read_that_loads_nothing_stays_in_its_thread(
        self, server: Server, monkeypatch: pytest.MonkeyPatch, memory_for: float
    ) -> None:
        """The loop thread is not asked, and memory is as up to date as if it had been."""
        check_that_no_step_needs_the_loop(server.url(), monkeypatch, memory_for)

    def test_threads_at_once_lose_no_change(self, server: Server) -> None:
        """Sixteen threads add to one number on one cache, while others read it."""
        with opened(server.url()) as numbers:
            numbers.put("a", 0)

            def add() -> None:
                for _ in range(10):
                    numbers.update("a", lambda answer: answer.value + 1 if answer else 1)
                    numbers.get("a")

            calls = [Calling(add) for _ in range(16)]
            for call in calls:
                call.result()
            assert value(numbers) == 160

    async def test_s2_a_lost_reply_is_settled_and_not_repeated_blindly(
        self, server: Server
    ) -> None:
        """The server did it, and the connection broke: the change counts once."""
        async with FlakyProxy(HOST, server.port) as proxy:
            url = server.url().replace(f":{server.port}/", f":{proxy.port}/")
            cache = SyncCache(url)
            await asyncio.to_thread(cache.open)
            try:
                numbers = declared(cache)
                await asyncio.to_thread(numbers.put, "a", 1)
                proxy.lose("replies", to=b"EVALSHA", times=1)
                add_one = lambda answer: answer.value + 1  # noqa: E731
                answer = await asyncio.to_thread(numbers.update, "a", add_one)
                assert answer is not None
                assert answer.value == 2
                assert proxy.lost == 1
                proxy.lose("replies", to=b"EVALSHA", times=1)
                assert await asyncio.to_thread(numbers.remove, "a")
                assert await asyncio.to_thread(value, numbers) is None
            finally:
                await asyncio.to_thread(cache.close)

    def test_a_server_that_goes_away_is_told_and_comes_back(self, server: Server) -> None:
        """A put raises StoreError; once the server is there again, puts are stored."""
        check_that_an_outage_is_told(server, server.url(), "the Redis server is unavailable")

    def test_hooks_see_the_steps_of_threads_in_their_own_thread(self, server: Server) -> None:
        """G15: as they see those of the loop."""
        seen: list[tuple[str, str]] = []

        @contextmanager
        def hook(span: Any) -> Iterator[None]:
            seen.append((span.step, threading.current_thread().name))
            yield

        with SyncCache(server.url(), hooks=[hook]) as cache:
            numbers = declared(cache)
            seen.clear()
            numbers.put("a", 1)
            numbers.get("a")
            numbers.delete("a")
            assert cache.counts().store_seconds.keys() >= {"put", "read", "delete"}
        here = threading.current_thread().name
        assert set(seen) == {("put", here), ("read", here), ("delete", here)}

    def test_a_hook_that_calls_its_cache_is_refused(self, server: Server) -> None:
        """It would wait for itself."""
        errors: list[Exception] = []

        @contextmanager
        def hook(_: Any) -> Iterator[None]:
            try:
                numbers.get("b")
            except StillfreshError as exc:
                errors.append(exc)
            yield

        with SyncCache(server.url(), hooks=[hook]) as cache:
            numbers = declared(cache)
            numbers.put("a", 1)
        assert errors

    def test_closing_waits_for_a_put_of_another_thread(self, server: Server) -> None:
        """It ends as if the cache had been closed after it."""
        with SyncCache(server.url()) as cache:
            numbers = declared(cache)
            numbers.put("a", 1)
            server.pause()
            put = Calling(lambda: numbers.put("a", 2))
            until(lambda: cache._cache.opened is not None and cache._cache.opened._blocks)
            closing = Calling(cache.close)
            server.go_on()
            closing.result()
            assert put.result().stored
        with opened(server.url()):
            pass


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
class TestE20ThreadsFork:
    def test_a_fork_while_a_thread_waits_for_the_server(self, server: Server) -> None:
        """The child has connections of its own; the parent's thread gets its own reply."""
        with opened(server.url()) as numbers:
            numbers.put("a", 1)
            server.pause()
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
            server.go_on()
            with os.fdopen(reading) as pipe:
                assert pipe.read() == "3"
            os.waitpid(pid, 0)
            assert put.result().stored
            assert (value(numbers), value(numbers, "b")) == (2, 3)

    def test_a_child_that_is_forked_inside_a_call_is_told_that_its_call_is_lost(
        self, server: Server
    ) -> None:
        """`change` of an update runs in the caller's thread, and forks: only the parent goes on."""
        with opened(server.url()) as numbers:
            numbers.put("a", 1)
            reading, writing = os.pipe()
            child = 0

            def change(_: object) -> int:
                nonlocal child
                child = os.fork()
                return 2

            try:
                numbers.update("a", change)
                text = "went on"
            except StillfreshError as exc:
                text = str(exc)
            if child == 0:
                os.write(writing, f"{text}; {value(numbers)}".encode())
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as pipe:
                assert pipe.read().startswith("the process forked while this thread used the cache")
            os.waitpid(child, 0)
            assert (text, value(numbers)) == ("went on", 2)


def is_waiting(numbers: SyncResource[str, int]) -> bool:
    """True while a thread has taken a connection."""
    runtime = numbers._resource.core.runtime
    assert runtime is not None
    return bool(runtime._blocks)


class TestS14ThreadConnections:
    def test_a_new_connection_has_one_time_out_in_all(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that hangs in the handshake holds a thread no longer than any other."""

        class Base:
            def __init__(self) -> None:
                self.limits: list[float | None] = []

            def read_response(self, timeout: float | None = None) -> None:
                self.limits.append(timeout)
                clock.now += 0.3

        class Connection(TimedReplies, Base): ...

        clock = SimpleNamespace(now=10.0)
        monkeypatch.setattr(redis_threads, "time", SimpleNamespace(monotonic=lambda: clock.now))
        connection = Connection()
        connection.read_response()
        connection.reply_by = clock.now + 1.0
        for _ in range(5):
            connection.read_response()
        assert connection.limits[0] is None
        assert connection.limits[1:] == pytest.approx([1.0, 0.7, 0.4, 0.1, 0.001])


class TestE20Turns:
    @pytest.fixture
    def loop(self) -> Iterator[SharedLoop]:
        """One that runs in the process's loop thread."""
        cache = SyncCache("memory://")
        with cache:
            assert PROCESS.loop is not None
            yield PROCESS.loop._loop

    def test_one_thread_at_a_time_has_the_turn(self, loop: SharedLoop) -> None:
        """The loop counts as running in it; outside the turn nothing does."""
        inside: list[int] = []
        most = 0

        def work() -> None:
            nonlocal most
            for number in range(200):
                with loop.borrowed():
                    inside.append(number)
                    most = max(most, len(inside))
                    assert asyncio.get_running_loop() is loop
                    inside.pop()
                    with outside():
                        assert not THIS_THREAD.has_turn
                        assert asyncio._get_running_loop() is None

        calls = [Calling(work) for _ in range(4)]
        for call in calls:
            call.result()
        assert most == 1

    def test_what_a_borrowing_thread_schedules_wakes_the_loop_up(self, loop: SharedLoop) -> None:
        """At once, and after a time."""
        done = threading.Event()
        late = threading.Event()
        with loop.borrowed():
            loop.call_soon(done.set)
            loop.call_later(0.001, late.set)
        assert done.wait(20)
        assert late.wait(20)

    def test_the_loop_has_its_turn_between_two_threads(self, loop: SharedLoop) -> None:
        """Threads that borrow it again and again do not keep it from running."""
        turns = 0
        end = threading.Event()

        def borrow() -> None:
            while not end.is_set():
                with loop.borrowed():
                    time.sleep(0)

        def turn() -> None:
            nonlocal turns
            turns += 1
            if turns == 50:
                end.set()
            else:
                loop.call_soon(turn)

        calls = [Calling(borrow) for _ in range(3)]
        loop.call_soon_threadsafe(turn)
        assert end.wait(20)
        for call in calls:
            call.result()
