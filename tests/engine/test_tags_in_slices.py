"""E8, E37: a tag of many entries is invalidated in slices, and loads go on in between."""

import asyncio

import pytest

from stillfresh import Cache
from stillfresh.bounded import SLICE


@pytest.mark.parametrize("kinds", [("a", "b"), ("b", "a")])
async def test_no_value_stays_that_was_made_of_an_entry_still_to_come(
    cache: Cache, kinds: tuple[str, str]
) -> None:
    """On every store, whichever of the two comes first there (E8, E37)."""
    stock = 1

    @cache.batched("a0", fresh_for="1h", tags=["stock"])
    async def others(keys: list[int]) -> dict[int, int]:
        return dict.fromkeys(keys, 0)

    @cache.cached(kinds[0], fresh_for="1h", tags=["stock"])
    async def part() -> int:
        return stock

    @cache.cached(kinds[1], fresh_for="1h", tags=["stock"])
    async def whole(number: int) -> str:
        return f"{number}: {await part()} left"

    await others.get_many(range(2 * SLICE))
    await part()
    stock = 2
    invalidating = asyncio.create_task(cache.invalidate_tag("stock"))
    made = 0
    while not invalidating.done():
        await whole(made)
        made += 1
        await asyncio.sleep(0)
    token = (await invalidating).token
    assert made
    for number in range(made):
        answer = await whole.of(number).get(at_least=token)
        assert answer.value == f"{number}: 2 left"
