"""T6: the same scenarios against stillfresh and its peers; what happens, not how fast.

`python -m benchmarks.behaviours NAME FOLDER REDIS LEASE SECONDS` is one of several processes that
share a folder or a server. For each round it reads its number and says `ready`, reads `ask`, asks
for the value (a load takes so many seconds and says `loading`) and says `got`.
"""

import asyncio
import importlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.harness import Progress, Section
from benchmarks.redis_store import server
from benchmarks.subjects import LEASE_FOR, OURS, Place, Shared, Subject, Tasks, Threads

__all__ = ["SCENARIOS", "compared", "section"]

ROOT = Path(__file__).parent.parent
NOT_APPLICABLE = "—"
TASKS = THREADS = 16
PROCESSES = 4
ROUNDS = 3
"""Of what depends on who comes first."""
PATIENCE = 5.0
"""Seconds that a scenario may take to come to its end."""
INHERITING = 8.0
"""The same for who comes after a dead holder: locks and leases last as long as by default."""
STARTING = 60.0
"""The same for a process to have imported everything."""
GATHERING = 0.3
"""Seconds for threads to come to where they wait: nobody can see that from outside."""

Scenario: TypeAlias = Callable[[Subject], str]


class Upstream:
    """Loads that begin at once and end when `go` is set; a value is the number of its load."""

    def __init__(self) -> None:
        self.loads = 0
        self.began = asyncio.Event()
        self.go = asyncio.Event()

    async def load(self) -> int:
        self.loads += 1
        number = self.loads
        self.began.set()
        await self.go.wait()
        return number


class BlockingUpstream:
    """The same for threads."""

    def __init__(self) -> None:
        self.loads = 0
        self.began = threading.Event()
        self.go = threading.Event()
        self._lock = threading.Lock()

    def load(self) -> int:
        with self._lock:
            self.loads += 1
            number = self.loads
        self.began.set()
        self.go.wait(PATIENCE)
        return number


async def settled() -> None:
    """Everybody who can take a step without an event from outside has taken it."""
    for _ in range(50):
        await asyncio.sleep(0)


def counted(number: int) -> str:
    return "1" if number == 1 else f"**{number}**"


async def cancelled_waiter(tasks: Tasks) -> str:
    """Four share a load and the first is cancelled: do the others get the value, from one load?"""
    upstream = Upstream()
    async with tasks(upstream.load) as way:
        first, *others = [asyncio.ensure_future(way.get()) for _ in range(4)]
        await upstream.began.wait()
        await settled()
        first.cancel()
        await settled()
        upstream.go.set()
        await asyncio.wait([first, *others], timeout=PATIENCE)
        results = await asyncio.gather(*others, return_exceptions=True)
    served = sum(isinstance(result, int) for result in results)
    if served < len(others):
        return f"**no**: {served} of {len(others)}"
    return "yes" if upstream.loads == 1 else f"**{upstream.loads} loads**"


async def fill_after_invalidate(tasks: Tasks) -> str:
    """Invalidated during its load: is the next reader given a newer value?"""
    upstream = Upstream()
    async with tasks(upstream.load) as way:
        if way.drop is None:
            return NOT_APPLICABLE
        early = asyncio.ensure_future(way.get())
        await upstream.began.wait()
        await way.drop()
        upstream.go.set()
        await asyncio.wait([early], timeout=PATIENCE)
        again = await asyncio.wait_for(way.get(), PATIENCE)
        await way.drop()
        checked(again, await asyncio.wait_for(way.get(), PATIENCE))
    return "yes" if again > 1 else "**no**"


def checked(before: int, after: int) -> None:
    """Dropped while nobody loads: if not even that works, it is we who use the library wrongly."""
    if after <= before:
        raise AssertionError("what was dropped is served again")


def fill_after_invalidate_by_threads(threads: Threads) -> str:
    upstream = BlockingUpstream()
    with threads(upstream.load) as way, ThreadPoolExecutor() as pool:
        if way.drop is None:
            return NOT_APPLICABLE
        early = pool.submit(way.get)
        upstream.began.wait(PATIENCE)
        way.drop()
        upstream.go.set()
        early.result(PATIENCE)
        again = way.get()
        way.drop()
        checked(again, way.get())
    return "yes" if again > 1 else "**no**"


