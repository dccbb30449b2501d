"""One proof: processes under load, faults, and the judgement of the history.

The processes write all that they do and see to one log file. This process starts them, causes a
fault, and reads the log until every process is served again and something was published. Then it
looks into the store from outside, and causes the next fault. The history is judged once, after all
processes have ended.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stillfresh.errors import StoreError
from stillfresh.lab.prove.crowd import PATIENCE, Crowd, faults_of
from stillfresh.lab.prove.history import (
    CHECKS,
    PEER_CHECKS,
    ProofHistory,
    ages_at_serving,
    excused_reads,
    loads_together,
    outdated_looks,
    uncertain_reads,
    unjudged_reads,
    violations,
    wrong_reads,
)
from stillfresh.lab.prove.stage import Stage
from stillfresh.lab.prove.witness import Log, MovedClock, Seen, events_of
from stillfresh.lab.prove.worker import KIND
from stillfresh.stores import running, store_for
from stillfresh.stores.contract import Record, Store

MOST_UNJUDGED: Final = 0.01
"""The share of the reads that may be left without a judgement."""


@dataclass
class Report:
    """The result of a run."""

    store: str
    seed: int
    workers: int
    peer: str = ""
    fresh_for: float = 0.0
    stale_for: float = 0.0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    broken: dict[str, list[str]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    ages: dict[str, float] = field(default_factory=dict)
    """At serving, in seconds: `p50`, `p99`, `max`."""
    is_cut_short: bool = False

    wrong: int = 0
    """Reads that got a copy from before an acknowledged invalidation, as if it were right."""
    unjudged: Counter[str] = field(default_factory=Counter)
    """Reads that could not be judged, by the reason."""

    @property
    def reads(self) -> int:
        """All reads, answered or failed."""
        return self.counts["served"] + self.counts["failed"]

    @property
    def judged(self) -> int:
        """Reads that were judged against invalidations."""
        return self.reads - self.unjudged.total()

    @property
    def sentences(self) -> list[str]:
        """The broken promises, in sentences; empty after a good run."""
        broken = [sentence for sentences in self.broken.values() for sentence in sentences]
        return broken + self.too_many_unjudged + self.complaints

    @property
    def too_many_unjudged(self) -> list[str]:
        """A sentence if more reads than may be could not be judged: then nothing is proved."""
        count = self.unjudged.total()
        if count <= MOST_UNJUDGED * self.reads:
            return []
        reasons = "; ".join(f"{reason}: {times:,}" for reason, times in self.unjudged.most_common())
        share = f"{count / self.reads:.1%}"
        limit = f"{MOST_UNJUDGED:.0%}"
        return [f"{share} of the reads were not judged, and at most {limit} may be: {reasons}"]


class Reader:
    """Reads new lines of the log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[Seen] = []

    def look(self) -> list[Seen]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        new_events = events_of(whole)
        self.events += new_events
        return new_events


def await_work(reader: Reader, pids: set[int], since: float, over: threading.Event) -> bool:
    """Wait until the store serves all processes and something was published, or it is over."""
    is_published = False
    served: set[int] = set()
    while time.monotonic() < since + PATIENCE:
        for event in reader.look():
            if event.at <= since:
                continue
            if event.what == "published":
                is_published = True
            elif event.what == "served" and not event.blind:
                served.add(event.pid)
        if (is_published and served >= pids) or over.wait(0.02):
            return True
    return False


async def look_into_store(stage: Stage, clock: MovedClock) -> list[Seen]:
    """The copy of each key in the store, read from outside."""
    async with running(store_for(stage.url, clock)) as store:
        at, records = await patiently_read(store, stage.keys)
    events: list[Seen] = []
    for key in stage.keys:
        record = records.get(key)
        copy = None if record is None else record.copy
        token = "" if copy is None else copy.generation
        events.append(Seen("found", at, key=key, lease=token))
    return events


