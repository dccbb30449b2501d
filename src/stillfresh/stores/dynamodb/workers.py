"""Many keys, each asked on its own, so many at a time (S1)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

K = TypeVar("K")
T = TypeVar("T")

AT_ONCE: Final = 16


async def each(keys: Iterable[K], step: Callable[[K], Awaitable[T]]) -> dict[K, T]:
    """What `step` answered for each key. All run to their end, then the first error is raised:
    a step that was cut off might or might not have been done.
    """
    waiting = list(dict.fromkeys(keys))
    if len(waiting) == 1:
        return {waiting[0]: await step(waiting[0])}
    results: dict[K, T] = {}
    errors: list[Exception] = []
    queue = iter(waiting)

    async def work() -> None:
        for key in queue:
            try:
                results[key] = await step(key)
            except Exception as exc:  # noqa: BLE001 (raised below, when all have ended)
                errors.append(exc)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(AT_ONCE, len(waiting))):
            group.create_task(work())
    if errors:
        raise errors[0]
    return {key: results[key] for key in waiting}
