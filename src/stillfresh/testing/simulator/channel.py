"""The channel on which the simulated store announces changes.

Messages are late, come twice and out of order. Sometimes the channel breaks silently: then nothing
comes any more, and no beat either. A beat comes back after all earlier announcements.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from stillfresh.errors import StoreError
from stillfresh.stores import Channel, Tell
from stillfresh.testing.simulator.faults import Blow

if TYPE_CHECKING:
    from stillfresh.testing.simulator.process import Process

LATENCY: Final = (0.0001, 0.005)
"""Seconds; faster than an answer, so an announcement may overtake an earlier read."""
SLOW: Final = (0.1, 3.0)
PATIENCE: Final = 1.0
BREAKS: Final = 0.1
TWICE: Final = 0.1
LATE: Final = 0.1


@asynccontextmanager
async def listening(process: "Process", tell: Tell) -> AsyncIterator[Channel]:
    """Listen; refused while the store does not answer."""
    world = process.world
    if world.is_over or world.weather.is_now(Blow.AWAY):
        raise StoreError("the store does not answer")
    channel = SimulatedChannel(process, tell)
    world.channels.add(channel)
    try:
        yield channel
    finally:
        world.channels.discard(channel)


class SimulatedChannel(Channel):
    """From the store to one process."""

    def __init__(self, process: "Process", tell: Tell) -> None:
        self.number = process.number
        self._process = process
        self._world = process.world
        self._tell = tell
        self._quiet_at = 0.0
        """When everything sent so far has arrived."""
        self._is_broken = False

    def cut(self) -> None:
        """Nothing comes any more."""
        self._is_broken = True

    def send(self, kind: str, id_: str, generation: str | None) -> None:
        """Announce a change; the process receives it later, or never."""
        dice = self._world.weather.dice
        self._is_broken = self._is_broken or dice.random() < BREAKS
        if self._is_broken:
            return
        after = dice.uniform(*(SLOW if dice.random() < LATE else LATENCY))
        self._quiet_at = max(self._quiet_at, self._world.time() + after)
        with self._world.loop.acting(self._process.number):
            self._world.loop.call_later(after, self._tell, kind, id_, generation)
            if dice.random() < TWICE:
                self._world.loop.call_later(after + 1, self._tell, kind, id_, generation)

    async def beat(self) -> None:
        world = self._world
        await asyncio.sleep(world.weather.dice.uniform(*LATENCY))
        is_silent = world.is_over or world.weather.is_now(Blow.AWAY) or self._is_broken
        behind = max(self._quiet_at - world.time(), 0.0)
        if is_silent or behind > PATIENCE:
            await asyncio.sleep(PATIENCE)
            raise StoreError("the store has told nothing for too long")
        await asyncio.sleep(behind + world.weather.dice.uniform(*LATENCY))
