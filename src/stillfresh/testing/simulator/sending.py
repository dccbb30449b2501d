"""One request from a process to the store: on its way, in trouble, done, answered or not (T1).

What the store does is done by the real `MemoryStore`, in the name of nobody: a process that is
killed or paused does not take its requests back.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from stillfresh.errors import StoreError
from stillfresh.stores.contract import Held, Lease, Newer
from stillfresh.testing.simulator.faults import Blow, Plan, Strike, Trouble
from stillfresh.testing.simulator.ledger import BrokenPromise
from stillfresh.testing.simulator.loop import WORLD, VirtualLoop

if TYPE_CHECKING:
    from stillfresh.testing.simulator.process import Process
    from stillfresh.testing.simulator.world import World

T = TypeVar("T")

READS: Final = frozenset({"read", "stats", "entries"})
LATENCY: Final = (0.0005, 0.02)
SLOW: Final = (1.0, 8.0)
PATIENCE: Final = (0.05, 2.0)
"""Seconds until a sender without an answer gives up."""
SLOWNESS: Final = 2.0
"""Seconds that a slow store adds, at most, each way."""


class Weather:
    """What the store and the way to it are like now: slow, full, away; which request fails.

    As planned; `dice` is the network's.
    """

    def __init__(self, plan: Plan, loop: VirtualLoop) -> None:
        self.dice = plan.dice("network")
        self.requests = 0
        self.faults = 0
        """That came to pass so far."""
        self._loop = loop
        self._troubles = dict(plan.troubles)
        self._until = {Blow.SLOW: 0.0, Blow.FULL: 0.0, Blow.AWAY: 0.0}

    def next_request(self) -> tuple[int, Trouble | None]:
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


def finished(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that never waits, as those of the memory store."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("a step of the simulated store waits for something")


class NoAnswer(StoreError):
    """Whether the store did what it was asked is not known."""


@dataclass(slots=True)
class StoreRequest(Generic[T]):
    """One on its way: what it does for which ids, and who waits for the answer."""

    step: str
    kind: str
    ids: Sequence[str]
    effect: Callable[[Sequence[str]], T]
    tokens: Sequence[str] = ()
    is_sent_again: bool = False

    def __str__(self) -> str:
        return f"{self.step} {self.kind} {','.join(self.ids)}".rstrip()


class Sender:
    def __init__(self, world: "World", process: "Process") -> None:
        self._world = world
        self._process = process

    async def ask(self, request: StoreRequest[T]) -> T:
        """Send it and wait; StoreError if there is no answer."""
        try:
            try:
                return await self._ask(request)
            except NoAnswer:
                if not self._world.plan.resends:
                    raise
            request.is_sent_again = True
            return await self._ask(request)
        except (StoreError, asyncio.CancelledError):
            self.unanswered(request)
            raise

    async def _ask(self, request: StoreRequest[T]) -> T:
        world = self._world
        if world.is_over:
            raise StoreError("the simulation is over")
        answer: asyncio.Future[T] = world.loop.create_future()
        number, trouble = world.weather.next_request()
        if trouble is not None:
            world.note(self._process, f"request {number} ({request}) {trouble}")
        self._send(request, trouble, answer)
        return await answer

    def unanswered(self, it: StoreRequest[Any]) -> None:
        ledger, number = self._world.ledger, self._process.number
        match it.step:
            case "acquire":
                ledger.unleased(number, it.kind, it.ids)
            case "read":
                ledger.unread(number, it.kind, it.ids, self._world.time())
            case "publish":
                ledger.unstored(it.tokens)

    def _send(
        self, request: StoreRequest[Any], trouble: Trouble | None, answer: "asyncio.Future[Any]"
    ) -> None:
        weather = self._world.weather
        dice = weather.dice
        there = dice.uniform(*LATENCY) + weather.slowness()
        gives_up = dice.uniform(*PATIENCE)
        some = request.ids
        match trouble:
            case Trouble.LOST:
                self._give_up(answer, gives_up)
                return
            case Trouble.LATE:
                self._give_up(answer, gives_up)
                there = gives_up + dice.uniform(*SLOW)
            case Trouble.UNANSWERED:
                self._give_up(answer, max(gives_up, there))
            case Trouble.SLOW:
                there += dice.uniform(*SLOW)
            case Trouble.HALF:
                some = some[: len(some) // 2]
                self._give_up(answer, max(gives_up, there))
            case Trouble.TWICE:
                self._arrive(request, some, there + dice.uniform(*SLOW), None)
        is_answered = trouble in {None, Trouble.SLOW, Trouble.TWICE}
        self._arrive(request, some, there, answer if is_answered else None)

    def _arrive(
        self,
        request: StoreRequest[Any],
        some: Sequence[str],
        after: float,
        answer: "asyncio.Future[Any] | None",
    ) -> None:
        with self._world.loop.acting(WORLD):
            self._world.loop.call_later(after, self._take_effect, request, some, answer)

    def _take_effect(
        self, request: StoreRequest[Any], some: Sequence[str], answer: "asyncio.Future[Any] | None"
    ) -> None:
        world = self._world
        try:
            result = self._done(request, some)
        except StoreError as exc:
            if answer is not None:
                self._give_up(answer, world.weather.dice.uniform(*LATENCY), exc)
            return
        except BrokenPromise as exc:
            world.fail(exc)
            return
        if answer is not None:
            back = world.weather.dice.uniform(*LATENCY) + world.weather.slowness()
            with world.loop.acting(self._process.number):
                world.loop.call_later(back, _answered, answer, result)

    def _done(self, request: StoreRequest[T], some: Sequence[str]) -> T:
        world = self._world
        if world.weather.is_away:
            raise StoreError("the store is away")
        if world.weather.is_full and request.step not in READS:
            raise StoreError("the store is full")
        with world.asked_by(self._process):
            result = request.effect(some)
        if request.step != "read":
            world.note(self._process, f"{request}{_told(result)}")
        return result

    def _give_up(
        self, answer: "asyncio.Future[Any]", after: float, why: StoreError | None = None
    ) -> None:
        loop = self._world.loop
        with loop.acting(self._process.number):
            loop.call_later(after, _failed, answer, why or NoAnswer("no answer from the store"))


def _answered(answer: "asyncio.Future[Any]", result: object) -> None:
    if not answer.done():
        answer.set_result(result)


def _failed(answer: "asyncio.Future[Any]", why: StoreError) -> None:
    if not answer.done():
        answer.set_exception(why)


def _told(result: object) -> str:
    if isinstance(result, dict):
        return " → " + ", ".join(f"{id_} {_grant(it)}" for id_, it in result.items())
    if isinstance(result, set):
        return f" → not {','.join(sorted(result))}" if result else ""
    return ""


def _grant(grant: object) -> str:
    match grant:
        case Lease():
            return f"granted ({grant.token})"
        case Held():
            return "is held"
        case Newer():
            return "has a newer copy"
    return "?"
