"""E20: a signal whose handler raises does not stop the cache's work in the middle.

Python calls handlers between any two steps of the main thread. One that raised there could keep the
turn of the loop for ever, and with it every thread that uses a SyncCache.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import stillfresh
from stillfresh import LoadFailed, SyncCache
from stillfresh.engine.work import CURRENT
from stillfresh.held_signals import HeldSignals
from tests.kit.sync import Calling, SyncPrices
from tests.sync.conftest import place

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no such signals here")

OURS = str(Path(stillfresh.__file__).parent)

address = pytest.fixture(params=["memory", "sqlite"])(place)


class Limit(Exception):
    """A soft time limit, as Celery's."""


@pytest.fixture
def handler() -> Iterator[Callable[..., object]]:
    def raise_limit(*_: object) -> None:
        raise Limit

    before = signal.signal(signal.SIGALRM, raise_limit)
    yield raise_limit
    signal.signal(signal.SIGALRM, before)


def raise_signal_at(line: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that sends the signal before this line of ours, counted from the first."""
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGALRM)
        return trace

    return trace


def is_interrupted(call: Callable[[], object], line: int) -> bool:
    """Whether the signal came, which ends the call or its loader; False if it has fewer lines."""
    sys.settrace(raise_signal_at(line))
    try:
        call()
    except (Limit, LoadFailed):
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.usefixtures("handler")
class TestE20SignalsWaitForTheCachesWork:
    @pytest.mark.parametrize("what", ["put", "miss", "delete"])
    def test_the_cache_works_on_after_a_handler_raised_at_any_line(
        self, prices: SyncPrices, what: str
    ) -> None:
        """Every third line of a call; threads that use the cache afterwards are not held up."""
        line = 1

        def call() -> None:
            if what == "put":
                prices.put("a", price)
            elif what == "miss":
                prices(f"cold-{line}")
            else:
                prices.delete("a")

        price = prices("a")
        while is_interrupted(call, line):
            line += 3
            if line % 5 == 0:
                assert Calling(prices, f"other-{line}").result() is not None
        assert line > 100
        assert not prices.core.loads.under_way
        assert not prices.core.loads.storing_ids

    def test_a_handler_that_raises_leaves_no_load_in_the_threads_context(
        self, prices: SyncPrices
    ) -> None:
        """Every line of a miss. Later reads of the thread would count as reads of that load."""
        line = 1
        while is_interrupted(lambda: prices(f"cold-{line}"), line):  # noqa: B023 (called at once)
            assert CURRENT.get() is None
            line += 1
        assert line > 100

    def test_a_handler_that_raises_before_a_change_leaves_no_lease(
        self, prices: SyncPrices
    ) -> None:
        """Every third line of `with prices.changing("a")`: no reader waits for it afterwards."""
        prices("a")
        line = 1
        change = prices.changing("a")
        while is_interrupted(change.__enter__, line):
            assert not prices.core.loads.changed_by
            assert Calling(prices, "a").result() is not None
            line += 3
            change = prices.changing("a")
        change.__exit__(None, None, None)
        assert line > 100

    def test_a_handler_that_raises_after_a_change_leaves_no_lease(self, prices: SyncPrices) -> None:
        """Every third line of the end of the block, from the second on."""
        line = 2
        change = prices.changing("a")
        change.__enter__()
        while is_interrupted(lambda: change.__exit__(None, None, None), line):  # noqa: B023 (called at once)
            assert not prices.core.loads.changed_by
            assert Calling(prices, "a").result() is not None
            line += 3
            change = prices.changing("a")
            change.__enter__()
        assert line > 50

    def test_a_handler_that_raises_ends_a_loader_at_once(
        self, cache: SyncCache, handler: Callable[..., object]
    ) -> None:
        handlers = []
        is_over = threading.Event()

        @cache.batched("limited", fresh_for="1m")
        def limited(keys: list[str]) -> dict[str, int]:
            handlers.append(signal.getsignal(signal.SIGALRM))
            signal.raise_signal(signal.SIGALRM)
            is_over.set()
            return dict.fromkeys(keys, 1)

        with pytest.raises(LoadFailed, match="Limit"):
            limited("a")
        assert handlers == [handler]
        assert not is_over.is_set()

    def test_a_handler_that_a_loader_sets_stays(self, cache: SyncCache) -> None:
        def own(*_: object) -> None: ...

        @cache.batched("limited", fresh_for="1m")
        def limited(keys: list[str]) -> dict[str, int]:
            signal.signal(signal.SIGALRM, own)
            return dict.fromkeys(keys, 1)

        limited("a")
        assert signal.getsignal(signal.SIGALRM) is own
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        assert limited("b") == 1
        assert signal.getsignal(signal.SIGALRM) is own


class TestE20HeldSignals:
    def test_a_handler_is_called_once_and_after_the_block(
        self, handler: Callable[..., object]
    ) -> None:
        done = []

        def work() -> None:
            with HeldSignals():
                signal.raise_signal(signal.SIGALRM)
                done.append("all")

        with pytest.raises(Limit):
            work()
        assert done == ["all"]
        assert signal.getsignal(signal.SIGALRM) is handler

    def test_a_signal_that_arrives_before_a_loader_ends_it_before_it_begins(
        self, handler: Callable[..., object]
    ) -> None:
        """And signals are held again, while the exception is on its way."""
        with HeldSignals() as held:
            signal.raise_signal(signal.SIGALRM)
            with pytest.raises(Limit):
                held.release()
            assert signal.getsignal(signal.SIGALRM) is not handler
            held.release()
            assert signal.getsignal(signal.SIGALRM) is handler
            held.hold_again()
        assert signal.getsignal(signal.SIGALRM) is handler

    def test_other_threads_hold_nothing(self, handler: Callable[..., object]) -> None:
        handlers = []

        def look() -> None:
            with HeldSignals() as held:
                handlers.append(signal.getsignal(signal.SIGALRM))
                held.release()
                held.hold_again()
                handlers.append(signal.getsignal(signal.SIGALRM))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert handlers == [handler, handler]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
    def test_a_child_of_another_thread_has_the_programs_handlers(
        self, handler: Callable[..., object]
    ) -> None:
        ends = []

        def fork() -> None:
            child = os.fork()
            if child == 0:
                try:
                    signal.raise_signal(signal.SIGALRM)
                except Limit:
                    os._exit(7 if signal.getsignal(signal.SIGALRM) is handler else 1)
                finally:
                    os._exit(2)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        with HeldSignals():
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        assert ends == [7]
