"""What the tests of SyncCache share: an upstream of plain functions, and calls in threads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from stillfresh import SyncCache, SyncResource
from tests.kit.engine import PATIENCE, Price

T = TypeVar("T")

SyncPrices = SyncResource[str, Price]


class PlainUpstream:
    """Answers with the version of the moment, and notes its thread; can be held up, and fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.version = 1
        self.absent: set[str] = set()
        self.error: BaseException | None = None
        self.asked = threading.Semaphore(0)
        self.gate: threading.Event | None = None
        """While it is there, calls wait for it."""

    def __call__(self, skus: list[str]) -> dict[str, Price]:
        self.calls.append((threading.current_thread().name, list(skus)))
        version = self.version
        self.asked.release()
        if (gate := self.gate) is not None:
            assert gate.wait(20)
        if self.error is not None:
            raise self.error
        return {sku: Price(sku, version) for sku in skus if sku not in self.absent}

    @property
    def threads(self) -> list[str]:
        return [thread for thread, _ in self.calls]

    @property
    def loaded(self) -> list[list[str]]:
        return [skus for _, skus in self.calls]


def declare(cache: SyncCache, upstream: PlainUpstream, **options: Any) -> SyncPrices:
    """`price`, on the terms of the engine's tests."""
    terms: dict[str, Any] = {"fresh_for": 30, "stale_for": 60, "error_for": 3600, **options}

    @cache.batched("price", **terms)
    def prices(skus: list[str]) -> dict[str, Price]:
        return upstream(skus)

    return prices


class Calling:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, work: Callable[..., Any], *args: Any, name: str = "caller") -> None:
        self._work = work
        self._args = args
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work(*self._args)
        except BaseException as exc:  # noqa: BLE001 (raised in `result`)
            self._error = exc

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Until it is over, but no longer than that."""
        self._thread.join(seconds)

    def result(self) -> Any:
        self._thread.join(20)
        assert self.is_over
        if self._error is not None:
            raise self._error
        return self._value


def until(is_so: Callable[[], object]) -> None:
    """Wait for what another thread or another process does."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not is_so():
        assert time.monotonic() < deadline, f"it did not happen within {PATIENCE} s"
        pause.wait(0.002)


@contextmanager
def loop_held(cache: SyncCache) -> Iterator[None]:
    """Inside the block the cache's event loop has no turn."""
    begun = threading.Event()
    gate = threading.Event()

    async def hold() -> None:
        begun.set()
        assert gate.wait(20)

    holding = Calling(cache.run, hold, name="holds the loop")
    assert begun.wait(20)
    try:
        yield
    finally:
        gate.set()
        holding.result()


@contextmanager
def held(upstream: PlainUpstream) -> Iterator[None]:
    """Calls of the upstream wait until the end of the block."""
    upstream.gate = threading.Event()
    try:
        yield
    finally:
        upstream.gate.set()
        upstream.gate = None
