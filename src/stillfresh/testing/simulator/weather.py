"""What the store and the way to it are like now: slow, full, away; which request fails (T1)."""

from typing import Final

from stillfresh.testing.simulator.faults import Blow, Plan, Strike, Trouble
from stillfresh.testing.simulator.loop import VirtualLoop

SLOWNESS: Final = 2.0
"""Seconds that a slow store adds, at most, each way."""


class Weather:
    """As planned; `dice` is the network's."""

    def __init__(self, plan: Plan, loop: VirtualLoop) -> None:
        self.dice = plan.dice("network")
        self.requests = 0
        self.faults = 0
        """That came to pass so far."""
        self._loop = loop
        self._troubles = dict(plan.troubles)
        self._until = {Blow.SLOW: 0.0, Blow.FULL: 0.0, Blow.AWAY: 0.0}

    def next_request(self) -> tuple[int, Trouble | None]:
        """Its number, and what happens to it."""
        number, self.requests = self.requests, self.requests + 1
        trouble = self._troubles.get(number)
        self.faults += trouble is not None
        return number, trouble

    def strikes(self, strike: Strike) -> bool:
        """False if the blow is a process's."""
        self.faults += 1
        if strike.blow in self._until:
            self._until[strike.blow] = self._loop.time() + strike.amount
        return strike.blow in self._until

    def slowness(self) -> float:
        return self.dice.uniform(0, SLOWNESS) if self._lasts(Blow.SLOW) else 0.0

    @property
    def is_full(self) -> bool:
        return self._lasts(Blow.FULL)

    @property
    def is_away(self) -> bool:
        return self._lasts(Blow.AWAY)

    def _lasts(self, blow: Blow) -> bool:
        return self._loop.time() < self._until[blow]
