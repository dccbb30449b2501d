"""The world of a simulation: virtual time, processes that share a store, and their faults.

The world owns the loop, and the loop drives everything. `run` schedules the planned blows and
starts the scenario as a task of the loop. After every callback, `_after_step` checks the promises:
those that the scenario added, errors that no code handled, and now and then how much there is of
everything. Code below the loop cannot raise a broken promise itself, because the code under test
might catch it. So it calls `fail`, which notes the first one, and `_after_step` raises it.

Three clocks are in use. `time()` is the loop's, in seconds since the start. `wall()` is a wall
clock that is right. `store_now()` is the clock that the store reads in a step: the server's own,
or, as for a file, that of the process whose request it is doing (`asked_by`).

When the scenario has ended, the world closes the processes that live, and looks for tasks that they
left behind. A process that was killed is started again with the same app, some time later.
"""

import asyncio
import gc
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from stillfresh.checks import checked_function, checked_whole
from stillfresh.stores import MemoryStore
from stillfresh.testing.simulator.channel import SimulatedChannel
from stillfresh.testing.simulator.faults import NODES, Blow, Plan, Strike, Weather
from stillfresh.testing.simulator.ledger import Ledger
from stillfresh.testing.simulator.nodes import LONGEST_LAG, Node, first_node
from stillfresh.testing.simulator.process import Process
from stillfresh.testing.simulator.promises import BrokenPromise, Promise
from stillfresh.testing.simulator.record import UPSTREAM, WORLD_LANE, RunRecorder
from stillfresh.testing.simulator.server import FencedServer, finished
from stillfresh.testing.simulator.wire import VERY_LATE
from stillfresh.virtual_loop import WORLD, VirtualLoop

App: TypeAlias = Callable[[Process], Coroutine[Any, Any, object]]

EPOCH: Final = 1_700_000_000.0
MAX_TASKS: Final = 1_000
MAX_COPIES: Final = 10_000
MAX_TRACE: Final = 5_000
LONGEST_RUN: Final = 30 * 86_400.0
"""Virtual seconds. Open caches evict now and then, so a run that waits for nothing would go on."""
LOOK_EVERY: Final = 64
"""Steps between two of the more expensive checks."""
MOVING: Final = (0.0, 0.2)
"""Seconds in which a slot that moves is on both nodes."""
RESTART: Final = (0.5, 5.0)
"""Seconds until a process that was killed runs again."""


