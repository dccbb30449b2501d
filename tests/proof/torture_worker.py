"""One of several processes under load on one store (T4).

Visitors read and now and then invalidate, and the log is told what they were served. Ends cleanly
when it is told to by SIGTERM; everything else is done to it.
"""

import asyncio
import itertools
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from stillfresh import Cache, StillfreshError, StoreError
from stillfresh.engine.resource import Resource
from stillfresh.stores.contract import Store
from stillfresh.stores.urls import store_for
from tests.proof.witness import Event, Log, MovedClock, Witness

__all__ = ["FRESH_FOR", "KIND", "LEASE_FOR", "main"]

KIND: Final = "price"
FRESH_FOR: Final = 1.0
LEASE_FOR: Final = 1.0
VISITORS: Final = 4
MANY: Final = 6
LONGEST_LOAD: Final = 0.06


class Life:
    """What one process does, from its start to its end."""

    def __init__(
        self,
        url: str,
        log: Log,
        clock: MovedClock,
        keys: Sequence[str],
        seed: float,
        memory_for: float,
    ) -> None:
        self._keys = keys
        self._log = log
        self._clock = clock
        self._dice = random.Random(seed)
        self._numbers = itertools.count()
        self._stop = asyncio.Event()
        self._witness = Witness(store_for(url, clock), log, clock)
        self.cache = Cache(cast("Store", self._witness), clock=clock)
        self._prices = self._declared(memory_for)

    def _declared(self, memory_for: float) -> Resource[str, str]:
        @self.cache.batched(
            KIND,
            fresh_for=FRESH_FOR,
            stale_for=2,
            error_for="30d",
            memory_for=memory_for,
            lease_for=LEASE_FOR,
            max_batch=8,
        )
        async def prices(skus: list[str]) -> Mapping[str, str]:
            loads = {sku: self._begun(sku) for sku in skus}
            await asyncio.sleep(self._dice.random() * LONGEST_LOAD)
            return loads

        return prices

    def _begun(self, key: str) -> str:
        """A load's name, which is the value: who is served it can be traced to its beginning."""
        load = f"{os.getpid()}-{next(self._numbers)}-{key}"
        token = self._witness.tokens.pop(key, "")
        self._log.tell(
            Event("load", time.monotonic(), key=key, load=load, lease=token, wall=self._clock())
        )
        return load

    async def live(self, pace: float) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        async with self.cache:
            self._log.tell(Event("ready", time.monotonic()))
            await asyncio.gather(*(self._visit(pace) for _ in range(VISITORS)))

    async def _visit(self, pace: float) -> None:
        while not self._stop.is_set():
            fate = self._dice.random()
            if fate < 0.02:
                await self._invalidate(self._dice.choice(self._keys))
            elif fate < 0.1:
                await self._read(self._dice.sample(self._keys, MANY))
            else:
                await self._read([self._dice.choice(self._keys)])
            await asyncio.sleep(self._dice.random() * 2 * pace)

    async def _invalidate(self, key: str) -> None:
        began = time.monotonic()
        try:
            await self._prices.invalidate(key)
        except StoreError as exc:  # its caller is told, and may try again
            self._log.tell(Event("refused", began, time.monotonic(), key=key, text=str(exc)))

    async def _read(self, keys: list[str]) -> None:
        troubles, wall, asked = self._witness.troubles, self._clock(), time.monotonic()
        try:
            answers = await self._answers(keys)
        except StillfreshError as exc:
            self._log.tell(Event("failed", asked, time.monotonic(), key=keys[0], text=repr(exc)))
            return
        ended, blind = time.monotonic(), self._witness.troubles != troubles
        self._log.tell(
            *(
                Event(
                    "served",
                    asked,
                    ended,
                    key=key,
                    load=answer.value or "",
                    wall=wall,
                    verdict=str(answer.verdict),
                    fetched_at=answer.fetched_at,
                    blind=blind or answer.unverified,
                )
                for key, answer in answers.items()
            )
        )

    async def _answers(self, keys: list[str]) -> dict[str, Any]:
        if len(keys) == 1:
            return {keys[0]: await self._prices.get(keys[0])}
        return dict(await self._prices.get_many(keys))


def main(
    url: str,
    log: Path,
    clock: Path,
    complaints: Path,
    environment: dict[str, str],
    keys: Sequence[str],
    seed: float,
    pace: float,
    memory_for: float,
) -> None:
    """In a process of its own; what it complains of goes to a file."""
    os.environ.update(environment)
    warnings.simplefilter("error")
    with complaints.open("ab") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    asyncio.run(lived(url, Log(log), MovedClock(clock), keys, seed, pace, memory_for))


async def lived(
    url: str,
    log: Log,
    clock: MovedClock,
    keys: Sequence[str],
    seed: float,
    pace: float,
    memory_for: float,
) -> None:
    await Life(url, log, clock, keys, seed, memory_for).live(pace)