async def patiently_read(store: Store, keys: Sequence[str]) -> tuple[float, dict[str, Record]]:
    """Read the keys, and try again for a while: on a busy machine a store may be slow."""
    deadline = time.monotonic() + PATIENCE
    while True:
        at = time.monotonic()
        try:
            return at, await store.read(KIND, keys)
        except StoreError:
            if at > deadline:
                raise
            await asyncio.sleep(0.1)


class ProofRun:
    """One store, one seed."""

    def __init__(
        self,
        name: str,
        stage: Stage,
        folder: Path,
        seed: int,
        workers: int,
        *,
        over: threading.Event | None = None,
    ) -> None:
        """When `over` is set, the run ends, and the events so far are judged."""
        self._over = over or threading.Event()
        self.report = Report(name, seed, workers, stage.peer, stage.fresh_for, stage.stale_for)
        self._stage = stage
        self._dice = random.Random(seed)  # noqa: S311 (no secret)
        self._crowd = Crowd(stage, folder, seed)
        self._log = Log(self._crowd.log)
        self._reader = Reader(self._crowd.log)
        self._faults = faults_of(stage, self._crowd, workers, self._log)

    def deck(self) -> list[str]:
        """Every fault once, in the order of the seed."""
        return self._dice.sample(list(self._faults), len(self._faults))

    def decks(self, seconds: float) -> Iterator[str]:
        """Each kind of fault before any comes again, for so long from the first one on."""
        until = time.monotonic() + seconds
        while True:
            for name in self.deck():
                if time.monotonic() >= until or self._over.is_set():
                    return
                yield name

    def go(self, faults: Iterable[str]) -> Report:
        """Cause the faults one after another, and judge the events."""
        began = time.monotonic()
        try:
            self._crowd.start(self.report.workers)
            if self._settle("the start", began):
                for name in faults:
                    self._suffer(name)
            complaints = self._crowd.finish()
            self.report.complaints = [] if self._stage.peer else complaints
            self._look_into_the_store()
            self.report.seconds = time.monotonic() - began
            self.report.is_cut_short = self._over.is_set()
            self._reader.look()
            judge(self.report, self._reader.events, self._stage)
        finally:
            self._crowd.end()
            self._log.close()
        return self.report

    def _suffer(self, name: str) -> None:
        self._over.wait(self._dice.uniform(0.2, 1.0))
        with self._faults[name](self._dice):
            pass
        since = time.monotonic()
        self.report.faults[name] += 1
        self._settle(name, since)
        self.report.recoveries.append(time.monotonic() - since)

    def _settle(self, name: str, since: float) -> bool:
        """True if all work again."""
        is_well = await_work(self._reader, self._crowd.pids, since, self._over)
        if not is_well:
            self._log.tell(Seen("stuck", since, text=name))
        self._look_into_the_store()
        return is_well

    def _look_into_the_store(self) -> None:
        if self._stage.peer:
            return
        clock = MovedClock(self._crowd.clock)
        with suppress(StoreError):  # still unavailable: the promises are judged without it
            self._log.tell(*asyncio.run(look_into_store(self._stage, clock)))


def judge(report: Report, events: Sequence[Seen], stage: Stage) -> None:
    """Write into the report what the events say."""
    report.counts = counts = Counter(event.what for event in events)
    history = ProofHistory(events, stage.fresh_for, stage.memory_for, may_forget=stage.may_forget)
    counts["forgotten"] = sum(not event.lease for event in outdated_looks(history))
    counts["blind"] = counts["served"] - len(history.sighted())
    counts["excused"] = sum(1 for _ in excused_reads(history))
    counts["uncertain"] = sum(1 for _ in uncertain_reads(history))
    counts["together"] = loads_together(history)
    report.wrong = wrong_reads(history)
    report.unjudged = unjudged_reads(history)
    report.ages = ages_at_serving(history)
    checks = PEER_CHECKS if stage.peer else CHECKS
    report.broken = violations(history, checks)
