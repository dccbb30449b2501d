"""Reads and invalidations through another cache, logged like those of stillfresh.

A value names its load and when that began. So what the other cache returns shows which load a
reader was served. A subclass says how a key is read and invalidated there.
"""

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from stillfresh.errors import LoadFailed, StoreError, error_text
from stillfresh.lab.prove.witness import LoadNames, Log, MovedClock, Seen

if TYPE_CHECKING:
    from stillfresh.lab.prove.worker import ProofJob


class PeerShelf:
    """Another cache, as one process uses it."""

    get: Callable[[str], Awaitable[str]]
    drop: Callable[[str], Awaitable[object]]
    close: Callable[[], Awaitable[object]]

    def __init__(self, job: "ProofJob", log: Log, clock: MovedClock) -> None:
        self.job = job
        self.troubles = 0
        """Times when the cache did not reach its server, or its site."""
        self._log = log
        self._clock = clock
        self._names = LoadNames(job.seed, log, clock)

    async def open(self) -> None:
        """Do nothing: most connect when they are used."""

    async def load(self, key: str) -> str:
        wall = self._clock()
        names = await self._names.load({key: "its own"})
        self._log.tell(Seen("published", time.monotonic(), time.monotonic(), key=key))
        return f"{wall} {names[key]}"

    async def read(self, keys: list[str]) -> list[Seen]:
        return [await self._read_key(key) for key in keys]

    async def _read_key(self, key: str) -> Seen:
        troubles = self.troubles
        wall = self._clock()
        began = time.monotonic()
        try:
            value = await self.get(key)
            fetched_at, _, load = value.partition(" ")
        except Exception as exc:
            raise LoadFailed(error_text(exc)) from exc
        ended = time.monotonic()
        blind = self.troubles != troubles
        return Seen(
            "served",
            began,
            ended,
            key=key,
            load=load,
            wall=wall,
            # The other cache does not say how fresh its answer is, so its caller takes it as it
            # is, whether the cache could ask its server or not.
            verdict="fresh",
            fetched_at=float(fetched_at),
            blind=blind,
        )

    async def invalidate(self, key: str) -> None:
        began = time.monotonic()
        self._log.tell(Seen("invalidating", began, key=key))
        try:
            await self.drop(key)
        except Exception as exc:
            raise StoreError(error_text(exc)) from exc
        self._log.tell(Seen("invalidated", began, time.monotonic(), key=key))
