"""One of several processes under load on one store.

Visitors read and sometimes invalidate, and log what they were served. It ends cleanly on SIGTERM,
or when its parent has ended; other ends are faults of the proof.
"""

import asyncio
import os
import random
import signal
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Final, NamedTuple

from stillfresh.engine import Cache
from stillfresh.errors import StillfreshError, StoreError
from stillfresh.lab.prove.peers import PEERS
from stillfresh.lab.prove.shelf import PeerShelf
from stillfresh.lab.prove.stage import Stage
from stillfresh.lab.prove.witness import LoadNames, Log, MovedClock, Seen, Witness
from stillfresh.stores import store_for
from stillfresh.sync import SyncCache

KIND: Final = "proof"
LEASE_FOR: Final = 1.0
VISITORS: Final = 4
MANY: Final = 6


class ProofJob(NamedTuple):
    """The settings of a process."""

    log: Path
    clock: Path
    complaints: Path
    environment: dict[str, str]
    seed: float
    stage: Stage
    uses_threads: bool = False
    """Whether its visitors call a SyncCache in threads."""


class StillfreshShelf(ABC):
    """A cache on a store that logs its steps. A subclass says how its process calls it."""

    open: Callable[[], Awaitable[object]]
    close: Callable[[], Awaitable[object]]

    def __init__(self, job: ProofJob, log: Log, clock: MovedClock) -> None:
        self._names = LoadNames(job.seed, log, clock)
        self._clock = clock
        self._witness = Witness(store_for(job.stage.url, clock), log, clock)

    @abstractmethod
    async def invalidate(self, key: str) -> None: ...

    @abstractmethod
    async def _answers(self, keys: list[str]) -> dict[str, Any]: ...

    def _leases(self, keys: list[str]) -> dict[str, str]:
        """The tokens under which these keys are loaded now."""
        return {key: self._witness.tokens.pop(key, "") for key in keys}

    async def read(self, keys: list[str]) -> list[Seen]:
        troubles = self._witness.troubles
        wall = self._clock()
        began = time.monotonic()
        answers = await self._answers(keys)
        ended = time.monotonic()
        blind = self._witness.troubles != troubles
        return [
            Seen(
                "served",
                began,
                ended,
                key=key,
                load=answer.value or "",
                wall=wall,
                verdict=str(answer.verdict),
                fetched_at=answer.fetched_at,
                blind=blind or answer.unverified,
                unverified=answer.unverified,
            )
            for key, answer in answers.items()
        ]


class LoopShelf(StillfreshShelf):
    """A Cache on the process's event loop."""

    def __init__(self, job: ProofJob, log: Log, clock: MovedClock) -> None:
        super().__init__(job, log, clock)
        cache = Cache(self._witness, clock=clock)
        self.open = cache.open
        self.close = cache.close

        @cache.batched(KIND, **_terms_of(job.stage))
        async def prices(skus: list[str]) -> Mapping[str, str]:
            return await self._names.load(self._leases(skus))

        self._prices = prices

    async def invalidate(self, key: str) -> None:
        await self._prices.invalidate(key)

    async def _answers(self, keys: list[str]) -> dict[str, Any]:
        if len(keys) == 1:
            return {keys[0]: await self._prices.get(keys[0])}
        return dict(await self._prices.get_many(keys))


class ThreadShelf(StillfreshShelf):
    """A SyncCache. Each visitor calls it in a thread, which loads by itself."""

    def __init__(self, job: ProofJob, log: Log, clock: MovedClock) -> None:
        super().__init__(job, log, clock)
        cache = SyncCache(self._witness, clock=clock)
        self.open = partial(asyncio.to_thread, cache.open)
        self.close = partial(asyncio.to_thread, cache.close)

        @cache.batched(KIND, **_terms_of(job.stage))
        def prices(skus: list[str]) -> Mapping[str, str]:
            return self._names.load_in_thread(self._leases(skus))

        self._prices = prices

    async def invalidate(self, key: str) -> None:
        await asyncio.to_thread(self._prices.invalidate, key)

    async def _answers(self, keys: list[str]) -> dict[str, Any]:
        if len(keys) == 1:
            return {keys[0]: await asyncio.to_thread(self._prices.get, keys[0])}
        return await asyncio.to_thread(self._prices.get_many, keys)


def _terms_of(stage: Stage) -> dict[str, Any]:
    """The options of the resource."""
    return {
        "fresh_for": stage.fresh_for,
        "stale_for": stage.stale_for,
        "error_for": "30d",
        "memory_for": stage.memory_for,
        "lease_for": LEASE_FOR,
        "max_batch": 8,
    }


class Life:
    """The work of one process, from start to end."""

    def __init__(self, job: ProofJob, log: Log, shelf: StillfreshShelf | PeerShelf) -> None:
        self._keys = job.stage.keys
        self._pace = job.stage.pace
        self._log = log
        self._dice = random.Random(job.seed)  # noqa: S311 (no secret)
        self._stop = asyncio.Event()
        self._shelf = shelf

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        parent = parent_process()
        if parent is not None:
            loop.add_reader(parent.sentinel, self._stop.set)
        await self._shelf.open()
        try:
            self._log.tell(Seen("ready", time.monotonic()))
            await asyncio.gather(*(self._visit() for _ in range(VISITORS)))
        finally:
            await self._shelf.close()

    async def _visit(self) -> None:
        while not self._stop.is_set():
            fate = self._dice.random()
            if fate < 0.02:
                await self._invalidate(self._dice.choice(self._keys))
            elif fate < 0.1:
                await self._read(self._dice.sample(self._keys, MANY))
            else:
                await self._read([self._dice.choice(self._keys)])
            await asyncio.sleep(self._dice.random() * 2 * self._pace)

    async def _invalidate(self, key: str) -> None:
        began = time.monotonic()
        try:
            await self._shelf.invalidate(key)
        except StoreError as exc:  # its caller gets the error, and may try again
            self._log.tell(Seen("refused", began, time.monotonic(), key=key, text=str(exc)))

    async def _read(self, keys: list[str]) -> None:
        began = time.monotonic()
        try:
            self._log.tell(*await self._shelf.read(keys))
        except StillfreshError as exc:
            self._log.tell(Seen("failed", began, time.monotonic(), key=keys[0], text=repr(exc)))


def main(job: ProofJob) -> None:
    """Run in its own process; its errors go to a file."""
    os.environ.update(job.environment)
    with job.complaints.open("ab") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    if not job.stage.peer:
        warnings.simplefilter("error")
    asyncio.run(_live(job))


async def _live(job: ProofJob) -> None:
    log = Log(job.log)
    clock = MovedClock(job.clock)
    ours = ThreadShelf if job.uses_threads else LoopShelf
    make_shelf = PEERS[job.stage.peer] if job.stage.peer else ours
    shelf = make_shelf(job, log, clock)
    await Life(job, log, shelf).live()
