"""Real processes under load on one store, while faults come one after another: `make torture` (T4).

Each process tells one log what it leased, published, invalidated and was served; at the end the
log is held against what must never happen. The seed chooses the faults.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stillfresh import StoreError
from stillfresh.stores.contract import Record, Store
from stillfresh.stores.urls import store_for
from tests.proof.history import CHECKS, History, violations
from tests.proof.torture_crowd import PATIENCE, Crowd, faults_of
from tests.proof.torture_stages import STAGES, NotHere, Stage
from tests.proof.torture_worker import FRESH_FOR, KIND
from tests.proof.witness import Event, Log, MovedClock, events_of

__all__ = ["Report", "Run"]


@dataclass
class Report:
    """What a run has shown."""

    store: str
    seed: int
    workers: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    broken: dict[str, list[str]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    @property
    def sentences(self) -> list[str]:
        """Whatever was not as promised; empty after a good run."""
        return [each for found in self.broken.values() for each in found] + self.complaints


class Reader:
    """What has come to the log since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[Event] = []

    def look(self) -> list[Event]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        fresh = events_of(whole)
        self.events += fresh
        return fresh


def await_work(reader: Reader, pids: set[int], since: float) -> bool:
    """Everybody is served by the store again, and something was published."""
    published, served = False, set[int]()
    while time.monotonic() < since + PATIENCE:
        for event in reader.look():
            published |= event.what == "published" and event.at > since
            if event.what == "served" and event.at > since and not event.blind:
                served.add(event.pid)
        if published and served >= pids:
            return True
        time.sleep(0.02)
    return False


async def found(stage: Stage, clock: MovedClock) -> list[Event]:
    """What the store has of each key, seen from outside."""
    store = store_for(stage.url, clock)
    await store.open()
    try:
        at, records = await patiently_read(store, stage.keys)
    finally:
        await store.close()
    copies = {key: record.copy for key, record in records.items()}
    tokens = {key: copy.generation if (copy := copies.get(key)) else "" for key in stage.keys}
    return [Event("found", at, key=key, lease=token) for key, token in tokens.items()]


async def patiently_read(store: Store, keys: Sequence[str]) -> tuple[float, dict[str, Record]]:
    """On a busy machine a store may take longer to answer than it should."""
    deadline = time.monotonic() + PATIENCE
    while True:
        at = time.monotonic()
        try:
            return at, await store.read(KIND, keys)
        except StoreError:
            if at > deadline:
                raise
            await asyncio.sleep(0.1)


class Run:
    """One store, one seed."""

    def __init__(self, name: str, stage: Stage, folder: Path, seed: int, workers: int) -> None:
        self.report = Report(name, seed, workers)
        self._stage = stage
        self._dice = random.Random(seed)
        self._crowd = Crowd(stage, folder, seed)
        self._log = Log(self._crowd.log)
        self._reader = Reader(self._crowd.log)
        self._faults = faults_of(stage, self._crowd, workers, self._log)

    def deck(self) -> list[str]:
        """Every fault once, in the order of the seed."""
        return self._dice.sample(list(self._faults), len(self._faults))

    def decks(self, until: float) -> Iterator[str]:
        """Each kind of fault before any comes again, while there is time."""
        while True:
            for name in self.deck():
                if time.monotonic() >= until:
                    return
                yield name

    def go(self, faults: Iterable[str]) -> Report:
        began = time.monotonic()
        try:
            self._crowd.start(self.report.workers)
            self._settle("the start", began)
            for name in faults:
                self._suffer(name)
            self.report.complaints = self._crowd.finish()
            self._look_into_the_store()
            self.report.seconds = time.monotonic() - began
            self._judge()
        finally:
            self._crowd.end()
            self._log.close()
        return self.report

    def _suffer(self, name: str) -> None:
        time.sleep(self._dice.uniform(0.2, 1.0))
        with self._faults[name](self._dice):
            pass
        since = time.monotonic()
        self.report.faults[name] += 1
        self._settle(name, since)
        self.report.recoveries.append(time.monotonic() - since)

    def _settle(self, name: str, since: float) -> None:
        if not await_work(self._reader, self._crowd.pids, since):
            self._log.tell(Event("stuck", since, text=name))
        self._look_into_the_store()

    def _look_into_the_store(self) -> None:
        clock = MovedClock(self._crowd.clock)
        self._log.tell(*asyncio.run(found(self._stage, clock)))

    def _judge(self) -> None:
        self._reader.look()
        events = self._reader.events
        self.report.counts = Counter(event.what for event in events)
        self.report.counts["blind"] = sum(event.blind for event in events)
        self.report.broken = violations(History(events, FRESH_FOR, self._stage.memory_for))