class World:
    """What a scenario receives from `simulate`: processes, an upstream, a clock."""

    def __init__(
        self,
        plan: Plan,
        recorder: RunRecorder | None = None,
        store_class: type[MemoryStore] = MemoryStore,
    ) -> None:
        """With a `recorder`, a broken promise is noted, and the run goes on to its end."""
        self.plan = plan
        self.recorder = recorder
        if recorder is not None:
            recorder.time = self.time
        self.dice = plan.dice("scenario")
        """For the scenario's own choices."""
        order = plan.dice("order") if plan.shuffled else None
        self.loop = VirtualLoop(order)
        self.weather = Weather(plan, self.time)
        self.ledger = Ledger(self.fail, recorder)
        self.trace: deque[str] = deque(maxlen=MAX_TRACE)
        self.processes: list[Process] = []
        """All processes, including killed ones."""
        self.is_over = False
        tokens = iter(range(1, 1 << 62))
        self.store = store_class(clock=self.store_now, new_token=lambda: f"t{next(tokens)}")
        finished(self.store.open())
        self.server = FencedServer(self.store, self.server_now)
        """The steps of the store that know late messages."""
        self.server_skew = 0.0
        self.latency: tuple[float, float] | None = None
        """Seconds that a message takes, between these two; None: as usual."""
        self.longest_delay = VERY_LATE
        """Seconds by which a message may be late, at most."""
        self._starts = 0
        self.channels: set[SimulatedChannel] = set()
        """Channels to the listening processes."""
        self.longest_lag = LONGEST_LAG
        self.nodes = [Node() for _ in range(NODES)]
        """The nodes of the store, if it is a cluster."""
        self._moved: dict[str, int] = {}
        self._settles_at: dict[str, float] = {}
        """When the slot of an id has arrived with all its keys."""
        self.asked_by: Process | None = None
        """The process whose request the store is doing."""
        self._asks_callers = plan.dice("clock").random() < 0.5
        self._checks: list[tuple[str, Callable[[], str | None]]] = []
        self._jobs: dict[asyncio.Task[Any], Process | None] = {}
        self._apps: dict[Process, App] = {}
        self._changed = asyncio.Event()
        self._broken: BrokenPromise | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def time(self) -> float:
        """Return the seconds since the simulation began."""
        return self.loop.time()

    @property
    def first_broken(self) -> BrokenPromise | None:
        """The first promise that was broken."""
        return self._broken

    def wall(self) -> float:
        """Return the time of a wall clock that is right."""
        return EPOCH + self.time()

    def steps(self, count: int) -> range:
        """Iterate this many times; fewer while a failing run is made smaller."""
        return range(count if self.plan.steps is None else min(count, self.plan.steps))

    def process(self) -> Process:
        """Return a new process."""
        number = len(self.processes) + 1
        process = Process(self, number, self.plan.skews[(number - 1) % len(self.plan.skews)])
        self.processes.append(process)
        return process

    def launch(self, app: App, count: int) -> list[Process]:
        """Start so many processes that run `app(process)`. One that is killed is started again."""
        checked_function("app", app)
        checked_whole("count", count)
        most = count if self.plan.processes is None else min(count, self.plan.processes)
        return [self._launch(app) for _ in range(most)]

    def _launch(self, app: App) -> Process:
        process = self.process()
        self._apps[process] = app
        process.start(app(process))
        return process

    def change(self, kind: str, *ids: str) -> dict[str, int]:
        """Change these ids upstream; return the new versions."""
        versions = {id_: self.ledger.change((kind, id_)) for id_ in ids}
        if self.recorder is not None:
            for id_, version in versions.items():
                text = f"{kind} {id_} changes upstream to version {version}"
                self.recorder.happened(UPSTREAM, "change", text)
        return versions

    def always(self, promise: str, check: Callable[[], str | None]) -> None:
        """Add a promise: `check` is called after every step, and returns what is wrong, or None."""
        self._checks.append((promise, checked_function("check", check)))

    def broken(self, promise: str, what: str) -> NoReturn:
        """End the simulation as failed."""
        broken = BrokenPromise(promise, what)
        self.fail(broken)
        raise broken

    def tell(self, kind: str, id_: str, generation: str | None) -> None:
        """The store has done this to an id."""
        for channel in sorted(self.channels, key=lambda channel: channel.number):
            channel.send(kind, id_, generation)

    def fail_over(self, node: int) -> None:
        """One node's replica takes over, without the changes that it does not have yet."""
        self.note(None, f"the replica of node {node} takes over")
        self.nodes[node].fail(self.time())
        for channel in self.channels:
            channel.cut()

    def node_of(self, id_: str) -> int:
        """The node that has the id's slot now."""
        return self._moved.get(id_, first_node(id_))

    def move(self, id_: str, node: int) -> None:
        """An id's slot moves to another node, whose replica has it, too, from then on."""
        for number in (self.node_of(id_), node):
            self.nodes[number].steps.clear()
        self._moved[id_] = node
        self._settles_at[id_] = self.time() + self.dice.uniform(*MOVING)
        self.note(None, f"{id_} moves to node {node}")
        for channel in self.channels:
            channel.cut()

    def is_moving(self, id_: str) -> bool:
        """True if some keys of the id's slot have not arrived at its node yet."""
        return self.time() < self._settles_at.get(id_, 0.0)

    def note(self, process: Process | None, text: str) -> None:
        """Add a line to the trace."""
        who = "world" if process is None else f"p{process.number}"
        self.trace.append(f"{self.time():9.3f} {who:>5}  {text}")

    async def joined(self, within: float = 600.0) -> None:
        """Wait until everything that was started has ended."""
        try:
            async with asyncio.timeout(within):
                while self._busy():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            waiting = _task_names(self._busy())
            raise BrokenPromise(
                Promise.ALIVE, f"after {within:g} s these wait still: {waiting}"
            ) from None

    def _busy(self) -> list[asyncio.Task[Any]]:
        return [job for job, owner in self._jobs.items() if owner is None or owner.is_alive]

    @cached_property
    def folder(self) -> Path:
        """A folder for files that the processes share, deleted at the end."""
        self._folder = tempfile.TemporaryDirectory(prefix="stillfresh-simulation-")
        return Path(self._folder.name)

    def fail(self, broken: BrokenPromise) -> None:
        """Note a broken promise; the simulation ends after this step, with the first one.

        With a recorder it goes on, to show what follows.
        """
        if self.recorder is not None:
            text = f"a promise is broken: {broken.promise}: {broken.what}"
            self.recorder.happened(WORLD_LANE, "broken", text, is_right=False)
        if self._broken is None:
            self._broken = broken

    def started(self, process: Process | None, job: "asyncio.Task[Any]") -> None:
        self._jobs[job] = process
        job.add_done_callback(self._ended)

    def _ended(self, job: "asyncio.Task[Any]") -> None:
        process = self._jobs.pop(job)
        self._changed.set()
        if job.cancelled():
            return
        error = job.exception()
        if error is None:
            return
        if not isinstance(error, BrokenPromise):
            who = "a restart" if process is None else f"process {process.number}"
            broken = BrokenPromise(Promise.WHOLE, f"{who} failed: {error!r}")
            broken.__cause__ = error
            error = broken
        self.fail(error)

    def killed(self, process: Process) -> None:
        """Start it again, some time later."""
        self._changed.set()
        app = self._apps.pop(process, None)
        if app is not None:
            with self.loop.acting(WORLD):
                self.started(None, self.loop.create_task(self._restart(app)))

    async def _restart(self, app: App) -> None:
        await asyncio.sleep(self.weather.dice.uniform(*RESTART))
        self._launch(app)

    def server_now(self) -> float:
        """Return the time of the server's clock."""
        return self.wall() + self.server_skew

    def store_now(self) -> float:
        """Return the time that the store reads: a server's own, or for a file the caller's."""
        if self._asks_callers and self.asked_by is not None:
            return self.asked_by.clock()
        return self.server_now()

    def set_server_clock(self, by: float) -> None:
        """Move the server's clock."""
        self.note(None, f"the server's clock is set by {by:+g} s")
        self.server_skew += by

    def lose_everything(self, *, restarts: bool) -> None:
        """The server loses its entries and its counters: it is flushed, or restarts empty."""
        self.note(None, "the server restarts empty" if restarts else "the server is flushed")
        self.server.lose_everything()
        self.ledger.lost()
        if restarts:
            self._starts += 1
            for channel in self.channels:
                channel.cut()

    def incarnation(self, node: int | None) -> int:
        """The number of the server's present life. Connections to an earlier life are broken."""
        return self._starts if node is None else self.nodes[node].failovers

    def run(self, scenario: Callable[["World"], Awaitable[object]]) -> None:
        """Run; raises the first broken promise."""
        for strike in self.plan.strikes:
            self.loop.call_at(strike.at, self._strike, strike)
        self.loop.run(self._play(scenario), self._after_step)

    async def _play(self, scenario: Callable[["World"], Awaitable[object]]) -> None:
        """Run the scenario and everything it started; check that closing leaves nothing behind."""
        await scenario(self)
        await self.joined()
        while True:  # while these close, a process that was killed may start again
            not_closed = [process for process in self._living() if not process.is_closed]
            if not not_closed:
                break
            for process in not_closed:
                process.start(process.close())
            await self.joined()
        living = {process.number for process in self._living()}
        left = [
            task
            for task, (_, owner) in self.loop.tasks.items()
            if not task.done() and owner in living
        ]
        if left:
            raise BrokenPromise(Promise.BOUND, f"left behind by close: {_task_names(left)}")

    def end(self) -> None:
        """Nothing is left: no task, no file."""
        self.is_over = True
        self.loop.end()
        for process in self.processes:
            process.end()
        # The caches of killed processes are never closed. Their entries lead back to this world, by
        # the clock, and the garbage collector does not look at entries. So nothing here may lead to
        # a cache: else this world would stay for ever.
        self._checks.clear()
        self._jobs.clear()
        self._apps.clear()
        self.channels.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _after_step(self) -> None:
        if self._broken is not None and self.recorder is None:
            raise self._broken
        for promise, check in self._checks:
            what = check()
            if what is not None:
                raise BrokenPromise(promise, what)
        if self.loop.errors:
            broken = self._unhandled_error()
            if broken is not None:
                raise broken
        if self.loop.steps % LOOK_EVERY == 0:
            self._check_bounds()
            self._check_end()

    def _check_end(self) -> None:
        if self.time() > LONGEST_RUN:
            raise BrokenPromise(
                Promise.ALIVE,
                f"the scenario has not ended after {LONGEST_RUN / 86_400:g} days: does it wait for "
                "something that cannot happen, such as the end of a task whose process was killed?",
            )

    def unheard(self) -> BrokenPromise | None:
        """The first error that no code handled, after garbage was collected; or None."""
        gc.collect()
        return self._unhandled_error()

    def _unhandled_error(self) -> BrokenPromise | None:
        """The first error that no code handled; those of killed processes do not count."""
        for owner, error in self.loop.errors:
            if owner == WORLD or self.processes[owner - 1].is_alive:
                return BrokenPromise(Promise.WHOLE, error)
        return None

    def _check_bounds(self) -> None:
        if len(self.loop.tasks) > MAX_TASKS:
            raise BrokenPromise(Promise.BOUND, f"{len(self.loop.tasks)} tasks are running")
        copies = finished(self.store.stats()).copies
        if copies > MAX_COPIES:
            raise BrokenPromise(Promise.BOUND, f"the store holds {copies} copies")

    def _living(self) -> list[Process]:
        return [process for process in self.processes if process.is_alive]

    def _strike(self, strike: Strike) -> None:
        if self.weather.strikes(strike):
            self.note(None, f"{strike.blow} for {strike.amount:g} s")
            if strike.blow is Blow.AWAY:
                self.fail_over(strike.process % NODES)
            return
        living = self._living()
        if not living:
            return
        process = living[strike.process % len(living)]
        match strike.blow:
            case Blow.KILL:
                process.kill()
            case Blow.PAUSE:
                process.pause(strike.amount)
            case _:
                process.jump(strike.amount)


def _task_names(tasks: Iterable["asyncio.Task[Any]"]) -> str:
    return "; ".join(f"{task.get_name()} in {_place(task)}" for task in tasks)


def _place(task: "asyncio.Task[Any]") -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return "nothing"
    [frame] = frames
    return f"{frame.f_code.co_name}, line {frame.f_lineno}"
