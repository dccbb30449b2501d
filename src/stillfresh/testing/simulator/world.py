"""The world of a simulation: virtual time, processes that share a store, and what befalls them (T1)."""

import asyncio
import random
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from stillfresh.errors import ConfigError, shown
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing.simulator.faults import Blow, Plan, Strike, Trouble
from stillfresh.testing.simulator.ledger import Ledger
from stillfresh.testing.simulator.loop import WORLD, VirtualLoop
from stillfresh.testing.simulator.process import Process
from stillfresh.testing.simulator.promises import Broken, Promise
from stillfresh.testing.simulator.wire import finished

__all__ = ["App", "World"]

App: TypeAlias = Callable[[Process], Coroutine[Any, Any, object]]

EPOCH: Final = 1_700_000_000.0
MAX_TASKS: Final = 1_000
MAX_TRACE: Final = 5_000
SLOWNESS: Final = 2.0
"""Seconds that a slow store adds, at most, each way."""
LOOK_EVERY: Final = 64
"""Steps between two looks at what costs more than a comparison."""


class World:
    """What a scenario is given; `simulate` makes it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.dice = random.Random(f"scenario {plan.seed}")  # noqa: S311 (a seed, no secret)
        """For the scenario's own choices."""
        self.network_dice = random.Random(f"network {plan.seed}")  # noqa: S311
        order = random.Random(f"order {plan.seed}")  # noqa: S311
        self.loop = VirtualLoop(order if plan.shuffled else None)
        self.ledger = Ledger()
        self.trace: deque[str] = deque(maxlen=MAX_TRACE)
        self.processes: list[Process] = []
        """All that ever were, the killed as well."""
        self.requests = 0
        self.is_over = False
        self.max_copies = 10_000
        tokens = iter(range(1, 1 << 62))
        self.store = MemoryStore(clock=self.store_now, new_token=lambda: f"t{next(tokens)}")
        finished(self.store.open())
        self._asked_by: Process | None = None
        self._asks_callers = random.Random(f"clock {plan.seed}").random() < 0.5  # noqa: S311
        self._troubles = dict(plan.troubles)
        self._checks: list[tuple[str, Callable[[], str | None]]] = []
        self._jobs: dict[asyncio.Task[Any], Process] = {}
        self._apps: dict[Process, App] = {}
        self._changed = asyncio.Event()
        self._broken: Broken | None = None
        self._until = {Blow.SLOW: 0.0, Blow.FULL: 0.0, Blow.AWAY: 0.0}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    # For scenarios.

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self.loop.time()

    def steps(self, count: int) -> range:
        """`for step in world.steps(20)`: fewer when a failure is being made smaller."""
        return range(count if self.plan.steps is None else min(count, self.plan.steps))

    def process(self) -> Process:
        """One more."""
        number = len(self.processes) + 1
        process = Process(self, number, self.plan.skews[(number - 1) % len(self.plan.skews)])
        self.processes.append(process)
        return process

    def launch(self, app: App, count: int) -> list[Process]:
        """So many processes that run `app(process)`; one that is killed is started anew."""
        if not callable(app) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"launch: takes an app and a number, not {shown((app, count))}")
        most = count if self.plan.processes is None else min(count, self.plan.processes)
        return [self._start(app) for _ in range(most)]

    def _start(self, app: App) -> Process:
        process = self.process()
        self._apps[process] = app
        process.start(app(process))
        return process

    def change(self, kind: str, *ids: str) -> None:
        """Upstream has a newer version of these from now on."""
        self.ledger.change((kind, id_) for id_ in ids)

    def always(self, promise: str, check: Callable[[], str | None]) -> None:
        """Called after every step: None, or what is wrong."""
        self._checks.append((promise, check))

    def broken(self, promise: str, what: str) -> NoReturn:
        """Ends the simulation as failed, wherever it is noticed."""
        broken = Broken(promise, what)
        self.fail(broken)
        raise broken

    def note(self, process: Process | None, text: str) -> None:
        """One more line of the trace."""
        who = "world" if process is None else f"p{process.number}"
        self.trace.append(f"{self.time():9.3f} {who:>5}  {text}")

    async def joined(self, within: float = 600.0) -> None:
        """All that was started has ended, but for what was killed with its process."""
        try:
            async with asyncio.timeout(within):
                while self._busy():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Broken(
                Promise.ALIVE, f"after {within:g} s these wait still: {_named(self._busy())}"
            ) from None

    def _busy(self) -> list[asyncio.Task[Any]]:
        return [job for job, process in self._jobs.items() if process.is_alive]

    @cached_property
    def folder(self) -> Path:
        """For files that the processes share; gone after the simulation."""
        self._folder = tempfile.TemporaryDirectory(prefix="stillfresh-simulation-")
        return Path(self._folder.name)

    # For processes and their wires.

    def fail(self, broken: Broken) -> None:
        """The first promise that was broken; the simulation ends with this step."""
        self._broken = self._broken or broken

    def started(self, process: Process, job: "asyncio.Task[Any]") -> None:
        self._jobs[job] = process
        job.add_done_callback(self._ended)

    def _ended(self, job: "asyncio.Task[Any]") -> None:
        process = self._jobs.pop(job)
        self._changed.set()
        if job.cancelled() or (error := job.exception()) is None:
            return
        if not isinstance(error, Broken):
            broken = Broken(Promise.WHOLE, f"process {process.number} failed: {error!r}")
            broken.__cause__ = error
            error = broken
        self.fail(error)

    def next_request(self) -> tuple[int, Trouble | None]:
        number, self.requests = self.requests, self.requests + 1
        return number, self._troubles.get(number)

    @contextmanager
    def asked_by(self, process: Process) -> Iterator[None]:
        self._asked_by = process
        try:
            yield
        finally:
            self._asked_by = None

    def store_now(self) -> float:
        """S2: a server has a clock of its own; a file is judged by the clock of who asks."""
        if self._asks_callers and self._asked_by is not None:
            return self._asked_by.clock()
        return EPOCH + self.time()

    def wall(self) -> float:
        return EPOCH + self.time()

    def slowness(self) -> float:
        return self.network_dice.uniform(0, SLOWNESS) if self._lasts(Blow.SLOW) else 0.0

    @property
    def is_full(self) -> bool:
        return self._lasts(Blow.FULL)

    @property
    def is_away(self) -> bool:
        return self._lasts(Blow.AWAY)

    def _lasts(self, blow: Blow) -> bool:
        return self.time() < self._until[blow]

    # For `simulate`.

    def run(self, scenario: Callable[["World"], Awaitable[object]]) -> None:
        """Raises what was broken."""
        for strike in self.plan.strikes:
            self.loop.call_at(strike.at, self._strike, strike)
        self.loop.run(self._play(scenario), self._after_step)

    async def _play(self, scenario: Callable[["World"], Awaitable[object]]) -> None:
        await scenario(self)
        await self.joined()
        living = [process for process in self.processes if process.is_alive]
        for process in living:
            process.start(process.close())
        await self.joined()
        if left := self._tasks_of({process.number for process in living}):
            raise Broken(Promise.BOUND, f"left behind by close: {_named(left)}")

    def _tasks_of(self, owners: set[int]) -> list[asyncio.Task[Any]]:
        running = ((task, owner) for task, (_, owner) in self.loop.tasks.items() if not task.done())
        return [task for task, owner in running if owner in owners]

    def end(self) -> None:
        """Nothing is left: no task, no file."""
        self.is_over = True
        self.loop.end()
        for process in self.processes:
            process.end()
        if self._folder is not None:
            self._folder.cleanup()

    def _after_step(self) -> None:
        if self._broken is not None:
            raise self._broken
        for promise, check in self._checks:
            if (what := check()) is not None:
                raise Broken(promise, what)
        for owner, error in self.loop.errors:
            if owner == WORLD or self.processes[owner - 1].is_alive:
                raise Broken(Promise.WHOLE, error)
        if self.loop.steps % LOOK_EVERY == 0:
            self._look()

    def _look(self) -> None:
        if len(self.loop.tasks) > MAX_TASKS:
            raise Broken(Promise.BOUND, f"{len(self.loop.tasks)} tasks are running")
        if (copies := finished(self.store.stats()).copies) > self.max_copies:
            raise Broken(Promise.BOUND, f"the store holds {copies} copies")

    def _strike(self, strike: Strike) -> None:
        living = [process for process in self.processes if process.is_alive]
        if strike.blow in self._until:
            self._until[strike.blow] = self.time() + strike.amount
            self.note(None, f"{strike.blow} for {strike.amount:g} s")
        elif living:
            self._strike_process(living[strike.process % len(living)], strike)

    def _strike_process(self, process: Process, strike: Strike) -> None:
        match strike.blow:
            case Blow.KILL:
                process.kill()
            case Blow.PAUSE:
                process.pause(strike.amount)
            case _:
                process.jump(strike.amount)

    def killed(self, process: Process) -> None:
        """Somebody starts it anew, a while later."""
        self._changed.set()
        if (app := self._apps.pop(process, None)) is not None:
            self._keeper.start(self._restart(app))

    @cached_property
    def _keeper(self) -> Process:
        return Process(self, WORLD, 0.0)

    async def _restart(self, app: App) -> None:
        await asyncio.sleep(self.network_dice.uniform(0.5, 5.0))
        self._start(app)


def _named(tasks: Iterable["asyncio.Task[Any]"]) -> str:
    return "; ".join(f"{task.get_name()} in {_place(task)}" for task in tasks)


def _place(task: "asyncio.Task[Any]") -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return "nothing"
    return f"{frames[-1].f_code.co_name}, line {frames[-1].f_lineno}"
