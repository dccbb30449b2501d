"""Long work in slices: nothing holds the event loop for more than a moment (E28)."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

SLICE: Final = 1_000
"""Items of a microsecond or ten each."""


async def sliced(items: Iterable[T], size: int = SLICE) -> AsyncGenerator[list[T]]:
    """Some of the items at a time; the loop has a turn between two slices, not before the first."""
    left = iter(items)
    while some := list(islice(left, size)):
        yield some
        if len(some) == size:
            await asyncio.sleep(0)