def watched(names: Iterator[str], progress: Progress, store: str, seconds: float) -> Iterator[str]:
    """The same, with a bar that moves with the time."""
    task, began = progress.add_task(store, total=seconds), time.monotonic()
    for name in names:
        progress.update(task, completed=time.monotonic() - began, description=f"{store}: {name}")
        yield name
    progress.update(task, completed=seconds, description=store)


def tortured(name: str, seed: int, minutes: float, workers: int, progress: Progress) -> Report:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torture-")))
        stage = stack.enter_context(STAGES[name](folder))
        run = Run(name, stage, folder, seed, workers)
        names = run.decks(time.monotonic() + minutes * 60)
        return run.go(watched(names, progress, name, minutes * 60))


def tables(reports: list[Report]) -> Iterator[Table]:
    """Load held, faults survived, nothing lost."""
    yield table("load held", reports, load_held)
    names = dict.fromkeys(name for report in reports for name in report.faults)
    yield table(
        "faults survived", reports, lambda it: {name: str(it.faults[name]) for name in names}
    )
    yield table(
        "violations",
        reports,
        lambda it: {promise: str(len(it.broken[promise])) for promise in CHECKS},
    )


def table(title: str, reports: list[Report], rows: Callable[[Report], dict[str, str]]) -> Table:
    """A column for each store."""
    shown = Table("", *(f"{report.store}" for report in reports), title=title, title_justify="left")
    columns = [rows(report) for report in reports]
    for row in columns[0]:
        shown.add_row(row, *(column[row] for column in columns))
    return shown


def load_held(report: Report) -> dict[str, str]:
    counts, seconds = report.counts, report.seconds
    return {
        "seed": str(report.seed),
        "seconds": f"{seconds:.0f}",
        "processes at a time": str(report.workers),
        "reads": f"{counts['served']:,} ({counts['served'] / seconds:,.0f}/s)",
        "of these without the store": f"{counts['blind']:,}",
        "loads": f"{counts['load']:,}",
        "published": f"{counts['published']:,}",
        "invalidated": f"{counts['invalidated']:,}",
        "invalidations refused": f"{counts['refused']:,}",
        "faults": str(sum(report.faults.values())),
        "longest until all worked again": f"{max(report.recoveries, default=0):.1f} s",
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("stores", nargs="*", default=list(STAGES), help=", ".join(STAGES))
    options.add_argument("--minutes", type=float, default=2.0, help="for each store")
    options.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    options.add_argument("--workers", type=int, default=4)
    given = options.parse_args()
    errors, reports = Console(stderr=True), []
    errors.print(f"seed {given.seed}")
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors) as progress:
        for name in given.stores:
            try:
                reports.append(tortured(name, given.seed, given.minutes, given.workers, progress))
            except NotHere as exc:
                errors.print(f"{name}: not run: {exc}")
    return told(reports)


def told(reports: list[Report]) -> int:
    """The tables, and each violation in a sentence; the exit code."""
    console = Console()
    for each in tables(reports) if reports else ():
        console.print(each)
    sentences = [f"{it.store}: {each}" for it in reports for each in it.sentences]
    for sentence in sentences[:50]:
        console.print(sentence)
    return 1 if sentences or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
