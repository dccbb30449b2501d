"""Long work in slices: nothing holds the event loop for more than a moment (E28)."""

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import Final, Generic, Self, TypeVar

T = TypeVar("T")

SLICE: Final = 1_000
"""Items of a microsecond or ten each."""


class sliced(Generic[T]):  # noqa: N801 (called like `enumerate`)
    """`async for some in sliced(items)`: the loop has a turn between two slices.

    No generator: a loop that ends allows no new one.
    """

    def __init__(self, items: Iterable[T], size: int = SLICE) -> None:
        self._left = iter(items)
        self._size = size
        self._is_full = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[T]:
        if self._is_full:
            await asyncio.sleep(0)
        some = list(islice(self._left, self._size))
        self._is_full = len(some) == self._size
        if not some:
            raise StopAsyncIteration
        return some
