"""A fake upstream for tests: a function that answers from a dict, and may be down, slow or wrong.

Nothing sleeps. While the upstream is slow, its calls wait until the test lets them go on. A call is
answered with the value that the upstream had when the call began, as a database would.
"""

import asyncio
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Condition, Event
from typing import Any, Final, Generic, TypeVar

from stillfresh.durations import Duration, seconds

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_CALLS: Final = 100_000
LONGEST_WAIT: Final = 30.0
"""Seconds that a call in a thread waits, so that a test that forgets it ends."""
UNSET: Final = object()


class Gate:
    """Calls of a slow upstream wait here, in threads and on event loops."""

    def __init__(self) -> None:
        self._opened = Event()
        self._waiting: deque[asyncio.Future[None]] = deque(maxlen=MOST_CALLS)

    def open(self) -> None:
        """Let everybody go on, and nobody wait any more."""
        self._opened.set()
        while self._waiting:
            future = self._waiting.popleft()
            with suppress(RuntimeError):  # the loop is closed
                future.get_loop().call_soon_threadsafe(_end, future)

    def pass_in_thread(self) -> None:
        """Wait. Raises TimeoutError after half a minute."""
        if not self._opened.wait(LONGEST_WAIT):
            raise TimeoutError("the fake upstream is slow, and the test did not let it go on")

    async def pass_on_loop(self) -> None:
        """Wait on the event loop."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if self._opened.is_set():  # by another thread, which may not have seen this call
            _end(future)
        await future


def _end(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class FakeUpstream(Generic[K, V]):
    """An upstream for tests: `FakeUpstream({"tea": 300})`. Use its methods as your loader.

    `ask` and `ask_many` are for `def` loaders, `ask_async` and `ask_many_async` for `async def`.
    A key that is not in `values` is a KeyError, or left out of the answer of `ask_many`.
    """

    def __init__(self, values: Mapping[K, V]) -> None:
        self.values: dict[K, V] = dict(values)
        """What the upstream answers; a test may change it."""
        self._calls: deque[K] = deque(maxlen=MOST_CALLS)
        self._called = Condition()
        self._error: Exception | None = None
        self._gate: Gate | None = None
        self._wrong: Any = UNSET

    @property
    def calls(self) -> list[K]:
        """The keys that were asked for, one after the other."""
        with self._called:
            return list(self._calls)

    def ask(self, key: K) -> V:
        """Answer, or raise, in the calling thread."""
        answers = self.ask_many([key])
        return answers[key]

    def ask_many(self, keys: Iterable[K]) -> dict[K, V]:
        """Answer for many keys."""
        answers, gate = self._begin(keys)
        if gate is not None:
            gate.pass_in_thread()
        return self._answered(answers)

    async def ask_async(self, key: K) -> V:
        """Answer, or raise, on the event loop."""
        answers = await self.ask_many_async([key])
        return answers[key]

    async def ask_many_async(self, keys: Iterable[K]) -> dict[K, V]:
        """Answer for many keys, on the event loop."""
        answers, gate = self._begin(keys)
        if gate is not None:
            await gate.pass_on_loop()
        return self._answered(answers)

    @contextmanager
    def down(self, error: Exception | None = None) -> Iterator[None]:
        """Inside the block every call raises `error`, or a ConnectionError."""
        before = self._error
        self._error = ConnectionError("the upstream is down") if error is None else error
        try:
            yield
        finally:
            self._error = before

    @contextmanager
    def slow(self) -> Iterator[None]:
        """Calls that begin inside the block wait until its end."""
        before = self._gate
        gate = Gate()
        self._gate = gate
        try:
            yield
        finally:
            self._gate = before
            gate.open()

    @contextmanager
    def wrong(self, value: object) -> Iterator[None]:
        """Inside the block the answer for every key is this value, whatever its type."""
        before = self._wrong
        self._wrong = value
        try:
            yield
        finally:
            self._wrong = before

    def wait_for_calls(self, count: int, timeout: Duration = "10s") -> None:
        """Wait until so many keys were asked for: a refresh in the background has begun.

        Raises TimeoutError. On an event loop, call it with `asyncio.to_thread`.
        """
        limit = seconds(timeout, name="timeout")
        with self._called:
            if not self._called.wait_for(lambda: len(self._calls) >= count, limit):
                raise TimeoutError(f"{len(self._calls)} of {count} calls came within {limit:g} s")

    def _begin(self, keys: Iterable[K]) -> tuple[dict[K, V], Gate | None]:
        """Note the call; return the answers as they are now, and what to wait for."""
        wanted = list(keys)
        if self._wrong is UNSET:
            answers = {key: self.values[key] for key in wanted if key in self.values}
        else:
            answers = dict.fromkeys(wanted, self._wrong)
        with self._called:
            self._calls.extend(wanted)
            self._called.notify_all()
        return answers, self._gate

    def _answered(self, answers: dict[K, V]) -> dict[K, V]:
        if self._error is not None:
            raise self._error
        return answers
