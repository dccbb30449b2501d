"""S14: the blocking connections of threads: few, each of one thread, and none with an old reply."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any

import pytest

from stillfresh.errors import StoreError
from stillfresh.stores.permits import Permit, Permits
from stillfresh.stores.thread_pool import ThreadPool
from tests.kit.sync import Calling


class FakeConnection:
    def __init__(self) -> None:
        self.clean = False
        self.is_open = True

    def is_clean(self) -> bool:
        return self.clean

    def disconnect(self) -> None:
        self.is_open = False


class Pool:
    """A pool whose connections are noted."""

    def __init__(self, most: int, timeout: float = 20.0) -> None:
        self.connections: list[FakeConnection] = []
        self.pool = ThreadPool(
            self._connect,
            most=most,
            lost=(ValueError,),
            timeout=timeout,
            busy=lambda: StoreError("all are busy"),
        )

    def _connect(self) -> FakeConnection:
        self.connections.append(FakeConnection())
        return self.connections[-1]


def failing(clean: bool) -> Callable[[FakeConnection], None]:
    def fail(connection: FakeConnection) -> None:
        connection.clean = clean
        raise ValueError("the server refused")

    return fail


def begin_to_wait(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Calling:
    """Another thread, which waits for a connection when this returns."""
    take = pool.pool._permits.take
    is_waiting = threading.Event()

    def note_and_take(**options: Any) -> Permit:
        is_waiting.set()
        return take(**options)

    monkeypatch.setattr(pool.pool._permits, "take", note_and_take)
    calling = Calling(lambda: pool.pool.exchange(lambda _: None))
    is_waiting.wait(20)
    return calling


class TestS14ThreadPool:
    def test_a_connection_is_used_again(self) -> None:
        """By the next request; after it, too."""
        pool = Pool(2)
        first = pool.pool.exchange(lambda connection: connection)
        assert pool.pool.exchange(lambda connection: connection) is first
        assert len(pool.connections) == 1

    @pytest.mark.parametrize("clean", [True, False])
    def test_only_a_clean_connection_is_used_after_an_error(self, clean: bool) -> None:
        """Its next reply would be of the request that failed."""
        pool = Pool(1)
        with pytest.raises(ValueError, match="refused"):
            pool.pool.exchange(failing(clean))
        assert pool.connections[0].is_open == clean
        second = pool.pool.exchange(lambda connection: connection)
        assert (second is pool.connections[0]) == clean

    def test_a_thread_waits_for_a_connection_no_longer_than_the_time_out(self) -> None:
        """And says why it got none."""
        pool = Pool(1, timeout=0.01)

        def ask_again(_: FakeConnection) -> None:
            pool.pool.exchange(lambda _: None)

        with pytest.raises(StoreError, match="all are busy"):
            pool.pool.exchange(ask_again)
        assert len(pool.connections) == 1

    def test_threads_that_waited_while_the_server_failed_do_not_find_out_one_by_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They fail as well, without a connection."""
        pool = Pool(1)
        waiting: list[Calling] = []

        def fail(connection: FakeConnection) -> None:
            waiting.append(begin_to_wait(pool, monkeypatch))
            failing(clean=False)(connection)

        with pytest.raises(ValueError, match="refused"):
            pool.pool.exchange(fail)
        with pytest.raises(TimeoutError, match="failed while this thread waited"):
            waiting[0].result()
        assert len(pool.connections) == 1

    @pytest.mark.parametrize("interruption", [KeyboardInterrupt(), LookupError("soft time limit")])
    def test_a_thread_that_was_interrupted_says_nothing_of_the_server(
        self, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
    ) -> None:
        """Threads that waited meanwhile get a connection; only its own is closed."""
        pool = Pool(1)
        waiting: list[Calling] = []

        def interrupt(_: FakeConnection) -> None:
            waiting.append(begin_to_wait(pool, monkeypatch))
            raise interruption

        with pytest.raises(type(interruption)):
            pool.pool.exchange(interrupt)
        assert waiting[0].result() is None
        assert [connection.is_open for connection in pool.connections] == [False, True]

    def test_a_connection_in_use_is_closed_when_its_request_ends(self) -> None:
        """If the pool was closed meanwhile."""
        pool = Pool(2)
        idle = pool.pool.exchange(lambda _: pool.pool.exchange(lambda connection: connection))

        def close(connection: FakeConnection) -> FakeConnection:
            pool.pool.close()
            assert connection.is_open
            return connection

        used = pool.pool.exchange(close)
        assert (idle.is_open, used.is_open) == (False, False)


def takable(permits: Permits) -> int:
    """How many can be taken now; they are given back."""
    taken: list[Permit] = []
    with suppress(Empty):
        while True:
            taken.append(permits.take(timeout=0.001))
    for permit in taken:
        permits.give_back(permit)
    return len(taken)


class TestS14Permits:
    def test_a_permit_that_nobody_holds_comes_back_by_itself(self) -> None:
        """As one does that was taken a moment before a signal's handler raised."""
        permits = Permits(2)
        first, second = permits.take(), permits.take()
        with pytest.raises(Empty):
            permits.take(timeout=0.001)
        del first
        gc.collect()
        assert takable(permits) == 1
        permits.give_back(second)
        assert takable(permits) == 2
        del second
        gc.collect()
        assert takable(permits) == 2

    def test_permits_end_with_their_pool(self) -> None:
        """None of them keeps the others, whoever still holds one."""
        permits = Permits(2)
        queue = weakref.ref(permits._free)
        held = permits.take()
        del permits
        gc.collect()
        assert queue() is None
        del held
        gc.collect()
