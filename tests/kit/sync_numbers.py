"""A resource of numbers on a `SyncCache`, for tests of stores that threads use without the loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytest

from stillfresh import StoreError, SyncCache
from stillfresh.sync import SyncResource
from stillfresh.sync.loop_thread import LoopThread
from tests.kit.sync import until


def declared(cache: SyncCache, **options: Any) -> SyncResource[str, int]:
    @cache.batched("number", fresh_for=60, stale_for=60, **options)
    def numbers(keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, 0)

    return numbers


@contextmanager
def opened(url: str, **options: Any) -> Iterator[SyncResource[str, int]]:
    with SyncCache(url) as cache:
        yield declared(cache, **options)


def value(numbers: SyncResource[str, int], key: str = "a") -> int | None:
    answer = numbers.known([key]).get(key)
    return getattr(answer, "value", None)


class Stoppable(Protocol):
    """A server that a test can stop."""

    def stop(self) -> None: ...

    def start(self) -> None: ...


def check_that_an_outage_is_told(server: Stoppable, url: str, message: str) -> None:
    """A put raises StoreError; once the server is there again, puts are stored."""
    with opened(url) as numbers:
        numbers.put("a", 1)
        server.stop()
        with pytest.raises(StoreError, match=message):
            numbers.put("a", 2)
        with pytest.raises(StoreError):
            numbers.invalidate("a")
        server.start()
        until(lambda: is_stored(numbers, 3))
        assert value(numbers) == 3


def is_stored(numbers: SyncResource[str, int], number: int) -> bool:
    """Put a number. False if the store did not answer."""
    try:
        return numbers.put("a", number).stored
    except StoreError:
        return False


def check_that_no_step_needs_the_loop(
    url: str, monkeypatch: pytest.MonkeyPatch, memory_for: float
) -> None:
    """Every change, and every read that loads nothing, stays in its thread.

    Memory is as up to date as if the loop thread had been asked.
    """

    def refuse(*_: object) -> None:
        raise AssertionError("the loop thread was asked")

    with SyncCache(url) as cache:
        numbers = declared(cache, tags=lambda key: [f"tag-{key}"], memory_for=memory_for)
        with monkeypatch.context() as patch:
            patch.setattr(LoopThread, "run", refuse)
            assert numbers.put("a", 1).stored
            assert numbers("a") == 1
            assert not numbers.add("a", 2).stored
            assert numbers.touch("a", fresh_for=90).stored
            numbers.update("a", lambda answer: answer.value + 4 if answer else 0)
            assert numbers.get("a").value == 5
            numbers.put_many({"b": 6, "c": 7})
            answers = numbers.get_many(["a", "b", "c"])
            assert [answers[key].value for key in "abc"] == [5, 6, 7]
            assert numbers.remove("b")
            assert not numbers.remove("b")
            numbers.delete("c")
            assert set(numbers.known(["a", "b", "c", "none"])) == {"a"}
            assert cache.invalidate_tag("tag-a") == [("number", "a")]
            assert numbers.known(["a"]) == {}
            numbers.put("a", 8)
            numbers.invalidate("a")
            assert numbers.known(["a"]) == {}