async def stampede_of_tasks(tasks: Tasks) -> str:
    """Sixteen tasks, one cold key: how many loads?"""
    upstream = Upstream()
    async with tasks(upstream.load) as way:
        asking = [asyncio.ensure_future(way.get()) for _ in range(TASKS)]
        await upstream.began.wait()
        await settled()
        upstream.go.set()
        await asyncio.wait(asking, timeout=PATIENCE)
    return counted(upstream.loads)


def stampede_of_threads(threads: Threads) -> str:
    """Sixteen threads, one cold key: how many loads?"""
    return counted(max(loads_by_threads(threads) for _ in range(ROUNDS)))


def loads_by_threads(threads: Threads) -> int:
    upstream = BlockingUpstream()
    start = threading.Barrier(THREADS)
    with threads(upstream.load) as way, ThreadPoolExecutor(THREADS) as pool:

        def ask() -> int:
            start.wait(PATIENCE)
            return way.get()

        asking = [pool.submit(ask) for _ in range(THREADS)]
        upstream.began.wait(PATIENCE)
        time.sleep(GATHERING)
        upstream.go.set()
        for one in asking:
            one.result(PATIENCE)
    return upstream.loads


class Worker:
    """One of the processes that share a place."""

    def __init__(self, name: str, place: Place, seconds: float) -> None:
        about = [name, str(place.folder), place.redis, str(place.lease_for), str(seconds)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.behaviours", *about],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.said: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._changed:
                self.said.append(line.strip())
                self._changed.notify_all()

    def tell(self, line: str) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(f"{line}\n")

    def waits_for(self, word: str, seconds: float) -> bool:
        """Did it say that, in time?"""
        with self._changed:
            return self._changed.wait_for(lambda: word in self.said, seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def place_for(subject: Subject) -> Iterator[Place]:
    """Empty, and gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port = stack.enter_context(server()) if subject.on_redis else None
        redis = "" if port is None else f"redis://127.0.0.1:{port}"
        yield Place(Path(folder), redis, LEASE_FOR)


@contextmanager
def workers(subject: Subject, seconds: list[float]) -> Iterator[list[Worker]]:
    """One for each; the number is how long its load takes."""
    with place_for(subject) as place, ExitStack() as stack:
        started = []
        for long in seconds:
            worker = Worker(subject.name, place, long)
            stack.callback(worker.kill)
            started.append(worker)
        yield started


def made_ready(workers: list[Worker], turn: int) -> None:
    for worker in workers:
        worker.tell(str(turn))
    for worker in workers:
        if not worker.waits_for(f"ready {turn}", STARTING):
            raise AssertionError("a process did not start")


def stampede_of_processes(subject: Subject) -> str:
    """Four processes, one cold key, a load of half a second: how many loads?"""
    worst = 0
    with workers(subject, [0.5] * PROCESSES) as started:
        for turn in range(ROUNDS):
            loads = loads_by_processes(started, turn)
            if loads is None:
                return "**unanswered**"
            worst = max(worst, loads)
    return counted(worst)


def loads_by_processes(workers: list[Worker], turn: int) -> int | None:
    """None: somebody was not answered in time."""
    made_ready(workers, turn)
    for worker in workers:
        worker.tell("ask")
    answered = [worker.waits_for(f"got {turn}", 2 * PATIENCE) for worker in workers]
    for worker in workers:
        worker.tell("close")
    return sum(f"loading {turn}" in it.said for it in workers) if all(answered) else None


def dead_holder(subject: Subject) -> str:
    """A process is killed in the middle of its load: does the next one get a value in time?"""
    with workers(subject, [60.0, 0.0]) as started:
        holder, heir = started
        made_ready(started, 0)
        holder.tell("ask")
        if not holder.waits_for("loading 0", PATIENCE):
            raise AssertionError("the holder did not load")
        holder.kill()
        began = time.monotonic()
        heir.tell("ask")
        served = heir.waits_for("got 0", INHERITING)
        return f"yes, in {time.monotonic() - began:.1f} s" if served else "**no**"


def worker(shared: Shared, place: Place, seconds: float) -> None:
    """A place of its own for each round; nothing is closed while others still ask."""

    def say(word: str) -> None:
        print(word, flush=True)

    for turn in map(str.strip, sys.stdin):

        def load(turn: str = turn) -> int:
            say(f"loading {turn}")
            time.sleep(seconds)
            return 1

        with shared(load, place.of(turn)) as way:
            say(f"ready {turn}")
            sys.stdin.readline()
            way.get()
            say(f"got {turn}")
            sys.stdin.readline()


def of_tasks(scenario: Callable[[Tasks], Coroutine[Any, Any, str]]) -> Scenario:
    async def bounded(tasks: Tasks) -> str:
        return await asyncio.wait_for(scenario(tasks), 4 * PATIENCE)

    return lambda subject: (
        NOT_APPLICABLE if subject.tasks is None else asyncio.run(bounded(subject.tasks))
    )


def of_threads(scenario: Callable[[Threads], str]) -> Scenario:
    return lambda subject: NOT_APPLICABLE if subject.threads is None else scenario(subject.threads)


def of_processes(scenario: Callable[[Subject], str]) -> Scenario:
    return lambda subject: NOT_APPLICABLE if subject.shared is None else scenario(subject)


def filled(subject: Subject) -> str:
    """By tasks where the library has them, else by threads."""
    by_tasks = of_tasks(fill_after_invalidate)
    return (by_tasks if subject.tasks else of_threads(fill_after_invalidate_by_threads))(subject)


SCENARIOS: dict[str, Scenario] = {
    "a waiter is cancelled, the others are served by one load": of_tasks(cancelled_waiter),
    "invalidated while loading, the next reader gets a newer value": filled,
    "16 tasks, one cold key: loads": of_tasks(stampede_of_tasks),
    "16 threads: loads": of_threads(stampede_of_threads),
    "4 processes: loads": of_processes(stampede_of_processes),
    "a process dies while loading, the next is served in 8 s": of_processes(dead_holder),
}


def compared(subjects: list[Subject], progress: Progress) -> list[list[str]]:
    """A line for each, under a head: what happened in each scenario."""
    lines = [["library", *SCENARIOS]]
    for subject in subjects:
        cells = []
        for name, scenario in SCENARIOS.items():
            progress(f"{subject.name.replace('*', '')}: {name}")
            cells.append(examined(scenario, subject))
        lines.append([subject.name, *cells])
    return lines


def examined(scenario: Scenario, subject: Subject) -> str:
    """One that cannot be carried out is no reason to go without the rest."""
    try:
        return scenario(subject)
    except TimeoutError:
        return "**hangs**"
    except AssertionError as exc:
        return f"not examined: {exc}"


def peers() -> tuple[list[Subject], str]:
    """Those that are installed with the benchmarks; else why there are none."""
    try:
        return importlib.import_module("benchmarks.peers").PEERS, ""
    except ModuleNotFoundError as exc:
        return [], f"Without the peers: {exc.name} is not installed (`make bench` installs it). "


def section(progress: Progress) -> Section:
    """The table of T6."""
    others, why = peers()
    subjects = [*OURS, *others]
    used = "\n".join(f"- {subject.name}: {subject.used}" for subject in subjects)
    return Section(
        "Behaviours (T6)",
        words=compared(subjects, progress),
        notes=(
            f"{why}{NOT_APPLICABLE}: the library has no call for it. Rows whose names end in "
            "Redis show only what processes share. Threads and processes: the worst of "
            f"{ROUNDS} rounds. Processes are real ones, and are killed with `SIGKILL`. "
            f"Each library was used as its documentation says:\n\n{used}"
        ),
    )


def main(name: str, folder: str, redis: str, lease_for: str, seconds: str) -> None:
    """Peers are imported only by who needs them: a process of ours starts in less."""
    found = next((subject for subject in OURS if subject.name == name), None)
    found = found or next(subject for subject in peers()[0] if subject.name == name)
    if found.shared is not None:
        worker(found.shared, Place(Path(folder), redis, float(lease_for)), float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
